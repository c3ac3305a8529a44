"""What several statistics of one state have in common is evaluated once: a memo for the functions of a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from pyrlstats.state import Array, State

Result = TypeVar("Result")

_KEPT = ("buffer", "layout", "rows", "counts", "histogram", "sums", "maxima")


class Memo:
    """Stands for a state that no longer changes, and keeps the columns and the shared results read from it.

    Functions of a state take it in the state's place; everything else is the state's own.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.kept: dict[Any, Any] = {}  # columns by name, results by function

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        if name in _KEPT:
            setattr(self, name, value)  # found at once from now on
        return value

    def _column(self, read: Callable[[Any, str], Array], name: str) -> Array:
        key = read, name
        if key not in self.kept:
            self.kept[key] = read(self, name)
        return self.kept[key]

    def count(self, name: str) -> Array:
        return self._column(State.count, name)

    def sum(self, name: str) -> Array:
        return self._column(State.sum, name)

    def maximum(self, name: str) -> Array:
        return self._column(State.maximum, name)

    def group(self, name: str) -> Memo:
        if name not in self.kept:
            self.kept[name] = Memo(self._state.group(name))
        group: Memo = self.kept[name]
        return group


def shared(function: Callable[[State], Result]) -> Callable[[State], Result]:
    """A function of a state that others build on: of a :class:`Memo` it is evaluated once."""

    @wraps(function)
    def once(state: Any) -> Result:
        if type(state) is not Memo:
            return function(state)
        kept: dict[Any, Any] = state.kept
        if function not in kept:
            kept[function] = function(state)  # type: ignore[arg-type]
        result: Result = kept[function]
        return result

    return once
