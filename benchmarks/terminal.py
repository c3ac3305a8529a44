"""Tables and a progress bar in the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from . import machine, tables
from .tables import Table


def print_table(console: Console, table: Table) -> None:
    shown = RichTable(title=table.title, title_justify="left", title_style="bold", header_style="bold")
    for index, name in enumerate(table.columns):
        shown.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for index, row in enumerate(table.rows):
        style = "green" if index in table.ours else "red" if index in table.bad else ""
        shown.add_row(*(cell.replace("**", "") for cell in row), style=style)
    console.print(shown)
    for note in table.notes:
        console.print(f"  {note}", style="dim", highlight=False)


def print_document(console: Console, document: dict[str, Any]) -> None:
    console.print(machine.line(document["machine"]), highlight=False)
    for table in tables.of_document(document):
        console.print()
        print_table(console, table)
    for skipped in document["skipped"]:
        console.print(f"  {skipped['name']}: skipped: {skipped['reason']}", style="dim", highlight=False)


class Bar:
    """A progress bar over cases; plain lines where nobody watches."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description:50}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def __call__(self, name: str, done: int, total: int) -> None:
        if self.console.is_terminal:
            self.progress.update(self.task, description=name, completed=done, total=total)
        else:
            self.console.print(f"[{done}/{total}] {name}", markup=False, highlight=False)
