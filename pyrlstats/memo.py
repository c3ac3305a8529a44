"""What several statistics of one state have in common is evaluated once: a memo for the functions of a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

from pyrlstats.state import Array, State

Result = TypeVar("Result")

_COLUMNS = {"_counts": "counts", "_sums": "sums", "_maxima": "maxima"}  # attribute, by row name -> table
_KEPT = {"rows", "counts", "histogram", "sums", "maxima", *_COLUMNS}


class Memo:
    """Stands for a state that no longer changes, and keeps the columns and the shared results read from it.

    Functions of a state take it in the state's place; everything else is the state's own.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.buffer, self.layout = state.buffer, state.layout
        self.kept: dict[Any, Any] = {}  # results by function

    def __getattr__(self, name: str) -> Any:
        if name in _COLUMNS:
            table = _COLUMNS[name]
            value = dict(zip(getattr(self.rows, table), getattr(self._state, table).T, strict=True))
        else:
            value = getattr(self._state, name)
        if name in _KEPT:
            setattr(self, name, value)  # found at once from now on
        return value

    @cached_property
    def _groups(self) -> dict[str, Memo]:
        _, *sections = self._state.sections()
        return {group.name: Memo(section) for group, section in zip(self._state.groups, sections, strict=True)}

    def count(self, name: str) -> Array:
        return self._counts[name]

    def sum(self, name: str) -> Array:
        return self._sums[name]

    def maximum(self, name: str) -> Array:
        return self._maxima[name]

    def n_finite(self) -> Array:
        return type(self._state).n_finite(self)  # type: ignore[arg-type]

    def group(self, name: str) -> Memo:
        return self._groups[name]


def shared(function: Callable[[State], Result]) -> Callable[[State], Result]:
    """A function of a state that others build on: of a :class:`Memo` it is evaluated once."""

    @wraps(function)
    def once(state: Any) -> Result:
        if type(state) is not Memo:
            return function(state)
        result = state.kept.get(function)
        if result is None:
            result = state.kept[function] = function(state)  # type: ignore[arg-type]
        return result

    return once
