"""Reduction over ranks: one MAX and one SUM collective of a size that every rank knows beforehand.

MAX comes first: it fixes the scale of the far weights, which are then rescaled exactly, on the device; SUM adds
counts, histogram and sums in one float64 buffer (counts are exact to 2^53).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from pyrlstats import _dispatch
from pyrlstats.layout import STATE_VERSION, Layout
from pyrlstats.state import Group, State, rescale_, scale_exponent

if TYPE_CHECKING:
    from pyrlstats.accumulator import SliceAccumulator


Make = tuple[tuple[str, ...], Layout, tuple[float, float], tuple[Group, ...]]

# group -> make -> device type of the collectives. Of the process, not of an accumulator: what is new, copied or loaded
# on one rank only must not shake hands while the others reduce. For the same reason nothing that may differ between
# the ranks, such as where a state lies, is part of the key.
_agreements: WeakKeyDictionary[Any, dict[Make, str]] = WeakKeyDictionary()


class Reduction:
    """What one accumulator keeps between its reductions: its buffers."""

    def __init__(self) -> None:
        self._buffers: _Buffers | None = None
        self._agreed: tuple[Any, str] | None = None  # weak group, and device type, of what needs no more checks

    def start(self, accumulator: SliceAccumulator, group: Any, dst: int | None, async_op: bool) -> Handle:
        """Issue both collectives. The state changes in ``wait`` only, so that a failure leaves it as it was."""
        group, device = self._checked(accumulator, group, dst)
        state = accumulator._state or self._spare(accumulator, device)
        if self._buffers is None or self._buffers.state is not state or self._buffers.device != device:
            self._buffers = _Buffers(state, device)
        buffers = self._buffers
        buffers.pack_maxima()
        dist.all_reduce(buffers.maxima, dist.ReduceOp.MAX, group=group)
        buffers.pack_sums()
        if dst is None:
            work = dist.all_reduce(buffers.total, dist.ReduceOp.SUM, group=group, async_op=async_op)
        else:
            work = dist.reduce(buffers.total, dst, dist.ReduceOp.SUM, group=group, async_op=async_op)
        return Handle(accumulator, work, buffers if dst in (None, dist.get_rank()) else None)

    def _checked(self, accumulator: SliceAccumulator, group: Any, dst: int | None) -> tuple[Any, str]:
        """The group, and the device type that its ranks have agreed on."""
        if dst is None and self._agreed is not None and dist.is_initialized():
            known, device = self._agreed
            wanted = dist.group.WORLD if group is None else group
            if known() is wanted:
                return wanted, device
        group = _checked_group(group, dst)
        device, for_good = _agreed_device(accumulator, group)
        self._agreed = (ref(group), device) if for_good else None
        return group, device

    def _spare(self, accumulator: SliceAccumulator, device: str) -> State:
        """An empty state for an accumulator that has none; what it borrowed before has been cleared by ``reset``."""
        if self._buffers is not None and self._buffers.device == device:
            return self._buffers.state
        return accumulator._empty_on(torch.device(device))


class Handle:
    """A reduction under way; the accumulator takes nothing in until it is finished."""

    def __init__(self, accumulator: SliceAccumulator, work: Any, received: _Buffers | None) -> None:
        self._accumulator = accumulator
        self._work = work  # None where the collective is already done, or in the current stream
        self._received = received
        self._finished = False
        accumulator._reduced = True
        accumulator._pending = self

    def wait(self) -> SliceAccumulator:
        """Finish: on NCCL the current stream waits, not the host. Returns the accumulator; once more does nothing.

        Raises:
            RuntimeError: the collective failed or timed out; the state is that of this rank's own tokens.
        """
        if self._finished:
            return self._accumulator
        self._finished = True
        work, self._work = self._work, None
        self._accumulator._pending = None
        try:
            if work is not None:
                work.wait()
        except BaseException:
            self._accumulator._reduced = False
            raise
        if self._received is not None:
            self._received.unpack()
            self._accumulator._receive(self._received.state)
        return self._accumulator


class _Buffers:
    """Packed copies of a state on the device of the collectives, allocated once."""

    def __init__(self, state: State, device: str) -> None:
        memory = torch.as_tensor(state.buffer)  # shared
        self.state, self.device = state, device
        sections = list(replace(state, buffer=memory).sections())
        where = memory.device if memory.device.type == device else torch.device(device)
        self.total = torch.empty(
            sum(section.buffer.numel() - section.maxima.numel() for section in sections),
            dtype=torch.float64,
            device=where,
        )
        self._maxima = torch.empty(
            2, sum(section.maxima.numel() for section in sections), dtype=torch.float64, device=where
        )  # own and global
        self.maxima = self._maxima[1]
        kernels = _kernels(where) if memory.device == where else None
        self._sections = []
        added, greatest = 0, 0
        for section in sections:
            packed = _Packed(section, self.total[added:], self._maxima[:, greatest:], kernels)
            added += packed.integers.numel() + packed.sums.numel()
            greatest += packed.maxima[0].numel()
            self._sections.append(packed)

    def pack_maxima(self) -> None:
        for section in self._sections:
            section.maxima.copy_(section.state_maxima)

    def pack_sums(self) -> None:
        """After the MAX: everything that adds up, on the global scale."""
        for section in self._sections:
            section.pack()

    def unpack(self) -> None:
        """After the SUM: make the state the global one."""
        for section in self._sections:
            section.unpack()


def _kernels(device: torch.device) -> Any:
    """The kernels that do a section in one launch, where they run: 20 launches less for every reduction."""
    forced = os.environ.get("PYRLSTATS_BACKEND") not in (None, "", "triton")
    if device.type != "cuda" or forced or _dispatch.unavailable("triton") is not None:
        return None
    from pyrlstats.backends import triton_gpu

    return triton_gpu.pack


class _Packed:
    """One section of the state, and its places at the beginning of the packed buffers."""

    def __init__(self, section: State, total: torch.Tensor, maxima: torch.Tensor, kernels: Any) -> None:
        self.rows = section.rows
        self.state_sums, self.state_maxima = section.sums, section.maxima
        n_integers = section.counts.numel() + section.histogram.numel()
        n_sums = self.state_sums.numel()
        self.state_integers = section.buffer[:n_integers]
        self.integers = total[:n_integers]
        self.sums = total[n_integers : n_integers + n_sums].view(self.state_sums.shape)
        self.maxima = maxima[:, : self.state_maxima.numel()].view(2, *self.state_maxima.shape)
        self.max_x = self.maxima[:, :, self.rows.maxima.index("max_x")] if self.rows.scaled else None
        self._launches = None
        if kernels is not None:
            own, common = self.maxima
            self._launches = kernels.Section(section.buffer, own, common, total, n_integers, self.rows)

    def pack(self) -> None:
        if self._launches is not None:
            self._launches.pack()
            return
        self.integers.copy_(self.state_integers)
        self.sums.copy_(self.state_sums)
        if self.max_x is not None:
            own, common = scale_exponent(self.max_x)
            rescale_(self.rows, self.sums, own - common)

    def unpack(self) -> None:
        if self._launches is not None:
            self._launches.unpack()
            return
        self.state_integers.copy_(self.integers)
        self.state_sums.copy_(self.sums)
        self.state_maxima.copy_(self.maxima[1])


def _checked_group(group: Any, dst: int | None) -> Any:
    """The process group, this rank and ``dst`` being in it; None is the default one."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "a reduction needs a process group: call torch.distributed.init_process_group first, "
            "merge the statistics of the workers on the driver, or, in a single process, take compute() alone"
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in this group: reduce over a group that holds it")
    ranks = dist.get_process_group_ranks(group)
    if dst is not None and dst not in ranks:
        raise ValueError(f"dst must be a global rank of the group, one of {ranks}, got {dst}")
    return group


def _agreed_device(accumulator: SliceAccumulator, group: Any) -> tuple[str, bool]:
    """The device type of the collectives, agreed on once for every group and make of accumulator; is that for good?"""
    agreed = _agreements.setdefault(group, {})
    make = (accumulator.names, accumulator.layout, accumulator.clip, accumulator.groups)
    if make in agreed:
        return agreed[make], True
    device, for_good = _handshake(accumulator, group)
    if for_good:
        agreed[make] = device
    return device, for_good


def _handshake(accumulator: SliceAccumulator, group: Any) -> tuple[str, bool]:
    """Raise the same error on every rank unless all hold states of the same make; one small all-reduce.

    Returns:
        The type of device for the collectives: the group's accelerator where a rank has its state there, or where
        the group knows nothing else; the CPU otherwise. A rank that has seen no tokens follows the others.
        And whether that stays so: not where there is a choice and no rank's state has a device yet.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    # gloo moves GPU memory through the host: better once, here
    accelerators = [kind for kind, backend in backends.items() if kind != "cpu" and backend != "gloo"]
    accelerator = accelerators[0] if accelerators else "cpu"
    makes = {
        "names": str(list(accumulator.names)),
        "layout": str(accumulator.layout),
        "clip": str(accumulator.clip),
        "groups": str(accumulator.groups),
        "version": str(STATE_VERSION),
    }
    hashes = [_hash(make) for make in makes.values()]
    where = 0 if accumulator.device is None else 2 if accumulator.device.type == accelerator else 1
    # MAX of h and of -h: equal everywhere exactly if max h = -max(-h). The size never changes between versions
    words = torch.tensor(
        [*hashes, *(-value for value in hashes), where],
        dtype=torch.int64,
        device="cpu" if "cpu" in backends else accelerator,
    )
    dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
    largest = words.tolist()
    differing = [field for i, field in enumerate(makes) if largest[i] != -largest[i + len(makes)]]
    if differing:
        raise ValueError(_mismatch({field: makes[field] for field in differing}, group))
    if accelerator == "cpu" or "cpu" not in backends:
        return accelerator, True
    return accelerator if largest[-1] == 2 else "cpu", largest[-1] > 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _mismatch(mine: dict[str, str], group: Any) -> str:
    """Who holds what: the same text on every rank."""
    ranks = dist.get_process_group_ranks(group)
    every: list[Any] = [None] * len(ranks)
    dist.all_gather_object(every, mine, group=group)
    parts = []
    for field in mine:
        holders: dict[str, list[int]] = {}
        for rank, makes in zip(ranks, every, strict=True):
            holders.setdefault(makes[field], []).append(rank)
        parts += [f"{field} {make} on rank {', '.join(map(str, held))}" for make, held in holders.items()]
    return (
        f"the ranks' accumulators differ: {'; '.join(parts)}. Make them with the same names (in the same order), "
        "layout, clip, groups and pyrlstats version on every rank"
    )
