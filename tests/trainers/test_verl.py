"""The adapter against verl's own functions, and where verl's are wrong, against float64 definitions."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats.integrations.sums import from_sums
from pyrlstats.integrations.verl import attach, rollout_corr_metrics, rollout_corr_stats, with_sums

sys.path.insert(0, str(Path(__file__).parent))
real_packages: Any = importlib.import_module("real_packages")

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
OPTIONS = {
    "token": {"rollout_is": "token"},
    "sequence": {"rollout_is": "sequence"},
    "normalised": {"rollout_is": "token", "rollout_is_threshold": "1.5", "rollout_is_batch_normalize": True},
    "normalised sequences": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    "icepop of sequences": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
    "rejection": {
        "rollout_rs": "token_k1, token_k2,token_k3,seq_sum_k1,seq_sum_k2,seq_sum_k3,"
        "seq_mean_k1,seq_mean_k2,seq_mean_k3,seq_max_k2,seq_max_k3",
        "rollout_rs_threshold": "0.8_1.2,0.02,0.02,0.5_2.0,0.2,0.2,0.97_1.03,0.01,0.01,0.1,0.1",
    },
    "one threshold": {"rollout_rs": "token_k1,seq_sum_k3", "rollout_rs_threshold": 1.1},
}


def responses(sigma: float = 0.1, rows: int = 16, length: int = 40, seed: int = 0) -> Batch:
    """Right-padded responses of different lengths, all with tokens, some with a tool result in the middle."""
    rng = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, length, generator=rng) * 3.0
    old = rollout + torch.randn(rows, length, generator=rng) * sigma
    lengths = torch.randint(2, length, (rows, 1), generator=rng)
    mask = (torch.arange(length) < lengths).long()
    mask[: rows // 2, 5:9] = 0
    mask[:, 0] = 1
    return old, rollout, mask


@pytest.fixture(scope="module")
def verl() -> Any:
    return real_packages.verl()


@pytest.fixture(scope="module")
def theirs(verl: Any) -> Callable[..., dict[str, float]]:
    function = verl.module("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_and_rejection_mask

    def metrics(*batch: torch.Tensor, **options: Any) -> dict[str, float]:
        result: dict[str, float] = function(*batch, **options)[2]
        return result

    return metrics


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_verls_own_values(theirs: Callable[..., dict[str, float]], options: dict[str, Any]) -> None:
    for seed in range(3):
        batch = responses(seed=seed)
        wanted = theirs(*batch, **options)
        got = rollout_corr_metrics(*batch, **options)
        assert set(got) - set(wanted) == {"rollout_corr/n_non_finite"}
        assert set(wanted) <= set(got)
        for key, value in wanted.items():
            if options.get("rollout_is") == "sequence" and key.endswith("eff_sample_size"):
                continue  # over tokens in verl, over sequences here
            # verl's are float32: an absolute error of a few 1e-7 of values around 1
            assert got[key] == pytest.approx(value, rel=2e-5, abs=2e-6), key


def test_definitions_in_float64() -> None:
    """Without verl: every key of the off-policy set, from numpy."""
    old, rollout, mask = (array.numpy() for array in responses(0.3))
    x = (old - rollout).astype(np.float64)
    members = mask.astype(bool)
    got = rollout_corr_metrics(*responses(0.3), rollout_is="token")
    rows = [row[keep] for row, keep in zip(x, members, strict=True)]
    mean_old = np.array([row[keep].astype(np.float64).mean() for row, keep in zip(old, members, strict=True)])
    mean_rollout = np.array([row[keep].astype(np.float64).mean() for row, keep in zip(rollout, members, strict=True)])
    weights = np.exp(x[members])
    applied = weights.clip(max=2.0)
    wanted = {
        "kl": -x[members].mean(),
        "k3_kl": (np.expm1(x[members]) - x[members]).mean(),
        "training_ppl": np.exp(-mean_old).mean(),
        "rollout_log_ppl": -mean_rollout.mean(),
        "log_ppl_abs_diff": np.abs(mean_rollout - mean_old).mean(),
        "ppl_ratio": np.exp(mean_rollout - mean_old).mean(),
        "chi2_token": (weights**2).mean() - 1.0,
        "chi2_seq": np.mean([np.exp(2.0 * row.sum()) for row in rows]) - 1.0,
        "rollout_is_mean": applied.mean(),
        "rollout_is_std": applied.std(),
        "rollout_is_eff_sample_size": applied.mean() ** 2 / (applied**2).mean(),
        "rollout_is_seq_std": np.std([np.exp(row).clip(max=2.0).mean() for row in rows], ddof=1),
        "rollout_is_ratio_fraction_high": (weights > 2.0).mean(),
    }
    for key, value in wanted.items():
        assert got[f"rollout_corr/{key}"] == pytest.approx(value, rel=1e-6), key


# Where the values differ on purpose. Each test shows verl's, so that it fails when verl is mended.


def test_k3_and_std_of_small_differences(theirs: Callable[..., dict[str, float]]) -> None:
    rng = torch.Generator().manual_seed(1)
    rollout = torch.full((16, 500), -1.0)
    old = rollout + torch.randn(rollout.shape, generator=rng) * 1e-4
    mask = torch.ones(rollout.shape)
    x = (old - rollout).double()
    ours, verls = (function(old, rollout, mask, rollout_is="token") for function in (rollout_corr_metrics, theirs))
    k3, std = float((torch.expm1(x) - x).mean()), float(x.exp().std(correction=0))
    assert ours["rollout_corr/k3_kl"] == pytest.approx(k3, rel=1e-6)
    assert ours["rollout_corr/rollout_is_std"] == pytest.approx(std, rel=1e-6)
    assert verls["rollout_corr/k3_kl"] < 0.1 * k3  # float32 exp(x) - x - 1 cancels: here mostly to 0
    assert abs(verls["rollout_corr/rollout_is_std"] - std) > 0.5 * std  # mean(w^2) - mean(w)^2 in float32


def test_effective_sample_size_of_sequences(theirs: Callable[..., dict[str, float]]) -> None:
    lengths = torch.tensor([1, 100, 100, 100])
    mask = (torch.arange(100) < lengths[:, None]).long()
    old = torch.zeros(4, 100)
    old[0, 0] = math.log(4.0)  # one short sequence of weight 4, three long ones of weight 1
    options = {"rollout_is": "sequence", "rollout_is_threshold": 10.0}
    key = "rollout_corr/rollout_is_eff_sample_size"
    ours, verls = (
        function(old, torch.zeros(4, 100), mask, **options)[key] for function in (rollout_corr_metrics, theirs)
    )
    assert ours == pytest.approx(49.0 / 19.0 / 4.0)  # 0.6447
    assert verls == pytest.approx(0.9716, abs=1e-4)  # weighted by length


def test_nothing_saturates(theirs: Callable[..., dict[str, float]]) -> None:
    old, rollout, mask = torch.full((1, 3), 10.0), torch.zeros(1, 3), torch.ones(1, 3)
    ours, verls = (function(old, rollout, mask, rollout_is="sequence") for function in (rollout_corr_metrics, theirs))
    assert ours["rollout_corr/chi2_seq"] == pytest.approx(math.exp(60.0), rel=1e-6)
    assert ours["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(30.0), rel=1e-6)
    assert verls["rollout_corr/chi2_seq"] == pytest.approx(math.exp(40.0), rel=1e-4)
    assert verls["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(20.0), rel=1e-4)
    far = [torch.tensor([[25.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2)]
    ours, verls = (
        function(*far, rollout_rs="token_k1", rollout_rs_threshold=2.0) for function in (rollout_corr_metrics, theirs)
    )
    assert ours["rollout_corr/rollout_rs_token_k1_min"] == -25.0
    assert verls["rollout_corr/rollout_rs_token_k1_min"] == -20.0
    assert ours["rollout_corr/chi2_token"] == pytest.approx((math.exp(50.0) + 1.0) / 2.0 - 1.0, rel=1e-6)
    assert verls["rollout_corr/chi2_token"] == pytest.approx((math.exp(40.0) + 1.0) / 2.0 - 1.0, rel=1e-4)


def test_a_sequence_without_tokens_counts_nowhere(theirs: Callable[..., dict[str, float]]) -> None:
    old, rollout, mask = responses()
    with_empty = [
        torch.cat([array, torch.zeros(4, array.shape[1], dtype=array.dtype)]) for array in (old, rollout, mask)
    ]
    options = {"rollout_is": "sequence", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.01}
    without = rollout_corr_metrics(old, rollout, mask, **options)
    assert rollout_corr_metrics(*with_empty, **options) == pytest.approx(without, rel=1e-12)
    verls, verls_without = theirs(*with_empty, **options), theirs(old, rollout, mask, **options)
    for key in ("training_ppl", "log_ppl_abs_diff", "chi2_seq", "rollout_is_seq_min", "rollout_rs_seq_masked_fraction"):
        assert abs(verls[f"rollout_corr/{key}"] / verls_without[f"rollout_corr/{key}"] - 1.0) > 0.1, key


def test_weights_that_are_all_zero(theirs: Callable[..., dict[str, float]]) -> None:
    batch = [torch.full((2, 3), -3.0), torch.zeros(2, 3), torch.ones(2, 3)]
    options = {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}
    ours = rollout_corr_metrics(*batch, **options)
    assert math.isnan(ours["rollout_corr/rollout_is_eff_sample_size"])
    assert ours["rollout_corr/rollout_is_oob_ratio"] == 1.0
    with pytest.raises(ZeroDivisionError):
        theirs(*batch, **options)


def test_tokens_that_are_not_finite_are_left_out_and_counted(theirs: Callable[..., dict[str, float]]) -> None:
    old, rollout, mask = responses()
    rows, columns = mask.nonzero(as_tuple=True)
    broken_old, broken_mask = old.clone(), mask.clone()
    for place, value in zip((0, 7, 19), (math.nan, math.inf, -math.inf), strict=True):
        broken_old[rows[place], columns[place]] = value
        broken_mask[rows[place], columns[place]] = 0
    broken_old[mask == 0] = math.nan  # outside the mask nothing is read
    options = {"rollout_is": "token", "rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.1}
    ours = rollout_corr_metrics(broken_old, rollout, mask, **options)
    assert ours.pop("rollout_corr/n_non_finite") == 3.0
    wanted = rollout_corr_metrics(old, rollout, broken_mask, **options)
    assert wanted.pop("rollout_corr/n_non_finite") == 0.0
    assert ours == pytest.approx(wanted, rel=1e-12)
    assert math.isnan(theirs(broken_old, rollout, mask)["rollout_corr/kl"])


def test_nothing_at_all_is_nan_with_the_same_keys(theirs: Callable[..., dict[str, float]]) -> None:
    old, rollout, mask = responses()
    for options in OPTIONS.values():
        got = rollout_corr_metrics(old, rollout, mask * 0, **options)
        assert got.keys() == rollout_corr_metrics(old, rollout, mask, **options).keys()
        assert math.isnan(got["rollout_corr/kl"])
    with pytest.raises(ValueError):
        theirs(old, rollout, mask * 0)


def test_bfloat16_is_widened_before_it_is_subtracted(theirs: Callable[..., dict[str, float]]) -> None:
    old, rollout, mask = responses()
    half, other = old.bfloat16(), rollout.bfloat16()
    wanted = rollout_corr_metrics(half.float(), other.float(), mask)
    assert rollout_corr_metrics(half, other, mask) == pytest.approx(wanted, rel=1e-12)
    assert abs(theirs(half, other, mask)["rollout_corr/k3_kl"] / wanted["rollout_corr/k3_kl"] - 1.0) > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is"),
        ({"rollout_is": "token", "rollout_is_threshold": "a"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold"),
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": 1.0}, "token_k1"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_1.0"}, "upper bound"),
        ({"rollout_rs": "token_k2,seq_max_k2", "rollout_rs_threshold": "1,2,3"}, "one for each"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_corr_metrics(*responses(), **options)


def test_shapes_that_do_not_fit() -> None:
    old, rollout, mask = responses()
    with pytest.raises(ValueError, match="response_mask must have old_log_prob's shape"):
        rollout_corr_metrics(old, rollout, mask[:, :-1])
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        rollout_corr_metrics(old[0], rollout[0], mask[0])


def test_slices_of_an_agent_loop() -> None:
    """Row 0: model, tool, model. Row 1: model only. Row 2: a tool result at the end. Row 3: nothing."""
    response_mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0] * 6])
    attention = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [0] * 6])
    prompt = torch.tensor([[0, 1]]).expand(4, 2)
    old, rollout = torch.randn(4, 6), torch.randn(4, 6)
    stats = rollout_corr_stats(old, rollout, response_mask, torch.cat([prompt, attention], 1))
    wanted = {"all": 8, "pre_tool": 4, "post_tool": 1, "text": 3}
    assert {name: int(stats[name].n_tokens) for name in stats} == wanted
    assert float(stats["post_tool"].log_ratio_max) == float(old[0, 4] - rollout[0, 4])
    by_holes = rollout_corr_stats(old, rollout, response_mask)  # what ends with a tool result cannot be told
    assert {name: int(by_holes[name].n_tokens) for name in by_holes} == {
        "all": 8,
        "pre_tool": 2,
        "post_tool": 1,
        "text": 5,
    }
    one_pass = pyrlstats.slice_stats(old, rollout, response_mask)["all"]
    assert float(stats["all"].kl_k3) == pytest.approx(float(one_pass.kl_k3), rel=1e-6)


def test_the_hook_adds_to_what_verls_trainers_log(verl: Any, caplog: pytest.LogCaptureFixture) -> None:
    metrics = verl.module("verl.utils.debug.metrics")
    trainer = SimpleNamespace(calculate_debug_metrics=metrics.calculate_debug_metrics)  # one that imports by name
    verl.modules["verl.trainer.ppo.v1.trainer_base"] = trainer
    old, rollout, mask = responses()
    batch = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask, "responses": mask}
    data, seen = SimpleNamespace(batch=batch), []
    with verl.loaded():
        original = metrics.calculate_debug_metrics
        detach = attach(on_stats=seen.append)
        logged = trainer.calculate_debug_metrics(data)
        assert metrics.calculate_debug_metrics(data) == pytest.approx(logged, nan_ok=True)
        plain = original(data)
        assert {key: logged[key] for key in plain} == plain
        assert logged["rollout_corr_dist/post_tool/n_tokens"] == int(seen[0]["post_tool"].n_tokens) > 0
        wanted = rollout_corr_stats(old, rollout, mask).to_dict("rollout_corr_dist/")
        assert {key: logged[key] for key in wanted} == pytest.approx(wanted, nan_ok=True)
        with caplog.at_level(logging.WARNING, "pyrlstats"):
            for _ in range(2):  # what fails on our side does not reach the trainer, and is said once
                data.batch = {**batch, "attention_mask": torch.ones(3, 40)}
                assert metrics.calculate_debug_metrics(data) == plain
        assert len(caplog.records) == 1
        detach()
        assert metrics.calculate_debug_metrics is original
        assert trainer.calculate_debug_metrics is original


def test_nothing_of_theirs_stays_imported(verl: Any) -> None:
    verl.module("verl.trainer.ppo.rollout_corr_helper")
    assert not [name for name in sys.modules if name.partition(".")[0] in ("verl", "ray", "tensordict")]


def test_raw_sums_through_verls_averages(verl: Any) -> None:
    """What bypass mode can log: verl's own Metric and reduce_metrics average over ranks and micro-batches."""
    utils = verl.module("verl.utils.metric.utils")

    def vanilla(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **others: Any) -> Any:
        return log_prob.sum(), {"actor/ppo_kl": 0.5}

    watched = with_sums(vanilla)
    metrics, parts = [], []
    for seed, rows in enumerate((1, 16, 3, 40)):  # two ranks of two micro-batches
        log_prob, old, mask = responses(0.4 / rows, rows, seed=seed)
        parts.append((log_prob, old, mask))
        loss, found = watched(
            old_log_prob=old, log_prob=log_prob, advantages=old, response_mask=mask.bool(), loss_agg_mode="token-mean"
        )
        assert float(loss) == float(log_prob.sum())
        metrics.append(utils.Metric.from_dict(found, aggregation="mean"))
    ranks = []
    for first, second in (metrics[:2], metrics[2:]):
        for key, metric in second.items():
            first[key].append(metric)
        ranks.append(first)
    averaged = {key: utils.Metric.aggregate_dp([rank[key] for rank in ranks]) for key in ranks[0]}
    logged = utils.reduce_metrics({key: [value] for key, value in averaged.items()})
    assert logged["actor/ppo_kl"] == 0.5
    got = from_sums(logged, "actor/log_ratio/", parts=4.0)
    columns = [torch.cat([part[column].flatten() for part in parts]) for column in range(3)]
    wanted = pyrlstats.slice_stats(*columns).to_dict("actor/log_ratio/learner_vs_old/")
    for statistic in ("n_tokens", "kl_k3", "ess_fraction", "log_ratio_std", "clip_fraction"):
        key = f"actor/log_ratio/learner_vs_old/all/{statistic}"
        assert got[key] == pytest.approx(wanted[key], rel=1e-6), statistic
