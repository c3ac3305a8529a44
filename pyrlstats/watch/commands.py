"""The command line over recorded runs. Light to import: what is heavy is imported when it runs."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pyrlstats.monitor.rules import RuleSet
    from pyrlstats.watch.runs import Run

QUIET, WARNING, STOP, UNREADABLE = 0, 1, 2, 3  # exit statuses of check

_RUN = "A run folder, a folder or file of Parquet, a .jsonl file of scalars, or a trainer_state.json."
RunPath = Annotated[Path, typer.Argument(help=_RUN, show_default=False)]
RuleFiles = Annotated[
    list[Path] | None, typer.Option("--rules", help="A file of rules, beside the built-in ones; may be repeated.")
]
NoBuiltin = Annotated[bool, typer.Option("--no-builtin", help="Without the built-in rules.")]
Warmup = Annotated[int | None, typer.Option(min=3, help="Steps of the frozen baseline (default: 100, or a quarter).")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Name the rules that have nothing to look at.")]


def add_commands(app: typer.Typer) -> None:
    """Put every command into an application."""
    for command in (watch, report, compare, replay, rules, doctor):
        app.command()(command)
    app.command(cls=_Check)(check)


class _Check(TyperCommand):
    """A command whose wrong usage is not the status of a run that should stop."""

    def make_context(self, *args: Any, **keywords: Any) -> Any:
        try:
            return super().make_context(*args, **keywords)
        except Exception as error:
            if getattr(error, "exit_code", 0) == 2:  # wrong usage, as the parser reports it
                error.exit_code = UNREADABLE  # type: ignore[attr-defined]
            raise


def watch(
    run: RunPath,
    rules: RuleFiles = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    width: Annotated[int | None, typer.Option(min=40, help="Columns (default: those of the terminal).")] = None,
) -> None:
    """Look at a run in the terminal while it goes on; Ctrl-C ends looking, not the run."""
    _need("watch", "pydantic", "rich")
    from rich.console import Console
    from rich.live import Live

    from pyrlstats.watch.live import Follower
    from pyrlstats.watch.runs import RunError
    from pyrlstats.watch.terminal import Frame

    console = Console(width=width)
    try:
        follower = Follower(run, _rules("watch", rules))
        view = follower.look()
    except RunError as error:
        _fail("watch", str(error))
    if once:
        console.print(Frame(view))
        return
    try:
        with Live(
            Frame(view, height=console.height), console=console, screen=console.is_terminal, auto_refresh=False
        ) as live:
            while True:
                time.sleep(every)
                try:
                    view = follower.look()
                except (RunError, OSError):  # being replaced just now, or gone for good: the last frame stays
                    continue
                live.update(Frame(view, height=console.height), refresh=True)
    except KeyboardInterrupt:
        console.print(Frame(view))


def report(
    run: RunPath,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File (default: NAME-report.html or .md).")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown, without pictures; to the screen.")] = False,
    rules: RuleFiles = None,
) -> None:
    """Write one self-contained page about a run: tails, ESS, distributions, alerts."""
    _need("report", "pydantic", "jinja2", *(() if markdown else ("matplotlib",)))
    from pyrlstats.watch import report as _report

    recorded = _open("report", run)
    book = _rules("report", rules)
    with _reading("report"):
        text = _report.markdown(recorded, book) if markdown else _report.html(recorded, book)
    if markdown and out is None:
        typer.echo(text)
        return
    target = out or Path(f"{run.resolve().name or 'run'}-report.html")
    _write("report", target, text)
    typer.echo(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")


def compare(
    run: RunPath,
    baseline: Annotated[Path, typer.Argument(help="The run it is compared to.", show_default=False)],
    last: Annotated[int | None, typer.Option(min=1, help="The last so many steps of each (default: all).")] = None,
) -> None:
    """Compare two runs slice by slice, from their pooled states: effect sizes first."""
    _need("compare", "rich")
    from rich.console import Console

    from pyrlstats.watch.comparing import compared, tables

    first, second = _open("compare", run), _open("compare", baseline)
    try:
        found = compared(first, second, last)
    except ValueError as error:
        _fail("compare", str(error))
    console = Console()
    for table in tables(found):
        console.print(table)


def check(
    run: RunPath,
    rules: RuleFiles = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit status says it.")] = False,
    verbose: Verbose = False,
) -> None:
    """Say by the exit status whether a run is in trouble: 0 quiet, 1 warning, 2 stop, 3 unreadable.

    Takes the alerts of the run's monitor. Where none watched, or --rules is given, rules are asked about what was
    recorded. Alerts of level info are quiet. A file of rules with errors, and wrong usage, are status 3.
    """
    _need("check", "pydantic")
    from pyrlstats.watch.judging import ask_rules, judge
    from pyrlstats.watch.summary import counted, span

    recorded = _open("check", run)
    book = _rules("check", rules)
    if not len(recorded.steps):
        _fail("check", f"{run} holds no step that can be read, and {recorded.damaged} damaged lines")
    with _reading("check"):
        judged = judge(recorded, book)
        own = ask_rules(recorded, book).alerts if rules and judged.source == "monitor" else []
    alerts = list(judged.alerts)
    alerts += [alert for alert in own if alert.key not in {each.key for each in alerts}]
    worst = max((alert.level for alert in alerts), key=("info", "warning", "stop").index, default="info")
    if not quiet:
        for alert in alerts:
            typer.echo(f"{alert.level:<7} step {alert.step}: {alert.name}: {alert.message}")
        damaged = f", {recorded.damaged} damaged lines" if recorded.damaged else ""
        typer.echo(f"{span(recorded.steps)}{damaged}: {counted(alerts) or 'no alerts'}")
        _notices(judged.notices, verbose)
    raise typer.Exit({"info": QUIET, "warning": WARNING, "stop": STOP}[worst])


def replay(
    run: RunPath,
    rules: RuleFiles = None,
    no_builtin: NoBuiltin = False,
    warmup: Warmup = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One alert a line, as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Say what rules would have alarmed about a recorded run, and when."""
    _need("replay", "pydantic", "rich")
    import json

    from rich.console import Console
    from rich.padding import Padding

    from pyrlstats.watch.judging import ask_rules, warmup_of
    from pyrlstats.watch.summary import counted, span
    from pyrlstats.watch.terminal import STYLES

    recorded = _open("replay", run)
    book = _rules("replay", rules, builtin=not no_builtin)
    with _reading("replay"):
        found = ask_rules(recorded, book, warmup)
    if json_lines:
        for alert in found.alerts:
            typer.echo(json.dumps(alert.to_json(), allow_nan=False))
    else:
        console = Console()
        for alert in found.alerts:
            level = f"[{STYLES[alert.level]}]{alert.level}[/]"
            console.print(f"step {alert.step:,} {level} [bold]{alert.name}[/] [dim]{alert.link}[/]")
            console.print(Padding(_plain(alert.message), (0, 0, 0, 2)))
        typer.echo(
            f"{len(book.rules)} rules over {span(recorded.steps)}, baseline of {warmup_of(recorded, warmup)}: "
            f"{counted(found.alerts) or 'no alerts'}"
        )
    _notices(found.notices, verbose)
    if recorded.alerts is not None and not json_lines:
        typer.echo("rules only: what the monitor's own detectors found is not replayed, see pyrlstats check", err=True)


def _notices(notices: list[str], verbose: bool) -> None:
    from pyrlstats.watch.summary import shortened

    for notice in notices:
        short = shortened(notice)
        typer.echo(notice if verbose or short == notice else f"{short}: --verbose names them", err=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def rules(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of rules to check.", show_default=False)] = None,
    explain: Annotated[str | None, typer.Option(help="A rule, or a glob: everything about it.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference of all rules, as Markdown.")] = False,
    no_builtin: NoBuiltin = False,
) -> None:
    """List the built-in rules with what they mean, or check files of rules: exit status 3 if one is bad."""
    _need("rules", "pydantic", "rich")
    from rich.console import Console

    from pyrlstats.watch import reference

    book = _rules("rules", files, builtin=not no_builtin)
    if markdown:
        typer.echo(reference.markdown(book))
        return
    if explain is not None:
        chosen = reference.chosen(book, explain)
        if not chosen:
            near = reference.nearest_rule(book, explain) or ": pyrlstats rules lists them"
            _fail("rules", f"no rule is {explain!r}{near}")
        for rule in chosen:
            Console().print(reference.explained(rule, book))
        return
    if files:
        typer.echo(f"{', '.join(map(str, files))}: no errors; {len(book.rules)} rules in all")
    else:
        Console().print(reference.listed(book))


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Without the self-test.")] = False,
) -> None:
    """Say what works here and what does not, with the cure, and test every backend against the reference.

    Exit status 1 if a backend that can run here gives other results than the reference.
    """
    _need("doctor", "rich")
    from rich.console import Console

    from pyrlstats.watch import doctor as _doctor

    console = Console()
    healthy = _doctor.examine(console, test=not quick)
    raise typer.Exit(0 if healthy else 1)


@contextmanager
def _reading(command: str) -> Iterator[None]:
    """States are read late: what is damaged in them shows here."""
    from pyrlstats.watch.runs import RunError

    try:
        yield
    except RunError as error:
        _fail(command, str(error))


def _open(command: str, path: Path) -> Run:
    from pyrlstats.watch.runs import RunError, open_run

    try:
        return open_run(path)
    except RunError as error:
        _fail(command, str(error))


def _rules(command: str, paths: list[Path] | None, *, builtin: bool = True) -> RuleSet:
    from pyrlstats.monitor.rules import RuleError, load_rules

    try:
        return load_rules(*(paths or []), builtin=builtin)
    except (RuleError, ImportError) as error:
        _fail(command, str(error))


def _write(command: str, path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        _fail(command, f"cannot write {path}: {error.strerror}; choose another file with -o")


def _need(command: str, *names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        _fail(command, f"needs {', '.join(missing)}: pip install 'pyrlstats[watch]'")


def _fail(command: str, message: str) -> NoReturn:
    typer.echo(f"pyrlstats {command}: {message}", err=True)
    raise typer.Exit(UNREADABLE)
