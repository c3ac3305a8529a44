"""One signal, every detector calibrated to the same share of false alarms: delays, and the ROC.

The signal is the logarithm of a tail quantile under AR(1) noise. A score detector says how far a run has come; its
threshold is the quantile of the largest score of stationary runs. river's detectors decide by a parameter instead,
which is swept. All get the deviation from the same frozen baseline, in its standard deviations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.noise import ar1
from pyrlstats.monitor.drift import WEIGHT, Drift, fit

Floats = NDArray[np.float64]

STEPS, ONSET, RATE = 500, 100, 0.05
RAMPS = (0.002, 0.005, 0.01)
TARGETS = {0.002: 80, 0.005: 42, 0.01: 26}  # steps, median


def noise(rng: np.random.Generator, runs: int, rho: float = 0.5, sd: float = 0.1) -> Floats:
    """(R, STEPS)."""
    return np.stack(list(ar1(rng, (runs,), STEPS, rho, sd)), 1)


def ramp(rate: float) -> Floats:
    """(STEPS,): 0, then growth by ``rate`` a step from ONSET on, in logarithms."""
    return np.log1p(rate) * np.clip(np.arange(STEPS) - ONSET, 0, None)


def ewma(y: Floats, warmup: int = 100, weight: float = WEIGHT) -> Floats:
    """The monitor's score, (R, STEPS)."""
    drift = Drift(fit(y[:, :warmup].T), weight)
    scores = np.zeros_like(y)
    for step in range(warmup, y.shape[1]):
        scores[:, step] = drift.update(y[:, step])
    return scores


def _standardised(y: Floats, warmup: int = 100) -> Floats:
    baseline = fit(y[:, :warmup].T)
    z: Floats = (y - baseline.location[:, None]) / baseline.sd[:, None]
    z[:, :warmup] = 0.0
    return z


def shewhart(y: Floats) -> Floats:
    """The latest deviation alone."""
    return _standardised(y)


def step_to_step(y: Floats) -> Floats:
    """The change from one step to the next, as distances between consecutive steps measure."""
    return np.abs(np.diff(y, axis=1, prepend=y[:, :1]))


def slope(y: Floats, window: int = 100) -> Floats:
    """t value of a least-squares slope over the last steps, as if they were independent."""
    x = np.arange(window) - (window - 1) / 2.0
    scores = np.zeros_like(y)
    for step in range(window, y.shape[1]):
        part = y[:, step - window + 1 : step + 1]
        part = part - part.mean(1, keepdims=True)
        rate = part @ x / (x**2).sum()
        rest = part - rate[:, None] * x
        scores[:, step] = rate / np.sqrt((rest**2).sum(1) / (window - 2) / (x**2).sum())
    return scores


SCORES: dict[str, Callable[[Floats], Floats]] = {
    "pyrlstats, EWMA after 100 steps": ewma,
    "the same after 50 steps": lambda y: ewma(y, 50),
    "slope over 100 steps": slope,
    "latest value (Shewhart)": shewhart,
    "step to step": step_to_step,
}


def page_hinkley(threshold: float) -> Any:
    """river's, for increases; delta is the best of 0.1, 0.3, 0.5 and 0.8 here."""
    from river.drift import PageHinkley

    return PageHinkley(min_instances=1, delta=0.5, threshold=threshold, alpha=1.0, mode="up")


def adwin(delta: float) -> Any:
    """river's, checking at every step."""
    from river.drift import ADWIN

    return ADWIN(delta=delta, clock=1, grace_period=10)


RIVER: dict[str, tuple[Callable[[float], Any], tuple[float, ...]]] = {
    "river PageHinkley": (page_hinkley, (*map(float, range(6, 21)), 22.0, 26.0, 35.0)),
    "river ADWIN": (adwin, (0.5, 0.1, 0.02, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-5, 1e-7)),
}


def first_alarms(make: Callable[[float], Any], parameter: float, z: Floats, warmup: int = 100) -> NDArray[np.int64]:
    """Step of the first alarm of each run after the warm-up, (R,); -1 where there is none."""
    found = np.full(len(z), -1)
    for run, path in enumerate(z):
        detector = make(parameter)
        for step in range(warmup, len(path)):
            detector.update(float(path[step]))
            if detector.drift_detected:
                found[run] = step
                break
    return found


def outcome(found: NDArray[np.int64]) -> dict[str, Any]:
    """Of runs that grow from ONSET on: share found, and the median delay; those before it are left out."""
    after = found[(found < 0) | (found >= ONSET)]
    delay = np.where(after >= 0, (after - ONSET).astype(np.float64), np.inf)
    middle = float(np.median(delay))
    return {"found": float((after >= 0).mean()), "delay": middle if np.isfinite(middle) else None}


def _first(scores: Floats, threshold: float) -> NDArray[np.int64]:
    hit = scores > threshold
    return np.where(hit.any(1), hit.argmax(1), -1)


def compare(runs: int, river_runs: int, seed: int = 0) -> list[dict[str, Any]]:
    """Every detector at RATE false alarms in STEPS steps: outcome for each ramp."""
    rng = np.random.default_rng(seed)
    null, other = noise(rng, runs), noise(rng, runs)
    rows = []
    for name, score in SCORES.items():
        threshold = float(np.quantile(score(null).max(1), 1.0 - RATE))
        row: dict[str, Any] = {"detector": name, "runs": runs, "threshold": threshold, "false alarms": RATE}
        rows.append(row | {str(rate): outcome(_first(score(other + ramp(rate)), threshold)) for rate in RAMPS})
    for name, (make, parameters) in RIVER.items():
        null_z = _standardised(null[:river_runs])
        rates = [float((first_alarms(make, parameter, null_z) >= 0).mean()) for parameter in parameters]
        chosen = next((at for at, rate in enumerate(rates) if rate <= RATE), len(rates) - 1)
        row = {"detector": name, "runs": river_runs, "threshold": parameters[chosen], "false alarms": rates[chosen]}
        for rate in RAMPS:
            z = _standardised(other[:river_runs] + ramp(rate))
            row[str(rate)] = outcome(first_alarms(make, parameters[chosen], z))
        rows.append(row)
    return rows


def roc(runs: int, rate: float = 0.005, within: int = 50, seed: int = 2) -> dict[str, list[tuple[float, float]]]:
    """(share of false alarms in STEPS steps, share found ``within`` steps of the onset) over the thresholds."""
    rng = np.random.default_rng(seed)
    null, other = noise(rng, runs), noise(rng, runs) + ramp(rate)
    curves = {}
    for name, score in SCORES.items():
        largest, reached = score(null).max(1), score(other)[:, ONSET : ONSET + within].max(1)
        before = score(other)[:, :ONSET].max(1)
        levels = np.quantile(largest, np.linspace(1.0, 0.0, 41))
        curves[name] = [
            (float((largest > level).mean()), float(((reached > level) & (before <= level)).mean())) for level in levels
        ]
    for name, (make, parameters) in RIVER.items():
        points = []
        few = runs // 4
        for parameter in parameters:
            alarmed = first_alarms(make, parameter, _standardised(null[:few])) >= 0
            found = first_alarms(make, parameter, _standardised(other[:few]))
            points.append((float(alarmed.mean()), float(((found >= ONSET) & (found < ONSET + within)).mean())))
        curves[name] = sorted(points)
    return curves
