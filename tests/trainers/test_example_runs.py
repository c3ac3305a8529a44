"""The examples run as they stand, at reduced size, and what they write is what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyrlstats.sinks import read_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_ppo_loop(tmp_path: Path) -> None:
    output = run(
        "ppo_loop.py",
        *("--out", str(tmp_path), "--updates", "8", "--boats", "16", "--steps", "32", "--epochs", "3", "--lr", "0.01"),
    )
    assert "after_gust" in output
    records: list[dict[str, Any]] = read_jsonl(tmp_path / "steps.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    for record in records:
        tokens = {name: record[f"ppo/{name}/n_tokens"] for name in ("before_gust", "after_gust")}
        assert sum(tokens.values()) == 16 * 32 * 3
        assert min(tokens.values()) > 0
        assert record["ppo/first_epoch/n_tokens"] == 16 * 32
        assert record["ppo/later_epochs/n_tokens"] == 16 * 32 * 2
        assert record["ppo/later_epochs/kl_k3"] > 0.0
        assert 0.0 < record["ppo/later_epochs/policy_clip_fraction"] < 1.0
    assert records[-1]["reward"] > records[0]["reward"]


def test_two_processes_are_one(tmp_path: Path) -> None:
    output = run("two_process.py", "--out", str(tmp_path), "--steps", "3", "--micro-batches", "2")
    assert "the same counts as of" in output
    records = read_jsonl(tmp_path / "steps.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record[f"rl/{name}/n_tokens"] > 0 for record in records for name in ("text", "pre_tool", "post_tool"))
