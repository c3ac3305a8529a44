"""Arguments of the functions on values, brought into the form of the engine's gate under the names that users know.

The gate (:mod:`pyrlstats._inputs`) speaks of log-probabilities. What passes here passes there: dtypes, devices, shapes
and names are those that it accepts, checked with its own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyrlstats._inputs import (
    _FLOATS,
    _INTEGERS,
    _MASKS,
    Masks,
    _as_array,
    _check_dtype,
    _on_common_ground,
    as_ids,
    masks_by_name,
    resolve_names,
)
from pyrlstats._sequences import broadcast_to, possessive
from pyrlstats.state import Array, namespace

_VALUES = (*_FLOATS, "int8", "int16", "int32", "int64", "uint8", "bool")


def as_floats(name: str, value: Any) -> Array:
    """An array of a floating dtype; integers as float64 where the device has it, which the engine rounds once."""
    array = _as_array(name, value)
    _check_dtype(name, array, _VALUES)
    if str(array.dtype).removeprefix("torch.") in _FLOATS:
        return array
    xp = namespace(array)
    without_float64 = xp is not np and array.device.type == "mps"
    return xp.asarray(array, dtype=xp.float32 if without_float64 else xp.float64)


def prepared(
    values: dict[str, Array],
    masks: Masks,
    slice_ids: Any,
    mask: Any,
    names: Sequence[str] | None,
    *,
    exactly: bool = False,
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The values, of one shape on one device, and masks, slice_ids, mask and names as the gate takes them.

    Args:
        values: argument name -> array, the first of which gives shape and device.
        names: those of the call; with ``exactly`` those of an accumulator, which ``masks`` must hold.

    Raises:
        TypeError, ValueError: as the gate's, naming the arguments of the caller.
    """
    masks, slice_ids, names = as_ids(masks, slice_ids, names)
    if exactly and masks is not None and slice_ids is None and names is not None:
        known = tuple(names)
    else:
        known = resolve_names(masks, slice_ids, names)
    arrays = dict(values)
    by_name: dict[str, str] = {}
    if masks is not None:
        by_name = {name: f"mask of slice {name!r}" for name in known}
        for key, one in zip(by_name.values(), masks_by_name(masks, known), strict=True):
            arrays[key] = _as_array(key, one)
            _check_dtype(key, arrays[key], _MASKS)
    elif slice_ids is None and len(known) != 1:
        raise ValueError(f"masks are needed for the slices {list(known)}: give a mapping name -> mask")
    for key, one, accepted in (("slice_ids", slice_ids, _INTEGERS), ("mask", mask, _MASKS)):
        if one is not None:
            arrays[key] = _as_array(key, one)
            _check_dtype(key, arrays[key], accepted)
    first, *others = values
    shape = tuple(values[first].shape)
    for name in others:
        if tuple(values[name].shape) != shape:
            raise ValueError(f"{name} must have {possessive(first)} shape {shape}, got {tuple(values[name].shape)}")
    arrays = _on_common_ground(arrays)
    arrays = {key: broadcast_to(arrays, key, first) for key in arrays}
    return {name: arrays[name] for name in values}, {
        "masks": {name: arrays[key] for name, key in by_name.items()} if by_name else None,
        "slice_ids": arrays.get("slice_ids"),
        "mask": arrays.get("mask"),
        "names": known,
    }
