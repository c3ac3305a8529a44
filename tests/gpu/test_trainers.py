"""The adapters on a GPU: what runs inside a micro-batch does not wait for the device, and counts the same tokens."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_sync import no_sync

from pyrlstats import slice_stats
from pyrlstats.integrations import openrlhf, prime_rl, slime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available(), reason="no CUDA or ROCm device"
    ),
]


def responses() -> dict[str, list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    lists: dict[str, list[torch.Tensor]] = {"new": [], "old": [], "mask": []}
    for length in (400, 37, 1200):
        old = -torch.rand(length, generator=rng)
        mask = torch.ones(length, dtype=torch.int64)
        mask[length // 3 : length // 2] = 0
        lists["old"].append(old.cuda())
        lists["new"].append((old + 0.1 * torch.randn(length, generator=rng)).cuda())
        lists["mask"].append(mask.cuda())
    return lists


def assert_same(got: dict[str, float], prefix: str, tensors: dict[str, list[torch.Tensor]]) -> None:
    flat = {name: torch.cat(list(column)).cpu() for name, column in tensors.items()}
    wanted = slice_stats(flat["new"], flat["old"], flat["mask"]).to_dict()
    for statistic in ("n_tokens", "kl_k3", "ess_fraction", "log_ratio_max", "abs_log_ratio_p99"):
        assert got[f"{prefix}all/{statistic}"] == pytest.approx(wanted[f"all/{statistic}"], rel=1e-6)
    assert got[f"{prefix}post_tool/n_tokens"] > 0


def test_slime() -> None:
    logged: list[dict[str, float]] = []
    monitor = slime.Monitor(logged.append)
    tis = monitor.wrap(lambda args, **batch: batch["pg_loss"])
    one = responses()
    batch = {"train_log_probs": one["new"], "rollout_log_probs": one["old"], "loss_masks": one["mask"]}
    for _ in range(2):
        with no_sync():
            tis(None, pg_loss=None, **batch)
        monitor.report()
    assert monitor.guard.failures == 0
    assert_same(logged[1], "log_ratio/old_vs_sampler/", one)


def test_prime_rl() -> None:
    train = SimpleNamespace(
        compute_loss=lambda **batch: None, filter_rl_trainer_tensor_stats_for_wandb=lambda metrics: metrics
    )
    prime_rl.attach(train)
    one = responses()
    masks = [mask.bool() for mask in one["mask"]]
    for _ in range(2):
        with no_sync():
            train.compute_loss(trainer_logprobs=one["new"], inference_logprobs=one["old"], loss_mask=masks)
        logged = train.filter_rl_trainer_tensor_stats_for_wandb({})
    assert_same(logged, "log_ratio/learner_vs_sampler/", one)


def test_openrlhf() -> None:
    class Loss(torch.nn.Module):
        def forward(self, log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any, **others: Any) -> Any:
            return log_probs

    one = {name: [torch.nn.utils.rnn.pad_sequence(column, batch_first=True)] for name, column in responses().items()}

    def ppo_train(kl_ctl: float) -> dict[str, float]:
        with no_sync():
            trainer.actor_loss_fn(one["new"][0], one["old"][0], None, action_mask=one["mask"][0])
        return {}

    trainer = SimpleNamespace(actor_loss_fn=Loss(), ppo_train=ppo_train)
    openrlhf.attach(trainer)
    trainer.ppo_train(0.0)
    status = trainer.ppo_train(0.0)
    assert_same(status, "log_ratio/learner_vs_old/", one)
