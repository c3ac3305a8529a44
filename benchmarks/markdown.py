"""Committed results rendered into the README and the docs, between markers.

``<!-- benchmarks:NAME -->`` ... ``<!-- /benchmarks:NAME -->``; NAME is one of :data:`SECTIONS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import kernels, machine, suite, tables
from .tables import Table

MARKED = re.compile(r"(<!-- benchmarks:([a-z-]+) -->\n).*?(<!-- /benchmarks:\2 -->)", re.DOTALL)

Document = dict[str, Any]


class NoSourceTree(RuntimeError):
    """What was asked for is a file of a source tree, and there is none."""


def table(given: Table) -> str:
    """A Markdown table with ours in bold, and its notes below."""
    lines = [" | ".join(["", *given.columns, ""]).strip(), "|" + "---|" * len(given.columns)]
    for index, row in enumerate(given.rows):
        cells = [f"**{row[0]}**" if index in given.ours else row[0], *row[1:]]
        lines.append(" | ".join(["", *cells, ""]).strip())
    return "\n".join(lines)


def titled(given: Table) -> str:
    parts = [f"**{given.title[0].upper()}{given.title[1:]}**", table(given)]
    if given.notes:
        parts.append("\n".join(f"- {note}" for note in given.notes))
    return "\n\n".join(parts)


def provenance(document: Document) -> str:
    """Machine, versions, load, date and command of a run."""
    load = f", load {document['machine']['load']} before and {document['load_after']} after"
    return (
        f"{machine.line(document['machine'])}. Run of {document['date'][:10]}, {document['wall_seconds']:.0f} s{load}: "
        f"`{document['command']}`."
    )


def headline(document: Document) -> str:
    """The README's table: the full statistics of one call, and what ours costs a training step."""
    gpu = document["device"] == "cuda"
    case = next(case for case in document["cases"] if case["axis"] == "statistics")
    full = tables.of_case(case, gpu)
    kept = [index for index, name in enumerate(full.columns) if name != "p20 to p80"]
    small = Table(full.title, [full.columns[i] for i in kept], [[row[i] for i in kept] for row in full.rows], full.ours)
    parts = [f"{small.title[0].upper()}{small.title[1:]}:", table(small)]
    step = document.get("training_step", {})
    if "rows" in step:
        over = tables.of_training_step(step)
        parts += [f"{over.title[0].upper()}{over.title[1:]}:", table(over)]
    return "\n\n".join([*parts, provenance(document)])


def everything(document: Document) -> str:
    return "\n\n".join([provenance(document), *map(titled, tables.of_document(document)), *_left_out(document)])


def _left_out(document: Document) -> list[str]:
    """A line for every reason why cases did not run."""
    names: dict[str, list[str]] = {}
    for case in document["skipped"]:
        names.setdefault(case["reason"], []).append(case["name"])
    return [f"Not run, as {reason}: {', '.join(cases)}." for reason, cases in names.items()]


def kernels_headline(document: Document) -> str:
    """The README's table of the GPU kernel."""
    return f"{table(kernels.rates(document, kernels.HEADLINE))}\n\n{kernels.provenance(document)}"


def every_kernel(document: Document) -> str:
    """Every row of the GPU kernel, and its errors."""
    parts = (kernels.provenance(document), table(kernels.rates(document)), kernels.accuracy(document))
    return "\n\n".join(parts)


Section = tuple[str, Callable[[Path], Document], Callable[[Document], str]]  # file, how it is read, what is shown


def _plain(path: Path) -> Document:
    document: Document = json.loads(path.read_text())
    return document


SECTIONS: dict[str, Section] = {
    f"{device}-{name}": (f"{device}.json", suite.load, show)
    for device in ("cpu", "gpu")
    for name, show in (("headline", headline), ("machine", provenance), ("all", everything))
}
SECTIONS["gpu-kernels-headline"] = ("h100_kernels.json", _plain, kernels_headline)
SECTIONS["gpu-kernels"] = ("h100_kernels.json", _plain, every_kernel)


def results_folder() -> Path:
    """Where the committed results lie.

    Raises:
        NoSourceTree: the suite was installed without them.
    """
    return _tree() / "benchmarks" / "results"


def targets() -> tuple[Path, ...]:
    """The files with markers.

    Raises:
        NoSourceTree: the suite was installed without them.
    """
    return _tree() / "README.md", _tree() / "docs" / "benchmarks.md"


def _tree() -> Path:
    root = machine.source_tree()
    if root is None:
        raise NoSourceTree(
            "README.md, docs/ and the committed results are files of a source tree, and this suite was installed "
            "without one: run python -m benchmarks in a checkout; --json writes a result anywhere"
        )
    return root


def render(paths: tuple[Path, ...], results: Path) -> list[Path]:
    """Rewrite what lies between the markers of these files from the results in a folder; returns those changed.

    Raises:
        ValueError: a marker that names no section.
    """
    changed = []
    for path in paths:
        if not path.exists():
            continue
        text = path.read_text()

        def section(match: re.Match[str]) -> str:
            if match[2] not in SECTIONS:
                raise ValueError(f"{match[2]!r} must be one of {', '.join(SECTIONS)}")
            file, load, show = SECTIONS[match[2]]
            source = results / file
            body = show(load(source)) if source.exists() else "*No run is committed yet.*"
            return f"{match[1]}{body}\n{match[3]}"

        rendered = MARKED.sub(section, text)
        if rendered != text:
            path.write_text(rendered)
            changed.append(path)
    return changed
