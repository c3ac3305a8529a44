"""Clipped and far tokens, by the warp that holds them: CUDA only.

Clipped tokens (x > ln 1.2) and far ones (0.5 <= |x| <= far.PLAIN_LIMIT) are rare in most data, but 65,536 tokens nearly
always hold some. So a warp votes over its 32 V tokens, and only one that holds some looks closer, while they are in
registers: 1 instruction in V tokens where there are none, 7 a token for the clips, 35 a token for the far sums.

The far sums are in registers of every thread where there is one slice, otherwise in the matrix of the warp (matrix.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import far, histogram, matrix, tile

from pyrlstats import layout

SUMS = 6  # x, |x|, x^2, w, w^2 and the number of tokens


def _ptx(value: float) -> str:
    """A float32 constant."""
    return f"0f{layout.float32_bits(value):08x}"


# Triton lets the functions below use strings and numbers of this module, but no functions of others
NEAR_LIMIT, PLAIN_LIMIT = _ptx(layout.NEAR_LIMIT), _ptx(far.PLAIN_LIMIT.value)
NEAR_BITS = layout.NEAR_BITS
ROUNDER = _ptx(12582912.0)  # 1.5 2^23: added to a float32 below 2^22 it leaves the nearest integer in the low bits
LOG2E_HIGH = _ptx(layout.LOG2E)
LOG2E_LOW = _ptx(layout.LOG2E - layout.float32_from_bits(layout.float32_bits(layout.LOG2E)))

# (2^f - 1) / f on [-0.5, 0.5], minimax in 2^f, 2e-9; in float32, with the rounding of f: w to 8e-8, k3 to 3.4e-7
POWER = tuple(
    _ptx(coefficient)
    for coefficient in (
        0.00015353299386333674,
        0.0013398951850831509,
        0.009618437848985195,
        0.055503323674201965,
        0.24022647738456726,
        0.6931471824645996,
    )
)


@triton.constexpr_function
def _declare_asm():
    empty = " ".join(f"mov.f64 pyrlstats_far{k}, {matrix.ZERO};" for k in range(SUMS))
    return f".reg .f64 pyrlstats_far<{SUMS}>;\n{empty} mov.u32 $0, 0;"


@triton.constexpr_function
def _sum_asm(K):
    return f"mov.f64 $0, pyrlstats_far{K};"


@triton.constexpr_function
def _clip_lines(x, m, row, low, high, junk, G, P, WAY):
    """Count a token that is clipped, in the junk word if it is not; +-inf too, which the second look takes back."""
    slot = [4 * (2 * P + 2 + name.value) for name in (tile.CLIP_LOW, tile.CLIP_HIGH)]
    out = [
        f"setp.gt.f32 p, {x}, {high};",
        f"setp.lt.or.f32 q, {x}, {low}, p;",
        f"selp.b32 t, {-slot[1]}, {-slot[0]}, p;",
    ]
    if histogram.SLICES.value != WAY:  # the row of the token is the only one
        out += [f"add.s32 t, {junk}, t;", f"mad.lo.s32 t, {row}, {histogram.row_bytes(P)}, t;"]
        return [*out, f"selp.b32 t, t, {junk}, q;", "red.shared.add.u32 [t], 1;"]
    out += [f"add.s32 t, {junk}, t;"]
    for s in range(G):
        out += [
            f"and.b32 u, {m}, {1 << s};",
            "setp.ne.and.s32 p, u, 0, q;",
            f"add.s32 u, t, {histogram.row_bytes(P) * (s + 1)};",
            f"selp.b32 u, u, {junk}, p;",
            "red.shared.add.u32 [u], 1;",
        ]
    return out


@triton.constexpr_function
def _weight_lines(x):
    """w = e^x in float64 for |x| <= far.PLAIN_LIMIT, else anything: 2^n 2^f, n being the low bits of the rounder."""
    return [
        f"fma.rn.f32 r, {x}, {LOG2E_HIGH}, {ROUNDER};",
        f"sub.rn.f32 f, {ROUNDER}, r;",
        f"fma.rn.f32 f, {x}, {LOG2E_HIGH}, f;",
        f"fma.rn.f32 f, {x}, {LOG2E_LOW}, f;",
        f"mov.f32 g, {POWER[0]};",
        *(f"fma.rn.f32 g, g, f, {c};" for c in POWER[1:]),
        "mul.rn.f32 g, g, f;",
        "cvt.f64.f32 a, g;",
        "add.rn.f64 w, a, 0d3ff0000000000000;",
        "mov.b64 {t, u}, w;",
        "shl.b32 n, r, 20;",
        "add.s32 u, u, n;",
        "mov.b64 w, {t, u};",
    ]


@triton.constexpr_function
def _token_lines(x, to):
    """Add one token to the sums, if p holds."""
    return [
        # zeros otherwise: predicated, an addition would take three instructions
        *_weight_lines(x),
        f"selp.f64 w, w, {matrix.ZERO}, p;",
        f"selp.f32 f, {x}, 0f00000000, p;",
        "cvt.f64.f32 a, f;",
        f"add.rn.f64 {to}0, {to}0, a;",
        f"fma.rn.f64 {to}2, a, a, {to}2;",
        "abs.f64 a, a;",
        f"add.rn.f64 {to}1, {to}1, a;",
        f"add.rn.f64 {to}3, {to}3, w;",
        f"fma.rn.f64 {to}4, w, w, {to}4;",
        "@p add.s32 count, count, 1;",
    ]


@triton.constexpr_function
def _far_lines(x, m, G, WAY):
    V = len(x)
    is_far = [[f"abs.f32 f, {x[j]};", f"setp.ge.f32 p, f, {NEAR_LIMIT};", f"setp.le.and.f32 p, f, {PLAIN_LIMIT}, p;"]
              for j in range(V)]  # fmt: skip
    if not matrix.is_used(G, WAY):  # x is 0 outside of the only slice
        lines = [line for j in range(V) for line in [*is_far[j], *_token_lines(x[j], "pyrlstats_far")]]
        return [
            "mov.b32 count, 0;",
            *lines,
            "cvt.rn.f64.s32 a, count;",
            "add.rn.f64 pyrlstats_far5, pyrlstats_far5, a;",
        ]
    out = [line for j in range(V) for line in [*is_far[j], f"selp.b32 m{j}, {m[j]}, 0, p;"]]
    out += ["SETS:", "mov.b32 set, m0;"]  # one set of slices at a time, until no thread has one left
    out += [f"max.s32 set, set, m{j};" for j in range(1, V)]
    out += ["setp.ne.s32 p, set, 0;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra DONE;"]
    out += ["mov.b32 count, 0;", *(f"mov.f64 s{k}, {matrix.ZERO};" for k in range(SUMS - 1))]
    out += ["setp.eq.s32 q, set, 0;", "selp.b32 wanted, -1, set, q;"]  # a thread without a set adds nothing
    for j in range(V):
        out += [f"setp.eq.s32 p, m{j}, wanted;", *_token_lines(x[j], "s"), f"@p mov.b32 m{j}, 0;"]
    return [*out, "cvt.rn.f64.s32 s5, count;", *matrix.spread_lines("far", SUMS), "bra SETS;"]


@triton.constexpr_function
def _add_asm(G, V, P, WAY):
    """Of V tokens of a thread; operands after the outputs, V of each (scalars V times): x (0 for non-members),
    members, row, largest magnitude, the bits of the smallest clipped or far one, low, high, junk word.
    """
    x, m, row, largest, tail_bits, low, high, junk = ([f"${V * (1 + k) + j}" for j in range(V)] for k in range(8))
    out = [
        ".reg .pred p, q; .reg .b32 t, u, n, count, set, wanted, largest; .reg .f32 r, f, g; .reg .f64 a, w;",
        f".reg .b32 m<{V}>; .reg .f64 s<{SUMS}>;",
        f"mov.b32 largest, {largest[0]};",
        *(f"max.s32 largest, largest, {other};" for other in largest[1:]),  # one register, or tokens of several rows
        f"setp.ge.s32 p, largest, {tail_bits[0]};",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
    ]
    for j in range(V):
        out += _clip_lines(x[j], m[j], row[j], low[0], high[0], junk[0], G, P, WAY)
    out += [f"setp.ge.s32 p, largest, {NEAR_BITS};", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra DONE;"]
    out += [*_far_lines(x, m, G, WAY), "DONE:", *(f"mov.u32 ${j}, 0;" for j in range(V))]
    return "{\n" + "\n".join(out) + "\n}"


@triton.constexpr_function
def _constraints(V):
    return ",".join(["=r"] * V + ["f"] * V + ["r"] * (4 * V) + ["f"] * (2 * V) + ["r"] * V)


@triton.jit
def start(ROWS: tl.constexpr):
    """No sums yet, where there is one slice."""
    tl.inline_asm_elementwise(_declare_asm(), "=r,r", [tl.arange(0, ROWS)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def add(counters, x, members, row, largest, tail_bits, low, high,
        ROWS: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """Clip counts, and the sums of far tokens up to far.PLAIN_LIMIT.

    x [ROWS, V] is 0 for non-members; largest [ROWS] are the bits of the largest abs(x).
    """
    tl.inline_asm_elementwise(
        _add_asm(G, V, P, WAY),
        _constraints(V),
        [
            x,
            members,
            row,
            tl.broadcast_to(largest[:, None], (ROWS, V)),
            tail_bits,
            low,
            high,
            counters[0] + 28,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=V,
    )


@triton.jit
def _added(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def finish(row_ptr, counts_ptr, ROWS: tl.constexpr, G: tl.constexpr, WAY: tl.constexpr):
    """Add the sums of the program to its scratch rows, and the numbers of tokens to the state; between barriers."""
    if matrix.is_used(G, WAY):
        total = matrix.totals("far", ROWS, G)
        for s in tl.static_range(G):
            _add_slice(total, s, row_ptr, counts_ptr)
    else:
        sums = ()
        for k in tl.static_range(6):
            sums = sums + (
                tl.inline_asm_elementwise(
                    _sum_asm(k), "=d,r", [tl.arange(0, ROWS)], dtype=tl.float64, is_pure=False, pack=1
                ),
            )
        # a joined table would go through 8 KiB of the shared memory that the rows of the histogram need
        x, size, x2, w, w2, n = tl.reduce(sums, 0, _added)
        _add_sums(x, size, x2, w, w2, n, row_ptr, counts_ptr)


@triton.jit
def _add_slice(total, s: tl.constexpr, row_ptr, counts_ptr):
    """Row s of total [S, 8]."""
    here = tl.arange(0, total.shape[0])[:, None] == s
    row = tl.sum(tl.where(here, total, 0.0), axis=0)
    column = tl.arange(0, 8)
    _add_sums(
        _pick(row, column, 0), _pick(row, column, 1), _pick(row, column, 2), _pick(row, column, 3),
        _pick(row, column, 4), _pick(row, column, 5), row_ptr + s * far.ROW, counts_ptr + s * tile.N_COUNTS,
    )  # fmt: skip


@triton.jit
def _pick(row, column, WHICH: tl.constexpr):
    return tl.sum(tl.where(column == WHICH, row, 0.0), axis=0)


@triton.jit
def _add_sums(x, size, x2, w, w2, n, row_ptr, counts_ptr):
    tiles_ptr = row_ptr + far.TILES
    tl.store(tiles_ptr + far.X, tl.load(tiles_ptr + far.X) + x)
    tl.store(tiles_ptr + far.SIZE, tl.load(tiles_ptr + far.SIZE) + size)
    tl.store(tiles_ptr + far.X2, tl.load(tiles_ptr + far.X2) + x2)
    tl.store(tiles_ptr + far.W, tl.load(tiles_ptr + far.W) + w)
    tl.store(tiles_ptr + far.W2, tl.load(tiles_ptr + far.W2) + w2)
    tl.store(tiles_ptr + far.N, tl.load(tiles_ptr + far.N) + n)
    tl.atomic_add(counts_ptr + tile.FAR, n.to(tl.int64), sem="relaxed")
