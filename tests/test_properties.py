"""Properties that must hold for any tokens, any masks and any way to split them."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyrlstats
from pyrlstats import reference
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import SCALARS
from pyrlstats.state import State

settings.register_profile("pyrlstats", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("pyrlstats")

SPECIAL = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    1e-45,
    -1e-45,
    3.4028235e38,
    -3.4028235e38,
    5000.0,
    -300.0,
]
tokens = st.one_of(
    st.floats(width=32),
    st.floats(-1.0, 1.0, width=32),
    st.floats(-(2.0**-13), 2.0**-13, width=32),
    st.sampled_from([float(np.float32(value)) for value in SPECIAL]),
)
log_ratios = arrays.arrays(np.float32, st.integers(0, 150), elements=tokens)
finite_log_ratios = arrays.arrays(
    np.float32, st.integers(1, 100), elements=st.floats(-1e4, 1e4, width=32) | st.floats(-0.125, 0.125, width=32)
)
layouts = st.sampled_from([Layout(), Layout(0), Layout(8, -8, 8), Layout(3, -64, 64)])
EMPTY = State.empty(["all"], Layout(), (0.2, 0.2))


def stats_of(x: np.ndarray, **options: Any) -> pyrlstats.SliceStats:
    return pyrlstats.slice_stats(x, np.zeros_like(x), **options)


def same_integers(left: State, right: State) -> bool:
    return (
        np.array_equal(left.counts, right.counts)
        and np.array_equal(left.histogram, right.histogram)
        and np.array_equal(left.maxima + 0.0, right.maxima + 0.0)
    )


def close(left: State, right: State, rel: float) -> bool:
    """Sums equal to ``rel`` of their magnitudes."""
    magnitudes = {"near_x": "abs_x", "far_x": "abs_x", "near_excess": "near_x2"}
    for name in pyrlstats.layout.SUMS:
        got, want = left.sum(name), right.sum(name)
        with np.errstate(invalid="ignore", over="ignore"):
            bound = rel * np.abs(right.sum(magnitudes.get(name, name))) + 1e-290
            if not ((got == want) | (np.abs(got - want) <= bound)).all():
                return False
    return True


@given(log_ratios, log_ratios, log_ratios)
def test_merge_is_associative_and_commutative(a, b, c):
    a, b, c = stats_of(a), stats_of(b), stats_of(c)
    left, right, other = (a + b) + c, a + (b + c), (c + a) + b
    for one in (right, other):
        assert same_integers(left.state, one.state)
        assert close(one.state, left.state, 1e-12)
    assert same_integers((a + b).state, (b + a).state)
    assert np.array_equal((a + b).state.sums, (b + a).state.sums)


@given(log_ratios, st.lists(st.integers(0, 150), max_size=6))
def test_shards_pool_to_the_whole(x, cuts):
    whole = stats_of(x).state
    shards = np.split(x, sorted(min(cut, len(x)) for cut in cuts))
    pooled = sum(stats_of(shard) for shard in shards).state
    assert same_integers(pooled, whole)
    assert close(pooled, whole, 1e-6)
    accumulator = pyrlstats.SliceAccumulator(["all"])
    for shard in shards:
        accumulator.update(shard, np.zeros_like(shard))
    assert same_integers(accumulator.compute().state, whole)
    assert close(accumulator.compute().state, whole, 1e-6)


@given(log_ratios, st.randoms(use_true_random=False))
def test_the_order_of_tokens_does_not_matter(x, random):
    order = list(range(len(x)))
    random.shuffle(order)
    here, there = stats_of(x), stats_of(x[order])
    assert same_integers(here.state, there.state)
    assert close(here.state, there.state, 1e-6)
    levels = [0.0, 0.1, 0.5, 0.9, 1.0]
    assert np.array_equal(here["all"].quantile(levels) + 0.0, there["all"].quantile(levels) + 0.0, equal_nan=True)


@given(log_ratios, layouts)
def test_every_token_is_counted_once(x, layout):
    state = stats_of(x, layout=layout).state
    counts = {name: int(state.count(name)[0]) for name in pyrlstats.layout.COUNTS}
    binned = int(state.histogram.sum())
    assert counts["n_tokens"] == len(x)
    assert counts["n_tokens"] == binned + counts["n_zero"] + counts["n_nan"] + counts["n_pos_inf"] + counts["n_neg_inf"]
    assert counts["n_nan"] == np.isnan(x).sum()
    assert counts["n_far"] == (np.isfinite(x) & (np.abs(x) >= 0.5)).sum()
    assert counts["clip_low"] + counts["clip_high"] <= binned


@given(log_ratios, layouts)
def test_negation_mirrors(x, layout):
    here, there = stats_of(x, layout=layout), stats_of(-x, layout=layout)
    assert np.array_equal(here.state.histogram[0], there.state.histogram[0][::-1])
    assert np.array_equal(here.state.maxima[0] + 0.0, there.state.maxima[0][::-1] + 0.0)
    for name in ("n_tokens", "n_nan", "n_zero", "n_far"):
        assert here.state.count(name)[0] == there.state.count(name)[0]
    assert here.state.count("n_pos_inf")[0] == there.state.count("n_neg_inf")[0]
    view, mirrored = here["all"], there["all"]
    if view.n_finite:
        assert np.array_equal(view.abs_quantile([0.2, 0.5, 1.0]), mirrored.abs_quantile([0.2, 0.5, 1.0]))
        assert float(view.kl_k1) == -float(mirrored.kl_k1)
        assert float(view.kl_k2) == float(mirrored.kl_k2)


@given(log_ratios, layouts, st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_bounds_contain_the_quantile_of_a_sort(x, layout, levels):
    view = stats_of(x, layout=layout)["all"]
    values = x[np.isfinite(x)].astype(np.float64)
    (lo, hi), (abs_lo, abs_hi) = view.quantile_bounds(levels), view.abs_quantile_bounds(levels)
    for index, q in enumerate(levels):
        if len(values) == 0:
            assert math.isnan(lo[index])
            assert math.isnan(hi[index])
            continue
        assert lo[index] <= reference.quantile(values, q) <= hi[index]
        assert abs_lo[index] <= reference.quantile(np.abs(values), q) <= abs_hi[index]
    ordered = view.quantile(sorted(levels))
    assert len(values) == 0 or (np.diff(ordered) >= 0).all()


@given(arrays.arrays(np.float32, st.integers(0, 100), elements=st.floats(width=32)))
def test_a_coarser_layout_is_the_finer_one_folded(x):
    fine, coarse = stats_of(x, layout=Layout(6)).state, stats_of(x, layout=Layout(5)).state
    assert np.array_equal(fine.histogram.reshape(1, -1, 2).sum(-1), coarse.histogram)
    assert np.array_equal(fine.counts, coarse.counts)
    assert np.array_equal(fine.sums, coarse.sums, equal_nan=True)


@given(st.data(), arrays.array_shapes(max_dims=3, max_side=9))
def test_shapes_masks_and_poison(data, shape):
    """Any shape, any masks: each slice is what its members alone give; what lies outside is never seen."""
    x = data.draw(arrays.arrays(np.float32, shape, elements=tokens))
    masks = {name: data.draw(arrays.arrays(np.bool_, shape)) for name in ("a", "b", "c")}
    base = data.draw(arrays.arrays(np.bool_, shape))
    poison = np.float32(data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e38])))
    stats = pyrlstats.slice_stats(x, np.zeros_like(x), masks, mask=base)
    outside = ~((masks["a"] | masks["b"] | masks["c"]) & base)
    poisoned = pyrlstats.slice_stats(
        np.where(outside, poison, x), np.where(outside, poison, np.float32(0)), masks, mask=base
    )
    assert np.array_equal(stats.state.buffer, poisoned.state.buffer)
    for index, mask in enumerate(masks.values()):
        alone = stats_of(x[mask & base]).state
        assert np.array_equal(stats.state.counts[index], alone.counts[0])
        assert np.array_equal(stats.state.histogram[index], alone.histogram[0])
        assert np.array_equal(stats.state.maxima[index] + 0.0, alone.maxima[0] + 0.0)


@given(st.data(), st.integers(1, 9), st.integers(0, 120))
def test_ids_are_disjoint_masks(data, slices, n):
    x = data.draw(arrays.arrays(np.float32, n, elements=tokens))
    ids = data.draw(arrays.arrays(np.int64, n, elements=st.integers(-2, slices + 1)))
    names = [f"s{index}" for index in range(slices)]
    by_id = stats_of(x, slice_ids=ids, names=names).state
    by_mask = stats_of(x, masks=[ids == index for index in range(slices)], names=names).state
    assert by_id.count("n_out_of_range").sum() == np.count_nonzero(ids >= slices)
    by_id.count("n_out_of_range")[...] = 0
    assert same_integers(by_id, by_mask)
    assert close(by_id, by_mask, 1e-6)


@given(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
def test_empty_masks(shape):
    """All masks empty: the state of no tokens, bit for bit; every statistic NaN."""
    x = np.full(shape, np.nan, np.float32)
    for options in (
        {"masks": np.zeros(shape, bool)},
        {"mask": np.zeros((), bool)},
        {"masks": {"all": np.zeros((), bool)}},
    ):
        stats = pyrlstats.slice_stats(x, x, **options)
        assert np.array_equal(stats.state.buffer, EMPTY.buffer)
        assert math.isnan(stats["all"].ess_fraction)


@given(finite_log_ratios)
def test_statistics_stay_in_their_ranges(x):
    view = stats_of(x)["all"]
    value = {name: float(getattr(view, name)) for name in SCALARS}
    n = len(x)
    assert not any(math.isnan(one) for one in value.values()), value
    assert 1.0 - 1e-6 <= value["ess"] <= n
    assert 0.0 <= value["chi2"] <= n - 1 + 1e-6 * n
    assert 1 / n * (1 - 1e-6) <= value["max_weight_ess_fraction"] <= 1 + 1e-6
    assert value["kl_k3"] >= 0.0
    assert value["kl_k2"] >= 0.0
    assert 0.0 <= value["log_ratio_std"] <= (value["log_ratio_max"] - value["log_ratio_min"]) / 2
    assert value["ratio_std"] >= 0.0
    for name in ("zero_fraction", "clip_fraction", "clip_fraction_low", "clip_fraction_high", "ess_fraction"):
        assert 0.0 <= value[name] <= 1.0


@given(finite_log_ratios)
def test_statistics_against_the_reference(x):
    got, truth = stats_of(x)["all"], reference.statistics(x)
    chi2 = truth["chi2"]
    for name in SCALARS:
        value, wanted = float(getattr(got, name)), truth[name]
        scale = {
            "log_ratio_mean": np.mean(np.abs(x.astype(np.float64))),
            "kl_k1": np.mean(np.abs(x.astype(np.float64))),
        }
        bound = 1e-6 * max(abs(wanted), scale.get(name, 0.0))
        if name in ("chi2", "renyi2"):
            bound = 1e-6 * (1 + chi2)
        elif name == "ratio_std":
            bound = 2e-3 * truth["ratio_mean"] * (1 + math.sqrt(chi2))  # the root of an error of 1e-6 in chi2
        elif name == "log_ratio_std":
            bound = 2e-6 * math.sqrt(np.mean(x.astype(np.float64) ** 2))  # the root of 1e-12 of the mean square
        assert value == wanted or abs(value - wanted) <= bound, (name, value, wanted)


@given(st.floats(width=32))
def test_one_token(value):
    view = stats_of(np.float32([value]))["all"]
    assert int(view.n_tokens) == 1
    if not math.isfinite(value):
        assert int(view.n_finite) == 0
        assert math.isnan(view.quantile(0.5))
        return
    assert float(view.log_ratio_min) == float(view.log_ratio_max) == float(view.quantile(0.5)) == value
    assert [float(bound) for bound in view.quantile_bounds(0.3)] == [value, value]
    assert float(view.abs_quantile(1.0)) == abs(value)
    assert float(view.ess) == 1.0
    assert float(view.chi2) == float(view.log_ratio_std) == float(view.ratio_std) == 0.0
    assert float(view.cdf(value)) == 1.0


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 200))
def test_equal_tokens(value, n):
    view = stats_of(np.full(n, value, np.float32))["all"]
    assert float(view.chi2) == float(view.log_ratio_std) == float(view.ratio_std) == 0.0
    assert float(view.ess_fraction) == 1.0
    assert np.array_equal(view.quantile([0.0, 0.4, 1.0]) + 0.0, np.full(3, np.float32(value)) + 0.0)
    assert float(view.zero_fraction) == float(value == 0)


@given(
    arrays.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32)),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_half_precision_tokens_are_their_float32_values(x, name):
    half = torch.from_numpy(x).to(getattr(torch, name))
    exact = pyrlstats.slice_stats(half.float(), torch.zeros(len(x)))
    got = pyrlstats.slice_stats(half, torch.zeros(len(x), dtype=half.dtype))
    assert same_integers(got.state.to_host(), exact.state.to_host())


@given(arrays.arrays(np.float64, st.integers(0, 60), elements=st.floats(width=64)))
def test_float64_is_rounded_once(x):
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float32)
    assert same_integers(stats_of(x).state, stats_of(rounded).state)


def test_more_than_2_to_the_24_tokens_in_one_bin():
    """Seen through stride 0, so that they cost no memory."""
    n = (1 << 24) + 5
    x = torch.full((1,), 0.3).expand(n)
    stats = pyrlstats.slice_stats(x, torch.zeros(1).expand(n))
    assert int(stats["all"].n_tokens) == int(stats.state.histogram.max()) == n
    assert float(stats["all"].log_ratio_mean) == pytest.approx(float(np.float32(0.3)), rel=1e-12)
    assert float(stats["all"].ess_fraction) == 1.0
    assert float(stats["all"].quantile(0.5)) == float(np.float32(0.3))
