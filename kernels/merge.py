"""The last program of a launch adds the scratch rows of all programs to the state, in a fixed order.

Integers went to the state by atomics; floats go through here, so that they are the same bits from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import far, histogram

BLOCK = tl.constexpr(32)  # programs at a time


@triton.jit
def _rescaled(value, exponent):
    """value 2^exponent, where a zero stays zero however large the power."""
    return tl.where(value == 0.0, 0.0, value * far.power_of_two(exponent))


@triton.jit
def _column(table, column, WHICH: tl.constexpr):
    """[S] of a table [S, RESULT] of sums."""
    return tl.sum(tl.where(column == WHICH, table, 0.0), axis=1)


@triton.jit
def merge(scratch_ptr, sums_ptr, maxima_ptr, programs, G: tl.constexpr):
    """scratch [programs, G, ROW]; sums and maxima of the first of the G slices. All slices at once: [S, RESULT]."""
    S: tl.constexpr = histogram.power_of_two_from(G)
    slices = tl.arange(0, S)
    column = tl.arange(0, far.RESULT)[None, :]
    inside = (slices < G)[:, None]
    at = slices[:, None] * far.ROW + column
    row = tl.arange(0, BLOCK)[:, None, None]
    totals = tl.zeros((BLOCK, S, far.RESULT), tl.float64)
    largest = tl.full((BLOCK, S, far.RESULT), float("-inf"), tl.float64)
    for first in range(0, programs, BLOCK):
        here = (first + row < programs) & inside[None, :, :]
        # .cg: other SMs wrote them, and this one's L1 does not know
        value = tl.load(scratch_ptr + (first + row) * (G * far.ROW) + at[None, :, :], mask=here, other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        totals += tl.where(column[None, :, :] < far.N_SUMS, value, 0.0)
        largest = tl.maximum(largest, tl.where(here, value, float("-inf")))
    total = tl.sum(totals, axis=0)
    top = tl.max(largest, axis=0)

    rows = slices < G
    batch_max = tl.max(tl.where(column == far.MAX_X, top, float("-inf")), axis=1)
    batch_neg_min = tl.max(tl.where(column == far.NEG_MIN_X, top, float("-inf")), axis=1)
    old_max = tl.load(maxima_ptr + 2 * slices, mask=rows, other=float("-inf"))
    old_neg_min = tl.load(maxima_ptr + 2 * slices + 1, mask=rows, other=float("-inf"))
    is_sum = inside & (column < far.N_SUMS)
    old = tl.load(sums_ptr + slices[:, None] * far.N_SUMS + column, mask=is_sum, other=0.0)
    max_x = tl.maximum(old_max, batch_max)
    scale = far.scale_exponent(max_x)
    down = far.scale_exponent(old_max) - scale

    order = tl.where(column == far.FAR_W, 1.0, tl.where(column == far.FAR_W2, 2.0, 0.0)).to(tl.float64)
    total = _rescaled(total, -order * scale[:, None])
    if tl.max(tl.max(tl.where(column == far.SCALED_W, top, 0.0), axis=1), axis=0) > 0.0:
        w, w2 = _scaled_sums(scratch_ptr + slices * far.ROW, rows, scale, programs, S, G)
        total += tl.where(column == far.FAR_W, w[:, None], 0.0) + tl.where(column == far.FAR_W2, w2[:, None], 0.0)
    tl.debug_barrier()
    new = _rescaled(old, order * down[:, None]) + total
    tl.store(sums_ptr + slices[:, None] * far.N_SUMS + column, new, mask=is_sum)
    tl.store(maxima_ptr + 2 * slices, max_x, mask=rows)
    tl.store(maxima_ptr + 2 * slices + 1, tl.maximum(old_neg_min, batch_neg_min), mask=rows)


@triton.jit
def _scaled_sums(rows_ptr, rows, scale, programs, S: tl.constexpr, G: tl.constexpr):
    """The columns with powers of two of their own, brought to 2^-scale: [S] each."""
    row = tl.arange(0, BLOCK)[:, None]
    w = tl.zeros((BLOCK, S), tl.float64)
    w2 = tl.zeros((BLOCK, S), tl.float64)
    for first in range(0, programs, BLOCK):
        here = (first + row < programs) & rows[None, :]
        ptr = rows_ptr[None, :] + (first + row) * (G * far.ROW)
        down = tl.load(ptr + far.SCALE, mask=here, other=0.0, cache_modifier=".cg") - scale[None, :]
        w += _rescaled(tl.load(ptr + far.SCALED_W, mask=here, other=0.0, cache_modifier=".cg"), down)
        w2 += _rescaled(tl.load(ptr + far.SCALED_W2, mask=here, other=0.0, cache_modifier=".cg"), 2.0 * down)
    return tl.sum(w, axis=0), tl.sum(w2, axis=0)
