"""The tokens behind an alert: those with the largest log-ratios of the slice that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyrlstats.monitor.alerts import Alert, plain

if TYPE_CHECKING:
    from pyrlstats.tails import TopTokens

MOST = 10  # tokens in an alert's evidence
SAID = 3  # of them in its message

KEY = "top_tokens"  # of the evidence


def with_tokens(
    alerts: Sequence[Alert], tokens: Mapping[str, TopTokens] | Callable[[], Mapping[str, TopTokens]]
) -> list[Alert]:
    """The alerts, those of a slice with its worst tokens in evidence and message.

    Args:
        alerts: told at one step.
        tokens: of that step, by slice; a function is called only if an alert is of a slice.
    """
    if not any(alert.slice is not None for alert in alerts):
        return list(alerts)
    known = tokens() if callable(tokens) else tokens
    return [_with(alert, known) for alert in alerts]


def _with(alert: Alert, known: Mapping[str, TopTokens]) -> Alert:
    rows = known[alert.slice].rows()[:MOST] if alert.slice is not None and alert.slice in known else []
    if not rows:
        return alert
    evidence = {**alert.evidence, KEY: plain(rows)}
    return replace(alert, message=f"{alert.message}; {in_words(rows[:SAID])}", evidence=evidence)


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """``worst tokens -9.31, 8.02 nats at 12:403, 7:19 (sequence:position)``, the rank first where there are more."""
    ranks = any(row["rank"] > 0 for row in rows)
    values = ", ".join(f"{row['value']:.3g}" for row in rows)
    places = ", ".join(f"{row['rank']}/" * ranks + f"{row['sequence']}:{row['position']}" for row in rows)
    return f"worst tokens {values} nats at {places} ({'rank/' * ranks}sequence:position)"
