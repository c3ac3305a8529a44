"""Rules asked step by step, as the monitor asks them: pure functions of the signals and their history."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.monitor.alerts import Alert, History
from pyrlstats.monitor.history import DEPTH, LONGEST
from pyrlstats.monitor.monitor import _rank
from pyrlstats.monitor.rules import Condition, Rule, RuleSet, load_rules
from pyrlstats.monitor.rules_measures import Floats, at_end, holds, measured
from pyrlstats.monitor.rules_names import DERIVED, is_statistic, nearest, split_key

NOTICE_AFTER = 200  # steps after which a signal that never came is said to be missing


_log = logging.getLogger("pyrlstats.monitor")


class RuleBook:
    """Rules that the monitor asks once a step: ``Monitor(folder, RuleBook.load("my_rules.toml"))``.

    The pace of a rule is that of its rarest signal: an evaluation logged every 100 steps counts once in 100 steps, and
    between two of them the rule holds if it held at the last. What is missing, or NaN, is counted; it neither makes a
    rule hold nor clears it.

    After 200 steps it logs once, by the logger "pyrlstats.monitor" of rank 0, which rules have nothing to look at, and
    which slices have too few tokens for some.

    Args:
        rules: from :func:`pyrlstats.monitor.rules.load_rules`.

    Attributes:
        missing: rule name -> signal -> number of steps at which it had never come.
    """

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self.missing: dict[str, Counter[str]] = {}
        self._names = Names(rules)
        self._known: tuple[tuple[str, ...], list[Bound]] | None = None
        self._seen: set[str] = set()
        self._most: dict[str, float] = {}  # tokens that a slice had at a step
        self._steps = 0
        self._told = False
        self._presence = Presence(max(DEPTH, self.depth))
        self._cool_downs = {rule.name: rule.cool_down for rule in rules.rules}

    @property
    def depth(self) -> int:
        """Observations of a signal that the rules look back at most."""
        return max((rule.depth for rule in self.rules.rules), default=1)

    @classmethod
    def load(cls, *paths: str | Path, builtin: bool = True) -> RuleBook:
        """The built-in rules and those of files; raises as :func:`pyrlstats.monitor.rules.load_rules` does."""
        return cls(load_rules(*paths, builtin=builtin))

    def evaluate(self, step: int, signals: Mapping[str, float], history: History) -> list[Alert]:
        """An alert for each rule that holds at this step.

        Args:
            step: number of the step.
            signals: ``slice/statistic`` and the trainer's scalars.
            history: the steps up to this one.
        """
        self._steps += 1
        new = [key for key in signals if key not in self._seen]
        if new:
            self._seen.update(new)
            self._known = None
        if self._known is None:
            keys = tuple(self._seen)
            self._known = keys, self._names.bind(keys)
        self._presence.add(step, signals, self._known[1])
        alerts = []
        for bound in self._known[1]:
            if bound.absent:
                self.missing.setdefault(bound.rule.name, Counter()).update(bound.absent)
                continue
            tokens = bound.tokens.key if bound.tokens is not None else None
            if tokens is not None and not math.isnan(signals.get(tokens, math.nan)):
                self._most[tokens] = max(self._most.get(tokens, 0.0), signals[tokens])
            evidence = bound.held(step, history, self._presence)
            if evidence is not None:
                alerts.append(bound.alert(step, evidence))
        if self._steps == NOTICE_AFTER and _rank() == 0:
            own = any(name in self.rules.own for name in self.missing)
            for notice in self.notices():
                _log.log(logging.WARNING if own else logging.INFO, "%s", notice)
        return alerts

    def cool_down(self, alert: Alert) -> int:
        """Steps after which what one of these rules told may be told again."""
        return self._cool_downs[alert.name]

    def notices(self, *, at_end: bool = False) -> list[str]:
        """What could not be evaluated, in words: nothing until it is sure, and then only once.

        Args:
            at_end: the run is over, so be sure now.
        """
        if self._told or not self._steps or (self._steps < NOTICE_AFTER and not at_end):
            return []
        self._told = True
        bounds = self._known[1] if self._known else []
        return self._names.unheard(bounds, self._seen) + too_few(bounds, self._most)


def signals_needed(rules: RuleSet) -> tuple[str, ...]:
    """The statistics that rules read, each once, in alphabetical order."""
    return tuple(sorted({each.statistic for rule in rules.rules for each in rule.when if each.statistic is not None}))


class Presence:
    """The last steps at which a signal was there, NaN or not: a history cannot tell a NaN from an absent signal.

    Args:
        depth: steps kept of each signal, no more than the history keeps, which would be taken for NaN.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: dict[str, deque[int]] = {}

    def add(self, step: int, signals: Mapping[str, float], bounds: Sequence[Bound]) -> None:
        """One step. After a restart it begins anew: a row of NaN is noticed that much later."""
        for bound in bounds:
            for signal in bound.signals:
                key = signal.first.key
                if signal.condition.measure == "nonfinite" and key is not None and key in signals:
                    kept = self._steps.setdefault(key, deque(maxlen=self._depth))
                    while kept and kept[-1] >= step:  # training went back
                        kept.pop()
                    kept.append(step)

    def of(self, key: str | None, steps: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Where it was there; None for signals that are not followed."""
        kept = self._steps.get(key or "")
        return None if kept is None else np.isin(steps, list(kept))


@dataclass(frozen=True)
class Source:
    """Where a condition's signal comes from: keys of the signals, or a constant."""

    key: str | None
    less: str | None = None  # subtracted from it
    over: str | None = None  # divides what is left
    constant: float = math.nan

    def last(self, history: History, n: int) -> Floats:
        """The last n steps, oldest first; NaN where it was absent."""
        if self.key is None:
            return np.full(len(history.steps(n)), self.constant)
        values = history.last(self.key, n)
        with np.errstate(all="ignore"):
            if self.less is not None:
                values = values - _fit(history.last(self.less, n), len(values))
            if self.over is not None:
                values = values / _fit(history.last(self.over, n), len(values))
        return values

    def baseline(self, history: History) -> float | None:
        """The frozen median; of what is computed from several signals, computed from their medians."""
        if self.key is None:
            return self.constant
        value = history.baseline(self.key)
        for other, sign in ((self.less, -1), (self.over, 1)):
            if value is None or other is None:
                continue
            second = history.baseline(other)
            if second is None:
                return None
            value = value - second if sign < 0 else value / second if second else None
        return value


def _fit(values: Floats, size: int) -> Floats:
    """The last ``size``; what is not remembered is NaN."""
    if len(values) >= size:
        return values[len(values) - size :]
    return np.concatenate((np.full(size - len(values), math.nan), values))


@dataclass(frozen=True)
class Signal:
    """A condition with its sources: the first, and a second that divides it or is subtracted."""

    condition: Condition
    name: str
    first: Source
    second: Source | None

    def last(self, history: History, n: int) -> Floats:
        """The last n steps, oldest first; NaN where it was absent."""
        values = self.first.last(history, n)
        if self.second is None:
            return values
        other = _fit(self.second.last(history, n), len(values))
        with np.errstate(all="ignore"):
            if self.condition.subtracts:
                return values - other
            return np.where(other != 0.0, values / other, math.nan)

    def baseline(self, history: History) -> float | None:
        """The frozen median, or what the medians of the two sources make."""
        value = self.first.baseline(history)
        if value is None or self.second is None:
            return value
        other = self.second.baseline(history)
        if other is None:
            return None
        if self.condition.subtracts:
            return value - other
        return value / other if other else None

    def frozen(self, history: History) -> tuple[float | None, float | None]:
        """Median and spread over the warm-up, if the condition asks for them."""
        if not self.condition.needs_baseline:
            return None, None
        return self.baseline(history), self._spread(history)

    def _spread(self, history: History) -> float | None:
        """The robust standard deviation over the warm-up, where the condition asks for it."""
        if self.condition.measure != "robust_z" or self.second is not None or self.first.key is None:
            return None
        return history.spread(self.first.key)


@dataclass(frozen=True)
class Bound:
    """One rule on one slice, or on scalars alone, with the keys it reads.

    Attributes:
        rule: the rule.
        slice: None of a rule about scalars.
        signals: one a condition.
        tokens: key of the slice's finite tokens, where the rule asks for a least number.
        absent: signals that the run does not have; the rule cannot be evaluated then.
    """

    rule: Rule
    slice: str | None
    signals: tuple[Signal, ...]
    tokens: Source | None
    absent: tuple[str, ...]

    def held(self, step: int, history: History, presence: Presence) -> list[dict[str, Any]] | None:
        """The evidence, if the rule holds at the last observation of its rarest signal, as often as it asks for."""
        if step < self.rule.after_step:
            return None
        if self._surely_not(history):
            return None
        found = self._tail(1, history, presence)
        if found is not None and self.rule.for_steps > 1:
            found = self._tail(self.rule.for_steps, history, presence)
        return found

    def _surely_not(self, history: History) -> bool:
        """Whether all signals are there, and one of them does not hold: what is so at nearly every step, in short."""
        below = False
        for signal in self.signals:
            condition = signal.condition
            size = condition.window or 1
            values = signal.last(history, size)
            if condition.measure == "nonfinite" or len(values) < size or np.isnan(values).any():
                return False
            if self.tokens is not None and not (self.tokens.last(history, size) >= self.rule.min_tokens).all():
                return False
            if not below:
                below = not holds(condition, at_end(condition, values, history.steps(size), signal.frozen(history)))
        return below

    def _tail(self, times: int, history: History, presence: Presence) -> list[dict[str, Any]] | None:
        """The evidence, if all conditions hold at the last ``times`` observations."""
        looked = self._look(self.rule.widest + times - 1, times, history, presence)
        if looked is None:  # rare signals: look back as far as the history goes
            looked = self._look(LONGEST, times, history, presence)
        if looked is None or not looked.held[-times:].all():
            return None
        return looked.evidence(len(looked.held) - 1)

    def _look(self, n: int, times: int, history: History, presence: Presence) -> Looked | None:
        """None where the last n steps hold too few observations to say."""
        steps = history.steps(n)
        columns = [_fit(signal.last(history, n), len(steps)) for signal in self.signals]
        looked = look(
            self.rule,
            self.signals,
            steps,
            columns,
            [
                observed(signal.condition, column, presence.of(signal.first.key, steps))
                for signal, column in zip(self.signals, columns, strict=True)
            ],
            [signal.frozen(history) for signal in self.signals],
            None if self.tokens is None else _fit(self.tokens.last(history, n), len(steps)),
        )
        if len(looked.held) < times:
            return None
        enough = all(
            count[-times] >= (signal.condition.window or 1)
            for signal, count in zip(self.signals, looked.counts, strict=True)
        )
        return looked if enough or len(steps) < n or n >= LONGEST else None

    def alert(self, step: int, evidence: list[dict[str, Any]]) -> Alert:
        """What is told."""
        return Alert(
            step=step,
            name=self.rule.name,
            level=self.rule.level,
            signal=self.signals[0].name,
            message=message(self.rule, self.slice, evidence),
            link=self.rule.link,
            slice=self.slice,
            evidence={
                "rule": self.rule.describe(),
                "conditions": evidence,
                "meaning": self.rule.meaning,
                "look_at": self.rule.look_at,
                "try_next": self.rule.try_next,
            },
        )


@dataclass(frozen=True)
class Looked:
    """Conditions of a rule at the observations of its rarest signal.

    Attributes:
        signals: one a condition.
        at: index of the step of each observation, (k,).
        held: whether all conditions held, (k,).
        values, measures: of each condition, (k,) each.
        baselines: of each condition.
        counts: of each signal, how many observations it had up to then, (k,) each.
    """

    signals: Sequence[Signal]
    at: NDArray[Any]
    held: NDArray[np.bool_]
    values: list[Floats]
    measures: list[Floats]
    baselines: list[float | None]
    counts: list[NDArray[np.int64]]

    def evidence(self, index: int) -> list[dict[str, Any]]:
        """Figures behind one observation, one entry a condition."""
        return [
            {
                "signal": signal.name,
                "value": float(values[index]),
                "measure": signal.condition.measure,
                "measured": float(measures[index]),
                "baseline": baseline if signal.condition.needs_baseline else None,
                "above": signal.condition.above,
                "below": signal.condition.below,
            }
            for signal, values, measures, baseline in zip(
                self.signals, self.values, self.measures, self.baselines, strict=True
            )
        ]


def look(
    rule: Rule,
    signals: Sequence[Signal],
    steps: NDArray[Any],
    columns: Sequence[Floats],
    there: Sequence[NDArray[np.bool_]],
    baselines: Sequence[tuple[float | None, float | None]],
    tokens: Floats | None,
) -> Looked:
    """A rule's conditions at every observation of its rarest signal.

    Args:
        rule, signals: what is looked at.
        steps: (n,) steps, oldest first.
        columns: of each signal, (n,).
        there: of each signal, (n,): where it was observed.
        baselines: median and spread of each signal.
        tokens: (n,) finite tokens of the slice, for ``min_tokens``.
    """
    enough = None if tokens is None else ~(tokens < rule.min_tokens)
    found = [np.flatnonzero(each if enough is None else each & enough) for each in there]
    rarest = min(found, key=len)
    values, measures, counts = [], [], []
    held = np.ones(len(rarest), bool)
    for signal, column, places, (median, spread) in zip(signals, columns, found, baselines, strict=True):
        observed = column[places]
        each = measured(signal.condition, observed, steps[places], median, spread)
        latest = np.searchsorted(places, rarest, side="right") - 1  # the last one up to each of the rarest
        values.append(_pick(observed, latest))
        measures.append(_pick(each, latest))
        counts.append(latest + 1)
        held &= holds(signal.condition, measures[-1])
    return Looked(signals, rarest, held, values, measures, [each[0] for each in baselines], counts)


def _pick(values: Floats, index: NDArray[np.int64]) -> Floats:
    """The values at index, NaN where it is -1."""
    if not len(values):
        return np.full(len(index), math.nan)
    return np.where(index >= 0, values[np.maximum(index, 0)], math.nan)


def observed(condition: Condition, column: Floats, present: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Where a signal was observed: NaN says nothing, except about whether it is finite, if it was there at all."""
    if condition.measure == "nonfinite" and present is not None:
        return present
    return np.asarray(column == column)


class Names:
    """Finds the keys that rules read among those that a run has."""

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._aliases = rules.aliases()

    def bind(self, keys: Sequence[str]) -> list[Bound]:
        """Every rule on every slice it matches; a rule that matches none appears once, with what is absent."""
        statistics: dict[str, dict[str, str]] = {}
        scalars: dict[str, float] = {}
        for key in keys:
            place = split_key(key)
            if place is None:
                scalars[key] = 0.0
            else:
                statistics.setdefault(place[0], {}).setdefault(place[1], key)
        bounds = []
        for rule in self._rules.rules:
            slices = _slices_of(rule, sorted(statistics))
            if not slices:
                absent = [each.statistic for each in rule.when if each.statistic is not None and each.slice is None]
                like = " or ".join(rule.slices or ())
                bounds.append(Bound(rule, None, (), None, tuple(f"{like}/{name}" for name in dict.fromkeys(absent))))
            for name in slices:
                bounds.append(self._bind(rule, name, statistics, scalars))
        return bounds

    def _bind(
        self, rule: Rule, name: str | None, statistics: Mapping[str, Mapping[str, str]], scalars: Mapping[str, float]
    ) -> Bound:
        absent: list[str] = []

        def statistic(which: str, of: str) -> Source:
            there = statistics.get(of, {})
            if which in DERIVED and which not in there:
                tokens, finite = there.get("n_tokens"), there.get("n_finite")
                if tokens is not None and finite is not None:
                    return Source(tokens, less=finite, over=tokens if which == "nonfinite_fraction" else None)
            if which not in there:
                absent.append(f"{of}/{which}")
                return Source(None)
            return Source(there[which])

        def scalar(which: str) -> Source:
            key = self._aliases.find(which, scalars)
            if key is not None:
                return Source(key)
            if which in self._rules.constants:
                return Source(None, constant=self._rules.constants[which])
            absent.append(which)
            return Source(None)

        signals = []
        for condition in rule.when:
            other_slice = condition.divided_by_slice or condition.minus_slice
            other_scalar = condition.divided_by_scalar or condition.minus_scalar
            if condition.scalar is not None:
                first = scalar(condition.scalar)
            else:
                first = statistic(condition.statistic or "", condition.slice or name or "")
            second = None
            if other_slice is not None:
                second = statistic(condition.statistic or "", other_slice)
            elif other_scalar is not None:
                second = scalar(other_scalar)
            signals.append(Signal(condition, signal_name(condition, name), first, second))
        tokens = None
        if rule.min_tokens and name is not None:
            key = statistics.get(name, {}).get("n_finite")
            tokens = None if key is None else Source(key)
        return Bound(rule, name, tuple(signals), tokens, tuple(absent))

    def unheard(self, bounds: Sequence[Bound], keys: set[str]) -> list[str]:
        """One sentence about the rules that have nothing to look at; none where there are none."""
        able = {bound.rule.name for bound in bounds if not bound.absent}
        silent = [bound for bound in bounds if bound.rule.name not in able]
        if not silent:
            return []
        names = sorted({bound.rule.name for bound in silent})
        scalars = [key for key in keys if split_key(key) is None]
        signals = dict.fromkeys(
            signal if signal in self._aliases.known() else _of_all(signal) or f"{signal}{nearest(signal, scalars)}"
            for signal in sorted({signal for bound in silent for signal in bound.absent})
        )
        return [
            f"{len(names)} of {len(self._rules.rules)} rules have nothing to look at ({', '.join(names)}): "
            f"this run has no {', '.join(signals)}"
        ]


def too_few(bounds: Sequence[Bound], most: Mapping[str, float]) -> list[str]:
    """One sentence for slices at which the same rules never look, as they never have the tokens these want.

    Args:
        bounds: rules on slices.
        most: key of a slice's finite tokens -> the most it had at a step.
    """
    silent: dict[tuple[str, int], list[str]] = {}
    for bound in bounds:
        key = bound.tokens.key if bound.tokens is not None and not bound.absent else None
        if key is not None and key in most and most[key] < bound.rule.min_tokens:
            silent.setdefault((bound.slice or "", bound.rule.min_tokens), []).append(bound.rule.name)
    alike: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for (name, least), rules in silent.items():
        alike.setdefault((least, tuple(rules)), []).append(name)
    return [
        f"slices with fewer than {least:,} tokens at every step, at which some rules never look: "
        f"{len(slices)} ({', '.join(slices)}; the rules: {', '.join(rules)})"
        for (least, rules), slices in alike.items()
    ]


def _of_all(signal: str) -> str:
    """The statistic of a slice's signal, "" of a scalar: what is missing is missing in every slice."""
    return signal.rsplit("/", 1)[1] if "/" in signal and is_statistic(signal.rsplit("/", 1)[1]) else ""


def _slices_of(rule: Rule, slices: Sequence[str]) -> list[str | None]:
    if rule.slices is None:
        return [None]
    compared = {each for condition in rule.when for each in (condition.divided_by_slice, condition.minus_slice)}
    matching = (name for name in slices if any(fnmatchcase(name, pattern) for pattern in rule.slices))
    return [name for name in matching if name not in compared]


def signal_name(condition: Condition, name: str | None) -> str:
    """What a condition reads, as alerts call it."""
    text = condition.scalar or f"{condition.slice or name}/{condition.statistic}"
    other = condition.divided_by_slice or condition.divided_by_scalar
    if other is not None:
        return f"{text} / {other}"
    other = condition.minus_slice or condition.minus_scalar
    return text if other is None else f"{text} - {other}"


def message(rule: Rule, name: str | None, evidence: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: where, what, and the figures."""
    parts = [_worded(condition, found) for condition, found in zip(rule.when, evidence, strict=True)]
    row = f", {rule.for_steps} times in a row" if rule.for_steps > 1 else ""
    return f"{f'{name}: ' if name else ''}{rule.title}: {'; '.join(parts)}{row}"


def _worded(condition: Condition, found: Mapping[str, Any]) -> str:
    threshold = condition.threshold
    side = "above" if condition.above is not None else "below"
    name, value, figure = found["signal"], found["value"], found["measured"]
    if condition.take != "last":
        name = f"{condition.take} of the last {condition.window} {name}"
    if condition.measure == "nonfinite":
        return f"{name} is {value:g}"
    if condition.measure == "value":
        return f"{name} = {figure:.4g} ({side} {threshold:g})"
    baseline = found["baseline"]
    words = {
        "ratio": f"{figure:.3g} times its baseline",
        "difference": f"{figure:+.3g} from its baseline",
        "robust_z": f"{figure:+.3g} robust deviations from its baseline",
        "slope": f"changing by {figure:+.3g} a step",
        "growth": f"growing by {figure:+.3%} a step",
        "doubling_steps": f"doubling every {figure:.0f} steps",
        "change": f"changed by {figure:+.1%} within {condition.window}",
        "trend": f"trend {figure:+.2f} over {condition.window}",
    }[condition.measure]
    if baseline is not None:
        return f"{name} is {words} {baseline:.4g} ({side} {threshold:g})"
    return f"{name} = {value:.4g}, {words} ({side} {threshold:g})"
