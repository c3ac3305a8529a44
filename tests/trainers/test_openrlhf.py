"""The hook on OpenRLHF's own PolicyLoss, driven by a stand-in for its trainer's loop.

``PolicyLoss`` and ``masked_mean`` are the package's. ``ActorPPOTrainer`` needs Ray, DeepSpeed and a GPU to be made, so
``Trainer`` below stands for it: it calls the loss with the arguments of OpenRLHF 0.11.2's ``training_step`` and reduces
what it logs as its ``ppo_train`` does, weighted by action tokens.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pyrlstats
from pyrlstats import SliceStats
from pyrlstats.integrations.openrlhf import attach

sys.path.insert(0, str(Path(__file__).parent))
real_packages: Any = importlib.import_module("real_packages")

Experience = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def loss_module() -> Any:
    return real_packages.openrlhf().module("openrlhf.models.loss")


def experiences(seed: int = 0) -> list[Experience]:
    """Micro-batches of different sizes; in the second the agent's feedback is a hole in the mask."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for rows, length, spread in ((2, 6, 0.5), (6, 30, 0.05), (1, 4, 1.0)):
        rollout = -torch.rand(rows, length, generator=rng)
        old = rollout + torch.randn(rows, length, generator=rng) * 0.01
        mask = (torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=rng)).float()
        if length == 30:
            mask[:3, 4:7] = 0.0
            rollout[:3, 4:7] = 0.0  # as the agent writes for feedback tokens
            mask[:3, 7] = 1.0
        found.append(
            {
                "log_probs": old + torch.randn(rows, length, generator=rng) * spread,
                "old_log_probs": old,
                "advantages": torch.randn(rows, length, generator=rng),
                "action_mask": mask,
                "rollout_log_probs": rollout,
            }
        )
    return found


class Trainer:
    def __init__(self, loss: torch.nn.Module, batches: list[Experience]) -> None:
        self.actor_loss_fn, self.batches = loss, batches
        self.losses: list[float] = []

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        sums: dict[str, float] = {}
        tokens = 0.0
        for batch in self.batches:
            loss, clip_ratio, ppo_kl, vllm_kl, _ = self.actor_loss_fn(
                batch["log_probs"],
                batch["old_log_probs"],
                batch["advantages"],
                action_mask=batch["action_mask"],
                rollout_log_probs=batch.get("rollout_log_probs"),
                dp_size=1,
                batch_num_tokens=None,
                global_batch_size=None,
            )
            self.losses.append(float(loss))
            weight = float(batch["action_mask"].sum())
            tokens += weight
            for key, value in {"ppo_clip_ratio": clip_ratio, "ppo_kl": ppo_kl, "vllm_kl": vllm_kl}.items():
                if value is not None:
                    sums[key] = sums.get(key, 0.0) + float(value) * weight
        return {key: value / tokens for key, value in sums.items()}


def one_pass(batches: list[Experience], new: str, old: str) -> dict[str, float]:
    """Over the union, as one flat batch."""
    flat = {key: torch.cat([batch[key].flatten() for batch in batches]) for key in batches[0]}
    return pyrlstats.slice_stats(flat[new], flat[old], flat["action_mask"]).to_dict()


def test_pooled_figures_beside_its_own(loss_module: Any) -> None:
    batches = experiences()
    loss = loss_module.PolicyLoss(clip_eps_low=0.1, clip_eps_high=0.3, is_correction_level="token")
    trainer = Trainer(loss, batches)
    plain = trainer.ppo_train(0.0)
    seen: list[dict[str, SliceStats]] = []
    detach = attach(trainer, on_stats=seen.append)
    status = trainer.ppo_train(0.0)
    assert {key: status[key] for key in plain} == plain
    assert trainer.losses[:3] == trainer.losses[3:]  # the same bits
    columns = {"learner": "log_probs", "old": "old_log_probs", "sampler": "rollout_log_probs"}
    for pair in ("learner_vs_old", "learner_vs_sampler", "old_vs_sampler"):
        new, old = (columns[name] for name in pair.split("_vs_"))
        wanted = one_pass(batches, new, old)
        for statistic in ("n_tokens", "kl_k3", "ess_fraction", "log_ratio_max", "abs_log_ratio_p99"):
            got = status[f"log_ratio/{pair}/all/{statistic}"]
            assert got == pytest.approx(wanted[f"all/{statistic}"], rel=1e-6), (pair, statistic)
    # its own k1 estimates, which it pools by tokens, agree
    assert status["log_ratio/learner_vs_old/all/kl_k1"] == pytest.approx(plain["ppo_kl"], rel=1e-5)
    assert status["log_ratio/old_vs_sampler/all/kl_k1"] == pytest.approx(plain["vllm_kl"], rel=1e-4, abs=1e-7)
    ratios = torch.cat([(b["log_probs"] - b["old_log_probs"])[b["action_mask"] > 0] for b in batches]).exp()
    outside = float(((ratios < 0.9) | (ratios > 1.3)).double().mean())
    clipped = status["log_ratio/learner_vs_old/all/clip_fraction"]  # by the loss's own clip
    assert clipped == pytest.approx(outside, abs=1e-12)
    assert status["ppo_clip_ratio"] < outside  # OpenRLHF counts by the advantage's sign
    post = sum(float(batch["action_mask"][:3, 7:].sum()) for batch in batches[1:2])
    assert status["log_ratio/learner_vs_old/post_tool/n_tokens"] == post
    assert float(seen[0]["old_vs_sampler"]["post_tool"].log_ratio_abs_mean) > 0.0
    detach()
    assert trainer.ppo_train(0.0) == plain
    assert "ppo_train" not in vars(trainer)


def test_each_phase_is_its_own_and_without_a_sampler_nothing_is_said_of_it(loss_module: Any) -> None:
    batches = [{key: value for key, value in one.items() if key != "rollout_log_probs"} for one in experiences()]
    trainer = Trainer(loss_module.PolicyLoss(), batches)
    attach(trainer)
    first, second = trainer.ppo_train(0.0), trainer.ppo_train(0.0)
    assert first == pytest.approx(second, nan_ok=True)
    assert not [key for key in first if "sampler" in key]
    assert first["log_ratio/learner_vs_old/all/n_tokens"] == sum(float(one["action_mask"].sum()) for one in batches)


def test_where_its_own_figures_break(loss_module: Any) -> None:
    batch = {
        "log_probs": torch.tensor([[0.0, 0.0, 25.0]]),
        "old_log_probs": torch.tensor([[0.0, math.nan, 0.0]]),  # NaN outside the mask
        "advantages": torch.ones(1, 3),
        "action_mask": torch.tensor([[1.0, 0.0, 1.0]]),
    }
    trainer = Trainer(loss_module.PolicyLoss(), [batch])
    attach(trainer)
    status = trainer.ppo_train(0.0)
    assert math.isnan(status["ppo_kl"])  # NaN * 0
    assert status["log_ratio/learner_vs_old/all/kl_k1"] == -12.5
    assert status["log_ratio/learner_vs_old/all/log_ratio_max"] == 25.0  # before the loss clamps it to 20
    assert status["log_ratio/learner_vs_old/all/n_nan"] == 0


def test_what_fails_does_not_reach_training(loss_module: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(loss_module.PolicyLoss(), experiences())
    plain = trainer.ppo_train(0.0)

    def broken(stats: Any) -> None:
        raise RuntimeError("sink is down")

    attach(trainer, on_stats=broken)
    for batch in trainer.batches:
        batch["rollout_log_probs"] = batch["rollout_log_probs"][:, :-1]  # PolicyLoss does not look at them here
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        status = trainer.ppo_train(0.0)
    assert {key: status[key] for key in plain if key in status} == {k: v for k, v in plain.items() if k in status}
    assert len(caplog.records) == 1
