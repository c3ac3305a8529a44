"""MLflow's file store, read back by its client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyrlstats import slice_stats
from pyrlstats.sinks import MLflowSink, Sinks

pytest.importorskip("mlflow")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str, Any]]:
    """Tracking URI, id of a run and a client of its own."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need sqlalchemy
    import mlflow

    uri = (tmp_path / "mlruns").as_uri()
    client = mlflow.MlflowClient(uri)
    run = client.create_run(client.create_experiment("test"))
    return uri, run.info.run_id, client


def test_metrics(store: Any, steps: Any, wanted: Callable[[str], Any]) -> None:
    uri, run_id, client = store
    with Sinks([MLflowSink(run_id, uri)]) as sinks:
        for step, stats in steps:
            sinks.write(step, stats, {"loss": 0.5})
    assert not any(sinks.failures.values())
    numbers = wanted("rl/")
    for key in [*numbers[1], "loss"]:
        got = {metric.step: metric.value for metric in client.get_metric_history(run_id, key)}
        np.testing.assert_equal(got, {step: float(numbers[step].get(key, 0.5)) for step, _ in steps})


def test_many_slices_and_names_that_mlflow_refuses(store: Any) -> None:
    uri, run_id, client = store
    names = [f"turn>{i}" for i in range(40)]  # 1,440 metrics, over the 1,000 of a request
    x = np.linspace(-1, 1, 40, dtype=np.float32)
    stats = slice_stats(x, np.zeros_like(x), slice_ids=np.arange(40), names=names)
    with Sinks([MLflowSink(run_id, uri)]) as sinks:
        sinks.write(1, stats)
    assert not any(sinks.failures.values())
    got = client.get_run(run_id).data.metrics
    np.testing.assert_equal(got, {key.replace(">", "_"): float(value) for key, value in stats.to_dict("rl/").items()})
    assert len(got) > 1000
    with pytest.raises(ValueError, match="same name"):
        MLflowSink(run_id, uri).write(2, {}, {"a>": 1.0, "a<": 2.0})


def test_steps_that_were_refused_are_counted(store: Any) -> None:
    uri, run_id, client = store
    sinks = Sinks([MLflowSink(run_id, uri)])
    stats = slice_stats(np.zeros(2, np.float32), np.zeros(2, np.float32))
    sinks.write(1, stats)
    sinks.close()
    client.delete_run(run_id)
    sinks.write(2, stats)
    sinks.close()
    assert sinks.failures["MLflowSink"] == 1
    client.restore_run(run_id)
    sinks.write(3, stats)
    sinks.close()
    assert sinks.failures["MLflowSink"] == 1
    assert [metric.step for metric in client.get_metric_history(run_id, "rl/all/n_tokens")] == [1, 3]


def test_a_server_that_hangs_does_not_hold_up_training(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, run_id, client = store
    sink = MLflowSink(run_id, uri)
    server, log_batch = threading.Event(), sink._client.log_batch

    def hanging(*args: Any, **kwargs: Any) -> None:
        assert server.wait(60)
        log_batch(*args, **kwargs)

    monkeypatch.setattr(sink._client, "log_batch", hanging)
    sinks = Sinks([sink])
    for step in range(103):
        sinks.write(step, {}, {"loss": step})
    assert sinks.failures["MLflowSink"] == 3
    server.set()
    sinks.close()
    sinks.write(103, {}, {"loss": 103})
    sinks.close()
    assert sinks.failures["MLflowSink"] == 3
    assert [metric.step for metric in client.get_metric_history(run_id, "loss")] == [*range(100), 103]


def test_there_must_be_a_run() -> None:
    with pytest.raises(RuntimeError, match=r"call mlflow\.start_run"):
        MLflowSink()
