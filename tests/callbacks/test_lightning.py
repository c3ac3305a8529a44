"""A real Lightning run of a tiny policy, alone and in two processes."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrlstats.sinks import JsonlSink, read_jsonl

pytest.importorskip("lightning")
from pyrlstats.integrations.lightning import SliceCallback

sys.path.insert(0, str(Path(__file__).parent))
policy: Any = importlib.import_module("lightning_policy")
training, NAMES = policy.training, policy.NAMES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of its use of torch's pytree
]


@pytest.mark.parametrize("library", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_report_holds_the_micro_batches_since_the_last(
    tmp_path: Path, accumulation: int, library: str, assert_recomputed: Callable[..., None]
) -> None:
    pl = pytest.importorskip(library)
    logger = importlib.import_module(f"{library}.loggers").CSVLogger(tmp_path, name="run", version="")
    callback = SliceCallback(NAMES, sinks=lambda: [JsonlSink(tmp_path / "steps.jsonl")])
    trainer, module = training(tmp_path, callback, accumulation, library=pl, logger=logger)
    trainer.fit(module)
    seen = module.seen
    assert len(seen) == 5 * accumulation
    windows = {2: seen[: 2 * accumulation], 4: seen[2 * accumulation : 4 * accumulation], 5: seen[4 * accumulation :]}

    written = read_jsonl(tmp_path / "steps.jsonl")
    assert [record["step"] for record in written] == [2, 4, 5]
    for record in written:
        assert_recomputed(record, windows[record["step"]])
        assert len([key for key in record if key.startswith("rl/post_tool/")]) == 36
        assert record["policy_loss"] == module.losses[record["step"] * accumulation - 1]

    logged = {}
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["rl/text/kl_k3"]:
                logged[int(row["step"])] = {key: float(value) for key, value in row.items() if value}
    assert list(logged) == [2, 4, 5]
    for step, record in logged.items():
        assert_recomputed(record, windows[step])

    metrics = {key: value for key, value in trainer.callback_metrics.items() if key.startswith("rl/")}
    assert len(metrics) == 2 * 11 + 2
    assert {key: float(torch.tensor(logged[4][key])) for key in metrics} == {k: float(v) for k, v in metrics.items()}
    assert not any(callback.failures.values())


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    callback = SliceCallback(NAMES)
    weights = []
    for watched in (True, False):
        trainer, module = training(tmp_path, callback if watched else None, 2)
        trainer.fit(module)
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*weights, strict=True))


def test_training_can_be_stopped_by_a_tail(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class Stop(pl.Callback):
        """What EarlyStopping does with ``trainer.callback_metrics``."""

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if trainer.callback_metrics.get("rl/text/abs_log_ratio_p99", 0.0) > 0.0:
                trainer.should_stop = True

    callback = SliceCallback(NAMES, every_n_steps=3)
    trainer, module = training(tmp_path, callback, 1, callbacks=[Stop()], log_every_n_steps=1, min_epochs=0)
    trainer.fit(module)
    assert trainer.global_step == 3


def test_nothing_raises_into_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, step: int, stats: Any, scalars: Any) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("disk full")

    callback = SliceCallback(["text", "other"], sinks=[Full()])  # the module gives other slices
    trainer, module = training(tmp_path, callback, 1)
    trainer.fit(module)
    assert trainer.global_step == 5
    assert callback.failures["counting log-ratios"] == 5
    assert callback.failures["Full"] == 4
    said = [record.getMessage().partition(" failed;")[0] for record in caplog.records if record.exc_info]
    assert said == ["counting log-ratios", "Full"]
    assert trainer.callback_metrics["rl/n_failed_updates"] == 4


def test_two_processes_report_the_union(two_processes: Any, assert_recomputed: Callable[..., None]) -> None:
    folder, seen = two_processes("lightning")
    written = read_jsonl(folder / "0.jsonl")
    assert [record["step"] for record in written] == [2, 4, 5]
    for record, part in zip(written, (slice(0, 4), slice(4, 8), slice(8, 10)), strict=True):
        assert_recomputed(record, [*seen[0]["batches"][part], *seen[1]["batches"][part]])
    mine, theirs = ({k: v for k, v in rank["metrics"].items() if k.startswith("rl/")} for rank in seen)
    assert mine == theirs
    assert not (folder / "1.jsonl").exists()


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="every_n_steps"):
        SliceCallback(NAMES, every_n_steps=0)
    with pytest.raises(ValueError, match="in_logs"):
        SliceCallback(NAMES, in_logs=["kl_k4"])
    with pytest.raises(ValueError, match="given twice"):
        SliceCallback(["a", "a"])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "pyrlstats.integrations.lightning")
    with pytest.raises(ImportError, match=r"pip install 'pyrlstats\[lightning\]'"):
        importlib.import_module("pyrlstats.integrations.lightning")
