"""The ``reference`` backend: the definition of :mod:`pyrlstats.reference`, slice by slice, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats import reference
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import COUNTS, MAXIMA, SUMS
from pyrlstats.state import Array, State


def to_numpy(array: Array) -> NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array
    # NumPy has no bfloat16; float32 holds every one of them
    wide = array.float() if str(array.dtype) == "torch.bfloat16" else array
    converted: NDArray[Any] = wide.cpu().numpy()
    return converted


def accumulate(batch: Batch, state: State) -> None:
    """Add the tokens of ``batch`` to ``state``, in place."""
    x = reference.log_ratio(to_numpy(batch.logp), to_numpy(batch.old_logp)).reshape(-1)
    base = np.ones(x.shape, bool)
    if batch.base_mask is not None:
        base = to_numpy(batch.base_mask).reshape(-1) != 0
    slices = len(state.names)
    out_of_range = 0
    if batch.slice_ids is not None:
        ids = to_numpy(batch.slice_ids).reshape(-1)
        members = [base & (ids == index) for index in range(slices)]
        out_of_range = int(np.count_nonzero(base & (ids >= slices)))
    elif batch.masks is not None:
        members = [base & (to_numpy(mask).reshape(-1) != 0) for mask in batch.masks]
    else:
        members = [base]

    fresh = State.empty(state.names, state.layout, state.clip)
    for index, member in enumerate(members):
        values = reference.accumulate(x[member], state.layout, state.clip)
        fresh.histogram[index] = values["histogram"]
        fresh.counts[index] = [values[name] for name in COUNTS]
        fresh.sums[index] = [values[name] for name in SUMS]
        fresh.maxima[index] = [values[name] for name in MAXIMA]
    fresh.count("n_out_of_range")[0] = out_of_range
    if not isinstance(state.buffer, np.ndarray):
        import torch

        buffer = torch.from_numpy(fresh.buffer).to(state.buffer.device)
        fresh = State(state.names, state.layout, state.clip, buffer)
    state.merge_(fresh)
