"""What the monitor says, and how rules are asked: :class:`Alert`, :class:`Rules`, :class:`History`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Level = Literal["info", "warning", "stop"]
LEVELS: tuple[Level, ...] = ("info", "warning", "stop")

# the links of the loop that an alert can speak of
Link = Literal[
    "environment",
    "evaluation",
    "reward",
    "policy update",
    "critic",
    "exploration",
    "freshness",
    "numerics",
    "resources",
]


@dataclass(frozen=True)
class Alert:
    """One episode of trouble, told when it begins.

    Attributes:
        step: at which it was noticed.
        name: of the detector or rule, letters, digits, "-" and "_".
        level: "info", "warning", or "stop" (the run should not go on).
        signal: the key of ``to_dict`` or of the scalars that it speaks of, such as "post_tool/kl_k3".
        message: one sentence for people.
        link: the link of the loop it speaks of, one of Link.
        slice: whose signal it is; None for scalars.
        evidence: figures behind it, JSON values only.
    """

    step: int
    name: str
    level: Level
    signal: str
    message: str
    link: str
    slice: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes it the same trouble at the next step: name and signal."""
        return f"{self.name}:{self.signal}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values; numbers that are not finite become the strings "nan", "inf" and "-inf"."""
        return {name: plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Alert:
        """What :meth:`to_json` gave.

        Raises:
            TypeError: other fields.
        """
        return cls(**record)


def plain(value: Any) -> Any:
    """A value as strict JSON: NumPy numbers and arrays as Python's, numbers that are not finite as strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class History(Protocol):
    """The last steps of every signal, as rules see them. The current step is the last one."""

    def last(self, signal: str, n: int) -> NDArray[np.float64]:
        """The signal at the last n observed steps, oldest first, (m,) with m <= n.

        Fewer where the run is younger or the memory shorter; NaN at steps at which it was absent; empty if it never
        came.
        """
        ...

    def steps(self, n: int) -> NDArray[np.int64]:
        """The numbers of those steps, (m,): of the same length as what :meth:`last` gives."""
        ...

    def baseline(self, signal: str) -> float | None:
        """Median of the signal over the frozen warm-up; None before it ends, and where it was never finite."""
        ...

    def spread(self, signal: str) -> float | None:
        """Robust standard deviation of the signal over the frozen warm-up; None where there is no baseline."""
        ...


class Rules(Protocol):
    """Rules as the monitor asks them, once a step.

    A rule holds no state of its own: whether it holds is decided from the signals and the history alone, so that
    a resumed run decides alike. ``evaluate`` returns an alert for every rule that holds *now*, at every step at which
    it holds; the monitor tells people at the first of them only, and again after the trouble was away for a while.

    Rules that look back more than 512 observations of a signal say so by an attribute ``depth``, at most 4,096. A
    method ``cool_down(alert)`` gives the steps, by their numbers, after which trouble that went away may be told again;
    else it is 20 observed steps.
    """

    def evaluate(self, step: int, signals: Mapping[str, float], history: History) -> Sequence[Alert]:
        """Alerts of the rules that hold at this step.

        Args:
            step: number of the step.
            signals: the flat mapping of ``SliceStats.to_dict`` and the trainer's scalars by their names.
            history: the steps up to this one.
        """
        ...
