"""The far end of a distribution: how heavy the tail of the importance weights is, and which tokens are in it.

:func:`tail_shape` keeps the largest log-ratios of every slice and says how heavy the tail of w = exp(x) is, by Pareto
k-hat and by Hill's estimator. :func:`top_tokens` says which tokens have the largest abs(x), so that a person can read
them. :mod:`pyrlstats.tails.reference` defines both estimators for one sample, in NumPy float64.
"""

from pyrlstats.tails import reference
from pyrlstats.tails.pareto import REASONS, k_threshold, tail_size
from pyrlstats.tails.shape import TailShape, TailView, tail_shape
from pyrlstats.tails.tokens import TopTokens, top_tokens

__all__ = [
    "REASONS",
    "TailShape",
    "TailView",
    "TopTokens",
    "k_threshold",
    "reference",
    "tail_shape",
    "tail_size",
    "top_tokens",
]
