"""What has been counted since the last log, and its reduction: one for all ratios together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

Stats = dict[str, SliceStats]  # ratio -> its statistics

_FIELDS = ("counts", "histogram", "sums", "maxima")


class Window:
    """One accumulator a ratio, and how many micro-batches there were, whatever became of them."""

    def __init__(self, ratios: Sequence[str], make: Callable[[], SliceAccumulator]) -> None:
        self.accumulators = {ratio: make() for ratio in ratios}
        self.micro_batches = 0
        self.counted: set[str] = set()

    def reset(self) -> None:
        self.micro_batches = 0
        self.counted = set()
        for accumulator in self.accumulators.values():
            accumulator.reset()


class Reducer:
    """Pools a window over the ranks and brings it to the host: one MAX, one SUM and one copy for all ratios.

    The ratios' states are copied into one joined state, whose size and slices are the same on every rank whatever the
    ratios hold; its memory is allocated here.

    Args:
        ratios: the ratios of every window.
        make: an accumulator of these slice names.
        names: the slices of each ratio.
        group: the process group of ``all_reduce``.
        ranks: how many there are; with one nothing is sent.

    Attributes:
        groups: what the states hold beside their core.
    """

    def __init__(
        self,
        ratios: Sequence[str],
        names: Sequence[str],
        make: Callable[[Sequence[str]], SliceAccumulator],
        group: Any,
        ranks: int,
    ) -> None:
        self._ratios, self._names, self._group, self._ranks = tuple(ratios), tuple(names), group, ranks
        self._accumulator = make([f"{ratio}.{name}" for ratio in ratios for name in names])
        self._joined = self._accumulator.compute().state
        self.groups = self._joined.groups

    def take(self, window: Window) -> Stats:
        """The statistics of the ratios that the window holds, on any rank, in NumPy memory; the window is emptied."""
        counted = set(window.counted)
        try:
            self._join({ratio: one.compute().state for ratio, one in window.accumulators.items()})
        finally:
            window.reset()
        pooled = self._accumulator.reset().merge(SliceStats(self._joined))
        if self._ranks > 1:
            pooled.all_reduce(self._group)
        host = pooled.compute().state.to_host()
        stats = {ratio: SliceStats(self._split(host, index)) for index, ratio in enumerate(self._ratios)}
        return {ratio: one for ratio, one in stats.items() if ratio in counted or one.state.count("n_tokens").any()}

    def _rows(self, index: int) -> slice:
        return slice(index * len(self._names), (index + 1) * len(self._names))

    def _join(self, states: Mapping[str, State]) -> None:
        for index, ratio in enumerate(self._ratios):
            for joined, one in zip(self._joined.sections(), states[ratio].sections(), strict=True):
                for field in _FIELDS:
                    getattr(joined, field)[self._rows(index)] = getattr(one, field)

    def _split(self, joined: State, index: int) -> State:
        part = State.empty(self._names, joined.layout, joined.clip, groups=joined.groups)
        for one, whole in zip(part.sections(), joined.sections(), strict=True):
            for field in _FIELDS:
                getattr(one, field)[...] = getattr(whole, field)[self._rows(index)]
        return part
