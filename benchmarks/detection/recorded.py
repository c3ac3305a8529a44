"""Recorded runs: what the monitor says of them, and their noise in place of the assumed one.

Noise is what is left of the watched signals of a healthy run when a running median over 51 steps is taken off; blocks
of 40 steps of it, all signals together, are drawn with replacement into runs of any length (block bootstrap). So the
run's own distribution, autocorrelation and dependence between signals are kept, and its slow learning is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection import family
from pyrlstats import Monitor
from pyrlstats.monitor import RunReader
from pyrlstats.monitor.drift import LEAST_SD, fit
from pyrlstats.monitor.frozen import global_kl, pooled
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import KEYS, SIGNALS, Reference, against, least_noise, values_of

Floats = NDArray[np.float64]

MEDIAN, BLOCK = 51, 40
SHOWN = ("loss", "reward", "entropy", "solved", "length")


def replay(folder: Path, skip: int, baseline: int) -> dict[str, Any]:
    """What the monitor says of a recorded run, and its course in windows of 40 steps."""
    reader = RunReader(folder)
    monitor = Monitor(skip=skip, baseline=baseline)
    for record in reader.steps:
        scalars = {key: value for key, value in record.scalars.items() if key != "staleness"}
        monitor.observe(record.step, record.stats, scalars)
    return {
        "steps": len(reader.steps),
        "skip": skip,
        "baseline": baseline,
        "alerts": [
            {"step": alert.step, "level": alert.level, "slice": alert.slice, "message": alert.message}
            for alert in monitor.alerts
        ],
        "course": list(_course(reader)),
    }


def _course(reader: RunReader, width: int = 40) -> Iterator[dict[str, Any]]:
    records = reader.steps
    for start in range(0, len(records), width):
        part = records[start : start + width]
        states = [record.stats.state for record in part if record.stats is not None]
        stats = type(part[0].stats)(pooled(states)) if part[0].stats is not None else None
        if stats is None:
            continue
        flat = stats.to_dict()
        names = tuple(stats)
        yield {
            "from": part[0].step,
            "to": part[-1].step,
            "staleness": float(np.mean([record.scalars.get("staleness", 0.0) for record in part])),
            "global KL": float(np.exp(global_kl(flat, names))),
            **{key: float(np.mean([record.scalars[key] for record in part])) for key in SHOWN},
            **{f"{name} p99.9": flat[f"{name}/abs_log_ratio_p99_9"] for name in names},
            **{f"{name} ESS": flat[f"{name}/ess_fraction"] for name in names},
        }


def signals(folder: Path, skip: int) -> tuple[Floats, Floats]:
    """The watched signals of a healthy run after ``skip`` steps, (T, K), and the least noise that counting leaves."""
    records = RunReader(folder).steps[skip:]
    stats = [record.stats for record in records]
    known = [one for one in stats if one is not None]
    reference = Reference(pooled(one.state for one in known))
    rows: list[Mapping[str, float]] = [{**one.to_dict(), **against(one.state, reference)} for one in known]
    values = np.array([values_of(row, reference.names).ravel() for row in rows])
    return values, np.maximum(LEAST_SD, least_noise(rows, reference.names).ravel())


def residuals(values: Floats) -> Floats:
    """What is left without the running median, (T, K); signals that were not always finite are 0 and so unwatched."""
    half = MEDIAN // 2
    medians = [np.median(values[max(0, at - half) : at + half + 1], 0) for at in range(len(values))]
    rest: Floats = values - np.array(medians)
    rest[:, ~np.isfinite(rest).all(0)] = np.nan
    return rest


def noise_of(rest: Floats, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Standard deviation and lag-1 correlation of the noise of each signal."""
    baseline = fit(rest)
    rows = []
    for index, (name, key) in enumerate((name, key) for name in names for key in KEYS):
        if baseline.watched[index]:
            rows.append(
                {"slice": name, "signal": key, "sd": float(baseline.sd[index]), "rho": float(baseline.rho[index])}
            )
    return rows


def bootstrap(rng: np.random.Generator, rest: Floats, runs: int, steps: int) -> Iterator[Floats]:
    """``steps`` observations (R, K) of resampled noise."""
    starts = np.zeros(runs, np.int64)
    for step in range(steps):
        if step % BLOCK == 0:
            starts = rng.integers(0, len(rest) - BLOCK + 1, runs)
        yield rest[starts + step % BLOCK].copy()


def with_noise_of(folder: Path, skip: int, runs: int = 1000, steps: int = 2000, seed: int = 0) -> dict[str, Any]:
    """False alarms and delays under the noise of a recorded run, of all its signals together."""
    reader = RunReader(folder)
    make = reader.info["make"]
    values, least = signals(folder, skip)
    rest = residuals(values)
    rng = np.random.default_rng(seed)
    # clipping and counting noise are those of the monitor; a signal that is constant is not watched
    null = family.watch(bootstrap(rng, rest, runs, steps), Settings(), least)
    onset, rows = 300, []
    column = 2 * len(SIGNALS)  # p99.9 of the last slice
    for name, grows in family.GROWTHS.items():
        paths = bootstrap(rng, rest, runs // 4, 900)
        grown = (
            _with(values, column, grows(step - onset) if step >= onset else 0.0) for step, values in enumerate(paths)
        )
        at = family.watch(grown, Settings(), least).warning
        late = at[(at < 0) | (at >= onset)]
        rows.append(
            {
                "growth": name,
                "found": float((late >= onset).mean()),
                "delay p50": family._quantile(late, onset, 0.5),
            }
        )
    return {
        "steps recorded": len(rest),
        "noise": noise_of(rest, tuple(make["names"])),
        "runs": runs,
        "steps": steps,
        "warnings": float((null.warning >= 0).mean()),
        "stops": float((null.stop >= 0).mean()),
        "delays": rows,
    }


def _with(values: Floats, column: int, growth: float) -> Floats:
    values[:, column] += growth
    return values
