"""Samples of log-ratios, from seeds; and, run as a script, k-hat of them by arviz 0.23, the values in the tests.

``python tests/tail_samples.py`` prints them (pip install arviz==0.23.4). That version takes exceedances strictly above
the cutoff, as pyrlstats does; arviz-stats takes those that tie with it too, which a test compares on samples without
ties.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

SIZES = (1000, 10_000, 100_000, 1_000_000)
CONTINUOUS = ("normal", "t3", "t2", "laplace")
LATTICES = ("bfloat16 of -1.5", "bfloat16 of -0.3")


def bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to bfloat16, to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def sample(kind: str, n: int) -> NDArray[np.float32]:
    """n log-ratios, float32."""
    rng = np.random.default_rng([n, (*CONTINUOUS, *LATTICES).index(kind)])
    if kind in LATTICES:
        old_logp = bfloat16((float(kind.split()[-1]) * rng.exponential(1.0, n)).astype(np.float32))
        return bfloat16((old_logp + 0.02 * rng.standard_normal(n)).astype(np.float32)) - old_logp
    draws = {
        "normal": lambda: rng.normal(0.0, 1.0, n),
        "t3": lambda: 0.05 * rng.standard_t(3, n),
        "t2": lambda: 0.05 * rng.standard_t(2, n),
        "laplace": lambda: rng.laplace(0.0, 0.8, n),
    }
    return draws[kind]().astype(np.float32)


if __name__ == "__main__":
    import arviz

    for kind in (*CONTINUOUS, *LATTICES):
        for n in SIZES:
            k = float(arviz.psislw(sample(kind, n).astype(np.float64))[1])
            sys.stdout.write(f'    ("{kind}", {n}): {k:.5f},\n')
