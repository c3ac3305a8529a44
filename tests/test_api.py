"""What users see on one process: calls, results, accumulation, conversion, light imports."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats import Layout, SliceAccumulator, SliceStats, _dispatch, slice_stats
from pyrlstats.slice_stats import SCALARS, percentile_name

X = torch.tensor([0.5, -0.25, 0.0, 2.0, math.nan, -1.0])
ZEROS = torch.zeros(6)
MASKS = {"pre_tool": torch.tensor([1, 1, 1, 0, 0, 0]), "post_tool": torch.tensor([0, 0, 1, 1, 1, 1])}
STATISTICS = (
    *("n_tokens", "n_finite", "n_nan", "n_pos_inf", "n_neg_inf", "n_zero", "zero_fraction"),
    *("log_ratio_mean", "log_ratio_std", "log_ratio_min", "log_ratio_max", "log_ratio_abs_mean"),
    *("kl_k1", "kl_k2", "kl_k3", "ratio_mean", "ratio_std", "ratio_min", "ratio_max"),
    *("ess", "ess_fraction", "max_weight_ess_fraction", "chi2", "renyi2"),
    *("clip_fraction_low", "clip_fraction_high", "clip_fraction"),
)


def buffer(stats: SliceStats) -> np.ndarray:
    return np.asarray(stats.state.to_host().buffer).copy()


def same(left: SliceStats, right: SliceStats) -> bool:
    return np.array_equal(buffer(left), buffer(right))


# ---- slice_stats


def test_the_first_example():
    stats = slice_stats(X, ZEROS, MASKS)
    assert int(stats["pre_tool"].n_tokens) == 3
    assert int(stats["post_tool"].n_tokens) == 4
    assert int(stats["post_tool"].n_nan) == 1
    assert float(stats["post_tool"].log_ratio_max) == 2.0
    assert float(stats["pre_tool"].quantile(0.0)) == -0.25
    assert stats["post_tool"].abs_quantile([0.99, 0.999]).tolist() == [2.0, 2.0]
    assert float(slice_stats(X, ZEROS)["all"].zero_fraction) == 0.2


def test_every_statistic_has_its_name():
    assert set(STATISTICS) <= set(SCALARS)
    view = slice_stats(X, ZEROS)["all"]
    for name in STATISTICS:
        assert getattr(type(view), name).__doc__, name
    with pytest.raises(AttributeError):
        view.unknown  # noqa: B018


def test_a_mapping_of_slices():
    stats = slice_stats(X, ZEROS, MASKS)
    assert isinstance(stats, Mapping)
    assert list(stats) == list(stats.keys()) == ["pre_tool", "post_tool"]
    assert len(stats) == 2
    assert "pre_tool" in stats
    assert "all" not in stats
    assert [int(view.n_tokens) for view in stats.values()] == [3, 4]
    assert dict(stats.items()).keys() == set(MASKS)
    assert stats.get("all") is None
    with pytest.raises(KeyError, match=r"no slice 'all'; there are \['pre_tool', 'post_tool'\]"):
        stats["all"]


def test_values_are_0_d_on_the_inputs_device():
    view = slice_stats(X, ZEROS)["all"]
    for name in SCALARS:
        value = getattr(view, name)
        assert isinstance(value, torch.Tensor)
        assert value.device == X.device
        assert value.shape == ()
    assert view.histogram().edges.device == X.device
    view = slice_stats(X.numpy(), ZEROS.numpy())["all"]
    for name in SCALARS:
        assert isinstance(getattr(view, name), (np.generic, np.ndarray))


def test_ways_to_name_slices():
    mask = MASKS["pre_tool"]
    assert list(slice_stats(X, ZEROS)) == ["all"]
    assert list(slice_stats(X, ZEROS, mask)) == ["all"]
    assert list(slice_stats(X, ZEROS, mask, names=["only"])) == ["only"]
    assert list(slice_stats(X, ZEROS, names=["only"])) == ["only"]
    assert list(slice_stats(X, ZEROS, [mask, mask], names=("a", "b"))) == ["a", "b"]
    assert list(slice_stats(X, ZEROS, (mask,), names=["a"])) == ["a"]
    assert list(slice_stats(X, ZEROS, slice_ids=mask, names=["a", "b"])) == ["a", "b"]
    named = slice_stats(X, ZEROS, {"näme with spaces.": mask})
    assert int(named["näme with spaces."].n_tokens) == 3


def test_n_out_of_range():
    stats = slice_stats(X, ZEROS, slice_ids=torch.tensor([0, 1, 2, 3, -1, 1]), names=["a", "b"])
    assert int(stats.n_out_of_range) == 2
    assert int(stats["a"].n_tokens) == 1
    assert int(stats["b"].n_tokens) == 2
    assert int(slice_stats(X, ZEROS, MASKS).n_out_of_range) == 0


def test_clip_and_layout_reach_the_state():
    stats = slice_stats(X, ZEROS, clip=(0.1, 3.0), layout=Layout(3, -8, 8))
    assert stats.state.clip == (0.1, 3.0)
    assert stats.state.layout == Layout(3, -8, 8)
    assert float(stats["all"].clip_fraction_high) == 0.2  # w = e^2 alone is above 1 + 3
    assert float(stats["all"].clip_fraction_low) == 0.4  # -0.25 and -1


def test_defaults():
    signature = inspect.signature(slice_stats)
    assert signature.parameters["clip"].default == (0.2, 0.2)
    assert signature.parameters["layout"].default == Layout(5, -24, 8)
    keywords = [name for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY]
    assert keywords[:5] == ["slice_ids", "names", "mask", "clip", "layout"]


def test_inputs_are_not_changed(rng):
    for make in (torch.from_numpy, lambda array: array):
        logp, old = make(rng.normal(0, 1, 500)), make(rng.normal(0, 1, 500))
        mask = make(rng.integers(0, 2, 500))
        before = [array.copy() if isinstance(array, np.ndarray) else array.clone() for array in (logp, old, mask)]
        slice_stats(logp, old, {"a": mask}, mask=mask)
        slice_stats(logp, old, slice_ids=mask, names=["a"])
        for array, kept in zip((logp, old, mask), before, strict=True):
            assert np.array_equal(array, kept)


def test_no_graph_is_kept():
    """Inputs with grad: detached inside, nothing of the graph stays alive, backward still works."""
    weight = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    logp = weight * 0.1
    mask = torch.tensor([1.0, 1.0, 0.0], requires_grad=True)
    stats = slice_stats(logp, weight, {"a": mask})
    accumulator = SliceAccumulator(["a"]).update(logp, weight.detach(), {"a": mask})
    for one in (stats, accumulator.compute()):
        assert not one.state.buffer.requires_grad
        assert not one["a"].ess_fraction.requires_grad
        assert not one["a"].quantile(0.5).requires_grad
    (logp.sum() * 3).backward()
    assert torch.equal(weight.grad, torch.full((3,), 0.3))
    alive = weakref.ref(logp)
    del logp
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_update_inside_and_outside_of_inference_mode(mode):
    accumulator = SliceAccumulator(["all"])
    with mode():
        accumulator.update(X, ZEROS)
    accumulator.update(X, ZEROS)
    assert int(accumulator.compute()["all"].n_tokens) == 12
    with mode():
        inside = slice_stats(X * 1, ZEROS)
    assert int((inside + slice_stats(X, ZEROS))["all"].n_tokens) == 12
    assert int(accumulator.merge(inside).compute()["all"].n_tokens) == 18
    accumulator.reset().update(X, ZEROS)
    assert int(accumulator.compute()["all"].n_tokens) == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype):
    wanted = slice_stats(X, ZEROS, MASKS).to_dict()
    torch.set_default_dtype(dtype)
    try:
        got = slice_stats(X, ZEROS, MASKS).to_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_equal(got, wanted)


class Capsule:
    """An array of some other library: nothing but the DLPack protocol."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("make", [lambda tensor: tensor, lambda tensor: tensor.numpy().copy()])
def test_dlpack_objects(make):
    wanted = slice_stats(X, ZEROS, MASKS)
    masks = {name: Capsule(make(mask)) for name, mask in MASKS.items()}
    got = slice_stats(Capsule(make(X)), Capsule(make(ZEROS)), masks, mask=Capsule(make(torch.ones(6))))
    assert same(got, wanted)
    assert int(slice_stats(Capsule(make(X)), ZEROS, Capsule(make(MASKS["pre_tool"])))["all"].n_tokens) == 3


def test_numpy_and_torch_mixed(rng):
    """Masks from the data loader as arrays, log-probabilities as tensors; whatever the strides."""
    wanted = slice_stats(X, ZEROS, MASKS)
    arrays = {name: mask.numpy().copy() for name, mask in MASKS.items()}
    assert same(slice_stats(X, ZEROS, arrays), wanted)
    assert same(slice_stats(X, ZEROS.numpy().copy(), arrays), wanted)
    reverse = {name: np.ascontiguousarray(mask[::-1])[::-1] for name, mask in arrays.items()}
    assert same(slice_stats(X, ZEROS, reverse), wanted)
    for mask in arrays.values():
        mask.flags.writeable = False
    assert same(slice_stats(X, ZEROS, arrays), wanted)
    assert same(slice_stats(X, np.broadcast_to(np.float32(0), (6,)), arrays), wanted)


def test_tensor_subclasses(rng):
    parameter = torch.nn.Parameter(X.clone())
    assert same(slice_stats(parameter, ZEROS, MASKS), slice_stats(X, ZEROS, MASKS))

    class Tagged(torch.Tensor):
        pass

    assert same(slice_stats(X.as_subclass(Tagged), ZEROS, MASKS), slice_stats(X, ZEROS, MASKS))


def test_conjugate_and_negative_views():
    """Lazily negated memory: what torch says the value is, not what lies in memory."""
    complex_ = torch.complex(torch.zeros(3), torch.tensor([1.0, -0.25, 0.0]))
    lazy = complex_.conj().imag
    assert lazy.is_neg()
    stats = slice_stats(lazy, torch.zeros(3))
    assert float(stats["all"].log_ratio_min) == -1.0
    assert float(stats["all"].log_ratio_max) == 0.25


def test_many_threads_at_once(rng):
    """The engine lets go of the interpreter: calls in parallel do not disturb each other."""
    inputs = [rng.normal(0, 1, 20_000).astype(np.float32) for _ in range(8)]
    alone = [buffer(slice_stats(x, np.zeros_like(x))) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            together = pool.map(lambda x: buffer(slice_stats(x, np.zeros_like(x))), inputs)
            assert all(np.array_equal(left, right) for left, right in zip(alone, together, strict=True))


def test_torch_threads_do_not_change_a_bit(rng):
    x = torch.from_numpy(rng.standard_normal(700_001) * 10.0 ** rng.uniform(-6, 1.5, 700_001)).float()
    masks = {"a": torch.from_numpy(rng.random(700_001) < 0.3), "b": torch.from_numpy(rng.random(700_001) < 0.9)}
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(slice_stats(x, torch.zeros(700_001), masks))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert same(result, results[0])


# ---- pooling


def test_merge_and_plus():
    first, second = slice_stats(X[:3], ZEROS[:3]), slice_stats(X[3:], ZEROS[3:])
    before = buffer(first), buffer(second)
    pooled = first + second
    assert int(pooled["all"].n_tokens) == 6
    assert same(pooled, first.merge(second))
    assert same(pooled, sum([first, second]))
    assert same(sum([first]), first)
    assert np.array_equal(buffer(first), before[0])
    assert np.array_equal(buffer(second), before[1])
    assert float(pooled["all"].log_ratio_max) == 2.0
    whole = slice_stats(X, ZEROS)
    assert np.array_equal(pooled.state.histogram, whole.state.histogram)
    for other in (1, None, "x", first.state):
        with pytest.raises(TypeError):
            first + other
        with pytest.raises(TypeError):
            other + first


@pytest.mark.parametrize("other", ["a", 3, None, ["a"], {"a": 1}])
def test_merge_says_what_it_takes(other):
    got = type(other[0] if isinstance(other, list) else other).__name__
    with pytest.raises(TypeError, match=f"merge takes SliceStats or an iterable of SliceStats, got {got}"):
        slice_stats(X, ZEROS).merge(other)


def test_results_are_equal_to_themselves_only_and_hashable():
    one, other = slice_stats(X, ZEROS), slice_stats(X, ZEROS)
    assert one == one
    assert one != other
    assert {one: 1}[one] == 1
    assert len({one, other}) == 2


def test_a_quantile_is_evaluated_once_for_all_slices(monkeypatch):
    stats = slice_stats(X, ZEROS, MASKS)
    calls = []
    original = pyrlstats.quantiles.abs_quantile
    monkeypatch.setattr(pyrlstats.quantiles, "abs_quantile", lambda *given: calls.append(1) or original(*given))
    found = [float(view.abs_quantile(0.99)) for view in stats.values() for _ in range(3)]
    assert len(calls) == 1
    assert found == [0.5] * 3 + [2.0] * 3
    for q in np.linspace(0, 1, 1000):
        stats["pre_tool"].abs_quantile(q)
    assert len(stats._values_at) <= 64
    with pytest.raises(ValueError, match="q must lie"):
        stats["pre_tool"].quantile(2)


def test_pooled_means_are_not_means_of_means():
    """3 of 12 tokens and 3 of 4 tokens clipped: 6 of 16, not a half."""
    first = torch.tensor([1.0] * 3 + [0.0] * 9)
    second = torch.tensor([1.0] * 3 + [0.0])
    pooled = slice_stats(first, torch.zeros(12)) + slice_stats(second, torch.zeros(4))
    assert float(pooled["all"].clip_fraction) == 6 / 16


def test_to_a_device():
    stats = slice_stats(X.numpy(), ZEROS.numpy())
    moved = stats.to("cpu")
    assert isinstance(moved["all"].ess, torch.Tensor)
    assert same(moved, stats)


@pytest.mark.parametrize("stats", [slice_stats(X, ZEROS, MASKS), slice_stats(X.numpy(), ZEROS.numpy())])
def test_to_the_host(stats):
    assert isinstance(stats.to_host().state.buffer, np.ndarray)
    copied = stats.to_host(async_op=True)
    for host in (stats.to_host(), copied.wait()):
        assert type(host) is SliceStats
        np.testing.assert_array_equal(host.state.buffer, buffer(stats))
    assert copied.wait() is copied.wait()


def test_copies_and_pickles():
    stats = slice_stats(X, ZEROS, MASKS)
    for clone in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert same(clone, stats)
        assert list(clone) == list(stats)
        np.testing.assert_equal(clone.to_dict(), stats.to_dict())


# ---- SliceAccumulator


def test_an_accumulator_pools_its_updates():
    accumulator = SliceAccumulator(["pre_tool", "post_tool"])
    for part in (slice(0, 2), slice(2, 2), slice(2, 6)):
        result = accumulator.update(X[part], ZEROS[part], {name: mask[part] for name, mask in MASKS.items()})
        assert result is accumulator
    stats = accumulator.compute()
    assert isinstance(stats, SliceStats)
    whole = slice_stats(X, ZEROS, MASKS)
    assert np.array_equal(stats.state.histogram, whole.state.histogram)
    assert np.array_equal(stats.state.counts, whole.state.counts)
    assert accumulator.reset() is accumulator
    assert int(accumulator.compute()["pre_tool"].n_tokens) == 0
    assert math.isnan(accumulator.compute()["pre_tool"].ess)
    assert same(accumulator.update(X, ZEROS, MASKS).compute(), whole)


def test_the_order_of_a_mapping_does_not_matter():
    accumulator = SliceAccumulator(["pre_tool", "post_tool"])
    accumulator.update(X, ZEROS, dict(reversed(MASKS.items())))
    assert same(accumulator.compute(), slice_stats(X, ZEROS, MASKS))


def test_ways_to_give_slices_to_update():
    masks = list(MASKS.values())
    wanted = slice_stats(X, ZEROS, MASKS)
    assert same(SliceAccumulator(list(MASKS)).update(X, ZEROS, masks).compute(), wanted)
    one = SliceAccumulator(["all"])
    assert int(one.update(X, ZEROS).compute()["all"].n_tokens) == 6
    assert int(one.update(X, ZEROS, masks[0]).compute()["all"].n_tokens) == 9
    assert int(one.update(X, ZEROS, mask=masks[0]).compute()["all"].n_tokens) == 12
    ids = SliceAccumulator(["a", "b"]).update(X, ZEROS, slice_ids=torch.tensor([0, 1, 1, -1, 5, 0]))
    assert ids.compute().state.count("n_tokens").tolist() == [2, 2]
    assert int(ids.compute().n_out_of_range) == 1


def test_compute_copies():
    for data in ((X, ZEROS), (X.numpy(), ZEROS.numpy())):
        accumulator = SliceAccumulator(["all"]).update(*data)
        stats = accumulator.compute()
        before = buffer(stats)
        accumulator.update(*data)
        assert int(accumulator.compute()["all"].n_tokens) == 12
        accumulator.reset()
        assert np.array_equal(buffer(stats), before)
        assert int(stats["all"].n_tokens) == 6


def test_memory_is_allocated_once():
    accumulator = SliceAccumulator(["all"]).update(X, ZEROS)
    address = accumulator._state.buffer.data_ptr()
    accumulator.update(X, ZEROS).reset().update(X, ZEROS).merge(slice_stats(X, ZEROS))
    assert accumulator._state.buffer.data_ptr() == address


def test_an_accumulator_without_updates():
    for accumulator in (SliceAccumulator(["a", "b"]), SliceAccumulator(["a", "b"], device="cpu")):
        stats = accumulator.compute()
        assert list(stats) == ["a", "b"]
        assert int(stats["a"].n_tokens) == 0
        assert accumulator.reset() is accumulator
        assert all(math.isnan(value) for key, value in stats.to_dict().items() if key.endswith("fraction"))


def test_accumulators_merge():
    first, second = SliceAccumulator(["all"]).update(X, ZEROS), SliceAccumulator(["all"])
    assert first.merge(second) is first
    assert int(first.compute()["all"].n_tokens) == 6
    assert second.merge(first) is second
    assert same(second.compute(), first.compute())
    second.update(X, ZEROS)
    assert int(first.compute()["all"].n_tokens) == 6, "merging shares no memory"
    first.merge(second).merge(slice_stats(X, ZEROS))
    assert int(first.compute()["all"].n_tokens) == 24
    assert int(second.compute()["all"].n_tokens) == 12


@pytest.mark.parametrize("update", [True, False])
def test_accumulators_refuse_what_differs(update):
    mine = SliceAccumulator(["all"])
    if update:
        mine.update(X, ZEROS)
    before = buffer(mine.compute())
    others = (
        SliceAccumulator(["other"]).update(X, ZEROS),
        SliceAccumulator(["all"], clip=(0.1, 0.2)).update(X, ZEROS),
        SliceAccumulator(["all"], layout=Layout(6)).update(X, ZEROS),
        slice_stats(X, ZEROS, clip=(0.1, 0.2)),
    )
    for other in others:
        with pytest.raises(ValueError, match="cannot be merged"):
            mine.merge(other)
        assert np.array_equal(buffer(mine.compute()), before)


@pytest.mark.parametrize(
    "masks",
    [
        {"pre_tool": MASKS["pre_tool"]},
        {**MASKS, "unknown": MASKS["pre_tool"]},
        {"pre_tool": MASKS["pre_tool"], "post_tol": MASKS["post_tool"]},
        [MASKS["pre_tool"]],
        [MASKS["pre_tool"]] * 3,
        MASKS["pre_tool"],
        None,
        {"pre_tool": MASKS["pre_tool"], "post_tool": torch.ones(5)},
    ],
)
def test_update_with_wrong_slices_counts_nothing(masks):
    accumulator = SliceAccumulator(list(MASKS)).update(X, ZEROS, MASKS)
    before = buffer(accumulator.compute())
    with pytest.raises(ValueError):
        accumulator.update(X, ZEROS, masks)
    assert np.array_equal(buffer(accumulator.compute()), before)


def test_missing_and_unknown_slices_are_named():
    accumulator = SliceAccumulator(["a", "b"])
    mask = MASKS["pre_tool"]
    with pytest.raises(ValueError, match=r"missing \['b'\], unknown \['c'\]: name every slice where"):
        accumulator.update(X, ZEROS, {"a": mask, "c": mask})
    with pytest.raises(ValueError, match=r"\['a', 'b'\]: missing \['b'\]$"):
        accumulator.update(X, ZEROS, {"a": mask})
    with pytest.raises(ValueError, match=r"\['a', 'b'\]: unknown \['c'\]: name every slice where"):
        accumulator.update(X, ZEROS, {"a": mask, "b": mask, "c": mask})


def test_numpy_and_torch_updates_of_one_accumulator():
    for first, second in (((X, ZEROS), (X.numpy(), ZEROS.numpy())), ((X.numpy(), ZEROS.numpy()), (X, ZEROS))):
        accumulator = SliceAccumulator(["all"]).update(*first).update(*second).update(*first)
        assert int(accumulator.compute()["all"].n_tokens) == 18
        assert int(accumulator.compute()["all"].n_nan) == 3


# ---- to_dict, repr


def test_to_dict():
    stats = slice_stats(X, ZEROS, MASKS)
    values = stats.to_dict("rl/")
    quantiles = ["log_ratio_p0_1", "log_ratio_p1", "log_ratio_p50", "log_ratio_p99", "log_ratio_p99_9"]
    quantiles += ["abs_log_ratio_p50", "abs_log_ratio_p99", "abs_log_ratio_p99_9", "abs_log_ratio_p99_99"]
    wanted = {f"rl/{name}/{statistic}" for name in MASKS for statistic in (*SCALARS, *quantiles)}
    assert values.keys() == wanted | {"rl/n_out_of_range"}
    for key, value in values.items():
        name = key.rsplit("/", 1)[-1]
        assert type(value) is (int if name.startswith("n_") else float), key
    for name in MASKS:
        view = stats[name]
        for statistic in SCALARS:
            assert values[f"rl/{name}/{statistic}"] == pytest.approx(getattr(view, statistic).item(), rel=1e-12)
        assert values[f"rl/{name}/log_ratio_p99_9"] == pytest.approx(float(view.quantile(0.999)), rel=1e-12)
        assert values[f"rl/{name}/abs_log_ratio_p99_99"] == pytest.approx(float(view.abs_quantile(0.9999)), rel=1e-12)
    assert stats.to_dict().keys() == {key.removeprefix("rl/") for key in values}
    assert json.loads(json.dumps(values)) == values


def test_to_dict_keeps_nan_and_its_keys():
    """The same keys at every step, whatever the slices hold; empty slices are NaN, not 0."""
    empty = slice_stats(X, ZEROS, {name: torch.zeros(6) for name in MASKS}).to_dict("a/")
    assert empty.keys() == slice_stats(X, ZEROS, MASKS).to_dict("a/").keys()
    for key, value in empty.items():
        assert value == 0 if key.rsplit("/", 1)[-1].startswith("n_") else math.isnan(value), key


def test_to_dict_with_other_quantiles():
    stats = slice_stats(X, ZEROS)
    values = stats.to_dict(quantiles=[0.25], abs_quantiles=[0.99999, 1])
    assert {key for key in values if "_p" in key} >= {
        "all/log_ratio_p25",
        "all/abs_log_ratio_p99_999",
        "all/abs_log_ratio_p100",
    }
    assert values["all/abs_log_ratio_p100"] == 2.0
    assert not [key for key in stats.to_dict(quantiles=(), abs_quantiles=()) if "_ratio_p" in key]
    with pytest.raises(ValueError, match=r"q must lie in \[0, 1\], got 99"):
        stats.to_dict(quantiles=[99])


def test_to_dict_copies_to_the_host_once(monkeypatch):
    stats = slice_stats(X, ZEROS, MASKS)
    copies = []
    original = pyrlstats.state.State.to_host
    monkeypatch.setattr(pyrlstats.state.State, "to_host", lambda state: copies.append(1) or original(state))
    stats.to_dict()
    assert len(copies) == 1


@pytest.mark.parametrize(
    ("q", "name"),
    [(0.5, "p50"), (0.999, "p99_9"), (0.9999, "p99_99"), (0.001, "p0_1"), (0.29, "p29"), (0.0, "p0"), (1.0, "p100")],
)
def test_percentile_name(q, name):
    assert percentile_name(q) == name


def test_repr():
    stats = slice_stats(X, ZEROS, {**MASKS, "none": torch.zeros(6)})
    lines = repr(stats).splitlines()
    assert [line.split()[0] for line in lines] == ["slice", "pre_tool", "post_tool", "none"]
    assert len({len(line) for line in lines}) == 1, "columns line up"
    for column in ("tokens", "ESS", "KL k3", "|x| p99.9", "clipped"):
        assert column in lines[0]
    assert "nan" in lines[3]
    assert "post_tool" in repr(stats["post_tool"])
    assert "pre_tool" not in repr(stats["post_tool"])
    accumulator = SliceAccumulator(["one"], clip=(0.1, 0.3))
    assert "one" in repr(accumulator)
    assert "(0.1, 0.3)" in repr(accumulator)


def test_repr_tells_of_ids_out_of_range():
    ids = torch.tensor([0, 1, 7, 7, -1, 0])
    stats = slice_stats(X, ZEROS, slice_ids=ids, names=["a", "b"])
    assert repr(stats).splitlines()[3:] == ["2 out of range: their slice id names no slice"]
    assert stats._repr_html_().endswith("</table><p>2 out of range: their slice id names no slice</p>")


def test_repr_html():
    html = slice_stats(X, ZEROS, {"<b>&": MASKS["pre_tool"], "b": MASKS["post_tool"]})._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;b&gt;&amp;" in html
    assert "<b>" not in html
    assert html.startswith("<table>")
    assert html.endswith("</table>")


# ---- the package


def test_build_info():
    info = pyrlstats.build_info()
    assert info["version"] == pyrlstats.__version__
    assert set(info["packages"]) >= {"numpy", "torch", "triton", "numba"}
    assert info["packages"]["numpy"] == np.__version__
    assert set(info["backends"]) >= {"cpp", "torch", "reference"}
    assert info["backends"]["torch"] == info["backends"]["reference"] == "available"
    if info["backends"]["cpp"] == "available":
        assert "portable" in info["extension"]["usable"]
    else:
        assert info["extension"] is None
    json.dumps(info)


@pytest.mark.parametrize("in_tree", [True, False])
def test_the_cure_of_a_missing_extension(in_tree, tmp_path, monkeypatch):
    if in_tree:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(_dispatch, "__file__", str(tmp_path / "pyrlstats" / "_dispatch.py"))
    monkeypatch.setitem(_dispatch.BACKENDS, "cpp", ("pyrlstats.no_such_backend", (None, "cpu")))
    error = ImportError("cannot import name '_core'", name="pyrlstats")
    monkeypatch.setattr(_dispatch.importlib, "import_module", lambda name: (_ for _ in ()).throw(error))
    cure = "you are importing the source tree" if in_tree else "pip install . in the source tree"
    assert cure in _dispatch.unavailable("cpp")


def run_python(code: str) -> str:
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_is_light():
    """No framework, no plotting, no command line until somebody asks for it."""
    loaded = set(run_python("import pyrlstats, sys; print(*sys.modules)").split())
    assert "numpy" in loaded
    assert not loaded & {
        "torch",
        "triton",
        "numba",
        "matplotlib",
        "typer",
        "rich",
        "scipy",
        "pandas",
        "jinja2",
        "pyarrow",
    }


def test_import_is_quick():
    """Over NumPy's own import; processor time, the best of three."""
    code = "import numpy, time; t = time.process_time(); import pyrlstats; print(time.process_time() - t)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


def test_numpy_without_torch():
    """Everything on arrays works where torch cannot be imported."""
    output = run_python(
        """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import numpy as np
import pyrlstats
x = np.linspace(-1, 1, 101, dtype=np.float32)
zeros = np.zeros_like(x)
masks = {"a": x > 0, "b": np.ones(1, np.uint8)}
stats = pyrlstats.slice_stats(x, zeros, masks)
accumulator = pyrlstats.SliceAccumulator(["a", "b"]).update(x, zeros, masks).merge(stats)
total = accumulator.compute() + stats
assert int(total["b"].n_tokens) == 303
assert float(total["b"].quantile(1.0)) == 1.0
assert total["b"].quantile_bounds([0.1, 0.5])[0].shape == (2,)
assert float(total["a"].cdf(0.0)) == 0.0
assert float(total["b"].tail_mass(0.0)) == 300 / 303
ids = pyrlstats.slice_stats(x, zeros, slice_ids=(x > 0).astype(np.int8), names=["n", "p"])
assert int(ids["p"].n_tokens) == 50


class Capsule:
    def __dlpack__(self, **options):
        return x.__dlpack__(**options)

    def __dlpack_device__(self):
        return x.__dlpack_device__()


assert int(pyrlstats.slice_stats(Capsule(), zeros)["all"].n_tokens) == 101
accumulator.reset()
print(len(total.to_dict("p/")), len(repr(total)), len(total._repr_html_()), pyrlstats.build_info()["version"])
"""
    )
    assert output.split()[-1] == pyrlstats.__version__


def test_public_names_and_types():
    package = Path(pyrlstats.__file__).parent
    assert (package / "py.typed").exists()
    assert set(pyrlstats.__all__) >= {
        "slice_stats",
        "SliceStats",
        "SliceAccumulator",
        "Layout",
        "build_info",
        "__version__",
    }
    for name in pyrlstats.__all__:
        public = getattr(pyrlstats, name)
        if inspect.isfunction(public):
            functions = {name: public}
        elif inspect.isclass(public):
            functions = {
                key: one for key, one in vars(public).items() if inspect.isfunction(one) and not key.startswith("_")
            }
        else:
            continue
        for key, function in functions.items():
            signature = inspect.signature(function)
            assert signature.return_annotation is not signature.empty, f"{name}.{key}"
            untyped = [one.name for one in signature.parameters.values() if one.annotation is one.empty]
            assert untyped in ([], ["self"], ["cls"]), f"{name}.{key}"
            assert function.__doc__, f"{name}.{key}"


def test_a_slice_asked_for_as_an_attribute():
    stats = pyrlstats.slice_stats(np.ones(3, np.float32), np.zeros(3, np.float32), {"late": np.ones(3)})
    with pytest.raises(AttributeError, match=re.escape("no attribute 'late': slices are items, ['late']")):
        stats.late  # noqa: B018
    assert not hasattr(stats, "other")


def test_hints_at_statistics():
    stats = pyrlstats.slice_stats(np.ones(3, np.float32), np.zeros(3, np.float32), {"late": np.ones(3)})
    with pytest.raises(AttributeError, match=re.escape("'ess_fracton': did you mean 'ess_fraction'?")):
        stats["late"].ess_fracton  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'quite_other'$"):
        stats["late"].quite_other  # noqa: B018
    with pytest.raises(AttributeError, match=re.escape("choose a slice first, ['late'].ess_fraction")):
        stats.ess_fraction  # noqa: B018
    with pytest.raises(AttributeError, match="sequence_ess_fraction was not asked for: sequences=True or cu_seqlens"):
        stats["late"].sequence_ess_fraction  # noqa: B018
    assert copy.copy(stats["late"]).n_tokens == 3
