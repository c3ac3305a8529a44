"""The definition of the tail estimators, for one sample, in NumPy float64, written to be read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def tail_size(n: int) -> int:
    """Tokens in the tail of n: min(n / 5, 3 sqrt(n)), rounded up."""
    return int(np.ceil(min(n / 5, 3.0 * np.sqrt(n))))


def gpd_fit(y: Float64) -> float:
    """Shape k of a generalized Pareto distribution, by Zhang and Stephens' quasi-Bayesian mean.

    With PSIS's prior: as if ten more exceedances said 0.5.

    Args:
        y: exceedances, all positive, ascending.
    """
    n = y.size
    m = 30 + int(np.sqrt(n))
    j = np.arange(1, m + 1)
    quartile = y[int(n / 4 + 0.5) - 1]
    b = 1.0 / y[-1] + (1.0 - np.sqrt(m / (j - 0.5))) / (3.0 * quartile)

    def k_of(b: float) -> float:
        return float(np.mean(np.log1p(-b * y)))

    def log_likelihood(b: float) -> float:
        if b == 0.0:  # the exponential distribution, the limit
            return float(n * (-np.log(np.mean(y)) - 1.0))
        return float(n * (np.log(-b / k_of(b)) - k_of(b) - 1.0))

    profile = np.array([log_likelihood(one) for one in b])
    weight = np.exp(profile - profile.max())
    weight /= weight.sum()
    kept = weight >= 10 * np.finfo(float).eps
    mean = np.sum(b[kept] * weight[kept]) / weight[kept].sum()
    return (n * k_of(float(mean)) + 5.0) / (n + 10.0)


def pareto_k(x: Float64, size: int | None = None) -> float:
    """k-hat of the weights exp(x) from the ``size`` largest of x (all finite); NaN where it is undefined.

    Exceedances are strictly above the (size + 1)-th largest weight: of tokens tied with it none is in the tail.
    """
    size = tail_size(x.size) if size is None else size
    if size < 5:
        return float("nan")
    ascending = np.sort(x) - x.max()  # k does not depend on the scale of w
    cutoff = max(ascending[-size - 1], np.log(np.finfo(float).tiny))
    tail = ascending[ascending > cutoff]
    if tail.size < 5:
        return float("nan")
    return gpd_fit(np.exp(tail) - np.exp(cutoff))


def hill(x: Float64, size: int | None = None) -> tuple[float, float]:
    """Hill's estimate of the tail index of exp(x) from the ``size`` largest of x, and its standard error."""
    size = tail_size(x.size) if size is None else size
    descending = np.sort(x)[::-1]
    if size < 5 or descending[0] == descending[size]:
        return float("nan"), float("nan")
    estimate = float(np.mean(descending[:size]) - descending[size])
    return estimate, estimate / float(np.sqrt(size))
