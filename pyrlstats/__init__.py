"""Distribution statistics of policy log-ratios for reinforcement-learning post-training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyrlstats import reference
from pyrlstats._build import build_info, version
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.api import slice_stats
from pyrlstats.exact import exact_quantiles
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import SliceStats

if TYPE_CHECKING:
    from pyrlstats.monitor import Monitor

__version__ = version()

__all__ = [
    "Layout",
    "Monitor",
    "SliceAccumulator",
    "SliceStats",
    "__version__",
    "build_info",
    "exact_quantiles",
    "reference",
    "slice_stats",
]


def __getattr__(name: str) -> Any:
    if name == "Monitor":  # when asked for, so that importing the statistics stays light
        from pyrlstats.monitor import Monitor

        return Monitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
