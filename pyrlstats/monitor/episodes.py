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
    """

    key: str
    alert: Alert | None


class Episodes:
    """Which trouble is under way. Bounded by what is under way at once."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[Level, int]] = {}

    def tell(self, findings: Iterable[Finding], observed: int) -> list[Alert]:
        """The alerts to tell at observation number ``observed``: of new trouble, and of what became worse."""
        told = []
        for key, alert in findings:
            current = self._under_way.get(key)
            if alert is None:
                if current is not None:
                    self._under_way[key] = (current[0], observed)
                continue
            worse = current is None or LEVELS.index(alert.level) > LEVELS.index(current[0])
            self._under_way[key] = (alert.level if worse or current is None else current[0], observed)
            if worse:
                told.append(alert)
        self._under_way = {
            key: (level, last) for key, (level, last) in self._under_way.items() if observed - last < QUIET
        }
        return told

    def to_json(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        return {key: list(value) for key, value in self._under_way.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue where :meth:`to_json` was called."""
        self._under_way = {key: (level, int(last)) for key, (level, last) in saved.items()}
