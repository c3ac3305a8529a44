"""Accumulate, reduce, report: what the callbacks of different trainers have in common. Needs no trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyrlstats._guard import Guard
from pyrlstats._inputs import Masks
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.sinks import Sink, Sinks
from pyrlstats.slice_stats import SliceStats

IN_LOGS = (
    "n_tokens",
    "n_nan",
    "zero_fraction",
    "kl_k3",
    "ess_fraction",
    "clip_fraction",
    "abs_log_ratio_p50",
    "abs_log_ratio_p99",
    "abs_log_ratio_p99_9",
    "log_ratio_min",
    "log_ratio_max",
)


class Reporter:
    """Counts micro-batches, and at each report pools all ranks, fills the sinks and starts anew.

    Neither :meth:`update` nor :meth:`report` raises: what fails is counted and logged once.

    Args:
        names: of the slices.
        sinks: sinks, or a function that makes them, which is called on the main rank at the first report.
        prefix: of the keys.
        in_logs: statistics of each slice that :meth:`report` returns for the trainer's own log; None is all. Sinks
            get all in any case.
        group: process group over which reports pool; None is the default one.
        **make: further arguments of :class:`pyrlstats.SliceAccumulator`: clip, layout, advantages, sequences ...

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        sinks: Callable[[], Iterable[Sink]] | Iterable[Sink] = (),
        prefix: str = "rl/",
        in_logs: Sequence[str] | None = IN_LOGS,
        group: Any = None,
        **make: Any,
    ) -> None:
        self.prefix = prefix
        self.stats: SliceStats | None = None  # of the last report
        self._accumulator = SliceAccumulator(names, **make)
        self._group = group
        self._make_sinks = sinks if callable(sinks) else lambda: sinks
        self._sinks: Sinks | None = None
        self._updates, self._reports = Guard("counting log-ratios"), Guard("reporting log-ratios")
        self._making = Guard("making sinks")
        known = self._accumulator.compute().to_dict(prefix)
        wanted = {f"{prefix}{name}/{one}" for name in self._accumulator.names for one in in_logs or ()}
        if not wanted <= set(known):
            raise ValueError(f"in_logs must name statistics, got {list(in_logs or ())}: those of to_dict()")
        self._keys = set(known) if in_logs is None else wanted | {f"{prefix}n_out_of_range"}

    @property
    def failures(self) -> dict[str, int]:
        """What failed -> how often, on this rank; of the sinks too."""
        own = {guard.what: guard.failures for guard in (self._updates, self._reports, self._making)}
        return own | (self._sinks.failures if self._sinks is not None else {})

    def update(self, logp: Any, old_logp: Any, masks: Masks = None, **others: Any) -> None:
        """Count one micro-batch; arguments as :meth:`pyrlstats.SliceAccumulator.update`. Does not sync."""
        self._updates(self._accumulator.update, logp, old_logp, masks, **others)

    def reset(self) -> None:
        """Forget what was counted since the last report."""
        self._reports(self._accumulator.reset)

    def report(self, step: int, *, is_main: bool, scalars: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Pool all ranks, write to the sinks, start anew. Every rank must call it. Syncs: one copy to the host.

        Args:
            step: of the trainer.
            is_main: whether this rank has the sinks.
            scalars: the trainer's own numbers, for the sinks.

        Returns:
            Keys and numbers for the trainer's own log, the same on every rank but for ``n_failed_updates``; empty
            where it failed.
        """
        return self._reports(self._report, step, is_main, scalars or {}) or {}

    def _report(self, step: int, is_main: bool, scalars: Mapping[str, Any]) -> dict[str, float]:
        try:
            if _world_size(self._group) > 1:
                self._accumulator.all_reduce(self._group)
            self.stats = stats = SliceStats(self._accumulator.compute().state.to_host())
        finally:
            self._accumulator.reset()
        failed: dict[str, float] = {f"{self.prefix}n_failed_updates": self._updates.failures}
        if is_main:
            if self._sinks is None:
                self._sinks = Sinks(self._making(self._make_sinks) or ())
            numbers = {key: value for key, value in scalars.items() if isinstance(value, (int, float))}
            self._sinks.write(step, {self.prefix: stats}, numbers | failed)
        return {key: value for key, value in stats.to_dict(self.prefix).items() if key in self._keys} | failed

    def close(self) -> None:
        """Close the sinks. They may be written to again."""
        if self._sinks is not None:
            self._sinks.close()


def _world_size(group: Any) -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size(group))
