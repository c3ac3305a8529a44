"""Stand-ins for the places where slime, prime-rl, NeMo-RL and SkyRL call a loss and reduce what it reports.

None of them installs on a CPU. What is written here follows their source in order of calls, arguments, layouts and
reductions, and leaves the models out: log-probabilities come with the batch. The versions read are named at each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import pyrlstats


@dataclass
class Sequence1D:
    """One response: float (N,) log-probabilities under three policies, and the mask of the model's tokens."""

    learner: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor


Rank = list[list[Sequence1D]]  # micro-batches of sequences


def world(seed: int = 0) -> list[Rank]:
    """Two ranks, three micro-batches each: of different sizes and spreads, with tool results, one without any token."""
    rng = torch.Generator().manual_seed(seed)

    def response(length: int, spread: float, tool: bool, empty: bool = False) -> Sequence1D:
        rollout = -torch.rand(length, generator=rng) * 2.0
        old = rollout + torch.randn(length, generator=rng) * 0.02
        mask = torch.ones(length, dtype=torch.int64)
        if tool:
            mask[length // 3 : length // 2] = 0
            rollout[mask == 0] = 0.0  # no engine gave these
        return Sequence1D(old + torch.randn(length, generator=rng) * spread, old, rollout, mask * (not empty))

    return [
        [
            [response(60, 0.05, True), response(40, 0.05, False)],
            [response(8, 1.0, False)],
            [response(12, 0.3, True), response(6, 0.3, False), response(9, 0.3, True)],
        ],
        [
            [response(90, 0.1, True)],
            [response(5, 0.5, False, empty=True)],
            [response(7, 0.8, False), response(30, 0.02, True)],
        ],
    ]


def one_pass(ranks: Sequence[Rank], new: str, old: str) -> dict[str, float]:
    """All tokens of all ranks at once."""
    every = [sequence for rank in ranks for batch in rank for sequence in batch]
    return pyrlstats.slice_stats(
        torch.cat([getattr(one, new) for one in every]),
        torch.cat([getattr(one, old) for one in every]),
        torch.cat([one.mask for one in every]),
    ).to_dict()


def after_tools(ranks: Sequence[Rank]) -> int:
    """Tokens of the model behind a hole in the mask."""
    total = 0
    for sequence in (sequence for rank in ranks for batch in rank for sequence in batch):
        holes = (sequence.mask == 0).nonzero()
        if len(holes) and int(sequence.mask.sum()):
            total += int(sequence.mask[int(holes.max()) + 1 :].sum())
    return total


# slime, slime/backends/megatron_utils/loss.py (00c2d6db) and slime/observability/train_metric_utils.py (2e5cd7cd)


def slime_batch(sequences: Sequence[Sequence1D]) -> dict[str, Any]:
    """What a micro-batch holds: lists of response tensors."""
    lengths = [len(one.mask) for one in sequences]
    return {
        "log_probs": [one.old for one in sequences],
        "rollout_log_probs": [one.rollout for one in sequences],
        "loss_masks": [one.mask for one in sequences],
        "total_lengths": [length + 3 for length in lengths],
        "response_lengths": lengths,
        "learner": [one.learner for one in sequences],
    }


def slime_policy_loss(
    args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ppo_kl = torch.cat(batch["log_probs"]) - torch.cat(batch["learner"])
    loss = ppo_kl
    if args.use_tis:
        loss, _, _ = args.tis(
            args,
            pg_loss=loss,
            train_log_probs=batch["log_probs"],
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )
    value = sum_of_sample_mean(loss)
    return value, {"loss": value.clone().detach(), "ppo_kl": sum_of_sample_mean(ppo_kl).clone().detach()}


def slime_tis(args: Any, *, pg_loss: torch.Tensor, loss_masks: Any, **others: Any) -> Any:
    return pg_loss, loss_masks, {}


def slime_train_step(args: Any, ranks: Sequence[Rank], loss_function: Callable[..., Any]) -> dict[str, float]:
    """Values are added up over micro-batches, then over ranks, then divided by one number."""
    total: torch.Tensor | None = None
    keys: list[str] = []
    samples = sum(len(batch) for rank in ranks for batch in rank)
    for rank in ranks:
        for sequences in rank:
            batch = slime_batch(sequences)
            masks = batch["loss_masks"]
            tokens = sum(torch.clamp_min(mask.sum(), 1) for mask in masks)

            def reducer(x: torch.Tensor, masks: Any = masks, per_token: bool = args.per_token) -> torch.Tensor:
                parts = x.split([len(mask) for mask in masks])
                sums = [(part * mask).sum() for part, mask in zip(parts, masks, strict=True)]
                if per_token:
                    return torch.stack(sums).sum()
                counts = [torch.clamp_min(mask.sum(), 1) for mask in masks]
                return torch.stack([one / count for one, count in zip(sums, counts, strict=True)]).sum()

            _, log = loss_function(args, batch, torch.zeros(1, 1), reducer)
            values = torch.tensor([tokens if args.per_token else 0, *log.values()])
            assert not keys or keys == list(log)
            keys = list(log)
            total = values if total is None else total + values
    assert total is not None
    first, *rest = total.tolist()
    return {
        f"train/{key}": value / (first if args.per_token else samples) for key, value in zip(keys, rest, strict=True)
    }


# prime-rl, src/prime_rl/trainer/rl/{loss,train}.py and trainer/utils.py (files indexed in autumn 2026)


@dataclass
class PrimeInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    loss_mask: torch.Tensor


@dataclass
class PrimeOutputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


def prime_custom_loss(inputs: PrimeInputs) -> PrimeOutputs:
    x = inputs.trainer_logprobs - inputs.inference_logprobs
    return PrimeOutputs(x[inputs.loss_mask].sum(), {"mismatch_kl": (x.exp() - x - 1.0)[inputs.loss_mask].mean()})


def prime_module(loss: Callable[[PrimeInputs], PrimeOutputs] = prime_custom_loss) -> SimpleNamespace:
    """What of ``prime_rl.trainer.rl.train`` is called: module attributes, looked up at each call."""

    def compute_loss(
        *, trainer_logprobs: Any, inference_logprobs: Any, loss_mask: Any, rl_weights: Any = None, **others: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        metrics = defaultdict(list)
        total = torch.zeros(())
        for trainer, inference, mask in zip(trainer_logprobs, inference_logprobs, loss_mask, strict=True):
            outputs = loss(PrimeInputs(trainer, inference, mask))
            total = total + outputs.loss
            for key, value in outputs.metrics.items():
                metrics[key].append(value)
        return total, {key: torch.stack(values) for key, values in metrics.items()}

    def filter_stats(metrics: dict[str, float]) -> dict[str, float]:
        return dict(metrics)

    return SimpleNamespace(compute_loss=compute_loss, filter_rl_trainer_tensor_stats_for_wandb=filter_stats)


def prime_step(module: SimpleNamespace, ranks: Sequence[Rank]) -> dict[str, float]:
    """One step: packed ``[1, N]`` split by sequence lengths; every key is gathered over ranks and averaged."""
    tensors = defaultdict(list)
    for rank in ranks:
        for sequences in rank:
            lengths = [len(one.mask) for one in sequences]
            packed = {
                name: torch.cat([getattr(one, name) for one in sequences])[None]
                for name in ("learner", "rollout", "mask")
            }
            loss, metrics = module.compute_loss(
                trainer_logprobs=packed["learner"].squeeze().split(lengths),
                inference_logprobs=packed["rollout"].squeeze().split(lengths),
                loss_mask=packed["mask"].bool().squeeze().split(lengths),
                advantages=None,
                rl_weights=None,
                rl_scale=1.0,
            )
            tensors["loss"].append(loss.detach()[None])
            for key, value in metrics.items():
                tensors[key].append(value.detach())
    stats = {f"{key}/mean": torch.cat(values).mean().item() for key, values in tensors.items()}
    logged: dict[str, float] = module.filter_rl_trainer_tensor_stats_for_wandb(stats)
    return logged


# NeMo-RL, nemo_rl/algorithms/loss/{interfaces,wrapper,loss_functions}.py (002bc7f6) and the reduction of grpo.py


class Normalizer(Enum):
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


class NemoLoss:
    loss_type = "token_level"
    input_type = "logprob"

    def __init__(self) -> None:
        self.metric_normalizations = {"loss": Normalizer.TOKENS}

    def __call__(
        self, next_token_logprobs: torch.Tensor, data: dict[str, Any], global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        ratio = (next_token_logprobs - data["prev_logprobs"][:, 1:]).exp()
        loss = (ratio * mask).sum() / global_valid_toks
        inside = torch.where(mask.bool(), ratio, -torch.inf)
        return loss, {
            "loss": loss.item(),
            "probs_ratio_max": inside.max().item(),
            "num_valid_samples": mask.any(-1).sum().item(),
        }


def nemo_data(sequences: Sequence[Sequence1D]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Right-padded ``[B, S]`` with one prompt token; the forward pass gives ``[B, S - 1]``."""
    width = max(len(one.mask) for one in sequences)

    def padded(name: str) -> torch.Tensor:
        rows = [torch.nn.functional.pad(getattr(one, name), (1, width - len(one.mask)), value=0) for one in sequences]
        return torch.stack(rows)

    data = {
        "prev_logprobs": padded("old"),
        "generation_logprobs": padded("rollout"),
        "token_mask": padded("mask"),
        "sample_mask": torch.ones(len(sequences)),
        "lengths": [1 + len(one.mask) for one in sequences],
    }
    return padded("learner")[:, 1:], data


def nemo_packed(loss_fn: Any, learner: torch.Tensor, data: dict[str, Any], toks: float) -> dict[str, Any]:
    """The packing wrapper: one call a sequence, metrics added up, known extrema excepted."""
    found: dict[str, Any] = {}
    for row, length in enumerate(data["lengths"]):
        one = {
            key: value[row : row + 1, :length] if value.ndim > 1 else value[row : row + 1]
            for key, value in data.items()
            if isinstance(value, torch.Tensor)
        }
        _, metrics = loss_fn(
            data=one,
            global_valid_seqs=None,
            global_valid_toks=toks,
            next_token_logprobs=learner[row : row + 1, : length - 1],
        )
        for key, value in metrics.items():
            if key == "probs_ratio_max":
                found[key] = max(found.get(key, -np.inf), value)
            else:
                found[key] = found.get(key, 0) + value
    return found


def nemo_step(loss_fn: Any, ranks: Sequence[Rank], packed: bool) -> dict[str, float]:
    """Per-micro-batch metrics of all ranks in lists; the driver takes extrema of a few keys and sums of the others."""
    toks = float(sum(one.mask.sum() for rank in ranks for batch in rank for one in batch))
    lists = defaultdict(list)
    for sequences in (batch for rank in ranks for batch in rank):
        learner, data = nemo_data(sequences)
        metrics = nemo_packed(loss_fn, learner, data, toks) if packed else loss_fn(learner, data, None, toks)[1]
        if metrics["num_valid_samples"] > 0:
            for key, value in metrics.items():
                lists[key].append(value)
    return {key: float(np.max(values) if key == "probs_ratio_max" else np.sum(values)) for key, values in lists.items()}


# SkyRL, skyrl/backends/skyrl_train/workers/{worker,worker_utils}.py (0020c6d1, 05268e4c; `_sum` as of 03d74caf)


def skyrl_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: Any,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    ratio = (log_probs - old_log_probs).exp()
    weight = torch.ones_like(ratio) if loss_mask is None else loss_mask
    return (ratio * weight).sum(), {"clip_ratio": 0.25}


def skyrl_reduce(lists: dict[str, list[float]], sums: bool) -> dict[str, float]:
    reduced = {}
    for key, values in lists.items():
        assert all(isinstance(value, (int, float)) for value in values), key  # others are dropped there
        if key.endswith("_max"):
            reduced[key] = max(values)
        elif key.endswith("_min"):
            reduced[key] = min(values)
        else:
            reduced[key] = sum(values) / (1 if sums and key.endswith("_sum") else len(values))
    return reduced


def skyrl_step(
    policy_loss: Callable[..., Any], ranks: Sequence[Rank], *, sums: bool, bf16: bool = False
) -> dict[str, float]:
    """Micro-batches are reduced on each rank, then the ranks, key by key; left-padded ``[B, actions]``."""
    of_ranks = defaultdict(list)
    for rank in ranks:
        lists = defaultdict(list)
        for sequences in rank:
            width = max(len(one.mask) for one in sequences)
            columns = {
                name: torch.stack(
                    [torch.nn.functional.pad(getattr(one, name), (width - len(one.mask), 0)) for one in sequences]
                )
                for name in ("learner", "old", "rollout", "mask")
            }
            learner = columns["learner"].bfloat16() if bf16 else columns["learner"]
            loss, metrics = policy_loss(
                learner,
                columns["old"],
                torch.ones(columns["old"].shape),
                config=None,
                loss_mask=columns["mask"],
                rollout_logprobs=columns["rollout"],
            )
            status = {"policy_loss": loss.item(), **{f"loss_metrics/{key}": value for key, value in metrics.items()}}
            for key, value in status.items():
                lists[key].append(value)
        for key, value in skyrl_reduce(lists, sums).items():
            of_ranks[key].append(value)
    return {f"policy/{key}": value for key, value in skyrl_reduce(of_ranks, sums).items()}
