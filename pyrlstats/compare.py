"""How two distributions differ, from their states alone: policies, steps, slices, engines.

:func:`compare` takes what one wants to judge and a baseline. Every figure is also a function of its own, of all slices
at once: see :mod:`pyrlstats.distances`, whose names are here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pyrlstats import quantiles as _quantiles
from pyrlstats.cells import Numbers
from pyrlstats.distances import (
    Bounded,
    TailRatio,
    abs_log_quantile_shift,
    jensen_shannon,
    kolmogorov_smirnov,
    ks_noise_floor,
    pair_of,
    quantile_shift,
    tail_ratio,
    wasserstein1,
)
from pyrlstats.intervals import Stats
from pyrlstats.results import percentile_name
from pyrlstats.state import Array, State

__all__ = [
    "Bounded",
    "ComparedSlice",
    "Comparison",
    "TailRatio",
    "abs_log_quantile_shift",
    "compare",
    "jensen_shannon",
    "kolmogorov_smirnov",
    "ks_noise_floor",
    "quantile_shift",
    "tail_ratio",
    "wasserstein1",
]


class ComparedSlice:
    """One slice against its baseline, as 0-d values on the states' device. Nothing syncs."""

    def __init__(self, comparison: Comparison, index: int) -> None:
        self._pair = comparison.pair
        self._index = index

    def quantile_shift(self, q: Numbers) -> Bounded:
        """:func:`quantile_shift`: 0-d for a number, (len(q),) for a sequence, each."""
        return Bounded(*(values[self._index] for values in quantile_shift(*self._pair, q)))

    def abs_log_quantile_shift(self, q: Numbers) -> Array:
        """:func:`abs_log_quantile_shift`: 0-d for a number, (len(q),) for a sequence."""
        return abs_log_quantile_shift(*self._pair, q)[self._index]

    def tail_ratio(self, q: float = 0.999, *, threshold: float | None = None) -> TailRatio:
        """:func:`tail_ratio`, 0-d each."""
        return TailRatio(*(values[self._index] for values in tail_ratio(*self._pair, q, threshold=threshold)))

    def wasserstein1(self) -> Bounded:
        """:func:`wasserstein1`, 0-d each."""
        return Bounded(*(values[self._index] for values in wasserstein1(*self._pair)))

    def kolmogorov_smirnov(self) -> Bounded:
        """:func:`kolmogorov_smirnov`, 0-d each."""
        return Bounded(*(values[self._index] for values in kolmogorov_smirnov(*self._pair)))

    def ks_noise_floor(self) -> Array:
        """:func:`ks_noise_floor`, 0-d."""
        return ks_noise_floor(*self._pair)[self._index]

    def jensen_shannon(self, *, mantissa_bits: int | None = 2, corrected: bool = True) -> Array:
        """:func:`jensen_shannon`, 0-d."""
        return jensen_shannon(*self._pair, mantissa_bits=mantissa_bits, corrected=corrected)[self._index]


class Comparison(Mapping[str, ComparedSlice]):
    """Statistics against a baseline, slice by slice. Equal only to itself, and hashable.

    Attributes:
        pair: the two states, statistics first and baseline second.
    """

    def __init__(self, pair: tuple[State, State]) -> None:
        self.pair = pair

    def __getitem__(self, name: str) -> ComparedSlice:
        try:
            return ComparedSlice(self, self.pair[0].names.index(name))
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.pair[0].names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.pair[0].names)

    def __len__(self) -> int:
        return len(self.pair[0].names)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def to_dict(
        self, prefix: str = "", *, quantiles: Sequence[float] = (0.5, 0.99, 0.999), tail: float = 0.999
    ) -> dict[str, float]:
        """Every figure as Python numbers, for a logger, effects first. Copies both states to the host: syncs on a GPU.

        Args:
            prefix: put before every key.
            quantiles: of abs(x), as ``abs_p99_log_shift``.
            tail: the quantile of the baseline that is the tail's threshold.

        Returns:
            ``{prefix + slice + "/" + figure: value}``; NaN where a slice has no finite tokens.
        """
        one, two = (state.to_host() for state in self.pair)
        shifts = abs_log_quantile_shift(one, two, list(quantiles))
        ratio = tail_ratio(one, two, tail)
        moved = wasserstein1(one, two)
        with np.errstate(all="ignore"):
            spread = _quantiles.quantile(two, [0.25, 0.75]) @ np.array([-1.0, 1.0])
            columns = {f"abs_{percentile_name(q)}_log_shift": shifts[:, i] for i, q in enumerate(quantiles)}
            columns |= {
                "tail_ratio": ratio.ratio,
                "tail_log_ratio": ratio.log_ratio,
                "tail_log_ratio_se": ratio.log_se,
                "tail_threshold": ratio.threshold,
                "wasserstein1": moved.estimate,
                "wasserstein1_over_iqr": moved.estimate / spread,
                "kolmogorov_smirnov": kolmogorov_smirnov(one, two).estimate,
                "ks_noise_floor": ks_noise_floor(one, two),
                "jensen_shannon": jensen_shannon(one, two),
            }
        return {
            f"{prefix}{name}/{key}": float(column[index])
            for index, name in enumerate(one.names)
            for key, column in columns.items()
        }

    def __repr__(self) -> str:
        return f"Comparison({self.to_dict()})"


def compare(stats: Stats, baseline: Stats) -> Comparison:
    """Every figure of this module for ``stats`` against ``baseline``.

    Args:
        stats: SliceStats, ValueStats, or one slice of them: ``compare(now["post_tool"], now["pre_tool"])``.
        baseline: of the same slices and layout, such as a frozen step of the same run; or one slice.

    Raises:
        TypeError: neither statistics nor a slice of them.
        ValueError: other slices (unless there is one on each side), layout or device.
    """
    return Comparison(pair_of(stats, baseline))
