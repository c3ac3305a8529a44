"""The last program of a launch adds the scratch rows of all programs to the state, in a fixed order.

Integers went to the state by atomics; floats go through here, so that they are the same bits from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import far

BLOCK = tl.constexpr(32)  # programs at a time


@triton.jit
def _pick(vector, column, WHICH: tl.constexpr):
    return tl.sum(tl.where(column == WHICH, vector, 0.0), axis=0)


@triton.jit
def _rescaled(value, exponent):
    """value 2^exponent, where a zero stays zero however large the power."""
    return tl.where(value == 0.0, 0.0, value * far.power_of_two(exponent))


@triton.jit
def merge(scratch_ptr, sums_ptr, maxima_ptr, programs, G: tl.constexpr):
    """scratch [programs, G, ROW]; sums and maxima of the first of the G slices."""
    column = tl.arange(0, far.RESULT)
    row = tl.arange(0, BLOCK)
    for s in tl.static_range(G):
        total = tl.zeros((far.RESULT,), tl.float64)
        largest = tl.full((far.RESULT,), float("-inf"), tl.float64)
        for first in range(0, programs, BLOCK):
            inside = (first + row < programs)[:, None]
            ptr = scratch_ptr + ((first + row) * G + s)[:, None] * far.ROW + column[None, :]
            value = tl.load(ptr, mask=inside, other=0.0, cache_modifier=".cg")
            # -inf, the maximum of a program without members, must not reach the sums
            total += tl.sum(tl.where(column[None, :] < far.N_SUMS, value, 0.0), axis=0)
            largest = tl.maximum(largest, tl.max(tl.where(inside, value, float("-inf")), axis=0))

        old_max = tl.load(maxima_ptr + 2 * s)
        old_neg_min = tl.load(maxima_ptr + 2 * s + 1)
        is_max = column == far.MAX_X
        is_min = column == far.NEG_MIN_X
        max_x = tl.maximum(old_max, tl.max(tl.where(is_max, largest, float("-inf")), axis=0))
        neg_min = tl.maximum(old_neg_min, tl.max(tl.where(is_min, largest, float("-inf")), axis=0))
        scale = far.scale_exponent(max_x)
        down = far.scale_exponent(old_max) - scale

        order = tl.where(column == far.FAR_W, 1.0, 0.0) + tl.where(column == far.FAR_W2, 2.0, 0.0)
        order = order.to(tl.float64)
        total = _rescaled(total, -order * scale)
        if tl.max(tl.where(column == far.SCALED_W, largest, 0.0), axis=0) > 0.0:
            w, w2 = _scaled_sums(scratch_ptr + s * far.ROW, scale, programs, G)
            total += tl.where(column == far.FAR_W, w, 0.0) + tl.where(column == far.FAR_W2, w2, 0.0)
        is_sum = column < far.N_SUMS
        old = tl.load(sums_ptr + s * far.N_SUMS + column, mask=is_sum, other=0.0)
        tl.debug_barrier()
        tl.store(sums_ptr + s * far.N_SUMS + column, _rescaled(old, order * down) + total, mask=is_sum)
        tl.store(maxima_ptr + 2 * s, max_x)
        tl.store(maxima_ptr + 2 * s + 1, neg_min)


@triton.jit
def _scaled_sums(scratch_ptr, scale, programs, G: tl.constexpr):
    """The columns with powers of two of their own, brought to 2^-scale."""
    row = tl.arange(0, BLOCK)
    w = tl.zeros((BLOCK,), tl.float64)
    w2 = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, programs, BLOCK):
        inside = first + row < programs
        ptr = scratch_ptr + (first + row) * (G * far.ROW)
        own = tl.load(ptr + far.SCALE, mask=inside, other=0.0, cache_modifier=".cg")
        w += _rescaled(tl.load(ptr + far.SCALED_W, mask=inside, other=0.0, cache_modifier=".cg"), own - scale)
        w2 += _rescaled(
            tl.load(ptr + far.SCALED_W2, mask=inside, other=0.0, cache_modifier=".cg"), 2.0 * (own - scale)
        )
    return tl.sum(w, axis=0), tl.sum(w2, axis=0)
