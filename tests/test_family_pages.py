"""The code of the pages on slices, values and comparisons, and of the README, runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["slices.md", "values.md", "compare.md", "optional.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.S)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {})


def test_the_one_call_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGES.parent / "README.md").read_text()
    block = re.search(r"One call, one result:\n\n```python\n(.*?)```", text, re.S)
    assert block
    found: dict[str, Any] = {}
    exec(compile(block.group(1), "README.md", "exec"), found)
    assert "late" in capsys.readouterr().out
    assert float(found["lo"]) <= float(found["hi"])
    assert int(found["counts"].sum()) == int(found["late"].n_finite)
