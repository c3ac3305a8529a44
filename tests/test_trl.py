"""``pyrlstats.integrations.trl`` in real runs of TRL's trainers, against what a spy inside them recorded."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import re
import runpy
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyrlstats import SliceStats, slice_stats
from pyrlstats.integrations.trl import Family, attach
from pyrlstats.sinks import read_jsonl

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WORKERS = Path(__file__).parent / "distributed_workers"
sys.path.insert(0, str(WORKERS))
figures: Any = importlib.import_module("trl_figures")
AGES, SAMPLED, SLICES, TURNS, Rows = figures.AGES, figures.SAMPLED, figures.SLICES, figures.TURNS, figures.Rows
check, check_log, expected, names_of_row = figures.check, figures.check_log, figures.expected, figures.names_of_row
quantile, tokens_of = figures.quantile, figures.tokens_of


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    """The module that makes the trainers. In one thread: several would only wait for each other."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not here: it needs Python 3.11")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("trl_run")
    torch.set_num_threads(threads)


def window(trainer: Any, mode: str, *steps: int) -> list[dict[str, Any]]:
    return [batch for batch in trainer.records.batches if batch["mode"] == mode and batch["step"] in steps]


def logs_of(trainer: Any, key: str) -> list[dict[str, Any]]:
    return [logs for logs in trainer.state.log_history if key in logs]


# -- GRPO with the calculator -----------------------------------------------------------------------------------------

# the batch of four micro-batches is used for four steps, or for two of two micro-batches each
ONE = {"steps_per_generation": 4, "max_steps": 7}
ACCUMULATED = {
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "max_steps": 6,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


@pytest.fixture(scope="module")
def trained(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trainers after their run, by what they ran with."""
    kept: dict[tuple[bool, str], Any] = {}

    def train(attached: bool, **options: Any) -> Any:
        key = (attached, repr(sorted(options.items())))
        if key not in kept:
            trainer = run.make_trainer(tmp_path_factory.mktemp("grpo"), sampler_noise=0.5, **options)
            before = dict(vars(trainer))
            handle = attach(trainer) if attached else None
            torch.manual_seed(3)
            trainer.train()
            kept[key] = trainer, handle, before, torch.get_rng_state()
        return kept[key]

    return train


@pytest.mark.parametrize("options", [ONE, ACCUMULATED], ids=["one micro-batch", "accumulated"])
def test_every_step_equals_the_recomputation(trained: Any, options: dict[str, Any]) -> None:
    trainer, handle, _, _ = trained(True, **options)
    assert handle.failures == {}
    logs = logs_of(trainer, "loss")
    assert len(logs) == options["max_steps"]
    for one in logs:
        batches = window(trainer, "train", one["step"] - 1)
        assert len(batches) == options.get("gradient_accumulation_steps", 1)
        check_log(one, batches, SAMPLED)
    seen = {key.split("/")[2] for one in logs for key, value in one.items() if key.endswith("/n_tokens") and value}
    assert {"pre_tool", "post_tool", "turn_0", "turn_1", "turn_2", "stale_0", "stale_3"} <= seen
    latest = handle.latest["train"]["learner_vs_old"]
    assert float(latest["all"].log_ratio_std) > 1e-3, "the policy has moved since the batch was generated"
    bounds = latest["post_tool"].abs_quantile_bounds([0.5, 0.99])
    x, _ = tokens_of(expected(window(trainer, "train", len(logs) - 1), "learner_vs_old")["post_tool"])
    for lo, hi, q in zip(*bounds, (0.5, 0.99), strict=True):
        assert lo - 1e-6 <= quantile(np.abs(x), q) <= hi + 1e-6


def test_evaluation_is_kept_apart(trained: Any) -> None:
    trainer, _, _, _ = trained(True, **ACCUMULATED)
    logs = logs_of(trainer, "eval_loss")
    assert [one["step"] for one in logs] == [2, 4, 6]
    for one in logs:
        check_log(one, window(trainer, "eval", one["step"]), SAMPLED, before="eval_")
        assert not any(key.startswith("rl/") for key in one)


def test_a_log_of_several_steps_pools_them(run: Any, tmp_path: Path) -> None:
    trainer = run.make_trainer(tmp_path, steps_per_generation=4, max_steps=5, logging_steps=2)
    attach(trainer)
    trainer.train()
    logs = [*logs_of(trainer, "loss"), *logs_of(trainer, "train_runtime")]
    assert [one["step"] for one in logs] == [2, 4, 5]
    for one, steps in zip(logs, [(0, 1), (2, 3), (4,)], strict=True):
        check_log(one, window(trainer, "train", *steps), {"learner_vs_old"})


@pytest.mark.parametrize("options", [ONE, ACCUMULATED], ids=["one micro-batch", "accumulated"])
def test_the_run_is_the_same_to_the_bit(trained: Any, options: dict[str, Any]) -> None:
    with_it, _, _, rng_with = trained(True, **options)
    without, _, _, rng_without = trained(False, **options)
    assert torch.equal(rng_with, rng_without)
    weights = without.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in with_it.model.state_dict().items())
    for mine, theirs in zip(with_it.records.batches, without.records.batches, strict=True):
        assert torch.equal(mine["loss"], theirs["loss"])
    for mine, theirs in zip(with_it.state.log_history, without.state.log_history, strict=True):
        own = {key: value for key, value in mine.items() if "rl/" not in key and not is_clock(key)}
        assert own == {key: value for key, value in theirs.items() if not is_clock(key)}


def is_clock(key: str) -> bool:
    return key.endswith(("_time", "_runtime", "_per_second"))


def test_detach_restores_the_trainer(trained: Any) -> None:
    trainer, handle, before, _ = trained(True, **ONE)
    hooked = [name for name, value in vars(trainer).items() if hasattr(value, "_pyrlstats_hook")]
    assert sorted(hooked) == [
        "_compute_loss",
        "_generate_and_score_completions",
        "_get_per_token_logps_and_entropies",
        "log",
    ]
    with pytest.raises(ValueError, match=r"attached already: call detach\(\)"):
        attach(trainer)
    handle.detach()
    assert not any(name in before for name in hooked)
    for name in hooked:
        assert name not in vars(trainer)
        assert getattr(trainer, name).__func__ is getattr(type(trainer), name)
    handle.detach()
    attach(trainer).detach()


def test_an_attribute_that_was_there_comes_back(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = run.make_trainer(tmp_path, steps_per_generation=2, max_steps=1)
    calls = []

    def mine(logs: dict[str, Any], *args: Any) -> None:
        calls.append(dict(logs))
        type(trainer).log(trainer, logs, *args)

    trainer.log = mine
    handle = attach(trainer)
    attached = trainer._compute_loss
    trainer._compute_loss = lambda *args: attached(*args)  # someone else, later
    trainer.train()
    assert any(key.startswith("rl/") for key in calls[0])
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        handle.detach()
    assert "_compute_loss of the trainer has been wrapped by someone else" in caplog.text
    assert trainer.log is mine
    trainer.args.max_steps = 2
    calls.clear()
    trainer.train()  # through what is buried
    assert calls
    assert not any(key.startswith("rl/") for logs in calls for key in logs)


# -- what does not exist ----------------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_on_policy_it_says_so_once_and_reports_nothing(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run.make_trainer(tmp_path, gradient_accumulation_steps=2, max_steps=3)  # TRL's default alignment
    handle = attach(trainer)
    with caplog.at_level(logging.INFO, "pyrlstats"):
        trainer.train()
    assert "old_per_token_logps" not in trainer.records.batches[0]
    assert not any("rl/" in key for logs in trainer.state.log_history for key in logs)
    assert handle.latest == {"train": {}}
    assert handle.failures == {}
    assert said(caplog, "learner_vs_old is 1 by construction") == 1
    assert said(caplog, "set steps_per_generation > gradient_accumulation_steps, or num_iterations > 1") == 1
    assert said(caplog, "no log-probabilities of the sampler") == 1


def test_on_policy_with_a_sampler_that_does_not_know_some_tokens(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run.make_trainer(tmp_path, sampler_noise=math.inf, gradient_accumulation_steps=2, max_steps=2)
    attach(trainer)
    with caplog.at_level(logging.INFO, "pyrlstats"):
        trainer.train()
    for one in logs_of(trainer, "loss"):
        check_log(one, window(trainer, "train", one["step"] - 1), {"learner_vs_sampler"})
    assert any(
        one["rl/learner_vs_sampler/all/n_finite"] < one["rl/learner_vs_sampler/all/n_tokens"]
        for one in logs_of(trainer, "loss")
    )
    assert said(caplog, "learner_vs_old is 1 by construction") == 1
    assert said(caplog, "no log-probabilities of the sampler") == 0


def test_a_loss_that_passes_by_is_said_once(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = run.make_trainer(tmp_path, steps_per_generation=4, max_steps=2)
    fused = type(trainer)._compute_loss
    trainer.compute_loss = lambda model, inputs, **_: fused(trainer, model, inputs)
    attach(trainer)
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        trainer.train()
    assert said(caplog, "no micro-batch has come by") == 1
    assert not any("rl/" in key for logs in trainer.state.log_history for key in logs)


# -- failures and options ---------------------------------------------------------------------------------------------


def test_failures_never_reach_the_trainer(
    run: Any, trained: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(tokens: Any) -> Any:
        raise RuntimeError("a slice of the user")

    def on_stats(*_: Any) -> None:
        raise KeyError("a sink of the user")

    trainer = run.make_trainer(tmp_path, sampler_noise=0.5, **ONE)
    handle = attach(trainer, slices=["tool", Family(("mine",), broken)], on_stats=on_stats)
    torch.manual_seed(3)
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        trainer.train()
    assert handle.failures == {"count a micro-batch": 7, "call on_stats": 7}
    assert said(caplog, "to count a micro-batch failed") == said(caplog, "to call on_stats failed") == 1
    assert "a slice of the user" in caplog.text
    assert [one["rl/failures"] for one in logs_of(trainer, "loss")] == [2, 4, 6, 8, 10, 12, 14]
    without = trained(False, **ONE)[0]
    for mine, theirs in zip(trainer.records.batches, without.records.batches, strict=True):
        assert torch.equal(mine["loss"], theirs["loss"])


def test_options(run: Any, tmp_path: Path) -> None:
    calls = []
    long = Family(("long",), lambda tokens: {"long": tokens.inputs["completion_mask"].sum(-1, keepdim=True) > 9})
    trainer = run.make_trainer(tmp_path, steps_per_generation=2, epsilon=0.1, epsilon_high=0.3, bf16=True, max_steps=3)
    handle = attach(
        trainer,
        slices=["turn", long],
        prefix="ratios/",
        statistics=["n_tokens", "log_ratio_p99", "clip_fraction_high"],
        on_stats=lambda stats, mode, step: calls.append((stats, mode, step)),
    )
    trainer.train()
    assert handle.failures == {}
    logs = logs_of(trainer, "loss")
    assert [(mode, step) for _, mode, step in calls] == [("train", 1), ("train", 2), ("train", 3)]
    for (stats, _, step), one in zip(calls, logs, strict=True):
        view = stats["learner_vs_old"]
        assert isinstance(view, SliceStats)
        assert list(view) == ["all", *TURNS, "long"]
        (batch,) = window(trainer, "train", step - 1)
        rows = batch["completion_mask"].sum(-1, keepdim=True) > 9
        mask = batch["completion_mask"] * batch["tool_mask"]
        wanted = slice_stats(batch["learner"], batch["old_per_token_logps"], {"long": rows}, mask=mask, clip=(0.1, 0.3))
        assert int(wanted["long"].n_tokens) > 0
        for name in ("n_tokens", "clip_fraction_high"):
            assert one[f"ratios/learner_vs_old/long/{name}"] == float(getattr(wanted["long"], name))
        assert one["ratios/learner_vs_old/long/log_ratio_p99"] == float(wanted["long"].quantile(0.99))
    assert handle.latest["train"] is calls[-1][0]


def test_what_is_asked_for_beside(run: Any, tmp_path: Path) -> None:
    trainer = run.make_trainer(tmp_path, sampler_noise=0.5, steps_per_generation=2, max_steps=2)
    handle = attach(
        trainer, sequences=True, advantages=True, truncate=(0.7, 1.5), entropy=True, probabilities=True, slices=["tool"]
    )
    trainer.train()
    assert handle.failures == {}
    for one in logs_of(trainer, "loss"):
        for ratio in SAMPLED:
            rows = expected(window(trainer, "train", one["step"] - 1), ratio)
            for name in SLICES[:4]:
                prefix = f"rl/{ratio}/{name}/"
                own = {key: value for key, value in one.items() if "/perplexity_" not in key and "/prob" not in key}
                check(own, prefix, rows[name])
                if rows[name]:
                    w = np.exp(tokens_of(rows[name])[0])
                    share = w / w.sum()
                    wanted = np.exp(-(share * np.log(share)).sum()) / w.size
                    assert one[f"{prefix}perplexity_ess_fraction"] == pytest.approx(wanted, abs=2e-6)
                    assert one[f"{prefix}probability_diff_max"] >= one[f"{prefix}probability_diff_mean"] >= 0


def test_all_statistics(run: Any, tmp_path: Path) -> None:
    trainer = run.make_trainer(tmp_path, steps_per_generation=2, max_steps=1)
    handle = attach(trainer, slices=[], statistics=None)
    trainer.train()
    (logs,) = logs_of(trainer, "loss")
    own = {key.removeprefix("rl/learner_vs_old/"): value for key, value in logs.items() if key.startswith("rl/")}
    assert own == handle.latest["train"]["learner_vs_old"].to_dict()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"slices": ["tools"]}, ValueError, "slices of this trainer must be among .*'tool'.*, got 'tools'"),
        ({"slices": "tool"}, TypeError, r"use \['tool'\]"),
        ({"slices": [3]}, TypeError, "names or Family objects, got int"),
        ({"slices": ["tool", "tool"]}, ValueError, "'text' is given twice"),
        ({"statistics": ["p99"]}, ValueError, r"statistics must be among .*, got \['p99'\]"),
        ({"statistics": "kl_k3"}, TypeError, r"use \['kl_k3'\]"),
        ({"clip": (2, 3)}, ValueError, "clip"),
        ({"sequences": "rows"}, TypeError, "sequences must be True or False"),
    ],
)
def test_bad_arguments_change_nothing(
    trained: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    trainer = trained(False, **ONE)[0]
    before = dict(vars(trainer))
    with pytest.raises(error, match=message):
        attach(trainer, **options)
    assert vars(trainer) == before


def test_other_trainers_are_refused() -> None:
    class SFTTrainer:
        pass

    with pytest.raises(TypeError, match="one of TRL's GRPOTrainer, RLOOTrainer, AsyncGRPOTrainer, or derive"):
        attach(SFTTrainer())
    older = type("GRPOTrainer", (), {"log": print})()
    with pytest.raises(TypeError, match=r"this GRPOTrainer has no _get_per_token_logps_and_entropies, .*not supported"):
        attach(older)


# -- the page and the example -----------------------------------------------------------------------------------------


def test_the_code_of_the_page_runs(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "trl.md").read_text()
    exec(compile("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), "trl.md", "exec"), {})


def test_the_example_streams_to_its_files(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(sys, "argv", ["trl_grpo_tool.py", "--out", str(tmp_path), "--steps", "3"])
    run.example.main()
    assert "post_tool" in capsys.readouterr().out
    lines = read_jsonl(tmp_path / "rl.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    (events,) = (tmp_path / "runs").rglob("events.*")
    board = accumulator.EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    for statistic in ("n_tokens", "abs_log_ratio_p99", "ess_fraction"):  # TRL's own TensorBoard, and our file
        scalars = board.Scalars(f"train/rl/learner_vs_old/post_tool/{statistic}")
        ours = [line[f"train/learner_vs_old/post_tool/{statistic}"] for line in lines]
        assert [one.value for one in scalars] == pytest.approx(ours, rel=1e-6)
    assert {"train/loss", "train/reward"} <= set(board.Tags()["scalars"])
    histograms = accumulator.EventAccumulator(str(tmp_path / "histograms"), size_guidance={"histograms": 0}).Reload()
    (first, *_) = histograms.Histograms("train/learner_vs_old/post_tool/log_ratio")
    assert first.histogram_value.num == lines[0]["train/learner_vs_old/post_tool/n_tokens"]


# -- RLOO and AsyncGRPO -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo(run: Any, tmp_path: Path, beta: float) -> None:
    trainer = run.make_trainer(tmp_path, kind="rloo", steps_per_generation=4, max_steps=4, beta=beta)
    handle = attach(trainer)
    trainer.train()
    assert handle.failures == {}
    logs = logs_of(trainer, "loss")
    assert len(logs) == 4
    for one in logs:
        batches = window(trainer, "train", one["step"] - 1)
        for batch in batches:  # the spy's tokens are those whose sum the loss got
            total = (batch["old_per_token_logps"] * batch["completion_mask"]).sum(1)
            torch.testing.assert_close(total, batch["old_logps"])
        assert one["rl/learner_vs_old/all/n_sequences"] == 8, "its ratio is that of whole completions"
        rows = expected(batches, "learner_vs_old")
        for name in ("all", *AGES):
            check(one, f"rl/learner_vs_old/{name}/", rows[name])
        assert {key.split("/")[1] for key in one if key.startswith("rl/")} == {"learner_vs_old"}
    assert float(handle.latest["train"]["learner_vs_old"]["stale_3"].log_ratio_std) > 1e-3
    handle.detach()
    assert "_generate_and_score_completions" not in vars(trainer)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_async_grpo(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int) -> None:
    trainer = run.make_async_trainer(tmp_path, monkeypatch, max_steps=3, gradient_accumulation_steps=accumulation)
    families = ["tool", "turn", "staleness"] if accumulation == 2 else None
    before = dict(vars(trainer))
    handle = attach(trainer, slices=families, sequences=True, advantages=True)
    trainer.train()
    assert handle.failures == {}
    logs = logs_of(trainer, "loss")
    assert len(logs) == 3
    for one in logs:
        rows: dict[str, Rows] = defaultdict(list)
        batches = window(trainer, "train", one["step"] - 1)
        assert len(batches) == accumulation
        for batch in batches:
            terms = batch["token_index"][0] >= 0
            learner = batch["learner"].flatten()[batch["token_index"][0][terms]].double()
            x = learner - batch["old_log_probs"][0][terms].double()
            pairs = list(zip(x.tolist(), batch["advantages"][0][terms].tolist(), strict=True))
            for which in range(8):  # two groups of four completions; the terms of one follow one another
                mask = run.rollout(0, which % 4)[1]
                response = [0] * len(run.PROMPT) + [1] * (len(mask) - len(run.PROMPT))
                group = round((pairs[0][1] + 1.5 - which % 4) / 10)
                tokens: dict[str, list[Any]] = defaultdict(list)
                for names in names_of_row(response, mask, group % 5):
                    pair = pairs.pop(0) if names else None
                    for name in names:
                        tokens[name].append(pair)
                for name, found in tokens.items():
                    rows[name].append(np.array(found))
            assert not pairs
        counted = [*SLICES[:4], *TURNS, *(AGES if families else [])]
        assert list(handle.latest["train"]["learner_vs_sampler"]) == counted
        for name in counted:
            check(one, f"rl/learner_vs_sampler/{name}/", rows[name])
        view = handle.latest["train"]["learner_vs_sampler"]
        assert int(view["all"].n_sequences_empty) == 0
        assert int(view["text"].n_sequences_empty) == 6 * accumulation
        assert one["rl/learner_vs_sampler/turn_3_4/n_tokens"] > 0
        assert one["rl/learner_vs_sampler/all/log_ratio_mean"] == pytest.approx(x_mean(one), abs=1e-4), (
            "the ratio that TRL logs itself"
        )
    seen = {key.split("/")[2] for one in logs for key, value in one.items() if key.endswith("/n_tokens") and value}
    assert bool(families) == ({"stale_0", "stale_1", "stale_2", "stale_3", "stale_4_7"} <= seen)
    handle.detach()
    assert not {"compute_loss", "get_train_dataloader", "log"} & (set(vars(trainer)) - set(before))
    assert "get" not in vars(trainer.rollout_queue)


def x_mean(logs: dict[str, Any]) -> float:
    """mean(x) from TRL's own mean ratio and its k3: k3 = mean(ratio) - 1 - mean(x)."""
    return float(logs["ratio"]) - 1 - float(logs["kl"])


def check_no_sync(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every micro-batch under a mode in which asking a tensor for its values is a failure."""
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    no_sync, count = runpy.run_path(str(Path(__file__).parent / "test_no_sync.py"))["NoSync"], handle._count

    def watched(*args: Any) -> None:
        with no_sync():
            count(*args)

    monkeypatch.setattr(handle, "_count", watched)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "async"])
def test_micro_batches_ask_no_tensor_for_its_values(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "async":
        trainer = run.make_async_trainer(tmp_path, monkeypatch, max_steps=1)
    else:
        trainer = run.make_trainer(
            tmp_path,
            kind=kind,
            sampler_noise=0.5 if kind == "grpo" else None,
            steps_per_generation=2,
            max_steps=2,
            beta=0.0,
        )
    families = None if kind == "rloo" else ["tool", "turn", "staleness"]
    handle = attach(trainer, slices=families, sequences=True, advantages=True, truncate=(0.5, 2.0), entropy=True)
    check_no_sync(handle, monkeypatch)
    trainer.train()
    assert handle.failures == {}
    assert all(float(one["all"].n_tokens) > 0 for one in handle.latest["train"].values())


# -- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(run: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes of one gloo group have recorded, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        }
        command = [sys.executable, str(WORKERS / "trl_run.py"), str(folder)]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        for process in processes:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


def train_logs(result: Any) -> list[dict[str, Any]]:
    return [logs for logs in result["history"] if "loss" in logs]


def test_two_ranks_report_the_union(ranks: list[Any]) -> None:
    for step in range(6):
        union = [batch for rank in ranks for batch in rank["attached"]["batches"] if batch["step"] == step]
        assert len(union) == 2
        for rank in ranks:
            check_log(train_logs(rank["attached"])[step], union, SAMPLED)
    assert all(rank["attached"]["failures"] == {} for rank in ranks)


def test_two_ranks_report_what_one_process_does(ranks: list[Any], run: Any, tmp_path: Path) -> None:
    alone = run.run(tmp_path, attached=True, per_device=8)
    for step, logs in enumerate(train_logs(alone)):
        mine = {key: value for key, value in logs.items() if key.startswith("rl/")}
        assert any(key.endswith("post_tool/kl_k3") for key in mine)
        for rank in ranks:
            theirs = train_logs(rank["attached"])[step]
            assert {key for key in theirs if key.startswith("rl/")} == set(mine)
            for key, value in mine.items():
                exact = key.endswith(("/n_tokens", "/n_finite"))
                assert theirs[key] == (value if exact else pytest.approx(value, rel=1e-4, abs=1e-5)), key


def test_two_ranks_train_the_same_to_the_bit(ranks: list[Any]) -> None:
    for rank in ranks:
        with_it, without = rank["attached"], rank["plain"]
        assert all(torch.equal(value, without["weights"][name]) for name, value in with_it["weights"].items())
        assert [logs["loss"] for logs in train_logs(with_it)] == [logs["loss"] for logs in train_logs(without)]


def test_what_a_step_adds(ranks: list[Any]) -> None:
    """After the first: two collectives and one copy to the host; nothing per micro-batch."""
    for rank in ranks:
        with_it, without = rank["attached"]["per_log"], rank["plain"]["per_log"]
        assert len(with_it) == len(without) == 6
        for mine, theirs in zip(with_it[1:], without[1:], strict=True):
            assert mine["collectives"] - theirs["collectives"] == 2
            assert mine["to_host"] == 1
            assert theirs["collectives"] > 0
