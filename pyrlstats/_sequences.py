"""Where sequences begin and end, in rows and in packed batches: running counts that stay inside a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pyrlstats._inputs import _INTEGERS, _MASKS, _as_array, _broadcast, _on_common_ground, device_of
from pyrlstats.state import Array, namespace


class Sequences:
    """Where sequences begin on the last axis.

    Masks are used as factors rather than in ``where``, which costs torch ten times as much on a CPU.
    """

    def __init__(self, starts: Array | None = None) -> None:
        self.starts = starts  # bool; None where every row is one sequence

    def count_through(self, flag: Array) -> Array:
        """Tokens with ``flag`` from the first of the own sequence to this one, included: int64."""
        through = namespace(flag).cumsum(flag, -1)
        if self.starts is None:
            return through
        return through - running_max((through - as_int8(flag)) * self.starts)

    def last_of(self, values: Array) -> Array:
        """The value at the last token of the own sequence, in a shape that broadcasts."""
        if self.starts is None:
            return values[..., -1:]
        xp = namespace(values)
        n = self.starts.shape[-1]
        ends = xp.concatenate((self.starts[..., 1:], xp.ones_like(self.starts[..., :1])), -1)
        # counted from the right, a sequence begins where it ends
        from_right = xp.flip(running_max(xp.flip(ends, (-1,)) * arange(n, ends)), (-1,))
        return take(values, n - 1 - from_right)


class Trajectory(NamedTuple):
    """Whose tokens they are, and in which sequence."""

    model: Array  # bool
    tool: Array | None  # bool; None where tool results are holes of model
    sequences: Sequences

    def turns(self) -> Array:
        """The model's turn, from 0, at its tokens; elsewhere that of its latest token, -1 before the first: int64."""
        starts = self.sequences.starts
        if self.tool is None:
            goes_on = _shifted(self.model)
            begins = self.model & ~(goes_on if starts is None else goes_on & ~starts)
        else:
            apart = namespace(self.tool).cumsum(self.tool if starts is None else self.tool | starts, -1) + 1
            begins = self.model & (apart > _shifted(running_max(apart * self.model)))
        return self.sequences.count_through(begins) - 1


def trajectory(model_mask: Any, tool_mask: Any, response_mask: Any, cu_seqlens: Any, position_ids: Any) -> Trajectory:
    if tool_mask is not None and response_mask is not None:
        raise ValueError("tool_mask and response_mask exclude each other: give the one that marks tool results")
    if cu_seqlens is not None and position_ids is not None:
        raise ValueError("cu_seqlens and position_ids exclude each other: give one of them")
    given = {"model_mask": model_mask, "tool_mask": tool_mask, "response_mask": response_mask}
    given["position_ids"] = position_ids
    arrays = as_arrays(**{name: value for name, value in given.items() if value is not None})
    model = arrays["model_mask"] != 0
    if model.ndim == 0:
        raise ValueError("model_mask must have sequences along its last axis, got a 0-d array")
    tool = None
    if tool_mask is not None:
        tool = broadcast_to(arrays, "tool_mask", "model_mask") != 0
        model = model & ~tool
    if response_mask is not None:
        response = broadcast_to(arrays, "response_mask", "model_mask") != 0
        model, tool = model & response, response & ~model
    if position_ids is not None:
        return Trajectory(model, tool, Sequences(broadcast_to(arrays, "position_ids", "model_mask") == 0))
    if cu_seqlens is not None:
        return Trajectory(model, tool, Sequences(_starts(cu_seqlens, model)))
    return Trajectory(model, tool, Sequences())


def _starts(cu_seqlens: Any, model: Array) -> Array:
    """Bool of model's shape: the boundaries; those beyond the tokens (all empty sequences at the end) drop out."""
    n = model.shape[-1]
    if tuple(model.shape) not in ((n,), (1, n)):
        raise ValueError(f"cu_seqlens needs a packed mask of shape [N] or [1, N], got {tuple(model.shape)}")
    xp = namespace(model)
    boundaries = xp.clip(_boundaries(cu_seqlens, model), 0, n)
    if xp is np:
        flags = np.zeros(n + 1, model.dtype)
        flags[boundaries] = True
    else:  # an assignment by index would fetch the True from the host
        flags = model.new_zeros(n + 1).index_fill_(0, boundaries, True)
    return flags[:n].reshape(model.shape)


def _boundaries(cu_seqlens: Any, like: Array) -> Array:
    """cu_seqlens as int64 on the device of ``like``; a host list is uploaded."""
    if isinstance(cu_seqlens, (list, tuple)):
        cu_seqlens = to_device(np.asarray(cu_seqlens, np.int64), device_of(like))
    arrays = as_arrays(tokens=like, cu_seqlens=cu_seqlens)
    check_dtype("cu_seqlens", arrays["cu_seqlens"], _INTEGERS)
    xp = namespace(like)
    return xp.asarray(arrays["cu_seqlens"], dtype=xp.int64)


def spread(name: str, values: Any, cu_seqlens: Any, n_tokens: int | None, outside: float = -1) -> Array:
    """values (..., K) of the segments between cu_seqlens (..., K + 1), at each of n_tokens (..., n_tokens)."""
    array = as_arrays(**{name: values})[name]
    if (cu_seqlens is None) != (n_tokens is None):
        raise ValueError("cu_seqlens and n_tokens go together: the boundaries and the number of tokens they divide")
    if cu_seqlens is None or n_tokens is None:
        return array
    xp = namespace(array)
    boundaries = _boundaries(cu_seqlens, array)
    segments = array.shape[-1] if array.ndim else 0
    rows = tuple(array.shape[:-1])
    if array.ndim == 0 or tuple(boundaries.shape) != (*rows, segments + 1):
        raise ValueError(
            f"cu_seqlens must have one boundary more than {name} of shape {tuple(array.shape)}, "
            f"got {tuple(boundaries.shape)}"
        )
    shape = (*rows, n_tokens)
    if segments == 0:
        return xp.full(shape, outside) if xp is np else xp.full(shape, outside, device=array.device)
    boundaries = xp.clip(boundaries.reshape(-1, segments + 1), 0, n_tokens)
    row_count = boundaries.shape[0]
    row = arange(row_count, array)[:, None]
    # one search for all rows: row r's tokens and boundaries are shifted by r n_tokens
    ends = (boundaries[:, 1:] + row * n_tokens).reshape(-1)
    token = arange(row_count * n_tokens, array)
    found = np.searchsorted(ends, token, side="right") if xp is np else xp.searchsorted(ends, token, right=True)
    segment = found.reshape(row_count, n_tokens) - row * segments
    inside = (segment < segments) & (token.reshape(row_count, n_tokens) >= boundaries[:, :1] + row * n_tokens)
    flat = array.reshape(row_count, segments)
    return xp.where(inside, take(flat, xp.clip(segment, 0, segments - 1)), outside).reshape(shape)


def as_arrays(**given: Any) -> dict[str, Array]:
    """The arguments as arrays of one kind on one device, checked; where they are."""
    arrays = {name: _as_array(name, value) for name, value in given.items()}
    for name, array in arrays.items():
        check_dtype(name, array, _MASKS)
    common = _on_common_ground(arrays)
    # slices need no float64: tensors of a device without it stay there
    return {name: common[name] if isinstance(array, np.ndarray) else array for name, array in arrays.items()}


def check_dtype(name: str, array: Array, accepted: tuple[str, ...]) -> None:
    """As the gate's, without its cache, which torch.compile warns of."""
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype not in accepted:
        raise TypeError(f"{name} must have one of the dtypes {', '.join(accepted)}, got {dtype}")


def broadcast_to(arrays: dict[str, Array], name: str, like: str) -> Array:
    shape = tuple(arrays[like].shape)
    try:
        return _broadcast(name, arrays[name], shape)
    except ValueError:
        raise ValueError(
            f"{name} must broadcast to {possessive(like)} shape {shape}, got {tuple(arrays[name].shape)}"
        ) from None


def possessive(name: str) -> str:
    return name + ("'" if name.endswith("s") else "'s")


def to_device(host: Array, device: Any) -> Array:
    if device is None:
        return host
    import torch

    return torch.from_numpy(host).to(device, non_blocking=True)


def running_max(values: Array) -> Array:
    if namespace(values) is np:
        return np.maximum.accumulate(values, axis=-1)
    return values.cummax(-1).values


def arange(n: int, like: Array) -> Array:
    """int64 0 to n - 1 on the device of ``like``."""
    xp = namespace(like)
    return np.arange(n) if xp is np else xp.arange(n, device=like.device)


def _shifted(values: Array) -> Array:
    """values, one token later; 0 at the first."""
    xp = namespace(values)
    return xp.concatenate((xp.zeros_like(values[..., :1]), values[..., :-1]), -1)


def as_int8(flag: Array) -> Array:
    """A bool array as 0 and 1, over the same memory."""
    return flag.view(namespace(flag).int8)


def smallest(ids: Array, names: int) -> Array:
    """ids in the smallest signed integers that hold them."""
    xp = namespace(ids)
    return xp.asarray(ids, dtype=xp.int8 if names < 127 else xp.int16 if names < 32767 else xp.int32)


def as_integers(name: str, array: Array) -> Array:
    check_dtype(name, array, _INTEGERS)
    xp = namespace(array)
    return xp.asarray(array, dtype=xp.int64)


def take(values: Array, index: Array) -> Array:
    """values at index along the last axis."""
    xp = namespace(values)
    return xp.take_along_axis(values, index, -1) if xp is np else xp.gather(values, -1, index)


def is_strings(ids: Any) -> bool:
    if isinstance(ids, np.ndarray):
        return ids.dtype.kind in "UO"
    return isinstance(ids, (list, tuple)) and all(isinstance(one, str) for one in ids)


def members(member: Array, index: Array) -> Array:
    """index where ``member``, else -1, in index's dtype."""
    return (index + 1) * member - 1
