"""What a sink is: two methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pyrlstats.results import Statistics


class Sink(Protocol):
    """Takes the statistics of a step. It may raise: :class:`~pyrlstats.sinks.Sinks` counts that and goes on."""

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Take one step.

        Args:
            step: of the trainer.
            stats: prefix -> statistics, in NumPy memory; not to be changed.
            scalars: what ``to_dict(prefix)`` gives for each of them, and the caller's own numbers; NaN where a slice
                is empty.
        """

    def close(self) -> None:
        """Hand over what is kept back. A sink may be written to again afterwards."""
