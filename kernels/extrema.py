"""Exact maximum and minimum of every slice.

On CUDA the running extrema of a program sit in shared memory as integer keys that sort like the floats. A thread
compares the largest magnitude of its tokens with them, and only a warp with a possible new extremum looks closer:
2 instructions a token, not 3 a slice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import histogram, tile


@triton.constexpr_function
def _constraints(V):
    return ",".join(["=r"] * V + ["r"] * (4 * V))


@triton.constexpr_function
def _update_asm(G, V):
    """Of V tokens of a thread; operands after the outputs, V of each: x, members, address of the keys, and whether
    there may be something to do. x is 0 for non-members."""
    x = [f"${V + j}" for j in range(V)]
    m = [f"${2 * V + j}" for j in range(V)]
    keys = f"${3 * V}"
    pad = histogram.padded(G)
    out = [
        ".reg .pred p, q, one; .reg .b32 t, any, hi, lo, lane;",
        f".reg .b32 hi<{pad}>, lo<{pad}>, k<{V}>;",
        f"mov.b32 any, ${4 * V};",
        # one register V times, unless the layout gives a thread tokens of several rows
        *(f"or.b32 any, any, ${4 * V + j};" for j in range(1, V)),
        "setp.ne.s32 p, any, 0;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
        *(
            f"ld.shared.v4.b32 {{{side}{q}, {side}{q + 1}, {side}{q + 2}, {side}{q + 3}}}, [{keys}+{offset + 4 * q}];"
            for side, offset in (("hi", 0), ("lo", 4 * pad))
            for q in range(0, pad, 4)
        ),
        f"mov.b32 any, {m[0]};",
    ]
    # a key sorts like x; that of -x is its complement
    for j in range(V):
        out += [f"shr.s32 t, {x[j]}, 31;", "and.b32 t, t, 0x7fffffff;", f"xor.b32 k{j}, {x[j]}, t;"]
    out += ["mov.b32 hi, k0;", "mov.b32 lo, k0;"]
    for j in range(1, V):
        out += [f"max.s32 hi, hi, k{j};", f"min.s32 lo, lo, k{j};", f"or.b32 any, any, {m[j]};"]
    out += ["not.b32 t, lo;"]
    for s in range(G):
        out += [
            f"setp.gt.s32 q, hi, hi{s};",
            f"setp.gt.or.s32 q, t, lo{s}, q;",
            f"and.b32 lane, any, {1 << s};",
            "setp.ne.and.s32 q, lane, 0, q;",
            "mov.pred p, q;" if s == 0 else "or.pred p, p, q;",
        ]
    out += ["vote.sync.any.pred p, p, 0xffffffff;", "@!p bra DONE;", "mov.u32 lane, %laneid;"]
    out += ["setp.eq.s32 one, lane, 0;"]
    for s in range(G):
        out += ["mov.b32 hi, 0x80000000;", "mov.b32 lo, 0x80000000;"]
        for j in range(V):
            out += [
                f"and.b32 t, {m[j]}, {1 << s};",
                "setp.ne.s32 q, t, 0;",
                f"and.b32 t, {x[j]}, {tile.ABS_BITS.value};",
                f"setp.lt.and.s32 q, t, {tile.INF_BITS.value}, q;",
                f"@q max.s32 hi, hi, k{j};",
                f"not.b32 t, k{j};",
                "@q max.s32 lo, lo, t;",
            ]
        out += [
            "redux.sync.max.s32 hi, hi, 0xffffffff;",
            "redux.sync.max.s32 lo, lo, 0xffffffff;",
            f"@one red.shared.max.s32 [{keys}+{4 * s}], hi;",
            f"@one red.shared.max.s32 [{keys}+{4 * (pad + s)}], lo;",
        ]
    out += ["DONE:"]
    out += [f"mov.u32 ${j}, 0;" for j in range(V)]
    return "{\n" + "\n".join(out) + "\n}"


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def start(ROWS: tl.constexpr, G: tl.constexpr, WAY: tl.constexpr):
    """Running extrema: per slice a maximum of x and one of -x, or nothing where shared memory holds them."""
    if histogram.in_shared(WAY):
        return (0,)
    else:
        none = tl.full((ROWS,), float("-inf"), tl.float32)
        extrema = (none, none)
        for _ in tl.static_range(1, G):
            extrema = extrema + (none, none)
        return extrema


@triton.jit
def thresholds(counters, ROWS: tl.constexpr, G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):
    """Magnitudes up to which no extremum of a slice can change, as of now: int32 [ROWS] a slice.

    Extrema only move outwards, so a stale threshold costs a closer look and nothing else.
    """
    limits = ()
    if histogram.in_shared(WAY):
        keys = counters[0] + histogram.keys_offset(G, P, WAY) + tl.zeros((ROWS,), tl.int32)
        for s in tl.static_range(G):
            top = histogram.load_shared(keys + 4 * s)
            bottom = histogram.load_shared(keys + 4 * (histogram.padded(G) + s))
            limits = limits + (tl.minimum(top, bottom),)
    else:
        limits = limits + (0,)
    return limits


@triton.jit
def update(extrema, counters, limits, x, members, largest,
           ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """x [ROWS, V]: 0 for non-members; largest [ROWS]: at least the bits of the largest abs(x)."""
    if histogram.in_shared(WAY):
        any_of = tl.reduce(members, 1, either)
        beyond = tl.where(largest > limits[0], 1, 0)
        for s in tl.static_range(1, G):
            beyond = beyond | tl.where(largest > limits[s], 1 << s, 0)
        tl.inline_asm_elementwise(
            _update_asm(G, V),
            _constraints(V),
            [
                x.to(tl.int32, bitcast=True),
                members,
                counters[0] + histogram.keys_offset(G, P, WAY),
                tl.broadcast_to((beyond & any_of)[:, None], (ROWS, V)),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=V,
        )
        return extrema
    else:
        moved = ()
        finite = (x.to(tl.int32, bitcast=True) & tile.ABS_BITS) < tile.INF_BITS
        for s in tl.static_range(G):
            top, bottom = _tile_extrema(x, finite & (((members >> s) & 1) != 0))
            moved = moved + (tl.maximum(extrema[2 * s], top), tl.maximum(extrema[2 * s + 1], bottom))
        return moved


@triton.jit
def _tile_extrema(x, member):
    return (
        tl.max(tl.where(member, x, float("-inf")), axis=1),
        tl.max(tl.where(member, -x, float("-inf")), axis=1),
    )


@triton.jit
def _from_key(key):
    bits = key ^ ((key >> 31) & tile.ABS_BITS)
    value = bits.to(tl.float32, bitcast=True) + 0.0  # -0.0 becomes 0.0
    return tl.where(key == histogram.MIN_KEY, float("-inf"), value)


@triton.jit
def result(extrema, counters, slices, ROWS: tl.constexpr, G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):
    """(max x, -min x) of this program, float64 as ``slices``; after a barrier."""
    if histogram.in_shared(WAY):
        keys = counters[0] + histogram.keys_offset(G, P, WAY) + 4 * slices
        top = _from_key(histogram.load_shared(keys))
        bottom = _from_key(histogram.load_shared(keys + 4 * histogram.padded(G)))
    else:
        top = tl.full(slices.shape, float("-inf"), tl.float32)
        bottom = top
        for s in tl.static_range(G):
            top = tl.where(slices == s, tl.max(extrema[2 * s], axis=0) + 0.0, top)
            bottom = tl.where(slices == s, tl.max(extrema[2 * s + 1], axis=0) + 0.0, bottom)
    return top.to(tl.float64), bottom.to(tl.float64)
