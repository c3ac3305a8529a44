"""Wrapping methods of one object, and putting back exactly what was there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()
_MARK = "_pyrlstats_hook"


class Hooks:
    """The wrappers on one object. They live in its instance dictionary; its class is not touched."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._wrapped: dict[str, tuple[Any, Any]] = {}  # method -> what the instance dictionary held, the wrapper
        self._active = True
        self._others: list[Hooks] = []

    def on(self, target: Any) -> Hooks:
        """Hooks on another object, which :meth:`restore` takes off too."""
        self._others.append(Hooks(target))
        return self._others[-1]

    def wrap(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``target.name`` by ``make(bound method)``."""
        original = getattr(self.target, name)
        replacement = make(original)

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            # after restore() a wrapper that someone else has wrapped in turn only passes the call on
            return (replacement if self._active else original)(*args, **kwargs)

        setattr(hook, _MARK, True)
        self._wrapped[name] = vars(self.target).get(name, _ABSENT), hook
        setattr(self.target, name, hook)

    def restore(self) -> list[str]:
        """Take the wrappers off. Returns the methods that someone else has wrapped since: they stay as they are."""
        self._active = False
        buried = []
        for name, (before, hook) in self._wrapped.items():
            if vars(self.target).get(name) is not hook:
                buried.append(name)
            elif before is _ABSENT:
                delattr(self.target, name)
            else:
                setattr(self.target, name, before)
        self._wrapped.clear()
        return buried + [name for other in self._others for name in other.restore()]


def is_hooked(target: Any) -> bool:
    return any(hasattr(value, _MARK) for value in vars(target).values())


class FirstResult:
    """The first value offered while a block is open."""

    def __init__(self) -> None:
        self.value: Any = None
        self._open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.value, self._open = None, True
        try:
            yield
        finally:
            self._open = False

    def offer(self, value: Any) -> None:
        if self._open and self.value is None:
            self.value = value

    def taken(self) -> Any:
        """The value, forgotten here so that nothing keeps its memory; None where there was none."""
        value, self.value = self.value, None
        return value
