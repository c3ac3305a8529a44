"""The code of the pages on slices, values and comparisons runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["slices.md", "values.md", "compare.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.S)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {})
