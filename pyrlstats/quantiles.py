"""Quantiles, bounds, CDF and tail mass from the integer histogram of a state.

A sorted slice is seen as a row of *cells*: the negative bins, the zeros (an atom at exactly 0) and the positive
bins, ascending; for abs(x) the zeros and then the folded bins. A rank falls into one cell, known exactly; the
value inside it is interpolated, and certified bounds are the cell's edges. Both are cut to the exact extrema.

Quantiles are the inverted CDF: the order statistic of rank max(1, ceil(q n_finite)). Nothing here syncs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import Layout
from pyrlstats.state import Array, State, namespace
from pyrlstats.stats import log_ratio_max, log_ratio_min

Numbers = float | Sequence[float]
Edges = NDArray[np.float64]


class Histogram(NamedTuple):
    """Counts and edges as ``numpy.histogram`` returns them, ascending in value.

    Attributes:
        counts: int64 (..., 2P + 1), tokens: negative bins, the zeros, positive bins.
        edges: float64 (2P + 2,), nats; the zeros lie between two edges that are both 0, the outermost are infinite.
    """

    counts: Array
    edges: Array


class _Cells(NamedTuple):
    counts: Array  # int64 (S, cells), tokens
    lowest: Array  # float64 (S, 1): no token below
    highest: Array  # float64 (S, 1): the largest token
    signed: bool
    layout: Layout

    @property
    def edges(self) -> Edges:
        """(cells + 1,), ascending; the outermost are 0 or infinite."""
        return _edge_table(self.layout, self.signed)


class _Ranked(NamedTuple):
    """Where the quantiles lie, (S, Q) each."""

    lo: Array  # certified bounds
    hi: Array
    inside: Array  # position between them, 0 to 1


@functools.cache
def _edge_table(layout: Layout, signed: bool) -> Edges:
    edges = np.array(layout.abs_edges)
    return np.concatenate((-edges[::-1], edges) if signed else ([0.0], edges))


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: Any) -> Array:
    """float64 values on a torch device, kept: uploaded once, without a sync."""
    import torch

    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


def _on_device_of(array: Array, values: Sequence[float] | Edges) -> Array:
    if namespace(array) is np:
        return np.asarray(values, dtype=np.float64)
    return _constant(tuple(values), array.device)


def _signed_cells(state: State) -> _Cells:
    xp = namespace(state.buffer)
    negative, positive = _halves(state)
    counts = xp.concatenate((negative, state.count("n_zero")[:, None], positive), -1)
    lowest, highest = log_ratio_min(state)[:, None], log_ratio_max(state)[:, None]
    return _Cells(counts, lowest, highest, True, state.layout)


def _abs_cells(state: State) -> _Cells:
    xp = namespace(state.buffer)
    negative, positive = _halves(state)
    folded = positive + xp.flip(negative, (-1,))
    counts = xp.concatenate((state.count("n_zero")[:, None], folded), -1)
    smallest, largest = log_ratio_min(state)[:, None], log_ratio_max(state)[:, None]
    # positive only where the slice has one sign
    lowest = xp.clip(xp.maximum(smallest, -largest), 0.0, None)
    return _Cells(counts, lowest, xp.maximum(-smallest, largest), False, state.layout)


def _halves(state: State) -> tuple[Array, Array]:
    positive = state.layout.bins_per_sign
    histogram = state.histogram
    return histogram[:, :positive], histogram[:, positive:]


def _as_list(name: str, given: Numbers) -> tuple[list[float], bool]:
    scalar = not hasattr(given, "__iter__")
    try:
        if isinstance(given, str):
            raise TypeError("a string is no number")
        values = [float(given)] if scalar else [float(value) for value in given]  # type: ignore[arg-type, union-attr]
    except TypeError as error:
        raise TypeError(f"{name} must be a number or a sequence of numbers, got {given!r}") from error
    return values, scalar


def _probabilities(q: Numbers) -> tuple[list[float], bool]:
    values, scalar = _as_list("q", q)
    for value in values:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"q must lie in [0, 1], got {value}")
    return values, scalar


def _take(values: Array, index: Array) -> Array:
    xp = namespace(values)
    return xp.take_along_axis(values, index, 1) if xp is np else xp.gather(values, 1, index)


def _rank(cells: _Cells, q: list[float]) -> _Ranked:
    xp = namespace(cells.counts)
    cumulative = xp.cumsum(cells.counts, -1)
    n = cumulative[:, -1:]
    rank = _on_device_of(n, q) * n
    exact = cells.counts.dtype == xp.int64  # weighted counts of DecayedStats have no ranks
    if exact:
        rank = xp.maximum(xp.asarray(xp.ceil(rank), dtype=xp.int64), xp.ones_like(n))
    cell = (cumulative[:, None, :] < rank[:, :, None]).sum(-1)
    cell = xp.clip(cell, 0, cells.counts.shape[-1] - 1)  # past the end only where n is 0
    count = _take(cells.counts, cell)
    before = _take(cumulative, cell) - count
    edges = _on_device_of(n, cells.edges)
    lo = xp.clip(edges[cell], cells.lowest, cells.highest)
    hi = xp.clip(edges[cell + 1], cells.lowest, cells.highest)
    # the extreme tokens are known exactly, the smallest abs(x) is not
    lo = xp.where(rank == n, cells.highest, lo)
    if cells.signed and exact:
        hi = xp.where(rank == 1, cells.lowest, hi)
        lo = xp.where(rank == 1, cells.lowest, lo)
    # in float64: torch would subtract a Python number from integers in float32
    above = xp.asarray(rank - before, dtype=xp.float64) - (0.5 if exact else 0.0)
    inside = above / xp.where(count > 0, count, xp.ones_like(count))
    return _Ranked(lo, hi, inside)


def _quantile(cells: _Cells, q: Numbers) -> Array:
    values, scalar = _probabilities(q)
    lo, hi, inside = _rank(cells, values)
    result = lo + (hi - lo) * inside
    return result[:, 0] if scalar else result


def _bounds(cells: _Cells, q: Numbers) -> tuple[Array, Array]:
    values, scalar = _probabilities(q)
    lo, hi, _ = _rank(cells, values)
    return (lo[:, 0], hi[:, 0]) if scalar else (lo, hi)


def quantile(state: State, q: Numbers) -> Array:
    """Quantiles of x, nats: (S,) for a number, (S, len(q)) for a sequence. q = 0 and 1 are the exact extrema.

    Interpolated inside the bin and cut to [min, max]. NaN for a slice without finite tokens.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _quantile(_signed_cells(state), q)


def quantile_bounds(state: State, q: Numbers) -> tuple[Array, Array]:
    """Certified (lo, hi) around the true quantile of x, nats, each of the shape ``quantile`` returns.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _bounds(_signed_cells(state), q)


def abs_quantile(state: State, q: Numbers) -> Array:
    """Quantiles of abs(x), nats: (S,) for a number, (S, len(q)) for a sequence. q = 1 is the exact maximum.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _quantile(_abs_cells(state), q)


def abs_quantile_bounds(state: State, q: Numbers) -> tuple[Array, Array]:
    """Certified (lo, hi) around the true quantile of abs(x), nats, each of the shape ``abs_quantile`` returns.

    Raises:
        ValueError: a q outside [0, 1].
    """
    return _bounds(_abs_cells(state), q)


def _mass_up_to(cells: _Cells, x: Numbers) -> Array:
    """Share of tokens <= x, linear inside a bin: (S,) or (S, len(x))."""
    values, scalar = _as_list("x", x)
    if any(math.isnan(value) for value in values):
        raise ValueError("x must not be NaN")
    xp = namespace(cells.counts)
    n_cells = cells.counts.shape[-1]
    index = np.searchsorted(cells.edges, values, side="right") - 1
    index = np.clip(index, 0, n_cells - 1).tolist()
    cumulative = xp.cumsum(cells.counts, -1)
    n = cumulative[:, -1:]
    count = cells.counts[:, index]
    before = cumulative[:, index] - count
    point = _on_device_of(n, values)
    lo = xp.clip(_on_device_of(n, cells.edges[index]), cells.lowest, cells.highest)
    hi = xp.clip(_on_device_of(n, cells.edges[[i + 1 for i in index]]), cells.lowest, cells.highest)
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
    return _mass_up_to(_signed_cells(state), x)


def tail_mass(state: State, x: Numbers) -> Array:
    """Share of tokens with abs(log-ratio) > x (nats), linear inside a bin; exact at 0 and from the maximum on.

    Returns:
        float64 (S,) for a number, (S, len(x)) for a sequence; NaN for a slice without finite tokens.

    Raises:
        ValueError: x is NaN.
    """
    return 1.0 - _mass_up_to(_abs_cells(state), x)


def histogram(state: State) -> Histogram:
    """The whole distribution of x: counts (S, 2P + 1) and their edges, as ``numpy.histogram`` returns them."""
    cells = _signed_cells(state)
    return Histogram(cells.counts, _on_device_of(cells.counts, cells.edges))
