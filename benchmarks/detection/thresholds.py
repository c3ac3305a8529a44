"""Simulates the table of pyrlstats/monitor/thresholds.py: ``python -m benchmarks.detection.thresholds``.

Runs of HORIZON observations after a warm-up of n, AR(1) noise, rho drawn evenly from 0 to 0.95, baseline estimated as
the monitor does. The largest score of each run is kept with its estimated rho; the table holds, for bins of the
estimate, the score that a share ``rate`` of the runs exceeds. So the errors of the estimates are inside.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.noise import ar1
from pyrlstats.monitor.drift import Drift, fit
from pyrlstats.monitor.thresholds import HORIZON, RATES, RHO_EDGES, WARMUPS


def largest_scores(
    rng: np.random.Generator, warmup: int, runs: int, steps: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Estimated rho and largest score of each run."""
    rho = rng.uniform(0.0, 0.95, runs)
    stream = ar1(rng, (runs,), warmup + steps, rho, 0.1)
    drift = Drift(fit(np.array([next(stream) for _ in range(warmup)])))
    largest = np.zeros(runs)
    for values in stream:
        np.maximum(largest, drift.update(values), out=largest)
    return drift.baseline.rho, largest


def main(runs: int = 400_000, batch: int = 20_000) -> None:
    print(f"# {runs} runs a warm-up, seed 0", file=sys.stderr)
    rng = np.random.default_rng(0)
    for warmup in WARMUPS:
        start = time.perf_counter()
        parts = [largest_scores(rng, warmup, batch, HORIZON) for _ in range(runs // batch)]
        rho, largest = (np.concatenate(column) for column in zip(*parts, strict=True))
        group = np.searchsorted(RHO_EDGES, rho, side="right")
        rows = []
        for index in range(len(RHO_EDGES) + 1):
            scores = largest[group == index]
            rows.append([round(float(np.quantile(scores, 1.0 - rate)), 2) for rate in RATES])
        print(f"    {warmup}: (")
        for row, count in zip(rows, np.bincount(group), strict=True):
            print(f"        ({', '.join(map(str, row))}),  # of {count} runs")
        print("    ),", flush=True)
        print(f"# {warmup}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
