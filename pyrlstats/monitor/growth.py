"""Growth of a slice against its baseline, and that of the others beside it: what moved, how fast, and what did not.

A slice is in trouble when the score of any of its signals passes the threshold of its false-alarm rate, and the signal
that must grow beside it, where there is one, has grown too. It is a reason to stop when one of them passes the
threshold of the stricter rate, is as many times its baseline as Signal.stop says, and still rises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats import quantiles
from pyrlstats.distances import tail_ratio
from pyrlstats.monitor.alerts import Alert, Level, plain
from pyrlstats.monitor.drift import Baseline, Drift, slope_se, theil_sen
from pyrlstats.monitor.episodes import Finding
from pyrlstats.monitor.signals import BESIDE, SIGNALS, Reference
from pyrlstats.monitor.thresholds import threshold
from pyrlstats.state import State

Floats = NDArray[np.float64]

WINDOW, LEAST_WINDOW = 100, 30  # observed steps of the slope
LEVEL = 10  # observed steps of the size of a growth
LEAST_GROWTH = math.log(1.1)  # less is not worth a word, nor is 0.1 of Pareto k
STOP_GROWTH = np.log([signal.stop for signal in SIGNALS])
RISING = 2.0  # standard errors of the slope
FLAT = 3.0  # a score below it is noise
_LEVELS = (0.5, 0.99, 0.999, 0.9999)
_TAIL = 0.999


@dataclass(frozen=True)
class Limits:
    """Scores that alarm, (..., K) each: chosen so that all signals together alarm as rarely as wanted."""

    warning: Floats
    stop: Floats

    @classmethod
    def of(cls, baseline: Baseline, false_warnings: float, false_stops: float) -> Limits:
        """The rates are shared out evenly over the watched signals (Bonferroni).

        Args:
            baseline: (..., K); the family is the last axis.
            false_warnings, false_stops: chance that a stationary run of 2,000 steps has any.
        """
        family = np.maximum(baseline.watched.sum(-1, keepdims=True), 1)
        warning = threshold(false_warnings / family, baseline.n, baseline.rho)
        return cls(warning, np.maximum(threshold(false_stops / family, baseline.n, baseline.rho), warning))


def level(values: Floats) -> Floats:
    """Median of the last LEVEL observations (n, ...), (...): the EWMA, whose deviations are clipped, tells that
    something grew, not by how much. NaN where there is none."""
    last = values[-LEVEL:]
    empty = ~np.isfinite(last).any(0)
    return np.asarray(np.where(empty, np.nan, np.nanmedian(np.where(empty, 0.0, last), 0)))


def told(grew: Floats) -> NDArray[np.bool_]:
    """Whether growth is worth a word, of each signal (..., S x len(SIGNALS)): its own, and of the one beside it."""
    grown = (grew > LEAST_GROWTH).reshape(*grew.shape[:-1], grew.shape[-1] // len(SIGNALS), len(SIGNALS))
    result: NDArray[np.bool_] = (grown & grown[..., BESIDE]).reshape(grew.shape)
    return result


@dataclass(frozen=True)
class Scene:
    """What a finding is made from, at one step.

    Attributes:
        names: S slices.
        drift: of S x len(SIGNALS) signals, one row.
        limits: theirs.
        steps, values: the last WINDOW steps, (W,) and (W, S x len(SIGNALS)).
        since: step at which each signal began to grow, (S x len(SIGNALS),).
        reference, recent: the baseline's state, and that of the last steps.
        context: verdicts on what is not watched, such as {"global KL": "flat", "reward": "rising"}.
    """

    names: tuple[str, ...]
    drift: Drift
    limits: Limits
    steps: NDArray[np.int64]
    values: Floats
    since: NDArray[np.int64]
    reference: Reference
    recent: State
    context: Mapping[str, str]


def slope(scene: Scene, column: int) -> tuple[float, float]:
    """Slope of a signal since it began to grow and its standard error, per step.

    Over the steps since then, at least LEAST_WINDOW and at most WINDOW: flat steps before it would dilute the slope.
    """
    n = max(int((scene.steps >= scene.since[column]).sum()), LEAST_WINDOW)
    baseline, steps, values = scene.drift.baseline, scene.steps[-n:], scene.values[-n:, column]
    error = slope_se(steps, values, float(baseline.sd[column]), float(baseline.rho[column]))
    return theil_sen(steps, values), error


def growth(scene: Scene) -> Iterator[Finding]:
    """A finding for every slice that has grown."""
    shape = (len(scene.names), len(SIGNALS))
    score, limits = scene.drift.score(), scene.limits
    grew = level(scene.values) - scene.drift.baseline.location
    begun = ((score > limits.warning) & told(grew)).reshape(shape)
    goes_on: NDArray[np.bool_] = np.any((score > 0.5 * limits.warning).reshape(shape), axis=1)
    for row, name in enumerate(scene.names):
        if begun[row].any():
            scores = np.where(begun[row], score.reshape(shape)[row], -np.inf)
            yield Finding(f"growth:{name}", _alert(scene, row, scores, grew.reshape(shape)[row]))
        elif goes_on[row]:
            yield Finding(f"growth:{name}", None)


def _alert(scene: Scene, row: int, scores: Floats, grew: Floats) -> Alert:
    """Of a slice whose signals have these scores (-inf where there is no trouble) and have grown by so much."""
    name, width = scene.names[row], len(SIGNALS)
    strongest = int(np.argmax(scores))
    severity: Level = "warning"
    stop = (scores > scene.limits.stop[row * width :][:width]) & (grew > STOP_GROWTH)
    for column in np.argsort(-scores):
        if stop[column]:
            rate, error = slope(scene, row * width + int(column))
            if rate > RISING * error:
                severity, strongest = "stop", int(column)
                break
    signal = SIGNALS[strongest]
    index = row * width + strongest
    rate, error = slope(scene, index)
    since = int(scene.since[index])
    rising = rate > RISING * error
    doubling = math.log(2.0) / rate if rising and not signal.linear else math.nan
    if signal.linear:
        before = float(scene.drift.baseline.location[index])
        what = f"{signal.label} is {before + grew[strongest]:.2f}{' and rising' if rising else ''}, {before:.2f} before"
    elif rising:
        what = f"{signal.label} doubles every {doubling:.0f} steps"
    else:
        what = f"{signal.label} is {math.exp(grew[strongest]):.2f} times its baseline"
    message = f"{name}: {what} (since about step {since}); {_elsewhere(scene, row, strongest)}"
    evidence = {
        "since_step": since,
        **_size(strongest, grew),
        "score": float(scores[strongest]),
        "threshold": float(scene.limits.warning[index]),
        "slope_per_step": rate,
        "slope_se": error,
        "doubling_steps": doubling,
        "signals": _signals(scene, row, grew),
        "slices": {other: _slice(scene, index) for index, other in enumerate(scene.names)},
        "context": dict(scene.context),
    }
    step = int(scene.steps[-1])
    return Alert(step, "growth", severity, f"{name}/{signal.key}", message, signal.link, name, plain(evidence))


def _elsewhere(scene: Scene, row: int, column: int) -> str:
    """What the same signal does in the other slices, and the means: ``text flat, global KL flat``."""
    verdicts = {
        name: verdict(scene.drift, other * len(SIGNALS) + column)
        for other, name in enumerate(scene.names)
        if other != row
    }
    grouped: dict[str, list[str]] = {}
    for name, said in {**verdicts, **scene.context}.items():
        grouped.setdefault(said, []).append(name)
    return (
        "; ".join(f"{', '.join(names)} {said}" for said, names in sorted(grouped.items())) or "nothing else is watched"
    )


def verdict(drift: Drift, index: int) -> str:
    """What a signal does: "flat", "rising" or "falling" (its EWMA is 3 of its own noise away), or "not watched"."""
    if not drift.baseline.watched[index]:
        return "not watched"
    score = drift.score()[index]
    return "rising" if score > FLAT else "falling" if score < -FLAT else "flat"


def _size(column: int, grew: Floats) -> dict[str, float]:
    """How many times its baseline a signal is; of a linear one, what was added to it."""
    return {"difference": float(grew[column])} if SIGNALS[column].linear else {"growth": math.exp(grew[column])}


def _signals(scene: Scene, row: int, grew: Floats) -> dict[str, dict[str, float]]:
    """Every watched signal of the slice: how far from its baseline it is, and the score."""
    result = {}
    score = scene.drift.score()
    for column, signal in enumerate(SIGNALS):
        index = row * len(SIGNALS) + column
        if scene.drift.baseline.watched[index]:
            result[signal.key] = {
                **_size(column, grew),
                "score": float(score[index]),
                "threshold": float(scene.limits.warning[index]),
            }
    return result


def _slice(scene: Scene, row: int) -> dict[str, Any]:
    """Quantiles of abs(x) of a slice then and now, and how many times more tokens lie in the tail."""
    with np.errstate(all="ignore"):
        then = quantiles.abs_quantile(scene.reference.state, list(_LEVELS))[row]
        now = quantiles.abs_quantile(scene.recent, list(_LEVELS))[row]
        ratio = tail_ratio(scene.recent, scene.reference.state, _TAIL)
    names = [f"p{100 * level:g}" for level in _LEVELS]
    return {
        "then": dict(zip(names, map(float, then), strict=True)),
        "now": dict(zip(names, map(float, now), strict=True)),
        "tail_ratio": float(ratio.ratio[row]),
        "tail_log_ratio": float(ratio.log_ratio[row]),
        "tail_log_ratio_se": float(ratio.log_se[row]),
        "tail_threshold": float(ratio.threshold[row]),
        "tail_tokens": int(ratio.count[row]),
    }
