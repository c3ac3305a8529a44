"""Raw sums among the metrics of a policy loss of verl: for bypass mode, which computes no old log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from pyrlstats.integrations._pairs import PairAccumulator
from pyrlstats.integrations._summed import MicroBatchSums
from pyrlstats.slices import tool_slices

PAIRS = ("learner_vs_old",)
_ARGUMENTS = ("old_log_prob", "log_prob", "advantages", "response_mask")


def with_sums(
    policy_loss: Callable[..., Any], prefix: str = "actor/log_ratio/", *, clip: tuple[float, float] = (0.2, 0.2)
) -> Callable[..., Any]:
    """A policy loss for verl's ``register_policy_loss`` that returns raw sums beside the metrics of ``policy_loss``.

    verl averages the metrics of a policy loss over micro-batches and ranks, each with the same weight, extrema
    included: ratios of averaged sums are the pooled statistics. Take them on the driver,
    ``from_sums(metrics, "actor/log_ratio/")``. The pair is ``learner_vs_old``; in bypass mode ``old`` is the rollout
    engine's. Slices by the holes of ``response_mask``: ``all``, ``text``, ``pre_tool`` and ``post_tool``. One sync a
    micro-batch; the loss itself is not touched.

    Args:
        policy_loss: called by keyword, with ``old_log_prob``, ``log_prob`` and ``response_mask`` (B, T).
        prefix: put before every key; neither it nor a key holds "max" or "min", by which verl would choose another
            reduction.
        clip: (low, high) of the ratio clip whose shares are counted.
    """
    sums = MicroBatchSums("pyrlstats in verl", PAIRS, prefix, clip)

    @wraps(policy_loss)
    def loss(*args: Any, **kwargs: Any) -> Any:
        value, metrics = policy_loss(*args, **kwargs)

        def count(accumulator: PairAccumulator) -> None:
            named = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
            where = tool_slices(named["response_mask"])
            accumulator.update(PAIRS[0], named["log_prob"], named["old_log_prob"], where)

        return value, {**metrics, **sums(count)}

    return loss
