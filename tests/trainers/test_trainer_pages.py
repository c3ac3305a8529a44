"""The code of the pages on trainers runs as it stands; what needs a trainer's cluster is marked as not to be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["trainers.md", *sorted(str(page.relative_to(DOCS)) for page in (DOCS / "trainers").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str) -> None:
    if "stable-baselines3" in page:
        pytest.importorskip("stable_baselines3")
    text = (DOCS / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})
    for block in re.findall(r"```py\n(.*?)```", text, re.S):
        compile(block, page, "exec")


def test_every_trainer_has_a_page_and_a_row() -> None:
    index = (DOCS / "trainers.md").read_text()
    assert len(PAGES) == 8
    for page in PAGES[1:]:
        assert f"]({page})" in index
        assert "## Traps" in (DOCS / page).read_text()
