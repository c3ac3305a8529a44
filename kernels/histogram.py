"""Counting tokens by slot, behind one function with five ways; launch.py chooses.

On CUDA the counters are rows in shared memory, and ``red.shared.add 1`` becomes ``ATOMS.POPC.INC``, which adds the
lanes of one address in one go: hot bins cost nothing. A predicated one would become a branch (5 instructions),
so tokens in no row go to a junk word instead.

SLICES    one row a slice, one atomic a token and slice: small inputs, and where there is no room for many rows.
PATTERNS  one row for every set of slices (2^G - 1), one atomic a token; summed to slices at the end.
SINGLE    one row a slice, one atomic a token: disjoint slices, or one slice.
REGISTERS ``tl.histogram`` of every tile, added up in registers (portable: ROCm, interpreter).
GLOBAL    atomics on the state itself, for layouts whose rows fit nowhere else.

A row is filled from its end: slot k (tile.py) is the word k before the last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import tile

SLICES = tl.constexpr(0)
PATTERNS = tl.constexpr(1)
SINGLE = tl.constexpr(2)
REGISTERS = tl.constexpr(3)
GLOBAL = tl.constexpr(4)

# 32 bytes come before the first row; the last word of them takes the tokens that are in no row
STATIC_BYTES = 48 << 10  # that CUDA gives without asking
TRITON_BYTES = 8 << 10  # of them, or of the smaller claim, for Triton's own exchanges
CLAIMS = (64 << 10, 128 << 10)  # bytes, for rows that need more; a few are left of the larger one too
MIN_KEY = tl.constexpr(-(1 << 31))  # key of an extremum that no token has set


@triton.constexpr_function
def in_shared(WAY):
    return WAY in (0, 1, 2)


@triton.constexpr_function
def row_bytes(P):
    """2P bins, two zeros, 9 counts, padded to 16 bytes."""
    return 4 * (2 * P + 12)


@triton.constexpr_function
def n_rows(G, WAY):
    return (1 << G) - 1 if WAY == 1 else G


@triton.constexpr_function
def power_of_two_from(G):
    return 1 << (G - 1).bit_length()


@triton.constexpr_function
def padded(G):
    return max(4, 1 << (G - 1).bit_length())


@triton.constexpr_function
def keys_offset(G, P, WAY):
    """Bytes before the keys of the maxima; those of the minima follow, each padded."""
    return 32 + n_rows(G, WAY) * row_bytes(P)


@triton.constexpr_function
def shared_bytes(G, P, WAY):
    return keys_offset(G, P, WAY) + 8 * padded(G)


@triton.constexpr_function
def claimed(G, P, WAY, BESIDE):
    """Bytes of dynamic shared memory that the rows lie in, or 0; the program has BESIDE static ones besides."""
    rows = shared_bytes(G, P, WAY)
    if rows + BESIDE + TRITON_BYTES <= STATIC_BYTES:
        return 0
    return CLAIMS[0] if rows + TRITON_BYTES <= CLAIMS[0] else CLAIMS[1]


@triton.constexpr_function
def _static_asm(G, P, WAY):
    size = shared_bytes(G, P, WAY)
    return f".shared .align 16 .b8 pyrlstats_shared[{size}];\nmov.u32 $0, pyrlstats_shared;"


@triton.constexpr_function
def _dynamic_asm(G, P, WAY):
    """The end of the dynamic shared memory; its start is Triton's."""
    size = -(-shared_bytes(G, P, WAY) // 16) * 16
    return (
        "{ .reg .b32 t; mov.u32 $0, global_smem; mov.u32 t, %dynamic_smem_size; "
        f"add.u32 $0, $0, t; sub.u32 $0, $0, {size}; }}"
    )


@triton.constexpr_function
def _add_slices_asm(G, P, BY):
    """$1 address in the first row, $2 members, $3 the junk word."""
    lines = [".reg .pred p; .reg .b32 t;"]
    for s in range(G):
        shift = s * row_bytes(P)
        lines += [
            f"and.b32 t, $2, {1 << s};",
            "setp.ne.s32 p, t, 0;",
            f"sub.u32 t, $3, {shift};",
            "selp.b32 t, $1, t, p;",
            f"red.shared.add.u32 [t+{shift}], {BY};",
        ]
    return "{ " + " ".join(lines) + " mov.u32 $0, 0; }"


@triton.constexpr_function
def _add_asm(BY):
    return f"red.shared.add.u32 [$1], {BY}; mov.u32 $0, 0;"


@triton.jit
def _store_shared(address, value):
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _zero_16_bytes(address):
    tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.u32 $0, 0; }",
        "=r,r",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_shared(address):
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _claim_shared(never, scratch_ptr, N: tl.constexpr):
    """Makes Triton ask for N words of dynamic shared memory: a gather that never runs."""
    if never < 0:
        lane = tl.arange(0, N)
        words = scratch_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(words + lane, tl.gather(lane + never.to(tl.int32), (lane * 7) & (N - 1), 0))


@triton.jit
def start(never, scratch_ptr, G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr,
          BESIDE: tl.constexpr):  # fmt: skip
    """Empty counters: a tuple to be handed to :func:`add`. ``never`` is a number that is not negative."""
    if in_shared(WAY):
        if claimed(G, P, WAY, BESIDE) > 0:
            _claim_shared(never, scratch_ptr, claimed(G, P, WAY, BESIDE) // 4)
            base = tl.inline_asm_elementwise(
                _dynamic_asm(G, P, WAY), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            base = tl.inline_asm_elementwise(
                _static_asm(G, P, WAY), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
            )
        lanes = tl.arange(0, P // 2 if P > 1 else 1)
        extra = tl.arange(0, 4)  # one too many, which reaches into the next row or the keys
        for row in tl.static_range(n_rows(G, WAY)):
            _zero_16_bytes(base + 32 + row * row_bytes(P) + 16 * lanes)
            _zero_16_bytes(base + 32 + row * row_bytes(P) + 8 * P + 16 * extra)
        tl.debug_barrier()
        keys = tl.arange(0, 2 * padded(G))
        _store_shared(base + keys_offset(G, P, WAY) + 4 * keys, tl.full((2 * padded(G),), MIN_KEY, tl.int32))
        tl.debug_barrier()
        return (base,)
    elif WAY == REGISTERS:
        counters = (tl.zeros((SLOTS,), tl.int32),)
        for _ in tl.static_range(1, G):
            counters = counters + (tl.zeros((SLOTS,), tl.int32),)
        return counters
    else:
        return (0,)


@triton.jit
def add(counters, slot, members, row, histogram_ptr, counts_ptr,
        G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr, BY: tl.constexpr = 1):  # fmt: skip
    """Count tokens at ``slot``, BY (1, or -1 to take back) each, in every slice s whose bit of ``members`` is set.

    row is the members (PATTERNS), the slice + 1 (SINGLE), or whatever (other ways), and 0 for no members, with the
    slot NOWHERE: that is the junk word.
    """
    if WAY == SLICES:
        tl.inline_asm_elementwise(
            _add_slices_asm(G, P, BY),
            "=r,r,r,r",
            [counters[0] + (28 + row_bytes(P)) - slot * 4, members, counters[0] + 28],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return counters
    elif in_shared(WAY):
        tl.inline_asm_elementwise(
            _add_asm(BY),
            "=r,r",
            [counters[0] + 28 + row * row_bytes(P) - slot * 4],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return counters
    elif WAY == REGISTERS:
        flat_slot = tl.reshape(slot, (slot.numel,))
        flat_members = tl.reshape(members, (slot.numel,))
        counted = ()
        for s in tl.static_range(G):
            # to the last slot, which no one reads, and not by mask=, which miscounts on CUDA with Triton 3.6
            here = tl.where(((flat_members >> s) & 1) != 0, flat_slot, SLOTS - 1)
            counted = counted + (counters[s] + BY * tl.histogram(here, SLOTS),)
        return counted
    else:
        special = slot >= 2 * P + 2
        zero = (slot == 0) | (slot == P + 1)
        is_bin = (special | zero) == 0
        one = tl.full(slot.shape, BY, tl.int64)
        column = tl.where(zero, tile.ZERO, slot - (2 * P + 2))
        bin_ = tile.state_bin(slot, P)
        for s in tl.static_range(G):
            member = ((members >> s) & 1) != 0
            tl.atomic_add(histogram_ptr + s * 2 * P + bin_, one, mask=member & is_bin, sem="relaxed")
            tl.atomic_add(counts_ptr + s * tile.N_COUNTS + column, one, mask=member & (is_bin == 0), sem="relaxed")
            token = member & (is_bin | (column <= tile.ZERO))
            total = tl.sum(tl.reshape(token.to(tl.int64), (slot.numel,)), axis=0)
            tl.atomic_add(counts_ptr + s * tile.N_COUNTS, BY * total, sem="relaxed")
        return counters


@triton.jit
def add_bins(counters, x, members, row, histogram_ptr, counts_ptr,
             G: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
             WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Count tokens in their bins; x is 0 where row is. Those not finite go to a last bin, to be taken back."""
    if in_shared(WAY) and WAY != SLICES:
        tl.inline_asm_elementwise(
            tile.slot_asm(P, SHIFT, OFFSET),
            "=r,r,r",
            [x.to(tl.int32, bitcast=True), row * row_bytes(P) + (counters[0] + 28)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return counters
    else:
        slot = tile.slot_of(x, P, SHIFT, OFFSET)
        return add(counters, slot, members, row, histogram_ptr, counts_ptr, G, P, WAY, SLOTS)


@triton.jit
def flush(counters, histogram_ptr, counts_ptr,
          G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Add the counters to the state: integer atomics, so in any order the same. After a barrier."""
    if in_shared(WAY):
        S: tl.constexpr = power_of_two_from(G)
        slices = tl.arange(0, S)[:, None]
        bins = tl.arange(0, 2 * P)[None, :]
        value = _slice_rows(counters[0], slices, tile.slot_of_bin(bins, P), S, G, P, WAY)
        tl.atomic_add(histogram_ptr + slices * (2 * P) + bins, value, mask=value != 0, sem="relaxed")
        column = tl.arange(0, 16)[None, :]
        counted = column < tile.N_COUNTS
        # the two zeros are one count
        slot = tl.where(counted & (column != tile.ZERO), 2 * P + 2 + column, 0)
        special = _slice_rows(counters[0], slices, slot, S, G, P, WAY)
        negative_zero = _slice_rows(counters[0], slices, tl.full((1, 16), P + 1, tl.int32), S, G, P, WAY)
        special += tl.where(column == tile.ZERO, negative_zero, 0)
        special = tl.where(counted, special, 0)
        _add_counts(special, tl.sum(value, axis=1), slices, column, counts_ptr)
    elif WAY == REGISTERS:
        slots = tl.arange(0, SLOTS)
        zero = (slots == 0) | (slots == P + 1)
        is_bin = (slots <= 2 * P + 1) & (zero == 0)
        column = tl.where(zero, tile.ZERO, slots - (2 * P + 2))
        for s in tl.static_range(G):
            value = counters[s].to(tl.int64)
            bins = histogram_ptr + s * 2 * P + tile.state_bin(slots, P)
            tl.atomic_add(bins, value, mask=is_bin & (value != 0), sem="relaxed")
            total = tl.sum(tl.where(is_bin, value, 0), axis=0)
            special = tl.where(is_bin, 0, value)[None, :]
            slices = tl.full((1, 1), s, tl.int32)
            _add_counts(special, total + tl.zeros((1,), tl.int64), slices, column[None, :], counts_ptr)


@triton.jit
def _slice_rows(base, slices, slot, S: tl.constexpr, G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):
    """int64 [S, slots]: counts of every slice, 0 beyond the last."""
    offset = base + (28 + row_bytes(P)) - 4 * slot + tl.zeros((S, 1), tl.int32)
    if WAY == PATTERNS:
        total = tl.zeros(offset.shape, tl.int64)
        for pattern in tl.static_range(1, 1 << G):
            value = load_shared(offset + (pattern - 1) * row_bytes(P)).to(tl.uint32, bitcast=True).to(tl.int64)
            total += tl.where(((pattern >> slices) & 1) != 0, value, 0)
        return total
    else:
        row = tl.minimum(slices, G - 1)  # G = 3: no row of its own for the fourth
        value = load_shared(offset + row * row_bytes(P)).to(tl.uint32, bitcast=True).to(tl.int64)
        return tl.where(slices < G, value, 0)


@triton.jit
def _add_counts(value, in_bins, slices, column, counts_ptr):
    """value [S, columns]. Column 0, n_tokens, is every token that is in a bin, zero or not finite."""
    apart = (column >= tile.NAN) & (column <= tile.ZERO)
    total = in_bins + tl.sum(tl.where(apart, value, 0), axis=1)
    value = tl.where(column == 0, total[:, None], value)
    inside = (column >= 0) & (column < tile.N_COUNTS)
    tl.atomic_add(counts_ptr + slices * tile.N_COUNTS + column, value, mask=inside & (value != 0), sem="relaxed")
