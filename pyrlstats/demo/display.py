"""The terminal: a progress bar and a live table, or plain lines where nobody watches."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pyrlstats.demo.training import Score, Step
from pyrlstats.demo.windows import Window
from pyrlstats.intervals import abs_quantile_interval
from pyrlstats.slice_stats import SliceStats

EVERY = 5  # steps between two tables

Cells = list[str]
FEW = "~: fewer than 10 tokens lie beyond, so that it is hardly more than the largest one"
COLUMNS = ("slice", "tokens", "ESS", "p99.9 |x|", "clipped", "KL k3")


def cells(stats: SliceStats) -> list[Cells]:
    """One row a slice, as :data:`COLUMNS`; ``~`` before a quantile that few tokens lie beyond."""
    values = stats.to_dict()
    few = few_beyond(stats, 0.999)
    rows = []
    for name in stats:
        row = [name, f"{values[f'{name}/n_tokens']:,}"]
        for key, form in (
            ("ess_fraction", "{:.2%}"),
            ("abs_log_ratio_p99_9", "~{:.3f}" if few[name] else "{:.3f}"),
            ("clip_fraction", "{:.2%}"),
            ("kl_k3", "{:.2e}"),
        ):
            value = values[f"{name}/{key}"]
            row.append("-" if math.isnan(value) else percent(value) if form == "{:.2%}" else form.format(value))
        rows.append(row)
    return rows


def percent(share: float) -> str:
    """Two decimals; what is not quite all is not called all."""
    text = f"{share:.2%}"
    return ">99.99%" if text == "100.00%" and share < 1.0 else text


def few_beyond(stats: SliceStats, q: float) -> dict[str, bool]:
    """Of which slices fewer than ten tokens lie beyond a quantile of abs(x)."""
    return {name: not bool(abs_quantile_interval(stats[name], q).reliable) for name in stats}


class Display(Protocol):
    """What the run tells its watcher."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, line: str) -> None:
        """A line that stays."""

    def begin(self, what: str, total: int) -> None:
        """A new phase of so many updates."""

    def advance(self) -> None:
        """One update of the phase is done."""

    def step(self, step: Step) -> None:
        """One training step is done."""


def describe(score: Score) -> str:
    """``reward 0.912, solved 88.3%``."""
    return f"reward {score.reward:.3f}, solved {score.solved:.1%}"


def tail_line(window: Window) -> str:
    """``steps 49 to 60, p99.9 of |log-ratio| in nats: text 0.031, ...``."""
    values = window.stats.to_dict()
    filled = [name for name in window.stats if values[f"{name}/n_finite"]]
    few = few_beyond(window.stats, 0.999)
    tails = ", ".join(
        f"{name} {'~' if few[name] else ''}{values[f'{name}/abs_log_ratio_p99_9']:.3g}" for name in filled
    )
    return f"{window.name}, p99.9 of |log-ratio| in nats: {tails}"


class PlainDisplay:
    """Lines only: for files, pipes and logs."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def begin(self, what: str, total: int) -> None:
        self.say(f"{what}: {total} updates")

    def advance(self) -> None:
        pass

    def step(self, step: Step) -> None:
        if step.number != 1 and step.number % EVERY and step.number != self._total:
            return
        rows = [list(COLUMNS), *cells(step.stats)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        self.say(f"step {step.number}/{self._total}: {describe(step.score)}")
        for name, *numbers in rows:
            aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
            self.say("  ".join(["", name.ljust(widths[0]), *aligned]))


class LiveDisplay:
    """A progress bar under a table that follows the run."""

    def __init__(self, console: Console, total: int) -> None:
        self._total = total
        self._table: Table | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._live = Live(self._progress, console=console, refresh_per_second=8)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(line, highlight=False, markup=False)

    def begin(self, what: str, total: int) -> None:
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def step(self, step: Step) -> None:
        self._progress.update(self._task, advance=1, description=f"training, {describe(step.score)}")
        if step.number == 1 or step.number % EVERY == 0 or step.number == self._total:
            self._table = _table(step)
        self._live.update(Group(*filter(None, (self._table,)), self._progress))


def _table(step: Step) -> Table:
    table = Table(
        title=f"step {step.number}: {describe(step.score)}",
        caption=f"x: log-ratio, learner - sampler, nats; all updates of the step. {FEW}",
        title_justify="left",
        caption_justify="left",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "slice" else "right", no_wrap=True)
    for row in cells(step.stats):
        table.add_row(*row)
    return table


def choose_display(total: int) -> Display:
    """Live in a terminal, plain elsewhere."""
    console = Console()
    return LiveDisplay(console, total) if console.is_terminal else PlainDisplay(console, total)
