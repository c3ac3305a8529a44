"""How two distributions differ: pure functions of two states, vectorised over slices, without a sync.

Sizes of the effect come first:

- :func:`quantile_shift` and :func:`abs_log_quantile_shift`, by how much a quantile moved;
- :func:`tail_ratio`, how many times more tokens lie beyond a threshold of the baseline;
- :func:`wasserstein1`, how far mass moved on average, in the unit of x;
- :func:`kolmogorov_smirnov` and :func:`jensen_shannon`, which need to be read next to their noise.

Tokens of one sequence are not independent. Standard errors, noise floors and intervals here are those of independent
tokens: too narrow for tokens of few sequences. What counts as a change is best taken from the run's own steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pyrlstats import quantiles as _quantiles
from pyrlstats.cells import Cells, Numbers, abs_cells, as_list, on_device_of, probabilities, signed_cells, take
from pyrlstats.intervals import Stats, as_floats, state_of
from pyrlstats.state import Array, State, namespace
from pyrlstats.stats import n_finite

KS_FLOOR = 1.358  # 5 % point of the Kolmogorov distribution

# k tokens of a bin, of which f go to one side, and the number of ways to choose them
_DEALT = 16
_DEALS = np.array([(k, f, math.comb(k, f)) for k in range(_DEALT + 1) for f in range(_DEALT + 1)], np.float64).T


class TailRatio(NamedTuple):
    """How many times more tokens lie in the tail than in the baseline's; (S,) each.

    Attributes:
        ratio: share of tokens with abs(x) >= threshold over the baseline's share; 1 = no change.
        log_ratio: its logarithm, nats.
        log_se: standard error of ``log_ratio`` for independent tokens, sqrt(1 / count + 1 / baseline_count).
        threshold: a bin edge, in the unit of x; the tail counts are exact there.
        count, baseline_count: int64, tokens in the two tails.
    """

    ratio: Array
    log_ratio: Array
    log_se: Array
    threshold: Array
    count: Array
    baseline_count: Array


class Bounded(NamedTuple):
    """A distance with certified bounds; (S,) each."""

    estimate: Array
    lo: Array
    hi: Array


def quantile_shift(stats: Stats, baseline: Stats, q: Numbers) -> Bounded:
    """quantile(q) - baseline quantile(q), in the unit of x: (S,) for a number, (S, len(q)) for a sequence.

    Over q this is the shift function of Doksum (1974): where along the distribution it moved. Certified bounds are
    those of the two quantiles.

    Raises:
        ValueError: a q outside [0, 1], or states that cannot be compared.
    """
    one, two = pair_of(stats, baseline)
    lo_one, hi_one = _quantiles.quantile_bounds(one, q)
    lo_two, hi_two = _quantiles.quantile_bounds(two, q)
    estimate = _quantiles.quantile(one, q) - _quantiles.quantile(two, q)
    return Bounded(estimate, lo_one - hi_two, hi_one - lo_two)


def abs_log_quantile_shift(stats: Stats, baseline: Stats, q: Numbers) -> Array:
    """log(abs_quantile(q) / baseline abs_quantile(q)), dimensionless; 0.1 is a tail 10 % wider.

    float64 (S,) for a number, (S, len(q)) for a sequence; infinite where only one quantile is 0, NaN where both are
    or a slice has no finite tokens. Relative error of each quantile at most 2^-mantissa_bits.

    Raises:
        ValueError: a q outside [0, 1], or states that cannot be compared.
    """
    one, two = pair_of(stats, baseline)
    xp = namespace(one.buffer)
    with np.errstate(all="ignore"):
        return xp.log(_quantiles.abs_quantile(one, q)) - xp.log(_quantiles.abs_quantile(two, q))


def tail_ratio(stats: Stats, baseline: Stats, q: float = 0.999, *, threshold: float | None = None) -> TailRatio:
    """R_u = P(abs(x) >= u) / P_baseline(abs(x) >= u): exact counts on both sides, at a bin edge u.

    Sees what distances between distributions cannot: a thousandth of the tokens ten times larger hardly moves KS.
    Of a small R, compare ``log_ratio`` with ``log_se``.

    Args:
        stats, baseline: of S slices, or views of one slice each.
        q: u is the lower edge of the bin that holds the baseline's abs_quantile(q); where that is 0, every abs(x)
            above 0 is the tail.
        threshold: u instead, in the unit of x, above 0, raised to the next bin edge.

    Returns:
        NaN where a slice has no finite tokens, or neither has any in the tail; ratio inf where only the baseline
        has none.

    Raises:
        ValueError: q outside [0, 1], a threshold not above 0, or states that cannot be compared.
    """
    one, two = pair_of(stats, baseline)
    cells, base = abs_cells(one), abs_cells(two)
    xp = namespace(base.counts)
    through, base_through = xp.cumsum(cells.counts, -1), xp.cumsum(base.counts, -1)
    n, base_n = through[:, -1], base_through[:, -1]
    if threshold is None:
        (level,), _ = probabilities(float(q))
        rank = xp.clip(xp.ceil(level * as_floats(base_n)), 1.0, None)
        cell = (base_through < rank[:, None]).sum(-1)
    else:
        (bound,), _ = as_list("threshold", float(threshold))
        if not 0.0 < bound < math.inf:
            raise ValueError(f"threshold must be positive and finite, got {threshold}")
        cell = xp.zeros_like(base_n) + int(np.searchsorted(base.edges, bound, side="left"))
    cell = xp.clip(cell, 1, base.counts.shape[-1] - 1)[:, None]
    count = n - take(through, cell - 1)[:, 0]
    base_count = base_n - take(base_through, cell - 1)[:, 0]
    with np.errstate(all="ignore"):
        hits, base_hits = as_floats(count), as_floats(base_count)
        ratio = (hits / n) / (base_hits / base_n)
        log_se = xp.sqrt(1.0 / hits + 1.0 / base_hits)
        log_se = xp.where((count > 0) & (base_count > 0), log_se, float("nan"))
        edge = base.edges_on_device[cell[:, 0]]
        return TailRatio(ratio, xp.log(ratio), log_se, edge, count, base_count)


def wasserstein1(stats: Stats, baseline: Stats) -> Bounded:
    """Earth mover's distance, the mean distance that mass has to move: integral of abs(F - G), in the unit of x.

    Computed as the integral of abs(Q_F(u) - Q_G(u)) over u, with tokens spread evenly inside their bin and the two
    extreme tokens of each side at their exact values, so that it is finite whatever lies outside the window.

    Returns:
        (S,) each: estimate and certified bounds; NaN where a slice has no finite tokens. The bounds are a bin wide,
        2^-mantissa_bits of the mean of abs(x): the estimate is far closer, because both sides use the same bins.

    Raises:
        ValueError: states that cannot be compared.
    """
    one, two = pair_of(stats, baseline)
    xp = namespace(one.buffer)
    with np.errstate(all="ignore"):
        f, g = _Ranges.of(signed_cells(one)), _Ranges.of(signed_cells(two))
        # every u at which one of the two quantile functions enters its next range
        both = xp.concatenate((f.through, g.through), -1)
        order = both.argsort(-1, kind="stable") if xp is np else both.argsort(dim=-1, stable=True)
        u = take(both, order)
        from_f = order < f.through.shape[-1]
        passed_f, passed_g = xp.cumsum(from_f, -1) - from_f * 1, xp.cumsum(~from_f, -1) - ~from_f * 1
        before = xp.concatenate((xp.zeros_like(u[:, :1]), u[:, :-1]), -1)
        width = u - before
        f_lo, f_hi, f_from, f_to = f.between(passed_f, before, u)
        g_lo, g_hi, g_from, g_to = g.between(passed_g, before, u)
        estimate = (width * _mean_abs_linear(f_from - g_from, f_to - g_to)).sum(-1)
        least = xp.clip(xp.maximum(f_lo - g_hi, g_lo - f_hi), 0.0, None)
        most = xp.maximum(f_hi - g_lo, g_hi - f_lo)
        result = Bounded(estimate, (width * least).sum(-1), (width * most).sum(-1))
        some = (n_finite(one) > 0) & (n_finite(two) > 0)
        return Bounded(*(xp.where(some, value, float("nan")) for value in result))


class _Ranges(NamedTuple):
    """A distribution as ascending ranges of x that hold known shares of its tokens; (S, R) each."""

    through: Array  # share of tokens up to the end of the range
    lo: Array
    hi: Array

    @classmethod
    def of(cls, cells: Cells) -> _Ranges:
        """The cells, less the smallest and the largest token, which are points of their own."""
        xp = namespace(cells.counts)
        cumulative = xp.cumsum(cells.counts, -1)
        n = cumulative[:, -1:]
        rank = xp.clip(cumulative, xp.minimum(n, xp.ones_like(n)), xp.clip(n - 1, 1, None))
        rank = xp.concatenate((xp.minimum(n, xp.ones_like(n)), rank, n), -1)
        edges = cells.edges_on_device
        lo = xp.clip(edges[:-1] + xp.zeros_like(cells.lowest), cells.lowest, cells.highest)
        hi = xp.clip(edges[1:] + xp.zeros_like(cells.lowest), cells.lowest, cells.highest)
        lo = xp.concatenate((cells.lowest, lo, cells.highest), -1)
        hi = xp.concatenate((cells.lowest, hi, cells.highest), -1)
        return cls(as_floats(rank) / n, lo, hi)

    def between(self, index: Array, start: Array, end: Array) -> tuple[Array, Array, Array, Array]:
        """Bounds of the ranges, and the interpolated quantile function at shares start and end inside them."""
        xp = namespace(index)
        index = xp.clip(index, 0, self.through.shape[-1] - 1)
        lo, hi, last = take(self.lo, index), take(self.hi, index), take(self.through, index)
        first = xp.where(index > 0, take(self.through, xp.clip(index - 1, 0, None)), 0.0)
        slope = (hi - lo) / xp.where(last > first, last - first, float("inf"))
        return lo, hi, lo + slope * (start - first), lo + slope * (end - first)


def _mean_abs_linear(start: Array, end: Array) -> Array:
    """Mean of abs over an interval along which a value goes linearly from start to end."""
    xp = namespace(start)
    total = xp.abs(start) + xp.abs(end)
    crossing = (start**2 + end**2) / xp.where(total > 0, 2.0 * total, 1.0)
    return xp.where(start * end < 0, crossing, total / 2.0)


def kolmogorov_smirnov(stats: Stats, baseline: Stats) -> Bounded:
    """sup abs(F - G), from 0 to 1.

    The estimate is the largest gap at a bin edge, which is also the lower bound; inside a bin that holds tokens of
    both sides the gap can be larger, by no more than the upper bound says. Nearly blind to tails: see
    :func:`tail_ratio`. Read it next to :func:`ks_noise_floor`.

    Returns:
        (S,) each; NaN where a slice has no finite tokens.

    Raises:
        ValueError: states that cannot be compared.
    """
    one, two = pair_of(stats, baseline)
    xp = namespace(one.buffer)
    with np.errstate(all="ignore"):
        f_counts, g_counts = signed_cells(one).counts, signed_cells(two).counts
        f, g = _through(f_counts), _through(g_counts)
        f_before, g_before = f - _shares(f_counts), g - _shares(g_counts)
        gap = xp.abs(f - g).max(-1) if xp is np else xp.abs(f - g).amax(-1)
        inside = xp.maximum(f - g_before, g - f_before)
        both = (f_counts > 0) & (g_counts > 0)
        both[:, one.layout.bins_per_sign] = False  # the zeros are one point, not a bin
        inside = xp.where(both, inside, 0.0)
        most = inside.max(-1) if xp is np else inside.amax(-1)
        return Bounded(gap, gap, xp.maximum(gap, most))


def ks_noise_floor(stats: Stats, baseline: Stats) -> Array:
    """1.358 sqrt(1/n + 1/m), (S,); inf where a slice has no finite tokens.

    The true distance between two samples of one distribution stays below it in 95 of 100 cases, for many
    independent tokens.

    Source:
        Smirnov (1948); Stephens (1970).
    """
    one, two = pair_of(stats, baseline)
    xp = namespace(one.buffer)
    n, m = as_floats(n_finite(one)), as_floats(n_finite(two))
    with np.errstate(all="ignore"):
        return KS_FLOOR * xp.sqrt(1.0 / n + 1.0 / m)


def jensen_shannon(stats: Stats, baseline: Stats, *, mantissa_bits: int | None = 2, corrected: bool = True) -> Array:
    """Jensen-Shannon divergence of the two histograms, nats, (S,): from 0 to log 2.

    Two samples of one distribution already differ: the plug-in value is too large by about
    (bins - 1) / 8 (1/n + 1/m). ``corrected`` subtracts what would be expected if the tokens of each bin had been dealt
    to the two sides at random, so that values near 0 can be negative and average to 0. Coarse bins keep the noise
    that remains small.

    Args:
        stats, baseline: of S slices, or views of one slice each.
        mantissa_bits: 2^mantissa_bits bins an octave and sign, which nest in the layout's exactly; None, or more
            than the layout has, takes the layout's.
        corrected: subtract the expectation under equal distributions, given the tokens in each bin.

    Returns:
        NaN where a slice has no finite tokens.

    Raises:
        ValueError: mantissa_bits below 0, or states that cannot be compared.

    Source:
        Lin (1991), Divergence measures based on the Shannon entropy.
    """
    one, two = pair_of(stats, baseline)
    if mantissa_bits is not None and mantissa_bits < 0:
        raise ValueError(f"mantissa_bits must be at least 0, got {mantissa_bits}")
    merged = 0 if mantissa_bits is None else max(one.layout.mantissa_bits - mantissa_bits, 0)
    with np.errstate(all="ignore"):
        f_counts, g_counts = _coarse(one, merged), _coarse(two, merged)
        p, q = _shares(f_counts), _shares(g_counts)
        m = (p + q) / 2.0
        divergence = (_plogp(p, m) + _plogp(q, m)).sum(-1) / 2.0
        if not corrected:
            return divergence
        return divergence - _chance(f_counts + g_counts, f_counts.sum(-1), g_counts.sum(-1))


def _chance(together: Array, n: Array, m: Array) -> Array:
    """Expected plug-in divergence (S,) if the ``together`` tokens (S, B) of each bin were dealt at random.

    Exact for bins of few tokens; from _DEALT on the excess over (1/n + 1/m) / 8, the limit of full bins, falls as
    one over the tokens. One bin less counts, because the dealt tokens must add up to n.
    """
    xp = namespace(together)
    n, m = as_floats(n)[:, None], as_floats(m)[:, None]
    k, f, ways = (on_device_of(together, column) for column in _DEALS)
    share = n / (n + m)
    p, q = f / n, xp.clip(k - f, 0.0, None) / m
    middle = (p + q) / 2.0
    chance = ways * share**f * (1.0 - share) ** xp.clip(k - f, 0.0, None)
    dealt = (chance * (_plogp(p, middle) + _plogp(q, middle)) / 2.0).reshape(-1, _DEALT + 1, _DEALT + 1).sum(-1)
    full = (1.0 / n + 1.0 / m) / 8.0
    few = xp.asarray(xp.clip(together, 0, _DEALT), dtype=xp.int64)
    fade = as_floats(few) / xp.where(together > 0, as_floats(together), 1.0)
    expected = xp.where(together > 0, full + (take(dealt, few) - full) * fade, 0.0)
    return expected.sum(-1) - full[:, 0]


def _coarse(state: State, merged: int) -> Array:
    """(S, cells) counts: negative bins, zeros, positive bins, with 2^merged neighbours together."""
    xp = namespace(state.buffer)
    slices, bins = state.histogram.shape
    histogram = state.histogram.reshape(slices, bins >> merged, 1 << merged).sum(-1)
    half = histogram.shape[-1] // 2
    return xp.concatenate((histogram[:, :half], state.count("n_zero")[:, None], histogram[:, half:]), -1)


def _plogp(p: Array, m: Array) -> Array:
    xp = namespace(p)
    return p * xp.log(xp.where(p > 0, p / xp.where(m > 0, m, 1.0), 1.0))


def _shares(counts: Array) -> Array:
    return as_floats(counts) / counts.sum(-1)[:, None]


def _through(counts: Array) -> Array:
    return as_floats(namespace(counts).cumsum(counts, -1)) / counts.sum(-1)[:, None]


def pair_of(stats: Stats, baseline: Stats) -> tuple[State, State]:
    """The two states, which fit together."""
    one, two = state_of(stats), state_of(baseline)
    single = len(one.names) == len(two.names) == 1
    if one.names != two.names and not single:
        raise ValueError(
            f"only the same slices can be compared, got {one.names} and {two.names}: "
            'take one of each, such as stats["post_tool"]'
        )
    if one.layout != two.layout:
        raise ValueError(f"states with different layouts cannot be compared: {one.layout} and {two.layout}")
    kinds = [str(state.buffer.device) if namespace(state.buffer) is not np else "numpy" for state in (one, two)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"states on {kinds[0]} and {kinds[1]} cannot be compared: move one with .to(device)")
    return one, two
