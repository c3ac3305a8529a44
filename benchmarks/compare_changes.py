"""What each distance of docs/compare.md sees of three changes: ``python benchmarks/compare_changes.py``."""

from __future__ import annotations

import argparse
import math

import numpy as np
from numpy.typing import NDArray

import pyrlstats
from pyrlstats import distances

N = 1_000_000
Floats = NDArray[np.float32]


def of(x: Floats) -> pyrlstats.SliceStats:
    return pyrlstats.slice_stats(x, np.zeros_like(x))


def ks_of_tokens(a: Floats, b: Floats) -> float:
    points = np.concatenate([a, b])
    below = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def rows(x: Floats, base: Floats) -> dict[str, str]:
    now, then = of(x), of(base)
    tail = distances.tail_ratio(now, then)
    shift = distances.abs_log_quantile_shift(now, then, [0.999, 0.9999])[0]
    floor = float(distances.ks_noise_floor(now, then)[0])
    ks, w1 = distances.kolmogorov_smirnov(now, then), distances.wasserstein1(now, then)
    w1_of_tokens = float(np.abs(np.sort(x).astype(np.float64) - np.sort(base)).mean())
    plain = distances.jensen_shannon(now, then, mantissa_bits=None, corrected=False)
    return {
        "KS, from the states": f"{float(ks.estimate[0]):.5f} (floor {floor:.4f})",
        "KS, from the tokens": f"{ks_of_tokens(x, base):.5f}",
        "W1, from the states": f"{float(w1.estimate[0]):.6g}",
        "W1, from the tokens": f"{w1_of_tokens:.6g} ({float(w1.estimate[0]) / w1_of_tokens - 1:.2g})",
        "Jensen-Shannon, plug-in": f"{float(plain[0]):.2g}",
        "Jensen-Shannon, as it comes": f"{float(distances.jensen_shannon(now, then)[0]):.2g}",
        "log shift of p99.9": f"{shift[0]:.3f}",
        "log shift of p99.99": f"{shift[1]:.3f}",
        "tail ratio at p99.9": f"{float(tail.ratio[0]):.2f} ({float(tail.log_se[0]):.3f})",
        "largest |x|": f"{math.log(np.abs(x).max() / np.abs(base).max()):.2f}",
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rng = np.random.default_rng(0)
    base, same, wider, few = (rng.normal(0.0, 0.01, N).astype("f4") for _ in range(4))
    few[rng.random(N) < 0.001] *= 10.0
    columns = [rows(x, base) for x in (same, np.float32(1.02) * wider, few)]
    for name in columns[0]:
        print(f"{name:30}", *(f"{column[name]:>26}" for column in columns))


if __name__ == "__main__":
    main()
