"""The tokens of a batch as whole flat arrays, for what sorts or ranks them: x, and who is in a slice.

In host memory as NumPy arrays, whose sorts are ten times as fast as torch's on a CPU; elsewhere as tensors.
"""

from __future__ import annotations

import numpy as np

from pyrlstats.backends.batch import Batch
from pyrlstats.backends.reference import to_numpy
from pyrlstats.backends.tokens import as_dtype
from pyrlstats.state import Array, namespace


def in_host_memory(array: Array) -> bool:
    """Is asking for a value free of a sync?"""
    return isinstance(array, np.ndarray) or bool(array.device.type == "cpu")


def on_host(batch: Batch) -> Batch:
    """The same batch as NumPy arrays, in place where NumPy has the dtype. For NumPy arrays and CPU tensors."""
    return Batch(
        to_numpy(batch.logp),
        to_numpy(batch.old_logp),
        None if batch.masks is None else tuple(to_numpy(mask) for mask in batch.masks),
        None if batch.slice_ids is None else to_numpy(batch.slice_ids),
        None if batch.base_mask is None else to_numpy(batch.base_mask),
    )


def log_ratio(batch: Batch) -> Array:
    """x = logp - old_logp, float32 (n,). Does not sync."""
    xp = namespace(batch.logp)
    wide = xp.float64 if xp.float64 in (batch.logp.dtype, batch.old_logp.dtype) else xp.float32
    with np.errstate(invalid="ignore", over="ignore"):
        difference = as_dtype(batch.logp.reshape(-1), wide) - as_dtype(batch.old_logp.reshape(-1), wide)
        return as_dtype(difference, xp.float32)


def members(batch: Batch, index: int) -> Array:
    """Who is in the slice of this index: bool (n,). Does not sync."""
    if batch.slice_ids is not None:
        chosen = as_dtype(batch.slice_ids, namespace(batch.slice_ids).int64) == index
    elif batch.masks is not None:
        chosen = batch.masks[index] != 0
    else:
        xp = namespace(batch.logp)
        chosen = xp.ones_like(batch.logp, dtype=xp.bool)
    if batch.base_mask is not None:
        chosen = chosen & (batch.base_mask != 0)
    return chosen.reshape(-1)
