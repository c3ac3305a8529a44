"""Ranks that agree on what they ask for, and the collectives of statistics that need the tokens themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from pyrlstats.distributed import _checked_group, _hash
from pyrlstats.state import Array

# group -> what was agreed on -> device type of the collectives
_agreements: WeakKeyDictionary[Any, dict[tuple[tuple[str, str], ...], str]] = WeakKeyDictionary()


class Ranks:
    """The ranks of a process group, all of which ask for the same.

    Args:
        group: as for ``SliceAccumulator.all_reduce``.
        request: what must be equal on every rank, as text by name. Compared the first time that this group asks for
            it, in one small collective, which syncs.
        device: where this rank's tokens are; None is NumPy memory.

    Raises:
        RuntimeError: no process group.
        ValueError: the requests differ, or this rank is not in the group; the former is the same on every rank.
    """

    def __init__(self, group: Any, request: Mapping[str, str], device: Any) -> None:
        self._group = _checked_group(group, None)
        agreed = _agreements.setdefault(self._group, {})
        key = tuple(request.items())
        if key not in agreed:
            agreed[key] = _agree(self._group, dict(request), device)
        self._device = agreed[key]

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def sum(self, integers: Array) -> Array:
        """The sum over the ranks of an integer array of one shape, where it lies. One SUM; does not sync."""
        tensor = self._sent(integers)
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self._group)
        return _back(tensor, integers)

    def gather(self, array: Array) -> Array:
        """The arrays of all ranks, of one shape and dtype, (size, ...), where this rank's lies. Does not sync."""
        tensor = self._sent(array)
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everyone, tensor, group=self._group)
        return _back(torch.stack(everyone), array)

    def global_ranks(self) -> list[int]:
        """The ranks in the world, in the order of the group."""
        return list(dist.get_process_group_ranks(self._group))

    def _sent(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        there = tensor if tensor.device.type == self._device else tensor.to(self._device)
        return there.contiguous().clone()


def _back(tensor: torch.Tensor, like: Array) -> Array:
    return tensor.cpu().numpy() if isinstance(like, np.ndarray) else tensor.to(like.device)


def _agree(group: Any, request: dict[str, str], device: Any) -> str:
    """Compare the requests; the type of device that the collectives run on."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    accelerators = [kind for kind, backend in backends.items() if kind != "cpu" and backend != "gloo"]
    accelerator = accelerators[0] if accelerators else "cpu"
    mine = _hash(str(sorted(request.items())))
    on_accelerator = int(device is not None and device.type == accelerator)
    words = torch.tensor(
        [mine, -mine, on_accelerator], dtype=torch.int64, device="cpu" if "cpu" in backends else accelerator
    )
    dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
    highest, negated_lowest, anywhere = words.tolist()
    if highest != -negated_lowest:
        raise ValueError(_difference(request, group))
    return accelerator if anywhere or "cpu" not in backends else "cpu"


def _difference(mine: dict[str, str], group: Any) -> str:
    """Who asks for what: the same text on every rank."""
    ranks = dist.get_process_group_ranks(group)
    every: list[Any] = [None] * len(ranks)
    dist.all_gather_object(every, mine, group=group)
    parts = []
    for field in mine:
        askers: dict[str, list[int]] = {}
        for rank, request in zip(ranks, every, strict=True):
            askers.setdefault(str(request.get(field)), []).append(rank)
        if len(askers) > 1:
            parts += [f"{field} {asked} on rank {', '.join(map(str, who))}" for asked, who in askers.items()]
    return f"the ranks ask for different things: {'; '.join(parts)}. Give the same on every rank"
