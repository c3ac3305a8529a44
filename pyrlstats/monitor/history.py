"""The last observations of every signal in rings of fixed size, and what they were over the warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTH = 512  # observations of a signal that are kept at least
LONGEST = 4096  # steps that are looked back at most, and so the most observations that rules may need
MOST_SIGNALS = 4096  # names beyond these are not kept

Floats = NDArray[np.float64]


class Rings:
    """The last observations of every signal, by name; see :class:`pyrlstats.monitor.alerts.History`.

    A signal that comes rarely is remembered as long as one that comes at every step is in observations, up to LONGEST
    steps.

    Args:
        depth: observations kept of each signal, at most LONGEST.

    Attributes:
        observed: steps observed so far.
        refused: names that came after MOST_SIGNALS others.
        medians, spreads: over the frozen warm-up, by name; see :meth:`freeze`.
    """

    def __init__(self, depth: int = DEPTH) -> None:
        self.observed = 0
        self.refused = 0
        self.medians: dict[str, float] = {}
        self.spreads: dict[str, float] = {}
        self._depth = min(depth, LONGEST)
        self._steps = np.zeros(LONGEST, np.int64)
        self._columns: dict[str, int] = {}
        self._room(64)

    def _room(self, signals: int) -> None:
        self._values = np.full((signals, self._depth), np.nan)
        self._at = np.full((signals, self._depth), -1, np.int64)  # the number of the observed step
        self._counts = np.zeros(signals, np.int64)

    def push(self, step: int, signals: Mapping[str, float]) -> None:
        """Add one observed step."""
        self._steps[self.observed % LONGEST] = step
        known = self._columns
        for name in signals:
            if name not in known:
                self._new_column(name)
        columns = np.array([known[name] for name in signals if name in known], np.int64)
        values = np.array([value for name, value in signals.items() if name in known], np.float64)
        there = ~np.isnan(values)  # NaN is as good as absent, and must not push out what was there
        columns, values = columns[there], values[there]
        places = self._counts[columns] % self._depth
        self._values[columns, places] = values
        self._at[columns, places] = self.observed
        self._counts[columns] += 1
        self.observed += 1

    def _new_column(self, name: str) -> None:
        used = len(self._columns)
        if used >= MOST_SIGNALS:
            self.refused += 1
            return
        if used == len(self._counts):
            before = self._values, self._at, self._counts
            self._room(2 * used)
            for new, old in zip((self._values, self._at, self._counts), before, strict=True):
                new[:used] = old
        self._columns[name] = used

    @property
    def names(self) -> tuple[str, ...]:
        """Every signal that came."""
        return tuple(self._columns)

    def last(self, signal: str, n: int) -> Floats:
        """The signal at the last n steps, oldest first; NaN where it was absent, empty if it never came."""
        column = self._columns.get(signal)
        if column is None:
            return np.zeros(0)
        size = min(n, self.observed, LONGEST)
        count = int(self._counts[column])
        kept = min(size, count, self._depth)
        if kept == 0:
            return np.full(size, np.nan)
        first = self.observed - size
        end = (count - 1) % self._depth + 1
        places: Any = slice(end - kept, end) if end >= kept else np.arange(end - kept, end) % self._depth
        at = self._at[column, places]
        values: Floats = self._values[column, places].copy()
        if kept == size and at[0] == first:
            return values  # it came at every step
        at = at - first
        result = np.full(size, np.nan)
        result[at[at >= 0]] = values[at >= 0]
        return result

    def steps(self, n: int) -> NDArray[np.int64]:
        """The numbers of the last n steps, at most LONGEST."""
        size = min(n, self.observed, LONGEST)
        return self._steps[np.arange(self.observed - size, self.observed) % LONGEST]

    def baseline(self, signal: str) -> float | None:
        """Median of the signal over the frozen warm-up."""
        return self.medians.get(signal)

    def spread(self, signal: str) -> float | None:
        """Robust standard deviation of the signal over the frozen warm-up, see :func:`robust_spread`."""
        return self.spreads.get(signal)

    def freeze(self, warmup: Mapping[str, Floats]) -> None:
        """Take these observations of signals as their baseline; of those that have one, it stays."""
        for name, values in warmup.items():
            finite = values[np.isfinite(values)]
            if finite.size and name not in self.medians:
                self.medians[name] = float(np.median(finite))
                self.spreads[name] = robust_spread(finite)

    def save(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """JSON values and arrays that :meth:`restore` takes, into rings of any depth."""
        used = len(self._columns)
        oldest_first = (self._counts[:used, None] + np.arange(self._depth)) % self._depth
        header = {
            "observed": self.observed,
            "refused": self.refused,
            "names": list(self._columns),
            "medians": self.medians,
            "spreads": self.spreads,
        }
        return header, {
            "steps": self._steps,
            "counts": self._counts[:used],
            "values": np.take_along_axis(self._values[:used], oldest_first, 1),
            "at": np.take_along_axis(self._at[:used], oldest_first, 1),
        }

    def restore(self, saved: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue where :meth:`save` was called."""
        self.observed, self.refused = int(saved["observed"]), int(saved["refused"])
        self.medians, self.spreads = dict(saved["medians"]), dict(saved["spreads"])
        self._columns = {name: column for column, name in enumerate(saved["names"])}
        self._steps = np.array(arrays["steps"], np.int64)
        used = len(self._columns)
        room = 64
        while room < used:
            room *= 2
        self._room(room)
        self._counts[:used] = arrays["counts"]
        kept = min(self._depth, arrays["values"].shape[1])
        places = (self._counts[:used, None] - kept + np.arange(kept)) % self._depth
        for ring, name in ((self._values, "values"), (self._at, "at")):
            np.put_along_axis(ring[:used], places, arrays[name][:, arrays[name].shape[1] - kept :], 1)


def robust_spread(values: Floats) -> float:
    """1.4826 times the median distance from the median; not less than a thousandth of the median.

    A warm-up that never moved would make any change infinitely many deviations.

    Args:
        values: finite, at least one.
    """
    median = float(np.median(values))
    return max(1.4826 * float(np.median(np.abs(values - median))), 1e-3 * abs(median), 1e-12)
