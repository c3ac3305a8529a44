"""The state of a batch in one pass over its tokens: kernels, launch table, launcher.

A program walks over tiles with a fixed stride. Near tokens (|x| < 0.5) are summed in registers, far ones, clipped
ones and non-finite ones only in tiles that hold some; the histogram is in histogram.py, the extrema in extrema.py,
the end of the launch in merge.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from pyrlstats.kernels import extrema, far, histogram, merge, tile


@triton.jit
def _strided(start, local, columns, strides):
    """int64 element offsets of a [rows, columns] tensor; 32-bit divisions, one 64-bit one a tile."""
    row = start // columns
    inside = (start - row * columns).to(tl.int32) + local
    down = inside // columns.to(tl.int32)
    across = inside - down * columns.to(tl.int32)
    return row * strides[0] + down.to(tl.int64) * strides[0] + across.to(tl.int64) * strides[1]


@triton.constexpr_function
def _all_bytes(mask_ptrs, G):
    return all(mask_ptrs[s].dtype.element_ty.primitive_bitwidth <= 8 for s in range(G))


@triton.jit
def _members(mask_ptrs, offsets, keep, base, n_slices, first,
             SHAPE: tl.constexpr, MODE: tl.constexpr, G: tl.constexpr, FULL: tl.constexpr,
             WAY: tl.constexpr):  # fmt: skip
    """int32: bit s = member of slice first + s; the histogram row; tokens whose id is out of range."""
    outside = tl.zeros(SHAPE, tl.int32)
    if MODE == tile.MASKS:
        if histogram.in_shared(WAY) and _all_bytes(mask_ptrs, G):
            masks = (tile.load(mask_ptrs[0].to(tl.pointer_type(tl.int8), bitcast=True), offsets[0], keep, FULL),)
            for s in tl.static_range(1, G):
                ptr = mask_ptrs[s].to(tl.pointer_type(tl.int8), bitcast=True)
                masks = masks + (tile.load(ptr, offsets[s], keep, FULL),)
            members = tile.pack_bytes(masks, G)
        else:
            members = (tile.load(mask_ptrs[0], offsets[0], keep, FULL) != 0).to(tl.int32)
            for s in tl.static_range(1, G):
                mask = tile.load(mask_ptrs[s], offsets[s], keep, FULL) != 0
                members = members | (mask.to(tl.int32) << s)
    elif MODE == tile.BITS:
        bits = tile.load(mask_ptrs[0], offsets[0], keep, FULL).to(tl.int32)
        members = (bits >> first) & ((1 << G) - 1)
    elif MODE == tile.IDS:
        ids = tile.load(mask_ptrs[0], offsets[0], keep, FULL)
        beyond = ids >= n_slices
        local = tl.where(beyond | (ids < 0), -1, ids.to(tl.int32) - first)
        members = tl.where((local >= 0) & (local < G), 1 << (local & 31), 0)
        members = tl.where(base, members, 0)
        outside = (beyond & base & (first == 0)).to(tl.int32)
        return members, tl.where(members != 0, local + 1, 0), outside
    else:
        members = tl.full(SHAPE, 1, tl.int32)
    members = tl.where(base, members, 0)
    return members, members, outside


@triton.jit
def _columns(x, ROWS: tl.constexpr, V: tl.constexpr):
    """[ROWS, V] -> V tensors [ROWS], in no particular order: no exchange, since a row belongs to one thread."""
    if V == 1:
        return (tl.reshape(x, (ROWS,)),)
    else:
        left, right = tl.split(tl.reshape(x, (ROWS, V // 2, 2)))
        return _columns(left, ROWS, V // 2) + _columns(right, ROWS, V // 2)


@triton.jit
def _add_near(near, x, members, ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr):
    """Five float64 [ROWS] sums a slice; x [ROWS, V] is 0 where not near.

    One fused multiply-add a token, slice and sum: tl.sum over axis 1 took one and a half.
    """
    xs = _columns(x, ROWS, V)
    member_sets = _columns(members, ROWS, V)
    for j in tl.static_range(V):
        wide, square, k3, excess = tile.near_terms(xs[j])
        size = tl.abs(wide)
        added = ()
        for s in tl.static_range(G):
            if G == 1:  # x is already 0 outside the only slice
                added = added + (
                    near[0] + wide,
                    tl.fma(wide, wide, near[1]),
                    near[2] + k3,
                    near[3] + excess,
                    near[4] + size,
                )
            else:
                f = tl.where((member_sets[j] & (1 << s)) != 0, 1.0, 0.0).to(tl.float64)
                added = added + (
                    tl.fma(f, wide, near[5 * s]),
                    tl.fma(f, square, near[5 * s + 1]),
                    tl.fma(f, k3, near[5 * s + 2]),
                    tl.fma(f, excess, near[5 * s + 3]),
                    tl.fma(f, size, near[5 * s + 4]),
                )
        near = added
    return near


@triton.jit
def _load(logp_ptr, old_ptr, mask_ptrs, base_ptr, start, n, n_slices, first, columns, strides,
          ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr,
          FLAT: tl.constexpr, FULL: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """x of one tile (0 for non-members), members, histogram rows, ids out of range."""
    SHAPE: tl.constexpr = (ROWS, V)
    local = tl.arange(0, ROWS)[:, None] * V + tl.arange(0, V)[None, :]
    keep = local < n - start
    N_MASKS: tl.constexpr = G if MODE == tile.MASKS else 1
    if FLAT:
        logp = tile.load(logp_ptr + start, local, keep, FULL)
        old = tile.load(old_ptr + start, local, keep, FULL)
        masks = (mask_ptrs[0] + start,)
        mask_offsets = (local,)
        for s in tl.static_range(1, N_MASKS):
            masks = masks + (mask_ptrs[s] + start,)
            mask_offsets = mask_offsets + (local,)
        base_at = base_ptr + start
        base_offsets = local
    else:
        logp = tile.load(logp_ptr, _strided(start, local, columns, strides[0]), keep, FULL)
        old = tile.load(old_ptr, _strided(start, local, columns, strides[1]), keep, FULL)
        masks = mask_ptrs
        mask_offsets = (_strided(start, local, columns, strides[3]),)
        for s in tl.static_range(1, N_MASKS):
            mask_offsets = mask_offsets + (_strided(start, local, columns, strides[3 + s]),)
        base_at = base_ptr
        base_offsets = _strided(start, local, columns, strides[2])
    if HAS_BASE:
        base = tile.load(base_at, base_offsets, keep, FULL) != 0
    elif FULL:
        base = tl.full(SHAPE, 1, tl.int1)
    else:
        base = keep
    members, row, outside = _members(masks, mask_offsets, keep, base, n_slices, first, SHAPE, MODE, G, FULL, WAY)
    return tl.where(members != 0, tile.log_ratio(logp, old), 0.0), members, row, outside


@triton.jit
def _tile(near, counters, extremes, any_far, x, members, row, outside, histogram_ptr, counts_ptr, row_ptr,
          low, high, tail_bits,
          ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
          P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
          WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Add a tile to the near sums, counters and extrema, and to the program's scratch rows what is far."""
    nowhere: tl.constexpr = 2 * P + tile.ZERO
    if MODE == tile.IDS:
        slot = tl.where(outside != 0, 2 * P + tile.OUT_OF_RANGE, nowhere)
        counters = histogram.add(counters, slot, outside, outside, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)

    near_x = x
    magnitude = x.to(tl.int32, bitcast=True) & tile.ABS_BITS
    largest = tl.max(tl.max(magnitude, axis=1), axis=0)
    if largest >= tail_bits:  # some token is clipped, far or not finite
        finite = magnitude < tile.INF_BITS
        slot = tl.where(x > 0, 2 * P + tile.POS_INF, 2 * P + tile.NEG_INF)
        slot = tl.where(magnitude > tile.INF_BITS, 2 * P + tile.NAN, slot)
        counters = histogram.add(
            counters, tl.where(finite, nowhere, slot), tl.where(finite, 0, members), tl.where(finite, 0, row),
            histogram_ptr, counts_ptr, G, P, WAY, SLOTS)  # fmt: skip
        members = tl.where(finite, members, 0)
        row = tl.where(finite, row, 0)
        x = tl.where(finite, x, 0.0)
        slot = tl.where(x < low, 2 * P + tile.CLIP_LOW, tl.where(x > high, 2 * P + tile.CLIP_HIGH, nowhere))
        clipped = slot != nowhere
        counters = histogram.add(
            counters, slot, tl.where(clipped, members, 0), tl.where(clipped, row, 0),
            histogram_ptr, counts_ptr, G, P, WAY, SLOTS)  # fmt: skip
        near_x = x
        if largest >= tile.NEAR_BITS:
            is_far = finite & (magnitude >= tile.NEAR_BITS)
            counters = histogram.add(
                counters, tl.where(is_far, 2 * P + tile.FAR, nowhere), tl.where(is_far, members, 0),
                tl.where(is_far, row, 0), histogram_ptr, counts_ptr, G, P, WAY, SLOTS)  # fmt: skip
            far.add_tile(row_ptr, x, members, is_far, G)
            any_far += 1
            near_x = tl.where(is_far, 0.0, x)

    slot = tile.slot_of(x, P, SHIFT, OFFSET)
    counters = histogram.add(counters, slot, members, row, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)
    extremes = extrema.update(extremes, counters, x, members, G, P, V, WAY)
    near = _add_near(near, near_x, members, ROWS, V, G)
    return near, counters, extremes, any_far


@triton.jit
def _store_program(near, counters, extremes, row_ptr, any_far,
                   G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """The program's sums and extrema into its scratch rows; after a barrier."""
    column = tl.arange(0, far.RESULT)
    for s in tl.static_range(G):
        far_size = tl.cast(0.0, tl.float64)
        if any_far != 0:
            far_size = far.finish(row_ptr + s * far.ROW)
        value = tl.zeros((far.RESULT,), tl.float64)
        for j in tl.static_range(5):
            value = tl.where(column == j, tl.sum(near[5 * s + j], axis=0), value)
        value = tl.where(column == far.ABS_X, value + far_size, value)
        top, bottom = extrema.result(extremes, counters, s, G, P, WAY)
        value = tl.where(column == far.MAX_X, top, value)
        value = tl.where(column == far.NEG_MIN_X, bottom, value)
        mine = (column < 5) | (column == far.MAX_X) | (column == far.NEG_MIN_X)
        tl.store(row_ptr + s * far.ROW + column, value, mask=mine)


@triton.jit
def _run(logp_ptr, old_ptr, mask_ptrs, base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, low, high, tail_bits, columns, strides,
         ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr,
         FLAT: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
         WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    TILE: tl.constexpr = ROWS * V
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    n = tl.cast(n, tl.int64)
    counts_ptr = state_ptr + first * tile.N_COUNTS
    histogram_ptr = state_ptr + n_slices * tile.N_COUNTS + first * 2 * P
    row_ptr = scratch_ptr + program * (G * far.ROW)

    far.start(row_ptr, G)
    counters = histogram.start(n, scratch_ptr, G, P, WAY, SLOTS)
    extremes = extrema.start(ROWS, G, WAY)
    near = (tl.zeros((ROWS,), tl.float64),)
    for _ in tl.static_range(1, 5 * G):
        near = near + (tl.zeros((ROWS,), tl.float64),)

    any_far = tl.cast(0, tl.int32)
    full_tiles = n // TILE
    for i in range(program, (n + TILE - 1) // TILE, programs):
        start = tl.cast(i, tl.int64) * TILE
        if i < full_tiles:
            x, members, row, outside = _load(
                logp_ptr, old_ptr, mask_ptrs, base_ptr, start, n, n_slices, first, columns, strides,
                ROWS, V, G, MODE, HAS_BASE, FLAT, True, WAY)  # fmt: skip
        else:
            x, members, row, outside = _load(
                logp_ptr, old_ptr, mask_ptrs, base_ptr, start, n, n_slices, first, columns, strides,
                ROWS, V, G, MODE, HAS_BASE, FLAT, False, WAY)  # fmt: skip
        near, counters, extremes, any_far = _tile(
            near, counters, extremes, any_far, x, members, row, outside, histogram_ptr, counts_ptr, row_ptr,
            low, high, tail_bits, ROWS, V, G, MODE, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip

    tl.debug_barrier()
    _store_program(near, counters, extremes, row_ptr, any_far, G, P, WAY)
    histogram.flush(counters, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)
    tl.debug_barrier()  # every thread's stores come before the ticket
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel")
    if ticket == programs - 1:
        tl.store(ticket_ptr, 0)  # ready for the next launch or graph replay
        floats_ptr = (state_ptr + n_slices * (tile.N_COUNTS + 2 * P)).to(tl.pointer_type(tl.float64), bitcast=True)
        merge.merge(
            scratch_ptr,
            floats_ptr + first * far.N_SUMS,
            floats_ptr + n_slices * far.N_SUMS + first * 2,
            programs,
            G,
        )


@triton.jit
def slice_hist_kernel(logp_ptr, old_ptr, mask0, mask1, mask2, mask3, base_ptr, state_ptr, scratch_ptr, ticket_ptr,
                      n, n_slices, first, low, high, tail_bits,
                      ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
                      HAS_BASE: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
                      WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Contiguous tokens [n]. The state and the scratch rows are as slice_hist() says."""
    _run(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, low, high, tail_bits, 1, ((1, 1),),
         ROWS, V, G, MODE, HAS_BASE, True, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip


@triton.jit
def slice_hist_strided_kernel(logp_ptr, old_ptr, mask0, mask1, mask2, mask3, base_ptr, state_ptr, scratch_ptr,
                              ticket_ptr, n, n_slices, first, low, high, tail_bits, columns,
                              logp_row, logp_col, old_row, old_col, base_row, base_col,
                              row0, col0, row1, col1, row2, col2, row3, col3,
                              ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
                              HAS_BASE: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
                              WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Tokens [n / columns, columns] with two strides a tensor, in elements; 0 for a broadcast mask."""
    strides = ((logp_row, logp_col), (old_row, old_col), (base_row, base_col),
               (row0, col0), (row1, col1), (row2, col2), (row3, col3))  # fmt: skip
    _run(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, low, high, tail_bits, tl.cast(columns, tl.int64), strides,
         ROWS, V, G, MODE, HAS_BASE, False, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip


class Config(NamedTuple):
    """Shape of a launch."""

    rows: int  # threads a program: one row of a tile belongs to one thread
    v: int  # contiguous tokens of a thread
    per_sm: int  # programs an SM
    many_rows: bool  # more than 48 KiB of histogram rows a program, so one program an SM


def config(n: int, itemsize: int, slices: int, portable: bool) -> Config:
    """By measurement on an H100."""
    if portable:
        return Config(rows=256, v=8, per_sm=2, many_rows=False)
    if n >= 1 << 22 and slices > 2:
        return Config(rows=512, v=8, per_sm=1, many_rows=True)
    return Config(rows=256, v=8, per_sm=2, many_rows=False)


def constants(layout: Any, way: int) -> dict[str, int]:
    """The constexpr arguments that a layout decides."""
    return {
        "P": layout.bins_per_sign,
        "SHIFT": layout.shift,
        "OFFSET": layout.offset,
        "WAY": way,
        "SLOTS": max(2 * layout.n_bins, 32),
    }
