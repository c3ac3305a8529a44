"""Launching a kernel without the JIT's own look at every argument: 10 us of host time, not 38."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def interpreted(kernel: Any) -> bool:
    """Whether Triton's interpreter stands in for the compiler."""
    return not isinstance(kernel, triton.runtime.JITFunction)


def launch_kernel(
    key: tuple[Any, ...],
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Callable[[], dict[str, Any]],
    options: Callable[[], dict[str, Any]],
) -> None:
    """Launch ``kernel`` on the current stream, the first time for a key through the JIT.

    Args:
        key: all that Triton would specialise on: device, kernel, constants, dtypes and alignment of the pointers.
            Integers must be declared unspecialised.
        kernel: a ``triton.jit`` function.
        programs: size of the grid.
        arguments: those that are no constants, in order; the constants come after them.
        constants, options: the constexpr arguments and the compiler's, asked for only where they are needed.
    """
    found = _compiled.get(key)
    if found is not None:
        compiled, values = found
        compiled[(programs, 1, 1)](*arguments, *values)
        return
    named = constants()
    compiled = kernel[(programs,)](*arguments, **named, **options())
    if not interpreted(kernel):
        _compiled[key] = compiled, tuple(named.values())


class Prepared:
    """One launch that is repeated with the same arguments: nothing is looked at again after the first time."""

    def __init__(
        self,
        key: tuple[Any, ...],
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._first = (key, kernel, programs, arguments, lambda: constants, lambda: options)
        self._run: Any = None
        self._arguments = (*arguments, *constants.values())

    def __call__(self) -> None:
        if self._run is None:
            launch_kernel(*self._first)
            key, _, programs, *_ = self._first
            if key in _compiled:
                self._run = _compiled[key][0][(programs, 1, 1)]
            return
        self._run(*self._arguments)
