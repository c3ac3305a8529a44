"""A real ``Trainer`` of a tiny policy, alone and in two processes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyrlstats.sinks import JsonlSink, read_jsonl

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from pyrlstats.integrations.transformers import SliceCallback

sys.path.insert(0, str(Path(__file__).parent))
policy: Any = importlib.import_module("hf_policy")
trainer, NAMES = policy.trainer, policy.NAMES


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_log_holds_the_micro_batches_since_the_last(
    tmp_path: Path, accumulation: int, assert_recomputed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    callback = SliceCallback(NAMES, sinks=lambda: [JsonlSink(tmp_path / "steps.jsonl")])
    training = trainer(tmp_path, callback, gradient_accumulation_steps=accumulation)
    callback.attach(training).attach(training)
    training.train()
    seen = training.seen
    assert len(seen) == 5 * accumulation
    windows = {2: seen[: 2 * accumulation], 4: seen[2 * accumulation : 4 * accumulation], 5: seen[4 * accumulation :]}

    logged = [record for record in training.sent.logs if "loss" in record]
    kept = [record for record in training.state.log_history if "loss" in record]
    assert [record["step"] for record in kept] == [2, 4]
    for record, sent, step in zip(kept, logged, (2, 4), strict=True):
        assert_recomputed(record, windows[step])
        assert {**sent, "step": step} == record
    assert "'rl/post_tool/ess_fraction'" in capsys.readouterr().out  # what Trainer prints

    written = read_jsonl(tmp_path / "steps.jsonl")
    assert [record["step"] for record in written] == [2, 4, 5]
    for record in written:
        assert_recomputed(record, windows[record["step"]])
        assert len([key for key in record if key.startswith("rl/post_tool/")]) == 36
    assert [written[0][key] for key in ("loss", "learning_rate")] == [kept[0][key] for key in ("loss", "learning_rate")]
    assert not any(callback.reporter.failures.values())


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    callback = SliceCallback(NAMES)
    watched, alone = trainer(tmp_path / "a", callback), trainer(tmp_path / "b", None)
    callback.attach(watched)
    watched.train()
    alone.train()
    for mine, theirs in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    losses = [[record["loss"] for record in one.state.log_history if "loss" in record] for one in (watched, alone)]
    assert losses[0] == losses[1]


def test_evaluations_and_other_logs_are_left_alone(tmp_path: Path) -> None:
    callback = SliceCallback(NAMES, in_logs=None)
    training = trainer(tmp_path, callback, steps=4, eval_strategy="steps", eval_steps=1)
    callback.attach(training)
    training.log({"mine": 1.0})
    training.train()
    evaluations = [record for record in training.state.log_history if "eval_loss" in record]
    assert len(evaluations) == 4
    assert not any(key.startswith("rl/") for record in evaluations for key in record)
    trained = [record for record in training.state.log_history if "loss" in record]
    assert [record["rl/text/n_tokens"] + record["rl/post_tool/n_tokens"] for record in trained] == [48, 48]
    assert len([key for key in trained[0] if key.startswith("rl/")]) == 2 * 36 + 2


def test_nothing_raises_into_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, step: int, stats: Any, scalars: Any) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("disk full")

    callback = SliceCallback(["text", "other"], sinks=[Full()])  # the loss gives other slices
    training = trainer(tmp_path, callback)
    training.add_callback(callback)  # without attach: works, but for the keys of reporters
    training.train()
    assert callback.reporter.failures["counting log-ratios"] == 5
    assert callback.reporter.failures["Full"] == 4
    trained = [record for record in training.state.log_history if "loss" in record]
    assert [record["rl/n_failed_updates"] for record in trained] == [2, 4]
    said = [record.getMessage().partition(" failed;")[0] for record in caplog.records if record.exc_info]
    assert said == ["counting log-ratios", "Full"]

    def no_sinks() -> Any:
        raise RuntimeError("no wandb run")

    callback = SliceCallback(NAMES, sinks=no_sinks)
    training = trainer(tmp_path, callback)
    callback.attach(training)
    training.train()
    assert callback.reporter.failures["making sinks"] == 1
    assert any("rl/text/kl_k3" in record for record in training.state.log_history)


def test_two_processes_report_the_union(two_processes: Any, assert_recomputed: Callable[..., None]) -> None:
    folder, seen = two_processes("transformers")
    written = read_jsonl(folder / "0.jsonl")
    assert [record["step"] for record in written] == [2, 4, 5]
    for record, part in zip(written, (slice(0, 4), slice(4, 8), slice(8, 10)), strict=True):
        assert_recomputed(record, [*seen[0]["batches"][part], *seen[1]["batches"][part]])
    for rank in seen:  # all ranks log the same
        logged = [record for record in rank["history"] if "loss" in record]
        assert [record["step"] for record in logged] == [2, 4]
        for record, same in zip(logged, written, strict=False):
            keys = [key for key in record if key.startswith("rl/")]
            assert len(keys) == 2 * 11 + 2
            assert [record[key] for key in keys] == [same[key] for key in keys]
    assert not (folder / "1.jsonl").exists()


def test_statistics_on_request(tmp_path: Path) -> None:
    wanted = ["n_sequences", "policy_clip_fraction"]
    callback = SliceCallback(["all"], in_logs=wanted, sequences=True, advantages=True, clip=(0.1, 0.3))
    x, zeros, advantages = torch.linspace(-0.5, 0.5, 8).reshape(2, 4), torch.zeros(2, 4), torch.tensor([-1.0, 1.0])
    callback.update(x, zeros, {"all": x < 9}, advantages=advantages)
    callback.update(x, zeros, advantages=advantages, mask=x < 0)
    numbers = callback.reporter.report(1, is_main=True)
    low, high = (x[0] < np.log(0.9)).sum(), (x[1] > np.log(1.3)).sum()
    assert numbers == {
        "rl/n_out_of_range": 0,
        "rl/all/n_sequences": 3,
        "rl/all/policy_clip_fraction": float(2 * low + high) / 12,
        "rl/n_failed_updates": 0,
    }


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "pyrlstats.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'pyrlstats\[transformers\]'"):
        importlib.import_module("pyrlstats.integrations.transformers")
