"""Two runs against each other, from their pooled states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.columns import Columns
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from pyrlstats.compare import compare
from pyrlstats.state import State
from pyrlstats.watch.pooling import Group, merge, pool
from pyrlstats.watch.runs import Run, RunError, States
from pyrlstats.watch.summary import FIGURES, cells_of, number, span


@dataclass(frozen=True)
class Compared:
    """Two runs, pooled.

    Attributes:
        run, baseline: pooled over the steps compared.
        names: slices that both have.
        only: slices that one of them has alone.
        figures: of :class:`pyrlstats.compare.Comparison`, by slice.
        titles: what the two are, in words.
    """

    run: Group
    baseline: Group
    names: tuple[str, ...]
    only: tuple[str, ...]
    figures: dict[str, dict[str, float]]
    titles: tuple[str, str]


def compared(run: Run, baseline: Run, last: int | None = None) -> Compared:
    """Two runs with states.

    Args:
        run, baseline: what is compared, and to what.
        last: the last so many steps of each; None takes all.

    Raises:
        RunError: one has no states, or no slice is in both.
        ValueError: other layouts.
    """
    first, second = _pooled(run, last), _pooled(baseline, last)
    names = tuple(name for name in first.stats if name in second.stats)
    only = tuple(sorted(set(first.stats) ^ set(second.stats)))
    if not names:
        raise RunError(f"the runs have no slice in common: {list(first.stats)} and {list(second.stats)}")
    figures = {}
    for name in names:
        flat = compare(first.stats[name], second.stats[name]).to_dict()
        figures[name] = {key.split("/", 1)[1]: value for key, value in flat.items()}
    titles = tuple(
        f"{each.path.name or each.path}, steps {group.first:,} to {group.last:,}"
        for each, group in ((run, first), (baseline, second))
    )
    return Compared(first, second, names, only, figures, (titles[0], titles[1]))


def _pooled(run: Run, last: int | None) -> Group:
    if run.states is None:
        raise RunError(f"{run.path} ({run.kind}, {span(run.steps)}) has no states to compare: scalars are not enough")
    groups = pool(_tail(run, last), 64).groups
    if not groups:
        raise RunError(f"{run.path} holds no step whose statistics can be read")
    return merge(groups)


def _tail(run: Run, last: int | None) -> Run:
    if last is None or last >= len(run.steps):
        return run
    assert run.states is not None
    start = len(run.steps) - last
    table = replace(run.table, steps=run.steps[start:], signals={}, present={})
    return replace(run, table=table, times=run.times[start:], states=_Shifted(run.states, start))


@dataclass(frozen=True)
class _Shifted:
    """The states of a run from one of its steps on."""

    states: States
    start: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.states.names

    def has(self, index: int) -> bool:
        return self.states.has(index + self.start)

    def read(self, indices: Sequence[int]) -> Iterator[State | None]:
        return self.states.read([index + self.start for index in indices])


def tables(found: Compared) -> Iterator[RenderableType]:
    """What differs, the effect first; then the figures of both."""
    yield f"[bold]{escape(found.titles[0])}[/] against [bold]{escape(found.titles[1])}[/]"
    if found.only:
        yield f"only in one of them: {escape(', '.join(found.only))}"
    effects = Table(
        box=box.SIMPLE_HEAD,
        title="how much they differ: quantiles of |x|, the tail, distances",
        title_justify="left",
        padding=(0, 1),
    )
    effects.add_column("slice", no_wrap=True)
    for title in ("p50", "p99", "p99.9", "tail ×", "95 %", "W1/IQR", "KS", "noise"):  # noqa: RUF001
        effects.add_column(title, justify="right", no_wrap=True)
    for name in found.names:
        figures = found.figures[name]
        shifts = [_shift(figures[f"abs_{level}_log_shift"]) for level in ("p50", "p99", "p99_9")]
        error = 1.96 * figures["tail_log_ratio_se"]
        low, high = (
            math.exp(figures["tail_log_ratio"] + sign * error) if math.isfinite(error) else math.nan for sign in (-1, 1)
        )
        effects.add_row(
            name,
            *shifts,
            number(figures["tail_ratio"], "{:.3g}"),
            f"{number(low, '{:.2g}')}..{number(high, '{:.2g}')}",
            number(figures["wasserstein1_over_iqr"], "{:.2g}"),
            number(figures["kolmogorov_smirnov"], "{:.2g}"),
            number(figures["ks_noise_floor"], "{:.2g}"),
        )
    yield effects
    yield "tail ×: how many times more tokens lie beyond the other run's p99.9;"  # noqa: RUF001
    yield "95 % and noise are those of independent tokens"
    one, two = (escape(title.split(",", 1)[0]) for title in found.titles)
    yield Columns([_side_by_side(found, name, one, two) for name in found.names], padding=(0, 1))


def _side_by_side(found: Compared, name: str, one: str, two: str) -> Table:
    """The figures of a slice in both runs."""
    table = Table(box=box.SIMPLE_HEAD, title=escape(name), title_justify="left", padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column(one, justify="right", overflow="ellipsis", max_width=16, no_wrap=True)
    table.add_column(two, justify="right", overflow="ellipsis", max_width=16, no_wrap=True, style="dim")
    for row in zip(FIGURES, cells_of(found.run, name), cells_of(found.baseline, name), strict=True):
        table.add_row(*row)
    return table


def _shift(value: float) -> str:
    if not math.isfinite(value):
        return "-" if value != value else "from 0" if value > 0 else "to 0"
    change = math.expm1(value)
    return f"{change:+.0%}" if change < 2.0 else f"×{change + 1.0:.2g}"  # noqa: RUF001
