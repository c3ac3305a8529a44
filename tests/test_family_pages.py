"""The code of the pages on slices, values and comparisons, and of the README, runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyrlstats.results import Statistic
from pyrlstats.slice_stats import SliceView

PAGES = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["slices.md", "values.md", "compare.md", "optional.md", "exact.md", "tails.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.S)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {})


def named(name: str, page: str) -> bool:
    """Whether a page has the name, or the row of a name that it is a variant of: `x_mean`, `_std`."""
    if f"`{name}`" in page:
        return True
    parts = name.split("_")
    return any(
        re.search(rf"`{'_'.join(parts[:cut])}(_[a-z]+)?(_\\*)?`.*`_{'_'.join(parts[cut:])}`", page)
        or f"`{'_'.join(parts[:cut])}_*`" in page
        for cut in range(1, len(parts))
    )


def test_every_statistic_is_on_a_page() -> None:
    pages = {"core": PAGES.parent / "README.md", "optional": PAGES / "optional.md"}
    texts = {name: path.read_text() for name, path in pages.items()}
    statistics = {name: value for name, value in vars(SliceView).items() if isinstance(value, Statistic)}
    assert len(statistics) > 80
    missing = [
        name
        for name, statistic in statistics.items()
        if not named(name, texts["core" if statistic.group is None else "optional"])
    ]
    assert not missing
    assert not named("log_ratio_median", texts["core"])


def test_the_first_code_of_the_readme_runs() -> None:
    block = re.search(r"```python\n(.*?)```", (PAGES.parent / "README.md").read_text(), re.S)
    assert block
    found: dict[str, Any] = {}
    exec(compile(block.group(1), "README.md", "exec"), found)
    assert 0.9 < float(found["stats"]["post_tool"].ess_fraction) <= 1.0


def test_the_one_call_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGES.parent / "README.md").read_text()
    block = re.search(r"One call, one result:\n\n```python\n(.*?)```", text, re.S)
    assert block
    found: dict[str, Any] = {}
    exec(compile(block.group(1), "README.md", "exec"), found)
    assert "late" in capsys.readouterr().out
    assert float(found["lo"]) <= float(found["hi"])
    assert int(found["counts"].sum()) == int(found["late"].n_finite)
