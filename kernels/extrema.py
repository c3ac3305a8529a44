"""Exact maximum and minimum of every slice.

On CUDA the running extrema of a program sit in shared memory as integer keys that sort like the floats. A thread
compares the largest magnitude of its tokens with them, and only a warp with a possible new extremum looks closer:
4 instructions a token less than a maximum and a minimum for every slice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import histogram, tile


@triton.constexpr_function
def _outputs(V):
    return ",".join(["=r"] * V + ["r"] * (3 * V))


@triton.constexpr_function
def _update_asm(G, V):
    """x are operands V .. 2V-1 (finite, 0 for non-members), members 2V .. 3V-1, then the address of the keys."""
    x = [f"${V + j}" for j in range(V)]
    m = [f"${2 * V + j}" for j in range(V)]
    keys = f"${3 * V}"
    pad = histogram.padded(G)
    out = [
        ".reg .pred p, q, r, one; .reg .b32 t, a, any, hi, lo, lane;",
        f".reg .b32 hi<{pad}>, lo<{pad}>, k<{V}>;",
        *(
            f"ld.shared.v4.b32 {{{side}{q}, {side}{q + 1}, {side}{q + 2}, {side}{q + 3}}}, [{keys}+{offset + 4 * q}];"
            for side, offset in (("hi", 0), ("lo", 4 * pad))
            for q in range(0, pad, 4)
        ),
        f"and.b32 a, {x[0]}, 0x7fffffff;",
        f"mov.b32 any, {m[0]};",
    ]
    for j in range(1, V):
        out += [f"and.b32 t, {x[j]}, 0x7fffffff;", "max.s32 a, a, t;", f"or.b32 any, any, {m[j]};"]
    # no new extremum unless |x| is beyond the nearer of the two
    for s in range(G):
        out += [
            f"min.s32 t, hi{s}, lo{s};",
            "setp.gt.s32 q, a, t;",
            f"and.b32 t, any, {1 << s};",
            "setp.ne.and.s32 q, t, 0, q;",
            "mov.pred p, q;" if s == 0 else "or.pred p, p, q;",
        ]
    out += ["vote.sync.any.pred p, p, 0xffffffff;", "@!p bra DONE;"]
    for j in range(V):
        out += [f"shr.s32 t, {x[j]}, 31;", "and.b32 t, t, 0x7fffffff;", f"xor.b32 k{j}, {x[j]}, t;"]
    out += ["mov.b32 hi, k0;", "mov.b32 lo, k0;"]
    for j in range(1, V):
        out += [f"max.s32 hi, hi, k{j};", f"min.s32 lo, lo, k{j};"]
    out += ["not.b32 t, lo;"]
    for s in range(G):
        out += [
            f"setp.gt.s32 q, hi, hi{s};",
            f"setp.gt.or.s32 q, t, lo{s}, q;",
            f"and.b32 a, any, {1 << s};",
            "setp.ne.and.s32 q, a, 0, q;",
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
def update(extrema, counters, x, members,
           G: tl.constexpr, P: tl.constexpr, V: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """x [ROWS, V]: finite, 0 for non-members."""
    if histogram.in_shared(WAY):
        tl.inline_asm_elementwise(
            _update_asm(G, V),
            _outputs(V),
            [x.to(tl.int32, bitcast=True), members, counters[0] + histogram.keys_offset(G, P, WAY)],
            dtype=tl.int32,
            is_pure=False,
            pack=V,
        )
        return extrema
    else:
        member = (members & 1) != 0
        top, bottom = _tile_extrema(x, member)
        extrema_ = (tl.maximum(extrema[0], top), tl.maximum(extrema[1], bottom))
        for s in tl.static_range(1, G):
            member = ((members >> s) & 1) != 0
            top, bottom = _tile_extrema(x, member)
            extrema_ = extrema_ + (tl.maximum(extrema[2 * s], top), tl.maximum(extrema[2 * s + 1], bottom))
        return extrema_


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
