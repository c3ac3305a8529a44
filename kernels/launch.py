"""From a batch of torch tensors to kernel launches: strides, groups of slices, scratch, programs.

Nothing here reads the device: sizes depend on shapes alone, so a call never syncs and can be captured in a graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from pyrlstats.kernels import far, histogram, slice_hist, tile
from pyrlstats.kernels.start import Prepared, interpreted
from pyrlstats.kernels.strides import MAX_COLUMNS, merged

from pyrlstats.layout import NEAR_LIMIT, Layout, clip_thresholds, float32_bits

Tensor = torch.Tensor
_MASKS, _IDS = int(tile.MASKS.value), int(tile.IDS.value)
_SLICES, _PATTERNS, _SINGLE, _REGISTERS, _GLOBAL = (
    int(way.value)
    for way in (histogram.SLICES, histogram.PATTERNS, histogram.SINGLE, histogram.REGISTERS, histogram.GLOBAL)
)

INTERPRETED = interpreted(slice_hist.slice_hist_kernel)
MAX_GROUP = 4  # overlapping slices a launch
MAX_IDS = 8  # disjoint slices a launch
MAX_PER_SM = 2  # programs
TICKETS = 4096  # launches that can be captured before a capture needs a memset
WHOLE = 1 << 21  # tokens from which a last, partial tile is a launch of its own
MANY_SPARE = 4 << 10  # bytes of the larger claim that are left to Triton's exchanges


@dataclass
class Scratch:
    """Rows of the programs of one launch, and the counter that finds the last one: zero between launches."""

    rows: Tensor
    ticket: Tensor


_scratch: dict[tuple[Any, ...], Scratch] = {}
_tickets: dict[Any, list[Tensor]] = {}  # device -> zeros not yet given out


@lru_cache
def _programs_max(device: torch.device) -> int:
    if INTERPRETED:
        return 3
    return MAX_PER_SM * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _ticket(device: torch.device, capturing: bool) -> Tensor:
    """A zero that belongs to one stream or one captured launch for ever."""
    free = _tickets.get(device)
    if not free:
        zeros = torch.zeros(1 if capturing else TICKETS, dtype=torch.int32, device=device)
        if capturing:  # a memset in the graph: only in captures without a call before them, or more than TICKETS
            return zeros
        free = _tickets[device] = [zeros[i : i + 1] for i in range(TICKETS)]
    return free.pop()


def _scratch_for(device: torch.device) -> Scratch:
    """The scratch of the current stream: launches on one stream follow each other, so they can share it.

    A captured launch may be replayed on any stream, so it gets one of its own, from the graph's memory.
    """
    capturing = not INTERPRETED and torch.cuda.is_current_stream_capturing()
    key = (device, 0 if INTERPRETED else triton.runtime.driver.active.get_current_stream(device.index))
    found = None if capturing else _scratch.get(key)
    if found is None:
        words = _programs_max(device) * MAX_IDS * int(far.ROW.value)
        found = Scratch(torch.empty(words, dtype=torch.float64, device=device), _ticket(device, capturing))
        if not capturing:
            _scratch[key] = found
    return found


@lru_cache
def _has_many_rows(device: torch.device) -> bool:
    """Whether a program can have 160 KiB of shared memory: data-centre GPUs, not the others."""
    if INTERPRETED:
        return False
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))


@lru_cache
def _thresholds(clip: tuple[float, float]) -> tuple[float, float, int]:
    """low, high, and the bits of the smallest |x| that is clipped or far."""
    low, high = clip_thresholds(clip)
    return low, high, float32_bits(min(-low, high, NEAR_LIMIT))


@lru_cache
def _histogram_way(layout: Layout, mode: int, slices: int, many_rows: bool, portable: bool) -> tuple[int, int]:
    """(way, slices a launch): the cheapest that fits. See histogram.py."""
    if portable:
        return (_REGISTERS if layout.n_bins <= 4096 else _GLOBAL), min(slices, MAX_GROUP)
    if mode in (tile.IDS.value, tile.ALL.value):
        return _fitting(_SINGLE, layout, min(slices, MAX_IDS if many_rows else MAX_GROUP), many_rows)
    group = min(slices, MAX_GROUP)
    if group == 1:
        return _fitting(_SINGLE, layout, 1, many_rows)
    if many_rows or group == 2:
        way, fits = _fitting(_PATTERNS, layout, group, many_rows)
        if way == _PATTERNS and fits == group:
            return way, group
    return _fitting(_SLICES, layout, group, many_rows)


def _fitting(way: int, layout: Layout, group: int, many_rows: bool) -> tuple[int, int]:
    room = histogram.CLAIMS[1] - MANY_SPARE if many_rows else histogram.CLAIMS[0] - histogram.TRITON_BYTES
    while group and histogram.shared_bytes(group, layout.bins_per_sign, way) > room:
        group -= 1
    return (way, group) if group else (_GLOBAL, MAX_GROUP)


def slice_hist_(
    logp: Tensor,
    old_logp: Tensor,
    mode: int,
    members: tuple[Tensor, ...],
    base: Tensor | None,
    state: Any,
    portable: bool = False,
    config: slice_hist.Config | None = None,
) -> None:
    """Add tokens to ``state``, in place, on the current stream.

    Args:
        logp, old_logp: float tensors of one shape, any strides.
        mode: tile.ALL, MASKS, BITS or IDS.
        members: the masks, or the one tensor of bits or ids, of logp's shape (stride 0 where broadcast).
        base: mask ANDed into every slice, or None.
        state: pyrlstats State on the same device.
        portable: no inline PTX.
        config: shape of the launch; None is the measured one.
    """
    if logp.numel() == 0:
        return
    device = logp.device
    if not INTERPRETED and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return slice_hist_(logp, old_logp, mode, members, base, state, portable, config)
    tensors = [logp, old_logp, *members] if base is None else [logp, old_logp, *members, base]
    scratch = _scratch_for(device)
    portable = portable or INTERPRETED or torch.version.cuda is None
    if False not in [tensor.is_contiguous() for tensor in tensors]:
        _launch(logp.numel(), None, tensors, mode, base is not None, state, scratch, portable, config)
        return
    for n, grid, views in _collapsed(tensors):
        _launch(n, grid, views, mode, base is not None, state, scratch, portable, config)


def _collapsed(tensors: list[Tensor]) -> Iterator[tuple[int, Any, list[Tensor]]]:
    """(n, None or (columns, strides), views) for every launch that the strides need: mostly one.

    Dimensions are ordered by logp's strides (sums do not care) and merged where every tensor allows it. What is
    left beyond two dimensions is looped over.
    """
    outermost_first = tensors[0].stride()
    order = sorted(range(tensors[0].dim()), key=lambda d: -outermost_first[d])
    dims = merged(tensors, order)
    if not dims or (len(dims) == 1 and all(stride == 1 for stride in dims[0][1])):
        yield tensors[0].numel(), None, tensors
        return
    inner = 2 if len(dims) > 1 and dims[-1][0] <= MAX_COLUMNS else 1
    outer, dims = dims[:-inner], dims[-inner:]
    if inner == 1:
        columns = min(dims[0][0], MAX_COLUMNS)
        dims = [(1, [columns * stride for stride in dims[0][1]]), dims[0]]
    else:
        columns = dims[1][0]
    pairs = list(zip(dims[0][1], dims[1][1], strict=True))
    n = dims[0][0] * dims[1][0]
    for index in itertools.product(*(range(size) for size, _ in outer)):
        views = []
        for t, tensor in enumerate(tensors):
            shift = sum(i * step[t] for i, (_, step) in zip(index, outer, strict=True))
            views.append(tensor.as_strided((1,), (1,), tensor.storage_offset() + shift) if shift else tensor)
        yield n, (columns, pairs), views


def _launch(
    n: int,
    grid: Any,
    tensors: list[Tensor],
    mode: int,
    has_base: bool,
    state: Any,
    scratch: Scratch,
    portable: bool,
    config: slice_hist.Config | None,
) -> None:
    logp, old_logp = tensors[:2]
    members = tensors[2:-1] if has_base else tensors[2:]
    base = tensors[-1] if has_base else logp
    slices = len(state.names)
    low, high, tail_bits = _thresholds(state.clip)
    if config is None:
        # Triton's own shared memory, 8 KiB with strides or 64-bit elements, would reach into the rows
        crowded = mode != _IDS and (grid is not None or max([tensor.element_size() for tensor in tensors]) > 4)
        config = slice_hist.config(
            n, slices, logp.element_size() <= 2, not crowded and _has_many_rows(logp.device), portable
        )
    tile_size = config.rows * config.v
    alignment = tuple([tensor.data_ptr() & 15 == 0 for tensor in tensors])
    aligned = grid is None and n >= tile_size and False not in alignment
    whole = aligned and n >= WHOLE
    if whole and n % tile_size:
        rest = n - n % tile_size
        _launch(rest, None, tensors, mode, has_base, state, scratch, portable, config)
        # all lie in memory in the order of their tokens, which need not be that of their dimensions
        views = [tensor.as_strided((n - rest,), (1,), tensor.storage_offset() + rest) for tensor in tensors]
        _launch(n - rest, None, views, mode, has_base, state, scratch, portable, None)
        return
    dtypes = tuple([tensor.dtype for tensor in tensors])
    steps = _plan(config, logp.device, state.layout, slices, mode, has_base, dtypes, grid is None, portable,
                  None if aligned else alignment, whole)  # fmt: skip
    tiles = -(-n // tile_size)
    most = config.per_sm * _programs_max(logp.device) // MAX_PER_SM
    run = min(config.run, -(-tiles // most))
    programs = min(-(-tiles // run), most)
    for first, masked, launch in steps:
        masks = members[masked]
        arguments = (
            logp, old_logp, *masks, *[logp] * (4 - len(masks)), base, state.buffer, scratch.rows, scratch.ticket,
            n, slices, first, run, low, high, tail_bits,
        )  # fmt: skip
        if grid is not None:
            columns, strides = grid
            its = strides[2:][masked]
            pairs = [strides[0], strides[1], strides[-1] if has_base else (0, 0), *its, *[(0, 0)] * (4 - len(its))]
            arguments = (*arguments, columns, *itertools.chain.from_iterable(pairs))
        launch(programs, *arguments)


@lru_cache(maxsize=4096)
def _plan(
    config: slice_hist.Config,
    device: torch.device,
    layout: Layout,
    slices: int,
    mode: int,
    has_base: bool,
    dtypes: tuple[torch.dtype, ...],
    flat: bool,
    portable: bool,
    alignment: tuple[bool, ...] | None,
    whole: bool,
) -> list[tuple[int, slice, Prepared]]:
    """The launches for tensors like these: first slice, place of its masks among the members, kernel.

    dtypes and alignment (to 16 bytes; None where every tensor is and there is a full tile) are of logp, old_logp,
    the members and the base; whole: there is no partial tile. Worked out once: a fifth of the host time of a small
    call.
    """
    way, group = _histogram_way(layout, mode, slices, config.many_rows, portable)
    kernel = slice_hist.slice_hist_kernel if flat else slice_hist.slice_hist_strided_kernel
    options = {"num_warps": config.rows // 32}
    if config.registers and torch.version.cuda is not None and not INTERPRETED:
        options["maxnreg"] = config.registers
    n_members = len(dtypes) - 2 - has_base
    steps = []
    for first in range(0, slices, group):
        g = min(group, slices - first)
        masked = slice(first, first + g) if mode == _MASKS else slice(0, min(n_members, 1))
        values = {
            "ROWS": config.rows, "V": config.v, "G": g, "MODE": mode, "HAS_BASE": has_base,
            "ALIGNED": alignment is None, "WHOLE": whole, **slice_hist.constants(layout, way),
        }  # fmt: skip
        used = [*range(2), *range(2, 2 + n_members)[masked], *range(2 + n_members, len(dtypes))]
        like = [(dtypes[i], alignment is None or alignment[i]) for i in used]
        key = (device, kernel, config, has_base, *values.values(), *like)
        steps.append((first, masked, Prepared(key, kernel, values, options)))
    return steps
