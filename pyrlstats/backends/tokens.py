"""The tokens of a batch, block by block, as arrays of one kind: for what is computed with array operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pyrlstats.backends.batch import Batch
from pyrlstats.state import Array, namespace

_BLOCK_WORDS = 1 << 20  # slices x tokens of one block


class Block(NamedTuple):
    """A run of tokens.

    Attributes:
        start, stop: where they lie in the flattened batch.
        logp, old_logp: (n,), in the batch's dtypes.
        members: bool (S, n), the base mask included.
        out_of_range: 0-d, tokens whose slice id is too large.
        advantages: (n,) in their dtype, or None.
    """

    start: int
    stop: int
    logp: Array
    old_logp: Array
    members: Array
    out_of_range: Array
    advantages: Array | None

    def log_ratio(self) -> Array:
        """x, float32 (n,): widened before the subtraction; float64 is rounded once."""
        xp = namespace(self.logp)
        wide = xp.float64 if xp.float64 in (self.logp.dtype, self.old_logp.dtype) else xp.float32
        with np.errstate(invalid="ignore", over="ignore"):
            return as_dtype(as_dtype(self.logp, wide) - as_dtype(self.old_logp, wide), xp.float32)


def blocks(batch: Batch, slices: int) -> Iterator[Block]:
    """The batch in blocks of a fixed size, so that memory is bounded. Does not sync."""
    size = max(_BLOCK_WORDS // slices, 1)
    logp, old_logp = flat(batch.logp), flat(batch.old_logp)
    masks = None if batch.masks is None else [flat(mask) for mask in batch.masks]
    ids = None if batch.slice_ids is None else flat(batch.slice_ids)
    base = None if batch.base_mask is None else flat(batch.base_mask)
    advantages = None if batch.advantages is None else flat(batch.advantages)
    xp = namespace(logp)
    everything = np.ones(1, bool) if xp is np else logp.new_ones(1, dtype=xp.bool)
    index = np.arange(slices) if xp is np else xp.arange(slices, device=logp.device)
    n = logp.shape[0]
    for start in range(0, n, size):
        part = slice(start, min(start + size, n))
        inside = xp.broadcast_to(everything, logp[part].shape) if base is None else base[part] != 0
        beyond = ~everything
        if ids is not None:
            # a uint64 above 2^63 turns negative in int64: out of range all the same
            chunk = as_dtype(ids[part], xp.int64)
            members = chunk == index[:, None]
            beyond = (chunk >= slices) | ((chunk < 0) if ids.dtype == xp.uint64 else False)
        elif masks is not None:
            members = xp.stack([mask[part] != 0 for mask in masks])
        else:
            members = inside[None, :]
        yield Block(
            part.start,
            part.stop,
            logp[part],
            old_logp[part],
            members & inside,
            (beyond & inside).sum(),
            None if advantages is None else advantages[part],
        )


def flat(array: Array) -> Array:
    """(n,); strided arrays are copied."""
    return array.reshape(-1)


def zeros_like(array: Array) -> Array:
    """Zeros of array's shape and dtype in the memory of one: stride 0."""
    if isinstance(array, np.ndarray):
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return array.new_zeros(()).expand(array.shape)


def as_dtype(array: Array, dtype: Any) -> Array:
    """The array in another dtype, itself where it has that one. Does not sync."""
    return array.astype(dtype, copy=False) if isinstance(array, np.ndarray) else array.to(dtype)
