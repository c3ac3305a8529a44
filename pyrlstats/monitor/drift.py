"""Slow growth against a frozen baseline: a clipped EWMA of each signal's deviation, in units of its own noise.

All arrays end in the signals, (..., K), and growth is upwards; leading axes are independent runs, so that the benchmark
simulates thousands of runs with this very code.

The noise of a signal y is taken to be AR(1) with standard deviation sd and lag-1 correlation rho, both estimated on the
n observations of the warm-up. An EWMA of weight L then has the variance (e.g. Box, Jenkins, Reinsel (2015), or Schmid
(1997), On EWMA charts for time series)

    sd^2 L / (2 - L) (1 + rho (1 - L)) / (1 - rho (1 - L))        of the EWMA itself
    sd^2 (1 + rho) / (1 - rho) / n                                of the baseline's location, which never averages out

The score is the EWMA over the root of their sum. Deviations are clipped at CLIP sd first: a single spike moves the
score by a fraction of what it takes to alarm. How large a score has to be: :mod:`pyrlstats.monitor.thresholds`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

WEIGHT = 0.06  # of the newest observation: a memory of 1 / 0.06, about 17, observations
CLIP = 4.0  # sd
LEAST_SD = 0.02  # noise below 2 % is not believed
LEAST_SHARE = 0.8  # of the warm-up at which a signal must be finite to be watched
_HUBER = 3.0  # robust sd beyond which warm-up values are pulled in
_LARGEST_RHO = 0.95


@dataclass(frozen=True)
class Baseline:
    """Location and noise of signals over the warm-up, frozen; (..., K) each.

    Attributes:
        location: winsorised mean; NaN where a signal was absent too often, which is then never watched.
        sd: standard deviation of the noise.
        rho: its lag-1 correlation, 0 to 0.95.
        n: finite observations.
    """

    location: Floats
    sd: Floats
    rho: Floats
    n: Floats

    @property
    def watched(self) -> NDArray[np.bool_]:
        """Where a signal was there often enough."""
        return np.isfinite(self.location)

    def ewma_sd(self, weight: float) -> Floats:
        """Standard deviation of the EWMA around the true location, the location's own error included."""
        kept = self.rho * (1.0 - weight)
        own = weight / (2.0 - weight) * (1.0 + kept) / (1.0 - kept)
        result: Floats = self.sd * np.sqrt(own + (1.0 + self.rho) / (1.0 - self.rho) / np.maximum(self.n, 1.0))
        return result


def fit(values: Floats, least_sd: ArrayLike = LEAST_SD) -> Baseline:
    """The baseline of a warm-up.

    Location and spread are those of values pulled in to 3 robust standard deviations (1.4826 MAD) around the median:
    nearly as precise as mean and variance under normal noise, unmoved by spikes. The bias of the lag-1 correlation,
    -(1 + 3 rho) / n (Kendall 1954), and that of the variance around an estimated mean are taken off.

    Args:
        values: (n, ..., K), in the order observed; what is not finite is left out.
        least_sd: smallest sd, (..., K) or a number.
    """
    values = np.where(np.isfinite(values), values, np.nan)
    n = np.isfinite(values).sum(0).astype(np.float64)
    enough = n >= np.maximum(LEAST_SHARE * len(values), 8.0)
    values = np.where(enough, values, 0.0)  # nanmedian of nothing warns
    median = np.nanmedian(values, 0)
    reach = _HUBER * 1.4826 * np.nanmedian(np.abs(values - median), 0)
    # a signal that is constant at more than half of the steps has no MAD
    reach = np.where(reach > 0.0, reach, _HUBER * np.nanstd(values, 0))
    pulled = np.clip(values, median - reach, median + reach)
    location = np.nanmean(pulled, 0)
    deviation = np.where(np.isnan(pulled), 0.0, pulled - location)
    m = np.maximum(n, 1.0)
    variance = (deviation**2).sum(0) / m
    covariance = (deviation[1:] * deviation[:-1]).sum(0) / m
    raw = covariance / np.where(variance > 0.0, variance, 1.0)
    rho = np.clip((raw + 1.0 / m) / (1.0 - np.minimum(3.0 / m, 0.5)), 0.0, _LARGEST_RHO)
    lost = np.minimum((1.0 + rho) / (1.0 - rho) / m, 0.7)
    sd = np.maximum(np.sqrt(variance / (1.0 - lost)), least_sd)
    return Baseline(np.where(enough, location, np.nan), sd, rho, n)


class Drift:
    """The running EWMA of signals against their baseline; (..., K) each.

    Args:
        baseline: frozen.
        weight: of the newest observation, 0 to 1.

    Attributes:
        deviation: the EWMA of the clipped deviation, in the signal's unit; 0 at the start.
    """

    def __init__(self, baseline: Baseline, weight: float = WEIGHT) -> None:
        self.baseline = baseline
        self.weight = weight
        self.deviation = np.zeros_like(baseline.location)
        self._ewma_sd = baseline.ewma_sd(weight)
        self._reach = CLIP * baseline.sd

    def update(self, values: Floats) -> Floats:
        """Add one observation (..., K); returns the scores. What is not finite leaves its signal as it was."""
        step = np.clip(values - self.baseline.location, -self._reach, self._reach)
        moved = self.deviation + self.weight * (step - self.deviation)
        self.deviation = np.where(np.isfinite(values) & self.baseline.watched, moved, self.deviation)
        return self.score()

    def score(self) -> Floats:
        """``deviation`` in units of what noise alone makes of it; 0 for signals that are not watched."""
        result: Floats = self.deviation / self._ewma_sd
        return result


def theil_sen(steps: NDArray[np.int64], values: Floats) -> float:
    """Median of the slopes between all pairs, per step; NaN with fewer than 2 finite values at different steps.

    Source:
        Sen (1968), Estimates of the regression coefficient based on Kendall's tau.
    """
    finite = np.isfinite(values)
    x, y = steps[finite].astype(np.float64), values[finite]
    i, j = np.triu_indices(len(x), 1)
    apart = x[j] != x[i]
    if not apart.any():
        return float("nan")
    return float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart]))


def slope_se(steps: NDArray[np.int64], values: Floats, sd: float, rho: float) -> float:
    """Standard error of a fitted slope under AR(1) noise, per step; NaN with fewer than 2 finite values.

    That of least squares, sd / sqrt(sum (x - mean)^2), times sqrt((1 + rho) / (1 - rho)) for the correlation and
    1.05 for the median's efficiency of 0.91.
    """
    x = steps[np.isfinite(values)].astype(np.float64)
    if len(x) < 2 or x[0] == x[-1]:
        return float("nan")
    return float(1.05 * sd * np.sqrt((1.0 + rho) / (1.0 - rho) / ((x - x.mean()) ** 2).sum()))
