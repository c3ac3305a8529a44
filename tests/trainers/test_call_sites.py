"""slime, prime-rl, NeMo-RL and SkyRL: what survives their reductions is the one pass over the union of all tokens."""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyrlstats import slice_stats
from pyrlstats.integrations import nemo_rl, prime_rl, skyrl, slime
from pyrlstats.integrations.sums import from_sums

sys.path.insert(0, str(Path(__file__).parent))
sites: Any = importlib.import_module("call_sites")

RANKS = sites.world()
SHARED = (
    "log_ratio_mean",
    "log_ratio_abs_mean",
    "kl_k2",
    "kl_k3",
    "ess_fraction",
    "chi2",
    "ratio_mean",
    "clip_fraction",
)
BY_ACCUMULATOR = (*SHARED, "n_tokens", "log_ratio_max", "log_ratio_min", "abs_log_ratio_p99", "log_ratio_p0_1")


def assert_pooled(got: dict[str, float], prefix: str, new: str, old: str, statistics: tuple[str, ...] = SHARED) -> None:
    wanted = sites.one_pass(RANKS, new, old)
    for statistic in statistics:
        value = got[f"{prefix}all/{statistic}"]
        assert value == pytest.approx(wanted[f"all/{statistic}"], rel=2e-6, abs=1e-12), statistic


def test_the_means_of_micro_batches_are_something_else() -> None:
    each = [
        slice_stats(
            torch.cat([one.learner for one in batch]),
            torch.cat([one.old for one in batch]),
            torch.cat([one.mask for one in batch]),
        )["all"]
        for rank in RANKS
        for batch in rank
        if sum(int(one.mask.sum()) for one in batch)
    ]
    wanted = sites.one_pass(RANKS, "learner", "old")
    for statistic in ("ess_fraction", "kl_k3", "clip_fraction"):
        mean_of_means = sum(float(getattr(one, statistic)) for one in each) / len(each)
        assert abs(mean_of_means / wanted[f"all/{statistic}"] - 1.0) > 0.05, statistic


@pytest.mark.parametrize("per_token", [False, True])
def test_slime_adds_up_raw_sums(per_token: bool) -> None:
    args = SimpleNamespace(per_token=per_token, use_tis=False)
    plain = sites.slime_train_step(args, RANKS, sites.slime_policy_loss)
    logged = sites.slime_train_step(args, RANKS, slime.with_sums(sites.slime_policy_loss))
    assert {key: logged[key] for key in plain} == pytest.approx(plain, rel=1e-6)
    got = from_sums(logged, "train/log_ratio/old_vs_sampler/")
    assert_pooled(got, "train/log_ratio/old_vs_sampler/", "old", "rollout")
    # the divisor is slime's: the number of tokens comes back as a share of it
    divisor = sum(max(int(one.mask.sum()), 1) if per_token else 1 for rank in RANKS for batch in rank for one in batch)
    post = got["train/log_ratio/old_vs_sampler/post_tool/n_tokens"] * divisor
    assert post == pytest.approx(sites.after_tools(RANKS))


def test_slime_accumulates_between_its_two_hooks() -> None:
    logged: list[dict[str, float]] = []
    seen: list[Any] = []
    monitor = slime.Monitor(logged.append, on_stats=seen.append)
    args = SimpleNamespace(per_token=False, use_tis=True, tis=monitor.wrap(sites.slime_tis))
    monitor.before_train_step(args, 0, 0, None, None, None)
    assert logged == []  # nothing seen yet
    for step in range(2):
        sites.slime_train_step(args, RANKS, sites.slime_policy_loss)
        monitor.before_train_step(args, 0, step + 1, None, None, None)
    assert len(logged) == len(seen) == 2
    assert logged[0] == pytest.approx(logged[1], nan_ok=True)
    assert_pooled(logged[0], "log_ratio/old_vs_sampler/", "old", "rollout", BY_ACCUMULATOR)
    assert logged[0]["log_ratio/old_vs_sampler/post_tool/n_tokens"] == sites.after_tools(RANKS)


def test_slime_under_context_parallelism() -> None:
    """Each of two ranks holds half of every response; slime cuts the log-probabilities, the masks come whole."""
    logged: list[dict[str, float]] = []

    def half(rank: int) -> Any:
        def cut(tensor: torch.Tensor, total: int, response: int) -> torch.Tensor:
            assert total == response + 3
            assert len(tensor) == response
            return tensor[: response // 2] if rank == 0 else tensor[response // 2 :]

        return cut

    monitors = [slime.Monitor(logged.append, slice_mask=half(rank)) for rank in range(2)]
    for rank, monitor in enumerate(monitors):
        tis = monitor.wrap(sites.slime_tis)
        for sequences in (batch for ranks in RANKS for batch in ranks):
            batch = sites.slime_batch(sequences)
            lengths = {key: batch[key] for key in ("total_lengths", "response_lengths")}
            own = {
                key: [half(rank)(one, *pair) for one, *pair in zip(batch[key], *lengths.values(), strict=True)]
                for key in ("log_probs", "rollout_log_probs")
            }
            tis(
                None,
                pg_loss=torch.zeros(()),
                train_log_probs=own["log_probs"],
                rollout_log_probs=own["rollout_log_probs"],
                loss_masks=batch["loss_masks"],
                **lengths,
            )
        monitor.report()
        assert monitor.guard.failures == 0
    wanted = sites.one_pass(RANKS, "old", "rollout")
    key = "log_ratio/old_vs_sampler/all/n_tokens"
    assert logged[0][key] + logged[1][key] == wanted["all/n_tokens"]
    k3 = sum(one["log_ratio/old_vs_sampler/all/kl_k3"] * one[key] for one in logged) / wanted["all/n_tokens"]
    assert k3 == pytest.approx(wanted["all/kl_k3"], rel=1e-6)


def test_prime_rl_by_accumulator() -> None:
    module = sites.prime_module()
    plain = sites.prime_step(module, RANKS)
    before = dict(vars(module))
    seen: list[Any] = []
    detach = prime_rl.attach(module, on_stats=seen.append)
    for _ in range(2):
        logged = sites.prime_step(module, RANKS)
        assert {key: logged[key] for key in plain} == pytest.approx(plain, nan_ok=True)
        assert_pooled(logged, "log_ratio/learner_vs_sampler/", "learner", "rollout", BY_ACCUMULATOR)
        assert logged["log_ratio/learner_vs_sampler/post_tool/n_tokens"] == sites.after_tools(RANKS)
    assert len(seen) == 2
    detach()
    assert vars(module) == before


def test_prime_rl_counts_sampled_tokens_only() -> None:
    module = sites.prime_module()
    prime_rl.attach(module)
    x = torch.tensor([0.1, 0.2, 0.3, 0.4])
    module.compute_loss(
        trainer_logprobs=[x],
        inference_logprobs=[torch.zeros(4)],
        loss_mask=[torch.ones(4, dtype=torch.bool)],
        rl_weights=[torch.tensor([1.0, 0.0, 0.0, 0.0])],
        ref_kl_weights=[torch.tensor([0.0, 0.0, 0.5, 0.0])],
        ce_weights=[torch.tensor([0.0, 1.0, 0.0, 1.0])],  # a frozen model wrote these: no sampler to compare with
    )
    logged = module.filter_rl_trainer_tensor_stats_for_wandb({})
    assert logged["log_ratio/learner_vs_sampler/all/n_tokens"] == 2
    assert logged["log_ratio/learner_vs_sampler/all/log_ratio_mean"] == pytest.approx(0.2)


def test_prime_rl_by_a_custom_loss() -> None:
    logged = sites.prime_step(sites.prime_module(prime_rl.with_sums(sites.prime_custom_loss)), RANKS)
    got = from_sums(logged, "log_ratio/learner_vs_sampler/", suffix="/mean")
    assert_pooled(got, "log_ratio/learner_vs_sampler/", "learner", "rollout")
    wanted = sites.one_pass(RANKS, "learner", "rollout")["all/kl_k3"]
    assert not abs(logged["mismatch_kl/mean"] / wanted - 1.0) < 0.1  # a mean over sequences, NaN of the empty one


def test_prime_rl_of_another_version() -> None:
    with pytest.raises(AttributeError):
        prime_rl.attach(SimpleNamespace(compute_loss=None))


@pytest.mark.parametrize("packed", [False, True])
def test_nemo_rl_adds_up_raw_sums(packed: bool) -> None:
    loss = sites.NemoLoss()
    plain = sites.nemo_step(loss, RANKS, packed)
    watched = nemo_rl.WithSums(loss)
    logged = sites.nemo_step(watched, RANKS, packed)
    assert {key: logged[key] for key in plain} == plain
    got = from_sums(logged, "log_ratio/")
    assert_pooled(got, "log_ratio/learner_vs_old/", "learner", "old", (*SHARED, "n_tokens"))
    assert_pooled(got, "log_ratio/learner_vs_sampler/", "learner", "rollout", (*SHARED, "n_tokens"))
    assert_pooled(got, "log_ratio/old_vs_sampler/", "old", "rollout", (*SHARED, "n_tokens"))
    assert got["log_ratio/learner_vs_old/post_tool/n_tokens"] == sites.after_tools(RANKS)
    sums = {key for key in logged if key.endswith("_sum")}
    normal = watched.metric_normalizations
    assert normal["loss"] is sites.Normalizer.TOKENS
    assert {key for key, how in normal.items() if how is sites.Normalizer.NONE} == sums
    assert (watched.loss_type, watched.input_type) == ("token_level", "logprob")


def test_nemo_rl_without_old_log_probabilities() -> None:
    learner, data = sites.nemo_data(RANKS[0][0])

    class OnPolicyLoss:
        def __call__(self, next_token_logprobs: Any, data: Any, seqs: Any, toks: Any) -> Any:
            return next_token_logprobs.sum(), {}

    watched = nemo_rl.WithSums(OnPolicyLoss())
    _, metrics = watched(learner, {**data, "prev_logprobs": None}, None, 1.0)
    got = from_sums(metrics, "log_ratio/")
    assert got["log_ratio/learner_vs_sampler/all/n_tokens"] > 0
    assert got["log_ratio/learner_vs_old/all/n_tokens"] == 0
    assert math.isnan(got["log_ratio/learner_vs_old/all/kl_k3"])


@pytest.mark.parametrize("sums", [False, True])
def test_skyrl_averages_or_adds_up_raw_sums(sums: bool) -> None:
    plain = sites.skyrl_step(sites.skyrl_policy_loss, RANKS, sums=sums)
    status = sites.skyrl_step(skyrl.with_sums(sites.skyrl_policy_loss), RANKS, sums=sums)
    assert {key: status[key] for key in plain} == plain
    prefix = "policy/loss_metrics/log_ratio/"
    got = from_sums(status, prefix, parts=1.0 if sums else 6.0)
    extrema = ("log_ratio_max", "log_ratio_min", "n_tokens")
    assert_pooled(got, f"{prefix}learner_vs_old/", "learner", "old", (*SHARED, *extrema))
    assert_pooled(got, f"{prefix}learner_vs_sampler/", "learner", "rollout", (*SHARED, *extrema))
    assert_pooled(got, f"{prefix}old_vs_sampler/", "old", "rollout", (*SHARED, *extrema))
    assert got[f"{prefix}learner_vs_old/post_tool/n_tokens"] == pytest.approx(sites.after_tools(RANKS))


def test_skyrl_in_bfloat16_widens_first() -> None:
    status = sites.skyrl_step(skyrl.with_sums(sites.skyrl_policy_loss), RANKS, sums=True, bf16=True)
    got = from_sums(status, "policy/loss_metrics/log_ratio/")
    every = [one for rank in RANKS for batch in rank for one in batch]
    wanted = slice_stats(
        torch.cat([one.learner.bfloat16() for one in every]),
        torch.cat([one.old for one in every]),
        torch.cat([one.mask for one in every]),
    )
    key = "policy/loss_metrics/log_ratio/learner_vs_old/all/kl_k3"
    assert got[key] == pytest.approx(float(wanted["all"].kl_k3), rel=1e-6)


def test_a_micro_batch_that_cannot_be_counted_leaves_the_keys_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A key that one rank lacks would hang a reduction key by key: zeros go instead."""
    watched = skyrl.with_sums(sites.skyrl_policy_loss)
    old, mask = torch.zeros(2, 3), torch.ones(2, 3)
    _, good = watched(torch.full((2, 3), 0.1), old, old, None, mask, old)
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        for _ in range(3):
            loss, bad = watched(torch.full((2, 3), 0.1), old, old, None, mask, torch.zeros(2, 5))
    assert float(loss) == pytest.approx(6.0 * math.exp(0.1))
    assert bad.keys() == good.keys()
    assert all(value == 0.0 for key, value in bad.items() if key.endswith("_sum"))
    assert len(caplog.records) == 1
    _, again = watched(torch.full((2, 3), 0.1), old, old, None, mask, old)
    assert again == good


def test_losses_travel_to_workers() -> None:
    """Ray pickles them by value."""
    cloudpickle = pytest.importorskip("cloudpickle")
    learner, data = sites.nemo_data(RANKS[0][0])
    loss = nemo_rl.WithSums(sites.NemoLoss())
    wanted = loss(learner, data, None, 1.0)[1]
    arrived = cloudpickle.loads(cloudpickle.dumps(loss))
    assert arrived(learner, data, None, 1.0)[1] == wanted
    assert arrived.loss_type == "token_level"
    with pytest.raises(AttributeError):
        arrived.no_such_thing  # noqa: B018
    policy_loss = skyrl.with_sums(sites.skyrl_policy_loss)
    old = torch.zeros(2, 3)
    wanted = policy_loss(old + 0.1, old, old, None, old + 1.0, old)[1]
    assert cloudpickle.loads(cloudpickle.dumps(policy_loss))(old + 0.1, old, old, None, old + 1.0, old)[1] == wanted


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Two real ranks, each with its micro-batches, log what one pass over the union gives: two collectives a step."""
    ranks: Any = importlib.import_module("trainer_ranks")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=ranks.run, args=(rank, 2, str(tmp_path / "init"), results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    for _, first, second, collectives in found:
        for logged in (first, second):
            assert_pooled(logged, "log_ratio/learner_vs_sampler/", "learner", "rollout", BY_ACCUMULATOR)
            assert logged["log_ratio/learner_vs_sampler/post_tool/n_tokens"] == sites.after_tools(RANKS)
        assert collectives == 2
