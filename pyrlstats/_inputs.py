"""The single input gate: what users have becomes a checked :class:`Batch`, or an error that says what to do.

Nothing here copies, converts or reads a token: only shapes, dtypes, devices and names are looked at.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pyrlstats.backends.batch import Batch
from pyrlstats.layout import check_names
from pyrlstats.state import Array

Masks = Any  # None, one array, a mapping name -> array, or a sequence of arrays

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_MASKS = ("bool", *_INTEGERS, *_FLOATS)


def as_ids(masks: Masks, slice_ids: Any, names: Sequence[str] | None) -> tuple[Masks, Any, Sequence[str] | None]:
    """A family of slices (:class:`pyrlstats.slices.Slices`) given as masks, as the ids that it holds.

    Only where the ids mean ``names``; otherwise its masks are taken by name.
    """
    ids = getattr(masks, "ids", None)
    if ids is None or slice_ids is not None or not isinstance(masks, Mapping):
        return masks, slice_ids, names
    family = tuple(masks)
    if names is not None and tuple(names) != family:
        return masks, slice_ids, names
    return None, ids, family


def resolve_names(masks: Masks, slice_ids: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    """The slice names that one call's ``masks``, ``slice_ids`` and ``names`` imply."""
    if slice_ids is not None:
        if masks is not None:
            raise ValueError("masks and slice_ids exclude each other: give one of them")
        if names is None:
            raise ValueError("slice_ids needs names=: the name of slice 0, 1, ...")
        return check_names(names)
    if masks is None or _is_array(masks):
        return ("all",) if names is None else check_names(names)
    if isinstance(masks, Mapping):
        if names is not None:
            raise ValueError("names= is for a sequence of masks; a mapping already names its slices")
        return check_names(tuple(masks))
    if isinstance(masks, Sequence) and not isinstance(masks, str):
        if names is None:
            raise ValueError("a sequence of masks needs names=; or give a mapping name -> mask")
        return check_names(names)
    raise TypeError(
        f"masks must be None, an array, a mapping name -> array or a sequence of arrays, got {type(masks).__name__}"
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")


def _as_array(name: str, value: Any) -> Array:
    """A NumPy array or a detached torch tensor over the same memory."""
    kind = type(value)
    if kind is np.ndarray:
        return value
    torch = sys.modules.get("torch")
    if torch is not None and (kind is torch.Tensor or isinstance(value, torch.Tensor)):
        tensor = value.detach() if value.requires_grad else value
        return tensor.resolve_neg()  # a lazily negated view has other bits in memory
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: give its data, and its mask inverted as a mask")
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if hasattr(value, "__dlpack__"):
        if torch is not None:
            return torch.from_dlpack(value)
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(
                f"{name}: NumPy cannot read this DLPack object ({error}); import torch to read it"
            ) from error
    raise TypeError(
        f"{name} must be a torch tensor, a NumPy array or a DLPack object, got {kind.__name__}: " + _cure_of(value)
    )


def _cure_of(value: Any) -> str:
    if isinstance(value, (list, tuple)) and any(map(_is_array, value)):
        return "join them with torch.stack, or packed with torch.cat"
    return "convert it with torch.as_tensor or numpy.asarray"


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(name: str, array: Array, accepted: tuple[str, ...]) -> None:
    dtype = _dtype_name(array.dtype)
    if dtype not in accepted:
        cure = ""
        if name in ("logp", "old_logp") and dtype in _INTEGERS:
            floats = '.astype("float32")' if isinstance(array, np.ndarray) else ".float()"
            cure = f": are these token ids? If they are log-probabilities, convert them with {floats}"
        raise TypeError(f"{name} must have one of the dtypes {', '.join(accepted)}, got {dtype}{cure}")


def device_of(array: Array) -> Any:
    """The torch device, or None for NumPy memory."""
    return None if isinstance(array, np.ndarray) else array.device


def _where_float64_is(array: Array) -> Array:
    """The tensor itself, or its copy on the CPU where its device has no float64 (MPS)."""
    return array.cpu() if array.device.type == "mps" else array


def _on_common_ground(arrays: dict[str, Array]) -> dict[str, Array]:
    """All NumPy, or all torch on one device; NumPy arrays beside CPU tensors are viewed as tensors."""
    first, like = next(iter(arrays.items()))
    kinds = {isinstance(array, np.ndarray) for array in arrays.values()}
    if kinds == {True}:
        return arrays
    import torch

    def tensor(array: Array) -> Array:
        if not isinstance(array, np.ndarray):
            return array
        # torch views neither read-only memory (without a warning) nor negative strides
        viewable = array.flags.writeable and min(array.strides, default=0) >= 0
        return torch.from_numpy(array if viewable else array.copy())

    common = {name: tensor(array) for name, array in arrays.items()}
    like = common[first]
    for name, array in common.items():
        if array.device != like.device:
            raise ValueError(
                f"{name} must be on {first}'s device {like.device}, got {array.device}: "
                f"move it with .to({str(like.device)!r})"
            )
        if array.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got {array.layout}: call .to_dense()")
    return {name: _where_float64_is(array) for name, array in common.items()}


def _broadcast(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape == shape:
        return array
    try:
        if isinstance(array, np.ndarray):
            return np.broadcast_to(array, shape)
        return array.expand(shape)
    except (ValueError, RuntimeError):
        cure = ": one value a row is given as [:, None]" if array.shape == shape[:1] else ""
        raise ValueError(f"{name} must broadcast to logp's shape {shape}, got {tuple(array.shape)}{cure}") from None


def gate(
    logp: Any,
    old_logp: Any,
    masks: Masks,
    slice_ids: Any,
    base_mask: Any,
    names: tuple[str, ...],
) -> Batch:
    """Check one call's arguments against the slices ``names`` and return them as a Batch.

    Raises:
        TypeError: something that is no array, or of a dtype that is not accepted.
        ValueError: shapes, devices or names that do not fit. Nothing has been read or changed then.
    """
    plain = _plain_batch(logp, old_logp, masks, slice_ids, base_mask, names)
    if plain is not None:
        return plain
    labels = ["logp", "old_logp"]
    arrays = [_as_array("logp", logp), _as_array("old_logp", old_logp)]
    for label, array in zip(labels, arrays, strict=True):
        _check_dtype(label, array, _FLOATS)
    shape = arrays[0].shape
    if arrays[1].shape != shape:
        raise ValueError(f"old_logp must have logp's shape {tuple(shape)}, got {tuple(arrays[1].shape)}")

    if masks is not None:
        for label, value in zip(_mask_labels(names), masks_by_name(masks, names), strict=True):
            labels.append(label)
            arrays.append(_as_array(label, value))
            _check_dtype(label, arrays[-1], _MASKS)
    elif slice_ids is None and len(names) != 1:
        raise ValueError(f"masks are needed for the slices {list(names)}: give a mapping name -> mask")
    for label, value, accepted in (("slice_ids", slice_ids, _INTEGERS), ("mask", base_mask, _MASKS)):
        if value is not None:
            labels.append(label)
            arrays.append(_as_array(label, value))
            _check_dtype(label, arrays[-1], accepted)

    if not _are_alike(arrays):
        arrays = list(_on_common_ground(dict(zip(labels, arrays, strict=True))).values())
    logp, old_logp, *members = [
        array if array.shape == shape else _broadcast(label, array, tuple(shape))
        for label, array in zip(labels, arrays, strict=True)
    ]
    base = members.pop() if base_mask is not None else None
    ids = members.pop() if slice_ids is not None else None
    return Batch(logp, old_logp, None if masks is None else tuple(members), ids, base)


class _Torch(NamedTuple):
    """What the look at every tensor needs of torch."""

    tensor: Any
    strided: Any
    floats: frozenset[Any]
    masks: frozenset[Any]


@functools.cache
def _torch() -> _Torch:
    import torch

    floats, masks = (
        frozenset(getattr(torch, name) for name in names if hasattr(torch, name)) for names in (_FLOATS, _MASKS)
    )
    return _Torch(torch.Tensor, torch.strided, floats, masks)


def _plain_batch(
    logp: Any, old_logp: Any, masks: Masks, slice_ids: Any, base_mask: Any, names: tuple[str, ...]
) -> Batch | None:
    """The batch of dense tensors of one shape on one device, a dict of masks in order: what a trainer's loop gives.

    None for everything else, right or wrong. Half the time of the long way, 5 us and not 11: a call of a few thousand
    tokens is mostly this.
    """
    if sys.modules.get("torch") is None:
        return None
    torch = _torch()
    if type(logp) is not torch.tensor or slice_ids is not None:
        return None
    members: tuple[Any, ...] = ()
    if masks is not None:
        if type(masks) is not dict or tuple(masks) != names:
            return None
        members = tuple(masks.values())
    elif len(names) != 1:
        return None
    shape, device, strided, dtypes = logp.shape, logp.device, torch.strided, torch.masks
    for tensor in (logp, old_logp, *members) if base_mask is None else (logp, old_logp, base_mask, *members):
        if (
            type(tensor) is not torch.tensor
            or tensor.dtype not in dtypes
            or tensor.shape != shape
            or tensor.device != device
            or tensor.layout is not strided
            or tensor.is_neg()
        ):
            return None
    if logp.dtype not in torch.floats or old_logp.dtype not in torch.floats or device.type == "mps":
        return None
    return Batch(
        logp.detach() if logp.requires_grad else logp,
        old_logp.detach() if old_logp.requires_grad else old_logp,
        None if masks is None else members,
        None,
        base_mask,
    )


@functools.lru_cache(maxsize=256)
def _mask_labels(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"mask of slice {name!r}" for name in names)


def _are_alike(arrays: list[Array]) -> bool:
    """Whether all are plain NumPy arrays, or all are dense tensors of one device that has float64."""
    first = arrays[0]
    if type(first) is np.ndarray:
        return all(type(array) is np.ndarray for array in arrays)
    device, strided = first.device, sys.modules["torch"].strided
    return device.type != "mps" and all(
        type(array) is not np.ndarray and array.device == device and array.layout == strided for array in arrays
    )


def masks_by_name(masks: Masks, names: tuple[str, ...]) -> list[Any]:
    """The masks in the order of ``names``."""
    if isinstance(masks, Mapping):
        if tuple(masks) == names:
            return list(masks.values())
        missing = [name for name in names if name not in masks]
        unknown = [name for name in masks if name not in names]
        if missing or unknown:
            wrong = [f"{word} {which}" for word, which in (("missing", missing), ("unknown", unknown)) if which]
            cure = ": name every slice where the accumulator is made" if unknown else ""
            raise ValueError(f"masks must hold exactly the slices {list(names)}: {', '.join(wrong)}{cure}")
        return [masks[name] for name in names]
    if _is_array(masks):
        if len(names) != 1:
            raise ValueError(
                f"masks must hold one mask for each of the slices {list(names)}, got a single array: "
                "give a mapping name -> mask"
            )
        return [masks]
    if not isinstance(masks, Sequence) or isinstance(masks, str):
        raise TypeError(
            f"masks must be None, an array, a mapping name -> array or a sequence of arrays, got {type(masks).__name__}"
        )
    if len(masks) != len(names):
        raise ValueError(f"masks must hold one mask a name: got {len(masks)} masks and {len(names)} names")
    return list(masks)
