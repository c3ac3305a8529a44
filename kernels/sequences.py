"""Sums over sequences of the tokens that a slice has in them, in one pass over the tokens.

A program takes a few consecutive sequences, or an equal part of each: a group of lanes walks over one of them. How
many lanes, and how many parts, follows from the mean length, which the host knows from shapes alone.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from pyrlstats.kernels import tile
from pyrlstats.kernels.start import Prepared, interpreted
from pyrlstats.kernels.strides import MAX_COLUMNS, merged

Tensor = torch.Tensor
THREADS = 128  # of a program
TOKENS = 4  # of a lane at once, so that enough loads are under way
MAX_GROUP = 4  # slices a launch
PROGRAMS_A_MULTIPROCESSOR = 24  # of which 5 or 6 run at once: the last round is a small share
LEAST_STEPS = 2  # of a part of a sequence of the mean length: shorter ones cost more than they spread


@triton.jit
def _offsets(begin, local, columns, strides, FLAT: tl.constexpr):
    """int64 element offsets of tokens begin + local; a 64-bit division a sequence and tile, a 32-bit one a token."""
    if FLAT:
        return begin + local
    else:
        row = begin // columns
        inside = (begin - row * columns).to(tl.int32) + local
        down = inside // columns.to(tl.int32)
        across = inside - down * columns.to(tl.int32)
        return (row + down) * strides[0] + across.to(tl.int64) * strides[1]


@triton.jit
def _load(logp_ptr, old_ptr, mask_ptrs, base_ptr, begin, local, keep, columns, strides,
          N_MASKS: tl.constexpr, HAS_BASE: tl.constexpr, FLAT: tl.constexpr):  # fmt: skip
    """logp, old_logp, whether the base mask has them, and masks or ids of tokens begin + local."""
    offset = _offsets(begin, local, columns, strides[0], FLAT)
    loaded = (tl.load(logp_ptr + offset, mask=keep, other=0.0),)
    offset = _offsets(begin, local, columns, strides[0 if FLAT else 1], FLAT)
    loaded = loaded + (tl.load(old_ptr + offset, mask=keep, other=0.0),)
    if HAS_BASE:
        offset = _offsets(begin, local, columns, strides[0 if FLAT else 2], FLAT)
        loaded = loaded + (keep & (tl.load(base_ptr + offset, mask=keep, other=0) != 0),)
    else:
        loaded = loaded + (keep,)
    for s in tl.static_range(N_MASKS):
        offset = _offsets(begin, local, columns, strides[0 if FLAT else 3 + s], FLAT)
        loaded = loaded + (tl.load(mask_ptrs[s] + offset, mask=keep, other=0),)
    return loaded


@triton.jit
def _add(sums, loaded, first, FROM: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr):
    """sums, with the tokens of loaded[FROM:] added."""
    logp = loaded[FROM]
    old_logp = loaded[FROM + 1]
    values = (tile.log_ratio(logp, old_logp).to(tl.float64), logp.to(tl.float64), old_logp.to(tl.float64))
    added = ()
    for s in tl.static_range(G):
        member = loaded[FROM + 2]
        if MODE == tile.MASKS:
            member = member & (loaded[FROM + 3 + s] != 0)
        elif MODE == tile.IDS:
            member = member & (loaded[FROM + 3].to(tl.int64) == first + s)
        added = added + (sums[4 * s] + member.to(tl.int32),)
        for k in tl.static_range(3):
            # a factor of 0 would leave the NaN of a token outside
            added = added + (sums[4 * s + 1 + k] + tl.where(member, values[k], 0.0),)
    return added


@triton.jit
def _sum_up(logp_ptr, old_ptr, mask_ptrs, base_ptr, ends_ptr, out_ptr, n, sequences, parts, n_slices, first,
            columns, strides,
            ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
            HAS_BASE: tl.constexpr, FLAT: tl.constexpr):  # fmt: skip
    part = tl.program_id(0) % parts
    sequence = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = sequence < sequences
    begin = tl.load(ends_ptr + sequence, mask=known, other=0)
    end = tl.load(ends_ptr + sequence + 1, mask=known, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), n)
    length = tl.maximum(tl.minimum(end, n) - begin, 0)
    STEP: tl.constexpr = V * LANES
    share = ((length + parts - 1) // parts + STEP - 1) // STEP * STEP
    begin += part * share
    left = tl.minimum(length - part * share, share)

    # one element a thread: a tile of more would leave it to Triton how they are spread
    none = tl.zeros((ROWS, LANES), tl.float64)
    sums = ()
    for _ in tl.static_range(G):
        sums = sums + (tl.zeros((ROWS, LANES), tl.int32), none, none, none)
    N_MASKS: tl.constexpr = 0 if MODE == tile.ALL else 1 if MODE == tile.IDS else G
    for done in range(0, tl.max(left, axis=0), STEP):
        here = tl.minimum(left - done, STEP).to(tl.int32)[:, None]
        loaded = ()
        for v in tl.static_range(V):
            local = v * LANES + tl.arange(0, LANES)[None, :]
            loaded = loaded + _load(
                logp_ptr, old_ptr, mask_ptrs, base_ptr, (begin + done)[:, None], local, local < here, columns,
                strides, N_MASKS, HAS_BASE, FLAT)  # fmt: skip
        for v in tl.static_range(V):
            sums = _add(sums, loaded, first, v * (3 + N_MASKS), G, MODE)

    plane = n_slices * sequences
    out_ptr = out_ptr + part * (4 * plane) + first * sequences + sequence
    for s in tl.static_range(G):
        for k in tl.static_range(4):
            tl.store(out_ptr + (k * plane + s * sequences), tl.sum(sums[4 * s + k].to(tl.float64), axis=1), mask=known)


@triton.jit(do_not_specialize=["n", "sequences", "parts", "n_slices", "first"])
def sums_kernel(logp_ptr, old_ptr, mask0, mask1, mask2, mask3, base_ptr, ends_ptr, out_ptr,
                n: tl.int64, sequences: tl.int64, parts: tl.int32, n_slices: tl.int32, first: tl.int32,
                ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr,
                HAS_BASE: tl.constexpr):  # fmt: skip
    """Contiguous tokens [n], ends [sequences + 1]; sums of 1, x, logp, old_logp into out [parts, 4, S, sequences]."""
    _sum_up(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, ends_ptr, out_ptr, n, sequences, parts,
            n_slices, first, n, ((1, 1),), ROWS, LANES, V, G, MODE, HAS_BASE, True)  # fmt: skip


@triton.jit(do_not_specialize=[
    "n", "sequences", "parts", "n_slices", "first", "columns", "logp_row", "logp_col", "old_row", "old_col",
    "base_row", "base_col", "row0", "col0", "row1", "col1", "row2", "col2", "row3", "col3"])  # fmt: skip
def sums_strided_kernel(logp_ptr, old_ptr, mask0, mask1, mask2, mask3, base_ptr, ends_ptr, out_ptr,
                        n: tl.int64, sequences: tl.int64, parts: tl.int32, n_slices: tl.int32, first: tl.int32,
                        columns: tl.int64,
                        logp_row: tl.int64, logp_col: tl.int64, old_row: tl.int64, old_col: tl.int64,
                        base_row: tl.int64, base_col: tl.int64, row0: tl.int64, col0: tl.int64,
                        row1: tl.int64, col1: tl.int64, row2: tl.int64, col2: tl.int64,
                        row3: tl.int64, col3: tl.int64,
                        ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
                        MODE: tl.constexpr, HAS_BASE: tl.constexpr):  # fmt: skip
    """Tokens [n / columns, columns] with two strides a tensor, in elements; 0 for a broadcast mask."""
    strides = ((logp_row, logp_col), (old_row, old_col), (base_row, base_col),
               (row0, col0), (row1, col1), (row2, col2), (row3, col3))  # fmt: skip
    _sum_up(logp_ptr, old_ptr, (mask0, mask1, mask2, mask3), base_ptr, ends_ptr, out_ptr, n, sequences, parts,
            n_slices, first, columns, strides, ROWS, LANES, V, G, MODE, HAS_BASE, False)  # fmt: skip


class Shape(NamedTuple):
    """Of a launch."""

    lanes: int  # of a sequence
    parts: int  # of a sequence


@lru_cache
def _programs_wanted(device: torch.device) -> int:
    if interpreted(sums_kernel):
        return 4
    return PROGRAMS_A_MULTIPROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def shape(n: int, sequences: int, device: torch.device) -> Shape:
    """A program a sequence while all fit on the GPU, else lanes for the mean length; parts until it is full.

    A sequence much longer than the mean is what all others wait for: few lanes only where there are many sequences.
    """
    mean, wanted = n // sequences, _programs_wanted(device)
    lanes = THREADS if sequences <= wanted or mean > 2048 else 32 if mean > 32 else 4
    programs = -(-sequences * lanes // THREADS)
    parts = min(wanted // programs, mean // (LEAST_STEPS * TOKENS * lanes))
    return Shape(lanes, max(parts, 1))


@lru_cache(maxsize=4096)
def _prepared(
    device: torch.device,
    flat: bool,
    lanes: int,
    slices: int,
    mode: int,
    has_base: bool,
    like: tuple[tuple[torch.dtype, bool], ...],
) -> Prepared:
    """The kernel for tensors of these dtypes, aligned to 16 bytes or not."""
    kernel = sums_kernel if flat else sums_strided_kernel
    constants = {
        "ROWS": THREADS // lanes, "LANES": lanes, "V": TOKENS, "G": slices, "MODE": mode, "HAS_BASE": has_base,
    }  # fmt: skip
    options = {"num_warps": THREADS // 32}
    return Prepared((device, kernel, *constants.values(), like), kernel, constants, options)


def sums(
    logp: Tensor,
    old_logp: Tensor,
    mode: int,
    members: tuple[Tensor, ...],
    base: Tensor | None,
    ends: Tensor,
    slices: int,
    chosen: Shape | None = None,
) -> Tensor:
    """Sums over each sequence of 1, x, logp and old_logp: float64 (4, S, sequences). Does not sync.

    The same bits from run to run on one kind of device. NaN and infinities of members go into their sums.

    Args:
        logp, old_logp: float tensors of one shape, any strides.
        mode: tile.ALL, MASKS or IDS.
        members: the masks, or the one tensor of ids, of logp's shape (stride 0 where broadcast).
        base: mask ANDed into every slice, or None.
        ends: int64 (sequences + 1,), where sequences begin and end in the flattened tokens; cut to the tokens.
        slices: S.
        chosen: shape of the launch; None is the usual one.
    """
    device = logp.device
    if not interpreted(sums_kernel) and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return sums(logp, old_logp, mode, members, base, ends, slices, chosen)
    n, sequences = logp.numel(), ends.shape[0] - 1
    if n == 0 or sequences == 0:
        return torch.zeros((4, slices, sequences), dtype=torch.float64, device=device)
    lanes, parts = chosen or shape(n, sequences, device)
    tensors = [logp, old_logp, *members] if base is None else [logp, old_logp, *members, base]
    grid = None
    if not all(tensor.is_contiguous() for tensor in tensors):
        grid = _grid(tensors)
        if grid is None:
            tensors = [tensor.contiguous() for tensor in tensors]
    logp, old_logp, *rest = tensors
    masks = rest if base is None else rest[:-1]
    base = logp if base is None else rest[-1]
    ends = ends.contiguous()
    out = torch.empty((parts, 4, slices, sequences), dtype=torch.float64, device=device)
    programs = -(-sequences * lanes // THREADS) * parts
    for first in range(0, slices, MAX_GROUP):
        group = min(MAX_GROUP, slices - first)
        chunk = slice(first, first + group) if mode == tile.MASKS.value else slice(0, len(masks))
        its = masks[chunk]
        used = [logp, old_logp, *its, *rest[len(masks) :], ends]
        like = tuple([(tensor.dtype, tensor.data_ptr() & 15 == 0) for tensor in used])
        padding = MAX_GROUP - len(its)
        arguments = (logp, old_logp, *its, *[logp] * padding, base, ends, out, n, sequences, parts, slices, first)
        if grid is not None:
            columns, strides = grid
            of_base = strides[-1] if rest[len(masks) :] else (0, 0)
            pairs = [*strides[:2], of_base, *strides[2 : 2 + len(masks)][chunk], *[(0, 0)] * padding]
            arguments = (*arguments, columns, *itertools.chain.from_iterable(pairs))
        launch = _prepared(device, grid is None, lanes, group, mode, bool(rest[len(masks) :]), like)
        launch(programs, *arguments)
    return out[0] if parts == 1 else out.sum(0)


def _grid(tensors: list[Tensor]) -> tuple[int, list[tuple[int, int]]] | None:
    """(columns, (row, column) strides of every tensor) of the tokens in their order; None where two are too few."""
    dims = merged(tensors, range(tensors[0].dim()))
    if len(dims) == 1:
        size, strides = dims[0]
        columns = min(size, MAX_COLUMNS)
        return columns, [(columns * stride, stride) for stride in strides]
    if len(dims) == 2 and dims[1][0] <= MAX_COLUMNS:
        return dims[1][0], list(zip(dims[0][1], dims[1][1], strict=True))
    return None
