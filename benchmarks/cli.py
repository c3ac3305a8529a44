"""``pyrlstats bench``, and ``python -m benchmarks`` in a source tree: run the suite, compare two results, render
committed ones. Light to import: what is heavy is imported when it runs.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

NEEDED = ("torch", "rich", "matplotlib", "jinja2")

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="Measure pyrlstats against what it replaces."
)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases: under two minutes.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Write the result here; PNG and HTML go beside it.")] = None,
    readme: Annotated[
        bool, typer.Option("--readme", help="Write benchmarks/results and render README and docs from it.")
    ] = False,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    time_limit: Annotated[float | None, typer.Option(help="Seconds; what does not fit is listed as skipped.")] = None,
    commit: Annotated[str | None, typer.Option(help="To note where the tree is no repository.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; default: one a CPU.")] = None,
) -> None:
    """Run the benchmark suite: gate, time, roofline, memory, accuracy, training step, all_reduce."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"the suite needs {', '.join(missing)}: pip install 'pyrlstats[bench]'")
    if context.invoked_subcommand is not None:
        return
    import torch
    from rich.console import Console

    from . import markdown, suite, terminal

    targets: tuple[Path, ...] = ()
    if readme:  # before anything is measured
        try:
            targets = markdown.targets()
        except markdown.NoSourceTree as error:
            _fail(str(error))
    console = Console(width=None if Console().is_terminal else 160)
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda needs a GPU that torch can use; there is none")
    torch.set_num_threads(threads or os.cpu_count() or 1)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if device == "cpu" and busy > 0.5 * (os.cpu_count() or 1):
        console.print(
            f"[yellow]the load is {busy:.1f} on {os.cpu_count()} CPUs: threads that wait for each other are measured "
            "waiting for other programs; --threads 1 suffers least[/yellow]"
        )
    with terminal.Bar(console) as bar:
        document = suite.run(
            device,
            quick,
            only,
            time_limit,
            watch=bar,
            finished=lambda partial: suite.save(partial, json) if json is not None else None,
        )
    if commit is not None:
        document["machine"]["commit"] = commit
    document = suite.rounded(document)
    terminal.print_document(console, document)
    if json is not None:
        _write(document, json)
        console.print(f"wrote {json}, .png and .html beside it", markup=False, highlight=False)
    if readme:
        folder = markdown.results_folder()
        _write(document, folder / ("gpu.json" if device == "cuda" else "cpu.json"), html=False)
        for path in markdown.render(targets, folder):
            console.print(f"rendered {path}", markup=False, highlight=False)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="JSON of a run.")],
    after: Annotated[Path, typer.Argument(help="JSON of another.")],
    everyone: Annotated[bool, typer.Option("--everyone", help="Contenders too, not only pyrlstats.")] = False,
) -> None:
    """Ratios between two results, and which stand out of the noise."""
    from rich.console import Console

    from . import terminal
    from .compare import compare as compared

    console = Console(width=None if Console().is_terminal else 160)
    documents = _loaded(before), _loaded(after)
    terminal.print_table(console, compared(*documents, everyone))


@app.command()
def render() -> None:
    """Render the committed results into README.md and docs/benchmarks.md, between their markers; draw their plots."""
    from . import figures, markdown, suite

    try:
        folder, targets = markdown.results_folder(), markdown.targets()
    except markdown.NoSourceTree as error:
        _fail(str(error))
    found = (folder / f"{device}.json" for device in ("cpu", "gpu"))  # others lie beside them
    for result in filter(Path.exists, found):
        figures.draw(suite.load(result), result.with_suffix(".png"))
    for path in markdown.render(targets, folder):
        typer.echo(f"rendered {path}")


@app.command()
def show(result: Annotated[Path, typer.Argument(help="JSON of a run.")]) -> None:
    """Print the tables of a result and draw its PNG and HTML anew."""
    from rich.console import Console

    from . import terminal

    document = _loaded(result)
    terminal.print_document(Console(width=None if Console().is_terminal else 160), document)
    _write(document, result)


def _loaded(path: Path) -> dict[str, Any]:
    from . import suite

    try:
        return suite.load(path)
    except OSError as error:
        _fail(f"cannot read {path}: {error.strerror}")
    except ValueError as error:
        _fail(f"{path} is no result of this suite: {error}")


def _write(document: dict[str, Any], path: Path, html: bool = True) -> None:
    from . import figures, page, suite

    suite.save(document, path)
    plot = path.with_suffix(".png")
    figures.draw(document, plot)
    if html:
        page.write(document, path.with_suffix(".html"), plot)


def _fail(message: str) -> NoReturn:
    typer.echo(f"pyrlstats bench: {message}", err=True)
    raise typer.Exit(1)


__all__ = ["app"]
