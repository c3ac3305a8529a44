"""A sorted slice as a row of cells, the common ground of quantiles, CDFs, intervals and comparisons.

*Cells* are the negative bins, the zeros (an atom at exactly 0) and the positive bins, ascending; for abs(x) the zeros
and then the folded bins. Nothing here syncs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import Layout
from pyrlstats.state import Array, State, namespace
from pyrlstats.stats import log_ratio_max, log_ratio_min

Numbers = float | Sequence[float]
Edges = NDArray[np.float64]


class Cells(NamedTuple):
    counts: Array  # int64 (S, cells), tokens; float64 where they are weighted
    lowest: Array  # float64 (S, 1): no token below
    highest: Array  # float64 (S, 1): the largest token
    signed: bool
    layout: Layout

    @property
    def edges(self) -> Edges:
        """(cells + 1,), ascending, on the host; the outermost are 0 or infinite."""
        return _edge_table(self.layout, self.signed)

    @property
    def edges_on_device(self) -> Array:
        """The same where the counts are."""
        if namespace(self.counts) is np:
            return self.edges
        device = self.counts.device
        return _device_edges(self.layout, self.signed, device, _stream(device))


def signed_cells(state: State) -> Cells:
    """The cells of x."""
    xp = namespace(state.buffer)
    negative, positive = _halves(state)
    counts = xp.concatenate((negative, state.count("n_zero")[:, None], positive), -1)
    lowest, highest = log_ratio_min(state)[:, None], log_ratio_max(state)[:, None]
    return Cells(counts, lowest, highest, True, state.layout)


def abs_cells(state: State) -> Cells:
    """The cells of abs(x)."""
    xp = namespace(state.buffer)
    negative, positive = _halves(state)
    folded = positive + xp.fliplr(negative)
    counts = xp.concatenate((state.count("n_zero")[:, None], folded), -1)
    smallest, largest = log_ratio_min(state)[:, None], log_ratio_max(state)[:, None]
    # positive only where the slice has one sign
    lowest = xp.maximum(smallest, -largest).clip(0.0, None)
    return Cells(counts, lowest, xp.maximum(-smallest, largest), False, state.layout)


def _halves(state: State) -> tuple[Array, Array]:
    positive = state.layout.bins_per_sign
    histogram = state.histogram
    return histogram[:, :positive], histogram[:, positive:]


@functools.cache
def _edge_table(layout: Layout, signed: bool) -> Edges:
    edges = np.array(layout.abs_edges)
    return np.concatenate((-edges[::-1], edges) if signed else ([0.0], edges))


# uploads are kept by stream, since another stream would not wait for them
@functools.lru_cache(maxsize=64)
def _device_edges(layout: Layout, signed: bool, device: Any, stream: int) -> Array:
    return _upload(_edge_table(layout, signed), device)


@functools.lru_cache(maxsize=64)
def _device_values(values: tuple[float, ...], device: Any, stream: int) -> Array:
    return _upload(np.array(values, dtype=np.float64), device)


def _upload(values: Edges, device: Any) -> Array:
    import torch

    return torch.from_numpy(values).to(device, non_blocking=True)


def _stream(device: Any) -> int:
    if device.type != "cuda":
        return 0
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def on_device_of(array: Array, values: Sequence[float] | Edges) -> Array:
    """float64 values where ``array`` is; small ones are uploaded once, without a sync."""
    if namespace(array) is np:
        return np.asarray(values, dtype=np.float64)
    return _device_values(tuple(values), array.device, _stream(array.device))


def take(values: Array, index: Array) -> Array:
    """values[s, index[s, q]]: (S, Q)."""
    if namespace(values) is np:  # take_along_axis does the same in five times the time
        return values[np.arange(len(values))[:, None], index]
    return values.gather(1, index)


def repeat(values: Array, times: int) -> Array:
    """Each of the values so many times: (len(values) x times,)."""
    if namespace(values) is np:
        return values.repeat(times)
    return values.reshape(-1, 1).expand(-1, times).reshape(-1)  # repeat_interleave may sync


def first_at_least(ascending: Array, wanted: Array) -> Array:
    """Index of the first of each row (S, cells) that is at least each of wanted (S, Q); past the end where none is."""
    xp = namespace(ascending)
    if xp is not np:
        return xp.searchsorted(ascending, wanted)
    return np.array([row.searchsorted(values) for row, values in zip(ascending, wanted, strict=True)])


def as_list(name: str, given: Numbers) -> tuple[list[float], bool]:
    """The numbers, and whether it was a single one."""
    scalar = not hasattr(given, "__iter__")
    try:
        if isinstance(given, str):
            raise TypeError("a string is no number")
        values = [float(given)] if scalar else [float(value) for value in given]  # type: ignore[arg-type, union-attr]
    except TypeError as error:
        raise TypeError(f"{name} must be a number or a sequence of numbers, got {given!r}") from error
    return values, scalar


def probabilities(q: Numbers) -> tuple[list[float], bool]:
    """The probabilities, all in [0, 1], and whether it was a single one."""
    values, scalar = as_list("q", q)
    for value in values:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"q must lie in [0, 1], got {value}: 0.99 is the 99th percentile")
    return values, scalar
