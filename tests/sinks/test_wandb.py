"""An offline run, read back record by record."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyrlstats.sinks import Sinks, WandbSink

wandb = pytest.importorskip("wandb")

FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: wandb's messages in the log format of LevelDB, each part with its checksum."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert struct.unpack_from("<4sHB", data) == (b":W&B", 0xBEE1, 0)
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        checksum, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + size]
        assert zlib.crc32(bytes([kind]) + part) == checksum
        at += 7 + size
        whole += part
        if kind in (FULL, LAST):
            yield Record.FromString(whole)
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    wandb.run.finish()
    wandb.teardown()  # only then is the file complete
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *parents, key = item.nested_key or [item.key]
                place = row
                for parent in parents:
                    place = place.setdefault(parent, {})
                place[key] = json.loads(item.value_json)
            rows.append(row)
    return rows


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    settings = wandb.Settings(
        console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
    )
    run = wandb.init(project="test", dir=str(tmp_path), mode="offline", settings=settings)
    yield run
    run.finish()
    wandb.teardown()


def test_scalars_and_histograms(run: Any, tmp_path: Path, steps: Any, wanted: Callable[[str], Any]) -> None:
    with Sinks([WandbSink()]) as sinks:
        for step, stats in steps:
            run.log({"loss": 0.25}, step=step)  # the trainer's own row
            sinks.write(step, stats, {"reward": 1})
        sinks.write(3, steps[0][1])  # W&B would drop it
    assert sinks.failures == {"WandbSink": 1, "statistics": 0}
    rows = history(tmp_path)
    for row, (step, stats), numbers in zip(rows, steps, wanted("rl/").values(), strict=True):
        assert row["_step"] == step
        assert (row["loss"], row["reward"]) == (0.25, 1)
        np.testing.assert_equal({key: row[key] for key in numbers}, numbers)
        assert "rl/empty/log_ratio" not in row
        for name in ("all", "tail", "positive"):
            drawn = row[f"rl/{name}/log_ratio"]
            assert drawn["_type"] == "histogram"
            counts, edges = np.array(drawn["values"]), np.array(drawn["bins"])
            assert len(counts) <= 512
            assert len(edges) == len(counts) + 1
            view = stats[name]
            assert counts.sum() == view.n_finite
            below = np.cumsum(counts[:-1]) / view.n_finite
            np.testing.assert_allclose(below, view.cdf(edges[1:-1].tolist()), rtol=0, atol=1e-12)


def test_beside_a_trainer_with_a_counter_of_its_own(run: Any, tmp_path: Path, steps: Any) -> None:
    sinks = Sinks([WandbSink(run, step_key="train/global_step", histograms=False)])
    for step, stats in steps:
        run.log({"loss": 0.25, "train/global_step": step})
        sinks.write(step, stats)
    assert not any(sinks.failures.values())
    rows = [row for row in history(tmp_path) if "rl/all/kl_k3" in row]
    assert [row["train/global_step"] for row in rows] == [step for step, _ in steps]
    np.testing.assert_equal({key: rows[2][key] for key in rows[2] if key.startswith("rl/")}, steps[2][1].to_dict("rl/"))


def test_there_must_be_a_run() -> None:
    assert wandb.run is None
    with pytest.raises(RuntimeError, match=r"call wandb\.init"):
        WandbSink()
