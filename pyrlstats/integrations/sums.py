"""Raw sums, for trainers that add up or average dictionaries of scalars over micro-batches and ranks.

A mean of means weighs a micro-batch of ten tokens like one of ten thousand. Sums and counts pool exactly instead: give
the trainer :func:`sums_for_reduction` as metrics, let it add or average them as it does, and take the ratios once, at
the end, with :func:`from_sums`. Averaging divides every sum by the same number, which cancels.

What a sum cannot carry: quantiles (shares beyond fixed limits go instead) and, unless the trainer reduces ``_max`` and
``_min`` by suffix, extrema. Where you can hold a :class:`pyrlstats.SliceAccumulator` yourself, that is more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyrlstats import stats as _stats
from pyrlstats.quantiles import tail_mass
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import Array, State, namespace, power_of_two, scale_exponent

TAILS = (0.01, 0.1, 1.0)
_COUNTS = ("n_tokens", "n_finite", "n_nan", "n_pos_inf", "n_neg_inf", "n_zero")
_SUMS = ("x", "x2", "abs_x", "k3", "w_less_1", "w_less_1_squared", "clip_low", "clip_high")
_SMALLEST_MEAN_RATIO = 1e-4  # below it 1 + mean(w - 1) has lost its digits


def tail_name(limit: float) -> str:
    """``0_1`` for 0.1."""
    return f"{limit:g}".replace(".", "_")


def sums_for_reduction(
    stats: SliceStats, prefix: str = "", *, tails: Sequence[float] = TAILS, extrema: bool = False
) -> dict[str, Array]:
    """What adds up over micro-batches and ranks, as scalars.

    Args:
        stats: of one micro-batch.
        prefix: put before every key.
        tails: for each limit, the number of tokens with abs(x) beyond it goes along (nats; linear inside a bin).
        extrema: add ``_max`` and ``_min`` keys, for a trainer that reduces those by suffix (SkyRL). Never where it adds
            everything up (NeMo-RL, slime).

    Returns:
        ``{prefix + slice + "/" + field + "_sum": value}``, 0-d float64 on the state's device; an empty slice gives
        zeros (extrema: -inf and inf). The same keys whatever the data. Does not sync: :func:`as_floats` does, once.
        Sums of w = exp(x) are not scaled: inf where float64 overflows (x above 709, squares above 354).
    """
    state = stats.state
    columns = _sums(state)
    for limit in tails:
        # a share times its denominator; an empty slice has none
        share = tail_mass(state, float(limit))
        columns[f"tail_{tail_name(limit)}"] = namespace(share).nan_to_num(share, nan=0.0) * columns["n_finite"]
    sums = {
        f"{prefix}{name}/{field}_sum": column[index]
        for index, name in enumerate(state.names)
        for field, column in columns.items()
    }
    if extrema:
        highest, lowest = state.maximum("max_x"), -state.maximum("neg_min_x")
        for index, name in enumerate(state.names):
            sums[f"{prefix}{name}/log_ratio_max"] = highest[index]
            sums[f"{prefix}{name}/log_ratio_min"] = lowest[index]
    return sums


def as_floats(sums: Mapping[str, Array]) -> dict[str, float]:
    """The same as Python floats, for a trainer that takes no tensors: one copy to the host, which syncs on a GPU."""
    if not sums:
        return {}
    values = list(sums.values())
    stacked = namespace(values[0]).stack(values).tolist()
    return dict(zip(sums, stacked, strict=True))


def from_sums(sums: Mapping[str, Any], prefix: str = "", *, suffix: str = "", parts: float = 1.0) -> dict[str, float]:
    """The pooled statistics, from reduced sums: ratios are taken here and nowhere before.

    Args:
        sums: what the trainer made of :func:`sums_for_reduction`, among its other metrics, which are left alone:
            numbers or 0-d tensors, added up or averaged with equal weights.
        prefix: the prefix that was given there.
        suffix: what the trainer put after each key (prime-rl: ``"/mean"``).
        parts: for the counts of tokens: how many dictionaries an averaging trainer has averaged (micro-batches times
            ranks), 1 where it added them up. Ratios do not depend on it.

    Returns:
        ``{prefix + slice + "/" + statistic: value}`` with the names of :meth:`pyrlstats.SliceStats.to_dict`, and
        ``tail_mass_0_1`` for each limit; NaN for a slice without finite tokens. ESS and chi2 are NaN where the mean
        ratio is below 1e-4 or the weights overflow: sums of w - 1 hold no digits there, the state would.
    """
    found: dict[str, dict[str, float]] = {}
    result: dict[str, float] = {}
    for key, value in sums.items():
        if not (key.startswith(prefix) and key.endswith(suffix)):
            continue
        name, _, field = key[len(prefix) : len(key) - len(suffix)].rpartition("/")
        if name and field.endswith("_sum"):
            found.setdefault(name, {})[field.removesuffix("_sum")] = float(value)
        elif name and field in ("log_ratio_max", "log_ratio_min"):
            number = float(value)
            result[f"{prefix}{name}/{field}"] = number if math.isfinite(number) else math.nan
    for name, fields in found.items():
        if "n_finite" in fields:
            for statistic, value in _ratios(fields, parts).items():
                result[f"{prefix}{name}/{statistic}"] = value
    return result


def weight_moments(state: State) -> tuple[Array, Array]:
    """sum (w - 1) and sum (w - 1)^2 of every slice, unscaled: float64 (S,); nothing cancels at small x."""
    xp = namespace(state.buffer)
    scale = power_of_two(scale_exponent(state.maximum("max_x")))
    n_far = xp.asarray(state.count("n_far"), dtype=xp.float64)
    some = n_far > 0
    far_w = xp.where(some, scale * state.sum("far_w"), 0.0)
    far_w2 = xp.where(some, scale * (scale * state.sum("far_w2")), 0.0)
    first = state.sum("near_x") + state.sum("near_k3") + (far_w - n_far)
    second = state.sum("near_x2") + state.sum("near_excess") + (far_w2 - 2.0 * far_w + n_far)
    return first, second


def _sums(state: State) -> dict[str, Array]:
    xp = namespace(state.buffer)
    columns = {name: xp.asarray(getattr(_stats, name)(state), dtype=xp.float64) for name in _COUNTS}
    columns["x"] = state.sum("near_x") + state.sum("far_x")
    columns["x2"] = state.sum("near_x2") + state.sum("far_x2")
    columns["abs_x"] = state.sum("abs_x") + 0.0
    columns["k3"] = state.sum("near_k3") + state.sum("far_k3")
    columns["w_less_1"], columns["w_less_1_squared"] = weight_moments(state)
    for side in ("clip_low", "clip_high"):
        columns[side] = xp.asarray(state.count(side), dtype=xp.float64)
    return columns


def _ratios(sums: Mapping[str, float], parts: float) -> dict[str, float]:
    # a logger may have dropped what is infinite
    sums = {**dict.fromkeys((*_COUNTS, *_SUMS), math.nan), **sums}
    result: dict[str, float] = {name: sums[name] * parts for name in _COUNTS}
    n = sums["n_finite"] if sums["n_finite"] > 0.0 else math.nan
    mean = sums["x"] / n
    mean_weight, square = sums["w_less_1"] / n, sums["w_less_1_squared"] / n
    chi2 = math.nan
    if 1.0 + mean_weight > _SMALLEST_MEAN_RATIO and math.isfinite(square):
        chi2 = max(square - mean_weight**2, 0.0) / (1.0 + mean_weight) ** 2
    result |= {
        "zero_fraction": sums["n_zero"] / n,
        "log_ratio_mean": mean,
        "log_ratio_std": math.sqrt(max(sums["x2"] / n - mean**2, 0.0)) if n == n else math.nan,
        "log_ratio_abs_mean": sums["abs_x"] / n,
        "kl_k1": -mean,
        "kl_k2": sums["x2"] / n / 2.0,
        "kl_k3": sums["k3"] / n,
        "ratio_mean": 1.0 + mean_weight,
        "ratio_std": (1.0 + mean_weight) * math.sqrt(chi2),
        "ess": n * parts / (1.0 + chi2),
        "ess_fraction": 1.0 / (1.0 + chi2),
        "chi2": chi2,
        "renyi2": math.log1p(chi2),
        "clip_fraction_low": sums["clip_low"] / n,
        "clip_fraction_high": sums["clip_high"] / n,
        "clip_fraction": (sums["clip_low"] + sums["clip_high"]) / n,
    }
    for field, value in sums.items():
        if field.startswith("tail_"):
            result[f"tail_mass_{field.removeprefix('tail_')}"] = value / n
    return result
