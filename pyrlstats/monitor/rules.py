"""Rules as data: what they may say, and reading them from TOML or YAML.

A bad rule is an error when it is read, with file, rule and field; nothing is dropped. What the fields mean is in
``docs/watch.md``; how they are evaluated, in :mod:`pyrlstats.monitor.rules_measures`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pyrlstats.monitor.alerts import Level, Link
from pyrlstats.monitor.history import LONGEST
from pyrlstats.monitor.rules_names import COMPARED, DERIVED, Aliases, is_statistic, nearest, statistic_hint

try:
    from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
except ModuleNotFoundError as error:
    raise ImportError("rules need pydantic: pip install 'pyrlstats[watch]'") from error

Take = Literal["last", "mean", "median", "min", "max", "p95", "std"]
Measure = Literal[
    "value", "ratio", "difference", "robust_z", "slope", "growth", "doubling_steps", "trend", "change", "nonfinite"
]
_OF_BASELINE = ("ratio", "difference", "robust_z")
_OF_WINDOW = ("slope", "growth", "doubling_steps", "trend", "change")

Steps = Annotated[int, Field(ge=1, le=100_000, strict=True)]
Name = Annotated[str, Field(min_length=1, strict=True)]


class RuleError(ValueError):
    """Rules that cannot be used: every complaint names file, rule and field, and says what to write."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Condition(_Strict):
    """One comparison of one signal with one number."""

    statistic: Name | None = None
    scalar: Name | None = None
    slice: Name | None = None
    divided_by_slice: Name | None = None
    minus_slice: Name | None = None
    divided_by_scalar: Name | None = None
    minus_scalar: Name | None = None
    take: Take = "last"
    measure: Measure = "value"
    window: Annotated[int, Field(ge=4, le=1000, strict=True)] | None = None
    above: FiniteFloat | None = None
    below: FiniteFloat | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Condition:
        if (self.statistic is None) == (self.scalar is None):
            raise ValueError("needs either statistic (of a slice) or scalar (that the trainer logs), not both")
        if self.statistic is not None and not is_statistic(self.statistic):
            raise _At("statistic", f"no statistic {self.statistic!r}{statistic_hint(self.statistic)}")
        if (self.above is None) == (self.below is None):
            raise ValueError("needs either above or below, one of them: for a range write two conditions")
        for field in ("slice", "divided_by_slice", "minus_slice"):
            if self.scalar is not None and getattr(self, field) is not None:
                raise _At(field, "a scalar has no slices: use it with statistic, or leave it out")
        second = [name for name in _SECOND if getattr(self, name) is not None]
        if len(second) > 1:
            raise ValueError(f"takes at most one of {', '.join(_SECOND)}, got {' and '.join(second)}")
        windowed = self.measure in _OF_WINDOW or self.take != "last"
        if windowed and self.window is None:
            what = f"measure = {self.measure!r}" if self.measure in _OF_WINDOW else f"take = {self.take!r}"
            raise _At("window", f"{what} needs a window, in steps: window = 50")
        if not windowed and self.window is not None:
            raise _At("window", "has no effect here: give take or a rate such as measure = 'slope', or leave it out")
        if self.measure == "robust_z" and second:
            raise _At("measure", f"robust_z is of one signal: use ratio or difference with {second[0]}")
        if self.measure == "robust_z" and self.statistic in DERIVED:
            raise _At("measure", f"robust_z is of one signal, {self.statistic} is made from two: use difference")
        if self.measure in _OF_BASELINE and self.statistic in COMPARED:
            raise _At("measure", f"{self.statistic} compares with the baseline already: use its value")
        if self.measure in _OF_WINDOW and self.take != "last":
            raise _At("take", f"measure = {self.measure!r} already looks at the whole window: leave take out")
        return self

    @property
    def needs_baseline(self) -> bool:
        """Whether it compares with the frozen baseline."""
        return self.measure in _OF_BASELINE

    @property
    def threshold(self) -> float:
        """The number of ``above`` or ``below``."""
        return self.above if self.above is not None else self.below or 0.0

    @property
    def subtracts(self) -> bool:
        """Whether its second signal is subtracted; else, where there is one, it divides."""
        return self.minus_slice is not None or self.minus_scalar is not None

    @property
    def needs_window(self) -> bool:
        """Whether it is a rate over the window."""
        return self.measure in _OF_WINDOW

    def describe(self) -> str:
        """The condition in words."""
        text = self.statistic or self.scalar or ""
        if self.slice is not None:
            text = f"{self.slice}/{text}"
        if self.take != "last":
            text = f"{self.take} over {self.window} of {text}"
        other = self.divided_by_slice or self.divided_by_scalar
        if other is not None:
            text = f"{text} / {other}"
        other = self.minus_slice or self.minus_scalar
        if other is not None:
            text = f"{text} - {other}"
        text = _MEASURES[self.measure].format(text, window=self.window)
        return f"{text} > {self.above:g}" if self.above is not None else f"{text} < {self.below:g}"


_SECOND = ("divided_by_slice", "minus_slice", "divided_by_scalar", "minus_scalar")
_MEASURES: dict[str, str] = {
    "value": "{}",
    "ratio": "{} / its baseline",
    "difference": "{} - its baseline",
    "robust_z": "robust z of {}",
    "slope": "slope a step over {window} of {}",
    "growth": "relative growth a step over {window} of {}",
    "doubling_steps": "doubling steps over {window} of {}",
    "change": "relative change over {window} of {}",
    "trend": "trend over {window} of {}",
    "nonfinite": "non-finite {}",
}


class Rule(_Strict):
    """Conditions that all hold for some observations in a row, and what to tell whoever is woken by them."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", strict=True)]
    level: Level
    link: Link
    title: Name
    meaning: str = ""
    look_at: str = ""
    try_next: str = ""
    slices: Annotated[list[Name], Field(min_length=1)] | None = None
    when: Annotated[list[Condition], Field(min_length=1)]
    for_steps: Steps = 1
    cool_down: Steps = 20
    after_step: Annotated[int, Field(ge=0, strict=True)] = 0
    min_tokens: Annotated[int, Field(ge=0, strict=True)] = 0

    @model_validator(mode="after")
    def _slices_fit(self) -> Rule:
        open_ones = [condition for condition in self.when if condition.statistic is not None and not condition.slice]
        if open_ones and self.slices is None:
            raise _At("slices", f"{open_ones[0].statistic} is of a slice: slices = ['*'] takes all, ['post_*'] some")
        if not open_ones and self.slices is not None:
            raise _At("slices", "has no effect: no condition reads a statistic of the rule's slices; leave it out")
        if self.min_tokens and self.slices is None:
            raise _At("min_tokens", "has no effect without slices: leave it out")
        if self.depth > LONGEST:
            raise _At(
                "for_steps",
                f"{self.for_steps} with a window of {self.widest} looks back {self.depth} observations, "
                f"{LONGEST} are kept at most: make it {LONGEST + 1 - self.widest} or less",
            )
        return self

    @property
    def widest(self) -> int:
        """The widest window of its conditions, in observations; 1 without one."""
        return max(condition.window or 1 for condition in self.when)

    @property
    def depth(self) -> int:
        """Observations of a signal that it looks back at most."""
        return self.widest + self.for_steps - 1

    def describe(self) -> str:
        """What it fires on, in words."""
        text = " and ".join(condition.describe() for condition in self.when)
        if self.for_steps > 1:
            text += f", {self.for_steps} times in a row"
        if self.min_tokens:
            text += f", with {self.min_tokens:,} tokens or more"
        return text


class Signal(_Strict):
    """A scalar and the names trainers give it."""

    meaning: str = ""
    names: list[Name] = []


class _File(_Strict):
    version: Literal[1] = 1
    rules: list[Rule] = []
    signals: dict[str, Signal] = {}
    constants: dict[str, FiniteFloat] = {}
    disable: list[Name] = []


@dataclass(frozen=True)
class RuleSet:
    """Rules that fit together, and what they need.

    Attributes:
        rules: with distinct names.
        signals: canonical scalar names and their aliases.
        constants: values of scalars that the run does not log, such as ``kl_target``.
        own: names of the rules that came from files.
    """

    rules: tuple[Rule, ...]
    signals: Mapping[str, Signal]
    constants: Mapping[str, float]
    own: frozenset[str] = frozenset()

    def aliases(self) -> Aliases:
        """Finds a scalar under the names trainers use."""
        return Aliases({name: signal.names for name, signal in self.signals.items()})


class _At(ValueError):
    """A complaint about one field, raised where only the whole is known."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def builtin_rules() -> RuleSet:
    """The rules that come with pyrlstats."""
    return load_rules()


def load_rules(*paths: str | Path, builtin: bool = True) -> RuleSet:
    """Read rules from files, later ones over earlier ones.

    Args:
        paths: ``.toml`` or, with PyYAML, ``.yaml`` and ``.yml``. A rule of the name of an earlier file's, or of a
            built-in, takes its place; ``disable`` names, or globs, take earlier rules out.
        builtin: start from the rules that come with pyrlstats.

    Raises:
        RuleError: anything that cannot be used, all complaints at once; each names file, rule and field.
        ImportError: a YAML file without PyYAML, or tomli missing on Python 3.10.
    """
    complaints: list[str] = []
    documents: list[tuple[str, _File]] = []
    if builtin:
        folder = files("pyrlstats.monitor").joinpath("builtin")
        for entry in sorted(folder.iterdir(), key=lambda each: each.name):
            if entry.name.endswith(".toml"):
                documents.append((entry.name, _validate(entry.name, _parse_toml(entry.name, entry.read_bytes()))))
    shipped = len(documents)
    for path in paths:
        try:
            documents.append((str(path), _validate(str(path), _read(Path(path)))))
        except RuleError as error:
            complaints.append(str(error))
    rules: dict[str, Rule] = {}
    signals: dict[str, Signal] = {}
    constants: dict[str, float] = {}
    for where, document in documents:
        for pattern in document.disable:
            gone = [name for name in rules if fnmatchcase(name, pattern)]
            if not gone:
                complaints.append(f"{where}: disable: no earlier rule is {pattern!r}{nearest(pattern, rules)}")
            for name in gone:
                del rules[name]
        names = [rule.name for rule in document.rules]
        for name in sorted({name for name in names if names.count(name) > 1}):
            complaints.append(f"{where}: rule {name!r}: name: there are {names.count(name)} of this name; rename one")
        rules.update((rule.name, rule) for rule in document.rules)
        for name, signal in document.signals.items():
            before = signals.get(name, Signal())
            signals[name] = Signal(meaning=signal.meaning or before.meaning, names=[*signal.names, *before.names])
        constants.update(document.constants)
    if complaints:
        raise RuleError("\n".join(complaints))
    own = frozenset(rule.name for _, document in documents[shipped:] for rule in document.rules)
    return RuleSet(tuple(rules.values()), signals, constants, own & frozenset(rules))


def _read(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RuleError(f"{path}: cannot be read: {error.strerror}") from error
    if path.suffix == ".toml":
        return _parse_toml(str(path), data)
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml(str(path), data)
    raise RuleError(f"{path}: rules are .toml, .yaml or .yml files: rename it")


def _parse_toml(where: str, data: bytes) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError as error:
            raise ImportError("rules in TOML need tomli on Python 3.10: pip install 'pyrlstats[watch]'") from error
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuleError(f"{where}: not TOML: {error}") from error


def _parse_yaml(where: str, data: bytes) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ImportError(f"{where} needs PyYAML: pip install pyyaml, or write it as TOML") from error
    try:
        return yaml.safe_load(data) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RuleError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


def _validate(where: str, document: Any) -> _File:
    if not isinstance(document, dict):
        raise RuleError(f"{where}: a file of rules is a table with rules, got {type(document).__name__}")
    try:
        return _File.model_validate(document)
    except ValidationError as error:
        raise RuleError("\n".join(_complaints(where, document, error.errors()))) from None


def _complaints(where: str, document: Mapping[str, Any], errors: Iterable[Any]) -> list[str]:
    lines = []
    for error in errors:
        place: list[Any] = list(error["loc"])
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, _At):
            place.append(cause.field)
        rule = ""
        if len(place) > 1 and place[0] == "rules":
            rule, place = f"rule {_name_of(document, place[1])}: ", place[2:]
        lines.append(f"{where}: {rule}{_path(place)}{_message(error, cause, place)}")
    return lines


def _name_of(document: Mapping[str, Any], index: Any) -> str:
    try:
        name = document["rules"][index]["name"]
    except (LookupError, TypeError):
        name = None
    return repr(name) if isinstance(name, str) else f"number {index + 1}"


def _path(place: Sequence[Any]) -> str:
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return f"{text}: " if text else ""


def _message(error: Mapping[str, Any], cause: object, place: Sequence[Any]) -> str:
    if isinstance(cause, ValueError):
        return str(cause)
    if error["type"] == "extra_forbidden":
        known = (*Rule.model_fields, *Condition.model_fields, *_File.model_fields)
        return f"no such field{nearest(str(place[-1]), known)}"
    if error["type"] == "missing":
        return "is missing"
    message = str(error["msg"])
    got = error.get("input")
    return f"{message}, got {got!r}" if isinstance(got, (str, int, float, bool, type(None))) else message
