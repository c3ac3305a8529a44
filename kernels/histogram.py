"""Counting tokens by slot, behind one function with three ways.

SHARED    shared-memory atomics by inline PTX (CUDA only). ``red.shared.add 1`` becomes ``ATOMS.POPC.INC``, which
          adds the lanes of one address in one go, so hot bins cost nothing.
REGISTERS ``tl.histogram`` of every tile, added up in registers (portable: ROCm, interpreter).
GLOBAL    atomics on the state itself, for layouts whose rows fit nowhere else.

A row has 2P bins and then one slot for each name of ``layout.COUNTS``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import tile

SHARED = tl.constexpr(0)
REGISTERS = tl.constexpr(1)
GLOBAL = tl.constexpr(2)

EXTRA = tl.constexpr(12)  # slots of a SHARED row beyond the bins: the counts, padded to 16 bytes
MIN_KEY = tl.constexpr(-(1 << 31))  # key of an extremum that no token has set


@triton.constexpr_function
def row_words(P):
    return 2 * P + 12


@triton.constexpr_function
def shared_words(G, P):
    """Rows of G slices, then the keys of G maxima and G minima, each padded to 4."""
    return G * row_words(P) + 8


@triton.constexpr_function
def _declare_asm(G, P):
    return (
        f".shared .align 16 .b8 pyrlstats_shared[{4 * shared_words(G, P)}];\n"
        "mov.u32 $0, pyrlstats_shared;"
    )


@triton.constexpr_function
def _add_asm(G, P):
    lines = [".reg .pred p; .reg .b32 t;"]
    for s in range(G):
        lines += [
            f"and.b32 t, $2, {1 << s};",
            "setp.ne.s32 p, t, 0;",
            f"@p red.shared.add.u32 [$1+{4 * s * row_words(P)}], 1;",
        ]
    return "{ " + " ".join(lines) + " mov.u32 $0, 0; }"


@triton.jit
def _store_shared(address, value):
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_shared(address):
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def start(G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr):
    """Empty counters: a tuple to be handed to :func:`add`."""
    if WAY == SHARED:
        base = tl.inline_asm_elementwise(
            _declare_asm(G, P), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
        lanes = tl.arange(0, 2 * P)
        for s in tl.static_range(G):
            _store_shared(base + 4 * (s * row_words(P) + lanes), tl.zeros_like(lanes))
        extra = tl.arange(0, 16)  # the last row's four lanes too many reach into the keys, written next
        for s in tl.static_range(G):
            _store_shared(base + 4 * (s * row_words(P) + 2 * P + extra), tl.zeros_like(extra))
        tl.debug_barrier()
        keys = tl.arange(0, 8)
        _store_shared(base + 4 * (G * row_words(P) + keys), tl.full((8,), MIN_KEY, tl.int32))
        tl.debug_barrier()
        return (base,)
    elif WAY == REGISTERS:
        counters = (tl.zeros((SLOTS,), tl.int32),)
        for s in tl.static_range(1, G):
            counters = counters + (tl.zeros((SLOTS,), tl.int32),)
        return counters
    else:
        return (0,)


@triton.jit
def add(counters, slot, members, histogram_ptr, counts_ptr,
        G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Count the tokens at ``slot`` in every slice s whose bit of ``members`` is set."""
    if WAY == SHARED:
        address = counters[0] + slot * 4
        tl.inline_asm_elementwise(
            _add_asm(G, P), "=r,r,r", [address, members], dtype=tl.int32, is_pure=False, pack=1
        )
        return counters
    elif WAY == REGISTERS:
        flat_slot = tl.reshape(slot, (slot.numel,))
        flat_members = tl.reshape(members, (slot.numel,))
        counters_ = (counters[0] + tl.histogram(flat_slot, SLOTS, mask=(flat_members & 1) != 0),)
        for s in tl.static_range(1, G):
            member = (flat_members >> s) & 1
            counters_ = counters_ + (counters[s] + tl.histogram(flat_slot, SLOTS, mask=member != 0),)
        return counters_
    else:
        is_bin = slot < 2 * P
        one = tl.full(slot.shape, 1, tl.int64)
        for s in tl.static_range(G):
            member = ((members >> s) & 1) != 0
            tl.atomic_add(histogram_ptr + s * 2 * P + slot, one, mask=member & is_bin, sem="relaxed")
            tl.atomic_add(
                counts_ptr + s * tile.N_COUNTS + slot - 2 * P, one, mask=member & (slot >= 2 * P), sem="relaxed"
            )
            counted = is_bin | (slot <= 2 * P + tile.ZERO)
            total = tl.sum(tl.reshape((member & counted).to(tl.int64), (slot.numel,)), axis=0)
            tl.atomic_add(counts_ptr + s * tile.N_COUNTS, total, sem="relaxed")
        return counters


@triton.jit
def flush(counters, histogram_ptr, counts_ptr,
          G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Add the counters to the state: integer atomics, so in any order the same."""
    if WAY == SHARED:
        base = counters[0]
        tl.debug_barrier()
        bins = tl.arange(0, 2 * P)
        extra = tl.arange(0, 16)
        for s in tl.static_range(G):
            row = base + 4 * s * row_words(P)
            value = load_shared(row + 4 * bins).to(tl.uint32, bitcast=True).to(tl.int64)
            tl.atomic_add(histogram_ptr + s * 2 * P + bins, value, mask=value != 0, sem="relaxed")
            special = load_shared(row + 4 * (2 * P + extra)).to(tl.uint32, bitcast=True).to(tl.int64)
            _add_counts(special, tl.sum(value, axis=0), extra, counts_ptr + s * tile.N_COUNTS)
    elif WAY == REGISTERS:
        slots = tl.arange(0, SLOTS)
        for s in tl.static_range(G):
            value = counters[s].to(tl.int64)
            in_bins = slots < 2 * P
            tl.atomic_add(histogram_ptr + s * 2 * P + slots, value, mask=in_bins & (value != 0), sem="relaxed")
            total = tl.sum(tl.where(in_bins, value, 0), axis=0)
            _add_counts(tl.where(in_bins, 0, value), total, slots - 2 * P, counts_ptr + s * tile.N_COUNTS)


@triton.jit
def _add_counts(value, in_bins, column, counts_ptr):
    """Column 0, n_tokens, is every token that is in a bin, zero or not finite."""
    apart = (column >= tile.NAN) & (column <= tile.ZERO)
    total = in_bins + tl.sum(tl.where(apart, value, 0), axis=0)
    value = tl.where(column == 0, total, value)
    inside = (column >= 0) & (column < tile.N_COUNTS)
    tl.atomic_add(counts_ptr + column, value, mask=inside & (value != 0), sem="relaxed")
