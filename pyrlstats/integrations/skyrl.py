"""SkyRL: raw sums among the metrics of a policy loss, in the shape that its reductions leave exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from pyrlstats.integrations._pairs import PairAccumulator
from pyrlstats.integrations._summed import MicroBatchSums
from pyrlstats.slices import tool_slices

PAIRS = ("learner_vs_old", "learner_vs_sampler", "old_vs_sampler")


def with_sums(
    policy_loss: Callable[..., Any], prefix: str = "log_ratio/", *, clip: tuple[float, float] = (0.2, 0.2)
) -> Callable[..., Any]:
    """A policy loss for SkyRL's ``register_policy_loss`` that returns raw sums beside the metrics of ``policy_loss``.

    SkyRL averages metrics over micro-batches, mini-batches and ranks, newer versions add up those named ``_sum``, and
    both take the extremes of ``_max`` and ``_min``: ratios of these sums, and the extrema, come out pooled. Take them
    in the driver, ``from_sums(status, "policy/loss_metrics/log_ratio/")``.

    Slices by the holes of ``loss_mask``: ``all``, ``text``, ``pre_tool`` and ``post_tool``. Reads the sums back once a
    micro-batch, as SkyRL takes floats only: one sync. The loss itself is not touched.

    Args:
        policy_loss: ``(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs) -> (loss, metrics)``.
        prefix: put before every key; must not hold ``_max`` and the like at the end of a key.
        clip: (low, high) of the ratio clip whose shares are counted.
    """
    sums = MicroBatchSums("pyrlstats in SkyRL", PAIRS, prefix, clip, extrema=True)

    @wraps(policy_loss)
    def loss(
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        config: Any,
        loss_mask: torch.Tensor | None = None,
        rollout_logprobs: torch.Tensor | None = None,
    ) -> Any:
        value, metrics = policy_loss(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)

        def count(accumulator: PairAccumulator) -> None:
            mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
            where = tool_slices(mask)
            accumulator.update("learner_vs_old", log_probs, old_log_probs, where)
            if rollout_logprobs is not None:
                accumulator.update("learner_vs_sampler", log_probs, rollout_logprobs, where)
                accumulator.update("old_vs_sampler", old_log_probs, rollout_logprobs, where)

        return value, {**metrics, **sums(count)}

    return loss
