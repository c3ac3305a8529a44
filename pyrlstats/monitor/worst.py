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
    said = ", ".join(in_words(row) for row in rows[:SAID])
    evidence = {**alert.evidence, KEY: plain(rows)}
    return replace(alert, message=f"{alert.message}; largest |log-ratio|: {said}", evidence=evidence)


def in_words(row: Mapping[str, Any]) -> str:
    """``-9.31 nats at position 403 of sequence 12, rank 0``."""
    return f"{row['value']:.3g} nats at position {row['position']} of sequence {row['sequence']}, rank {row['rank']}"
