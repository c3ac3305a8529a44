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

# A histogram row is the 2P bins, then one slot for every name of layout.COUNTS.
NAN = tl.constexpr(layout.COUNTS.index("n_nan"))
POS_INF = tl.constexpr(layout.COUNTS.index("n_pos_inf"))
NEG_INF = tl.constexpr(layout.COUNTS.index("n_neg_inf"))
ZERO = tl.constexpr(layout.COUNTS.index("n_zero"))
CLIP_LOW = tl.constexpr(layout.COUNTS.index("clip_low"))
CLIP_HIGH = tl.constexpr(layout.COUNTS.index("clip_high"))
FAR = tl.constexpr(layout.COUNTS.index("n_far"))
OUT_OF_RANGE = tl.constexpr(layout.COUNTS.index("n_out_of_range"))
N_COUNTS = tl.constexpr(len(layout.COUNTS))

# How the slices of the tokens are given.
ALL = tl.constexpr(0)  # every token is in the only slice
MASKS = tl.constexpr(1)  # one tensor per slice, non-zero = member
BITS = tl.constexpr(2)  # one integer tensor, bit s = slice s
IDS = tl.constexpr(3)  # one integer tensor, the slice itself


@triton.jit
def load(ptr, offsets, keep, FULL: tl.constexpr):
    if FULL:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=keep, other=0)


@triton.constexpr_function
def _pack_asm(G):
    """4 bytes of each of G masks -> 4 members, bit s = byte of mask s is not 0: 6 instructions a token, not 30."""
    lines = [".reg .b32 t, c;", "mov.b32 c, 0;"]
    for s in range(G):
        w = f"${4 + s}"
        lines += [
            f"and.b32 t, {w}, 0x7f7f7f7f;",
            "add.u32 t, t, 0x7f7f7f7f;",
            f"or.b32 t, t, {w};",
            "and.b32 t, t, 0x80808080;",
            f"shr.u32 t, t, {7 - s};",
            "or.b32 c, c, t;",
        ]
    lines += [f"prmt.b32 ${j}, c, 0, {0x4440 + j:#x};" for j in range(4)]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _pack_constraints(G):
    return ",".join(["=r"] * 4 + ["r"] * G)


@triton.jit
def pack_bytes(masks, G: tl.constexpr):
    """Members [ROWS, V] from G int8 masks."""
    if G == 1:
        args = [masks[0]]
    elif G == 2:
        args = [masks[0], masks[1]]
    elif G == 3:
        args = [masks[0], masks[1], masks[2]]
    else:
        args = [masks[0], masks[1], masks[2], masks[3]]
    return tl.inline_asm_elementwise(
        _pack_asm(G), _pack_constraints(G), args, dtype=tl.int32, is_pure=True, pack=4
    )


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
    """Histogram slot of finite x: its bin (layout.py), or the slot of zeros."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & ABS_BITS
    pos = tl.minimum(tl.maximum((magnitude >> SHIFT) - OFFSET, 0), P - 1)
    bin_ = (P + pos) ^ ((bits >> 31) & (2 * P - 1))
    return tl.where(magnitude == 0, 2 * P + ZERO, bin_)


@triton.jit
def near_terms(x):
    """(x, x^2, k3, (w - 1)^2 - x^2) in float64 for |x| < 0.5; k3 = x^2 g(x) with |g error| < 2e-7.

    float64 products cost no more than float32 ones on a data-centre GPU, and neither underflow nor cancel.
    """
    # minimax of (expm1(x) - x) / x^2 on [-0.5, 0.5], 2.7e-8
    g = 0.00019944874443962105 * x + 0.0013982186046233064
    g = g * x + 0.00833323613351339
    g = g * x + 0.04166579123001007
    g = g * x + 0.16666666801683536
    g = g * x + 0.5000000121607167
    wide = x.to(tl.float64)
    square = wide * wide
    k3 = square * g.to(tl.float64)
    return wide, square, k3, k3 * (wide + wide + k3)
