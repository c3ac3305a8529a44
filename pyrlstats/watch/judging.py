"""What a run has to answer for: the alerts its monitor raised, or those that rules raise on what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pyrlstats.monitor.alerts import LEVELS, Alert, Level
from pyrlstats.monitor.rules import RuleSet
from pyrlstats.monitor.rules_evaluation import signals_needed
from pyrlstats.monitor.rules_names import COMPARED, DERIVED, quantile_level
from pyrlstats.monitor.rules_replay import Table, replay
from pyrlstats.monitor.signals import Reference, against
from pyrlstats.slice_stats import SCALARS
from pyrlstats.state import State
from pyrlstats.watch.pooling import statistics
from pyrlstats.watch.runs import Run

Floats = NDArray[np.float64]

WARMUP = 100  # observed steps of the frozen baseline, as the monitor has it
YOUNG = 0.25  # of a run too short for that, the share that is its baseline


@dataclass(frozen=True)
class Judged:
    """Alerts and where they come from.

    Attributes:
        alerts: by step.
        source: "monitor" or "rules".
        notices: what could not be looked at, in words.
    """

    alerts: list[Alert]
    source: str
    notices: list[str]

    @property
    def worst(self) -> Level | None:
        """The highest level among them."""
        return max((alert.level for alert in self.alerts), key=LEVELS.index, default=None)


def warmup_of(run: Run, warmup: int | None = None) -> int:
    """Observed steps of the baseline: as asked, else 100, of a run of less than 400 steps a quarter, at least 10."""
    if warmup is not None:
        return warmup
    return min(WARMUP, max(10, int(YOUNG * len(run.steps))))


def ask_rules(run: Run, rules: RuleSet, warmup: int | None = None) -> Judged:
    """What rules say about a run, from its figures and its states.

    Args:
        run: of any kind; statistics that are not among its figures are taken from its states.
        rules: what to ask.
        warmup: observed steps of the frozen baseline; None chooses, see :func:`warmup_of`.
    """
    steps = warmup_of(run, warmup)
    table = with_statistics(run, signals_needed(rules), steps)
    found = replay(rules, table, steps)
    return Judged(found.alerts, "rules", found.notices)


def judge(run: Run, rules: RuleSet, warmup: int | None = None) -> Judged:
    """The alerts of the run's monitor; where none watched, those of rules."""
    if run.alerts is not None:
        return Judged(sorted(run.alerts, key=lambda alert: alert.step), "monitor", [])
    return ask_rules(run, rules, warmup)


def with_statistics(run: Run, names: Sequence[str], warmup: int) -> Table:
    """The run's table with statistics of every slice, as far as states can give what was not logged."""
    if run.states is None:
        return run.table
    wanted = dict.fromkeys(names)
    if any(name in wanted for name in DERIVED):
        wanted.update(dict.fromkeys(("n_tokens", "n_finite")))
    wanted.setdefault("n_finite")
    first = run.states.names[0]
    missing = [
        name
        for name in wanted
        if f"{first}/{name}" not in run.table.signals and (name in SCALARS or quantile_level(name) is not None)
    ]
    signals = {**run.table.signals, **(statistics(run, missing) if missing else {})}
    compared = [name for name in COMPARED if name in wanted]
    if compared:
        signals.update(_compared(run, compared, warmup))
    return replace(run.table, signals=signals)


def _compared(run: Run, names: Sequence[str], warmup: int) -> dict[str, Floats]:
    """Figures against the baseline, the pooled states of the first ``warmup`` steps that have one."""
    assert run.states is not None
    n = len(run.steps)
    columns = {f"{name}/{key}": np.full(n, np.nan) for name in run.states.names for key in names}
    pooled: State | None = None
    reference: Reference | None = None
    count = 0
    for index, state in enumerate(run.states.read(range(n))):
        if state is None:
            continue
        if reference is None:
            try:
                pooled = state.copy() if pooled is None else pooled
                if count:
                    pooled.merge_(state)
            except ValueError:
                continue
            count += 1
            if count == warmup:
                reference = Reference(pooled)
            continue
        if state.names != reference.names or state.layout != reference.state.layout:
            continue
        for key, value in against(state, reference).items():
            if key in columns:
                columns[key][index] = value
    return columns
