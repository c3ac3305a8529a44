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
    repeat,
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
    """Where the quantiles lie, (S x Q,) each: those of a slice follow those of the one before."""

    lo: Array  # certified bounds
    hi: Array
    inside: Array  # position between them, 0 to 1


class _Found(NamedTuple):
    """The cells that hold the quantiles, (S x Q,) each."""

    cell: Array
    inside: Array  # how much of the cell lies below the quantile, 0 to 1
    first: Array  # whether the quantile is the smallest token
    last: Array  # or the largest


def _find(cells: Cells, q: list[float]) -> _Found:
    """By rank, in one row that holds the cells of all slices, one slice after another."""
    xp = namespace(cells.counts)
    slices, width = cells.counts.shape
    counts = cells.counts.reshape(-1)
    through = counts.cumsum(0)
    starts, ends = through[::width] - counts[::width], through[width - 1 :: width]
    n, start = repeat(ends - starts, len(q)), repeat(starts, len(q))
    # at most n, which is 0 for a slice without finite tokens
    rank = xp.ceil(on_device_of(n, q * slices) * n).clip(1.0, None)
    rank = xp.minimum(xp.asarray(rank, dtype=xp.int64), n)
    place = xp.searchsorted(through, start + rank)
    count = counts[place]
    # in float64: torch would subtract a Python number from integers in float32
    above = xp.asarray(start + rank - (through[place] - count), dtype=xp.float64) - 0.5
    return _Found(place % width, above / xp.where(count > 0, count, 1), rank == 1, rank == n)


def _find_weighted(cells: Cells, q: list[float]) -> _Found:
    """By share of the weight, slice by slice: in one row a light slice would drown in those before it."""
    xp = namespace(cells.counts)
    through = cells.counts.cumsum(-1)
    n = through[:, -1:]
    rank = on_device_of(n, q) * n
    cell = first_at_least(through, rank)
    count = take(cells.counts, cell)
    inside = (rank - (take(through, cell) - count)) / xp.where(count > 0, count, 1)
    never = rank < 0  # weights have no ranks: no token is known to be the first
    return _Found(*(one.reshape(-1) for one in (cell, inside, never, rank == n)))


def _rank(cells: Cells, q: list[float]) -> _Ranked:
    xp = namespace(cells.counts)
    cell, inside, first, last = (_find if cells.counts.dtype == xp.int64 else _find_weighted)(cells, q)
    lowest, highest = repeat(cells.lowest, len(q)), repeat(cells.highest, len(q))
    # the extreme tokens are known exactly, the smallest abs(x) is not
    least = xp.where(last, highest, lowest)
    most = xp.where(first, lowest, highest) if cells.signed else highest
    edges = cells.edges_on_device
    return _Ranked(edges[cell].clip(least, most), edges[cell + 1].clip(least, most), inside)


def _quantile(cells: Cells, q: Numbers) -> Array:
    values, scalar = probabilities(q)
    lo, hi, inside = _rank(cells, values)
    return _by_slice(cells, scalar, lo + (hi - lo) * inside)


def _bounds(cells: Cells, q: Numbers) -> tuple[Array, Array]:
    values, scalar = probabilities(q)
    lo, hi, _ = _rank(cells, values)
    return _by_slice(cells, scalar, lo), _by_slice(cells, scalar, hi)


def _by_slice(cells: Cells, scalar: bool, values: Array) -> Array:
    """(S,) for a single quantile, else (S, Q)."""
    return values if scalar else values.reshape(len(cells.counts), values.shape[0] // len(cells.counts))


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
