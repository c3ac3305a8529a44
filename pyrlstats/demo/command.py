"""The command line of the demo. Light to import: what is heavy is imported when it runs."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

NEEDED = ("torch", "rich", "matplotlib", "jinja2")


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps (default: 60).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, problems and sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo_run"),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: shows the form, learns little.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch (default: one a processor, at most 4).")
    ] = None,
) -> None:
    """Train a small agent that uses a calculator, and show its log-ratio tails slice by slice.

    Takes about two minutes of processor time, and writes a page, a picture, and a run folder that ``pyrlstats watch``,
    ``report`` and ``check`` read.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"the demo needs {', '.join(missing)}: pip install 'pyrlstats[demo]'")

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait are slow on a busy machine
    import torch

    from pyrlstats.demo import records, run
    from pyrlstats.demo.training import QUICK, Settings

    torch.set_num_threads(threads or min(4, _processors()))
    settings = replace(QUICK if quick else Settings(), seed=seed)
    if steps is not None:
        settings = replace(settings, steps=steps)
    try:
        records.prepare(out)
    except OSError as error:
        _fail(f"cannot write into {out}: {error.strerror}; choose another folder with --out")
    if not run.run(settings, out):
        raise typer.Exit(130)  # as a shell reports Ctrl-C


def _processors() -> int:
    """Those this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fail(message: str) -> NoReturn:
    typer.echo(f"pyrlstats demo: {message}", err=True)
    raise typer.Exit(1)
