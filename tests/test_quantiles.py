"""Quantiles, certified bounds, CDF, tail mass and histogram against a sort of the tokens."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats import quantiles, reference
from pyrlstats.layout import Layout

LEVELS = (0.0, 1e-6, 1e-4, 0.001, 0.01, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9, 0.99, 0.999, 0.9999, 0.999999, 1.0)


def view_of(x: Any, layout: Layout | None = None, kind: str = "numpy") -> Any:
    x = np.asarray(x, np.float32)
    arrays = (x, np.zeros_like(x))
    if kind == "torch":
        arrays = tuple(torch.from_numpy(array) for array in arrays)
    return pyrlstats.slice_stats(*arrays, layout=layout or Layout())["all"]


def finite(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float32).astype(np.float64)
    return x[np.isfinite(x)]


DATA: dict[str, Any] = {
    "normal": lambda rng: rng.normal(0, 1, 5001),
    "mismatch": lambda rng: rng.standard_t(2, 5001) * 1e-4,
    "decades": lambda rng: rng.choice([-1, 1], 5001) * 10.0 ** rng.uniform(-10, 4, 5001),
    "half zeros": lambda rng: np.where(
        rng.random(5001) < 0.5, rng.choice([0.0, -0.0], 5001), rng.normal(0, 1e-2, 5001)
    ),
    "zeros": lambda rng: np.zeros(100),
    "zeros and positive": lambda rng: np.maximum(rng.normal(0, 1, 999), 0),
    "zeros and negative": lambda rng: np.minimum(rng.normal(0, 1, 999), 0),
    "positive": lambda rng: np.abs(rng.normal(0, 1, 999)),
    "negative": lambda rng: -np.abs(rng.normal(0, 1, 999)),
    "equal": lambda rng: np.full(77, 0.3),
    "bfloat16 steps": lambda rng: rng.integers(-20, 21, 5001) * 2.0**-7,
    "below the window": lambda rng: rng.normal(0, 1e-9, 999),
    "above the window": lambda rng: rng.normal(0, 1e4, 999),
    "subnormal": lambda rng: rng.integers(-50, 51, 999) * 2.0**-149,
    "float32 limits": lambda rng: rng.choice([3.4028235e38, -3.4028235e38, 1.0], 99),
    "one token": lambda rng: rng.normal(0, 1, 1),
    "two tokens": lambda rng: rng.normal(0, 1, 2),
    "three tokens, one of them bad": lambda rng: [1.5, math.nan, -2.5],
    "bad tokens": lambda rng: np.append(rng.normal(0, 0.1, 900), [math.nan] * 50 + [math.inf] * 30 + [-math.inf] * 20),
    "two clusters": lambda rng: np.append(rng.normal(-1, 1e-4, 500), rng.normal(2, 1e-4, 500)),
}


@pytest.mark.parametrize("layout", [Layout(), Layout(0), Layout(8), Layout(5, -24, 40)], ids=str)
@pytest.mark.parametrize("data", DATA)
def test_bounds_always_contain_the_true_quantile(data, layout, rng):
    """The inverted CDF of a sort lies inside the certified bounds, and so does the interpolated value."""
    x = DATA[data](rng)
    values = finite(x)
    n = len(values)
    levels = [
        *LEVELS,
        *rng.random(30),
        *(k / n for k in range(min(n, 40) + 1)),
        *((k + 0.5) / n for k in range(min(n, 9))),
    ]
    for signed in (True, False):
        tokens = np.sort(values if signed else np.abs(values))
        view = view_of(x, layout)
        truth = np.array([reference.quantile(tokens, q) for q in levels])
        got = view.quantile(levels) if signed else view.abs_quantile(levels)
        lo, hi = view.quantile_bounds(levels) if signed else view.abs_quantile_bounds(levels)
        assert ((lo <= truth) & (truth <= hi)).all()
        assert ((lo <= got) & (got <= hi)).all()
        assert lo.min() >= (tokens[0] if signed else 0.0)
        assert hi.max() <= tokens[-1]
        # inside the window a bin is narrow in proportion, below it narrow in absolute terms
        inside = (np.abs(truth) >= 2.0**layout.min_exp * (1 + 2.0**-layout.mantissa_bits)) & (
            np.abs(truth) < 2.0**layout.max_exp * (1 - 2.0 ** -(layout.mantissa_bits + 1))
        )
        width = hi - lo
        small = np.minimum(np.abs(lo), np.abs(hi))
        assert (width[inside] <= 2.0**-layout.mantissa_bits * small[inside] * (1 + 1e-12) + 0.0).all()
        below = np.abs(truth) < 2.0**layout.min_exp
        assert (width[below] <= 2.0**layout.min_exp * (1 + 2.0**-layout.mantissa_bits)).all()
        assert ((lo[truth == 0] == 0) & (hi[truth == 0] == 0)).all()
        assert (got[truth == 0] == 0).all()


def test_reference_quantile_is_numpys_inverted_cdf(rng):
    for n in (1, 2, 3, 10, 101, 4096):
        values = rng.normal(0, 1, n)
        for q in (*LEVELS, *rng.random(20), 0.5 / n):
            assert reference.quantile(values, q) == np.quantile(values, q, method="inverted_cdf")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_small_slices_are_known_token_by_token(kind):
    """rank max(1, ceil(q n)): four tokens in bins of their own."""
    view = view_of([-1.0, 0.0, 0.5, 2.0], kind=kind)
    for q, value in (
        (0.0, -1.0),
        (0.1, -1.0),
        (0.25, -1.0),
        (0.2501, 0.0),
        (0.5, 0.0),
        (0.6, 0.5),
        (0.75, 0.5),
        (0.76, 2.0),
    ):
        lo, hi = view.quantile_bounds(q)
        assert float(lo) <= value <= float(hi), q
        assert float(view.quantile(q)) == pytest.approx(value, rel=2.0**-5)
    assert float(view.quantile(1.0)) == 2.0
    for q, value in (
        (0.0, 0.0),
        (0.25, 0.0),
        (0.26, 0.5),
        (0.5, 0.5),
        (0.51, 1.0),
        (0.75, 1.0),
        (0.76, 2.0),
        (1.0, 2.0),
    ):
        assert float(view.abs_quantile(q)) == pytest.approx(value, rel=2.0**-5)


@pytest.mark.parametrize("data", DATA)
def test_exact_at_0_and_1(data, rng):
    x = DATA[data](rng)
    values = finite(x)
    for kind in ("numpy", "torch"):
        view = view_of(x, kind=kind)
        assert float(view.quantile(0.0)) == values.min() == float(view.log_ratio_min)
        assert float(view.quantile(1.0)) == values.max() == float(view.log_ratio_max)
        assert float(view.abs_quantile(1.0)) == np.abs(values).max()
        assert [float(bound) for bound in view.quantile_bounds(0.0)] == [values.min()] * 2
        assert [float(bound) for bound in view.quantile_bounds(1.0)] == [values.max()] * 2
        assert [float(bound) for bound in view.abs_quantile_bounds(1.0)] == [np.abs(values).max()] * 2


@pytest.mark.parametrize("data", DATA)
def test_monotone_in_q(data, rng):
    levels = np.sort(np.concatenate((rng.random(300), LEVELS))).tolist()
    view = view_of(DATA[data](rng))
    for values in (view.quantile(levels), view.abs_quantile(levels), *view.quantile_bounds(levels)):
        assert (np.diff(values) >= 0).all()


def test_shape_follows_q():
    for kind in ("numpy", "torch"):
        view = view_of([1.0, 2.0], kind=kind)
        for method in (view.quantile, view.abs_quantile, view.cdf, view.tail_mass):
            assert tuple(method(0.5).shape) == ()
            assert tuple(method([0.5]).shape) == (1,)
            assert tuple(method((0.1, 0.5, 0.9)).shape) == (3,)
            assert tuple(method(np.array([0.1, 0.5])).shape) == (2,)
            assert tuple(method([]).shape) == (0,)
            assert float(method([0.25, 0.5])[1]) == float(method(0.5))
        for method in (view.quantile_bounds, view.abs_quantile_bounds):
            assert [tuple(bound.shape) for bound in method(0.5)] == [(), ()]
            assert [tuple(bound.shape) for bound in method([0.5, 1])] == [(2,), (2,)]


@pytest.mark.parametrize("q", [-1e-9, 1.0000001, 2, math.nan, math.inf, [0.5, -0.1], np.array([1.5])])
def test_q_outside_0_to_1_is_refused(q):
    view = view_of([1.0])
    for method in (view.quantile, view.abs_quantile, view.quantile_bounds, view.abs_quantile_bounds):
        with pytest.raises(ValueError, match=r"q must lie in \[0, 1\], got"):
            method(q)


@pytest.mark.parametrize("q", ["0.5", None, [None], [[0.5]]])
def test_q_that_is_no_number_is_refused(q):
    with pytest.raises((TypeError, ValueError)):
        view_of([1.0]).quantile(q)


@pytest.mark.parametrize("x", [[], [math.nan, math.inf, -math.inf]])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_slice_without_finite_tokens_has_nan(x, kind):
    view = view_of(x, kind=kind)
    for values in (
        *(view.quantile([0, 0.5, 1]), view.abs_quantile([0, 0.5, 1])),
        *(view.cdf([-1, 0, 1]), view.tail_mass([0, 1])),
        *view.quantile_bounds([0, 0.5, 1]),
        *view.abs_quantile_bounds([0, 0.5, 1]),
    ):
        assert np.isnan(np.asarray(values)).all()
    assert int(view.histogram().counts.sum()) == 0


def test_numpy_and_torch_agree_to_the_bit(rng):
    for data in DATA.values():
        x = data(rng)
        left, right = view_of(x), view_of(x, kind="torch")
        assert np.array_equal(left.quantile(LEVELS), right.quantile(LEVELS).numpy())
        assert np.array_equal(left.abs_quantile(LEVELS), right.abs_quantile(LEVELS).numpy())
        for mine, theirs in zip(left.quantile_bounds(LEVELS), right.quantile_bounds(LEVELS), strict=True):
            assert np.array_equal(mine, theirs.numpy())
        points = rng.normal(0, 1, 50).tolist()
        np.testing.assert_allclose(left.cdf(points), right.cdf(points).numpy(), rtol=1e-13)


def test_interpolation_error_on_a_gaussian():
    """A million tokens at the normal quantiles: within 0.1 % from p1 to p99.9, under their sampling error."""
    n = 1_000_000
    grid = (np.arange(n) + 0.5) / n
    x = (math.sqrt(2) * torch.erfinv(torch.from_numpy(2 * grid - 1))).numpy() * 1e-3
    view = view_of(x)
    for q in (0.001, 0.01, 0.25, 0.75, 0.9, 0.99, 0.999):
        truth = NormalDist(0, 1e-3).inv_cdf(q)
        assert float(view.quantile(q)) == pytest.approx(truth, rel=1e-3), q
        assert float(view.abs_quantile(q)) == pytest.approx(NormalDist(0, 1e-3).inv_cdf((1 + q) / 2), rel=1e-3), q
    assert float(view.abs_quantile(0.9999)) == pytest.approx(NormalDist(0, 1e-3).inv_cdf(0.99995), rel=5e-3)
    finer = view_of(x, Layout(8))
    assert float(finer.abs_quantile(0.999)) == pytest.approx(NormalDist(0, 1e-3).inv_cdf(0.9995), rel=2e-4)


def test_bounds_hold_on_bfloat16_steps_where_interpolation_invents_values():
    x = torch.tensor([0.0, 2.0**-7, 2.0**-6, 3 * 2.0**-7]).repeat_interleave(1000)
    view = pyrlstats.slice_stats(x.bfloat16(), torch.zeros(4000).bfloat16())["all"]
    for q, truth in ((0.2, 0.0), (0.4, 2.0**-7), (0.6, 2.0**-6), (0.9, 3 * 2.0**-7)):
        lo, hi = view.quantile_bounds(q)
        assert float(lo) <= truth <= float(hi)
        assert float(hi - lo) <= truth * 2.0**-5


# ---- cdf, tail mass, histogram


@pytest.mark.parametrize("data", DATA)
def test_cdf_and_tail_mass_are_exact_where_promised(data, rng):
    """At 0, below the minimum and from the maximum on."""
    x = DATA[data](rng)
    values = finite(x)
    low, high, largest = values.min(), values.max(), np.abs(values).max()
    for kind in ("numpy", "torch"):
        view = view_of(x, kind=kind)
        for point in (0.0, -0.0, np.nextafter(low, -math.inf), high, high + abs(high), -math.inf, math.inf):
            assert float(view.cdf(point)) == np.count_nonzero(values <= point) / len(values), point
        for point in (0.0, largest, 2 * largest, math.inf, -1.0):
            assert float(view.tail_mass(point)) == pytest.approx(
                np.count_nonzero(np.abs(values) > point) / len(values), abs=1e-15
            ), point


@pytest.mark.parametrize("data", DATA)
def test_cdf_and_tail_mass_err_by_less_than_a_bin(data, rng):
    x = DATA[data](rng)
    values = finite(x)
    layout = Layout()
    edges = np.concatenate((-np.array(layout.abs_edges)[::-1], np.array(layout.abs_edges)))
    view = view_of(x)
    points = [*rng.choice(values, 50), *rng.normal(0, np.abs(values).max() + 1e-30, 50), 1e-3, -1e-3]
    mass, tail = view.cdf(points), view.tail_mass(points)
    assert ((mass >= 0) & (mass <= 1) & (tail >= 0) & (tail <= 1)).all()
    for point, got, got_tail in zip(points, mass, tail, strict=True):
        cell = np.searchsorted(edges, point, side="right")
        below, above = edges[cell - 1], edges[cell]
        lowest, highest = np.count_nonzero(values < below), np.count_nonzero(values <= above)
        assert lowest / len(values) - 1e-15 <= got <= highest / len(values) + 1e-15
        if point > 0:
            lowest, highest = np.count_nonzero(np.abs(values) > above), np.count_nonzero(np.abs(values) >= below)
            assert lowest / len(values) - 1e-15 <= got_tail <= highest / len(values) + 1e-15


def test_cdf_at_bin_edges_counts_the_side_of_zero(rng):
    """At an edge e > 0 the share of x < e, at an edge e < 0 the share of x <= e: bins are closed towards 0."""
    layout = Layout(3, -8, 8)
    x = rng.normal(0, 1, 3000).astype(np.float32)
    edges = np.array(layout.abs_edges[1:-1])
    x[:200] = rng.choice(edges, 200)
    x[200:400] = -rng.choice(edges, 200)
    view = view_of(x, layout)
    inner = edges[(edges > 0.01) & (edges < np.abs(x).max() / 2)]
    got = view.cdf(inner.tolist())
    np.testing.assert_allclose(got, [np.count_nonzero(x < edge) / 3000 for edge in inner], rtol=0, atol=1e-15)
    got = view.cdf((-inner).tolist())
    np.testing.assert_allclose(got, [np.count_nonzero(x <= -edge) / 3000 for edge in inner], rtol=0, atol=1e-15)
    got = view.tail_mass(inner.tolist())
    np.testing.assert_allclose(got, [np.count_nonzero(np.abs(x) >= edge) / 3000 for edge in inner], rtol=0, atol=1e-15)


def test_cdf_is_monotone_and_inverts_quantiles(rng):
    for data in DATA.values():
        x = data(rng)
        view = view_of(x)
        scale = np.abs(finite(x)).max()
        points = np.sort(np.concatenate((rng.normal(0, scale + 1e-30, 200), rng.normal(0, 1e-3, 200), [0.0]))).tolist()
        assert (np.diff(view.cdf(points)) >= 0).all()
        assert (np.diff(view.tail_mass(points)) <= 0).all()
    view = view_of(rng.normal(0, 1, 20_000))
    for q in (0.01, 0.3, 0.7, 0.99):
        assert float(view.cdf(float(view.quantile(q)))) == pytest.approx(q, abs=2e-4)
        assert float(view.tail_mass(float(view.abs_quantile(q)))) == pytest.approx(1 - q, abs=2e-4)


def test_cdf_of_nan_is_refused():
    view = view_of([1.0])
    for method in (view.cdf, view.tail_mass):
        with pytest.raises(ValueError, match="x must not be NaN"):
            method(math.nan)


@pytest.mark.parametrize("layout", [Layout(), Layout(3, -8, 8)], ids=str)
def test_histogram_counts_what_numpy_counts_between_the_same_edges(layout, rng):
    x = np.concatenate((rng.normal(0, 1, 5000) * 10.0 ** rng.uniform(-9, 3, 5000), [0.0, -0.0, math.nan, math.inf]))
    x = x.astype(np.float32)
    counts, edges = view_of(x, layout).histogram()
    half = layout.bins_per_sign
    assert counts.shape == (2 * half + 1,)
    assert edges.shape == (2 * half + 2,)
    assert counts.dtype == np.int64
    assert edges[half] == edges[half + 1] == 0.0
    assert edges[0] == -math.inf
    assert edges[-1] == math.inf
    assert np.array_equal(edges, -edges[::-1])
    values = finite(x)
    positive, negative = values[values > 0], -values[values < 0]
    outer = np.minimum(edges[half + 1 :], 4e38)  # numpy.histogram wants finite edges
    assert np.array_equal(counts[half + 1 :], np.histogram(positive, outer)[0])
    assert np.array_equal(counts[:half][::-1], np.histogram(negative, outer)[0])
    assert counts[half] == 2
    assert counts.sum() == len(values)
    tensor = view_of(x, layout, "torch").histogram()
    assert np.array_equal(tensor.counts.numpy(), counts)
    assert np.array_equal(tensor.edges.numpy(), edges)


def test_functions_are_vectorised_over_slices(rng):
    x = rng.normal(0, 1, (3, 400)).astype(np.float32) * np.float32([[1e-4], [1.0], [30.0]])
    stats = pyrlstats.slice_stats(x, np.zeros_like(x), slice_ids=np.arange(3)[:, None], names=["a", "b", "c"])
    levels = [0.0, 0.1, 0.5, 0.999]
    table = quantiles.quantile(stats.state, levels)
    assert table.shape == (3, 4)
    for index, name in enumerate("abc"):
        assert np.array_equal(table[index], stats[name].quantile(levels))
        assert np.array_equal(table[index], view_of(x[index]).quantile(levels))
