"""A run as one HTML page: tables, notes, plots."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from . import machine, tables

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pyrlstats benchmarks</title><style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
tr.ours td { background: #e6f4ee } tr.bad td { color: #a33 }
ul { color: #666; margin: .2rem 0 1.5rem } img { max-width: 100% } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem }
</style></head><body>
<h1>pyrlstats benchmarks</h1>
<p>{{ line }}</p>
<p><code>{{ document.command }}</code>, {{ document.date }}, {{ "%.0f"|format(document.wall_seconds) }} s,
load {{ document.machine.load }} before and {{ document.load_after }} after.
Medians; no time is shown for a contender whose result is wrong beyond the tolerance it states.</p>
{% if plot %}<img alt="plots" src="data:image/png;base64,{{ plot }}">{% endif %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<table><thead><tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table.rows %}<tr class="{{ 'ours' if loop.index0 in table.ours }}{{ 'bad' if loop.index0 in table.bad }}">
{% for cell in row %}<td>{{ cell | replace('**', '') }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% if table.notes %}<ul>{% for note in table.notes %}<li>{{ note }}</li>{% endfor %}</ul>{% endif %}
{% endfor %}
{% if document.skipped %}<h2>Skipped</h2><ul>
{% for case in document.skipped %}<li>{{ case.name }}: {{ case.reason }}</li>{% endfor %}</ul>{% endif %}
</body></html>
"""


def write(document: dict[str, Any], path: Path, plot: Path | None = None) -> None:
    """The page, with the plot inside it."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE).render(
        document=document,
        line=machine.line(document["machine"]),
        tables=list(tables.of_document(document)),
        plot=base64.b64encode(plot.read_bytes()).decode() if plot is not None and plot.exists() else None,
    )
    path.write_text(page)
