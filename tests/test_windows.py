"""Windows of steps are exact; decayed statistics are those of weighted tokens, and can be forgotten."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrlstats import Layout, SliceAccumulator, SliceStats, slice_stats
from pyrlstats.values import value_stats
from pyrlstats.windows import DecayedStats, Window, between

NAMES = ("all", "some")


def accumulator_of(x: np.ndarray) -> SliceAccumulator:
    x = np.asarray(x, np.float32)
    some = np.arange(len(x)) % 3 == 0
    return SliceAccumulator(NAMES).update(x, np.zeros_like(x), {"all": np.ones(len(x), bool), "some": some})


def step_of(x: np.ndarray) -> SliceStats:
    return accumulator_of(x).compute()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9), st.data())
def test_a_window_is_the_last_steps(size: int, seeds: list[int], data: st.DataObject) -> None:
    steps = [np.random.default_rng(seed).standard_normal(seed % 13) * 2 for seed in seeds]
    window = Window(size)
    for x in steps:
        window.push(step_of(x))
    assert len(window) == min(size, len(steps))
    last = data.draw(st.integers(1, len(window)))
    for got, kept in ((window.compute(), steps[-size:]), (window.compute(last), steps[-last:])):
        parts = [step_of(x) for x in kept]
        assert got.to_bytes() == parts[0].merge(parts[1:]).to_bytes()
    numbered = list(enumerate(step_of(x) for x in steps))
    assert between(numbered, len(steps) - last, 99).to_bytes() == window.compute(last).to_bytes()


def test_a_window_takes_accumulators_and_copies_them() -> None:
    window = Window(2)
    accumulator = accumulator_of(np.ones(4))
    window.push(accumulator).push(accumulator)
    accumulator.reset()
    assert window.compute()["all"].n_tokens == 8
    decayed = DecayedStats(0.5).push(accumulator_of(np.ones(4)))
    assert decayed["all"].n_tokens == 4.0


def test_a_window_refuses_without_changing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Window(0)
    window = Window(3)
    with pytest.raises(ValueError, match="1 to 0"):
        window.compute()
    window.push(step_of(np.ones(4)))
    before = window.compute().to_bytes()
    one = np.ones(1, np.float32)
    for other in (
        slice_stats(one, one),
        SliceAccumulator(NAMES, clip=(0.1, 0.1)),
        SliceAccumulator(NAMES, layout=Layout(6)),
    ):
        with pytest.raises(ValueError, match="cannot be merged"):
            window.push(other)
        with pytest.raises(ValueError, match="cannot be merged"):
            DecayedStats(0.5).push(step_of(np.ones(3))).push(other)
    for push in (window.push, DecayedStats(0.5).push):
        with pytest.raises(TypeError, match="push takes SliceStats or a SliceAccumulator, got ValueStats"):
            push(value_stats(one))  # type: ignore[arg-type]
    for last in (0, -1, 2):
        with pytest.raises(ValueError, match="last must lie in 1 to 1"):
            window.compute(last)
    assert window.compute().to_bytes() == before


def test_windows_survive_pickle_and_meet_tensors() -> None:
    window = Window(3).push(step_of(np.ones(4)).to("cpu"))
    decayed = DecayedStats(0.5).push(step_of(np.ones(4)).to("cpu"))
    window, decayed = pickle.loads(pickle.dumps((window, decayed)))
    window.push(step_of(np.ones(5)).to("cpu")).push(step_of(np.ones(6)))
    decayed.push(step_of(np.ones(5)).to("cpu")).push(step_of(np.ones(6)))
    assert window.compute()["all"].n_tokens == 15
    assert isinstance(window.compute().state.buffer, torch.Tensor)
    assert decayed["all"].n_tokens == 6 + 5 / 2 + 4 / 4


def test_decayed_statistics_are_those_of_weighted_tokens(rng: np.random.Generator) -> None:
    decay = 0.75
    steps = [rng.standard_normal(40) * scale for scale in (0.01, 3.0, 0.2, 1.0)]
    decayed = DecayedStats(decay)
    for x in steps:
        decayed.push(step_of(x))
    x = np.concatenate(steps).astype(np.float32).astype(np.float64)
    weight = np.repeat(decay ** np.arange(len(steps))[::-1], 40)
    w = np.exp(x)
    view = decayed["all"]
    total = weight.sum()
    wanted = {
        "n_tokens": total,
        "n_finite": total,
        "log_ratio_mean": (weight * x).sum() / total,
        "kl_k2": (weight * x**2).sum() / total / 2,
        "kl_k3": (weight * (np.expm1(x) - x)).sum() / total,
        "ess": (weight * w).sum() ** 2 / (weight * w**2).sum(),
        "ratio_mean": (weight * w).sum() / total,
        "clip_fraction_high": (weight * (x > np.log(1.2))).sum() / total,
        "log_ratio_max": x.max(),
        "log_ratio_min": x.min(),
    }
    for name, value in wanted.items():
        assert float(getattr(view, name)) == pytest.approx(value, rel=1e-6), name
    order = np.argsort(x)
    for q in (0.01, 0.3, 0.5, 0.9, 0.999):
        true = x[order][np.searchsorted(np.cumsum(weight[order]), q * total)]
        assert float(view.quantile(q)) == pytest.approx(true, rel=2**-5, abs=2**-23)
    flat = decayed.to_dict("rl/")
    assert flat["rl/all/n_tokens"] == pytest.approx(total)
    assert set(flat) == set(step_of(x).to_dict("rl/"))


def test_decayed_statistics_are_forgotten_cleanly() -> None:
    """Many steps without a token: the shape stays as it was, until nothing is left; never garbage in between."""
    decayed = DecayedStats(0.5).push(step_of(np.array([0.1, -0.2, 0.3, 3.0, -300.0, np.nan, np.inf])))
    first = decayed.to_dict()
    nothing = step_of(np.zeros(0))
    for age in range(1, 1200):
        decayed.push(nothing)
        if age % 17 and abs(age - 100) > 8:
            continue
        now = decayed.to_dict()
        for name in NAMES:
            alive = first[f"{name}/n_finite"] * 0.5**age >= 2.0**-100
            assert (now[f"{name}/n_finite"] > 0) == alive
            for key in ("ess_fraction", "kl_k3", "log_ratio_max", "log_ratio_p50", "ratio_mean", "clip_fraction"):
                value = now[f"{name}/{key}"]
                assert value == pytest.approx(first[f"{name}/{key}"], rel=1e-9) if alive else math.isnan(value)
    decayed.push(step_of(np.array([0.01, 0.02])))
    assert decayed["all"].n_finite == 2.0
    assert float(decayed["all"].log_ratio_max) == np.float32(0.02)
    assert float(decayed["all"].kl_k2) == pytest.approx(step_of(np.array([0.01, 0.02]))["all"].kl_k2, rel=1e-12)


def test_an_infinite_k3_does_not_stay() -> None:
    decayed = DecayedStats(0.5).push(step_of(np.array([0.1, 3.0])))
    decayed.push(step_of(np.array([0.1, 5000.0])))
    assert math.isinf(decayed["all"].kl_k3)
    for fresh in (1.0, 1.5):  # the weighted sum of k3 over far tokens holds the steps since then
        decayed.push(step_of(np.array([0.1, -3.0])))
        near, far = (math.expm1(x) - x for x in (float(np.float32(0.1)), -3.0))
        tokens = float(decayed["all"].n_finite) / 2.0
        assert float(decayed["all"].kl_k3) * 2.0 * tokens == pytest.approx(near * tokens + far * fresh, rel=1e-6)
    assert float(decayed["some"].kl_k3) == pytest.approx(near, rel=1e-6)
    assert float(decayed["all"].log_ratio_max) == 5000.0


def test_only_tokens_that_are_not_finite() -> None:
    decayed = DecayedStats(0.9)
    for _ in range(50):
        decayed.push(step_of(np.array([np.nan, np.inf, -np.inf, np.nan])))
    assert decayed["all"].n_finite == 0.0
    assert float(decayed["all"].n_nan) == pytest.approx(2 * (1 - 0.9**50) / (1 - 0.9))
    assert float(decayed["all"].n_tokens) == pytest.approx(4 * (1 - 0.9**50) / (1 - 0.9))
    assert math.isnan(decayed["all"].ess_fraction)
    decayed.push(step_of(np.array([1.0, 2.0])))
    assert decayed["all"].n_finite == 2.0


def test_decayed_never_merges_with_exact() -> None:
    exact = step_of(np.ones(3))
    decayed = DecayedStats(0.5)
    assert decayed.to_dict() == {}
    with pytest.raises(KeyError):
        decayed["all"]
    decayed.push(exact)
    inner = decayed["all"]._stats
    for call in (lambda: exact + inner, lambda: inner + exact, lambda: Window(2).push(exact).push(inner)):
        with pytest.raises(ValueError, match="never merge"):
            call()
    with pytest.raises(ValueError, match="takes exact statistics"):
        decayed.push(inner)
    assert exact["all"].n_tokens == 3
    for decay in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="0 < decay < 1"):
            DecayedStats(decay)
