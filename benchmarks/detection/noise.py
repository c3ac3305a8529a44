"""Simulated signals of many runs at once: stationary noise of several kinds, ramps and jumps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def ar1(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    steps: int,
    rho: ArrayLike = 0.5,
    sd: ArrayLike = 0.1,
    freedom: float | None = None,
) -> Iterator[Floats]:
    """``steps`` observations of stationary AR(1) noise, each of ``shape``.

    Args:
        rho: lag-1 correlation; broadcasts to ``shape``.
        sd: standard deviation; likewise.
        freedom: degrees of freedom of Student's t innovations of unit variance; None is normal.
    """
    rho = np.asarray(rho, np.float64)
    fresh = np.sqrt(1.0 - rho**2)

    def innovation() -> Floats:
        if freedom is None:
            return rng.standard_normal(shape)
        return rng.standard_t(freedom, shape) / np.sqrt(freedom / (freedom - 2.0))

    y = innovation()
    for _ in range(steps):
        yield y * sd
        y = rho * y + fresh * innovation()
