"""The definition of everything pyrlstats computes, in NumPy float64, written to be read.

Slow on purpose: one slice at a time, every token selected by a boolean index, quantiles from a sort.
:func:`accumulate` defines the state that every backend must fill; :func:`statistics` defines every
statistic from the tokens themselves, without a state or a histogram in between.

Sign convention: samples come from the old (behaviour) policy, ``x = logp - old_logp`` in nats, and the
importance weight or ratio is ``w = exp(x)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import COUNTS, LOG2E, MAXIMA, NEAR_LIMIT, SUMS, Layout, clip_thresholds

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def log_ratio(logp: NDArray[Any], old_logp: NDArray[Any]) -> Float32:
    """x = logp - old_logp, as float32.

    Both are widened to float32 before the subtraction. If either is float64 the subtraction is in float64
    and rounded once. What overflows float32 is inf.
    """
    wide = np.float64 if np.float64 in (logp.dtype, old_logp.dtype) else np.float32
    with np.errstate(invalid="ignore", over="ignore"):
        return (logp.astype(wide) - old_logp.astype(wide)).astype(np.float32)


def k3(x: Float64) -> Float64:
    """expm1(x) - x, by its series sum_{j>=2} x^j / j! where the difference would cancel."""
    small = np.where(np.abs(x) < 1.0, x, 0.0)
    series = np.zeros_like(small)
    for j in range(20, 1, -1):
        series = small / j * (series + 1.0)
    series = small * series
    with np.errstate(over="ignore"):
        return np.where(np.abs(x) < 1.0, series, np.expm1(x) - x)


def accumulate(x: Float32, layout: Layout, clip: tuple[float, ...]) -> dict[str, Any]:
    """The state of one slice from the x of its tokens.

    Args:
        x: float32 (n,), log-ratios of the members of the slice, in nats; any value, NaN and inf too.
        layout: bins of the histogram.
        clip: (low, high) of the ratio clip.

    Returns:
        ``{"histogram": int64 (2P,), <every name of COUNTS, SUMS, MAXIMA>: scalar}``.
    """
    nan = np.isnan(x)
    finite = x[np.isfinite(x)]
    nonzero = finite[finite != 0]
    low, high = clip_thresholds(clip)
    bins = layout.bin_index(nonzero.view(np.int32))

    wide = finite.astype(np.float64)
    near = wide[np.abs(wide) < NEAR_LIMIT]
    far = wide[np.abs(wide) >= NEAR_LIMIT]
    max_x = wide.max() if wide.size else -np.inf
    exponent = np.floor(max_x * LOG2E) if wide.size else 0.0
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.exp2(far * LOG2E - exponent)
        state = {
            "histogram": np.bincount(bins, minlength=layout.n_bins).astype(np.int64),
            "n_tokens": x.size,
            "n_nan": np.count_nonzero(nan),
            "n_pos_inf": np.count_nonzero(x == np.inf),
            "n_neg_inf": np.count_nonzero(x == -np.inf),
            "n_zero": np.count_nonzero(finite == 0),
            "clip_low": np.count_nonzero(finite < np.float32(low)),
            "clip_high": np.count_nonzero(finite > np.float32(high)),
            "n_far": far.size,
            "n_out_of_range": 0,
            "near_x": np.sum(near),
            "near_x2": np.sum(near**2),
            "near_k3": np.sum(k3(near)),
            "near_excess": np.sum(k3(near) * (2.0 * near + k3(near))),
            "abs_x": np.sum(np.abs(wide)),
            "far_x": np.sum(far),
            "far_x2": np.sum(far**2),
            "far_k3": np.sum(k3(far)),
            "far_w": np.sum(scaled),
            "far_w2": np.sum(scaled**2),
            "max_x": max_x,
            "neg_min_x": -wide.min() if wide.size else -np.inf,
        }
    assert state.keys() == {"histogram", *COUNTS, *SUMS, *MAXIMA}
    return state


def quantile(values: Float64, q: float) -> float:
    """The inverted CDF: the order statistic of rank max(1, ceil(q n)); NaN where there is none."""
    if values.size == 0:
        return float("nan")
    rank = max(1, int(np.ceil(q * values.size)))
    return float(np.sort(values)[rank - 1])


def statistics(x: Float32, clip: tuple[float, float] = (0.2, 0.2)) -> dict[str, float]:
    """Every scalar statistic of one slice, straight from its tokens.

    Args:
        x: float32 (n,), log-ratios of the members of the slice, in nats.
        clip: (low, high) of the ratio clip.

    Returns:
        Name -> value. Counts are 0 and everything else NaN where no x is finite.
    """
    finite = x[np.isfinite(x)].astype(np.float64)
    n = finite.size
    values: dict[str, float] = {
        "n_tokens": x.size,
        "n_finite": n,
        "n_nan": int(np.count_nonzero(np.isnan(x))),
        "n_pos_inf": int(np.count_nonzero(x == np.inf)),
        "n_neg_inf": int(np.count_nonzero(x == -np.inf)),
        "n_zero": int(np.count_nonzero(finite == 0)),
    }
    if n == 0:
        names = _measures(np.zeros(1), clip)
        return values | dict.fromkeys(names, float("nan"))
    return values | _measures(finite, clip)


def _measures(finite: Float64, clip: tuple[float, float]) -> dict[str, float]:
    """Everything that is no count, of at least one finite x."""
    n = finite.size
    low, high = clip_thresholds(clip)
    shifted = np.exp(finite - finite.max())  # w / max w: the scale-free statistics need no more
    probability = shifted / shifted.sum()
    entropy = -np.sum(probability * np.log(np.where(probability > 0, probability, 1.0)))
    centred = shifted - shifted.mean()
    chi2 = np.mean(centred**2) / np.mean(shifted) ** 2
    if np.ptp(finite) < 1.0:  # w - 1 keeps the digits of x that w loses
        offset = np.expm1(finite - finite.mean())
        chi2 = np.mean((offset - offset.mean()) ** 2) / (1.0 + offset.mean()) ** 2
    with np.errstate(over="ignore"):
        ratio_mean = np.exp(finite.max()) * np.mean(shifted)
        return {
            "zero_fraction": np.mean(finite == 0),
            "log_ratio_mean": np.mean(finite),
            "log_ratio_std": np.std(finite),
            "log_ratio_min": finite.min(),
            "log_ratio_max": finite.max(),
            "log_ratio_abs_mean": np.mean(np.abs(finite)),
            "kl_k1": np.mean(-finite),
            "kl_k2": np.mean(finite**2) / 2.0,
            "kl_k3": np.mean(k3(finite)),
            "ratio_mean": ratio_mean,
            "ratio_std": ratio_mean * np.sqrt(chi2) if chi2 > 0 else 0.0,
            "ratio_min": np.exp(finite.min()),
            "ratio_max": np.exp(finite.max()),
            "ess": n / (1.0 + chi2),
            "ess_fraction": 1.0 / (1.0 + chi2),
            "max_weight_ess_fraction": np.mean(shifted),
            "perplexity_ess_fraction": np.exp(entropy) / n,
            "chi2": chi2,
            "renyi2": np.log1p(chi2),
            "clip_fraction_low": np.mean(finite < low),
            "clip_fraction_high": np.mean(finite > high),
            "clip_fraction": np.mean((finite < low) | (finite > high)),
        }
