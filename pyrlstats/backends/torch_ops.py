"""The ``torch`` backend: plain torch ops on any device, no boolean indexing, no sync.

The fallback where no kernel runs. Tokens go through in blocks of a fixed size, so that memory is bounded; all
slices of a block are handled together as (S, block).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pyrlstats.backends.batch import Batch
from pyrlstats.backends.tokens import blocks
from pyrlstats.layout import ABS_BITS, INF_BITS, LOG2E, NEAR_BITS, clip_thresholds
from pyrlstats.state import State, scale_exponent

_K3_TERMS = 16  # of the series of expm1(x) - x; enough for float64 below 1


def accumulate(batch: Batch, state: State) -> None:
    """Add the tokens of ``batch`` to ``state``, in place. Does not sync."""
    batch = replace(batch, **{name: _as_tensors(array) for name, array in vars(batch).items()})
    if isinstance(state.buffer, np.ndarray):
        state = replace(state, buffer=torch.from_numpy(state.buffer))  # the same memory
    # a block that does not fit into memory leaves the state as it was
    total = State.empty(state.names, state.layout, state.clip, batch.logp.device)
    for block in blocks(batch, len(state.names)):
        fresh = State.empty(state.names, state.layout, state.clip, batch.logp.device)
        fresh.count("n_out_of_range")[0] = block.out_of_range
        _fill(fresh, block.log_ratio(), block.members)
        total.merge_(fresh)
    state.merge_(total)


def _as_tensors(array: Any) -> Any:
    """NumPy memory as tensors; read-only, unaligned or negatively strided memory, which torch cannot see, is copied."""
    if isinstance(array, tuple):
        return tuple(_as_tensors(one) for one in array)
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.require(array, requirements=["C", "A", "W"]))
    return array


def _fill(state: State, x: torch.Tensor, members: torch.Tensor) -> None:
    """Fill an empty state from x (n,) and its members (S, n)."""
    low, high = clip_thresholds(state.clip)
    bits = x.view(torch.int32)
    magnitude = bits & ABS_BITS
    finite = magnitude < INF_BITS
    zero = magnitude == 0
    far = finite & (magnitude >= NEAR_BITS)
    flags = {
        "n_tokens": torch.ones_like(finite),
        "n_nan": magnitude > INF_BITS,
        "n_pos_inf": bits == INF_BITS,
        "n_neg_inf": (magnitude == INF_BITS) & (bits < 0),
        "n_zero": zero,
        "clip_low": finite & (x < low),
        "clip_high": finite & (x > high),
        "n_far": far,
    }
    for name, flag in flags.items():
        state.count(name)[:] = (members & flag).sum(-1)

    bins = state.layout.bin_index(bits)
    binned = (members & finite & ~zero).to(torch.int64)
    state.histogram.scatter_add_(1, bins.to(torch.int64).expand(binned.shape), binned)

    wide = torch.where(finite, x, 0.0).to(torch.float64)
    absent = -float("inf")
    chosen = members & finite
    state.maximum("max_x")[:] = torch.where(chosen, wide, absent).amax(-1)
    state.maximum("neg_min_x")[:] = torch.where(chosen, -wide, absent).amax(-1)

    x_near, x_far = torch.where(far, 0.0, wide), torch.where(far, wide, 0.0)
    series = torch.zeros_like(x_near)
    for j in range(_K3_TERMS, 1, -1):
        series = x_near / j * (series + 1.0)
    k3 = x_near * series
    terms = {
        "near_x": x_near,
        "near_x2": x_near**2,
        "near_k3": k3,
        "near_excess": k3 * (2.0 * x_near + k3),
        "abs_x": wide.abs(),
        "far_x": x_far,
        "far_x2": x_far**2,
        "far_k3": torch.expm1(x_far) - x_far,
    }
    for name, term in terms.items():
        state.sum(name)[:] = torch.where(members, term, 0.0).sum(-1)
    exponent = scale_exponent(state.maximum("max_x"))[:, None]
    scaled = torch.where(members & far, torch.exp2(x_far * LOG2E - exponent), 0.0)
    state.sum("far_w")[:] = scaled.sum(-1)
    state.sum("far_w2")[:] = (scaled * scaled).sum(-1)
