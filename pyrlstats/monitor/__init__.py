"""Watching a run: detectors, alerts and the folder a run leaves behind.

:class:`Monitor` is what a trainer uses; :class:`RunReader` reads what it leaves.
"""

from pyrlstats.monitor.alerts import Alert, History, Rules
from pyrlstats.monitor.folder import RunReader
from pyrlstats.monitor.monitor import Monitor
from pyrlstats.monitor.webhook import Webhook

__all__ = ["Alert", "History", "Monitor", "Rules", "RunReader", "Webhook"]
