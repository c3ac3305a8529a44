"""Failures by what was being done, and messages that are said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from pyrlstats._guard import Guard

Result = TypeVar("Result")

_logger = logging.getLogger("pyrlstats")


class Failures:
    """Calls functions whose errors must not reach the trainer: one :class:`Guard` for each thing that is done."""

    def __init__(self) -> None:
        self._guards: dict[str, Guard] = {}
        self._said: set[str] = set()

    def __call__(self, doing: str, function: Callable[..., Result], *args: Any) -> Result | None:
        guard = self._guards.setdefault(doing, Guard(f"pyrlstats in TRL: to {doing}"))
        return guard(function, *args)

    @property
    def counts(self) -> dict[str, int]:
        """What could not be done -> how often."""
        return {doing: guard.failures for doing, guard in self._guards.items() if guard.failures}

    def say_once(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _logger.log(level, text)
