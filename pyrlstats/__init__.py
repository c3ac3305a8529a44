"""Distribution statistics of policy log-ratios for reinforcement-learning post-training."""

from pyrlstats import reference
from pyrlstats._build import build_info, version
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.api import slice_stats
from pyrlstats.exact import exact_quantiles
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import SliceStats

__version__ = version()

__all__ = [
    "Layout",
    "SliceAccumulator",
    "SliceStats",
    "__version__",
    "build_info",
    "exact_quantiles",
    "reference",
    "slice_stats",
]
