"""Growth of a few tokens of one slice, hidden in flat global means: token data through the real engine.

Many runs are counted in one call, each with three slices of its own. Tokens are Student t(5) of scale 0.01, times a
level of the slice that wanders from step to step (AR(1), rho 0.5, 10 %). From the onset on a share of all tokens, all
of them in post_tool, grows by 2 % a step, up to twentyfold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection import family, single, toolkit
from benchmarks.detection.noise import ar1
from pyrlstats import quantiles, slice_stats, stats
from pyrlstats.compare import kolmogorov_smirnov
from pyrlstats.monitor.drift import LEAST_SD, Drift, fit
from pyrlstats.monitor.frozen import pooled
from pyrlstats.monitor.growth import LEVEL, Limits, level, told
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import KEYS, SIGNALS, Reference, tail_counts, tail_to_mean
from pyrlstats.state import State

Floats = NDArray[np.float64]

NAMES = ("text", "pre_tool", "post_tool")
SHARES = np.array([0.5, 0.3, 0.2])
TOKENS = 20_000  # a run and step
STEPS, ONSET, WARMUP = 400, 150, 100
RATE, MOST = 0.02, 20.0
WITHIN = 100  # steps after the onset
_TO_MEAN = 2 * len(SIGNALS) + KEYS.index("tail_to_mean")


class Runs(NamedTuple):
    """R runs of STEPS steps.

    Attributes:
        values: of the watched signals, (STEPS, R, 3 x len(SIGNALS)).
        least_sd: the noise of counting, (R, 3 x len(SIGNALS)).
        kl: mean KL k3 over all tokens, (R, STEPS).
        ks, ks_post: KS distance to the step before, of all tokens and of post_tool, (R, STEPS).
        reward, entropy, length: as a trainer would log them; they know of nothing, (R, STEPS).
    """

    values: Floats
    least_sd: Floats
    kl: Floats
    ks: Floats
    ks_post: Floats
    reward: Floats
    entropy: Floats
    length: Floats


def states(runs: int, share: float, seed: int) -> Iterator[State]:
    """The state of every step, of 3 x R slices."""
    rng = np.random.default_rng(seed)
    names = [f"{run}.{name}" for run in range(runs) for name in NAMES]
    pool = np.sqrt(5.0 / rng.chisquare(5, 4_000_003)).astype(np.float32)
    ids = rng.choice(len(NAMES), (runs, TOKENS), p=SHARES).astype(np.int32)
    slices = ids + 3 * np.arange(runs, dtype=np.int32)[:, None]
    old = np.zeros(ids.shape, np.float32)
    for step, own in enumerate(ar1(rng, (runs, len(NAMES)), STEPS)):
        start = rng.integers(len(pool) - ids.size)
        x = rng.standard_normal(ids.shape, np.float32) * pool[start : start + ids.size].reshape(ids.shape)
        x *= (0.01 * np.exp(own)).astype(np.float32).ravel()[slices]
        if step > ONSET and share:
            grows = (ids == 2) & (rng.random(ids.shape, np.float32) < share / SHARES[2])
            x[grows] *= np.float32(min(MOST, (1.0 + RATE) ** (step - ONSET)))
        yield slice_stats(x, old, slice_ids=slices, names=names).state


def signal_values(state: State, reference: Reference) -> Floats:
    """What :func:`pyrlstats.monitor.signals.values_of` gives, for many slices at once: (S, len(SIGNALS))."""
    with np.errstate(all="ignore"):
        n = state.n_finite().astype(np.float64)
        shares = {
            "tail_mass": tail_counts(state, reference) / n,
            "clip_fraction": stats.clip_fraction(state),
            "zero_fraction": stats.zero_fraction(state),
            "nonzero_fraction": 1.0 - stats.zero_fraction(state),
        }
        tails = quantiles.abs_quantile(state, [0.999, 0.9999])
        logs = {
            "abs_log_ratio_p99_9": tails[:, 0],
            "abs_log_ratio_p99_99": tails[:, 1],
            "tail_to_mean": tail_to_mean(state, reference),
            "chi2": stats.chi2(state),
            "kl_k3": stats.kl_k3(state),
            "ks_to_baseline": kolmogorov_smirnov(state, reference.state).estimate,
        }
        columns = {key: np.log((value * n + 0.5) / (n + 1.0)) for key, value in shares.items()}
        columns |= {key: np.log(value) for key, value in logs.items()}
        columns["pareto_k"] = np.full(len(n), np.nan)  # nobody asked for it
    return np.stack([columns[key] for key in KEYS], 1)


def simulate(runs: int, share: float, seed: int) -> Runs:
    """Runs in which ``share`` of the tokens grows from ONSET on."""
    stream = states(runs, share, seed)
    warmup = [next(stream) for _ in range(WARMUP)]
    reference = Reference(pooled(warmup))
    values, kl, ks, ks_post = [], [], [], []
    before: tuple[Floats, Floats] | None = None
    for state in (*warmup, *stream):
        values.append(signal_values(state, reference).reshape(runs, -1))
        n = state.n_finite().reshape(runs, 3).astype(np.float64)
        kl.append((stats.kl_k3(state).reshape(runs, 3) * n).sum(1) / n.sum(1))
        histogram = state.histogram.reshape(runs, 3, -1)
        shares = (_shares(histogram.sum(1)), _shares(histogram[:, 2]))
        before = before or shares
        ks.append(np.abs(shares[0] - before[0]).max(1))
        ks_post.append(np.abs(shares[1] - before[1]).max(1))
        before = shares
    rng = np.random.default_rng([seed, 1])
    scalars = [np.stack(list(ar1(rng, (runs,), STEPS, 0.5, sd)), 1) for sd in (0.02, 0.05, 3.0)]
    return Runs(
        np.array(values),
        _counting_noise(np.array(values[:WARMUP]), warmup),
        *(np.stack(column, 1) for column in (kl, ks, ks_post)),
        0.5 + scalars[0],
        1.8 + scalars[1],
        120.0 + scalars[2],
    )


def _shares(counts: NDArray[np.int64]) -> Floats:
    through = counts.cumsum(-1)
    result: Floats = through / np.maximum(through[:, -1:], 1)
    return result


def _counting_noise(values: Floats, warmup: list[State]) -> Floats:
    """As the monitor's ``least_noise``, from log((k + 1/2) / (n + 1)) of the warm-up; at least LEAST_SD."""
    n = (
        np.array([state.n_finite() for state in warmup], np.float64)
        .reshape(*values.shape[:2], 3)
        .repeat(len(SIGNALS), 2)
    )
    count = np.exp(values) * (n + 1.0) - 0.5
    noise = 1.0 / np.sqrt(np.maximum(count.mean(0), 0.0) + 0.5)
    is_count = np.tile([signal.count for signal in SIGNALS], 3)
    return np.where(is_count, np.maximum(noise, LEAST_SD), LEAST_SD)


def excess(runs: Runs, columns: slice | list[int] = slice(None)) -> Floats:
    """The monitor's largest score over its threshold, (R, STEPS), among some signals that have grown enough to be told:
    with all it warns above 1."""
    drift = Drift(fit(runs.values[:WARMUP], runs.least_sd))
    limits = Limits.of(drift.baseline, Settings().false_warnings, Settings().false_stops)
    paths = np.zeros(runs.kl.shape)
    for step in range(WARMUP, STEPS):
        score = drift.update(runs.values[step]) / limits.warning
        grew = level(runs.values[step - LEVEL + 1 : step + 1]) - drift.baseline.location
        paths[:, step] = np.where(told(grew), score, 0.0)[:, columns].max(1)
    return paths


def scores(runs: Runs) -> dict[str, Floats]:
    """How far each detector is at each step, (R, STEPS)."""
    post_tail = runs.values[:, :, 2 * len(SIGNALS)].T
    kl = runs.kl / np.median(runs.kl[:, :WARMUP], 1, keepdims=True)
    entropy = np.abs(runs.entropy - np.median(runs.entropy[:, :WARMUP], 1, keepdims=True))
    paths = {
        "pyrlstats, all slices and signals": excess(runs),
        "pyrlstats, told to look at p99.9 of post_tool alone": excess(runs, [2 * len(SIGNALS)]),
        "pyrlstats, told to look at tail_to_mean of post_tool alone": excess(runs, [_TO_MEAN]),
        "EWMA of the global mean KL": single.ewma(np.log(runs.kl)),
        "fixed threshold on the global mean KL": kl,
        "fixed threshold on entropy": entropy,
        "KS step to step, all tokens": runs.ks,
        "KS step to step, post_tool": runs.ks_post,
        "latest p99.9 of post_tool (Shewhart)": single.shewhart(post_tail),
    }
    for path in paths.values():
        path[:, :WARMUP] = 0.0
    return paths


def compare(runs: int, shares: tuple[float, ...] = (0.001, 0.003, 0.01), seed: int = 0) -> dict[str, Any]:
    """Of each detector at 5 % false alarms in STEPS steps: share found within WITHIN steps, and the median delay."""
    null = simulate(runs, 0.0, seed)
    null_scores = scores(null)
    thresholds = {name: float(np.quantile(path.max(1), 0.95)) for name, path in null_scores.items()}
    river = _river_parameters(null)
    grown = {share: simulate(runs, share, seed + 1 + index) for index, share in enumerate(shares)}
    rows = []
    for name, threshold in thresholds.items():
        row: dict[str, Any] = {"detector": name, "threshold": threshold}
        for share, other in grown.items():
            row[str(share)] = _outcome(single._first(scores(other)[name], threshold))
        rows.append(row)
    for name, (make, parameter, signal) in river.items():
        row = {"detector": name, "threshold": parameter}
        for share, other in grown.items():
            row[str(share)] = _outcome(single.first_alarms(make, parameter, single._standardised(_path(other, signal))))
        rows.append(row)
    settings = Settings()
    monitor = {"0": _monitor(family.watch(iter(null.values), settings, null.least_sd), null)}
    monitor |= {
        str(share): _monitor(family.watch(iter(other.values), settings, other.least_sd), other)
        for share, other in grown.items()
    }
    return {
        "runs": runs,
        "tokens": TOKENS,
        "at equal false alarms": rows,
        "monitor": monitor,
        "toolkit": {str(share): _toolkit(one) for share, one in {0.0: null, **grown}.items()},
        "roc": {name: _roc(null_scores[name], scores(grown[shares[1]])[name]) for name in thresholds},
        "roc share": shares[1],
    }


def _path(runs: Runs, signal: str) -> Floats:
    return np.log(runs.kl) if signal == "global KL" else runs.values[:, :, 2 * len(SIGNALS)].T


def _river_parameters(null: Runs) -> dict[str, tuple[Any, float, str]]:
    """The parameter of each river detector that alarms most often without passing 5 %."""
    chosen = {}
    for name, (make, parameters) in single.RIVER.items():
        for signal in ("global KL", "p99.9 of post_tool"):
            z = single._standardised(_path(null, signal))
            rates = ((single.first_alarms(make, parameter, z) >= 0).mean() for parameter in parameters)
            fits = (parameter for parameter, rate in zip(parameters, rates, strict=True) if rate <= 0.05)
            chosen[f"{name} on {signal}"] = (make, next(fits, parameters[-1]), signal)
    return chosen


def _outcome(found: NDArray[np.int64]) -> dict[str, Any]:
    after = found[(found < 0) | (found >= ONSET)]
    delay = np.where(after >= 0, (after - ONSET).astype(np.float64), np.inf)
    middle = float(np.median(delay)) if len(after) else np.inf
    return {"found": float((delay <= WITHIN).mean()), "delay": middle if np.isfinite(middle) else None}


def _monitor(found: family.Found, runs: Runs) -> dict[str, Any]:
    """As it is set, and what the global mean KL showed at the first warning."""
    at = found.warning
    hit = at >= ONSET
    before = np.median(runs.kl[:, :WARMUP], 1)
    then = np.array([np.median(runs.kl[run, max(0, at[run] - 9) : at[run] + 1]) for run in range(len(at))])
    return {
        "warned before the onset": float(((at >= 0) & (at < ONSET)).mean()),
        "warned": float(hit.mean()),
        "delay p50": float(np.median(at[hit] - ONSET)) if hit.any() else None,
        "delay p90": float(np.quantile(at[hit] - ONSET, 0.9)) if hit.any() else None,
        "stopped": float((found.stop >= 0).mean()),
        "global KL over its baseline at the warning": float(np.median((then / before)[hit])) if hit.any() else None,
        "growth of the tokens at the warning": float((1.0 + RATE) ** np.median(at[hit] - ONSET)) if hit.any() else None,
    }


def _toolkit(runs: Runs) -> dict[str, Any]:
    stops = [
        toolkit.first_stop(
            {"kl": runs.kl[run], "reward": runs.reward[run], "entropy": runs.entropy[run], "length": runs.length[run]}
        )
        for run in range(len(runs.kl))
    ]
    told = [stop for stop in stops if stop is not None]
    return {
        "stopped": len(told) / len(stops),
        "before the onset": sum(step < ONSET for step, _ in told) / len(stops),
        "step p50": float(np.median([step for step, _ in told])) if told else None,
        "checks": sorted({check for _, check in told}),
    }


def _roc(null: Floats, other: Floats) -> list[tuple[float, float]]:
    largest, before = null.max(1), other[:, :ONSET].max(1)
    reached = other[:, ONSET : ONSET + WITHIN].max(1)
    levels = np.unique(np.concatenate((largest, [np.inf, -np.inf])))[::-1]
    return [
        (float((largest >= level).mean()), float(((reached >= level) & (before < level)).mean())) for level in levels
    ]
