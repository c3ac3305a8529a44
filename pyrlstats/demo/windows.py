"""The first and the last part of a run, each pooled exactly from the statistics of its steps."""

from __future__ import annotations

from typing import NamedTuple

from pyrlstats.demo.training import Step
from pyrlstats.slice_stats import SliceStats


class Window(NamedTuple):
    """Some consecutive steps: a name such as ``steps 1 to 12``, and the statistics of all their tokens."""

    name: str
    stats: SliceStats


def first_and_last(steps: list[Step]) -> tuple[Window, Window]:
    """The first and the last fifth of the steps, at least one each."""
    size = max(1, len(steps) // 5)
    return _pool(steps[:size]), _pool(steps[-size:])


def _pool(steps: list[Step]) -> Window:
    first, last = steps[0].number, steps[-1].number
    name = f"step {first}" if first == last else f"steps {first} to {last}"
    start, *rest = (step.stats for step in steps)
    return Window(name, sum(rest, start))  # states merge: as if the tokens had come in one call
