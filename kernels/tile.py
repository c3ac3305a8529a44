"""Tokens of one tile: load, log-ratio, membership, histogram slot, near arithmetic.

A tile is ``[ROWS, V]``: V contiguous tokens belong to one thread, so that sums over axis 1 need no exchange.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyrlstats import layout

ABS_BITS = tl.constexpr(layout.ABS_BITS)
INF_BITS = tl.constexpr(layout.INF_BITS)
NEAR_BITS = tl.constexpr(layout.NEAR_BITS)
NEAR_LIMIT = tl.constexpr(layout.NEAR_LIMIT)

# A token is counted in a slot of its row: 0 is x = +0, then P bins of positive x by magnitude, x = -0, P bins of
# negative x by magnitude, and one slot for every name of layout.COUNTS. state_bin() gives the bin of layout.py.
NAN = tl.constexpr(layout.COUNTS.index("n_nan"))
POS_INF = tl.constexpr(layout.COUNTS.index("n_pos_inf"))
NEG_INF = tl.constexpr(layout.COUNTS.index("n_neg_inf"))
ZERO = tl.constexpr(layout.COUNTS.index("n_zero"))
CLIP_LOW = tl.constexpr(layout.COUNTS.index("clip_low"))
CLIP_HIGH = tl.constexpr(layout.COUNTS.index("clip_high"))
FAR = tl.constexpr(layout.COUNTS.index("n_far"))
OUT_OF_RANGE = tl.constexpr(layout.COUNTS.index("n_out_of_range"))
N_COUNTS = tl.constexpr(len(layout.COUNTS))
NOWHERE = tl.constexpr(0)  # the slot that goes with no members

# k3 / x^2 = (expm1(x) - x) / x^2 on [-0.5, 0.5] by the powers of x in k3, minimax, 2.7e-8
K3_7 = tl.constexpr(0.00019944874443962105)
K3_6 = tl.constexpr(0.0013982186046233064)
K3_5 = tl.constexpr(0.00833323613351339)
K3_4 = tl.constexpr(0.04166579123001007)
K3_3 = tl.constexpr(0.16666666801683536)
K3_2 = tl.constexpr(0.5000000121607167)

# How the slices of the tokens are given.
ALL = tl.constexpr(0)  # every token is in the only slice
MASKS = tl.constexpr(1)  # one tensor per slice, non-zero = member
BITS = tl.constexpr(2)  # one integer tensor, bit s = slice s
IDS = tl.constexpr(3)  # one integer tensor, the slice itself


@triton.constexpr_function
def words(V, element_ty):
    """32-bit words of V tokens, or V where an element is no smaller."""
    return V * min(element_ty.primitive_bitwidth, 32) // 32 if element_ty.primitive_bitwidth > 1 else V // 4


@triton.constexpr_function
def is_byte(element_ty):
    return element_ty.primitive_bitwidth <= 8


@triton.constexpr_function
def all_bytes(ptrs, G):
    return all(ptrs[s].dtype.element_ty.primitive_bitwidth <= 8 for s in range(G))


@triton.jit
def fetch(ptr, ROWS: tl.constexpr, V: tl.constexpr):
    """V contiguous elements a row, as 32-bit words if they are smaller: loaded early, unpacked when needed.

    Unpacked at once they would take twice to four times the registers, and wait for the load.
    """
    WORDS: tl.constexpr = words(V, ptr.dtype.element_ty)
    if ptr.dtype.element_ty.primitive_bitwidth < 32:
        ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    WIDE: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return _fetch_words(ptr, 0, ROWS, WORDS, WORDS, WIDE)


@triton.jit
def _fetch_words(ptr, FIRST: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
                 COUNT: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Words FIRST to FIRST + COUNT of every row of WORDS, WIDE at a time.

    Triton gives a thread no more than the 16 bytes of one load: it would cut rows of 8 float32 in two, and exchange
    the halves through shared memory.
    """
    if COUNT <= WIDE:
        at = tl.arange(0, ROWS)[:, None] * WORDS + (FIRST + tl.arange(0, COUNT)[None, :])
        return tl.load(ptr + at)
    else:
        left = _fetch_words(ptr, FIRST, ROWS, WORDS, COUNT // 2, WIDE)
        right = _fetch_words(ptr, FIRST + COUNT // 2, ROWS, WORDS, COUNT // 2, WIDE)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, COUNT))


@triton.jit
def _interleaved(a, b, ROWS: tl.constexpr, V: tl.constexpr):
    return tl.reshape(tl.join(a, b), (ROWS, V))


@triton.jit
def unpack_floats(word, element_ty: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr):
    if element_ty == tl.bfloat16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
        return _interleaved(low, high, ROWS, V)
    elif element_ty == tl.float16:
        low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return _interleaved(low.to(tl.float32), high.to(tl.float32), ROWS, V)
    else:
        return word


@triton.jit
def unpack_bytes(word, ROWS: tl.constexpr, V: tl.constexpr):
    """int32 [ROWS, V], 0 to 255."""
    even = tl.join(word & 0xFF, (word >> 16) & 0xFF)
    odd = tl.join((word >> 8) & 0xFF, (word >> 24) & 0xFF)
    return tl.reshape(tl.join(even, odd), (ROWS, V))


@triton.jit
def unpack_integers(word, element_ty: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr):
    """The elements as they are, small ones as int32."""
    if is_byte(element_ty):
        value = unpack_bytes(word, ROWS, V)
        if element_ty == tl.int8:
            value = value.to(tl.int8).to(tl.int32)
        return value
    elif element_ty.primitive_bitwidth == 16:
        low = (word << 16) >> 16
        high = word >> 16
        if element_ty == tl.uint16:
            low = low & 0xFFFF
            high = high & 0xFFFF
        return _interleaved(low, high, ROWS, V)
    else:
        return word


@triton.jit
def is_set(word, element_ty: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr):
    """int1 [ROWS, V] from fetched words: not zero; NaN is set."""
    if element_ty.primitive_bitwidth == 16 and element_ty.is_floating():
        return unpack_floats(word, element_ty, ROWS, V) != 0
    else:
        return unpack_integers(word, element_ty, ROWS, V) != 0


@triton.jit
def set_bytes(word):
    """0x80 in every byte of a word that is not zero, 0 in the others."""
    low = (word & 0x7F7F7F7F) + 0x7F7F7F7F
    return (low | word) & -2139062144


@triton.jit
def log_ratio(logp, old_logp):
    """x as float32: subtracted in float32, or in float64 and rounded once if either is float64."""
    if logp.dtype == tl.float64:
        return (logp - old_logp.to(tl.float64)).to(tl.float32)
    elif old_logp.dtype == tl.float64:
        return (logp.to(tl.float64) - old_logp).to(tl.float32)
    else:
        return logp.to(tl.float32) - old_logp.to(tl.float32)


@triton.jit
def slot_of(x, P: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr):
    """Slot of x: pos is as in layout.py, and zero lies just below the first bin of its sign. NaN as infinity."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & ABS_BITS
    pos = tl.minimum(tl.maximum((magnitude >> SHIFT) - OFFSET, 0), P - 1)
    return tl.where(magnitude == 0, 0, pos + 1) + tl.where(bits < 0, P + 1, 0)


@triton.constexpr_function
def slot_asm(P, SHIFT, OFFSET):
    """slot_of in PTX, and the count. $1 bits of x, $2 row x its bytes + the end of row 0.

    10 instructions, of which half avoid the integer unit; what LLVM makes of the formula above takes 14.
    """
    return (
        "{ .reg .b32 m, p, z, s, a; and.b32 m, $1, 0x7fffffff; "
        f"shr.u32 p, m, {SHIFT}; min.s32 p, p, {OFFSET + P - 1}; min.s32 z, m, 1; "
        f"add.s32 z, z, {OFFSET - 1}; max.s32 p, p, z; "
        f"mad.lo.s32 a, p, -4, $2; shr.u32 s, $1, 31; mad.lo.s32 a, s, {-4 * (P + 1)}, a; "
        f"red.shared.add.u32 [a+{4 * (OFFSET - 1)}], 1; mov.u32 $0, 0; }}"
    )


@triton.jit
def state_bin(slot, P: tl.constexpr):
    """Bin of layout.py of a slot that is a bin."""
    return tl.where(slot <= P, P - 1 + slot, 2 * P + 1 - slot)


@triton.jit
def slot_of_bin(bin_, P: tl.constexpr):
    return tl.where(bin_ >= P, bin_ - P + 1, 2 * P + 1 - bin_)


@triton.jit
def near_terms(x):
    """(x, x^2, k3, (w - 1)^2 - x^2) in float64 for |x| < 0.5; k3 = x^2 g(x) with |g error| < 2e-7.

    float64 products cost no more than float32 ones on a data-centre GPU, and neither underflow nor cancel.
    """
    g = K3_7 * x + K3_6
    g = g * x + K3_5
    g = g * x + K3_4
    g = g * x + K3_3
    g = g * x + K3_2
    wide = x.to(tl.float64)
    square = wide * wide
    k3 = square * g.to(tl.float64)
    return wide, square, k3, k3 * tl.fma(wide, 2.0, k3)
