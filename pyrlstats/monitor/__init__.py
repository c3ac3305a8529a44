"""Watching a run: detectors, alerts and the folder a run leaves behind.

:class:`Monitor` is what a trainer uses; :class:`RunReader` reads what it leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyrlstats.monitor.alerts import Alert, History, Rules
from pyrlstats.monitor.folder import RunReader
from pyrlstats.monitor.monitor import Monitor
from pyrlstats.monitor.webhook import Webhook

if TYPE_CHECKING:
    from pyrlstats.monitor.rules_evaluation import RuleBook

__all__ = ["Alert", "History", "Monitor", "RuleBook", "Rules", "RunReader", "Webhook"]


def __getattr__(name: str) -> Any:
    if name == "RuleBook":  # when asked for: it needs pydantic
        from pyrlstats.monitor.rules_evaluation import RuleBook

        return RuleBook
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
