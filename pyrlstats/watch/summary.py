"""A run in figures and words: what the report, the Markdown and the terminal show."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyrlstats.compare import compare
from pyrlstats.monitor.alerts import LEVELS, Alert
from pyrlstats.monitor.rules import RuleSet, builtin_rules
from pyrlstats.watch.judging import Judged
from pyrlstats.watch.pooling import Group, Pooled, merge
from pyrlstats.watch.runs import Run

Floats = NDArray[np.float64]

_COMPARED = 10  # then and now are a tenth of the run each


@dataclass(frozen=True)
class Change:
    """One slice then and now, as words: rows of the table of slices."""

    name: str
    cells: tuple[tuple[str, str, str], ...]  # figure, then, now
    verdict: str


@dataclass(frozen=True)
class Summary:
    """What there is to say about a run.

    Attributes:
        run, pooled, judged: what it is made of.
        then, now: the first and the last tenth of the run, pooled; None without states.
        slices: names shown, those with alerts first, then those with most tokens.
        hidden: slices that are not shown.
        changes: of the slices shown.
        scalars: keys shown, those that every trainer has first.
    """

    run: Run
    pooled: Pooled
    judged: Judged
    then: Group | None
    now: Group | None
    slices: tuple[str, ...]
    hidden: tuple[str, ...]
    changes: tuple[Change, ...]
    scalars: tuple[str, ...]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Name and value of what the run is."""
        run = self.run
        steps = run.steps
        facts = [("run", str(run.path)), ("kind", run.kind), ("recorded", span(steps))]
        known = run.times[np.isfinite(run.times)]
        if len(known):
            facts.append(("from", moment(float(known.min()))))
            facts.append(("to", moment(float(known.max()))))
            if len(known) > 1:
                facts.append(("seconds a step, median", f"{np.median(np.diff(known)):.3g}"))
        if self.pooled.groups:
            tokens = merge(self.pooled.groups).stats
            total = sum(int(tokens[name].n_tokens) for name in tokens)
            facts.append(("tokens in slices", f"{total:,}"))
            each = max(group.count for group in self.pooled.groups)
            facts.append(("drawn", f"{len(self.pooled.groups)} points of {each} steps pooled exactly"))
        worst = self.judged.worst
        told = f"{len(self.judged.alerts)} ({counted(self.judged.alerts)})" if worst else "none"
        facts.append((f"alerts, by the {'monitor' if self.judged.source == 'monitor' else 'rules'}", told))
        if run.damaged or self.pooled.lost:
            facts.append(("could not be read", f"{run.damaged} lines, {self.pooled.lost} states"))
        return facts


def summarise(run: Run, pooled: Pooled, judged: Judged, *, most_slices: int = 6, most_scalars: int = 12) -> Summary:
    """What there is to say about a run."""
    groups = pooled.groups
    then = now = None
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    if groups:
        tenth = max(1, len(groups) // _COMPARED)
        then, now = merge(groups[:tenth]), merge(groups[-tenth:])
        ordered = _by_interest(now, judged.alerts)
        names = [name for name in now.stats if name in ordered[:most_slices]]
        shown, hidden = tuple(names), tuple(ordered[most_slices:])
        changes = tuple(_change(run, name, then, now) for name in shown)
    return Summary(
        run, pooled, judged, then, now, shown, hidden, changes, scalars_of(run, builtin_rules(), most_scalars)
    )


def _by_interest(now: Group, alerts: Sequence[Alert]) -> list[str]:
    spoken = {alert.slice for alert in alerts}
    return sorted(now.stats, key=lambda name: (name not in spoken, -int(now.stats[name].n_tokens)))


_FIGURES = (
    ("tokens", "n_tokens", "{:,.0f}"),
    ("not finite", "", "{:,.0f}"),
    ("x = 0", "zero_fraction", "{:.1%}"),
    ("ESS", "ess_fraction", "{:.2%}"),
    ("KL k3", "kl_k3", "{:.3g}"),
    ("|x| p50", "abs_log_ratio_p50", "{:.3g}"),
    ("|x| p99", "abs_log_ratio_p99", "{:.3g}"),
    ("|x| p99.9", "abs_log_ratio_p99_9", "{:.3g}"),
    ("|x| p99.99", "abs_log_ratio_p99_99", "{:.3g}"),
    ("clipped", "clip_fraction", "{:.2%}"),
    ("max w", "ratio_max", "{:.3g}"),
)
FIGURES = tuple(name for name, _, _ in _FIGURES)


def cells_of(group: Group, name: str) -> tuple[str, ...]:
    """The figures of a slice, formatted, as FIGURES names them."""
    values = group.stats.to_dict()
    lost = values[f"{name}/n_tokens"] - values[f"{name}/n_finite"]
    return tuple(number(values[f"{name}/{key}"] if key else lost, form) for _, key, form in _FIGURES)


def shortened(notice: str) -> str:
    """A notice without its lists: what stands before the first parenthesis."""
    return notice.partition(" (")[0]


def number(value: float, form: str) -> str:
    """A figure in words; a dash for one that has no value."""
    return "-" if value != value else form.format(value)


def _change(run: Run, name: str, then: Group, now: Group) -> Change:
    cells = tuple(zip(FIGURES, cells_of(then, name), cells_of(now, name), strict=True))
    figures = compare(now.stats[name], then.stats[name]).to_dict()
    figures = {key.split("/", 1)[1]: value for key, value in figures.items()}
    ratio, log_ratio, error = figures["tail_ratio"], figures["tail_log_ratio"], figures["tail_log_ratio_se"]
    far = _pareto_k(run, name, then, now)
    if ratio != ratio:
        return Change(name, cells, f"no tokens to compare{far}")
    between = ""
    if math.isfinite(log_ratio) and math.isfinite(error):
        low, high = math.exp(log_ratio - 1.96 * error), math.exp(log_ratio + 1.96 * error)
        between = f" ({low:.2g} to {high:.2g} if tokens were independent)"
    shift = figures["abs_p99_9_log_shift"]
    tail = f"p99.9 of |x| {shift_in_words(shift)}; " if shift == shift else ""
    verdict = f"{tail}tokens beyond the early p99.9 (|x| ≥ {figures['tail_threshold']:.3g}): {ratio:.2f} times as many"
    return Change(name, cells, verdict + between + far)


def pareto_k(run: Run, name: str) -> Floats | None:
    """Pareto k of a slice at every step, (n,), NaN where there is none; None where it was not recorded."""
    values = run.table.signals.get(f"{name}/pareto_k")
    return values if values is not None and np.isfinite(values).any() else None


def _pareto_k(run: Run, name: str, then: Group, now: Group) -> str:
    values = pareto_k(run, name)
    if values is None:
        return ""
    middles = []
    for group in (then, now):
        inside = values[(run.steps >= group.first) & (run.steps <= group.last)]
        middles.append(float(np.median(known)) if len(known := inside[np.isfinite(inside)]) else math.nan)
    return f"; Pareto k of the weights {' then '.join(number(middle, '{:.2f}') for middle in middles)} (medians)"


def shift_in_words(log_shift: float) -> str:
    """A ratio, of which the logarithm is given, as a change in percent."""
    if not math.isfinite(log_shift):
        return "from 0" if log_shift > 0 else "to 0"
    change = math.expm1(log_shift)
    if abs(change) < 0.005:
        return "unchanged"
    return f"{change:+.0%}" if change < 2.0 else f"{change + 1.0:.1f} times"


def scalars_of(run: Run, rules: RuleSet, most: int) -> tuple[str, ...]:
    """Keys of a run's scalars: those with a name in the rules first, then the others as they were logged."""
    aliases = rules.aliases()
    keys = [
        key for key, column in run.table.signals.items() if not _is_statistic(run, key) and np.isfinite(column).any()
    ]
    there = dict.fromkeys(keys, 0.0)
    known = [key for name in _FIRST if (key := aliases.find(name, there)) is not None]
    known += [key for name in aliases.known() if (key := aliases.find(name, there)) is not None]
    moving = [key for key in keys if np.nanmin(run.table.signals[key]) < np.nanmax(run.table.signals[key])]
    return tuple(dict.fromkeys([*known, *moving]))[:most]


_FIRST = ("reward", "evaluation", "loss", "kl", "entropy", "grad_norm", "length")


def _is_statistic(run: Run, key: str) -> bool:
    """Of a slice: by its name, or by what stands beside it (statistics on request)."""
    from pyrlstats.monitor.rules_names import split_key

    slice_key = key.rpartition("/")[0]
    beside = slice_key and all(f"{slice_key}/{count}" in run.table.signals for count in ("n_tokens", "n_finite"))
    return bool(beside) or split_key(key) is not None or key.endswith("n_out_of_range")


def span(steps: NDArray[np.int64]) -> str:
    """How many steps, and from where to where."""
    if not len(steps):
        return "no steps"
    return f"{len(steps):,} steps ({steps[0]:,} to {steps[-1]:,})" if len(steps) > 1 else f"1 step ({steps[0]:,})"


def counted(alerts: Sequence[Alert]) -> str:
    """How many alerts of each level, the gravest first."""
    numbers = {level: sum(alert.level == level for alert in alerts) for level in reversed(LEVELS)}
    return ", ".join(f"{number} {level}" for level, number in numbers.items() if number)


def moment(seconds: float) -> str:
    """A time as people write it, in UTC."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "-"
