"""Statistics over time: exact over a window of steps, exponentially weighted as a separate type."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from pyrlstats.layout import COUNTS, MAXIMA
from pyrlstats.slice_stats import SliceStats, SliceView
from pyrlstats.state import Array, State, namespace, scale_exponent


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

    def push(self, stats: SliceStats) -> Window:
        """Add one step; the oldest one leaves when the window is full. Does not sync.

        Raises:
            ValueError: other slices, layout, clip or device than the steps before; nothing is changed.
        """
        if self._ring:
            self._ring[-1].state.check_mergeable(stats.state)
        self._ring.append(stats)
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


@dataclass(frozen=True)
class _DecayedState(State):
    """A state whose counts are weighted tokens: float64 in the same places."""

    def check_mergeable(self, other: State) -> None:
        raise ValueError(
            "decayed statistics never merge with others: their counts are weighted. Push exact statistics instead"
        )

    def _view(self, start: int, columns: int) -> Array:
        words = super()._view(start, columns)
        return words.view(namespace(words).float64)


class DecayedStats:
    """Exponentially weighted statistics: a token of t steps ago counts ``decay**t``.

    A type of its own, with float64 counts, that never merges with exact states. All scalar statistics and
    quantiles are available by slice; ``ess`` and ``n_tokens`` are in weighted tokens. The extrema are those of
    every token ever pushed: a maximum cannot be forgotten gradually.

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

    def push(self, stats: SliceStats) -> DecayedStats:
        """Weigh the past down by ``decay`` and add one step of exact statistics. Does not sync.

        Raises:
            ValueError: other slices, layout, clip or device than before, or decayed statistics; nothing is changed.
        """
        fresh = _weighted(stats.state)
        if self._stats is not None:
            past = self._stats.state
            State.check_mergeable(past, fresh)
            fresh = _decayed_sum(past, fresh, self.decay)
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


def _weighted(state: State) -> _DecayedState:
    """The same numbers with the counts as float64."""
    if isinstance(state, _DecayedState):
        raise ValueError("DecayedStats takes exact statistics, got decayed ones")
    xp = namespace(state.buffer)
    copy = state.copy()
    weighted = _DecayedState(copy.names, copy.layout, copy.clip, copy.buffer)
    integers = len(state.names) * (len(COUNTS) + state.layout.n_bins)
    floats = xp.asarray(state.buffer[:integers], dtype=xp.float64)
    weighted.buffer.view(xp.float64)[:integers] = floats
    return weighted


def _decayed_sum(past: State, fresh: State, decay: float) -> _DecayedState:
    """decay * past + fresh, both rescaled to the common maximum."""
    xp = namespace(past.buffer)
    maxima = xp.maximum(past.maxima, fresh.maxima)
    exponent = scale_exponent(maxima[:, MAXIMA.index("max_x")])
    total = _DecayedState(past.names, past.layout, past.clip, past.copy().buffer)
    total.buffer.view(xp.float64)[...] = decay * past.buffer.view(xp.float64) + fresh.buffer.view(xp.float64)
    total.sums[...] = decay * past.rescaled_sums(exponent) + fresh.rescaled_sums(exponent)
    total.maxima[...] = maxima
    return total
