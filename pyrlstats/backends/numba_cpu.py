"""The ``numba`` backend: a plain loop over tokens and slices, compiled at first use.

Core table only. It serves machines where the extension is not built, and tests, as a second opinion that shares
no arithmetic with the vector kernels. Tokens go through in blocks, so that memory is bounded.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from pyrlstats.backends.batch import Batch
from pyrlstats.backends.reference import to_numpy
from pyrlstats.layout import COUNTS, LOG2E, MAXIMA, NEAR_LIMIT, SUMS, clip_thresholds
from pyrlstats.reference import log_ratio
from pyrlstats.state import State

_BLOCK = 1 << 16  # tokens
_K3_TERMS = 16  # of the series of expm1(x) - x; enough for float64 below 0.5

_N_TOKENS, _N_NAN, _N_POS_INF, _N_NEG_INF, _N_ZERO, _CLIP_LOW, _CLIP_HIGH, _N_FAR = (
    COUNTS.index(name)
    for name in ("n_tokens", "n_nan", "n_pos_inf", "n_neg_inf", "n_zero", "clip_low", "clip_high", "n_far")
)
_NEAR_X, _NEAR_X2, _NEAR_K3, _NEAR_EXCESS, _ABS_X = (
    SUMS.index(name) for name in ("near_x", "near_x2", "near_k3", "near_excess", "abs_x")
)
_FAR_X, _FAR_X2, _FAR_K3, _FAR_W, _FAR_W2 = (
    SUMS.index(name) for name in ("far_x", "far_x2", "far_k3", "far_w", "far_w2")
)
_MAX_X, _NEG_MIN_X = MAXIMA.index("max_x"), MAXIMA.index("neg_min_x")


def accumulate(batch: Batch, state: State) -> None:
    """Add the tokens of ``batch`` to ``state``, in place."""
    logp, old_logp = _flat(batch.logp), _flat(batch.old_logp)
    masks = None if batch.masks is None else [_flat(mask) for mask in batch.masks]
    ids = None if batch.slice_ids is None else _flat(batch.slice_ids)
    base = None if batch.base_mask is None else _flat(batch.base_mask)
    slices = len(state.names)
    low, high = clip_thresholds(state.clip)
    for start in range(0, logp.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        x = log_ratio(logp[part], old_logp[part])
        inside = np.ones(x.shape, bool) if base is None else base[part] != 0
        fresh = State.empty(state.names, state.layout, state.clip)
        if ids is not None:
            members = inside & (ids[part] == np.arange(slices)[:, None])
            fresh.count("n_out_of_range")[0] = np.count_nonzero(inside & (ids[part] >= slices))
        elif masks is not None:
            members = np.stack([inside & (mask[part] != 0) for mask in masks])
        else:
            members = inside[None]
        bins = state.layout.bin_index(x.view(np.int32))
        _fill(x, bins, members, low, high, fresh.counts, fresh.histogram, fresh.sums, fresh.maxima)
        _merge(state, fresh)


def _flat(array: Any) -> NDArray[Any]:
    return to_numpy(array).reshape(-1)


def _merge(state: State, fresh: State) -> None:
    if not isinstance(state.buffer, np.ndarray):
        state = State(state.names, state.layout, state.clip, state.buffer.numpy())
    state.merge_(fresh)


@numba.njit(cache=True, nogil=True)
def _fill(
    x: Any, bins: Any, members: Any, low: float, high: float, counts: Any, histogram: Any, sums: Any, maxima: Any
) -> None:
    """Fill an empty state: x float32 (n,), bins (n,), members bool (S, n)."""
    for s in range(members.shape[0]):
        for i in range(x.size):
            if not members[s, i]:
                continue
            v = np.float64(x[i])  # float() would stay float32 here
            counts[s, _N_TOKENS] += 1
            if math.isnan(v):
                counts[s, _N_NAN] += 1
                continue
            if math.isinf(v):
                counts[s, _N_POS_INF if v > 0 else _N_NEG_INF] += 1
                continue
            if v == 0:
                counts[s, _N_ZERO] += 1
            else:
                histogram[s, bins[i]] += 1
            counts[s, _CLIP_LOW] += v < low
            counts[s, _CLIP_HIGH] += v > high
            maxima[s, _MAX_X] = max(maxima[s, _MAX_X], v)
            maxima[s, _NEG_MIN_X] = max(maxima[s, _NEG_MIN_X], -v)
            sums[s, _ABS_X] += abs(v)
            if abs(v) < NEAR_LIMIT:
                series = 0.0
                for j in range(_K3_TERMS, 1, -1):
                    series = v / j * (series + 1.0)
                k3 = v * series
                sums[s, _NEAR_X] += v
                sums[s, _NEAR_X2] += v * v
                sums[s, _NEAR_K3] += k3
                sums[s, _NEAR_EXCESS] += k3 * (2.0 * v + k3)
            else:
                counts[s, _N_FAR] += 1
                sums[s, _FAR_X] += v
                sums[s, _FAR_X2] += v * v
                sums[s, _FAR_K3] += math.expm1(v) - v
        if counts[s, _N_FAR] == 0:
            continue
        exponent = np.floor(maxima[s, _MAX_X] * LOG2E)
        for i in range(x.size):
            v = np.float64(x[i])  # float() would stay float32 here
            if members[s, i] and math.isfinite(v) and abs(v) >= NEAR_LIMIT:
                w = 2.0 ** (v * LOG2E - exponent)
                sums[s, _FAR_W] += w
                sums[s, _FAR_W2] += w * w
