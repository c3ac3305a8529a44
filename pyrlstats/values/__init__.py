"""Distribution statistics of any quantity: entropy, reward, advantage, value, return, gradient norm, length.

:func:`value_stats` runs the engine of :func:`pyrlstats.slice_stats` on the values themselves: the same histogram,
the same exact counts, merging and quantiles, without the names that only log-ratios have. :func:`exact_quantiles` finds
quantiles in a second pass. :func:`explained_variance` compares predicted values with returns,
:func:`group_reward_stats` looks at the groups of GRPO-style training.
"""

from pyrlstats.values.critic import ExplainedVariance, explained_variance
from pyrlstats.values.exact import exact_quantiles
from pyrlstats.values.groups import GroupRewardStats, group_reward_stats
from pyrlstats.values.stats import VALUE_LAYOUT, ValueAccumulator, ValueStats, ValueView, value_stats

__all__ = [
    "VALUE_LAYOUT",
    "ExplainedVariance",
    "GroupRewardStats",
    "ValueAccumulator",
    "ValueStats",
    "ValueView",
    "exact_quantiles",
    "explained_variance",
    "group_reward_stats",
    "value_stats",
]
