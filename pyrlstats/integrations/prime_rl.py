"""prime-rl: statistics of its packed sequences, pooled over a step, without gathering a single token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any

import torch

from pyrlstats._guard import Guard
from pyrlstats.integrations import _pairs
from pyrlstats.integrations._pairs import PairAccumulator
from pyrlstats.integrations._summed import MicroBatchSums
from pyrlstats.slice_stats import SliceStats
from pyrlstats.slices import tool_slices

PAIRS = ("learner_vs_sampler",)
_LOSS, _FILTER = "compute_loss", "filter_rl_trainer_tensor_stats_for_wandb"


def attach(
    train_module: Any,
    prefix: str = "log_ratio/",
    *,
    group: Callable[[], Any] | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    on_stats: Callable[[dict[str, SliceStats]], None] | None = None,
) -> Callable[[], None]:
    """Add statistics of every micro-step to what prime-rl's trainer logs at each step.

    Two names of ``prime_rl.trainer.rl.train`` are wrapped: ``compute_loss``, which gets the sequences of a micro-batch
    (nothing is changed), and ``filter_rl_trainer_tensor_stats_for_wandb``, which every rank calls once a step on the
    way to its monitors: what it returns gets our numbers too. That costs one MAX and one SUM collective and one copy to
    the host, where each key of prime-rl's own gathers all tokens on all ranks. Start the trainer from a script that
    attaches first. Nothing of ours raises into training: failures are counted and logged once.

    Counted are the tokens of the loss mask that were sampled by the policy: those with a weight in the ``rl`` or
    ``ref_kl`` component. Slices by the holes of that mask: ``all``, ``text``, ``pre_tool`` and ``post_tool``.

    Args:
        train_module: the module ``prime_rl.trainer.rl.train``.
        prefix: put before every key.
        group: gives the process group: the data-parallel one. prime-rl gathers log-probabilities over context-parallel
            ranks before its loss, so that those hold the same tokens: over all ranks (None) every token counts as often
            as there are such ranks, which changes counts and no ratio, quantile or extremum.
        clip: (low, high) of the ratio clip whose shares are counted.
        on_stats: called with the statistics of each step, for sinks.

    Returns:
        A function that detaches.

    Raises:
        AttributeError: the module has no such functions: another version of prime-rl.
    """
    compute_loss, filtered = getattr(train_module, _LOSS), getattr(train_module, _FILTER)
    guard = Guard("pyrlstats in prime-rl")
    accumulator = PairAccumulator(PAIRS, clip=clip)

    @wraps(compute_loss)
    def watched_loss(*args: Any, **kwargs: Any) -> Any:
        guard(count, accumulator, **kwargs)
        return compute_loss(*args, **kwargs)

    def report() -> dict[str, float]:
        stats = accumulator.collect(group() if group is not None else None)
        if on_stats is not None:
            guard(on_stats, stats)
        return _pairs.to_dict(stats, prefix)

    @wraps(filtered)
    def watched_filter(metrics: dict[str, Any]) -> dict[str, Any]:
        return {**filtered(metrics), **(guard(report) or {})}

    setattr(train_module, _LOSS, watched_loss)
    setattr(train_module, _FILTER, watched_filter)

    def detach() -> None:
        setattr(train_module, _LOSS, compute_loss)
        setattr(train_module, _FILTER, filtered)

    return detach


def with_sums(
    loss: Callable[..., Any], prefix: str = "log_ratio/", *, clip: tuple[float, float] = (0.2, 0.2)
) -> Callable[..., Any]:
    """A loss for ``[trainer.loss] type = "custom"`` whose metrics hold raw sums too, without patching anything.

    prime-rl calls it once a sequence and logs the mean of each metric over all sequences of all ranks: ratios of these
    means are the pooled statistics, ``from_sums(logged, "log_ratio/", suffix="/mean")``. Each key costs a gather of one
    number a sequence, and is logged with its median, std, min and max: :func:`attach` costs less and gives more.

    Args:
        loss: ``(inputs, **kwargs) -> LossOutputs``.
        prefix: put before every key.
        clip: (low, high) of the ratio clip whose shares are counted.
    """
    sums = MicroBatchSums("pyrlstats in prime-rl", PAIRS, prefix, clip)

    @wraps(loss)
    def watched(inputs: Any, **kwargs: Any) -> Any:
        outputs = loss(inputs, **kwargs)
        found = sums(
            lambda accumulator: accumulator.update(
                PAIRS[0], inputs.trainer_logprobs, inputs.inference_logprobs, tool_slices(inputs.loss_mask)
            )
        )
        outputs.metrics.update({key: torch.tensor(one, dtype=torch.float64) for key, one in found.items()})
        return outputs

    return watched


def count(
    accumulator: PairAccumulator,
    *,
    trainer_logprobs: Sequence[torch.Tensor],
    inference_logprobs: Sequence[torch.Tensor],
    loss_mask: Sequence[torch.Tensor],
    rl_weights: Sequence[torch.Tensor] | None = None,
    ref_kl_weights: Sequence[torch.Tensor] | None = None,
    **others: Any,
) -> None:
    """Count one micro-batch; the arguments are those of prime-rl's ``compute_loss``: lists of 1-D sequences."""
    mask = torch.cat(list(loss_mask)) != 0
    if rl_weights is not None or ref_kl_weights is not None:
        # an absent rl stream is a weight of 1 on the whole loss mask
        sampled = mask if rl_weights is None else torch.cat(list(rl_weights)) != 0
        if ref_kl_weights is not None:
            sampled = sampled | (torch.cat(list(ref_kl_weights)) != 0)
        mask = mask & sampled
    boundaries = list(accumulate((one.shape[0] for one in loss_mask), initial=0))
    where = tool_slices(mask, cu_seqlens=boundaries)
    accumulator.update(PAIRS[0], torch.cat(list(trainer_logprobs)), torch.cat(list(inference_logprobs)), where)
