"""The code of the page runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyrlstats.sinks import read_jsonl

for needed in ("transformers", "accelerate", "lightning", "tensorboard"):
    pytest.importorskip(needed)

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    found: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "callbacks.md", "exec"), found)
        assert not any(found["callback"].failures.values())
    for name in ("steps.jsonl", "lightning.jsonl"):
        records = read_jsonl(tmp_path / "logs" / name)
        assert [record["step"] for record in records] == [2, 4, 6]
        assert all(record["rl/post_tool/n_tokens"] > 0 for record in records)
