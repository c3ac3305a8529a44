"""verl: its rollout-correction metrics under its own names, the distribution behind them, a hook for its trainers.

Nothing here imports verl but :func:`attach`. Tensors are verl's: ``[B, T]``, right-padded responses, ``response_mask``
1 for the model's tokens and 0 for padding and for what tools wrote.
"""

from pyrlstats.integrations.verl.correction import rollout_corr_metrics
from pyrlstats.integrations.verl.hook import attach
from pyrlstats.integrations.verl.loss import with_sums
from pyrlstats.integrations.verl.slices import rollout_corr_stats

__all__ = ["attach", "rollout_corr_metrics", "rollout_corr_stats", "with_sums"]
