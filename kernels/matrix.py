"""Sums of a warp by slice in one 8 x 8 float64 matrix, two registers a thread where four slices would take 40.

Masks come in runs, so the V contiguous tokens of a thread mostly belong to the same slices: they are summed once, and
the sums of the 32 threads [32, 8] come to the slices by a product with their membership [8, 32], which tensor cores
do in float64. CUDA with inline PTX only; lines that go between others, which leave sums in ``s0``, ``s1``, ...
"""

from __future__ import annotations

import triton
import triton.language as tl
from pyrlstats.kernels import histogram

RECORD = 48  # bytes a thread hands round: six sums; its set of slices follows all of them
WARP_BYTES = tl.constexpr(32 * RECORD + 4 * 32)
ZERO = "0d0000000000000000"


@triton.constexpr_function
def is_used(G, WAY):
    """With one slice a thread keeps its sums."""
    return G > 1 and histogram.in_shared(WAY)


@triton.constexpr_function
def shared_bytes(ROWS, G, WAY):
    """Shared memory of a program, beside that of the histogram."""
    return ROWS // 32 * WARP_BYTES.value if is_used(G, WAY) else 0


@triton.constexpr_function
def _start_asm(SIZE):
    return "\n".join(
        [
            f".shared .align 16 .b8 pyrlstats_handed[{SIZE}];",
            ".reg .f64 pyrlstats_near<2>, pyrlstats_far<2>;",
            ".reg .b32 pyrlstats_mine, pyrlstats_theirs, pyrlstats_set, pyrlstats_sets, pyrlstats_shift;",
            "{ .reg .b32 lane, base, k, m;",
            "mov.u32 lane, %tid.x;",
            "shr.u32 m, lane, 5;",
            "and.b32 lane, lane, 31;",
            "mov.u32 base, pyrlstats_handed;",
            f"mad.lo.s32 base, m, {WARP_BYTES.value}, base;",
            f"mad.lo.s32 pyrlstats_mine, lane, {RECORD}, base;",
            "mad.lo.s32 pyrlstats_set, lane, 4, base;",
            f"add.s32 pyrlstats_set, pyrlstats_set, {32 * RECORD};",
            # thread k + 4 m of a warp works at slice m, sum m, and thread k + 4 j of step j
            "and.b32 k, lane, 3;",
            "shr.u32 m, lane, 2;",
            "sub.s32 pyrlstats_shift, 30, m;",
            f"min.s32 m, m, {RECORD // 8 - 1};",  # what is in a column beyond the last sum is not read
            "mad.lo.s32 pyrlstats_sets, k, 4, base;",
            f"add.s32 pyrlstats_sets, pyrlstats_sets, {32 * RECORD};",
            f"mad.lo.s32 base, k, {RECORD}, base;",
            "mad.lo.s32 pyrlstats_theirs, m, 8, base; }",
            *(f"mov.f64 pyrlstats_{which}{i}, {ZERO};" for which in ("near", "far") for i in range(2)),
            "mov.u32 $0, 0;",
        ]
    )


@triton.constexpr_function
def spread_lines(which, sums):
    """Add s0, s1, ..., times 2, to the slices whose bits are in ``set``; all threads of a warp together."""
    out = ["{ .reg .b32 bit, zero; .reg .f64 membership, sum; mov.b32 zero, 0;", "bar.warp.sync 0xffffffff;"]
    out += [f"st.shared.f64 [pyrlstats_mine+{8 * k}], s{k};" for k in range(sums)]
    out += ["st.shared.b32 [pyrlstats_set], set;", "bar.warp.sync 0xffffffff;"]
    matrix = f"{{pyrlstats_{which}0, pyrlstats_{which}1}}"
    for step in range(8):
        out += [
            f"ld.shared.f64 sum, [pyrlstats_theirs+{4 * RECORD * step}];",
            f"ld.shared.b32 bit, [pyrlstats_sets+{16 * step}];",
            "shl.b32 bit, bit, pyrlstats_shift;",
            "and.b32 bit, bit, 0x40000000;",  # the upper half of 2.0
            "mov.b64 membership, {zero, bit};",
            f"mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {matrix}, {{membership}}, {{sum}}, {matrix};",
        ]
    return [*out, "}"]


@triton.constexpr_function
def _leave_asm(which):
    """The matrix of every warp to its shared memory, row by row."""
    return "\n".join(
        [
            "{ .reg .b32 lane, base;",
            "mov.u32 lane, %tid.x;",
            "shr.u32 base, lane, 5;",
            "and.b32 lane, lane, 31;",
            f"mul.lo.s32 base, base, {WARP_BYTES.value};",
            "mad.lo.s32 base, lane, 16, base;",
            "mov.u32 lane, pyrlstats_handed;",
            "add.s32 base, base, lane;",
            "bar.warp.sync 0xffffffff;",
            f"st.shared.f64 [base], pyrlstats_{which}0;",
            f"st.shared.f64 [base+8], pyrlstats_{which}1;",
            "mov.u32 $0, 0; }",
        ]
    )


@triton.jit
def start(ROWS: tl.constexpr, G: tl.constexpr, WAY: tl.constexpr):
    """Two empty matrices a warp: "near" and "far"."""
    tl.inline_asm_elementwise(
        _start_asm(shared_bytes(ROWS, G, WAY)), "=r,r", [tl.arange(0, ROWS)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load(address):
    return tl.inline_asm_elementwise(
        "ld.shared.f64 $0, [$1];", "=d,r", [address], dtype=tl.float64, is_pure=False, pack=1
    )


@triton.jit
def totals(which: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr):
    """float64 [S, 8] of all warps: slice, sum; S is the power of two from G."""
    S: tl.constexpr = histogram.power_of_two_from(G)
    tl.debug_barrier()
    tl.inline_asm_elementwise(_leave_asm(which), "=r,r", [tl.arange(0, ROWS)], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    base = tl.inline_asm_elementwise(
        "mov.u32 $0, pyrlstats_handed;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )
    total = tl.zeros((S, 8), tl.float64)
    for warp in tl.static_range(ROWS // 32):
        total += _load(base + warp * WARP_BYTES + 64 * tl.arange(0, S)[:, None] + 8 * tl.arange(0, 8)[None, :])
    return 0.5 * total
