"""A slice's histogram as the few bars that a dashboard takes: exact counts, finite edges."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyrlstats.results import Statistics

MOST_BARS = 512  # what Weights & Biases and trackio take


class Bars(NamedTuple):
    """Counts and edges as ``numpy.histogram`` returns them.

    Attributes:
        counts: int64 (n,), tokens or values.
        edges: float64 (n + 1,), finite, ascending, all of them edges of bins of the layout but for infinite ones,
            which are cut to the extrema.
    """

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]


def bars_of(stats: Statistics[Any], name: str, at_most: int = MOST_BARS) -> Bars | None:
    """The finest bars of a slice of which there are ``at_most``; None where it holds nothing finite.

    2^k neighbouring bins become one bar, the same k everywhere, so that every count is exact and none is split. The
    zeros and the bins beside them, which reach to 0, are one bar. Empty bars are left out at both ends.

    Args:
        stats: in NumPy memory.
        name: of the slice.
        at_most: bars, at least 3.
    """
    state = stats.state
    row = state.names.index(name)
    positive = state.layout.bins_per_sign
    negative_counts, positive_counts = state.histogram[row, :positive][::-1], state.histogram[row, positive:]
    zeros = state.count("n_zero")[row]
    magnitudes = np.array(state.layout.abs_edges)
    width = 1
    while True:
        low, high = (half.reshape(-1, width).sum(1) for half in (negative_counts, positive_counts))
        counts = np.concatenate((low[:0:-1], [low[0] + zeros + high[0]], high[1:]))
        filled = np.flatnonzero(counts)
        if not len(filled):
            return None
        first, last = filled[0], filled[-1] + 1
        if last - first <= at_most or width == positive:
            break
        width *= 2
    inner = magnitudes[width::width]
    edges = np.concatenate((-inner[::-1], inner))[first : last + 1]
    if np.isinf(edges[0]):
        edges[0] = min(-state.maximum("neg_min_x")[row], np.nextafter(edges[1], -np.inf))
    if np.isinf(edges[-1]):
        edges[-1] = max(state.maximum("max_x")[row], np.nextafter(edges[-2], np.inf))
    return Bars(counts[first:last], edges)


def without_empty_runs(bars: Bars) -> Bars:
    """The same with neighbouring empty bars as one: smaller to store, nothing else changes."""
    counts = bars.counts
    kept = np.r_[True, (counts[1:] != 0) | (counts[:-1] != 0)]
    return Bars(counts[kept], bars.edges[np.r_[kept, True]])
