"""What rules would have said about a run that is over, all steps at once; decided as :class:`RuleBook` decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.history import robust_spread
from pyrlstats.monitor.rules import RuleSet
from pyrlstats.monitor.rules_evaluation import Bound, Looked, Names, look, observed, too_few
from pyrlstats.monitor.rules_measures import Floats


@dataclass(frozen=True)
class Table:
    """The signals of a run.

    Attributes:
        steps: (n,) ascending and distinct.
        signals: key -> (n,) float64, NaN where it was absent, or was NaN.
        present: key -> (n,) bool, of those signals that were there while NaN; others are there where not NaN.
    """

    steps: NDArray[np.int64]
    signals: Mapping[str, Floats]
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)


@dataclass(frozen=True)
class Replay:
    """What rules said.

    Attributes:
        alerts: by step; one an episode.
        notices: what could not be evaluated, in words.
    """

    alerts: list[Alert]
    notices: list[str]


class _Past:
    """A table as a history that ends with its last step.

    Args:
        table: the run.
        warmup: observed steps of the frozen baseline.
    """

    def __init__(self, table: Table, warmup: int) -> None:
        self._table = table
        self._warmup = warmup

    def last(self, signal: str, n: int) -> Floats:
        return self._table.signals[signal][-n:]

    def steps(self, n: int) -> NDArray[np.int64]:
        return self._table.steps[-n:]

    def _frozen(self, signal: str) -> Floats | None:
        if len(self._table.steps) < self._warmup:
            return None
        values = self._table.signals[signal][: self._warmup]
        values = values[np.isfinite(values)]
        return values if len(values) else None

    def baseline(self, signal: str) -> float | None:
        """Median over the warm-up."""
        values = self._frozen(signal)
        return None if values is None else float(np.median(values))

    def spread(self, signal: str) -> float | None:
        """Robust standard deviation over the warm-up."""
        values = self._frozen(signal)
        return None if values is None else robust_spread(values)


def replay(rules: RuleSet, table: Table, warmup: int) -> Replay:
    """What rules would have said about a run.

    Args:
        rules: what to ask.
        table: the run.
        warmup: observed steps of the frozen baseline.
    """
    names = Names(rules)
    bounds = names.bind(list(table.signals))
    past = _Past(table, warmup)
    alerts: list[Alert] = []
    if len(table.steps):
        for bound in bounds:
            if not bound.absent:
                alerts += _episodes(bound, table, past, warmup)
    alerts.sort(key=lambda alert: alert.step)
    keys = {bound.tokens.key for bound in bounds if bound.tokens is not None}
    most = {key: float(np.fmax.reduce(table.signals[key])) for key in keys if key is not None and len(table.steps)}
    return Replay(alerts, names.unheard(bounds, set(table.signals)) + too_few(bounds, most))


def _episodes(bound: Bound, table: Table, past: _Past, warmup: int) -> list[Alert]:
    looked = _look(bound, table, past)
    full = _rows(looked.held, bound.rule.for_steps)
    if any(condition.needs_baseline for condition in bound.rule.when):
        full &= looked.at >= warmup - 1
    full &= table.steps[looked.at] >= bound.rule.after_step
    alerts = []
    until = -1  # index of the step up to which the last row of observations held
    following = np.append(looked.at[1:], len(table.steps))
    for index in np.flatnonzero(full):
        at = int(looked.at[index])
        away = until >= 0 and at - 1 > until and table.steps[at - 1] - table.steps[until] >= bound.rule.cool_down
        if until < 0 or away:
            alerts.append(bound.alert(int(table.steps[at]), looked.evidence(int(index))))
        until = int(following[index]) - 1
    return alerts


def _look(bound: Bound, table: Table, past: _Past) -> Looked:
    n = len(table.steps)
    columns = [signal.last(past, n) for signal in bound.signals]
    there: list[NDArray[Any]] = [
        observed(signal.condition, column, table.present.get(signal.first.key or ""))
        for signal, column in zip(bound.signals, columns, strict=True)
    ]
    baselines = [signal.frozen(past) for signal in bound.signals]
    tokens = None if bound.tokens is None else bound.tokens.last(past, n)
    return look(bound.rule, bound.signals, table.steps, columns, there, baselines, tokens)


def _rows(held: NDArray[np.bool_], times: int) -> NDArray[np.bool_]:
    """Where the last ``times`` observations all held."""
    through = np.concatenate(([0], np.cumsum(held)))
    full = np.zeros(len(held), bool)
    full[times - 1 :] = through[times:] - through[:-times] == times
    return full
