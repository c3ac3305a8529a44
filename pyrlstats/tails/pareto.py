"""Pareto k-hat and Hill's estimator from the largest values of every slice, vectorised over slices.

The fit is that of Zhang and Stephens (2009, Technometrics 51), a posterior mean over a grid that the data set, as
Pareto smoothed importance sampling uses it (Vehtari, Simpson, Gelman, Yao, Gabry 2024, JMLR 25). Nothing here syncs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pyrlstats.cells import take
from pyrlstats.intervals import as_floats
from pyrlstats.state import Array, namespace

REASONS = ("", "empty", "too_few", "all_equal", "ties", "capacity", "range")

_FEWEST = 5  # exceedances that a fit takes
_PRIOR_TOKENS, _PRIOR_K = 10.0, 0.5
_PRIOR_B = 3.0
_LOG_TINY = math.log(np.finfo(np.float64).tiny)
_NEGLIGIBLE = 10.0 * np.finfo(np.float64).eps  # weights of the posterior
_BLOCK_WORDS = 1 << 20


class Fit(NamedTuple):
    """Of S slices, (S,) each."""

    k: Array  # float64
    reason: Array  # int64, index into REASONS
    hill: Array  # float64
    hill_se: Array
    n_tail: Array  # int64, tokens above the cutoff
    cutoff: Array  # float64, x


def tail_size(n: int) -> int:
    """How many of n tokens are the tail: min(n / 5, 3 sqrt(n)), rounded up, as arviz and R's loo have it."""
    return -(-n // 5) if n <= 225 else math.ceil(3.0 * math.sqrt(n))


def k_threshold(n: int) -> float:
    """Above this k-hat, estimates from n weights are not to be trusted: min(1 - 1 / log10(n), 0.7)."""
    if n < 2:
        raise ValueError(f"n must be at least 2 tokens, got {n}")
    return min(1.0 - 1.0 / math.log10(n), 0.7)


def tail_sizes(n: Array, sample_size: int | None) -> Array:
    """Tokens in the tail of each slice of n (S,) tokens, so few that one is below them: int64 (S,)."""
    xp = namespace(n)
    count = as_floats(n)
    if sample_size is not None:
        tail = tail_size(sample_size)
        size = xp.ceil(count * (tail if tail >= _FEWEST else 0) / sample_size)
    else:
        size = xp.where(n <= 225, xp.ceil(count / 5.0), xp.ceil(3.0 * xp.sqrt(count)))
    return xp.clip(xp.minimum(xp.asarray(size, dtype=xp.int64), n - 1), 0, None)


def fit(values: Array, n: Array, size: Array) -> Fit:
    """The estimators of every slice.

    Args:
        values: float32 or float64 (S, C), the C largest finite x of each slice, descending; -inf where there are fewer.
        n: int64 (S,), finite tokens.
        size: int64 (S,), tokens of the tail; less than n where n > 0.
    """
    xp = namespace(values)
    capacity = values.shape[1]
    x = as_floats(values)
    place = xp.clip(size, 0, capacity - 1)[:, None]
    inside = as_range(capacity, x) < size[:, None]
    cutoff = take(x, place)
    largest = x[:, :1]
    # k does not depend on the scale of w
    cut = xp.clip(cutoff - largest, _LOG_TINY, None)
    above = xp.where(inside, x - largest, -math.inf)
    exceeds = above > cut
    n_tail = exceeds.sum(-1)
    y = xp.where(exceeds, xp.exp(cut) * xp.expm1(xp.where(exceeds, above - cut, 0.0)), 0.0)
    k = _shape(y, as_floats(n_tail)[:, None])
    tail = as_floats(xp.clip(size, 1, None))
    hill = xp.where(inside, x - cutoff, 0.0).sum(-1) / tail

    codes = xp.zeros_like(n)
    for code, holds in (  # the last that holds
        ("range", ~xp.isfinite(k)),
        ("ties", n_tail < _FEWEST),
        ("all_equal", n_tail == 0),
        ("capacity", (size >= capacity) & (n > capacity)),
        ("too_few", size < _FEWEST),
        ("empty", n == 0),
    ):
        codes = xp.where(holds, REASONS.index(code), codes)
    known = (size >= _FEWEST) & ((size < capacity) | (n <= capacity))
    no_hill = ~known | (n_tail == 0)
    nan = float("nan")
    return Fit(
        k=xp.where(codes == 0, k, nan),
        reason=codes,
        hill=xp.where(no_hill, nan, hill),
        hill_se=xp.where(no_hill, nan, hill / xp.sqrt(tail)),
        n_tail=xp.where(known, n_tail, 0),
        cutoff=xp.where(known, cutoff[:, 0], nan),
    )


def _shape(y: Array, n: Array) -> Array:
    """k (S,) of exceedances y (S, C), descending, 0 beyond the n (S, 1) that count, or NaN where there are none."""
    xp = namespace(y)
    m = 30.0 + xp.floor(xp.sqrt(n))
    j = as_range(30 + math.isqrt(y.shape[1]), y) + 1.0
    quartile = n - xp.floor(n / 4.0 + 0.5)  # its place in descending order
    y_quartile = take(y, xp.clip(xp.asarray(quartile, dtype=xp.int64), 0, y.shape[1] - 1))
    b = 1.0 / y[:, :1] + (1.0 - xp.sqrt(m / (j - 0.5))) / (_PRIOR_B * y_quartile)
    k = _mean_log(b, y, n)
    mean = y.sum(-1)[:, None] / n
    rate = xp.where(b == 0.0, 1.0 / mean, -b / xp.where(b == 0.0, 1.0, k))  # at 0 the exponential distribution
    profile = xp.where(j <= m, n * (xp.log(rate) - k - 1.0), -math.inf)
    weight = xp.exp(profile - _maximum(profile))
    weight = weight / weight.sum(-1)[:, None]
    weight = xp.where(weight >= _NEGLIGIBLE, weight, 0.0)
    b = (xp.where(weight > 0.0, b, 0.0) * weight).sum(-1)[:, None] / weight.sum(-1)[:, None]
    n = n[:, 0]
    return (n * _mean_log(b, y, n[:, None])[:, 0] + _PRIOR_TOKENS * _PRIOR_K) / (n + _PRIOR_TOKENS)


def _mean_log(b: Array, y: Array, n: Array) -> Array:
    """mean over the tail of log(1 - b y): (S, J) for b (S, J), in blocks of bounded memory."""
    xp = namespace(y)
    step = max(_BLOCK_WORDS // max(y.shape[0] * y.shape[1], 1), 1)
    parts = [
        xp.log1p(-b[:, start : start + step, None] * y[:, None, :]).sum(-1) for start in range(0, b.shape[1], step)
    ]
    return xp.concatenate(parts, -1) / n


def _maximum(values: Array) -> Array:
    """Of each row, (S, 1)."""
    return values.max(-1)[:, None] if namespace(values) is np else values.amax(-1)[:, None]


def as_range(n: int, like: Array) -> Array:
    """float64 0 to n - 1 on the device of ``like``."""
    xp = namespace(like)
    return np.arange(n, dtype=np.float64) if xp is np else xp.arange(n, dtype=xp.float64, device=like.device)
