"""A ``torchmetrics.Metric`` around a state (extra ``pyrlstats[torchmetrics]``)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

try:
    import torch
    import torchmetrics
except ImportError as error:
    raise ImportError("SliceMetric needs torchmetrics: pip install 'pyrlstats[torchmetrics]'") from error

from pyrlstats._inputs import Masks
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State


class SliceMetric(torchmetrics.Metric):
    """Statistics per slice with torchmetrics' life cycle: ``update``, ``compute``, ``reset``, sync at ``compute``.

    The arguments are those of :class:`pyrlstats.SliceAccumulator`. ``compute()`` gives the numbers of
    :meth:`pyrlstats.SliceStats.to_dict`, over all ranks: torchmetrics gathers their states, which are then merged
    exactly. ``SliceAccumulator.all_reduce`` moves less.
    """

    full_state_update = False
    is_differentiable = False

    def __init__(
        self,
        names: Sequence[str],
        *,
        layout: Layout | None = None,
        clip: tuple[float, float] = (0.2, 0.2),
        sequences: bool = False,
        advantages: bool = False,
        dual_clip: float = 3.0,
        truncate: tuple[float, float] | None = None,
        entropy: bool = False,
        probabilities: bool = False,
        **torchmetrics_options: Any,
    ) -> None:
        super().__init__(**torchmetrics_options)
        self._make = SliceAccumulator(
            names,
            layout=layout or Layout(),
            clip=clip,
            sequences=sequences,
            advantages=advantages,
            dual_clip=dual_clip,
            truncate=truncate,
            entropy=entropy,
            probabilities=probabilities,
        )
        self.names, self.layout, self.clip = self._make.names, self._make.layout, self._make.clip
        # a MetricCollection shares states that look alike under one name: only the same make may
        make = (self.names, self.layout, self.clip, self._make.groups)
        self._key = f"state_{zlib.crc32(repr(make).encode()):08x}"
        self.add_state(self._key, default=self._make._empty("cpu").buffer, dist_reduce_fx=self._pool)

    def _state(self, buffer: torch.Tensor) -> State:
        return State(self.names, self.layout, self.clip, buffer, self._make.groups)

    def _pool(self, buffers: torch.Tensor) -> torch.Tensor:
        """Pool the stacked buffers (ranks, words)."""
        first, *others = (SliceStats(self._state(buffer)) for buffer in buffers)
        pooled: torch.Tensor = first.merge(others).state.buffer
        return pooled

    @property
    def stats(self) -> SliceStats:
        """The statistics as an object, a copy: this rank's, or those of all ranks inside ``sync_context()``."""
        return SliceStats(self._state(getattr(self, self._key).clone()))

    def update(
        self,
        logp: Any,
        old_logp: Any,
        masks: Masks = None,
        *,
        slice_ids: Any = None,
        mask: Any = None,
        advantages: Any = None,
        cu_seqlens: Any = None,
    ) -> None:
        """Count one batch; see :meth:`pyrlstats.SliceAccumulator.update`."""
        accumulator = self._make._twin()
        accumulator._state = self._state(getattr(self, self._key))
        accumulator.update(
            logp, old_logp, masks, slice_ids=slice_ids, mask=mask, advantages=advantages, cu_seqlens=cu_seqlens
        )

    def merge_state(self, incoming_state: dict[str, Any] | torchmetrics.Metric) -> None:
        """Count what another metric, or its ``metric_state``, has counted too."""
        super().merge_state(incoming_state)
        self._computed = None  # torchmetrics keeps the result from before

    def compute(self) -> dict[str, float]:
        """Every statistic of everything counted so far, on all ranks, as :meth:`SliceStats.to_dict` gives them."""
        return self.stats.to_dict()
