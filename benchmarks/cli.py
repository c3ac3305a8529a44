"""``python -m benchmarks``: run the suite, compare two results, render committed ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

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
    if context.invoked_subcommand is not None:
        return
    import torch
    from rich.console import Console

    from benchmarks import markdown, suite, terminal

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
        _write(document, markdown.RESULTS / ("gpu.json" if device == "cuda" else "cpu.json"), html=False)
        for path in markdown.render():
            console.print(f"rendered {path}", markup=False, highlight=False)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="JSON of a run.")],
    after: Annotated[Path, typer.Argument(help="JSON of another.")],
    everyone: Annotated[bool, typer.Option("--everyone", help="Contenders too, not only pyrlstats.")] = False,
) -> None:
    """Ratios between two results, and which stand out of the noise."""
    from rich.console import Console

    from benchmarks import suite, terminal
    from benchmarks.compare import compare as compared

    console = Console(width=None if Console().is_terminal else 160)
    terminal.print_table(console, compared(suite.load(before), suite.load(after), everyone))


@app.command()
def render() -> None:
    """Render the committed results into README.md and docs/benchmarks.md, between their markers; draw their plots."""
    from benchmarks import figures, markdown, suite

    found = (markdown.RESULTS / f"{device}.json" for device in ("cpu", "gpu"))  # others lie beside them
    for result in filter(Path.exists, found):
        figures.draw(suite.load(result), result.with_suffix(".png"))
    for path in markdown.render():
        typer.echo(f"rendered {path}")


@app.command()
def show(result: Annotated[Path, typer.Argument(help="JSON of a run.")]) -> None:
    """Print the tables of a result and draw its PNG and HTML anew."""
    from rich.console import Console

    from benchmarks import suite, terminal

    document = suite.load(result)
    terminal.print_document(Console(width=None if Console().is_terminal else 160), document)
    _write(document, result)


def _write(document: dict[str, Any], path: Path, html: bool = True) -> None:
    from benchmarks import figures, page, suite

    suite.save(document, path)
    plot = path.with_suffix(".png")
    figures.draw(document, plot)
    if html:
        page.write(document, path.with_suffix(".html"), plot)


__all__ = ["app"]
