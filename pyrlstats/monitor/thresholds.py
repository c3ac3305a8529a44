"""How large a score has to be: thresholds for a stated rate of false alarms.

Under AR(1) noise the largest score of a stationary run depends on how well location, sd and rho were estimated on the
warm-up, more than on anything else; so the table was simulated with the estimates in it, by
``python -m benchmarks.detection.thresholds``: 400,000 runs for each length of the warm-up, normal noise with rho drawn
evenly from 0 to 0.95, 2,000 observations after the warm-up. A row belongs to a range of the *estimated* rho, and holds
the scores that a share ``rate`` of its runs exceeds. Where the true rho is known to lie at one end of the range the
rate is up to two times higher or lower; it is right on average over rho.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

HORIZON = 2000  # observations after the warm-up that the rates speak of
RATES = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002)
RHO_EDGES = (0.2, 0.4, 0.6, 0.8)  # of the estimate
WARMUPS = (25, 50, 100, 200, 400)

_SCORES = {
    25: (
        (5.09, 6.36, 7.54, 8.9, 10.85, 11.92, 12.66, 13.57),  # of 95907 runs
        (5.33, 7.1, 8.48, 9.59, 10.33, 10.84, 11.17, 11.62),  # of 77915 runs
        (5.59, 7.06, 7.83, 8.39, 8.9, 9.17, 9.4, 9.62),  # of 84103 runs
        (4.96, 5.85, 6.34, 6.75, 7.1, 7.29, 7.42, 7.52),  # of 79970 runs
        (2.78, 3.61, 4.08, 4.44, 4.75, 4.92, 5.05, 5.11),  # of 62105 runs
    ),
    50: (
        (4.41, 5.0, 5.48, 5.97, 6.68, 7.29, 7.79, 8.9),  # of 87221 runs
        (4.38, 5.14, 5.77, 6.5, 7.54, 8.49, 9.6, 10.76),  # of 81997 runs
        (4.69, 5.79, 6.73, 7.68, 8.75, 9.33, 9.92, 10.56),  # of 85274 runs
        (5.04, 6.09, 6.67, 7.19, 7.79, 8.1, 8.38, 8.61),  # of 84384 runs
        (3.72, 4.5, 4.94, 5.32, 5.64, 5.81, 5.96, 6.1),  # of 61124 runs
    ),
    100: (
        (4.15, 4.53, 4.82, 5.11, 5.49, 5.75, 6.08, 6.45),  # of 84652 runs
        (4.08, 4.54, 4.9, 5.23, 5.72, 6.15, 6.6, 6.99),  # of 83800 runs
        (4.2, 4.78, 5.25, 5.7, 6.4, 6.95, 7.46, 7.97),  # of 84814 runs
        (4.49, 5.33, 5.92, 6.5, 7.07, 7.5, 7.86, 8.24),  # of 84944 runs
        (4.09, 4.76, 5.25, 5.62, 6.05, 6.27, 6.46, 6.61),  # of 61790 runs
    ),
    200: (
        (4.0, 4.33, 4.56, 4.75, 5.05, 5.25, 5.45, 5.7),  # of 84021 runs
        (3.97, 4.31, 4.55, 4.79, 5.08, 5.27, 5.51, 5.81),  # of 84488 runs
        (3.98, 4.37, 4.64, 4.92, 5.33, 5.6, 5.86, 6.08),  # of 84608 runs
        (4.09, 4.59, 4.97, 5.37, 5.86, 6.28, 6.58, 7.03),  # of 84217 runs
        (4.01, 4.6, 5.02, 5.36, 5.83, 6.08, 6.28, 6.58),  # of 62666 runs
    ),
    400: (
        (3.94, 4.22, 4.41, 4.59, 4.82, 4.97, 5.17, 5.38),  # of 84330 runs
        (3.89, 4.18, 4.38, 4.58, 4.82, 4.99, 5.17, 5.38),  # of 84191 runs
        (3.86, 4.18, 4.41, 4.62, 4.89, 5.12, 5.29, 5.49),  # of 84757 runs
        (3.88, 4.24, 4.48, 4.71, 4.99, 5.21, 5.38, 5.65),  # of 83699 runs
        (3.84, 4.26, 4.55, 4.84, 5.22, 5.52, 5.69, 5.96),  # of 63023 runs
    ),
}
_TABLE = np.array([_SCORES[warmup] for warmup in WARMUPS])  # (warm-ups, rho, rates)


def threshold(rate: ArrayLike, warmup: ArrayLike, rho: ArrayLike) -> NDArray[np.float64]:
    """The score that a stationary signal passes with probability ``rate`` within HORIZON observations.

    Linear in the logarithm of the rate, and continued beyond the table's ends; linear in the logarithm of the warm-up,
    held at its ends; a step function of rho.

    Args:
        rate: 0 to 1, of one signal.
        warmup: finite observations of the baseline.
        rho: lag-1 correlation as estimated on it.
    """
    rate, warmup, rho = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in (rate, warmup, rho)))
    row = np.searchsorted(RHO_EDGES, rho, side="right")
    at = np.interp(np.log(np.maximum(warmup, 1.0)), np.log(WARMUPS), np.arange(len(WARMUPS)))
    below = np.minimum(at.astype(np.int64), len(WARMUPS) - 2)
    share = at - below
    result: NDArray[np.float64] = (1.0 - share) * _at_rate(below, row, rate) + share * _at_rate(below + 1, row, rate)
    return result


def _at_rate(warmup: NDArray[np.int64], row: NDArray[np.int64], rate: NDArray[np.float64]) -> NDArray[np.float64]:
    grid = -np.log(RATES)
    point = -np.log(np.clip(rate, 1e-12, 1.0))
    right = np.clip(np.searchsorted(grid, point), 1, len(RATES) - 1)
    left, scores = right - 1, _TABLE
    share = (point - grid[left]) / (grid[right] - grid[left])
    low, high = scores[warmup, row, left], scores[warmup, row, right]
    result: NDArray[np.float64] = low + share * (high - low)
    return result
