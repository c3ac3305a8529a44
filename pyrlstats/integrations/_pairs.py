"""Several comparisons of policies, each by slice, in one accumulator: one reduction and one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.slice_stats import SliceStats
from pyrlstats.slices import Slices, pool

TOOL_SLICES = ("text", "pre_tool", "post_tool")


class PairAccumulator:
    """Log-ratios of pairs of policies, kept apart, each over the same disjoint slices and ``all`` of them.

    Args:
        pairs: names, such as ``learner_vs_old``.
        slices: names of the disjoint slices of every pair.
        clip: (low, high) of the ratio clip.
        device: where the inputs will be; None takes the first inputs' device.
    """

    def __init__(
        self,
        pairs: Sequence[str],
        slices: Sequence[str] = TOOL_SLICES,
        *,
        clip: tuple[float, float] = (0.2, 0.2),
        device: Any = None,
    ) -> None:
        self.pairs, self.slices, self.clip = tuple(pairs), tuple(slices), clip
        names = [f"{pair}__{name}" for pair in self.pairs for name in self.slices]
        self._accumulator = SliceAccumulator(names, clip=clip, device=device)

    def update(self, pair: str, logp: torch.Tensor, old_logp: torch.Tensor, where: Slices) -> None:
        """Count one batch of a pair; ``where`` holds this accumulator's slices. Does not sync."""
        ids = where.ids.to(torch.int16)
        offset = len(self.slices) * self.pairs.index(pair)
        self._accumulator.update(logp, old_logp, slice_ids=torch.where(ids >= 0, ids + offset, ids))

    def take(self) -> dict[str, SliceStats]:
        """Everything since the last call, of this rank, by pair, in NumPy memory; starts anew. One copy to the host."""
        host = SliceStats(self._accumulator.compute().state.to_host())
        self._accumulator.reset()
        return self._by_pair(host)

    def collect(self, group: Any = None) -> dict[str, SliceStats]:
        """Everything since the last call, of all ranks of ``group``, by pair, in NumPy memory; starts anew.

        One MAX and one SUM collective where torch.distributed is initialised, and one copy to the host.
        """
        distributed = torch.distributed
        try:
            if distributed.is_available() and distributed.is_initialized():
                self._accumulator.all_reduce(group)
            host = SliceStats(self._accumulator.compute().state.to_host())
        finally:
            self._accumulator.reset()
        return self._by_pair(host)

    def _by_pair(self, stats: SliceStats) -> dict[str, SliceStats]:
        found = {}
        for pair in self.pairs:
            own = [f"{pair}__{name}" for name in self.slices]
            groups = {"all": own, **{name: [full] for name, full in zip(self.slices, own, strict=True)}}
            found[pair] = pool(stats, groups)
        return found


def to_dict(pairs: dict[str, SliceStats], prefix: str = "") -> dict[str, float]:
    """``{prefix + pair + "/" + slice + "/" + statistic: value}``; pairs without a token are left out."""
    result: dict[str, float] = {}
    for pair, stats in pairs.items():
        if int(stats["all"].n_tokens):
            result |= stats.to_dict(f"{prefix}{pair}/")
    return result
