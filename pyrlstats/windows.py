"""Statistics over time: exact over a window of steps, exponentially weighted as a separate type."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.slice_stats import SliceStats, SliceView
from pyrlstats.state import Array, State, namespace, on_one_device


class Window:
    """Exact statistics over the last ``steps`` steps: a ring of states, merged when asked; nothing is subtracted.

    Args:
        steps: how many steps are kept, at least 1.

    Raises:
        ValueError: steps below 1.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self._ring: deque[SliceStats] = deque(maxlen=steps)

    def push(self, stats: SliceStats | SliceAccumulator) -> Window:
        """Add one step; the oldest one leaves when the window is full. Does not sync.

        Raises:
            TypeError: statistics of another kind.
            ValueError: other slices, layout or clip than the steps before, or tensors on another device; nothing
                is changed.
        """
        step = _snapshot(stats)
        if self._ring:
            before, new = on_one_device([self._ring[-1].state, step.state])
            before.check_mergeable(new)
        self._ring.append(step)
        return self

    def __len__(self) -> int:
        return len(self._ring)

    def compute(self, last: int | None = None) -> SliceStats:
        """The pooled statistics of the last ``last`` steps (None: all kept). Does not sync.

        Raises:
            ValueError: an empty window, or ``last`` outside 1 to ``len(self)``.
        """
        if last is None:
            last = len(self._ring)
        if not 1 <= last <= len(self._ring):
            raise ValueError(f"last must lie in 1 to {len(self._ring)}, the steps kept, got {last}")
        chosen = list(self._ring)[-last:]
        return chosen[0].merge(chosen[1:])


def _snapshot(stats: SliceStats | SliceAccumulator) -> SliceStats:
    if isinstance(stats, SliceAccumulator):
        return stats.compute()
    if not isinstance(stats, SliceStats):
        raise TypeError(f"push takes SliceStats or a SliceAccumulator, got {type(stats).__name__}")
    return stats


def between(steps: Iterable[tuple[int, SliceStats]], first: int, last: int) -> SliceStats:
    """The pooled statistics of the (step, statistics) pairs from step ``first`` to ``last``, both included.

    Raises:
        ValueError: no step lies there, or the steps differ in slices, layout or clip.
    """
    chosen = [stats for step, stats in steps if first <= step <= last]
    if not chosen:
        raise ValueError(f"no step lies from {first} to {last}")
    return chosen[0].merge(chosen[1:])


# a slice whose finite tokens weigh less than this has been forgotten: below, the sums would underflow one by one
_FORGOTTEN = 2.0**-100
_OF_FINITE_TOKENS = ("n_zero", "clip_low", "clip_high", "n_far")


@dataclass(frozen=True)
class _DecayedState(State):
    """A state whose counts are weighted tokens: float64 in the same places."""

    def _view(self, start: int, columns: int) -> Array:
        words = super()._view(start, columns)
        return words.view(namespace(words).float64)

    def n_finite(self) -> Array:
        # n_tokens minus the others would leave rounding errors where it should leave nothing
        return self.histogram.sum(-1) + self.count("n_zero")


def _aged(state: State, decay: float) -> State:
    """A copy of a decayed state in which every token weighs ``decay`` times as much."""
    xp = namespace(state.buffer)
    copy = state.copy()
    tokens_kept: Array = None
    for aged in copy.sections():
        binned = aged.rows.binned
        if binned:
            k3 = aged.sum("far_k3")
            k3[...] = xp.where(k3 < math.inf, k3, 0.0)  # infinity would not fade
        for part in (aged.counts, aged.histogram, aged.sums):
            part *= decay
        kept = aged.n_finite() >= _FORGOTTEN if binned else tokens_kept
        tokens_kept = kept if tokens_kept is None else tokens_kept
        for part, nothing in ((aged.histogram, 0.0), (aged.sums, 0.0), (aged.maxima, -math.inf)):
            part[...] = xp.where(kept[:, None], part, nothing)
        for name in _OF_FINITE_TOKENS if binned else aged.rows.counts:
            aged.count(name)[...] = xp.where(kept, aged.count(name), 0.0)
        if binned:
            others = aged.count("n_nan") + aged.count("n_pos_inf") + aged.count("n_neg_inf")
            aged.count("n_tokens")[...] = aged.n_finite() + others
    return copy


class DecayedStats:
    """Exponentially weighted statistics: a token of t steps ago counts ``decay**t``.

    A type of its own, with float64 counts, that never merges with exact states. All scalar statistics and
    quantiles are available by slice; ``ess`` and ``n_tokens`` are in weighted tokens. The extrema, and with them
    the scale of the weights, are those of every token ever pushed: a maximum cannot be forgotten gradually. They go
    when the whole slice is forgotten, its finite tokens weighing less than 2^-100: it is empty again then.
    A token whose k3 float64 cannot hold (x above 709) makes ``kl_k3`` infinite at its own step; from the next push
    on the sum of k3 over far tokens (abs(x) from 0.5 on) starts anew, without it and those before it.

    Args:
        decay: weight of the past at each push, 0 < decay < 1; the mean age is decay / (1 - decay) steps.

    Raises:
        ValueError: decay outside (0, 1).
    """

    def __init__(self, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay must satisfy 0 < decay < 1, got {decay}")
        self.decay = float(decay)
        self._stats: SliceStats | None = None

    def push(self, stats: SliceStats | SliceAccumulator) -> DecayedStats:
        """Weigh the past down by ``decay`` and add one step of exact statistics. Does not sync.

        Raises:
            TypeError: statistics of another kind.
            ValueError: other slices, layout or clip than before, tensors on another device, or decayed statistics;
                nothing is changed.
        """
        fresh = _weighted(_snapshot(stats).state)
        if self._stats is not None:
            past, fresh = on_one_device([self._stats.state, fresh])
            past.check_mergeable(fresh)
            fresh.merge_(_aged(past, self.decay))
        self._stats = SliceStats(fresh)
        return self

    def __getitem__(self, name: str) -> SliceView:
        """The weighted statistics of one slice.

        Raises:
            KeyError: no such slice, or nothing pushed yet.
        """
        if self._stats is None:
            raise KeyError(f"no slice {name!r}: nothing has been pushed yet")
        return self._stats[name]

    def to_dict(self, prefix: str = "", **quantiles: Any) -> dict[str, float]:
        """As :meth:`SliceStats.to_dict`; empty before the first push. Counts are weighted, so floats."""
        return {} if self._stats is None else self._stats.to_dict(prefix, **quantiles)


def _weighted(state: State) -> State:
    """The same numbers in memory of their own with the counts as float64."""
    if isinstance(state, _DecayedState):
        raise ValueError("DecayedStats takes exact statistics, got decayed ones")
    copy = state.copy()
    weighted = _DecayedState(copy.names, copy.layout, copy.clip, copy.buffer, copy.groups)
    for section, exact in zip(weighted.sections(), state.sections(), strict=True):
        section.counts[...] = exact.counts
        section.histogram[...] = exact.histogram
    return weighted
