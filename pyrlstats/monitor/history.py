"""The last steps of every signal in rings of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTH = 512  # observed steps kept
MOST_SIGNALS = 4096  # names beyond these are not kept

Floats = NDArray[np.float64]


class Rings:
    """The values of the last DEPTH observed steps, by name; see :class:`pyrlstats.monitor.alerts.History`.

    Attributes:
        observed: steps observed so far.
        refused: names that came after MOST_SIGNALS others.
        medians: of the frozen baseline, by name; empty before it.
    """

    def __init__(self) -> None:
        self.observed = 0
        self.refused = 0
        self.medians: dict[str, float] = {}
        self._steps = np.zeros(DEPTH, np.int64)
        self._columns: dict[str, int] = {}
        self._values = np.full((DEPTH, 64), np.nan)

    def push(self, step: int, signals: Mapping[str, float]) -> None:
        """Add one observed step."""
        row = self.observed % DEPTH
        self.observed += 1
        self._steps[row] = step
        self._values[row] = np.nan
        for name, value in signals.items():
            column = self._columns.get(name)
            if column is None:
                column = self._new_column(name)
                if column is None:
                    continue
            self._values[row, column] = value

    def _new_column(self, name: str) -> int | None:
        if len(self._columns) >= MOST_SIGNALS:
            self.refused += 1
            return None
        column = self._columns[name] = len(self._columns)
        if column >= self._values.shape[1]:
            self._values = np.concatenate((self._values, np.full_like(self._values, np.nan)), 1)
        return column

    @property
    def names(self) -> tuple[str, ...]:
        """Every signal that came."""
        return tuple(self._columns)

    def _rows(self, n: int) -> NDArray[np.int64]:
        kept = min(n, self.observed, DEPTH)
        return np.arange(self.observed - kept, self.observed) % DEPTH

    def last(self, signal: str, n: int) -> Floats:
        """The signal at the last n steps, oldest first; NaN where it was absent, empty if it never came."""
        column = self._columns.get(signal)
        if column is None:
            return np.zeros(0)
        values: Floats = self._values[self._rows(n), column]
        return values

    def steps(self, n: int) -> NDArray[np.int64]:
        """The numbers of the last n steps."""
        return self._steps[self._rows(n)]

    def baseline(self, signal: str) -> float | None:
        """Median of the signal over the frozen warm-up."""
        return self.medians.get(signal)

    def freeze(self, n: int) -> None:
        """Take the medians of the last n steps as the baseline."""
        for name in self._columns:
            values = self.last(name, n)
            finite = values[np.isfinite(values)]
            if finite.size:
                self.medians[name] = float(np.median(finite))

    def save(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """JSON values and arrays that :meth:`restore` takes."""
        used = len(self._columns)
        return (
            {"observed": self.observed, "refused": self.refused, "names": list(self._columns), "medians": self.medians},
            {"steps": self._steps, "values": self._values[:, :used]},
        )

    def restore(self, saved: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue where :meth:`save` was called."""
        self.observed, self.refused = int(saved["observed"]), int(saved["refused"])
        self.medians = dict(saved["medians"])
        self._columns = {name: column for column, name in enumerate(saved["names"])}
        self._steps = np.array(arrays["steps"], np.int64)
        room = 64
        while room < len(self._columns):
            room *= 2
        self._values = np.full((DEPTH, room), np.nan)
        self._values[:, : len(self._columns)] = arrays["values"]
