"""The callback with the real Stable-Baselines3: a float64 recomputation's figures, the bits of a run without it."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sb3 = pytest.importorskip("stable_baselines3")
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.logger import configure  # noqa: E402

from pyrlstats import SliceStats  # noqa: E402
from pyrlstats.integrations.stable_baselines3 import UpdateStatsCallback  # noqa: E402
from pyrlstats.sinks import JsonlSink, Sinks, read_jsonl  # noqa: E402

STEPS, ROLLOUT, EPOCHS = 192, 64, 3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """No threads that wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(**options: Any) -> Any:
    settings = {"n_steps": ROLLOUT, "batch_size": 16, "n_epochs": EPOCHS, "learning_rate": 3e-3} | options
    return sb3.PPO("MlpPolicy", "CartPole-v1", seed=3, device="cpu", **settings)


class Tape(BaseCallback):
    """The pairs that PPO's loss sees, captured where its ratio is made: by a policy that writes down what it gives."""

    def _on_training_start(self) -> None:
        self.old: list[np.ndarray] = []
        self.new: list[np.ndarray] = []
        policy, buffer = type(self.model.policy), type(self.model.rollout_buffer)
        self.patch = pytest.MonkeyPatch()
        evaluate, samples_of = policy.evaluate_actions, buffer._get_samples

        def writing_evaluate(policy: Any, *args: Any) -> Any:
            result = evaluate(policy, *args)
            self.new.append(result[1].detach().numpy().copy())
            return result

        def writing_samples(buffer: Any, *args: Any) -> Any:
            result = samples_of(buffer, *args)
            self.old.append(result.old_log_prob.numpy().copy())
            return result

        self.patch.setattr(policy, "evaluate_actions", writing_evaluate)
        self.patch.setattr(buffer, "_get_samples", writing_samples)

    def _on_training_end(self) -> None:
        self.patch.undo()

    def _on_step(self) -> bool:
        return True


def taught(*callbacks: Any, **options: Any) -> Any:
    model = make(**options)
    model.learn(STEPS, callback=list(callbacks))
    return model


def assert_is(stats: SliceStats, name: str, x: np.ndarray) -> None:
    """The statistics of a slice are those of x, float64 (N,)."""
    view = stats[name]
    weight = np.exp(x)
    wanted = {
        "n_tokens": x.size,
        "log_ratio_mean": x.mean(),
        "log_ratio_std": x.std(),
        "log_ratio_max": x.max(),
        "log_ratio_min": x.min(),
        "kl_k3": (np.expm1(x) - x).mean(),
        "ess_fraction": weight.sum() ** 2 / (weight**2).sum() / x.size,
        "clip_fraction": ((weight < 0.8) | (weight > 1.2)).mean(),
        "zero_fraction": (x == 0.0).mean(),
    }
    for statistic, value in wanted.items():
        assert float(getattr(view, statistic)) == pytest.approx(value, rel=2e-6, abs=1e-9), statistic
    ranks = np.sort(x)[np.maximum(1, np.ceil(np.array([0.01, 0.5, 0.99]) * x.size)).astype(int) - 1]
    low, high = view.quantile_bounds([0.01, 0.5, 0.99])
    assert (low.numpy() <= ranks).all()
    assert (ranks <= high.numpy()).all()


def test_figures_are_those_of_a_float64_recomputation() -> None:
    tape, updates = Tape(), []
    callback = UpdateStatsCallback(on_stats=lambda update, stats: updates.append((update, stats)))
    taught(tape, callback)
    assert callback.guard.failures == 0
    assert [update for update, _ in updates] == [EPOCHS, 2 * EPOCHS, 3 * EPOCHS]
    minibatches = ROLLOUT // 16
    # float32 differences, as the loss takes them
    x = [(new - old).astype(np.float64) for new, old in zip(tape.new, tape.old, strict=True)]
    assert len(x) == 3 * EPOCHS * minibatches
    for number, (_, stats) in enumerate(updates):
        epochs = [
            np.concatenate(x[start : start + minibatches])
            for start in range(number * EPOCHS * minibatches, (number + 1) * EPOCHS * minibatches, minibatches)
        ]
        assert_is(stats, "all", np.concatenate(epochs))
        assert_is(stats, "first_epoch", epochs[0])
        assert_is(stats, "last_epoch", epochs[-1])
        assert int(stats.n_out_of_range) == 0
        assert float(stats["last_epoch"].kl_k3) > 0.0


def test_a_run_with_it_has_the_same_bits(tmp_path: Path) -> None:
    def weights_and_logs(folder: str, *callbacks: Any) -> tuple[dict[str, Any], list[dict[str, str]]]:
        model = make()
        model.set_logger(configure(str(tmp_path / folder), ["csv"]))
        model.learn(STEPS, callback=list(callbacks))
        model.logger.close()
        with (tmp_path / folder / "progress.csv").open() as file:
            return model.policy.state_dict(), list(csv.DictReader(file))

    plain, logs = weights_and_logs("plain")
    watched, watched_logs = weights_and_logs("watched", UpdateStatsCallback())
    assert plain.keys() == watched.keys()
    for key, value in plain.items():
        assert torch.equal(value, watched[key]), key
    for row, watched_row in zip(logs, watched_logs, strict=False):
        for key in row:
            if not key.startswith("time/"):
                assert row[key] == watched_row[key], key


def test_logged_with_sb3s_figures_of_the_same_update(tmp_path: Path) -> None:
    model, callback = make(clip_range=0.1), UpdateStatsCallback()
    model.set_logger(configure(str(tmp_path), ["json", "csv", "log"]))
    model.learn(STEPS, callback=callback)
    model.logger.close()
    rows = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    assert len(rows) == 4  # three rollouts, and one dump more for the last update
    assert "log_ratio/all/kl_k3" not in rows[0]
    for row in rows[1:]:
        assert row["log_ratio/all/n_tokens"] == ROLLOUT * EPOCHS
        # SB3's figure is that of the last epoch, float32 and averaged over minibatches of one size
        assert row["log_ratio/last_epoch/kl_k3"] == pytest.approx(row["train/approx_kl"], rel=1e-2, abs=1e-7)
        assert row["log_ratio/all/clip_fraction"] == pytest.approx(row["train/clip_fraction"], abs=1e-6)
    assert callback.stats is not None
    assert rows[-1]["log_ratio/all/kl_k3"] == callback.stats.to_dict()["all/kl_k3"]
    assert "ess_fraction" in (tmp_path / "log.txt").read_text()
    assert "n_nan" not in (tmp_path / "log.txt").read_text()


def test_sinks_take_every_update(tmp_path: Path) -> None:
    with Sinks([JsonlSink(tmp_path / "updates.jsonl")]) as sinks:
        taught(UpdateStatsCallback(on_stats=sinks.write))
    records = read_jsonl(tmp_path / "updates.jsonl")
    assert [record["step"] for record in records] == [EPOCHS, 2 * EPOCHS, 3 * EPOCHS]
    assert all(record["rl/all/n_tokens"] == ROLLOUT * EPOCHS for record in records)


def test_early_stopping_and_detaching() -> None:
    callback = UpdateStatsCallback()
    model = taught(callback, target_kl=1e-6, n_epochs=10)
    stats = callback.stats
    assert stats is not None
    assert 0 < int(stats["last_epoch"].n_tokens) < int(stats["all"].n_tokens) + 1 < ROLLOUT * 10
    assert "get" not in vars(model.rollout_buffer)
    assert "evaluate_actions" not in vars(model.policy)
    model.learn(ROLLOUT)  # no callback: nothing is counted
    assert callback.stats is stats
    model.learn(ROLLOUT, callback=callback)
    assert callback.stats is not stats


def test_on_policy_by_construction_says_so() -> None:
    callback = UpdateStatsCallback()
    model = sb3.A2C("MlpPolicy", "CartPole-v1", seed=1, device="cpu", n_steps=16)
    model.learn(64, callback=callback)
    assert callback.stats is not None
    assert float(callback.stats["all"].log_ratio_abs_mean) < 1e-6


def test_an_algorithm_without_ratios_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    callback = UpdateStatsCallback()
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        sb3.DQN("MlpPolicy", "CartPole-v1", device="cpu", learning_starts=100).learn(20, callback=callback)
    assert callback.guard.failures == len(caplog.records) == 1
    assert callback.stats is None


def test_what_fails_does_not_reach_training(caplog: pytest.LogCaptureFixture) -> None:
    def broken(update: int, stats: SliceStats) -> None:
        raise RuntimeError("sink is down")

    callback = UpdateStatsCallback(on_stats=broken)
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        taught(callback)
    assert callback.guard.failures == 3
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
