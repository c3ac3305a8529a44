"""The state of a batch in one pass over its tokens: kernels, launch table, launcher.

A program walks over tiles with a fixed stride. Near tokens (|x| < 0.5) are summed in registers; clipped and far ones
by the warps that hold some, in tail.py; what is not finite or huge by a second look, in second_look.py. The histogram
is in histogram.py, the extrema in extrema.py, the end of the launch in merge.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from pyrlstats.kernels import extrema, far, histogram, merge, second_look, tail, tile


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
          N_MASKS: tl.constexpr, HAS_BASE: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Tile i, the fast way if it can be."""
    start = tl.cast(i, tl.int64) * (ROWS * V)
    if ALIGNED and i < full_tiles:
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
def _columns(x, ROWS: tl.constexpr, V: tl.constexpr):
    """[ROWS, V] -> V tensors [ROWS], in no particular order: no exchange, since a row belongs to one thread."""
    if V == 1:
        return (tl.reshape(x, (ROWS,)),)
    else:
        left, right = tl.split(tl.reshape(x, (ROWS, V // 2, 2)))
        return _columns(left, ROWS, V // 2) + _columns(right, ROWS, V // 2)


@triton.jit
def _opaque(start):
    """LLVM would keep a pointer to every element of the last tile, and move them all on with every other tile."""
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [start], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _after(x, total):
    """x, once ``total`` is known: LLVM would compute the terms of all V tokens first, in 64 registers too many."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,d", [x, total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _add_near(near, x, members, ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr):
    """Five float64 [ROWS] sums a slice; x [ROWS, V] is 0 where not near.

    One fused multiply-add a token, slice and sum: tl.sum over axis 1 took one and a half. (Predicated additions
    become an addition and two selects.)
    """
    xs = _columns(x, ROWS, V)
    member_sets = _columns(members, ROWS, V)
    for j in tl.static_range(V):
        x_j = xs[j]
        members_j = member_sets[j]
        if PTX and G > 1:
            x_j = _after(x_j, near[5 * G - 1])
            members_j = _after(members_j.to(tl.float32, bitcast=True), near[5 * G - 1]).to(tl.int32, bitcast=True)
        wide, square, k3, excess = tile.near_terms(x_j)
        added = ()
        for s in tl.static_range(G):
            if G == 1:  # x is already 0 outside the only slice
                added = added + (
                    near[0] + wide,
                    near[1] + square,
                    near[2] + k3,
                    near[3] + excess,
                    near[4] + tl.abs(wide),
                )
            else:
                f = tl.where((members_j & (1 << s)) != 0, 1.0, 0.0).to(tl.float64)
                added = added + (
                    tl.fma(f, wide, near[5 * s]),
                    tl.fma(f, square, near[5 * s + 1]),
                    tl.fma(f, k3, near[5 * s + 2]),
                    tl.fma(f, excess, near[5 * s + 3]),
                    tl.fma(f, tl.abs(wide), near[5 * s + 4]),
                )
        near = added
    return near


@triton.constexpr_function
def two_runs(G):
    """Whether _add_two_runs pays. 8 slices: 195 Gtok/s, not 129; 4 slices: 273, not 277 (H100, float32)."""
    return G > 4


@triton.jit
def _near(x):
    """x of near tokens, 0 for the others."""
    return tl.where(tl.abs(x) < tile.NEAR_LIMIT, x, 0.0)


@triton.jit
def _add_two_runs(near, x, members, ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr):
    """_add_near for tokens in at most two sets of slices: masks come in runs, so V contiguous tokens rarely have more.

    Sums for the two sets, spread over the slices once in V tokens. Returns too what of every row is left to do.
    """
    high = tl.max(members, axis=1)
    low = tl.min(members, axis=1)
    zero = tl.zeros((ROWS,), tl.float64)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    left = tl.zeros((ROWS,), tl.int32)
    xs = _columns(x, ROWS, V)
    member_sets = _columns(members, ROWS, V)
    for j in tl.static_range(V):
        x_j = xs[j]
        members_j = member_sets[j]
        if PTX:
            x_j = _after(x_j, sums[9])
            members_j = _after(members_j.to(tl.float32, bitcast=True), sums[9]).to(tl.int32, bitcast=True)
        is_high = members_j == high
        is_low = (members_j == low) & (is_high == 0)
        wide, square, k3, excess = tile.near_terms(x_j)
        size = tl.abs(wide)
        a = tl.where(is_high, 1.0, 0.0).to(tl.float64)
        b = tl.where(is_low, 1.0, 0.0).to(tl.float64)
        left = left | tl.where(is_high | is_low, 0, x_j.to(tl.int32, bitcast=True))
        sums = (
            tl.fma(a, wide, sums[0]), tl.fma(a, square, sums[1]), tl.fma(a, k3, sums[2]),
            tl.fma(a, excess, sums[3]), tl.fma(a, size, sums[4]),
            tl.fma(b, wide, sums[5]), tl.fma(b, square, sums[6]), tl.fma(b, k3, sums[7]),
            tl.fma(b, excess, sums[8]), tl.fma(b, size, sums[9]),
        )  # fmt: skip
    spread = ()
    for s in tl.static_range(G):
        a = tl.where((high & (1 << s)) != 0, 1.0, 0.0).to(tl.float64)
        b = tl.where((low & (1 << s)) != 0, 1.0, 0.0).to(tl.float64)
        for k in tl.static_range(5):
            spread = spread + (tl.fma(b, sums[5 + k], tl.fma(a, sums[k], near[5 * s + k])),)
    return spread, left


@triton.jit
def _add_other_runs(near, x, members, ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr):
    """What _add_two_runs left of a tile."""
    x = _near(tl.where(members != 0, x, 0.0))
    high = tl.max(members, axis=1)[:, None]
    low = tl.min(members, axis=1)[:, None]
    x = tl.where((members == high) | (members == low), 0.0, x)
    return _add_near(near, x, members, ROWS, V, G, PTX)


@triton.jit
def _add_tile(near, counters, extremes, limits, seen, left, x, members, row, outside, histogram_ptr, counts_ptr,
              low, high, tail_bits,
              ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
              P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
              WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Add a tile, but for what second_look.py does; x of non-members may be anything.

    Returns too the bits of the largest magnitude [ROWS] so far, and what _add_two_runs left.
    """
    if MODE == tile.IDS:
        slot = tl.where(outside != 0, 2 * P + 2 + tile.OUT_OF_RANGE, tile.NOWHERE)
        counters = histogram.add(counters, slot, outside, outside, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)
    x = tl.where(members != 0, x, 0.0)
    counters = histogram.add_bins(
        counters, x, members, row, histogram_ptr, counts_ptr, G, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip
    largest = tl.max(x.to(tl.int32, bitcast=True) & tile.ABS_BITS, axis=1)
    seen = tl.maximum(seen, largest)
    extremes = extrema.update(extremes, counters, limits, x, members, largest, ROWS, V, G, P, WAY)
    near_x = _near(x)
    if two_runs(G):
        near, more = _add_two_runs(near, near_x, members, ROWS, V, G, histogram.in_shared(WAY))
        left = left | more
    else:
        near = _add_near(near, near_x, members, ROWS, V, G, histogram.in_shared(WAY))
    if histogram.in_shared(WAY):
        tail.add(counters, x, members, row, largest, tail_bits, low, high, ROWS, V, G, P, WAY)
    return near, counters, extremes, seen, left


@triton.jit
def _stack(tensors, START: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """tensors[START::STEP], COUNT of them, joined in order: [..., 2, 2, ...]."""
    if COUNT == 1:
        return tensors[START]
    else:
        half: tl.constexpr = COUNT // 2
        return tl.join(_stack(tensors, START, 2 * STEP, half), _stack(tensors, START + STEP, 2 * STEP, half))


@triton.jit
def _totals(tensors, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Sums of COUNT tensors [ROWS] in one reduction: 20 one after the other took 8 us."""
    return tl.sum(tl.reshape(_stack(tensors, 0, 1, COUNT), (ROWS, COUNT)), axis=0)


@triton.jit
def _store_program(near, counters, extremes, row_ptr, counts_ptr, any_far, ROWS: tl.constexpr,
                   G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """The program's sums and extrema into its scratch rows; after a barrier."""
    PG: tl.constexpr = histogram.power_of_two_from(G)
    first_four = ()
    size = ()
    for s in tl.static_range(PG):
        for j in tl.static_range(4):
            first_four = first_four + ((near[5 * s + j] if s < G else tl.zeros((ROWS,), tl.float64)),)
        size = size + ((near[5 * s + 4] if s < G else tl.zeros((ROWS,), tl.float64)),)
    lane = tl.arange(0, 4 * PG)
    tl.store(row_ptr + (lane // 4) * far.ROW + lane % 4, _totals(first_four, ROWS, 4 * PG), mask=lane < 4 * G)
    slices = tl.arange(0, PG)
    rows = row_ptr + slices * far.ROW
    inside = slices < G
    # the slices of a program are one vector everywhere below
    if PG > 1:  # noqa: SIM108
        total_size = _totals(size, ROWS, PG)
    else:
        total_size = tl.full((1,), tl.sum(size[0], axis=0), tl.float64)
    top, bottom = extrema.result(extremes, counters, slices, ROWS, G, P, WAY)
    tl.store(rows + far.MAX_X, top, mask=inside)
    tl.store(rows + far.NEG_MIN_X, bottom, mask=inside)
    if any_far != 0:
        if histogram.in_shared(WAY):
            tail.finish(row_ptr, counts_ptr, ROWS, G)
            tl.debug_barrier()
        total_size += far.finish(rows, inside)
    tl.store(rows + far.ABS_X, total_size, mask=inside)


@triton.jit
def _run(logp_ptr, old_ptr, mask_ptrs, base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, run, low, high, tail_bits, columns, strides,
         ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr,
         FLAT: tl.constexpr, ALIGNED: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
         WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
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
    counters = histogram.start(n, scratch_ptr, G, P, WAY, SLOTS)
    extremes = extrema.start(ROWS, G, WAY)
    near = (tl.zeros((ROWS,), tl.float64),)
    for _ in tl.static_range(1, 5 * G):
        near = near + (tl.zeros((ROWS,), tl.float64),)
    any_far = tl.cast(0, tl.int32)
    if histogram.in_shared(WAY):
        tail.start(ROWS, G)
        second_look.declare_parking(5 * G)

    n_tiles = ((n + TILE - 1) // TILE).to(tl.int32)
    for first_tile in range(program * run, n_tiles, programs * run):
        end = tl.minimum(first_tile + run, n_tiles)
        limits = extrema.thresholds(counters, ROWS, G, P, WAY)
        seen = tl.zeros((ROWS,), tl.int32)
        left = tl.zeros((ROWS,), tl.int32)
        for i in range(first_tile, end):
            start = tl.cast(i, tl.int64) * TILE
            if ALIGNED:
                if i < full_tiles:
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
            near, counters, extremes, seen, left = _add_tile(
                near, counters, extremes, limits, seen, left, x, members, row, outside, histogram_ptr, counts_ptr,
                low, high, tail_bits, ROWS, V, G, MODE, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip
        if two_runs(G) and tl.max(left & tile.ABS_BITS, axis=0) != 0:
            for i in range(first_tile, end):
                x, members, row, outside = _read(
                    logp_ptr, old_ptr, mask_ptrs, base_ptr, i, full_tiles, n, n_slices, first, columns, strides,
                    ROWS, V, G, MODE, N_MASKS, HAS_BASE, FLAT, ALIGNED)  # fmt: skip
                near = _add_other_runs(near, x, members, ROWS, V, G, histogram.in_shared(WAY))
        # one vote a run: a vote a tile would keep the warps in step, all in the float64 unit at once
        largest = tl.max(seen, axis=0)
        any_far = tl.where(largest >= tile.NEAR_BITS, 1, any_far)
        if largest >= (far.HUGE_BITS if histogram.in_shared(WAY) else tail_bits):
            if histogram.in_shared(WAY):
                second_look.park(near, 5 * G)
            for i in range(first_tile, end):
                x, members, row, outside = _read(
                    logp_ptr, old_ptr, mask_ptrs, base_ptr, i, full_tiles, n, n_slices, first, columns, strides,
                    ROWS, V, G, MODE, N_MASKS, HAS_BASE, FLAT, ALIGNED)  # fmt: skip
                counters = second_look.add_tile(
                    counters, x, members, row, largest, histogram_ptr, counts_ptr, row_ptr, low, high,
                    G, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip
            if histogram.in_shared(WAY):
                near = second_look.unpark(near, 5 * G)

    tl.debug_barrier()
    histogram.flush(counters, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)
    _store_program(near, counters, extremes, row_ptr, counts_ptr, any_far, ROWS, G, P, WAY)
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
                      HAS_BASE: tl.constexpr, ALIGNED: tl.constexpr,
                      P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
                      WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Contiguous tokens [n]; ALIGNED: every pointer to 16 bytes, and at least one full tile."""
    _run(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, run, low, high, tail_bits, n, ((1, 1),),
         ROWS, V, G, MODE, HAS_BASE, True, ALIGNED, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip


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
                              HAS_BASE: tl.constexpr, ALIGNED: tl.constexpr,
                              P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
                              WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Tokens [n / columns, columns] with two strides a tensor, in elements; 0 for a broadcast mask."""
    strides = ((logp_row, logp_col), (old_row, old_col), (base_row, base_col),
               (row0, col0), (row1, col1), (row2, col2), (row3, col3))  # fmt: skip
    _run(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, state_ptr, scratch_ptr, ticket_ptr,
         n, n_slices, first, run, low, high, tail_bits, columns, strides,
         ROWS, V, G, MODE, HAS_BASE, False, False, P, SHIFT, OFFSET, WAY, SLOTS)  # fmt: skip


class Config(NamedTuple):
    """Shape of a launch."""

    rows: int  # threads a program: one row of a tile belongs to one thread
    v: int  # contiguous tokens of a thread
    run: int  # tiles between two votes on a second look
    per_sm: int  # programs an SM
    many_rows: bool  # more than 48 KiB of histogram rows a program, so one program an SM
    registers: int  # at most, a thread; the far branch would take all there are


def config(n: int, slices: int, id_bytes: int, portable: bool) -> Config:
    """By measurement on an H100; ``id_bytes`` of a slice id, 0 without ids.

    A thread needs 10 registers a slice for its sums, and a spill costs more than warps that are missing: 4 slices of
    268M float32 tokens ran at 277 Gtok/s with 256 threads an SM, 245 with 512, 165 with spills.
    """
    if portable:
        return Config(rows=256, v=8, run=4, per_sm=2, many_rows=False, registers=0)
    if slices <= 2:
        return Config(rows=256, v=8, run=16, per_sm=2, many_rows=False, registers=128)
    if n >= 1 << 21:
        return Config(rows=256, v=4 if id_bytes else 8, run=16, per_sm=1, many_rows=True, registers=255)
    if n > 1 << 14:
        return Config(rows=256, v=4, run=8, per_sm=1, many_rows=False, registers=255)
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
