"""A local trackio project, in a process of its own (it reads where to write when it is imported)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyrlstats.columnar import write_parquet

pytest.importorskip("trackio")

WRITE_AND_READ = """
import json, sys
import trackio
from pyrlstats.columnar import read_parquet
from pyrlstats.sinks import Sinks, TrackioSink

for run in ("given", "current"):
    made = trackio.init(project="test", name=run, auto_log_cpu=False, auto_log_gpu=False)
    sinks = Sinks([TrackioSink(made if run == "given" else None)])
    for step, stats in read_parquet(sys.argv[1]):
        sinks.write(step, stats, {"loss": 0.5})
    trackio.finish()
    assert not any(sinks.failures.values()), sinks.failures
sinks.write(9, stats)
assert sinks.failures == {"TrackioSink": 1, "statistics": 0}, sinks.failures
logs = {run: trackio.SQLiteStorage.get_logs("test", run) for run in ("given", "current")}
print(json.dumps(logs))
"""


def test_scalars_and_histograms(tmp_path: Path, steps: Any, wanted: Callable[[str], Any]) -> None:
    write_parquet(tmp_path / "steps.parquet", steps)
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", WRITE_AND_READ, str(tmp_path / "steps.parquet")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    logs = json.loads(done.stdout.splitlines()[-1])
    for run in ("given", "current"):
        for row, (step, stats), numbers in zip(logs[run], steps, wanted("rl/").values(), strict=True):
            assert row["step"] == step
            assert row["loss"] == 0.5
            np.testing.assert_equal({key: row[key] for key in numbers}, numbers)
            assert "rl/empty/log_ratio" not in row
            for name in ("all", "tail", "positive"):
                drawn = row[f"rl/{name}/log_ratio"]
                assert drawn["_type"] == "trackio.histogram"
                assert sum(drawn["values"]) == stats[name].n_finite
                below = np.cumsum(drawn["values"][:-1]) / float(stats[name].n_finite)
                np.testing.assert_allclose(below, stats[name].cdf(drawn["bins"][1:-1]), rtol=0, atol=1e-12)
