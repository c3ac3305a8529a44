"""How k-hat and Hill's estimate scatter, how k-hat grows with the number of tokens, and how far it is from arviz-stats.

``python benchmarks/k_hat.py`` runs from a source tree and needs arviz-stats; the random data depend on nothing else.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pyrlstats.tails import tail_shape

REPEATS = {1000: 300, 10_000: 300, 100_000: 100, 1_000_000: 40}


def figures(x: NDArray[np.float32], sample_size: int | None = None) -> tuple[float, float, float]:
    view = tail_shape(x, np.zeros_like(x), sample_size=sample_size)["all"]
    return float(view.pareto_k), float(view.hill), float(view.hill_se)


def main() -> None:
    rng = np.random.default_rng(0)
    print(
        "weights with a tail of index 0.5: mean and standard deviation of k-hat and of Hill's estimate, mean of its SE"
    )
    for n, repeats in REPEATS.items():
        k, hill, error = np.array([figures(rng.exponential(0.5, n).astype(np.float32)) for _ in range(repeats)]).T
        print(f"{n:9,}  {k.mean():.3f} {k.std():.3f}   {hill.mean():.3f} {hill.std():.4f}   {error.mean():.4f}")
    print("log-ratios 0.05 t, 2 degrees of freedom: mean of k-hat, of all tokens and with sample_size=10_000")
    for n in (10_000, 100_000, 1_000_000):
        samples = [(0.05 * rng.standard_t(2, n)).astype(np.float32) for _ in range(20)]
        own, fixed = (np.mean([figures(x, size)[0] for x in samples]) for size in (None, 10_000))
        print(f"{n:9,}  {own:.3f} {fixed:.3f}")
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    samples_of = importlib.import_module("tail_samples")
    array_stats = importlib.import_module("arviz_stats.base").array_stats
    print("k-hat here and by arviz-stats, which rounds the size of the tail down")
    for kind in samples_of.CONTINUOUS:
        row = []
        for n in samples_of.SIZES:
            x = samples_of.sample(kind, n)
            row.append(f"{figures(x)[0]:.4f} {float(array_stats.psislw(-x.astype(np.float64))[1]):.4f}")
        print(f"{kind:9}", "   ".join(row))


if __name__ == "__main__":
    main()
