"""The terminal view of a run: one frame, for any width, drawn again while the run goes on."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pyrlstats.monitor.alerts import LEVELS, Alert
from pyrlstats.watch.live import View
from pyrlstats.watch.summary import counted, number, pareto_k, shortened

Floats = NDArray[np.float64]

STYLES = {"info": "bold blue", "warning": "bold yellow", "stop": "bold white on red"}
_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 120  # columns from which scalars stand beside the alerts
_SILENT = 10.0  # steps' time after which a run is said to be silent


class Frame:
    """One frame of a view; rich asks it to draw itself in the width there is."""

    def __init__(self, view: View, now: float | None = None, height: int | None = None) -> None:
        self._view = view
        self._now = time.time() if now is None else now
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        view = self._view
        yield _head(view, self._now)
        if not len(view.run.steps):
            yield Text("\nno steps yet", style="dim")
            return
        if view.last is not None:
            yield _slices(view, width)
        wide = width >= _WIDE
        scalars, told, brief = self._room(wide)
        alerts = _alerts(view, told, brief)
        if not view.scalars:
            yield alerts
        elif wide:
            pair = Table.grid(expand=True, padding=(0, 1))
            pair.add_column(ratio=4)
            pair.add_column(ratio=6)
            pair.add_row(_scalars(view, int(width * 0.4) - 3, scalars), alerts)
            yield pair
        else:
            yield _scalars(view, width - 2, scalars)
            yield alerts
        if view.notices:
            yield Text(
                "; ".join(map(shortened, view.notices)),
                style="dim",
                no_wrap=self._height is not None,
                overflow="ellipsis",
            )

    def _room(self, wide: bool) -> tuple[int, int, bool]:
        """How many scalars and alerts fit, and whether an alert has one line only."""
        if self._height is None:
            return len(self._view.scalars), 8, False
        view = self._view
        table = len(view.slices) + 2 + (view.hidden > 0) if view.last is not None else 0
        rows = self._height - 3 - table - bool(view.notices)
        if wide:
            return max(1, rows - 3), max(1, rows - 2 if rows < 24 else rows // 3), rows < 24
        scalars = min(len(view.scalars), max(1, rows // 2 - 2))
        left = rows - scalars - 2
        return scalars, max(1, left - 2 if left < 24 else left // 4), left < 24

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(40, options.max_width)


def _head(view: View, now: float) -> RenderableType:
    run = view.run
    left = Text.assemble((run.path.name or str(run.path), "bold"), ("  " + run.kind, "dim"))
    parts: list[tuple[str, str]] = []
    if len(run.steps):
        parts.append((f"step {run.steps[-1]:,}", "bold"))
        parts.append((f"  {len(run.steps):,} recorded", ""))
    known = run.times[np.isfinite(run.times)]
    if len(known):
        pace = float(np.median(np.diff(known[-50:]))) if len(known) > 1 else math.nan
        if pace > 0.0:
            parts.append((f"  {number(pace, '{:.3g}')} s/step", ""))
        silent = now - float(known[-1])
        late = pace > 0.0 and silent > max(60.0, _SILENT * pace)
        parts.append((f"  last {ago(silent)} ago", "yellow" if late else "dim"))
    if run.damaged:
        parts.append((f"  {run.damaged} lines unreadable", "yellow"))
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    worst = max((alert.level for alert in view.alerts), key=LEVELS.index, default=None)
    state = (f" {counted(view.alerts)} ", STYLES[worst]) if worst else (" quiet ", "bold green")
    grid.add_row(left, Text.assemble(state))
    return Group(grid, Text.assemble(*parts)) if parts else grid


def ago(seconds: float) -> str:
    """A time in words, to one unit."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# title, key, format; in the order in which they find room, and that in which they stand
_COLUMNS = (
    ("tokens", "n_tokens", "short"),
    ("p99.9", "abs_log_ratio_p99_9", "{:.3g}"),
    ("ESS", "ess_fraction", "{:.2%}"),
    ("KL k3", "kl_k3", "{:.1e}"),
    ("clip", "clip_fraction", "{:.2%}"),
    ("p99", "abs_log_ratio_p99", "{:.3g}"),
    ("|x| p50", "abs_log_ratio_p50", "{:.3g}"),
    ("p99.99", "abs_log_ratio_p99_99", "{:.3g}"),
    ("x = 0", "zero_fraction", "{:.1%}"),
    ("max w", "ratio_max", "{:.3g}"),
)
_ORDER = ("tokens", "x = 0", "ESS", "KL k3", "|x| p50", "p99", "p99.9", "p99.99", "k", "clip", "max w")
_GAP = 3  # between two columns
_SPARKS = (24, 10)  # widths of the small picture


def _slices(view: View, width: int) -> RenderableType:
    assert view.last is not None
    values = view.last.to_dict()
    far = {name: known for name in view.slices if (known := pareto_k(view.run, name)) is not None}
    shown_columns = [*_COLUMNS[:4], ("k", "pareto_k", "{:.2f}"), *_COLUMNS[4:]] if far else list(_COLUMNS)
    values.update({f"{name}/pareto_k": float(far[name][-1]) if name in far else math.nan for name in view.slices})
    columns = {
        title: [short(value) if form == "short" else number(value, form) for value in _of(view, values, key)]
        for title, key, form in shown_columns
    }
    growth = [_growth(view.tails[name]) for name in view.slices]
    widest = max(len(name) for name in view.slices)
    name_width = min(widest, 24 if width >= 100 else 14)
    left = width - (name_width + _GAP) - (max(len("× early"), *map(len, growth)) + _GAP) - (_SPARKS[1] + _GAP)  # noqa: RUF001
    fitting = []
    for title in columns:
        needs = max(len(title), *map(len, columns[title])) + _GAP
        if needs > left:
            break
        left -= needs
        fitting.append(title)
    spark = _SPARKS[0] if left >= _SPARKS[0] - _SPARKS[1] else _SPARKS[1]
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_edge=False)
    table.add_column("slice", no_wrap=True, overflow="ellipsis", max_width=name_width)
    shown = [title for title in _ORDER if title in fitting]
    for title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("× early", justify="right", no_wrap=True)  # noqa: RUF001
    table.add_column("p99.9 trend" if spark > _SPARKS[1] else "over steps", no_wrap=True, width=spark)
    for row, name in enumerate(view.slices):
        line = Text(sparkline(view.tails[name], spark, log=True), style="cyan")
        table.add_row(name, *(columns[title][row] for title in shown), growth[row], line)
    if view.hidden:
        table.add_row(Text(f"and {view.hidden} more", style="dim"))
    return table


def _of(view: View, values: Mapping[str, float], key: str) -> list[float]:
    return [values[f"{name}/{key}"] for name in view.slices]


def short(value: float) -> str:
    """A count in at most five letters."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (size if letter != 'k' else 1e3):.3g}{letter}"
    return f"{value:,.0f}"


def _growth(history: Floats) -> Text:
    """How many times its early value the tail is."""
    known = history[np.isfinite(history) & (history > 0.0)]
    if len(known) < 4:
        return Text("-", style="dim")
    few = max(1, len(known) // 10)
    ratio = float(np.median(known[-few:]) / np.median(known[:few]))
    style = "bold red" if ratio >= 3.0 else "yellow" if ratio >= 1.5 else "dim"
    return Text(f"×{ratio:.2f}" if ratio >= 0.1 else f"×{ratio:.1g}", style=style)  # noqa: RUF001


def _scalars(view: View, width: int, most: int) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_edge=False)
    spark = max(8, min(40, width - 46))
    table.add_column("scalar", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("now", justify="right", no_wrap=True)
    table.add_column("from .. to", justify="right", no_wrap=True)
    table.add_column("over steps", no_wrap=True, width=spark)
    for key in view.scalars[:most]:
        values = view.run.table.signals[key]
        known = values[np.isfinite(values)]
        last = values[values == values][-1:]
        now = f"{last[0]:.4g}" if len(last) else "nan"
        style = "" if len(last) and math.isfinite(last[0]) else "bold red"
        between = f"{known.min():.3g} .. {known.max():.3g}" if len(known) else "-"
        table.add_row(
            key, Text(now, style=style), Text(between, style="dim"), Text(sparkline(known, spark), style="cyan")
        )
    return table


def _alerts(view: View, most: int, brief: bool) -> RenderableType:
    if not view.alerts:
        return Panel(Text("none", style="dim"), title="alerts", title_align="left", box=box.ROUNDED, border_style="dim")
    grid = Table.grid(padding=(0, 1), expand=True)
    shown = view.alerts[-most:]
    grid.add_column(justify="right", no_wrap=True, style="dim")
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, no_wrap=brief, overflow="ellipsis" if brief else "fold")
    for alert in reversed(shown):
        grid.add_row(f"{alert.step:,}", Text(alert.level, style=STYLES[alert.level]), _told(alert))
    more = len(view.alerts) - most
    title = "alerts, the last first" if more <= 0 else f"alerts, the last {most} of {len(view.alerts)} first"
    return Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="dim")


def _told(alert: Alert) -> Text:
    return Text.assemble((alert.name + " ", "bold"), alert.message)


def sparkline(values: Floats | Sequence[float], width: int, *, log: bool = False) -> str:
    """At most ``width`` bars from the smallest to the largest value, means of neighbours; blank where there is none."""
    array = np.asarray(values, np.float64)
    if log:
        with np.errstate(all="ignore"):
            array = np.where(array > 0.0, np.log(array), math.nan)
    array = np.where(np.isfinite(array), array, math.nan)
    if not len(array) or not np.isfinite(array).any():
        return ""
    if len(array) > width:
        edges = np.linspace(0, len(array), width + 1).astype(np.int64)
        parts = [array[start:end] for start, end in itertools.pairwise(edges)]
        array = np.array([np.nanmean(part) if np.isfinite(part).any() else math.nan for part in parts])
    low, high = float(np.nanmin(array)), float(np.nanmax(array))
    span = high - low
    # noise of a flat line is no landscape
    if span <= (0.05 if log else 0.02 * max(abs(low), abs(high))):
        return "".join(" " if value != value else _BARS[3] for value in array)
    places = np.nan_to_num((array - low) / span * (len(_BARS) - 1))
    return "".join(
        " " if value != value else _BARS[round(place)] for value, place in zip(array, places.tolist(), strict=True)
    )
