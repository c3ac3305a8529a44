"""The mergeable state: one buffer, exact merges, refusals that change nothing."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats import reference
from pyrlstats.layout import COUNTS, LOG2E, MAXIMA, SUMS, Layout
from pyrlstats.state import State, power_of_two, scale_exponent

VIEWS = ("counts", "histogram", "sums", "maxima")


def state_of(x: Any, kind: str = "numpy", **options: Any) -> State:
    x = np.asarray(x, np.float32)
    arrays = (x, np.zeros_like(x))
    if kind == "torch":
        arrays = tuple(torch.from_numpy(array) for array in arrays)
    return pyrlstats.slice_stats(*arrays, **options).state


def merged(*states: State) -> State:
    """All of them pooled, in this order; none is changed."""
    result = states[0].copy()
    for state in states[1:]:
        result.merge_(state)
    return result


def assert_same_integers(left: State, right: State) -> None:
    assert np.array_equal(left.counts, right.counts)
    assert np.array_equal(left.histogram, right.histogram)
    assert np.array_equal(np.asarray(left.maxima) + 0.0, np.asarray(right.maxima) + 0.0)


def assert_same_sums(left: State, right: State, rel: float = 1e-12) -> None:
    for name in SUMS:
        scale = {"near_x": "abs_x", "far_x": "abs_x", "near_excess": "near_x2"}.get(name, name)
        bound = rel * (np.abs(np.asarray(right.sum(scale))) + 1e-300)
        got, want = np.asarray(left.sum(name)), np.asarray(right.sum(name))
        with np.errstate(invalid="ignore"):
            assert ((got == want) | (np.abs(got - want) <= bound)).all(), name


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_empty_state(kind):
    state = State.empty(["a", "b"], Layout(), (0.2, 0.2), None if kind == "numpy" else torch.device("cpu"))
    assert tuple(state.counts.shape) == (2, len(COUNTS))
    assert tuple(state.histogram.shape) == (2, 2048)
    assert tuple(state.sums.shape) == (2, len(SUMS))
    assert tuple(state.maxima.shape) == (2, len(MAXIMA))
    for array in (state.counts, state.histogram, state.sums):
        assert not np.asarray(array).any()
    assert (np.asarray(state.maxima) == -np.inf).all()
    again = State.empty(["a", "b"], Layout(), (0.2, 0.2), None if kind == "numpy" else torch.device("cpu"))
    state.counts[...] = 5
    assert not np.asarray(again.counts).any(), "every empty state has memory of its own"
    assert not np.asarray(State.empty(["a", "b"], Layout(), (0.2, 0.2)).counts).any()


def test_the_size_depends_on_slices_and_layout_only(rng):
    words = len(COUNTS) + 2048 + len(SUMS) + len(MAXIMA)
    for n in (0, 1, 10_000):
        x = rng.normal(0, 1, n)
        assert state_of(x).buffer.size == words
        assert state_of(x, layout=Layout(3)).buffer.size == words - 2048 + 512
        masks = {name: np.ones(n, bool) for name in "abc"}
        assert state_of(x, masks=masks).buffer.size == 3 * words


def test_views_share_the_memory_of_the_buffer_and_cover_it(rng):
    for kind in ("numpy", "torch"):
        state = state_of(rng.normal(0, 1, 50), kind)
        sizes = sum(math.prod(getattr(state, view).shape) for view in VIEWS)
        assert sizes == math.prod(state.buffer.shape)
        for view in VIEWS:
            getattr(state, view)[...] = 1
            assert (np.asarray(getattr(state, view)) == 1).all()
        assert not (np.asarray(state.buffer) == 0).any()


def test_merging_with_an_empty_state_changes_nothing(rng):
    for x in (rng.normal(0, 1, 100), np.full(9, 5000.0), np.full(9, -300.0), [math.nan, math.inf], []):
        for kind in ("numpy", "torch"):
            state, nothing = state_of(x, kind), state_of([], kind)
            for result in (merged(state, nothing), merged(nothing, state)):
                assert np.array_equal(np.asarray(result.buffer), np.asarray(state.buffer))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_merge_equals_one_call(kind, rng):
    parts = [rng.normal(0, 1, 700) * 10.0 ** rng.uniform(-8, 2, 700), rng.normal(0, 1e-4, 300), [], [0.0, math.nan]]
    whole = state_of(np.concatenate(parts), kind)
    for order in itertools.permutations(range(4)):
        pooled = merged(*(state_of(parts[index], kind) for index in order))
        assert_same_integers(pooled, whole)
        assert_same_sums(pooled, whole, rel=1e-6)  # each call rounds in its own way: the bound of the sums


def test_merging_the_same_states_in_any_order(rng):
    states = [state_of(rng.normal(0, 10.0**power, 200)) for power in (-6, -2, 0, 1, 2)]
    first = functools.reduce(merged, states)
    for order in itertools.permutations(states):
        pooled = functools.reduce(merged, order)
        assert_same_integers(pooled, first)
        assert_same_sums(pooled, first)
        # as a tree instead of a chain
        tree = merged(merged(order[0], order[1]), merged(order[2], merged(order[3], order[4])))
        assert_same_integers(tree, first)
        assert_same_sums(tree, first)


def test_the_rescale_at_a_merge_is_exact():
    """Max 5000 and -300, each pair in both orders: what one call would hold, to the bit."""
    values = (5000.0, 4999.0, 4000.0, 700.0, 3.0, 0.25, -0.25, -3.0, -300.0, -5000.0, 3e38, -3e38)
    for kind in ("numpy", "torch"):
        for first, second in itertools.product(values, values):
            pooled = merged(state_of([first], kind), state_of([second], kind))
            alone = {value: state_of([value], kind) for value in (first, second)}
            exponent = np.floor(np.float64(np.float32(max(first, second))) * LOG2E)
            for name, power in (("far_w", 1), ("far_w2", 2)):
                wanted = 0.0
                for value in (first, second):
                    down = np.floor(np.float64(np.float32(value)) * LOG2E) - exponent
                    wanted += float(alone[value].sum(name)[0]) * 2.0 ** max(power * down, -1075.0)
                got = float(pooled.sum(name)[0])
                assert got == pytest.approx(wanted, rel=1e-15, abs=1e-290), (name, first, second)


def test_merging_5000_and_minus_300_in_both_orders():
    high, low = state_of([5000.0, 4999.0]), state_of([-300.0, -301.0, 0.0])
    for pooled in (merged(high, low), merged(low, high)):
        view = pyrlstats.SliceStats(pooled)["all"]
        truth = reference.statistics(np.float32([5000, 4999, -300, -301, 0]))
        assert float(view.ess) == pytest.approx(truth["ess"], rel=1e-6)
        assert float(view.chi2) == pytest.approx(truth["chi2"], rel=1e-6)
        assert float(view.max_weight_ess_fraction) == pytest.approx(truth["max_weight_ess_fraction"], rel=1e-6)
        assert float(view.log_ratio_max) == 5000.0
        assert float(view.log_ratio_min) == -301.0
    both = merged(low, state_of([-300.0]))
    assert float(pyrlstats.SliceStats(both)["all"].ratio_max) == 1.0


def test_a_state_keeps_its_sums_through_many_merges():
    """A thousand merges of one far token: no drift."""
    total = state_of([])
    one = state_of([-20.0])
    for _ in range(1000):
        total.merge_(one)
    for name in SUMS:
        assert float(total.sum(name)[0]) == pytest.approx(1000 * float(one.sum(name)[0]), rel=1e-12), name
    total.merge_(state_of([0.0]))
    assert float(pyrlstats.SliceStats(total)["all"].ratio_mean) == pytest.approx(
        (1 + 1000 * math.exp(-20)) / 1001, rel=1e-9
    )


def test_counts_beyond_2_to_the_32():
    """int64 to the end: 2^33 tokens by doubling one state."""
    for kind in ("numpy", "torch"):
        state = state_of([0.25, 0.0, -3.0, math.nan], kind)
        for _ in range(31):
            state.merge_(state.copy())
        view = pyrlstats.SliceStats(state)["all"]
        assert int(view.n_tokens) == 1 << 33
        assert int(view.n_finite) == 3 << 31
        assert float(view.zero_fraction) == pytest.approx(1 / 3, rel=1e-15)
        assert float(view.log_ratio_mean) == pytest.approx(-2.75 / 3, rel=1e-12)
        assert float(view.quantile(1 / 3 + 1e-9)) == 0.0
        assert float(view.quantile(1 / 3 - 1e-9)) == pytest.approx(-3.0, rel=2.0**-5)
        assert float(view.quantile(1.0)) == 0.25


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"clip": (0.2, 0.3)}, "clip"),
        ({"layout": Layout(6)}, "layout"),
        ({"layout": Layout(5, -24, 40)}, "layout"),
        ({"names": ["other"]}, "names"),
        ({"masks": {"all": np.ones(3, bool), "more": np.ones(3, bool)}}, "names"),
    ],
)
def test_different_states_refuse_to_merge(kind, options, field, rng):
    """ValueError that names what differs; both sides keep their bits."""
    mine, theirs = state_of([1.0, 2.0, 5000.0], kind), state_of([3.0, 0.0, -1.0], "numpy", **options)
    if kind == "torch":
        theirs = pyrlstats.SliceStats(theirs).to("cpu").state
    for left, right in ((mine, theirs), (theirs, mine)):
        before = left.copy(), right.copy()
        message = f"states with different {field} cannot be merged"
        with pytest.raises(ValueError, match=message) as caught:
            left.merge_(right)
        assert str(getattr(left, field)) in str(caught.value)
        assert str(getattr(right, field)) in str(caught.value)
        for one in (pyrlstats.SliceStats.merge, pyrlstats.SliceStats.__add__):
            with pytest.raises(ValueError, match=re.escape(message)):
                one(pyrlstats.SliceStats(left), pyrlstats.SliceStats(right))
        assert np.array_equal(np.asarray(left.buffer), np.asarray(before[0].buffer))
        assert np.array_equal(np.asarray(right.buffer), np.asarray(before[1].buffer))


def test_slices_in_another_order_are_other_slices():
    masks = {"a": np.ones(2, bool), "b": np.zeros(2, bool)}
    left = state_of([1.0, 2.0], masks=masks)
    right = state_of([1.0, 2.0], masks=dict(reversed(masks.items())))
    with pytest.raises(ValueError, match="different names"):
        left.merge_(right)


def test_copy_and_clear(rng):
    for kind in ("numpy", "torch"):
        state = state_of(rng.normal(0, 1, 100), kind)
        before, copy = np.asarray(state.buffer).copy(), state.copy()
        state.merge_(copy)
        assert np.array_equal(np.asarray(copy.buffer), before)
        state.clear_()
        assert np.array_equal(np.asarray(state.buffer), np.asarray(state_of([], kind).buffer))
        assert np.array_equal(np.asarray(copy.buffer), before)


def test_to_host(rng):
    state = state_of(rng.normal(0, 1, 100), "torch")
    host = state.to_host()
    assert isinstance(host.buffer, np.ndarray)
    assert np.array_equal(host.buffer, state.buffer.numpy())
    assert host.to_host() is host


def test_power_of_two():
    exponents = np.array([-1075.0, -1023.0, -1022.0, -1.0, 0.0, 1.0, 52.0, 1023.0, 1024.0, 5000.0, -1e300, 1e300])
    wanted = [0.0, 0.0, 2.0**-1022, 0.5, 1.0, 2.0, 2.0**52, 2.0**1023, math.inf, math.inf, 0.0, math.inf]
    assert power_of_two(exponents).tolist() == wanted
    assert power_of_two(torch.from_numpy(exponents)).tolist() == wanted


def test_scale_exponent_keeps_the_largest_weight_between_1_and_2():
    values = np.float64(np.float32([5000.0, 0.5, 0.0, -0.3, -300.0, 88.7, -3e38, 3e38, -np.inf]))
    for array in (values, torch.from_numpy(values)):
        k = np.asarray(scale_exponent(array))
        assert k[-1] == 0.0, "an empty slice"
        assert k.tolist() == [*np.floor(values[:-1] * LOG2E).tolist(), 0.0]
        moderate = slice(0, 6)
        scaled = values[moderate] * LOG2E - k[moderate]
        assert ((scaled >= 0) & (scaled < 1)).all()
