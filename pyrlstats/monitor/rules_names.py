"""The names that rules may use: statistics of a slice, and the scalars of trainers under the names each gives them."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pyrlstats.results import percentile_name
from pyrlstats.slice_stats import ABS_QUANTILES, QUANTILES, SCALARS

# of n_tokens and n_finite, beside the statistics that SliceView has
DERIVED = ("n_nonfinite", "nonfinite_fraction")

# against the frozen baseline, from states: where there are only figures, there are none of these
COMPARED = ("tail_mass", "tail_ratio", "tail_to_mean", "ks_to_baseline")

# of the far tail, where tail_shape was asked for it
TAILS = ("pareto_k", "hill", "hill_se", "n_tail", "tail_cutoff")

_QUANTILE = re.compile(r"(abs_)?log_ratio_p(\d{1,3})(?:_(\d+))?")


def quantile_level(statistic: str) -> tuple[bool, float] | None:
    """(of abs(x), q) of a quantile's name such as ``abs_log_ratio_p99_9``; None of other names or q above 1."""
    match = _QUANTILE.fullmatch(statistic)
    if match is None:
        return None
    q = float(f"{match[2]}.{match[3] or 0}e-2")
    return (match[1] is not None, q) if q <= 1.0 else None


def is_statistic(name: str) -> bool:
    """Whether a rule can read a statistic of this name."""
    return name in (*SCALARS, *DERIVED, *COMPARED, *TAILS) or quantile_level(name) is not None


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" for the known name nearest to this one, "" where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def statistic_hint(name: str) -> str:
    """What to write instead of a name that is no statistic."""
    quantiles = [f"log_ratio_{percentile_name(q)}" for q in QUANTILES]
    quantiles += [f"abs_log_ratio_{percentile_name(q)}" for q in ABS_QUANTILES]
    return nearest(name, (*SCALARS, *DERIVED, *COMPARED, *TAILS, *quantiles)) or (
        f"; there are {', '.join((*SCALARS, *DERIVED, *COMPARED, *TAILS))}, "
        "and quantiles like log_ratio_p50 and abs_log_ratio_p99_9"
    )


@functools.lru_cache(maxsize=8192)
def split_key(key: str) -> tuple[str, str] | None:
    """(slice, statistic) of a logged key such as ``rl/post_tool/ess_fraction``; None of a scalar's key."""
    *before, statistic = key.split("/")
    return (before[-1], statistic) if before and before[-1] and is_statistic(statistic) else None


_WORDS = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}


def as_number(value: Any) -> float | None:
    """A logged value as a float: None, and the words "nan" and "inf", are what JSON could not hold.

    None for anything that is no number. Never raises.
    """
    kind = type(value)
    if kind is float:
        return value  # type: ignore[no-any-return]
    if value is None:
        return math.nan
    if kind is int:
        return float(value) if abs(value) < 1 << 1000 else math.inf if value > 0 else -math.inf
    if kind is bool or isinstance(value, (Mapping, list, tuple)):
        return None
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    try:
        return float(value)  # NumPy scalars, 0-d tensors
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


# what trackers put before a trainer's own names
_PREFIXES = ("train/", "training/", "global_train/")


class Aliases:
    """Finds a scalar under whichever name a trainer logs it.

    Args:
        names: canonical name -> the names trainers use, best first; ``*`` and ``?`` match as in file names.
    """

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self._names = {name: (name, *others) for name, others in names.items()}
        self._found: dict[str, str] = {}

    def known(self) -> tuple[str, ...]:
        """The canonical names."""
        return tuple(self._names)

    def names_of(self, name: str) -> tuple[str, ...]:
        """The names under which it is looked for: of a scalar without aliases, itself."""
        return self._names.get(name, (name,))

    def find(self, name: str, scalars: Mapping[str, float]) -> str | None:
        """The key of ``scalars`` that holds the scalar, or None. Once found, a key is kept."""
        key = self._found.get(name)
        if key is not None and key in scalars:
            return key
        key = self._search(name, scalars)
        if key is not None:
            self._found.setdefault(name, key)
        return key

    def _search(self, name: str, scalars: Mapping[str, float]) -> str | None:
        for wanted in self.names_of(name):
            if "*" in wanted or "?" in wanted:
                match = next((key for key in sorted(scalars) if fnmatchcase(key, wanted)), None)
                if match is not None:
                    return match
                continue
            for prefix in ("", *_PREFIXES):
                if prefix + wanted in scalars:
                    return prefix + wanted
        return None
