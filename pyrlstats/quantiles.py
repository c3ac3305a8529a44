"""Quantiles, bounds, CDF and tail mass from the integer histogram of a state.

A rank falls into one cell (:mod:`pyrlstats.cells`), known exactly; the value inside it is interpolated, and certified
bounds are the cell's edges. Both are cut to the exact extrema. Quantiles are the inverted CDF: the order statistic of
rank max(1, ceil(q n_finite)). Nothing here syncs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pyrlstats.cells import (
    Cells,
    Numbers,
    abs_cells,
    as_list,
    first_at_least,
    on_device_of,
    probabilities,
    signed_cells,
    take,
)
from pyrlstats.state import Array, State, namespace


class Histogram(NamedTuple):
    """Counts and edges as ``numpy.histogram`` returns them, ascending in value.

    Attributes:
        counts: int64 (..., 2P + 1), tokens: negative bins, the zeros, positive bins.
        edges: float64 (2P + 2,), nats; the zeros lie between two edges that are both 0, the outermost are infinite.
    """

    counts: Array
    edges: Array


class _Ranked(NamedTuple):
    """Where the quantiles lie, (S, Q) each."""

    lo: Array  # certified bounds
    hi: Array
    inside: Array  # position between them, 0 to 1


def _rank(cells: Cells, q: list[float]) -> _Ranked:
    xp = namespace(cells.counts)
    cumulative = xp.cumsum(cells.counts, -1)
    n = cumulative[:, -1:]
    rank = on_device_of(n, q) * n
    exact = cells.counts.dtype == xp.int64  # weighted counts of DecayedStats have no ranks
    if exact:
        # at most n, which is 0 for a slice without finite tokens
        rank = xp.minimum(xp.asarray(xp.ceil(rank).clip(1.0, None), dtype=xp.int64), n)
    cell = first_at_least(cumulative, rank)
    count = take(cells.counts, cell)
    before = take(cumulative, cell) - count
    edges = cells.edges_on_device
    lo = edges[cell].clip(cells.lowest, cells.highest)
    hi = edges[cell + 1].clip(cells.lowest, cells.highest)
    # the extreme tokens are known exactly, the smallest abs(x) is not
    lo = xp.where(rank == n, cells.highest, lo)
    if cells.signed and exact:
        first = rank == 1
        hi = xp.where(first, cells.lowest, hi)
        lo = xp.where(first, cells.lowest, lo)
    # in float64: torch would subtract a Python number from integers in float32
    above = xp.asarray(rank - before, dtype=xp.float64) - (0.5 if exact else 0.0)
    inside = above / xp.where(count > 0, count, 1)
    return _Ranked(lo, hi, inside)


def _quantile(cells: Cells, q: Numbers) -> Array:
    values, scalar = probabilities(q)
    lo, hi, inside = _rank(cells, values)
    result = lo + (hi - lo) * inside
    return result[:, 0] if scalar else result


def _bounds(cells: Cells, q: Numbers) -> tuple[Array, Array]:
    values, scalar = probabilities(q)
    lo, hi, _ = _rank(cells, values)
    return (lo[:, 0], hi[:, 0]) if scalar else (lo, hi)


def quantile(state: State, q: Numbers) -> Array:
    """Quantiles of x, nats: (S,) for a number, (S, len(q)) for a sequence. q = 0 and 1 are the exact extrema.

    Interpolated inside the bin and cut to [min, max]. NaN for a slice without finite tokens.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _quantile(signed_cells(state), q)


def quantile_bounds(state: State, q: Numbers) -> tuple[Array, Array]:
    """Certified (lo, hi) around the true quantile of x, nats, each of the shape ``quantile`` returns.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _bounds(signed_cells(state), q)


def abs_quantile(state: State, q: Numbers) -> Array:
    """Quantiles of abs(x), nats: (S,) for a number, (S, len(q)) for a sequence. q = 1 is the exact maximum.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _quantile(abs_cells(state), q)


def abs_quantile_bounds(state: State, q: Numbers) -> tuple[Array, Array]:
    """Certified (lo, hi) around the true quantile of abs(x), nats, each of the shape ``abs_quantile`` returns.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _bounds(abs_cells(state), q)


def _mass_up_to(cells: Cells, x: Numbers) -> Array:
    """Share of tokens <= x, linear inside a bin: (S,) or (S, len(x))."""
    values, scalar = as_list("x", x)
    if any(math.isnan(value) for value in values):
        raise ValueError("x must not be NaN")
    xp = namespace(cells.counts)
    cumulative = xp.cumsum(cells.counts, -1)
    n = cumulative[:, -1:]
    point, edges = on_device_of(n, values), cells.edges_on_device
    right = {"side": "right"} if xp is np else {"right": True}
    index = xp.clip(xp.searchsorted(edges, point, **right) - 1, 0, cells.counts.shape[-1] - 1)
    count = cells.counts[:, index]
    before = cumulative[:, index] - count
    lo = xp.clip(edges[index], cells.lowest, cells.highest)
    hi = xp.clip(edges[index + 1], cells.lowest, cells.highest)
    share = xp.clip((point - lo) / xp.where(hi > lo, hi - lo, float("inf")), 0.0, 1.0)
    mass = (before + count * share) / xp.where(n > 0, n, xp.ones_like(n))
    mass = xp.where(point >= cells.highest, 1.0, xp.where(point < cells.lowest, 0.0, mass))
    mass = xp.where(n > 0, mass, float("nan"))
    return mass[:, 0] if scalar else mass


def cdf(state: State, x: Numbers) -> Array:
    """Share of tokens with log-ratio <= x (nats), linear inside a bin; exact at 0, below min and from max on.

    At another bin edge it is the exact share of tokens closer to 0 than the edge or on its other side.

    Returns:
        float64 (S,) for a number, (S, len(x)) for a sequence; NaN for a slice without finite tokens.

    Raises:
        ValueError: x is NaN.
    """
    return _mass_up_to(signed_cells(state), x)


def tail_mass(state: State, x: Numbers) -> Array:
    """Share of tokens with abs(log-ratio) > x (nats), linear inside a bin; exact at 0 and from the maximum on.

    Returns:
        float64 (S,) for a number, (S, len(x)) for a sequence; NaN for a slice without finite tokens.

    Raises:
        ValueError: x is NaN.
    """
    return 1.0 - _mass_up_to(abs_cells(state), x)


def histogram(state: State) -> Histogram:
    """The whole distribution of x: counts (S, 2P + 1) and their edges, as ``numpy.histogram`` returns them."""
    cells = signed_cells(state)
    return Histogram(cells.counts, cells.edges_on_device)
