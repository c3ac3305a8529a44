"""The guard around sinks: one copy to the host, nothing raised, everything that failed counted and said once."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pyrlstats import sinks as package
from pyrlstats import slice_stats
from pyrlstats.monitor import Monitor, RunReader
from pyrlstats.sinks import JsonlSink, Sinks, read_jsonl
from pyrlstats.state import State
from pyrlstats.values import value_stats


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.closed = 0

    def write(self, step: int, stats: Any, scalars: Any) -> None:
        self.written.append((step, stats, dict(scalars)))

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def write(self, step: int, stats: Any, scalars: Any) -> None:
        if step % 2:
            raise OSError(f"disk full at {step}")
        super().write(step, stats, scalars)

    def close(self) -> None:
        raise RuntimeError("cannot close")


def test_every_sink_gets_the_same_host_statistics_and_scalars() -> None:
    x = torch.randn(100)
    stats = slice_stats(x, torch.zeros(100))
    one, other = Kept(), Kept()
    with Sinks([one, other], prefix="step/") as sinks:
        sinks.write(3, stats, {"loss": torch.tensor(0.5, requires_grad=True), "n": np.int64(4)})
    (step, given, scalars), (_, given_too, scalars_too) = one.written[0], other.written[0]
    assert step == 3
    assert isinstance(given["step/"].state.buffer, np.ndarray)
    assert given["step/"] is given_too["step/"]
    assert scalars == scalars_too == stats.to_dict("step/") | {"loss": 0.5, "n": 4.0}
    assert one.closed == other.closed == 1
    assert sinks.failures == {"Kept": 0, "Kept 2": 0, "statistics": 0}


def test_several_statistics_at_one_step() -> None:
    x = torch.randn(50)
    policy, entropy = slice_stats(x, torch.zeros(50)), value_stats(x.abs())
    kept = Kept()
    Sinks([kept]).write(1, {"rl/": policy, "entropy/": entropy})
    _, given, scalars = kept.written[0]
    assert list(given) == ["rl/", "entropy/"]
    assert scalars == policy.to_dict("rl/") | entropy.to_dict("entropy/")


@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_one_copy_to_the_host_whatever_the_number_of_sinks(monkeypatch: pytest.MonkeyPatch, sinks: int) -> None:
    copies = []
    to_host = State.to_host

    def counted(state: State) -> State:
        if not isinstance(state.buffer, np.ndarray):
            copies.append(state)
        return to_host(state)

    monkeypatch.setattr(State, "to_host", counted)
    Sinks([Kept() for _ in range(sinks)]).write(1, slice_stats(torch.randn(9), torch.zeros(9)), {"loss": 1.0})
    assert len(copies) == min(sinks, 1)


def test_what_fails_is_counted_said_once_and_keeps_nothing_else_out(caplog: pytest.LogCaptureFixture) -> None:
    stats = slice_stats(np.zeros(4, np.float32), np.zeros(4, np.float32))
    broken, kept = Broken(), Kept()
    sinks = Sinks([broken, kept])
    with caplog.at_level(logging.WARNING, "pyrlstats"):
        for step in range(1, 6):
            sinks.write(step, stats)
    assert [step for step, *_ in broken.written] == [2, 4]
    assert [step for step, *_ in kept.written] == [1, 2, 3, 4, 5]
    assert sinks.failures == {"Broken": 3, "Kept": 0, "statistics": 0}
    (said,) = caplog.records
    assert "Broken failed" in said.getMessage()
    assert said.exc_info is not None
    assert str(said.exc_info[1]) == "disk full at 1"
    caplog.clear()
    sinks.close()
    assert caplog.records[-1].getMessage() == "of 5 steps, calls that failed: {'Broken': 4}"
    assert kept.closed == 1


def test_nonsense_is_counted_too() -> None:
    kept = Kept()
    sinks = Sinks([kept])
    stats = slice_stats(np.zeros(4, np.float32), np.zeros(4, np.float32))
    sinks.write(1, None)  # type: ignore[arg-type]
    sinks.write(2, {"a/": "no statistics", "b/": stats}, {"loss": "high", "reward": 1})  # type: ignore[dict-item]
    assert sinks.failures == {"Kept": 0, "statistics": 3}
    assert kept.written[0] == (1, {}, {})
    assert kept.written[1][2] == {"reward": 1} | stats.to_dict("b/")


def test_sinks_nest_and_are_empty_without_one() -> None:
    kept = Kept()
    nested = Sinks([Sinks([kept])])
    stats = slice_stats(np.zeros(4, np.float32), np.zeros(4, np.float32))
    nested.write(1, stats)
    assert kept.written[0][2] == stats.to_dict("rl/")
    assert len(Sinks()) == 0
    Sinks().write(1, stats)


@pytest.mark.parametrize(("rank", "made"), [("0", 1), ("3", 0), (None, 1)])
def test_only_the_main_rank_makes_sinks(monkeypatch: pytest.MonkeyPatch, rank: str | None, made: int) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    calls: list[int] = []

    def make() -> list[Kept]:
        calls.append(1)
        return [Kept()]

    assert len(Sinks.on_main_rank(make)) == made == len(calls)


@pytest.mark.parametrize("main", [True, False])
def test_the_rank_of_the_process_group_counts_first(monkeypatch: pytest.MonkeyPatch, main: bool) -> None:
    monkeypatch.setenv("RANK", "1" if main else "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0 if main else 1)
    assert len(Sinks.on_main_rank(lambda: [Kept()])) == main


def test_jsonl(tmp_path: Any, steps: Any, wanted: Callable[[str], Any]) -> None:
    path = tmp_path / "run" / "steps.jsonl"
    sinks = Sinks([JsonlSink(path)])
    for step, stats in steps:
        sinks.write(step, stats, {"loss": 0.5})
    assert not any(sinks.failures.values())
    records = read_jsonl(path)
    for record, (step, numbers) in zip(records, wanted("rl/").items(), strict=True):
        assert record["time"] > 1.7e9
        np.testing.assert_equal(record, {"step": step, "time": record["time"], "loss": 0.5} | numbers)
    text = path.read_text()
    assert "NaN" not in text
    assert '"rl/all/kl_k3":"inf"' in text
    assert '"rl/empty/kl_k3":null' in text
    assert '"rl/all/n_tokens":5000,' in text


def test_a_torn_line_is_passed_over_and_cut_off(tmp_path: Any, steps: Any) -> None:
    path = tmp_path / "steps.jsonl"
    step, stats = steps[0]
    Sinks([JsonlSink(path)]).write(step, stats)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:1000])
    assert len(read_jsonl(path)) == 1
    Sinks([JsonlSink(path)]).write(7, stats)
    assert [record["step"] for record in read_jsonl(path)] == [1, 7]
    path.write_bytes(b"x" * 200_000)
    JsonlSink(path)
    assert path.read_bytes() == b""
    path.write_text("{}\n[1]\n")
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)


def test_jsonl_leaves_a_monitors_files_alone(tmp_path: Any) -> None:
    with Monitor(tmp_path / "run") as monitor:
        monitor.observe(1, None, {"loss": 1.0})
    before = (tmp_path / "run" / "steps.jsonl").read_bytes()
    for name in ("steps.jsonl", "alerts.jsonl"):
        with pytest.raises(ValueError, match="of a Monitor: use another name or folder"):
            JsonlSink(tmp_path / "run" / name)
    JsonlSink(tmp_path / "run" / "mine.jsonl").write(1, {}, {"loss": 1.0})
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == before


def test_jsonl_gives_way_to_a_monitor_that_comes_later(tmp_path: Any) -> None:
    sink = JsonlSink(tmp_path / "steps.jsonl")
    with Monitor(tmp_path) as monitor:
        with pytest.raises(ValueError, match="of a Monitor"):
            sink.write(1, {}, {"loss": 1.0})
        monitor.observe(1, None, {"loss": 1.0})
    assert not monitor.lost
    assert [record.step for record in RunReader(tmp_path).steps] == [1]


def test_a_monitor_leaves_the_lines_of_a_sink_alone(tmp_path: Any) -> None:
    JsonlSink(tmp_path / "steps.jsonl").write(1, {}, {"loss": 1.0})
    before = (tmp_path / "steps.jsonl").read_bytes()
    with Monitor(tmp_path) as monitor:
        monitor.observe(1, None, {"loss": 1.0})
    assert monitor.lost == {"run folder": 1, "steps": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["steps.jsonl"]
    assert (tmp_path / "steps.jsonl").read_bytes() == before


def test_jsonl_keeps_its_own_keys(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="'step'"):
        JsonlSink(tmp_path / "a.jsonl").write(1, {}, {"step": 3.0})
    assert read_jsonl(tmp_path / "a.jsonl") == []


CLIENTS = {
    "TensorBoardSink": ("torch.utils.tensorboard", "tensorboard", ("folder",)),
    "WandbSink": ("wandb", "wandb", ()),
    "MLflowSink": ("mlflow", "mlflow", ()),
    "TrackioSink": ("trackio", "trackio", ()),
    "PrometheusSink": ("prometheus_client", "prometheus", ("run",)),
    "OpenTelemetrySink": ("opentelemetry.metrics", "opentelemetry", ("run",)),
    "ParquetSink": ("pyarrow.parquet", "parquet", ("folder",)),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_missing_client_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, extra, arguments = CLIENTS[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module}: pip install 'pyrlstats\[{extra}\]'"):
        getattr(package, name)(*arguments)


def test_importing_the_package_imports_no_client() -> None:
    clients = [module.partition(".")[0] for module, *_ in CLIENTS.values() if module != "torch.utils.tensorboard"]
    code = f"import sys, pyrlstats.sinks; print([c for c in {[*clients, 'torch']} if c in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
