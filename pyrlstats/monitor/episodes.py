"""An episode of trouble is told once: when it begins, and again when it becomes worse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pyrlstats.monitor.alerts import LEVELS, Alert, Level

QUIET = 20  # observed steps without the trouble after which it is over


class Finding(NamedTuple):
    """Trouble that holds at this step.

    Attributes:
        key: the same at every step of the same trouble.
        alert: what to tell; None where an episode goes on but would not begin.
        cool_down: steps without the trouble, by their numbers, after which it is over; None: QUIET observed steps.
    """

    key: str
    alert: Alert | None
    cool_down: int | None = None


class _Episode(NamedTuple):
    """``last`` is when it held last: the number of the step where there is a cool_down, else that of observed steps."""

    level: Level
    last: int
    cool_down: int | None


class Episodes:
    """Which trouble is under way. Bounded by what is under way at once."""

    def __init__(self) -> None:
        self._under_way: dict[str, _Episode] = {}

    def tell(self, findings: Iterable[Finding], observed: int, step: int) -> list[Alert]:
        """The alerts to tell: of new trouble, and of what became worse.

        Args:
            findings: of this step.
            observed: how many steps have been observed.
            step: number of this one.
        """
        told = []
        for key, alert, cool_down in findings:
            current = self._under_way.get(key)
            last = observed if cool_down is None else step
            if alert is None:
                if current is not None:
                    self._under_way[key] = current._replace(last=last)
                continue
            worse = current is None or LEVELS.index(alert.level) > LEVELS.index(current.level)
            level = alert.level if worse or current is None else current.level
            self._under_way[key] = _Episode(level, last, cool_down)
            if worse:
                told.append(alert)
        self._under_way = {
            key: each
            for key, each in self._under_way.items()
            if (observed - each.last < QUIET if each.cool_down is None else step - each.last < each.cool_down)
        }
        return told

    def to_json(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        return {key: list(each) for key, each in self._under_way.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue where :meth:`to_json` was called."""
        self._under_way = {key: _Episode(*each) for key, each in saved.items()}
