"""The command line: ``pyrlstats --version``, ``info``, ``demo``, ``bench``, and the commands over recorded runs.

A further command is a function with typer's annotations in a module that is light to import, and one line in
:func:`build_app`.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Annotated

from pyrlstats._build import build_info, version

try:
    import typer
except ModuleNotFoundError as error:
    if not TYPE_CHECKING:
        extra = next((word for word in sys.argv[1:2] if word in ("demo", "bench")), "watch")
        sys.stderr.write(f"pyrlstats: the command line needs {error.name}: pip install 'pyrlstats[{extra}]'\n")
        raise SystemExit(3 if extra == "watch" else 1) from None  # to `check` 1 means a warning


def info() -> None:
    """Print versions, which backends can run here, and how the extension was built."""
    typer.echo(json.dumps(build_info(), indent=2))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyrlstats {version()}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Distribution statistics of policy log-ratios for reinforcement-learning post-training."""


def build_app() -> typer.Typer:
    """The application with its commands."""
    from pyrlstats.demo.command import demo
    from pyrlstats.watch.commands import add_commands

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(options)
    app.command()(info)
    app.command()(demo)
    add_commands(app)
    app.add_typer(_bench(), name="bench")
    return app


def _bench() -> typer.Typer:
    try:
        suite = importlib.import_module("pyrlstats.benchmarks.cli")
    except ModuleNotFoundError:  # straight from a source tree it lies beside the package
        suite = importlib.import_module("benchmarks.cli")
    app: typer.Typer = suite.app
    return app


def main() -> None:
    """Entry point of the console script."""
    build_app()()
