"""All signals of a run at once, at the family-wise rates the monitor is set to: false alarms, and delays.

Signals are simulated as logarithms, many runs at once, and go through the code the monitor runs: ``fit``, ``Drift``,
``Limits``, ``level``, ``theil_sen``. They are independent of each other, which is the worst case for a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.detection.noise import ar1
from pyrlstats.monitor.drift import LEAST_SD, Drift, fit, slope_se, theil_sen
from pyrlstats.monitor.growth import LEAST_WINDOW, LEVEL, RISING, STOP_GROWTH, WINDOW, Limits, level, told
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import SIGNALS

Floats = NDArray[np.float64]
Stream = Iterator[Floats]

SLICES = 3
K = SLICES * len(SIGNALS)
OPTIONAL = np.tile([signal.optional for signal in SIGNALS], SLICES)  # there only in runs that ask for them
WARMUP = Settings().baseline
_STOP = np.tile(STOP_GROWTH, SLICES)


class Found(NamedTuple):
    """Step of the first alarm of each run, (R,); -1 where there was none."""

    warning: NDArray[np.int64]
    stop: NDArray[np.int64]


def watch(stream: Stream, settings: Settings, least_sd: ArrayLike = LEAST_SD) -> Found:
    """What the growth detectors say of runs whose observations (R, K) come one by one."""
    warmup = np.array([next(stream) for _ in range(settings.baseline)])
    baseline = fit(warmup, least_sd)
    drift = Drift(baseline)
    limits = Limits.of(baseline, settings.false_warnings, settings.false_stops)
    recent = np.zeros((WINDOW, *baseline.location.shape))
    recent[: min(WINDOW, len(warmup))] = warmup[-WINDOW:]
    since = np.full(baseline.location.shape, settings.baseline)
    warned, stopped = (np.full(len(baseline.location), -1) for _ in range(2))
    for step, values in enumerate(stream, settings.baseline):
        recent[step % WINDOW] = values
        drift.update(values)
        since[drift.deviation <= 0.0] = step
        score = drift.score()
        last = np.arange(step - LEVEL + 1, step + 1) % WINDOW
        passed = (score > limits.warning) & (warned < 0)[:, None]
        run = np.flatnonzero(passed.any(1))
        if len(run):
            grew = level(recent[last[:, None], run]) - baseline.location[run]
            warned[run[(passed[run] & told(grew)).any(1)]] = step
        run, column = np.nonzero((score > limits.stop) & (stopped < 0)[:, None])
        grew = level(recent[last[:, None], run, column]) - baseline.location[run, column]
        for at in np.flatnonzero(grew > _STOP[column]):
            one = int(run[at]), int(column[at])
            n = int(np.clip(step - since[one] + 1, LEAST_WINDOW, WINDOW))
            steps = np.arange(step - n + 1, step + 1)
            path = recent[(steps % WINDOW, *one)]
            error = slope_se(steps, path, float(baseline.sd[one]), float(baseline.rho[one]))
            if theil_sen(steps, path) > RISING * error:
                stopped[one[0]] = step
    return Found(warned, stopped)


def without_optional(stream: Stream) -> Stream:
    """The signals that every run has: 30 are watched, not 33."""
    for values in stream:
        values[..., OPTIONAL] = np.nan
        yield values


Kind = Callable[[np.random.Generator, int, int], Stream]


def _ar1(rho: float, freedom: float | None = None) -> Kind:
    return lambda rng, runs, steps: ar1(rng, (runs, K), steps, rho, 0.1, freedom)


def _mixed(rng: np.random.Generator, runs: int, steps: int) -> Stream:
    return ar1(rng, (runs, K), steps, rng.uniform(0.0, 0.9, (runs, K)), rng.uniform(0.02, 0.5, (runs, K)))


def _schedule(rng: np.random.Generator, runs: int, steps: int) -> Stream:
    """A cosine schedule: everything shrinks with the learning rate, to a fifth."""
    for step, values in enumerate(ar1(rng, (runs, K), steps)):
        yield values + np.log(0.2 + 0.8 * 0.5 * (1.0 + np.cos(np.pi * step / steps)))


def _spikes(rng: np.random.Generator, runs: int, steps: int) -> Stream:
    """In one step of a hundred all signals of a slice are ten times as large."""
    for values in ar1(rng, (runs, K), steps):
        hit = (rng.random((runs, SLICES)) < 0.01).repeat(len(SIGNALS), 1)
        yield values + np.log(10.0) * hit


def _resumed(rng: np.random.Generator, runs: int, steps: int) -> Stream:
    """The process starts anew every 500 steps: other noise, and a first step with a fresh, small update."""
    for start in range(0, steps, 500):
        for step, values in enumerate(ar1(rng, (runs, K), min(500, steps - start))):
            yield values - (np.log(2.0) if start and step == 0 else 0.0)


def _cycles(rng: np.random.Generator, runs: int, steps: int) -> Stream:
    """Samples are reused for 8 steps: everything grows by half over them, and falls back."""
    for step, values in enumerate(ar1(rng, (runs, K), steps)):
        yield values + 0.4 * (step % 8) / 7.0


STATIONARY: dict[str, Kind] = {
    "independent": _ar1(0.0),
    "AR(1), rho 0.5": _ar1(0.5),
    "AR(1), rho 0.8": _ar1(0.8),
    "AR(1), rho 0.5, Student t(5)": _ar1(0.5, 5.0),
    "rho from 0 to 0.9, sd from 2 % to 50 %": _mixed,
    "cosine schedule": _schedule,
    "one-off spikes, tenfold": _spikes,
    "resumed every 500 steps": _resumed,
    "cycles of 8 steps": _cycles,
}


def false_alarms(runs: int, steps: int, seed: int = 0, batch: int = 250) -> list[dict[str, Any]]:
    """Share of stationary runs with any warning, and with a stop."""
    rows = []
    for name, kind in STATIONARY.items():
        rng = np.random.default_rng(seed)
        parts = [watch(without_optional(kind(rng, batch, steps)), Settings()) for _ in range(runs // batch)]
        warned, stopped = (np.concatenate(column) for column in zip(*parts, strict=True))
        rows.append(
            {
                "noise": name,
                "runs": runs,
                "steps": steps,
                "warnings": float((warned >= 0).mean()),
                "stops": float((stopped >= 0).mean()),
            }
        )
    return rows


GROWTHS: dict[str, Callable[[int], float]] = {
    "ramp of 0.2 % a step": lambda age: age * np.log1p(0.002),
    "ramp of 0.5 % a step": lambda age: age * np.log1p(0.005),
    "ramp of 1 % a step": lambda age: age * np.log1p(0.01),
    "jump of 65 %": lambda age: 0.5,
}


def delays(runs: int, steps: int = 900, onset: int = 300, seed: int = 1) -> list[dict[str, Any]]:
    """Steps from the onset to the first warning and the stop where one signal of one slice grows, AR(1) rho 0.5."""
    rows = []
    for name, grows in GROWTHS.items():
        rng = np.random.default_rng(seed)

        def stream(
            rng: np.random.Generator = rng, grows: Callable[[int], float] = grows
        ) -> Stream:  # bound here: the loop moves on
            for step, values in enumerate(ar1(rng, (runs, K), steps)):
                values[:, 0] += grows(step - onset) if step >= onset else 0.0
                yield values

        found = watch(without_optional(stream()), Settings())
        early = (found.warning >= 0) & (found.warning < onset)
        rows.append(
            {"growth": name, "runs": runs, "signals": int((~OPTIONAL).sum()), "before the onset": float(early.mean())}
            | {
                key: value
                for label, at in (("warning", found.warning), ("stop", found.stop))
                for key, value in (
                    (f"{label} found", float((at[~early] >= onset).mean())),
                    (f"{label} delay p50", _quantile(at[~early], onset, 0.5)),
                    (f"{label} delay p90", _quantile(at[~early], onset, 0.9)),
                )
            }
        )
    return rows


def _quantile(at: NDArray[np.int64], onset: int, q: float) -> float | None:
    """Of the delay, where what was not found counts as never."""
    delay = np.where(at >= onset, (at - onset).astype(np.float64), np.inf)
    value = float(np.quantile(delay, q, method="higher"))
    return value if np.isfinite(value) else None
