"""Comparisons of two states against the tokens they were made from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyrlstats
from pyrlstats.compare import (
    abs_log_quantile_shift,
    compare,
    jensen_shannon,
    kolmogorov_smirnov,
    ks_noise_floor,
    quantile_shift,
    tail_ratio,
    wasserstein1,
)
from pyrlstats.intervals import abs_quantile_interval, quantile_interval
from pyrlstats.state import State
from pyrlstats.values import value_stats
from pyrlstats.windows import DecayedStats

KINDS = ("numpy", "torch")
Samples = np.ndarray


def stats_of(x: Samples, kind: str = "numpy", **options: Any) -> pyrlstats.SliceStats:
    """Statistics of log-ratios x: (n,) is one slice, (S, n) are S slices s0, s1, ..."""
    rows = np.atleast_2d(np.array(x, np.float32))
    zeros = np.zeros_like(rows[0])
    singles = []
    for row in rows:
        logp, old = (row, zeros) if kind == "numpy" else (torch.from_numpy(row), torch.from_numpy(zeros))
        singles.append(pyrlstats.slice_stats(logp, old, {"s0": old == 0}, **options).state)
    first = singles[0]
    names = [f"s{i}" for i in range(len(rows))]
    # one call for many slices costs some backends slices x tokens
    state = State.empty(names, first.layout, first.clip, None if kind == "numpy" else "cpu")
    for index, single in enumerate(singles):
        for field in ("counts", "histogram", "sums", "maxima"):
            getattr(state, field)[index] = getattr(single, field)[0]
    return pyrlstats.SliceStats(state)


# the definitions, from the tokens


def gap_and_area(x: Samples, y: Samples) -> tuple[float, float]:
    """sup abs(F - G) and the integral of abs(F - G) of two samples."""
    x, y = np.sort(x.astype(np.float64)), np.sort(y.astype(np.float64))
    points = np.sort(np.concatenate([x, y]))
    f = np.searchsorted(x, points, side="right") / x.size
    g = np.searchsorted(y, points, side="right") / y.size
    return float(np.abs(f - g).max()), float(np.sum(np.abs(f - g)[:-1] * np.diff(points)))


def cases(rng: np.random.Generator, n: int) -> dict[str, tuple[Samples, Samples]]:
    """Pairs (statistics, baseline): the same distribution, wider by 2 %, and a thousandth of the tokens ten times."""
    noise = [(1e-2 * rng.standard_normal(n)).astype(np.float32) for _ in range(6)]
    noise[4][: n // 1000] *= 10
    noise[2] *= np.float32(1.02)
    return {"same": (noise[0], noise[1]), "wider": (noise[2], noise[3]), "tail": (noise[4], noise[5])}


@pytest.mark.parametrize("case", ["same", "wider", "tail"])
def test_distances_are_close_to_those_of_the_tokens(case: str, rng: np.random.Generator) -> None:
    x, y = cases(rng, 400_000)[case]
    one, two = stats_of(x), stats_of(y)
    gap, area = gap_and_area(x, y)
    ks, w1 = kolmogorov_smirnov(one, two), wasserstein1(one, two)
    largest_bin = max((stats.state.histogram.max() / x.size) for stats in (one, two))
    assert ks.lo[0] <= gap <= ks.hi[0]
    assert gap - largest_bin <= ks.estimate[0] <= gap
    assert w1.lo[0] <= area <= w1.hi[0]
    # 1/1000 of mean abs(x), of which a bin is 1/32
    assert w1.estimate[0] == pytest.approx(area, abs=1e-3 * float(np.abs(x).mean()))


values = st.one_of(
    st.sampled_from([0.0, 0.0, 0.25, -0.25, 1e-9, -3e-8, 300.0, -7000.0, 5e3]), st.floats(-2, 2, width=32)
)
samples = st.lists(values, min_size=1, max_size=30)


@pytest.mark.parametrize("kind", KINDS)
@given(x=samples, y=samples)
def test_bounds_hold_for_any_tokens(kind: str, x: list[float], y: list[float]) -> None:
    first, second = np.array(x, np.float32), np.array(y, np.float32)
    one, two = stats_of(first, kind), stats_of(second, kind)
    gap, area = gap_and_area(first, second)
    for true, bounded in ((gap, kolmogorov_smirnov(one, two)), (area, wasserstein1(one, two))):
        estimate, lo, hi = (float(value[0]) for value in bounded)
        slack = 1e-9 * max(1.0, hi)
        assert lo - slack <= true <= hi + slack
        assert lo - slack <= estimate <= hi + slack
    q = [0.0, 0.1, 0.5, 0.9, 1.0]
    shift = np.quantile(first.astype(np.float64), q, method="inverted_cdf")
    shift -= np.quantile(second.astype(np.float64), q, method="inverted_cdf")
    bounds = quantile_shift(one, two, q)
    assert (np.asarray(bounds.lo)[0] <= shift).all()
    assert (shift <= np.asarray(bounds.hi)[0]).all()
    ratio = tail_ratio(one, two, 0.9)
    threshold = float(ratio.threshold[0])
    beyond = [np.abs(sample) >= threshold if threshold > 0 else sample != 0 for sample in (first, second)]
    assert int(ratio.count[0]) == np.count_nonzero(beyond[0])
    assert int(ratio.baseline_count[0]) == np.count_nonzero(beyond[1])
    assert threshold <= np.quantile(np.abs(second), 0.9, method="inverted_cdf")


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_beyond_the_window_counts_with_its_exact_value(kind: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=1000).astype(np.float32) * np.float32(0.01)
    y = x.copy()
    y[0] = 5000.0
    _, area = gap_and_area(y, x)
    w1 = wasserstein1(stats_of(y, kind), stats_of(x, kind))
    assert float(w1.estimate[0]) == pytest.approx(area, rel=1e-5)
    assert area == pytest.approx(5.0, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_point_masses_are_exact(kind: str) -> None:
    point = stats_of(np.full(7, 0.3), kind)
    other = stats_of(np.full(5, -0.2), kind)
    zeros = stats_of(np.zeros(3), kind)
    assert float(wasserstein1(point, other).estimate[0]) == pytest.approx(0.5, rel=1e-6)
    assert float(wasserstein1(zeros, other).hi[0]) == pytest.approx(0.2, rel=1e-6)
    assert float(wasserstein1(point, point).hi[0]) == 0.0
    assert float(kolmogorov_smirnov(point, zeros).estimate[0]) == 1.0
    assert float(jensen_shannon(point, zeros, corrected=False)[0]) == pytest.approx(np.log(2.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0, 2, 5, None])
def test_jensen_shannon_is_that_of_the_coarse_counts(kind: str, bits: int | None, rng: np.random.Generator) -> None:
    x, y = rng.normal(size=4000), rng.normal(size=3000) * 1.5
    x[:100] = 0.0
    layout = pyrlstats.Layout() if bits is None else pyrlstats.Layout(mantissa_bits=bits)
    coarse = [stats_of(sample, layout=layout).values() for sample in (x, y)]
    p, q = (next(iter(views)).histogram().counts / n for views, n in zip(coarse, (4000, 3000), strict=True))
    m = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        want = (np.nansum(p * np.log(p / m)) + np.nansum(q * np.log(q / m))) / 2
    got = jensen_shannon(stats_of(x, kind), stats_of(y, kind), mantissa_bits=bits, corrected=False)
    assert float(got[0]) == pytest.approx(want, rel=1e-9)


def test_the_corrected_jensen_shannon_of_equal_distributions_averages_to_0(rng: np.random.Generator) -> None:
    one, two = stats_of(rng.normal(size=(150, 3000))), stats_of(rng.normal(size=(150, 2000)))
    plain, corrected = jensen_shannon(one, two, corrected=False), jensen_shannon(one, two)
    error = corrected.std() / np.sqrt(150)
    assert plain.mean() > 20 * error
    assert abs(corrected.mean()) < 0.1 * plain.mean() + 4 * error


def test_jensen_shannon_of_a_known_difference(rng: np.random.Generator) -> None:
    # of N(0, 1) and N(0, 1 + d): d^2 / 4 for small d
    one, two = stats_of(1.05 * rng.normal(size=(40, 20_000))), stats_of(rng.normal(size=(40, 20_000)))
    assert jensen_shannon(one, two).mean() == pytest.approx(0.05**2 / 4, rel=0.4)


def test_the_tail_ratio_sees_what_ks_does_not(rng: np.random.Generator) -> None:
    y = rng.normal(size=200_000).astype(np.float32)
    x = y.copy()
    x[:200] *= 10
    one, two = stats_of(x), stats_of(y)
    assert kolmogorov_smirnov(one, two).estimate[0] < ks_noise_floor(one, two)[0]
    ratio = tail_ratio(one, two)
    assert ratio.log_ratio[0] > 4 * ratio.log_se[0]
    exact = np.count_nonzero(np.abs(x) >= ratio.threshold[0]) / np.count_nonzero(np.abs(y) >= ratio.threshold[0])
    assert ratio.ratio[0] == pytest.approx(exact)
    assert ratio.log_se[0] == pytest.approx(np.sqrt(1 / ratio.count[0] + 1 / ratio.baseline_count[0]))


def test_tail_ratio_at_a_threshold_and_without_a_tail() -> None:
    x, y = np.array([0.1, 0.3, 1.0, 2.0]), np.array([0.1, 0.1, 0.1, 1.5])
    at = tail_ratio(stats_of(x), stats_of(y), threshold=0.49)
    assert (at.threshold[0], at.count[0], at.baseline_count[0], at.ratio[0]) == (0.4921875, 2, 1, 2.0)
    assert tail_ratio(stats_of(x), stats_of(y), threshold=0.5).threshold[0] == 0.5
    assert tail_ratio(stats_of(x), stats_of(y), threshold=1.7).ratio[0] == np.inf
    nobody = tail_ratio(stats_of(x), stats_of(y), threshold=3.0)
    assert np.isnan(nobody.ratio[0])
    assert np.isnan(nobody.log_se[0])


def test_a_baseline_of_zeros_makes_every_other_value_the_tail() -> None:
    ratio = tail_ratio(stats_of(np.array([0.0, 1e-9, 0.1])), stats_of(np.array([0.0, 0.0, 0.0, 0.0])))
    assert (ratio.threshold[0], ratio.count[0], ratio.baseline_count[0]) == (0.0, 2, 0)
    assert ratio.ratio[0] == np.inf


def test_abs_log_quantile_shift_is_the_growth_of_the_scale(rng: np.random.Generator) -> None:
    x = rng.normal(size=20_000)
    shift = abs_log_quantile_shift(stats_of(2.0 * x), stats_of(x), [0.1, 0.5, 0.99])
    np.testing.assert_allclose(shift, np.full((1, 3), np.log(2.0)), atol=1e-9)
    assert abs_log_quantile_shift(stats_of(x), stats_of(np.zeros(3)), 0.5)[0] == np.inf


# intervals


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_cover_as_often_as_they_say(kind: str, rng: np.random.Generator) -> None:
    slices, n = 500, 2_000
    x = rng.exponential(size=(slices, n))
    q = [0.02, 0.5, 0.95, 0.99]
    for stats, interval in ((stats_of(x, kind), quantile_interval), (stats_of(-x, kind), abs_quantile_interval)):
        estimate, lo, hi, reliable = (np.asarray(column) for column in interval(stats, q, confidence=0.9))
        assert estimate.shape == lo.shape == hi.shape == reliable.shape == (slices, 4)
        assert reliable.all()
        covered = ((lo <= -np.log1p(-np.array(q))) & (-np.log1p(-np.array(q)) <= hi)).mean(0)
        assert (covered > 0.9 - 4 * np.sqrt(0.09 / slices)).all()
        assert (covered < 0.995).all()
        assert ((lo <= estimate) & (estimate <= hi)).all()
        outer = interval(stats, q, confidence=0.9, certified=True)
        assert ((np.asarray(outer.lo) <= lo) & (hi <= np.asarray(outer.hi))).all()


@given(x=samples, q=st.floats(0, 1))
def test_intervals_hold_the_order_statistics_of_their_ranks(x: list[float], q: float) -> None:
    ordered = np.sort(np.array(x, np.float32))
    n = ordered.size
    _, lo, hi, reliable = quantile_interval(stats_of(ordered), q, certified=True)
    half = 1.959963984540054 * np.sqrt(n * q * (1 - q))
    low, high = (int(np.clip(r, 1, n)) for r in (np.floor(n * q - half), np.ceil(n * q + half) + 1))
    assert lo[0] <= ordered[low - 1]
    assert ordered[high - 1] <= hi[0]
    assert lo[0] >= ordered[0]
    assert hi[0] <= ordered[-1]
    assert bool(reliable[0]) == (min(n * q, n - n * q) >= 10)


def test_a_tail_of_too_few_tokens_is_flagged(rng: np.random.Generator) -> None:
    stats = stats_of(rng.normal(size=9_999))
    assert abs_quantile_interval(stats["s0"], [0.99, 0.999, 0.9999]).reliable.tolist() == [[True, False, False]]
    assert not quantile_interval(stats, 0.0005).reliable[0]


def test_confidence_must_be_a_probability() -> None:
    with pytest.raises(ValueError, match="0 < confidence < 1"):
        quantile_interval(stats_of(np.ones(3)), 0.5, confidence=95)


# what can be compared


def test_numpy_and_torch_agree_and_the_view_gives_its_row(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(3, 500)), rng.normal(size=(3, 400))
    numpy_one = compare(stats_of(x), stats_of(y))
    torch_one = compare(stats_of(x, "torch"), stats_of(y, "torch"))
    assert numpy_one.to_dict("d/") == pytest.approx(torch_one.to_dict("d/"), rel=1e-9, nan_ok=True)
    for index, name in enumerate(numpy_one):
        for one in (numpy_one, torch_one):
            view = one[name]
            assert float(view.wasserstein1().estimate) == float(wasserstein1(*one.pair).estimate[index])
            assert float(view.kolmogorov_smirnov().hi) == float(kolmogorov_smirnov(*one.pair).hi[index])
            assert float(view.ks_noise_floor()) == float(ks_noise_floor(*one.pair)[index])
            assert float(view.jensen_shannon()) == float(jensen_shannon(*one.pair)[index])
            assert float(view.tail_ratio(0.9).ratio) == float(tail_ratio(*one.pair, 0.9).ratio[index])
            assert view.quantile_shift([0.5, 0.9]).estimate.shape == (2,)
            assert float(view.abs_log_quantile_shift(0.9)) == float(abs_log_quantile_shift(*one.pair, 0.9)[index])


def test_two_slices_of_one_state(rng: np.random.Generator) -> None:
    stats = stats_of(np.stack([rng.normal(size=300), 3.0 * rng.normal(size=300)]))
    between = compare(stats["s1"], stats["s0"])
    assert list(between) == ["s1"]
    alone = compare(stats_of(np.zeros(1)), stats_of(np.zeros(1)))
    assert list(alone.to_dict()) == [key.replace("s1/", "s0/") for key in between.to_dict()]
    assert float(between["s1"].abs_log_quantile_shift(0.5)) > 0.5


def test_values_compare_too() -> None:
    now, then = value_stats(np.array([200.0, 900.0])), value_stats(np.array([100.0, 800.0]))
    assert float(compare(now, then)["all"].wasserstein1().estimate) == pytest.approx(100.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decayed_baseline(kind: str, rng: np.random.Generator) -> None:
    baseline = DecayedStats(0.5)
    steps = rng.normal(size=(8, 3000))
    for step in steps:
        baseline.push(stats_of(step, kind))
    change = compare(stats_of(2.0 * steps[-1], kind)["s0"], baseline["s0"])["s0"]
    assert float(change.abs_log_quantile_shift(0.9)) == pytest.approx(np.log(2.0), abs=0.1)
    assert float(change.wasserstein1().estimate) == pytest.approx(np.abs(steps[-1]).mean(), rel=0.15)
    assert 0.0 < float(change.jensen_shannon()) < np.log(2.0)


def decayed(stats: pyrlstats.SliceStats) -> DecayedStats:
    return DecayedStats(0.5).push(stats)


def test_a_comparison_is_equal_to_itself_only_and_hashable() -> None:
    stats = stats_of(np.ones(3))
    one, other = compare(stats, stats), compare(stats, stats)
    assert one == one
    assert one != other
    assert len({one, other}) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty_side", ["statistics", "baseline", "both"])
def test_an_empty_slice_gives_nan(kind: str, empty_side: str) -> None:
    some, none = stats_of(np.array([0.5, 0.1]), kind), stats_of(np.array([np.nan, np.inf]), kind)
    one, two = {"statistics": (none, some), "baseline": (some, none), "both": (none, none)}[empty_side]
    values_of = compare(one, two).to_dict()
    finite = {key for key, value in values_of.items() if np.isfinite(value)}
    assert finite <= {"s0/tail_threshold"}
    assert np.isnan(float(quantile_interval(none, 0.5).lo[0]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: compare(s, stats_of(np.ones((2, 3)))), ValueError, "only the same slices"),
        (lambda s: compare(s, stats_of(np.ones(3), layout=pyrlstats.Layout(4))), ValueError, "different layouts"),
        (lambda s: compare(s, stats_of(np.ones(3), "torch")), ValueError, "states on numpy and cpu"),
        (lambda s: quantile_interval(decayed(s)["s0"], 0.5), TypeError, "decayed statistics"),
        (lambda s: abs_quantile_interval(decayed(s)["s0"], 0.5), TypeError, "decayed statistics"),
        (lambda s: compare(s, np.ones(3)), TypeError, "got ndarray"),
        (lambda s: tail_ratio(s, s, 1.5), ValueError, r"q must lie in \[0, 1\]"),
        (lambda s: tail_ratio(s, s, threshold=0.0), ValueError, "threshold must be positive"),
        (lambda s: jensen_shannon(s, s, mantissa_bits=-1), ValueError, "mantissa_bits must be at least 0"),
        (lambda s: compare(s, s)["nobody"], KeyError, "no slice 'nobody'"),
    ],
)
def test_errors_say_what_cannot_be_compared(call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(stats_of(np.ones(3)))


def test_ranks_of_an_interval_cover_by_the_binomial_itself() -> None:
    """P(low <= B < high), B binomial: at least the confidence wherever the quantile is said to be reliable."""
    n = 1000
    # every token has a bin of its own, whose lower edge it is: certified bounds show the ranks
    stats = stats_of(np.arange(1.0, n + 1) / 8, layout=pyrlstats.Layout(mantissa_bits=10))
    log_choose = np.array([math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)])
    k = np.arange(n + 1)
    for confidence in (0.5, 0.8, 0.95, 0.999):
        for q in (0.001, 0.005, 0.01, 0.05, 0.2, 0.5, 0.7, 0.95, 0.99, 0.995, 0.999):
            _, lo, hi, reliable = quantile_interval(stats, q, confidence, certified=True)
            low, high = 8 * float(lo[0]), math.floor(8 * hi[0])
            assert low == int(low)
            probability = np.exp(log_choose + k * math.log(q) + (n - k) * math.log1p(-q))
            covered = probability[(k >= low) & (k < high)].sum()
            assert bool(reliable[0]) == (min(n * q, n - n * q) >= 10)
            if reliable[0]:
                assert confidence <= covered < confidence + (1 - confidence) * 0.8
