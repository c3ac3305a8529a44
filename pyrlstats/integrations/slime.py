"""slime: statistics of its lists of responses, pooled over micro-batches and ranks, by accumulator or by raw sums."""

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

PAIRS = ("old_vs_sampler",)

SliceMask = Callable[[torch.Tensor, int, int], torch.Tensor]


class Monitor:
    """Statistics of the training engine's log-probabilities against the rollout engine's, once a training step.

    ``tis = monitor.wrap(vanilla_tis_function)`` goes to ``--custom-tis-function-path`` (with ``--use-tis`` or
    ``--get-mismatch-metrics``): it sees every micro-batch and changes nothing. ``before_train_step`` goes to
    ``--custom-megatron-before-train-step-hook-path``: it reports what was seen since the last call, with one MAX and
    one SUM collective and one copy to the host. ``report`` does so at the end of a run.

    Slices by the holes of the loss masks: ``all``, ``text``, ``pre_tool`` and ``post_tool``. Nothing of ours raises
    into training: failures are counted in ``guard.failures`` and logged once.

    Args:
        log: called with the numbers of a step on every rank that has seen tokens: let the one log that logs for slime.
        group: gives the process group: data times context parallel. Called when it is first needed.
        prefix: put before every key.
        clip: (low, high) of the ratio clip whose shares are counted.
        slice_mask: with context parallelism, slime's ``slice_log_prob_with_cp``: it cuts a response's mask to the part
            of this rank, as slime has cut the log-probabilities.
        on_stats: called with the statistics of each step, for sinks.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float]], None],
        *,
        group: Callable[[], Any] | None = None,
        prefix: str = "log_ratio/",
        clip: tuple[float, float] = (0.2, 0.2),
        slice_mask: SliceMask | None = None,
        on_stats: Callable[[dict[str, SliceStats]], None] | None = None,
    ) -> None:
        self.log, self.group, self.prefix = log, group, prefix
        self.slice_mask, self.on_stats = slice_mask, on_stats
        self.guard = Guard("pyrlstats in slime")
        self._accumulator = PairAccumulator(PAIRS, clip=clip)

    def wrap(self, tis_function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which also counts its micro-batch."""

        @wraps(tis_function)
        def tis(args: Any, **kwargs: Any) -> Any:
            self.guard(self._count, **kwargs)
            return tis_function(args, **kwargs)

        return tis

    def before_train_step(self, *args: Any, **kwargs: Any) -> None:
        """slime's hook before a training step: reports the step before."""
        self.report()

    def report(self) -> None:
        """Reduce, log and start anew. All ranks of the group must call it."""
        self.guard(self._report)

    def _report(self) -> None:
        stats = self._accumulator.collect(self.group() if self.group is not None else None)
        numbers = _pairs.to_dict(stats, self.prefix)
        if numbers:
            if self.on_stats is not None:
                self.on_stats(stats)
            self.log(numbers)

    def _count(
        self,
        *,
        train_log_probs: Sequence[torch.Tensor],
        rollout_log_probs: Sequence[torch.Tensor],
        loss_masks: Sequence[torch.Tensor],
        total_lengths: Sequence[int] | None = None,
        response_lengths: Sequence[int] | None = None,
        **others: Any,
    ) -> None:
        masks = _own(loss_masks, total_lengths, response_lengths, self.slice_mask)
        count(self._accumulator, train_log_probs, rollout_log_probs, masks)


def with_sums(
    loss_function: Callable[..., Any],
    prefix: str = "log_ratio/",
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    slice_mask: SliceMask | None = None,
) -> Callable[..., Any]:
    """A loss for ``--custom-loss-function-path`` that returns raw sums beside what ``loss_function`` reports.

    slime adds reported values up over micro-batches and ranks and divides all of them by one number: ratios of these
    sums are the pooled statistics, ``from_sums(logged, "train/log_ratio/")``, or any two series divided in a dashboard.
    It adds no collective, and one copy to the host a micro-batch; :class:`Monitor` copies once a step, and gives more
    (quantiles, extrema, counts).

    The pair is ``old_vs_sampler``: ``batch["log_probs"]`` against ``batch["rollout_log_probs"]``; without one of them
    the sums are 0, and the statistics NaN.

    Args:
        loss_function: slime's ``policy_loss_function``, or your own: ``(args, batch, logits, sum_of_sample_mean)``.
        prefix: put before every key.
        clip: (low, high) of the ratio clip whose shares are counted.
        slice_mask: as for :class:`Monitor`.
    """
    sums = MicroBatchSums("pyrlstats in slime", PAIRS, prefix, clip)

    @wraps(loss_function)
    def loss(args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any) -> tuple[Any, dict[str, Any]]:
        value, reported = loss_function(args, batch, logits, sum_of_sample_mean)

        def count_batch(accumulator: PairAccumulator) -> None:
            train, rollout = batch.get("log_probs"), batch.get("rollout_log_probs")
            if train and rollout:
                lengths = (batch.get("total_lengths"), batch.get("response_lengths"))
                count(accumulator, train, rollout, _own(batch["loss_masks"], *lengths, slice_mask))

        # as float64 they make slime's tensor of values float64: counts stay exact
        found = {key: torch.tensor(one, dtype=torch.float64) for key, one in sums(count_batch).items()}
        return value, {**reported, **found}

    return loss


def count(
    accumulator: PairAccumulator,
    train: Sequence[torch.Tensor],
    rollout: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
) -> None:
    """Count one micro-batch: a list of responses, 1-D each."""
    boundaries = list(accumulate((mask.shape[0] for mask in masks), initial=0))
    where = tool_slices(torch.cat(list(masks)), cu_seqlens=boundaries)
    accumulator.update(PAIRS[0], torch.cat(list(train)), torch.cat(list(rollout)), where)


def _own(
    masks: Sequence[torch.Tensor],
    total_lengths: Sequence[int] | None,
    response_lengths: Sequence[int] | None,
    slice_mask: SliceMask | None,
) -> Sequence[torch.Tensor]:
    """The masks of the tokens that this context-parallel rank holds."""
    if slice_mask is None or total_lengths is None or response_lengths is None:
        return masks
    return [slice_mask(*one) for one in zip(masks, total_lengths, response_lengths, strict=True)]
