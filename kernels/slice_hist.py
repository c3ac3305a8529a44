"""The state of a batch in one pass over its tokens: kernels, launch table, launcher.

A program walks over tiles with a fixed stride. Near tokens (|x| < 0.5) are summed in near.py; clipped and far ones by
the warps that hold some, in tail.py; what is not finite or huge by a second look, in second_look.py. The histogram
is in histogram.py, the extrema in extrema.py, the end of the launch in merge.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from pyrlstats.kernels import extrema, far, histogram, matrix, merge, near, second_look, tail, tile


@triton.jit
def _strided(start, local, columns, strides):
    """int64 element offsets of a [rows, columns] tensor; 32-bit divisions, one 64-bit one a tile."""
    row = start // columns
    inside = (start - row * columns).to(tl.int32) + local
    down = inside // columns.to(tl.int32)
    across = inside - down * columns.to(tl.int32)
    return row * strides[0] + down.to(tl.int64) * strides[0] + across.to(tl.int64) * strides[1]


@triton.jit
def _members_of_ids(ids, n_slices, first, base, G: tl.constexpr):
    """Members, histogram row (slice + 1, 0 for none), ids out of range."""
    beyond = ids >= n_slices
    local = tl.where(beyond | (ids < 0), -1, ids.to(tl.int32) - first)
    here = (local >= 0) & (local < G) & base
    outside = (beyond & base & (first == 0)).to(tl.int32)
    return tl.where(here, 1 << (local & 31), 0), tl.where(here, local + 1, 0), outside


@triton.jit
def _fetch(logp_ptr, old_ptr, mask_ptrs, base_ptr, start,
           ROWS: tl.constexpr, V: tl.constexpr, N_MASKS: tl.constexpr, HAS_BASE: tl.constexpr):  # fmt: skip
    """The words of one full tile."""
    raw = (
        tile.fetch(logp_ptr + start, ROWS, V),
        tile.fetch(old_ptr + start, ROWS, V),
    )
    for s in tl.static_range(N_MASKS):
        raw = raw + (tile.fetch(mask_ptrs[s] + start, ROWS, V),)
    if HAS_BASE:
        raw = raw + (tile.fetch(base_ptr + start, ROWS, V),)
    return raw


@triton.jit
def _unpack(raw, logp_ptr, old_ptr, mask_ptrs, base_ptr, n_slices, first,
            ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
            N_MASKS: tl.constexpr, HAS_BASE: tl.constexpr):  # fmt: skip
    """x of a fetched tile (anything for non-members), members, histogram rows, ids out of range."""
    outside = tl.zeros((ROWS, V), tl.int32)
    if HAS_BASE:
        base = tile.is_set(raw[2 + N_MASKS], base_ptr.dtype.element_ty, ROWS, V)
    else:
        base = tl.full((ROWS, V), 1, tl.int1)
    if MODE == tile.ALL:
        members = base.to(tl.int32)
    elif MODE == tile.BITS:
        bits = tile.unpack_integers(raw[2], mask_ptrs[0].dtype.element_ty, ROWS, V)
        members = tl.where(base, (bits >> first) & ((1 << G) - 1), 0)
    elif MODE == tile.MASKS:
        if tile.all_bytes(mask_ptrs, G):  # four tokens at a time
            packed = (tile.set_bytes(raw[2]) >> 7) & 0x01010101
            for s in tl.static_range(1, G):
                packed = packed | ((tile.set_bytes(raw[2 + s]) >> (7 - s)) & (0x01010101 << s))
            members = tile.unpack_bytes(packed, ROWS, V)
        else:
            members = tile.is_set(raw[2], mask_ptrs[0].dtype.element_ty, ROWS, V).to(tl.int32)
            for s in tl.static_range(1, G):
                mask = tile.is_set(raw[2 + s], mask_ptrs[s].dtype.element_ty, ROWS, V)
                members = members | (mask.to(tl.int32) << s)
        if HAS_BASE:
            members = tl.where(base, members, 0)
    if MODE == tile.IDS:
        ids = tile.unpack_integers(raw[2], mask_ptrs[0].dtype.element_ty, ROWS, V)
        members, row, outside = _members_of_ids(ids, n_slices, first, base, G)
    else:
        row = members
    x = tile.log_ratio(
        tile.unpack_floats(raw[0], logp_ptr.dtype.element_ty, ROWS, V),
        tile.unpack_floats(raw[1], old_ptr.dtype.element_ty, ROWS, V),
    )
    return x, members, row, outside


@triton.jit
def _load(logp_ptr, old_ptr, mask_ptrs, base_ptr, start, n, n_slices, first, columns, strides,
          ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
          N_MASKS: tl.constexpr, HAS_BASE: tl.constexpr, FLAT: tl.constexpr):  # fmt: skip
    """What _unpack returns, of any tile: one element at a time, with strides, masked at the end of the tokens."""
    local = tl.arange(0, ROWS)[:, None] * V + tl.arange(0, V)[None, :]
    keep = local < tl.minimum(n - start, ROWS * V).to(tl.int32)
    if FLAT:  # 32-bit offsets from a scalar
        logp_ptr = logp_ptr + start
        old_ptr = old_ptr + start
        base_ptr = base_ptr + start
        moved = ()
        for s in tl.static_range(N_MASKS):
            moved = moved + (mask_ptrs[s] + start,)
        mask_ptrs = moved
        offsets = (local, local, local, local, local, local, local)
    else:
        offsets = (_strided(start, local, columns, strides[0]),)
        for t in tl.static_range(1, 7):
            offsets = offsets + (_strided(start, local, columns, strides[t]),)
    outside = tl.zeros((ROWS, V), tl.int32)
    base = keep
    if HAS_BASE:
        base = keep & (tl.load(base_ptr + offsets[2], mask=keep, other=0) != 0)
    if MODE == tile.ALL:
        members = base.to(tl.int32)
    elif MODE == tile.BITS:
        bits = tl.load(mask_ptrs[0] + offsets[3], mask=keep, other=0).to(tl.int32)
        members = tl.where(base, (bits >> first) & ((1 << G) - 1), 0)
    elif MODE == tile.MASKS:
        members = tl.zeros((ROWS, V), tl.int32)
        for s in tl.static_range(G):
            mask = tl.load(mask_ptrs[s] + offsets[3 + s], mask=keep, other=0) != 0
            members = members | (mask.to(tl.int32) << s)
        members = tl.where(base, members, 0)
    if MODE == tile.IDS:
        ids = tl.load(mask_ptrs[0] + offsets[3], mask=keep, other=0)
        members, row, outside = _members_of_ids(ids, n_slices, first, base, G)
    else:
        row = members
    x = tile.log_ratio(
        tl.load(logp_ptr + offsets[0], mask=keep, other=0.0), tl.load(old_ptr + offsets[1], mask=keep, other=0.0)
    )
    return x, members, row, outside


@triton.jit
def _read(logp_ptr, old_ptr, mask_ptrs, base_ptr, i, full_tiles, n, n_slices, first, columns, strides,
          ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
          N_MASKS: tl.constexpr, HAS_BASE: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """Tile i, the fast way if it can be."""
    start = tl.cast(i, tl.int64) * (ROWS * V)
    if WHOLE or (ALIGNED and i < full_tiles):
        raw = _fetch(logp_ptr, old_ptr, mask_ptrs, base_ptr, start, ROWS, V, N_MASKS, HAS_BASE)
        x, members, row, outside = _unpack(
            raw, logp_ptr, old_ptr, mask_ptrs, base_ptr, n_slices, first,
            ROWS, V, G, MODE, N_MASKS, HAS_BASE)  # fmt: skip
    else:
        x, members, row, outside = _load(
            logp_ptr, old_ptr, mask_ptrs, base_ptr, start, n, n_slices, first, columns, strides,
            ROWS, V, G, MODE, N_MASKS, HAS_BASE, FLAT)  # fmt: skip
    return x, members, row, outside


@triton.jit
def _lowest_bit(bits):
    """Its place, of a number with one bit or more: the exponent of the float32 that it is exactly."""
    return ((bits & -bits).to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _opaque(start):
    """LLVM would keep a pointer to every element of the last tile, and move them all on with every other tile."""
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [start], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _add_tile(sums, counters, extremes, limits, x, members, row, outside, histogram_ptr, counts_ptr,
              low, high, tail_bits,
              ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
              P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
              WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Add a tile, but for what second_look.py does; x of non-members may be anything.

    Returns too the bits of the largest magnitudes [ROWS].
    """
    if MODE == tile.IDS:
        slot = tl.where(outside != 0, 2 * P + 2 + tile.OUT_OF_RANGE, tile.NOWHERE)
        counters = histogram.add(counters, slot, outside, outside, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)
    x = tl.where(members != 0, x, 0.0)
    counters = histogram.add_bins(
        counters, x, members, row, histogram_ptr, counts_ptr, G, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip
    largest = tl.max(x.to(tl.int32, bitcast=True) & tile.ABS_BITS, axis=1)
    extremes = extrema.update(extremes, counters, limits, x, members, largest, ROWS, V, G, P, WAY)
    if histogram.in_shared(WAY):
        tail.add(counters, x, members, row, largest, tail_bits, low, high, ROWS, V, G, P, WAY)
    sums = near.add(sums, x, members, largest, ROWS, V, G, WAY)
    return sums, counters, extremes, largest


@triton.jit
def _store_program(sums, counters, extremes, row_ptr, counts_ptr, any_far, ROWS: tl.constexpr,
                   G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """The program's sums and extrema into its scratch rows; after a barrier."""
    slices = tl.arange(0, histogram.power_of_two_from(G))
    rows = row_ptr + slices * far.ROW
    inside = slices < G
    total_size = near.store(sums, row_ptr, ROWS, G, WAY)
    top, bottom = extrema.result(extremes, counters, slices, ROWS, G, P, WAY)
    tl.store(rows + far.MAX_X, top, mask=inside)
    tl.store(rows + far.NEG_MIN_X, bottom, mask=inside)
    if any_far != 0:
        if histogram.in_shared(WAY):
            tail.finish(row_ptr, counts_ptr, ROWS, G, WAY)
            tl.debug_barrier()
        total_size += far.finish(rows, inside)
    tl.store(rows + far.ABS_X, total_size, mask=inside)


@triton.jit
def _run(logp_ptr, old_ptr, mask_ptrs, base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, run, low, high, tail_bits, columns, strides,
         ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr,
         FLAT: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
         P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr,
         ):  # fmt: skip
    TILE: tl.constexpr = ROWS * V
    N_MASKS: tl.constexpr = G if MODE == tile.MASKS else (0 if MODE == tile.ALL else 1)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    counts_ptr = state_ptr + first * tile.N_COUNTS
    histogram_ptr = state_ptr + n_slices * tile.N_COUNTS + first * 2 * P
    row_ptr = scratch_ptr + program * (G * far.ROW)

    full_tiles = (n // TILE).to(tl.int32)
    last_full = full_tiles - 1
    if ALIGNED:
        first_fetch = tl.minimum(program * run, last_full)
        raw = _fetch(logp_ptr, old_ptr, mask_ptrs, base_ptr, tl.cast(first_fetch, tl.int64) * TILE,
                     ROWS, V, N_MASKS, HAS_BASE)  # fmt: skip
    else:
        raw = (0,)
    far.start(row_ptr, G)
    counters = histogram.start(n, scratch_ptr, G, P, WAY, SLOTS, matrix.shared_bytes(ROWS, G, WAY))
    extremes = extrema.start(ROWS, G, WAY)
    sums = near.start(ROWS, G, WAY)
    any_far = tl.cast(0, tl.int32)
    if matrix.is_used(G, WAY):
        matrix.start(ROWS, G, WAY)
    elif histogram.in_shared(WAY):
        tail.start(ROWS)
        second_look.declare_parking(5 * G)

    look_again = far.HUGE_BITS if histogram.in_shared(WAY) else tail_bits
    n_tiles = ((n + TILE - 1) // TILE).to(tl.int32)
    for first_tile in range(program * run, n_tiles, programs * run):
        end = tl.minimum(first_tile + run, n_tiles)
        limits = extrema.thresholds(counters, ROWS, G, P, WAY)
        seen = tl.zeros((ROWS,), tl.int32)
        again = tl.zeros((ROWS,), tl.int32)  # bit i: tile i of the run
        for i in range(first_tile, end):
            start = tl.cast(i, tl.int64) * TILE
            if ALIGNED:
                if WHOLE or i < full_tiles:
                    x, members, row, outside = _unpack(
                        raw, logp_ptr, old_ptr, mask_ptrs, base_ptr, n_slices, first,
                        ROWS, V, G, MODE, N_MASKS, HAS_BASE)  # fmt: skip
                else:
                    if histogram.in_shared(WAY):
                        start = _opaque(start)
                    x, members, row, outside = _load(
                        logp_ptr, old_ptr, mask_ptrs, base_ptr, start, n, n_slices, first, columns, strides,
                        ROWS, V, G, MODE, N_MASKS, HAS_BASE, FLAT)  # fmt: skip
                # the next tile is on its way while this one is counted
                following = tl.where(i + 1 < end, i + 1, first_tile + programs * run)
                following = tl.minimum(following, last_full)
                raw = _fetch(logp_ptr, old_ptr, mask_ptrs, base_ptr, tl.cast(following, tl.int64) * TILE,
                             ROWS, V, N_MASKS, HAS_BASE)  # fmt: skip
            else:
                x, members, row, outside = _load(
                    logp_ptr, old_ptr, mask_ptrs, base_ptr, start, n, n_slices, first, columns, strides,
                    ROWS, V, G, MODE, N_MASKS, HAS_BASE, FLAT)  # fmt: skip
            sums, counters, extremes, largest = _add_tile(
                sums, counters, extremes, limits, x, members, row, outside, histogram_ptr, counts_ptr,
                low, high, tail_bits, ROWS, V, G, MODE, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip
            seen = tl.maximum(seen, largest)
            again = again | tl.where(largest >= look_again, 1 << (i - first_tile), 0)
        # one vote a run: a vote a tile would keep the warps in step, all in the float64 unit at once
        largest = tl.max(seen, axis=0)
        any_far = tl.where(largest >= tile.NEAR_BITS, 1, any_far)
        if largest >= look_again:
            tiles = tl.reduce(again, 0, extrema.either)
            if near.is_parked(G, WAY):
                second_look.park(sums, 5 * G)
            while tiles != 0:
                i = first_tile + _lowest_bit(tiles)
                tiles = tiles & (tiles - 1)
                x, members, row, outside = _read(
                    logp_ptr, old_ptr, mask_ptrs, base_ptr, i, full_tiles, n, n_slices, first, columns, strides,
                    ROWS, V, G, MODE, N_MASKS, HAS_BASE, FLAT, ALIGNED, WHOLE)  # fmt: skip
                counters = second_look.add_tile(
                    counters, x, members, row, largest, histogram_ptr, counts_ptr, row_ptr, low, high,
                    G, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip
            if near.is_parked(G, WAY):
                sums = second_look.unpark(sums, 5 * G)
            if ALIGNED:  # read anew: kept, it would be spilled in every tile
                following = tl.minimum(first_tile + programs * run, last_full)
                raw = _fetch(logp_ptr, old_ptr, mask_ptrs, base_ptr, tl.cast(following, tl.int64) * TILE,
                             ROWS, V, N_MASKS, HAS_BASE)  # fmt: skip

    tl.debug_barrier()
    histogram.flush(counters, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)
    _store_program(sums, counters, extremes, row_ptr, counts_ptr, any_far, ROWS, G, P, WAY)
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


@triton.jit(do_not_specialize=["n", "n_slices", "first", "run", "tail_bits"])
def slice_hist_kernel(logp_ptr, old_ptr, mask0, mask1, mask2, mask3, base_ptr, state_ptr, scratch_ptr, ticket_ptr,
                      n: tl.int64, n_slices: tl.int32, first: tl.int32, run: tl.int32,
                      low: tl.float32, high: tl.float32, tail_bits: tl.int32,
                      ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
                      HAS_BASE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
                      P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
                      WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Contiguous tokens [n]; ALIGNED: every pointer to 16 bytes, and at least one full tile; WHOLE: no other tile.

    Without the code for a last, partial tile 20 registers less are spilled, which is 2 to 5 % of the rate.
    """
    _run(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, run, low, high, tail_bits, n, ((1, 1),),
         ROWS, V, G, MODE, HAS_BASE, True, ALIGNED, WHOLE, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip


@triton.jit(do_not_specialize=[
    "n", "n_slices", "first", "run", "tail_bits", "columns", "logp_row", "logp_col", "old_row", "old_col",
    "base_row", "base_col", "row0", "col0", "row1", "col1", "row2", "col2", "row3", "col3"])  # fmt: skip
def slice_hist_strided_kernel(logp_ptr, old_ptr, mask0, mask1, mask2, mask3, base_ptr, state_ptr, scratch_ptr,
                              ticket_ptr, n: tl.int64, n_slices: tl.int32, first: tl.int32, run: tl.int32,
                              low: tl.float32, high: tl.float32, tail_bits: tl.int32, columns: tl.int64,
                              logp_row: tl.int64, logp_col: tl.int64, old_row: tl.int64, old_col: tl.int64,
                              base_row: tl.int64, base_col: tl.int64, row0: tl.int64, col0: tl.int64,
                              row1: tl.int64, col1: tl.int64, row2: tl.int64, col2: tl.int64,
                              row3: tl.int64, col3: tl.int64,
                              ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
                              HAS_BASE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
                              P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
                              WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Tokens [n / columns, columns] with two strides a tensor, in elements; 0 for a broadcast mask."""
    strides = ((logp_row, logp_col), (old_row, old_col), (base_row, base_col),
               (row0, col0), (row1, col1), (row2, col2), (row3, col3))  # fmt: skip
    _run(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, run, low, high, tail_bits, columns, strides,
         ROWS, V, G, MODE, HAS_BASE, False, False, False, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip


class Config(NamedTuple):
    """Shape of a launch."""

    rows: int  # threads a program: one row of a tile belongs to one thread
    v: int  # contiguous tokens of a thread
    run: int  # tiles between two votes on a second look, 31 at most
    per_sm: int  # programs an SM
    many_rows: bool  # up to 124 KiB of histogram rows a program, so one program an SM
    registers: int  # at most, a thread; the far branch would take all there are


def config(n: int, slices: int, narrow: bool, roomy: bool, portable: bool) -> Config:
    """By measurement on an H100; ``narrow``: 16-bit log-probabilities, ``roomy``: shared memory for many rows."""
    if portable:
        return Config(rows=256, v=8, run=4, per_sm=2, many_rows=False, registers=0)
    if slices <= 2:
        # 16-bit inputs want one program an SM (0.86 of the read rate, not 0.83), others two
        rows, per_sm = (512, 1) if narrow and n >= 1 << 21 else (256, 2)
        return Config(rows=rows, v=8, run=16, per_sm=per_sm, many_rows=False, registers=128)
    if n >= 1 << 21 and roomy:
        return Config(rows=512, v=8, run=16, per_sm=1, many_rows=True, registers=128)
    if n > 1 << 14:
        # up to 65,536 tokens 64 programs, not 32: 9.5 us, not 9.8, as a replayed graph
        rows = 128 if n <= 1 << 16 else 256
        return Config(rows=rows, v=8, run=8, per_sm=1, many_rows=False, registers=255)
    return Config(rows=128, v=4, run=8, per_sm=2, many_rows=False, registers=255)


def constants(layout: Any, way: int) -> dict[str, int]:
    """The constexpr arguments that a layout decides."""
    return {
        "P": layout.bins_per_sign,
        "SHIFT": layout.shift,
        "OFFSET": layout.offset,
        "WAY": way,
        "SLOTS": max(2 * layout.n_bins, 32),
    }
