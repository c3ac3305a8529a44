"""The code of the page runs as it stands; its sink of one's own does what it says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyrlstats import slice_stats
from pyrlstats.columnar import read_parquet
from pyrlstats.sinks import Sinks, read_jsonl

for needed in ("tensorboard", "wandb", "mlflow", "trackio", "prometheus_client", "opentelemetry"):
    pytest.importorskip(needed)

PAGE = Path(__file__).parents[2] / "docs" / "sinks.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_code_runs(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = "\n".join(BLOCKS).replace("9464", port)
    code += "\nassert not any(sinks.failures.values()), sinks.failures\n"
    folders = ("TRACKIO_DIR", "HF_HOME", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
    environment = os.environ | {name: str(tmp_path / name) for name in folders}
    environment |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri()}
    Path(environment["WANDB_DIR"]).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "failed; training goes on" not in done.stderr
    assert [record["step"] for record in read_jsonl(tmp_path / "logs" / "steps.jsonl")] == [1, 2, 3, 4, 5]
    assert [step for step, _ in read_parquet(tmp_path / "logs" / "parquet" / "rl")] == [1, 2, 3]


def test_a_sink_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = (block for block in BLOCKS if "class Alarm" in block)
    assert len(snippet.strip().splitlines()) <= 6  # five lines after its name
    found: dict[str, Any] = {}
    exec(snippet, found)
    x = np.zeros(200, np.float32)
    quiet = slice_stats(x, x, {"post_tool": np.ones(200, bool)})
    loud = slice_stats(x + 1, x, {"post_tool": np.ones(200, bool)})
    with Sinks([found["Alarm"]()]) as sinks:
        sinks.write(1, quiet)
        sinks.write(2, loud)
    assert capsys.readouterr().out == "step 2: a tail, of 200 tokens\n"
    assert not any(sinks.failures.values())
