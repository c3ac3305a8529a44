"""Sums over far tokens, |x| >= NEAR_LIMIT, one tile at a time into the program's scratch row.

With inline PTX those up to PLAIN_LIMIT are summed by tail.py, and only the rare huge ones come here.

A scratch row is 32 float64 per program and slice. Columns 0-15 are what merge.py reads: layout.SUMS in order, then the
extrema and the scaled columns. Columns 16-23 add up tiles. Tiles with every |x| <= PLAIN_LIMIT need no scale (neither
w^2 nor its inverse leaves float64); the others go to the scaled columns with a power of two of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels.histogram import power_of_two_from

from pyrlstats import layout

LOG2E = tl.constexpr(layout.LOG2E)
PLAIN_LIMIT = tl.constexpr(320.0)
HUGE_BITS = tl.constexpr(layout.float32_bits(PLAIN_LIMIT.value) + 1)  # of the smallest magnitude beyond it

ROW = tl.constexpr(32)
RESULT = tl.constexpr(16)  # columns that merge.py reads
ABS_X = tl.constexpr(layout.SUMS.index("abs_x"))
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

# Sums over tiles, in the order that joining gives them.
TILES = tl.constexpr(16)
X, SIZE, X2, PLAIN_W3, W, N, W2 = (tl.constexpr(column) for column in range(7))


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
    """[2, 2, 2] of one tile and slice: see TILES."""
    f = tl.where(member, 1.0, 0.0).to(tl.float64)
    fx = f * x
    fw = f * weight
    plain = tl.join(tl.sum(fx, axis=1), tl.sum(fw, axis=1))
    square = tl.join(tl.sum(fx * x, axis=1), tl.sum(fw * weight, axis=1))
    count = tl.join(tl.sum(tl.abs(fx), axis=1), tl.sum(f, axis=1))
    return tl.sum(tl.join(tl.join(plain, square), tl.join(count, tl.zeros_like(count))), axis=0)


@triton.jit
def _columns():
    lane = tl.arange(0, 2)
    return 4 * lane[:, None, None] + 2 * lane[None, :, None] + lane[None, None, :]


@triton.jit
def _pick(sums, column, WHICH: tl.constexpr):
    return tl.sum(tl.sum(tl.sum(tl.where(column == WHICH, sums, 0.0), axis=2), axis=1), axis=0)


@triton.jit
def add_tile(row_ptr, x, members, far, G: tl.constexpr, ALL_HUGE: tl.constexpr):
    """Add the far tokens of a tile (x [ROWS, V], 0 for the others) to the scratch rows of the G slices."""
    if ALL_HUGE:
        _add_huge(row_ptr, x, members, far, G)
    else:
        if tl.max(tl.max(tl.abs(x), axis=1), axis=0) <= PLAIN_LIMIT:
            _add_plain(row_ptr, x, members, far, G)
        else:
            _add_huge(row_ptr, x, members, far, G)


@triton.jit
def _add_plain(row_ptr, x, members, far, G: tl.constexpr):
    wide = x.to(tl.float64)
    weight = _scaled_weight(wide, 0.0)
    for s in range(G):  # a loop at run time: unrolled, its code would be G times as long
        member = far & (((members >> s) & 1) != 0)
        tiles_ptr = row_ptr + s * ROW + TILES + _columns()
        tl.store(tiles_ptr, tl.load(tiles_ptr) + _sums(wide, weight, member))


@triton.jit
def _add_huge(row_ptr, x, members, far, G: tl.constexpr):
    wide = x.to(tl.float64)
    column = _columns()
    for s in range(G):
        member = far & (((members >> s) & 1) != 0)
        max_x = tl.max(tl.max(tl.where(member, x, float("-inf")), axis=1), axis=0).to(tl.float64)
        if max_x > float("-inf"):
            exponent = scale_exponent(max_x)
            sums = _sums(wide, tl.where(member, _scaled_weight(wide, exponent), 0.0), member)
            w = _pick(sums, column, W)
            w2 = _pick(sums, column, W2)
            _add_scaled(row_ptr + s * ROW, exponent, w, w2, True)
            sums = tl.where((column == W) | (column == W2), 0.0, sums)
            sums = tl.where(column == PLAIN_W3, w * power_of_two(exponent), sums)
            tiles_ptr = row_ptr + s * ROW + TILES + column
            tl.store(tiles_ptr, tl.load(tiles_ptr) + sums)


@triton.jit
def add_few(row_ptr, x, members, far, count, ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr):
    """As add_tile, for ``count`` huge tokens, one at a time.

    Sums over a tile are ten exchanges between all threads for each slice; these are three for each token.
    """
    slices = tl.arange(0, power_of_two_from(G))
    rows = row_ptr + slices * ROW
    place = tl.arange(0, ROWS)[:, None] * V + tl.arange(0, V)[None, :]
    left = tl.where(far, place, -1)
    for _ in range(count):
        last = tl.max(tl.max(left, axis=1), axis=0)
        this = left == last
        left = tl.where(this, -1, left)
        value = tl.sum(tl.sum(tl.where(this, x, 0.0), axis=1), axis=0).to(tl.float64)
        its = tl.sum(tl.sum(tl.where(this, members, 0), axis=1), axis=0)
        member = (slices < G) & (((its >> slices) & 1) != 0)
        exponent = scale_exponent(value)
        w = _scaled_weight(value, exponent)
        _add_scaled(rows, exponent, w, w * w, member)
        tiles = rows + TILES
        tl.store(tiles + X, tl.load(tiles + X, mask=member) + value, mask=member)
        tl.store(tiles + SIZE, tl.load(tiles + SIZE, mask=member) + tl.abs(value), mask=member)
        tl.store(tiles + X2, tl.load(tiles + X2, mask=member) + value * value, mask=member)
        plain = w * power_of_two(exponent)
        tl.store(tiles + PLAIN_W3, tl.load(tiles + PLAIN_W3, mask=member) + plain, mask=member)
        tl.store(tiles + N, tl.load(tiles + N, mask=member) + 1.0, mask=member)
        tl.debug_barrier()


@triton.jit
def _add_scaled(rows, exponent, w, w2, member):
    """Both sides to the larger power of two, an exact multiplication, in the rows of ``member``."""
    tl.debug_barrier()
    before = tl.load(rows + SCALE, mask=member, other=0.0)
    old_w = tl.load(rows + SCALED_W, mask=member, other=0.0)
    old_w2 = tl.load(rows + SCALED_W2, mask=member, other=0.0)
    tl.debug_barrier()
    scale = tl.where(old_w > 0.0, tl.maximum(before, exponent), exponent)
    down = tl.where(old_w > 0.0, before - scale, 0.0)
    up = exponent - scale
    tl.store(rows + SCALE, scale, mask=member)
    tl.store(rows + SCALED_W, old_w * power_of_two(down) + w * power_of_two(up), mask=member)
    tl.store(rows + SCALED_W2, old_w2 * power_of_two(2.0 * down) + w2 * power_of_two(2.0 * up), mask=member)
    tl.debug_barrier()


@triton.jit
def start(row_ptr, G: tl.constexpr):
    """Zero the scratch rows of this program."""
    lane = tl.arange(0, ROW)
    for s in tl.static_range(G):
        tl.store(row_ptr + s * ROW + lane, tl.zeros((ROW,), tl.float64))


@triton.jit
def finish(rows, inside):
    """The far columns of scratch rows from their tiles; after a barrier. Returns sum |x|, to add to the near one."""
    tiles = rows + TILES
    x = tl.load(tiles + X, mask=inside, other=0.0)
    w = tl.load(tiles + W, mask=inside, other=0.0)
    n = tl.load(tiles + N, mask=inside, other=0.0)
    tl.store(rows + FAR_X, x, mask=inside)
    tl.store(rows + FAR_X2, tl.load(tiles + X2, mask=inside, other=0.0), mask=inside)
    tl.store(rows + FAR_K3, w + tl.load(tiles + PLAIN_W3, mask=inside, other=0.0) - n - x, mask=inside)
    tl.store(rows + FAR_W, w, mask=inside)
    tl.store(rows + FAR_W2, tl.load(tiles + W2, mask=inside, other=0.0), mask=inside)
    return tl.load(tiles + SIZE, mask=inside, other=0.0)
