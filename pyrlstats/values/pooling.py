"""What results made of moments share: addition, pickling, and the update that pools means and squared deviations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pyrlstats.state import Array, namespace

if TYPE_CHECKING:
    from typing_extensions import Self


class Poolable:
    """Base of frozen dataclasses of arrays that ``merge``."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def merge(self, other: Self) -> Self: ...

    def _mapped(self, function: Callable[[Array], Array]) -> Self:
        """A copy with ``function`` of every array."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: value for name, value in values.items() if _is_array(value)}
        return replace(self, **{name: function(value) for name, value in arrays.items()})

    def _device(self) -> Any:
        """The torch device of the arrays, None for NumPy memory."""
        arrays = (getattr(self, field.name) for field in fields(self))
        return next((one.device for one in arrays if _is_array(one) and namespace(one) is not np), None)

    def _with(self, other: Self) -> tuple[Self, Self]:
        """Both on one device: what lies in NumPy memory moves to the other's."""
        if not isinstance(other, type(self)):
            name = type(self).__name__
            raise TypeError(f"merge takes {name}, got {type(other).__name__}")
        mine, theirs = self._device(), other._device()
        if mine == theirs:
            return self, other
        if mine is not None and theirs is not None:
            raise ValueError(f"results on {mine} and {theirs} cannot be merged: make both on one device")
        import torch

        def upload(value: Array) -> Array:
            return torch.as_tensor(value).to(theirs if mine is None else mine)

        return (self._mapped(upload), other) if mine is None else (self, other._mapped(upload))

    def __add__(self, other: object) -> Self:
        return self.merge(other) if isinstance(other, type(self)) else NotImplemented

    def __radd__(self, other: object) -> Self:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum() starts at 0

    def __getstate__(self) -> dict[str, Any]:
        # in NumPy memory: a GPU's results can be read on a machine without one, or without torch
        return dict(vars(self._mapped(_to_host)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._mapped(lambda value: value + 0)


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) or namespace(value) is not np


def _to_host(value: Array) -> Array:
    return value if namespace(value) is np else value.cpu().numpy()


def pooled(one: tuple[Array, Array, Array], two: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Mean and sum of squared deviations of two parts given as (n, mean, m2)."""
    (n_one, mean_one, m2_one), (n_two, mean_two, m2_two) = one, two
    xp = namespace(n_one)
    # float64 by hand: torch divides integers in float32
    share = xp.asarray(n_two, dtype=xp.float64) / xp.clip(n_one + n_two, 1, None)
    gap = mean_two - mean_one
    return mean_one + gap * share, m2_one + m2_two + gap**2 * n_one * share
