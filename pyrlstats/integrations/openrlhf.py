"""OpenRLHF: the log-ratios behind its policy loss, over all micro-batches of a training phase, into its status."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from pyrlstats._guard import Guard
from pyrlstats.integrations import _pairs
from pyrlstats.slice_stats import SliceStats
from pyrlstats.slices import tool_slices

PAIRS = ("learner_vs_old", "learner_vs_sampler", "old_vs_sampler")


def attach(
    trainer: Any,
    prefix: str = "log_ratio/",
    *,
    group: Any = None,
    on_stats: Callable[[dict[str, SliceStats]], None] | None = None,
) -> Callable[[], None]:
    """Add statistics of every micro-batch to the status that ``trainer.ppo_train`` returns, which OpenRLHF logs.

    A forward hook on ``trainer.actor_loss_fn`` (``PolicyLoss``) sees the log-probabilities as the loss does: raw,
    before its clamp at 20 and its importance correction. Three comparisons are kept apart, those with a sampler only
    where ``rollout_log_probs`` is given: ``learner_vs_old``, ``learner_vs_sampler``, ``old_vs_sampler``. Slices of
    each: ``all``, ``text``, ``pre_tool`` and ``post_tool``, by the holes of ``action_mask``: an agent's feedback.

    Call it where the trainer is made, in ``PolicyModelActor.init_model_from_pretrained``. The hook itself does not
    sync; a call of ``ppo_train`` adds one MAX and one SUM collective and one copy to the host. Nothing of ours raises
    into training: failures are counted and logged once.

    Args:
        trainer: ``ActorPPOTrainer``: anything with ``actor_loss_fn`` and ``ppo_train``.
        prefix: put before every key.
        group: process group to reduce over; None is all ranks, as OpenRLHF itself does. Ranks of one ring-attention or
            tensor-parallel group hold the same tokens: with the default they count once each, which leaves every ratio,
            quantile and extremum as it is and multiplies counts.
        on_stats: called with the statistics by comparison after each training phase, for sinks.

    Returns:
        A function that detaches.
    """
    guard = Guard("pyrlstats in OpenRLHF")
    loss = trainer.actor_loss_fn
    clip = (float(getattr(loss, "clip_eps_low", 0.2)), float(getattr(loss, "clip_eps_high", 0.2)))
    accumulator = _pairs.PairAccumulator(PAIRS, clip=clip)
    handle = loss.register_forward_hook(
        lambda module, args, kwargs, output: guard(_count, accumulator, *args, **kwargs), with_kwargs=True
    )
    train = trainer.ppo_train

    def report() -> dict[str, float]:
        stats = accumulator.collect(group)
        if on_stats is not None:
            guard(on_stats, stats)
        return _pairs.to_dict(stats, prefix)

    @wraps(train)
    def watched(*args: Any, **kwargs: Any) -> Any:
        status = train(*args, **kwargs)
        status.update(guard(report) or {})
        return status

    trainer.ppo_train = watched

    def detach() -> None:
        handle.remove()
        if vars(trainer).get("ppo_train") is watched:
            del trainer.ppo_train

    return detach


def _count(
    accumulator: _pairs.PairAccumulator,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    action_mask: torch.Tensor | None = None,
    rollout_log_probs: torch.Tensor | None = None,
    **batch_info: Any,
) -> None:
    """The arguments are those of ``PolicyLoss.forward``: (B, actions)."""
    if action_mask is None:
        action_mask = torch.ones_like(log_probs, dtype=torch.bool)
    where = tool_slices(action_mask)
    accumulator.update("learner_vs_old", log_probs, old_log_probs, where)
    if rollout_log_probs is not None:
        accumulator.update("learner_vs_sampler", log_probs, rollout_log_probs, where)
        accumulator.update("old_vs_sampler", old_log_probs, rollout_log_probs, where)
