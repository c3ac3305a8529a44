"""``Sinks``: several sinks as one, which never raises into training."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from pyrlstats._guard import Guard
from pyrlstats.results import Statistics
from pyrlstats.sinks.protocol import Sink

_logger = logging.getLogger("pyrlstats")


class Sinks:
    """Writes each step to several sinks; whatever fails is counted, logged once, and does not reach the caller.

    Statistics are copied to the host once a step, whatever the number of sinks, and not at all where there is none.
    Itself a :class:`Sink`. With many ranks make it by :meth:`on_main_rank`.

    Args:
        sinks: written to in this order.
        prefix: of statistics that are given without one.

    Attributes:
        failures: name of a sink -> calls that have raised; "statistics" are those that could not be evaluated.
    """

    def __init__(self, sinks: Iterable[Sink] = (), prefix: str = "rl/") -> None:
        self.prefix = prefix
        self._guarded: list[tuple[Sink, Guard]] = []
        for sink in sinks:
            same = sum(type(other) is type(sink) for other, _ in self._guarded)
            name = type(sink).__name__ + (f" {same + 1}" if same else "")
            self._guarded.append((sink, Guard(name)))
        self._statistics = Guard("statistics")
        self._writes = 0

    @classmethod
    def on_main_rank(cls, make: Callable[[], Iterable[Sink]], prefix: str = "rl/") -> Sinks:
        """The sinks that ``make`` gives on rank 0; none on the other ranks, where it is not called.

        The rank is that of the default process group, else the environment's ``RANK``, else 0.
        """
        return cls(make() if _rank() == 0 else (), prefix)

    def __len__(self) -> int:
        return len(self._guarded)

    @property
    def failures(self) -> dict[str, int]:
        return {guard.what: guard.failures for guard in (*(guard for _, guard in self._guarded), self._statistics)}

    def write(
        self,
        step: int,
        stats: Statistics[Any] | Mapping[str, Statistics[Any]],
        scalars: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one step to every sink. Never raises. Syncs on a GPU: one copy to the host for each statistics.

        Args:
            step: of the trainer.
            stats: statistics, which get the prefix of these sinks, or prefix -> statistics.
            scalars: the caller's own numbers, such as the loss: anything that ``float`` takes.
        """
        if not self._guarded:
            return
        self._writes += 1
        on_host, numbers = self._statistics(self._evaluate_all, stats, scalars or {}) or ({}, {})
        for sink, guard in self._guarded:
            guard(sink.write, step, on_host, numbers)

    def _evaluate_all(
        self, stats: Statistics[Any] | Mapping[str, Statistics[Any]], scalars: Mapping[str, Any]
    ) -> tuple[dict[str, Statistics[Any]], dict[str, float]]:
        """What could be evaluated; one that cannot be is counted and does not keep out the others."""
        on_host: dict[str, Statistics[Any]] = {}
        numbers: dict[str, float] = {}
        for key, value in scalars.items():
            number = self._statistics(_number, value)
            if number is not None:
                numbers[key] = number
        given = {self.prefix: stats} if isinstance(stats, Statistics) else stats
        for prefix, one in given.items():
            evaluated = self._statistics(_evaluate, prefix, one)
            if evaluated is not None:
                on_host[prefix], of_one = evaluated
                numbers |= of_one
        return on_host, numbers

    def close(self) -> None:
        """Close every sink; those that have failed are logged with how often. Never raises."""
        for sink, guard in self._guarded:
            guard(sink.close)
        lost = {name: count for name, count in self.failures.items() if count}
        if lost:
            _logger.warning("of %d steps, calls that failed: %s", self._writes, lost)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    return float(value.item() if hasattr(value, "item") else value)  # float() of a tensor with grad warns


def _evaluate(prefix: str, stats: Statistics[Any]) -> tuple[Statistics[Any], dict[str, float]]:
    host = type(stats)(stats.state.to_host())
    return host, host.to_dict(prefix)


def _rank() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
