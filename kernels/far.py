"""Sums over far tokens, |x| >= NEAR_LIMIT: rare in real data, so one tile at a time into the program's scratch row.

A scratch row is 16 float64 per program and slice: layout.SUMS in order, then the columns named below. Tiles with
every |x| <= PLAIN_LIMIT need no scale (neither w^2 nor its inverse leaves float64) and go to the far_w columns; the
others go to columns of their own with their own power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyrlstats import layout

LOG2E = tl.constexpr(layout.LOG2E)
PLAIN_LIMIT = tl.constexpr(320.0)

ROW = tl.constexpr(16)
FAR_X = tl.constexpr(layout.SUMS.index("far_x"))
FAR_X2 = tl.constexpr(layout.SUMS.index("far_x2"))
FAR_K3 = tl.constexpr(layout.SUMS.index("far_k3"))
FAR_W = tl.constexpr(layout.SUMS.index("far_w"))
FAR_W2 = tl.constexpr(layout.SUMS.index("far_w2"))
N_SUMS = tl.constexpr(len(layout.SUMS))
MAX_X = tl.constexpr(10)
NEG_MIN_X = tl.constexpr(11)
SCALE = tl.constexpr(12)  # k of the two columns that follow
SCALED_W = tl.constexpr(13)
SCALED_W2 = tl.constexpr(14)


@triton.jit
def power_of_two(exponent):
    """2^exponent for whole float64 numbers: 0 below 2^-1022, inf above 2^1023 (as state.power_of_two)."""
    biased = tl.minimum(tl.maximum(exponent, -1023.0), 1024.0).to(tl.int64) + 1023
    return (biased << 52).to(tl.float64, bitcast=True)


@triton.jit
def scale_exponent(max_x):
    """floor(max x log2 e), 0 for an empty slice (as state.scale_exponent)."""
    return tl.where(max_x > float("-inf"), tl.floor(max_x * LOG2E), 0.0)


@triton.jit
def _scaled_weight(x, exponent):
    """2^-exponent e^x in float64, 1e-12 relative, for float64 x."""
    product = tl.maximum(x * LOG2E, -1e300)  # the maximum keeps the rounding: fused, x = 1e38 would give noise
    t = tl.maximum(product - exponent, -1100.0)
    whole = tl.floor(t + 0.5)
    f = t - whole
    p = 1.325518494057823e-06 * f + 1.5310078732436414e-05
    p = p * f + 0.00015403455982312115
    p = p * f + 0.0013333450570975278
    p = p * f + 0.009618129159284432
    p = p * f + 0.05550410941202767
    p = p * f + 0.2402265069581343
    p = p * f + 0.6931471805459344
    p = p * f + 0.9999999999999997
    return p * power_of_two(whole)


@triton.jit
def _sums(x, weight, member):
    """Of one tile and slice: sums of x, x^2, w, w^2, and the number of tokens."""
    f = tl.where(member, 1.0, 0.0).to(tl.float64)
    fx = f * x
    fw = f * weight
    # one reduction for the first four: [ROWS, 2, 2], last axis x | w
    plain = tl.join(tl.sum(fx, axis=1), tl.sum(fw, axis=1))
    squares = tl.join(tl.sum(fx * x, axis=1), tl.sum(fw * weight, axis=1))
    sums = tl.sum(tl.join(plain, squares), axis=0)
    first = tl.arange(0, 2)[:, None] == 0
    is_plain = tl.arange(0, 2)[None, :] == 0
    one = tl.sum(tl.sum(tl.where(first & is_plain, sums, 0.0), axis=1), axis=0)
    two = tl.sum(tl.sum(tl.where(first & (is_plain == 0), sums, 0.0), axis=1), axis=0)
    w = tl.sum(tl.sum(tl.where((first == 0) & is_plain, sums, 0.0), axis=1), axis=0)
    w2 = tl.sum(tl.sum(tl.where((first == 0) & (is_plain == 0), sums, 0.0), axis=1), axis=0)
    n = tl.sum(tl.sum(member.to(tl.int32), axis=1), axis=0).to(tl.float64)
    return one, two, w, w2, n


@triton.jit
def add_tile(row_ptr, x, members, far, G: tl.constexpr):
    """Add the far tokens of a tile (x [ROWS, V] finite) to the scratch rows of the G slices."""
    wide = tl.where(far, x, 0.0).to(tl.float64)
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    column = tl.arange(0, ROW)
    if largest <= PLAIN_LIMIT:
        weight = _scaled_weight(wide, 0.0)
        for s in range(G):  # a loop at run time: this is rare, and its code would be G times as long
            member = far & (((members >> s) & 1) != 0)
            one, two, w, w2, n = _sums(wide, weight, member)
            _add_row(row_ptr + s * ROW, column, one, two, w - n - one, w, w2)
    else:
        for s in range(G):
            member = far & (((members >> s) & 1) != 0)
            max_x = tl.max(tl.max(tl.where(member, x, float("-inf")), axis=1), axis=0).to(tl.float64)
            if max_x > float("-inf"):
                exponent = scale_exponent(max_x)
                weight = _scaled_weight(wide, exponent)
                one, two, w, w2, n = _sums(wide, tl.where(member, weight, 0.0), member)
                k3 = w * power_of_two(exponent) - n - one
                _add_row(row_ptr + s * ROW, column, one, two, k3, 0.0, 0.0)
                _add_scaled(row_ptr + s * ROW, exponent, w, w2)


@triton.jit
def _add_row(row_ptr, column, one, two, k3, w, w2):
    value = tl.where(column == FAR_X, one, 0.0)
    value = tl.where(column == FAR_X2, two, value)
    value = tl.where(column == FAR_K3, k3, value)
    value = tl.where(column == FAR_W, w, value)
    value = tl.where(column == FAR_W2, w2, value)
    inside = (column >= FAR_X) & (column <= FAR_W2)
    tl.store(row_ptr + column, tl.load(row_ptr + column, mask=inside) + value, mask=inside)


@triton.jit
def _add_scaled(row_ptr, exponent, w, w2):
    """Both sides to the larger power of two: an exact multiplication."""
    tl.debug_barrier()
    before = tl.load(row_ptr + SCALE)
    old_w = tl.load(row_ptr + SCALED_W)
    old_w2 = tl.load(row_ptr + SCALED_W2)
    tl.debug_barrier()
    scale = tl.where(old_w > 0.0, tl.maximum(before, exponent), exponent)
    down = tl.where(old_w > 0.0, before - scale, 0.0)
    tl.store(row_ptr + SCALE, scale)
    tl.store(row_ptr + SCALED_W, old_w * power_of_two(down) + w * power_of_two(exponent - scale))
    tl.store(row_ptr + SCALED_W2, old_w2 * power_of_two(2.0 * down) + w2 * power_of_two(2.0 * (exponent - scale)))
    tl.debug_barrier()


@triton.jit
def start(row_ptr, G: tl.constexpr):
    """Zero the scratch rows of this program."""
    column = tl.arange(0, ROW)
    for s in tl.static_range(G):
        tl.store(row_ptr + s * ROW + column, tl.zeros((ROW,), tl.float64))
    tl.debug_barrier()
