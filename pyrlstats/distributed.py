"""Reduction over ranks: one MAX and one SUM collective of a size that every rank knows beforehand.

MAX comes first: it fixes the scale of the far weights, which are then rescaled exactly, on the device; SUM adds
counts, histogram and sums in one float64 buffer (counts are exact to 2^53).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pyrlstats.layout import MAXIMA, STATE_VERSION
from pyrlstats.state import State, scale_exponent

if TYPE_CHECKING:
    from pyrlstats.accumulator import SliceAccumulator


def group_device(group: Any) -> torch.device:
    """Where a rank without tokens keeps its empty state: the device its group communicates on."""
    _require_group()
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _require_group() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "all_reduce needs a process group: call torch.distributed.init_process_group first, "
            "or merge the statistics of the workers on the driver"
        )


class Reduction:
    """The buffers of one accumulator's reductions, and the groups it has shaken hands with."""

    def __init__(self, state: State) -> None:
        integers = state.counts.numel() + state.histogram.numel()
        device = state.buffer.device
        self._sum = torch.empty(integers + state.sums.numel(), dtype=torch.float64, device=device)
        self._max = torch.empty(tuple(state.maxima.shape), dtype=torch.float64, device=device)
        self._agreed: set[Any] = set()

    def start(self, state: State, group: Any, dst: int | None, accumulator: SliceAccumulator) -> Handle:
        """Issue both collectives; the state changes in ``wait`` only, so that a failure leaves it as it was."""
        _require_group()
        key = group if group is not None else dist.group.WORLD
        if key not in self._agreed:
            _handshake(state, group)
            self._agreed.add(key)
        self._max.copy_(state.maxima)
        dist.all_reduce(self._max, dist.ReduceOp.MAX, group=group)
        exponent = scale_exponent(self._max[:, MAXIMA.index("max_x")])
        sums = state.sums.numel()
        self._sum[:-sums].copy_(state.buffer[: self._sum.numel() - sums])
        self._sum[-sums:].copy_(state.rescaled_sums(exponent).reshape(-1))
        if dst is None:
            work = dist.all_reduce(self._sum, dist.ReduceOp.SUM, group=group, async_op=True)
        else:
            work = dist.reduce(self._sum, dst, dist.ReduceOp.SUM, group=group, async_op=True)
        receives = dst is None or dist.get_rank() == dst
        return Handle(work, state, self._sum, self._max, receives, accumulator)


class Handle:
    """A reduction under way."""

    def __init__(
        self,
        work: Any,
        state: State,
        total: torch.Tensor,
        maxima: torch.Tensor,
        receives: bool,
        accumulator: SliceAccumulator,
    ) -> None:
        self._work = work
        self._state = state
        self._total = total
        self._maxima = maxima
        self._receives = receives
        self._accumulator = accumulator
        accumulator._reduced = True

    def wait(self) -> SliceAccumulator:
        """Finish: on NCCL the current stream waits, not the host. Returns the accumulator.

        Raises:
            RuntimeError: the collective failed or timed out; the state is that of this rank's own tokens.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except BaseException:
                self._accumulator._reduced = False
                raise
            self._work = None
            if self._receives:
                sums = self._state.sums.numel()
                self._state.buffer[: self._total.numel() - sums].copy_(self._total[:-sums])
                self._state.sums.copy_(self._total[-sums:].view_as(self._state.sums))
                self._state.maxima.copy_(self._maxima)
        return self._accumulator


_FIELDS = ("version", "names", "layout", "clip")


def _handshake(state: State, group: Any) -> None:
    """One small all-reduce that raises the same error on every rank unless all hold states of the same make."""
    makes = (STATE_VERSION, state.names, state.layout, state.clip)
    hashes = [_hash(repr(make)) for make in makes]
    # MAX of h and of -h: equal everywhere exactly if max h = -max(-h)
    words = torch.tensor([*hashes, *(-value for value in hashes)], dtype=torch.int64, device=state.buffer.device)
    dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
    largest = words.tolist()
    differing = [field for i, field in enumerate(_FIELDS) if largest[i] != -largest[i + len(_FIELDS)]]
    if differing:
        raise ValueError(
            f"the ranks' accumulators differ in {' and '.join(differing)}: make them with the same names (in the "
            f"same order), layout, clip and pyrlstats version on every rank; this rank has names {list(state.names)}, "
            f"{state.layout}, clip {state.clip}, version {STATE_VERSION}"
        )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
