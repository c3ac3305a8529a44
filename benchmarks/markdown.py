"""Committed results rendered into the README and the docs, between markers.

``<!-- benchmarks:NAME -->`` ... ``<!-- /benchmarks:NAME -->``; NAME is one of :data:`SECTIONS`, with ``cpu`` or
``gpu`` before it, as in ``cpu-headline``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, suite, tables
from benchmarks.machine import ROOT
from benchmarks.tables import Table

RESULTS = ROOT / "benchmarks" / "results"
TARGETS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
MARKED = re.compile(r"(<!-- benchmarks:(cpu|gpu)-([a-z]+) -->\n).*?(<!-- /benchmarks:\2-\3 -->)", re.DOTALL)

Document = dict[str, Any]


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
    return "\n\n".join([provenance(document), *map(titled, tables.of_document(document))])


SECTIONS: dict[str, Callable[[Document], str]] = {
    "headline": headline,
    "machine": provenance,
    "all": everything,
}


def render(paths: tuple[Path, ...] = TARGETS, results: Path = RESULTS) -> list[Path]:
    """Rewrite what lies between the markers of these files from ``cpu.json`` and ``gpu.json``; returns those changed.

    Raises:
        ValueError: a marker that names no section.
    """
    changed = []
    for path in paths:
        if not path.exists():
            continue
        text = path.read_text()

        def section(match: re.Match[str]) -> str:
            source = results / f"{match[2]}.json"
            if match[3] not in SECTIONS:
                raise ValueError(f"{match[3]!r} must be one of {', '.join(SECTIONS)}")
            body = SECTIONS[match[3]](suite.load(source)) if source.exists() else "*No run is committed yet.*"
            return f"{match[1]}{body}\n{match[4]}"

        rendered = MARKED.sub(section, text)
        if rendered != text:
            path.write_text(rendered)
            changed.append(path)
    return changed
