"""Many states at once: pooled exactly over neighbouring steps, and statistics of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pyrlstats import quantiles as _quantiles
from pyrlstats.layout import CORE, COUNTS, MAXIMA, SUMS
from pyrlstats.monitor.rules_names import quantile_level
from pyrlstats.slice_stats import SCALARS, SliceStats, SliceView
from pyrlstats.state import State, rescale_, scale_exponent
from pyrlstats.watch.runs import Run

Floats = NDArray[np.float64]

_BLOCK = 64  # states that are looked at together


@dataclass(frozen=True)
class Group:
    """The pooled statistics of neighbouring steps.

    Attributes:
        first, last: steps it covers, both included.
        stats: pooled exactly.
        count: steps with statistics among them.
    """

    first: int
    last: int
    stats: SliceStats
    count: int

    @property
    def middle(self) -> float:
        """Where it is drawn."""
        return (self.first + self.last) / 2.0


@dataclass(frozen=True)
class Pooled:
    """A run in at most so many groups.

    Attributes:
        groups: by step; steps without statistics are in none.
        lost: steps whose state could not be read, or is of another make than those before.
    """

    groups: list[Group]
    lost: int


class _Sum:
    """States as they are added: counts at once, the weights' sums when the largest x is known."""

    def __init__(self, like: State) -> None:
        self._like = like
        self._whole = len(like.names) * (len(COUNTS) + like.layout.n_bins)
        self._buffer = np.zeros_like(like.buffer)
        self._maxima = np.full_like(like.maxima, -np.inf)
        self._sums: list[Floats] = []
        self._highest: list[Floats] = []
        self.count = 0

    def add(self, state: State) -> None:
        self._buffer[: self._whole] += state.buffer[: self._whole]
        np.maximum(self._maxima, state.maxima, out=self._maxima)
        self._sums.append(state.sums.copy())  # views would keep the whole state in memory
        self._highest.append(state.maximum("max_x").copy())
        self.count += 1
        if self.count % 1024 == 0:  # so that a group of many steps stays small
            self._fold()

    def _fold(self) -> None:
        highest = self._maxima[:, MAXIMA.index("max_x")].copy()
        sums = np.array(self._sums)
        exponents = scale_exponent(np.array(self._highest)) - scale_exponent(highest)
        flat = sums.reshape(-1, len(SUMS))
        rescale_(CORE, flat, exponents.ravel())
        self._sums, self._highest = [flat.reshape(sums.shape).sum(0)], [highest]

    def state(self) -> State:
        self._fold()
        state = replace(self._like, buffer=self._buffer)
        state.sums[...] = self._sums[0]
        state.maxima[...] = self._maxima
        return state


def pool(run: Run, most: int) -> Pooled:
    """The states of a run merged into at most ``most`` groups of equally many steps: nothing is averaged or left out.

    Reads every state once and holds the groups only.
    """
    n = len(run.steps)
    if run.states is None or not n:
        return Pooled([], 0)
    size = -(-n // most)
    groups: list[Group] = []
    lost = 0
    like: State | None = None
    total: _Sum | None = None
    for index, state in enumerate(run.states.read(range(n))):
        if state is not None:
            like = like or state
            if _fits(like, state):
                total = total or _Sum(like)
                total.add(state)
            else:
                lost += 1
        else:
            lost += run.states.has(index)
        if total is not None and (index + 1 == n or (index + 1) % size == 0):
            first = int(run.steps[index - index % size])
            groups.append(Group(first, int(run.steps[index]), SliceStats(total.state()), total.count))
            total = None
    return Pooled(groups, lost)


def _fits(one: State, other: State) -> bool:
    return (one.names, one.layout, one.clip) == (other.names, other.layout, other.clip)


def merge(groups: Sequence[Group]) -> Group:
    """Several groups, at least one, as one."""
    first, *rest = groups
    stats = first.stats.merge([group.stats for group in rest])
    return Group(first.first, groups[-1].last, stats, sum(group.count for group in groups))


def stacked(states: Sequence[State]) -> State:
    """Many states of one make as one, with the slices of the first, then those of the second, and so on."""
    first = states[0]
    buffer = np.concatenate(
        [
            np.concatenate([getattr(state, part).ravel().view(np.int64) for state in states])
            for part in ("counts", "histogram", "sums", "maxima")
        ]
    )
    return replace(first, names=first.names * len(states), buffer=buffer)


def statistics(run: Run, names: Sequence[str]) -> dict[str, Floats]:
    """Statistics of every step and slice, from the states: ``slice/statistic`` -> (n,), NaN where there is no state.

    Args:
        run: with states.
        names: scalar statistics and quantiles.
    """
    n = len(run.steps)
    if run.states is None:
        return {}
    slices = run.states.names
    columns = {name: np.full((n, len(slices)), math.nan) for name in names}
    block: list[State] = []
    at: list[int] = []

    def evaluate() -> None:
        state = stacked(block)
        for name, values in evaluated(state, names).items():
            columns[name][at] = values.reshape(len(block), len(slices))
        block.clear()
        at.clear()

    like: State | None = None
    for index, state in enumerate(run.states.read(range(n))):
        if state is None:
            continue
        like = like or state
        if not _fits(like, state):
            continue
        block.append(state)
        at.append(index)
        if len(block) == _BLOCK:
            evaluate()
    if block:
        evaluate()
    return {f"{slice_name}/{name}": columns[name][:, i] for i, slice_name in enumerate(slices) for name in names}


def evaluated(state: State, names: Sequence[str]) -> Mapping[str, Floats]:
    """Scalar statistics and quantiles of every slice of a state, (S,) float64 each."""
    result: dict[str, Floats] = {}
    with np.errstate(all="ignore"):
        for of_abs, function in ((False, _quantiles.quantile), (True, _quantiles.abs_quantile)):
            levels = {name: level[1] for name in names if (level := quantile_level(name)) and level[0] is of_abs}
            if levels:
                values = function(state, list(levels.values()))
                result.update({name: values[:, index] for index, name in enumerate(levels)})
        for name in names:
            if name in SCALARS:
                result[name] = np.asarray(getattr(SliceView, name).function(state), np.float64)
    return result
