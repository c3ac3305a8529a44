"""A ``torchmetrics.Metric`` around a state (extra ``pyrlstats[torchmetrics]``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchmetrics

from pyrlstats import _dispatch
from pyrlstats._inputs import Masks, gate
from pyrlstats.layout import Layout, check_clip, check_names
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State


class SliceMetric(torchmetrics.Metric):
    """Statistics per slice with torchmetrics' life cycle: ``update``, ``compute``, ``reset``, sync at ``compute``.

    The arguments are those of :class:`pyrlstats.SliceAccumulator`; ``compute()`` gives a
    :class:`pyrlstats.SliceStats`. torchmetrics gathers the states of all ranks (its only collective for states
    that are no plain sum) and they are merged exactly. ``SliceAccumulator.all_reduce`` moves less.
    """

    full_state_update = False
    is_differentiable = False

    buffer: torch.Tensor

    def __init__(
        self,
        names: Sequence[str],
        *,
        layout: Layout | None = None,
        clip: tuple[float, float] = (0.2, 0.2),
        **torchmetrics_options: Any,
    ) -> None:
        super().__init__(**torchmetrics_options)
        self.names = check_names(names)
        self.layout = layout or Layout()
        self.clip = check_clip(clip)
        empty = State.empty(self.names, self.layout, self.clip, "cpu")
        self.add_state("buffer", default=empty.buffer, dist_reduce_fx=self._merge)

    def _state(self, buffer: torch.Tensor) -> State:
        return State(self.names, self.layout, self.clip, buffer)

    def _merge(self, buffers: torch.Tensor) -> torch.Tensor:
        """Pool the stacked buffers (ranks, words)."""
        pooled = self._state(buffers[0].clone())
        for buffer in buffers[1:]:
            pooled.merge_(self._state(buffer))
        merged: torch.Tensor = pooled.buffer
        return merged

    def update(self, logp: Any, old_logp: Any, masks: Masks = None, *, slice_ids: Any = None, mask: Any = None) -> None:
        """Count one batch; see :meth:`pyrlstats.SliceAccumulator.update`."""
        batch = gate(logp, old_logp, masks, slice_ids, mask, self.names)
        _dispatch.accumulate(batch, self._state(self.buffer))

    def compute(self) -> SliceStats:
        """The statistics of everything counted so far, on all ranks. A copy."""
        return SliceStats(self._state(self.buffer.clone()))
