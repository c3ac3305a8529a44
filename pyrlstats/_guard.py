"""Monitoring never takes a training run down: what fails is counted, said once, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

_logger = logging.getLogger("pyrlstats")


class Guard:
    """Calls functions whose errors must not reach the trainer.

    Attributes:
        failures: how many calls have raised.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.failures = 0

    def __call__(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result | None:
        """The result of the function; None, counted and the first time logged with its traceback, where it raises."""
        try:
            return function(*args, **kwargs)
        except Exception:
            self.failures += 1
            if self.failures == 1:
                _logger.warning(
                    "%s failed; training goes on, further failures are only counted", self.what, exc_info=True
                )
            return None
