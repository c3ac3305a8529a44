"""Sums over near tokens, |x| < 0.5: five in float64 for every slice (x, x^2, k3, (w - 1)^2 - x^2, |x|).

In registers of every thread where there is one slice, or no inline PTX; otherwise by matrix.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import far, histogram, matrix, tile

from pyrlstats import layout

SUMS = 5


def _ptx(value: float) -> str:
    """A float32 constant."""
    return f"0f{layout.float32_bits(value):08x}"


NEAR_LIMIT, NEAR_BITS = _ptx(layout.NEAR_LIMIT), layout.NEAR_BITS
K3 = tuple(
    _ptx(coefficient.value) for coefficient in (tile.K3_7, tile.K3_6, tile.K3_5, tile.K3_4, tile.K3_3, tile.K3_2)
)


@triton.constexpr_function
def is_parked(G, WAY):
    """Whether a rare branch with inline PTX should have the registers of the sums."""
    return histogram.in_shared(WAY) and not matrix.is_used(G, WAY)


@triton.constexpr_function
def _term_lines(x):
    """The terms of one token, as tile.near_terms has them: w, square, k3, excess; |x| is that of w."""
    return [
        f"mov.f32 g, {K3[0]};",
        *(f"fma.rn.f32 g, g, {x}, {c};" for c in K3[1:]),
        f"cvt.f64.f32 w, {x};",
        "cvt.f64.f32 k3, g;",
        "mul.rn.f64 square, w, w;",
        "mul.rn.f64 k3, square, k3;",
        "fma.rn.f64 excess, w, 0d4000000000000000, k3;",
    ]


@triton.constexpr_function
def _one_set_lines(x):
    out = [f"mov.f64 s{k}, {matrix.ZERO};" for k in range(SUMS)]
    for one in x:
        out += [
            *_term_lines(one),
            "add.rn.f64 s0, s0, w;",
            "add.rn.f64 s1, s1, square;",
            "add.rn.f64 s2, s2, k3;",
            "fma.rn.f64 s3, k3, excess, s3;",
            "abs.f64 w, w;",
            "add.rn.f64 s4, s4, w;",
        ]
    return [*out, *matrix.spread_lines("near", SUMS)]


@triton.constexpr_function
def _two_sets_lines(x, m):
    """Sums of both sets in one go; a token is in the set ``set``, or in the other or in none."""
    out = [f"mov.f64 {which}{k}, {matrix.ZERO};" for which in ("s", "u") for k in range(SUMS)]
    for one, its in zip(x, m, strict=True):
        out += [
            *_term_lines(one),
            f"setp.eq.s32 p, {its}, set;",
            "selp.f64 a, 0d3ff0000000000000, 0d0000000000000000, p;",
            "selp.f64 b, 0d0000000000000000, 0d3ff0000000000000, p;",
            "mul.rn.f64 excess, k3, excess;",
            *(f"fma.rn.f64 {to}0, {f}, w, {to}0;" for to, f in (("s", "a"), ("u", "b"))),
            *(f"fma.rn.f64 {to}1, {f}, square, {to}1;" for to, f in (("s", "a"), ("u", "b"))),
            *(f"fma.rn.f64 {to}2, {f}, k3, {to}2;" for to, f in (("s", "a"), ("u", "b"))),
            *(f"fma.rn.f64 {to}3, {f}, excess, {to}3;" for to, f in (("s", "a"), ("u", "b"))),
            "abs.f64 w, w;",
            *(f"fma.rn.f64 {to}4, {f}, w, {to}4;" for to, f in (("s", "a"), ("u", "b"))),
        ]
    out += [*matrix.spread_lines("near", SUMS), "mov.b32 set, low;", *(f"mov.f64 s{k}, u{k};" for k in range(SUMS))]
    return [*out, *matrix.spread_lines("near", SUMS)]


@triton.constexpr_function
def _each_token_lines(x, m):
    out = []
    for one, its in zip(x, m, strict=True):
        out += [*_term_lines(one), "mul.rn.f64 s3, k3, excess;", "abs.f64 s4, w;"]
        out += ["mov.f64 s0, w;", "mov.f64 s1, square;", "mov.f64 s2, k3;", f"mov.b32 set, {its};"]
        out += matrix.spread_lines("near", SUMS)
    return out


@triton.constexpr_function
def _add_asm(V):
    """Of V tokens of a thread; operands after the outputs, V of each: x (0 for non-members), members, bits of the
    largest magnitude. A warp takes the first way that does for all its threads.
    """
    x, m, largest = ([f"${V * (1 + k) + j}" for j in range(V)] for k in range(3))
    near = [f"x{j}" for j in range(V)]
    out = [
        ".reg .pred p, one, many; .reg .b32 t, set, low, largest; .reg .f32 f, g;",
        ".reg .f64 w, k3, square, excess, a, b;",
        f".reg .f64 s<{SUMS}>, u<{SUMS}>; .reg .f32 x<{V}>;",
        f"mov.b32 largest, {largest[0]};",
        *(f"max.s32 largest, largest, {other};" for other in largest[1:]),
        f"mov.b32 set, {m[0]};",
        f"sub.s32 low, {m[0]}, 1;",
    ]
    for j in range(1, V):  # tokens in no slice, whose x is 0, fit to any set
        out += [f"max.s32 set, set, {m[j]};", f"sub.s32 t, {m[j]}, 1;", "min.u32 low, low, t;"]
    out += [
        "add.s32 low, low, 1;",
        "setp.eq.s32 one, low, set;",
        f"setp.lt.and.s32 p, largest, {NEAR_BITS}, one;",
        "vote.sync.all.pred p, p, 0xffffffff;",
        "@!p bra CAREFUL;",
        *_one_set_lines(x),
        "bra DONE;",
        "CAREFUL:",
    ]
    for j in range(V):
        out += [f"abs.f32 f, {x[j]};", f"setp.lt.f32 p, f, {NEAR_LIMIT};", f"selp.f32 x{j}, {x[j]}, 0f00000000, p;"]
    out += [
        "vote.sync.all.pred p, one, 0xffffffff;",
        "@!p bra SEVERAL;",
        *_one_set_lines(near),
        "bra DONE;",
        "SEVERAL:",
    ]
    for j in range(V):
        out += [f"setp.ne.s32 p, {m[j]}, set;", f"setp.ne.and.s32 p, {m[j]}, low, p;"]
        out += [f"setp.ne.and.s32 p, {m[j]}, 0, p;", "mov.pred many, p;" if j == 0 else "or.pred many, many, p;"]
    out += ["vote.sync.any.pred many, many, 0xffffffff;", "@many bra MANY;", *_two_sets_lines(near, m), "bra DONE;"]
    out += ["MANY:", *_each_token_lines(near, m), "DONE:", *(f"mov.u32 ${j}, 0;" for j in range(V))]
    return "{\n" + "\n".join(out) + "\n}"


@triton.constexpr_function
def _constraints(V):
    return ",".join(["=r"] * V + ["f"] * V + ["r"] * (2 * V))


@triton.jit
def _columns(x, ROWS: tl.constexpr, V: tl.constexpr):
    """[ROWS, V] -> V tensors [ROWS], in no particular order: no exchange, since a row belongs to one thread."""
    if V == 1:
        return (tl.reshape(x, (ROWS,)),)
    else:
        left, right = tl.split(tl.reshape(x, (ROWS, V // 2, 2)))
        return _columns(left, ROWS, V // 2) + _columns(right, ROWS, V // 2)


@triton.jit
def start(ROWS: tl.constexpr, G: tl.constexpr, WAY: tl.constexpr):
    """No sums yet: a tuple to be handed to :func:`add`."""
    if matrix.is_used(G, WAY):
        return (0,)
    else:
        near = (tl.zeros((ROWS,), tl.float64),)
        for _ in tl.static_range(1, 5 * G):
            near = near + (tl.zeros((ROWS,), tl.float64),)
        return near


@triton.jit
def add(near, x, members, largest, ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, WAY: tl.constexpr):
    """x [ROWS, V] is 0 for non-members; largest [ROWS] are the bits of the largest abs(x)."""
    if matrix.is_used(G, WAY):
        tl.inline_asm_elementwise(
            _add_asm(V),
            _constraints(V),
            [x, members, tl.broadcast_to(largest[:, None], (ROWS, V))],
            dtype=tl.int32,
            is_pure=False,
            pack=V,
        )
        return near
    else:
        x = tl.where(tl.abs(x) < tile.NEAR_LIMIT, x, 0.0)
        return _add_to_registers(near, x, members, ROWS, V, G)


@triton.jit
def _add_to_registers(near, x, members, ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr):
    """Five float64 [ROWS] sums a slice; x [ROWS, V] is 0 where not near.

    One addition a token, slice and sum: tl.sum over axis 1 took one and a half. (Predicated additions become an
    addition and two selects.)
    """
    xs = _columns(x, ROWS, V)
    member_sets = _columns(members, ROWS, V)
    for j in tl.static_range(V):
        wide, square, k3, excess = tile.near_terms(xs[j])
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
                f = tl.where((member_sets[j] & (1 << s)) != 0, 1.0, 0.0).to(tl.float64)
                added = added + (
                    tl.fma(f, wide, near[5 * s]),
                    tl.fma(f, square, near[5 * s + 1]),
                    tl.fma(f, k3, near[5 * s + 2]),
                    tl.fma(f, excess, near[5 * s + 3]),
                    tl.fma(f, tl.abs(wide), near[5 * s + 4]),
                )
        near = added
    return near


@triton.jit
def store(near, row_ptr, ROWS: tl.constexpr, G: tl.constexpr, WAY: tl.constexpr):
    """The program's sums into its scratch rows, but for those of |x|, which are returned: float64 [S]."""
    S: tl.constexpr = histogram.power_of_two_from(G)
    if matrix.is_used(G, WAY):
        total = matrix.totals("near", ROWS, G)
        slices = tl.arange(0, S)[:, None]
        column = tl.arange(0, 8)[None, :]
        tl.store(row_ptr + slices * far.ROW + column, total, mask=(slices < G) & (column < 4))
        return tl.sum(tl.where(column == 4, total, 0.0), axis=1)
    else:
        first_four = ()
        size = ()
        for s in tl.static_range(S):
            for j in tl.static_range(4):
                first_four = first_four + ((near[5 * s + j] if s < G else tl.zeros((ROWS,), tl.float64)),)
            size = size + ((near[5 * s + 4] if s < G else tl.zeros((ROWS,), tl.float64)),)
        lane = tl.arange(0, 4 * S)
        tl.store(row_ptr + (lane // 4) * far.ROW + lane % 4, _totals(first_four, ROWS, 4 * S), mask=lane < 4 * G)
        # the slices of a program are one vector from here on
        if S > 1:  # noqa: SIM108
            total_size = _totals(size, ROWS, S)
        else:
            total_size = tl.full((1,), tl.sum(size[0], axis=0), tl.float64)
        return total_size


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
