"""How far a quantile can be trusted: confidence intervals from the counts, and a flag for tails with too few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

from pyrlstats import quantiles as _quantiles
from pyrlstats.cells import Cells, Numbers, abs_cells, first_at_least, on_device_of, probabilities, signed_cells, take
from pyrlstats.results import Statistics, View
from pyrlstats.slice_stats import SliceStats, SliceView
from pyrlstats.state import Array, State, namespace
from pyrlstats.values import ValueStats, ValueView

RELIABLE_TOKENS = 10.0

Stats = SliceStats | ValueStats | SliceView | ValueView | State


class QuantileInterval(NamedTuple):
    """A quantile with its sampling uncertainty; (S,) or (S, len(q)) each, in the unit of x.

    Attributes:
        estimate: what ``quantile`` gives.
        lo, hi: the order statistics of the interval's two ranks.
        reliable: bool, n min(q, 1 - q) >= 10. Where False the tail holds too few tokens: the quantile is hardly
            more than the extreme token, and the interval, cut to [min, max], covers less than it says.
    """

    estimate: Array
    lo: Array
    hi: Array
    reliable: Array


def quantile_interval(
    stats: Stats, q: Numbers, confidence: float = 0.95, *, certified: bool = False
) -> QuantileInterval:
    """Confidence interval of quantiles of x from the counts alone, whatever the distribution.

    The number of tokens below the true quantile is binomial: the order statistics of ranks
    n q -+ z sqrt(n q (1 - q)), rounded outwards, enclose it. NaN for a slice without finite tokens.

    Args:
        stats: of S slices, or one slice's view.
        q: a number or a sequence in [0, 1].
        confidence: two-sided, of independent tokens. Tokens of one sequence are not: then it is too narrow.
        certified: give the outer edges of the bins that hold the two order statistics, instead of values
            interpolated inside them: right for any data, but never narrower than a bin.

    Raises:
        TypeError: decayed statistics, whose counts are weighted and have no ranks.
        ValueError: a q outside [0, 1], or confidence outside (0, 1).

    Source:
        Hahn, Meeker (1991), Statistical Intervals, distribution-free intervals for a percentile.
    """
    return _interval(stats, signed_cells, _quantiles.quantile, q, confidence, certified)


def abs_quantile_interval(
    stats: Stats, q: Numbers, confidence: float = 0.95, *, certified: bool = False
) -> QuantileInterval:
    """As :func:`quantile_interval`, of abs(x)."""
    return _interval(stats, abs_cells, _quantiles.abs_quantile, q, confidence, certified)


def _interval(
    stats: Stats,
    cells_of: Callable[[State], Cells],
    quantile: Callable[[State, list[float]], Array],
    q: Numbers,
    confidence: float,
    certified: bool,
) -> QuantileInterval:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must satisfy 0 < confidence < 1, got {confidence}")
    values, scalar = probabilities(q)
    state = state_of(stats)
    cells = cells_of(state)
    xp = namespace(cells.counts)
    if cells.counts.dtype != xp.int64:
        raise TypeError("an interval needs counts of tokens, got decayed statistics, whose counts are weighted")
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    n = as_floats(cells.counts.sum(-1)[:, None])
    centre = n * on_device_of(n, values)
    spread = z * xp.sqrt(centre * (n - centre) / xp.clip(n, 1.0, None))
    lowest, lo, _ = _order_statistic(cells, xp.floor(centre - spread))
    _, hi, highest = _order_statistic(cells, xp.ceil(centre + spread) + 1.0)
    reliable = xp.minimum(centre, n - centre) >= RELIABLE_TOKENS
    bounds = (lowest, highest) if certified else (lo, hi)
    result = QuantileInterval(quantile(state, values), *bounds, reliable)
    return QuantileInterval(*(column[:, 0] for column in result)) if scalar else result


def _order_statistic(cells: Cells, rank: Array) -> tuple[Array, Array, Array]:
    """The tokens of ranks (S, Q), which are cut to 1 and n: lower edge of the bin, interpolated, upper edge."""
    xp = namespace(rank)
    cumulative = xp.cumsum(cells.counts, -1)
    n = cumulative[:, -1:]
    rank = xp.minimum(xp.clip(xp.asarray(rank, dtype=xp.int64), 1, None), xp.clip(n, 1, None))
    # past the end only where n is 0
    cell = xp.clip(first_at_least(cumulative, rank), 0, cumulative.shape[-1] - 1)
    count = take(cells.counts, cell)
    before = take(cumulative, cell) - count
    inside = (as_floats(rank - before) - 0.5) / xp.clip(count, 1, None)
    edges = cells.edges_on_device
    lo = xp.clip(edges[cell], cells.lowest, cells.highest)
    hi = xp.clip(edges[cell + 1], cells.lowest, cells.highest)
    # the extreme tokens are known exactly, the smallest abs(x) is not
    lo = xp.where(rank == n, cells.highest, lo)
    if cells.signed:
        hi = xp.where(rank == 1, cells.lowest, hi)
        lo = xp.where(rank == 1, cells.lowest, lo)
    return lo, lo + (hi - lo) * inside, hi


def state_of(stats: Stats) -> State:
    """The state of S slices, or that of the one slice of a view."""
    if isinstance(stats, State):
        return stats
    if isinstance(stats, Statistics):
        return stats.state
    if isinstance(stats, View):
        state = stats._stats.state
        xp = namespace(state.buffer)
        rows = [getattr(state, field)[stats._index] for field in ("counts", "histogram", "sums", "maxima")]
        buffer = xp.concatenate([row if row.dtype == xp.int64 else row.view(xp.int64) for row in rows])
        return replace(state, names=(state.names[stats._index],), buffer=buffer)
    raise TypeError(f"SliceStats, ValueStats, one slice of them or a State are needed, got {type(stats).__name__}")


def as_floats(counts: Array) -> Array:
    """float64; left to itself, torch divides integers in float32."""
    xp = namespace(counts)
    return xp.asarray(counts, dtype=xp.float64)
