"""The dictionary of raw sums of one micro-batch, with the same keys whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyrlstats._guard import Guard
from pyrlstats.integrations._pairs import TOOL_SLICES, PairAccumulator
from pyrlstats.integrations.sums import as_floats, sums_for_reduction


class MicroBatchSums:
    """Raw sums of pairs of policies by slice, for one micro-batch at a time.

    Trainers reduce dictionaries key by key, some with a collective for each: a key that one rank lacks would hang the
    others. So a pair without tensors, and a micro-batch that could not be counted, give zeros.

    Args:
        what: named in the warning when counting fails.
        pairs: names, such as ``learner_vs_old``.
        prefix: put before every key.
        clip: (low, high) of the ratio clip.
        extrema: see :func:`sums_for_reduction`.
    """

    def __init__(
        self,
        what: str,
        pairs: Sequence[str],
        prefix: str,
        clip: tuple[float, float],
        slices: Sequence[str] = TOOL_SLICES,
        *,
        extrema: bool = False,
    ) -> None:
        self.guard = Guard(what)
        self.prefix, self.extrema = prefix, extrema
        self._accumulator = PairAccumulator(pairs, slices, clip=clip)

    def __call__(self, count: Callable[[PairAccumulator], None]) -> dict[str, float]:
        """Sums of what ``count`` puts into the accumulator. One copy to the host, which syncs on a GPU."""
        failures = self.guard.failures
        self.guard(count, self._accumulator)
        counted = self._accumulator.take()
        if self.guard.failures > failures:  # half of a micro-batch is none
            counted = PairAccumulator(
                self._accumulator.pairs, self._accumulator.slices, clip=self._accumulator.clip
            ).take()
        sums: dict[str, float] = {}
        for pair, stats in counted.items():
            sums |= as_floats(sums_for_reduction(stats, f"{self.prefix}{pair}/", extrema=self.extrema))
        return sums
