"""A report of a run: one self-contained HTML page, or Markdown."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2

from pyrlstats._build import version
from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.rules import RuleSet
from pyrlstats.monitor.worst import KEY
from pyrlstats.watch.judging import judge
from pyrlstats.watch.pooling import pool
from pyrlstats.watch.runs import Run
from pyrlstats.watch.summary import FIGURES, Summary, counted, shortened, summarise

WORST = ("value", "rank", "sequence", "position")  # of a token
POINTS = 200  # groups of steps that are drawn
MOST_ALERTS = 200  # told one by one


def html(run: Run, rules: RuleSet) -> str:
    """The page. It needs no network and no other file.

    Args:
        run: of any kind, with any number of steps.
        rules: asked where no monitor watched the run.
    """
    from pyrlstats.watch.figures import pictures

    summary = _summary(run, rules)
    drawn = [(title, caption, base64.b64encode(svg.encode()).decode()) for title, caption, svg in pictures(summary)]
    return _render("report.html.j2", summary, pictures=drawn)


def markdown(run: Run, rules: RuleSet) -> str:
    """The same in Markdown, without pictures."""
    return _render("report.md.j2", _summary(run, rules))


def _summary(run: Run, rules: RuleSet) -> Summary:
    return summarise(run, pool(run, POINTS), judge(run, rules))


def _render(name: str, summary: Summary, **more: Any) -> str:
    environment = jinja2.Environment(
        autoescape=name.endswith(".html.j2"), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["escape_cell"] = lambda text: " ".join(str(text).replace("|", "\\|").split())
    template = environment.from_string((files("pyrlstats.watch") / name).read_text(encoding="utf-8"))
    alerts = summary.judged.alerts
    return template.render(
        summary=summary,
        figures=FIGURES,
        alerts=[(alert, advice(alert), worst(alert), evidence(alert)) for alert in alerts[:MOST_ALERTS]],
        untold=len(alerts) - len(alerts[:MOST_ALERTS]),
        counted=counted(alerts),
        scalars=last_scalars(summary),
        shortened=shortened,
        version=version(),
        **more,
    )


def advice(alert: Alert) -> list[tuple[str, str]]:
    """What the rule behind an alert has to say, where there is one."""
    names = (("meaning", "What it means"), ("look_at", "Look first at"), ("try_next", "Try"))
    return [(title, str(alert.evidence[key])) for key, title in names if alert.evidence.get(key)]


def worst(alert: Alert) -> list[tuple[str, ...]]:
    """The worst tokens of an alert's slice, rows of WORST as text."""
    return [tuple(f"{_rounded(row.get(key, ''))}" for key in WORST) for row in alert.evidence.get(KEY, ())]


def evidence(alert: Alert) -> str:
    """The other figures behind an alert, as indented JSON."""
    told = {key: value for key, value in alert.evidence.items() if key not in ("meaning", "look_at", "try_next", KEY)}
    return json.dumps(_rounded(told), indent=1, ensure_ascii=False) if told else ""


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(each) for each in value]
    return value


def last_scalars(summary: Summary) -> list[tuple[str, str, str]]:
    """Name, first and last value of the scalars shown."""
    rows = []
    for key in summary.scalars:
        values = summary.run.table.signals[key]
        known = values[values == values]
        rows.append((key, f"{known[0]:.4g}", f"{known[-1]:.4g}"))
    return rows
