"""What the first pass over a run of tiles leaves: tokens that are not finite, and huge ones.

Both are rare enough to read the whole run again. Where there is no inline PTX (tail.py), clipped and far tokens too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import far, histogram, tile

FEW = tl.constexpr(8)  # huge tokens of a tile that are added one at a time


@triton.constexpr_function
def _declare_parking_asm(COUNT):
    return f".local .align 8 .b8 pyrlstats_parked[{8 * COUNT}];\nmov.u32 $0, 0;"


@triton.constexpr_function
def _park_asm(INDEX):
    return f"st.local.f64 [pyrlstats_parked+{8 * INDEX}], $1; mov.u32 $0, 0;"


@triton.constexpr_function
def _unpark_asm(INDEX):
    return f"ld.local.f64 $0, [pyrlstats_parked+{8 * INDEX}];"


@triton.jit
def declare_parking(COUNT: tl.constexpr):
    tl.inline_asm_elementwise(
        _declare_parking_asm(COUNT), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def park(near, COUNT: tl.constexpr):
    """Near sums to local memory while a rare branch needs the registers; ptxas would spill them everywhere."""
    for k in tl.static_range(COUNT):
        tl.inline_asm_elementwise(_park_asm(k), "=r,d", [near[k]], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def unpark(near, COUNT: tl.constexpr):
    back = ()
    for k in tl.static_range(COUNT):
        back = back + (
            tl.inline_asm_elementwise(
                _unpark_asm(k), "=d,r", [tl.zeros_like(near[k]).to(tl.int32)], dtype=tl.float64, is_pure=False, pack=1
            ),
        )
    return back


@triton.jit
def _move_non_finite(counters, x, magnitude, members, row, histogram_ptr, counts_ptr,
                     G: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
                     WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """The first pass took them for the largest of numbers."""
    finite = magnitude < tile.INF_BITS
    members = tl.where(finite, 0, members)
    row = tl.where(finite, 0, row)
    slot = tl.where(x > 0, 2 * P + 2 + tile.POS_INF, 2 * P + 2 + tile.NEG_INF)
    slot = tl.where(magnitude > tile.INF_BITS, 2 * P + 2 + tile.NAN, slot)
    slot = tl.where(finite, tile.NOWHERE, slot)
    counters = histogram.add(counters, slot, members, row, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)
    slot = tl.where(finite, tile.NOWHERE, tile.slot_of(x, P, SHIFT, OFFSET))
    counters = histogram.add(counters, slot, members, row, histogram_ptr, counts_ptr, G, P, WAY, SLOTS, -1)
    if histogram.in_shared(WAY):
        infinite = magnitude == tile.INF_BITS
        slot = tl.where(x > 0, 2 * P + 2 + tile.CLIP_HIGH, 2 * P + 2 + tile.CLIP_LOW)
        counters = histogram.add(
            counters, tl.where(infinite, slot, tile.NOWHERE), tl.where(infinite, members, 0),
            tl.where(infinite, row, 0), histogram_ptr, counts_ptr, G, P, WAY, SLOTS, -1)  # fmt: skip
    return counters


@triton.jit
def _add_clips(counters, x, magnitude, members, row, histogram_ptr, counts_ptr, low, high,
               G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    slot = tl.where(x > high, 2 * P + 2 + tile.CLIP_HIGH, tile.NOWHERE)
    slot = tl.where(x < low, 2 * P + 2 + tile.CLIP_LOW, slot)
    clipped = (magnitude < tile.INF_BITS) & (slot != tile.NOWHERE)
    return histogram.add(
        counters, tl.where(clipped, slot, tile.NOWHERE), tl.where(clipped, members, 0), tl.where(clipped, row, 0),
        histogram_ptr, counts_ptr, G, P, WAY, SLOTS)  # fmt: skip


@triton.jit
def add_tile(counters, x, members, row, largest, histogram_ptr, counts_ptr, row_ptr, low, high,
             G: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
             WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """largest: bits of the largest magnitude of the run; x of non-members may be anything."""
    x = tl.where(members != 0, x, 0.0)
    magnitude = x.to(tl.int32, bitcast=True) & tile.ABS_BITS
    if largest >= tile.INF_BITS:
        counters = _move_non_finite(
            counters, x, magnitude, members, row, histogram_ptr, counts_ptr,
            G, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip
    if histogram.in_shared(WAY):
        is_far = magnitude >= far.HUGE_BITS
    else:
        counters = _add_clips(
            counters, x, magnitude, members, row, histogram_ptr, counts_ptr, low, high, G, P, WAY, SLOTS)  # fmt: skip
        is_far = magnitude >= tile.NEAR_BITS
    is_far = is_far & (magnitude < tile.INF_BITS)
    # a tile whose tokens are not finite may have none
    count = tl.sum(tl.sum(is_far.to(tl.int32), axis=1), axis=0)
    if count != 0:
        x = tl.where(is_far, x, 0.0)
        members = tl.where(is_far, members, 0)
        counters = histogram.add(
            counters, tl.where(is_far, 2 * P + 2 + tile.FAR, tile.NOWHERE), members, tl.where(is_far, row, 0),
            histogram_ptr, counts_ptr, G, P, WAY, SLOTS)  # fmt: skip
        if histogram.in_shared(WAY) and count <= FEW:
            far.add_few(row_ptr, x, members, is_far, count, x.shape[0], x.shape[1], G)
        else:
            far.add_tile(row_ptr, x, members, is_far, G, histogram.in_shared(WAY))
    return counters
