"""Any way of cutting tokens into micro-batches, ranks and steps gives the same statistics; sizes of what is sent."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import promises
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import pyrlstats
from pyrlstats import Layout, SliceAccumulator, SliceStats
from pyrlstats.backends import tokens, torch_ops
from pyrlstats.state import words_of

NAMES = ("a", "b")

log_ratios = arrays(
    np.float32,
    st.integers(0, 40),
    elements=st.one_of(
        st.sampled_from([0.0, -0.0, 5000.0, -5000.0, -300.0, 0.5, -0.5, 1e-40, np.inf, -np.inf, np.nan]),
        st.floats(-1.0, 1.0, width=32),
        st.floats(width=32),
    ),
)


def stats_of(x: np.ndarray, member: np.ndarray) -> SliceStats:
    return SliceAccumulator(NAMES).update(x, np.zeros_like(x), {"a": member, "b": ~member}).compute()


def assert_same(got: SliceStats, wanted: SliceStats, magnitudes: SliceStats, near: float = 1e-6) -> None:
    """Integers, extrema and quantiles to the bit; sums within the promises of a single pass."""
    for part in ("counts", "histogram"):
        np.testing.assert_array_equal(getattr(got.state, part), getattr(wanted.state, part))
    np.testing.assert_array_equal(got.state.maxima, wanted.state.maxima)  # 0.0 and -0.0 are the same extremum
    numbers = got.to_dict()
    for key, value in wanted.to_dict().items():
        if "_p" in key:
            np.testing.assert_equal(numbers[key] + 0.0, value + 0.0)
    for name, bound in promises.sum_bounds(wanted.state, magnitudes.state, near, near).items():
        found, expected = promises.sum_of(got.state, name), promises.sum_of(wanted.state, name)
        with np.errstate(invalid="ignore"):
            close = np.abs(found - expected) <= bound + 1e-300
        assert (close | (found == expected)).all(), name


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_into_batches_ranks_and_order(data: st.DataObject) -> None:
    x = data.draw(log_ratios)
    member = np.array(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))), bool)
    order = np.array(data.draw(st.permutations(range(len(x)))), np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=6)))
    ranks = data.draw(st.integers(1, 4))

    accumulators = [SliceAccumulator(NAMES) for _ in range(ranks)]
    for micro_batch in np.split(order, cuts):
        accumulator = accumulators[data.draw(st.integers(0, ranks - 1))]
        part, inside = x[micro_batch], member[micro_batch]
        accumulator.update(part, np.zeros_like(part), {"b": ~inside, "a": inside})
    merged = SliceAccumulator(NAMES).merge(data.draw(st.permutations(accumulators))).compute()
    with np.errstate(invalid="ignore"):
        magnitudes = stats_of(np.abs(x), member)
    assert_same(merged, stats_of(x, member), magnitudes)


@settings(max_examples=60, deadline=None)
@given(st.lists(log_ratios, min_size=1, max_size=5), st.data())
def test_merging_in_any_order(batches: list[np.ndarray], data: st.DataObject) -> None:
    """The same states in another order or nesting: floats within 1e-12."""
    parts = [stats_of(x, x > 0) for x in batches]
    magnitudes = [stats_of(np.abs(x), x > 0) for x in batches]
    first, *rest = data.draw(st.permutations(parts))
    nested = first
    for part in rest:
        nested = part + nested
    assert_same(nested, parts[0].merge(parts[1:]), magnitudes[0].merge(magnitudes[1:]), near=1e-12)


def test_a_tree_of_1024_ranks_is_one_pass(rng: np.random.Generator) -> None:
    ranks = 1024
    sizes = rng.integers(0, 300, ranks)
    sizes[rng.random(ranks) < 0.05] = 0
    x = (rng.standard_normal(sizes.sum()) * 10.0 ** rng.uniform(-6.0, 1.0, sizes.sum())).astype(np.float32)
    x[rng.random(len(x)) < 0.001] = np.nan
    member = rng.random(len(x)) < 0.3
    shards = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    level = [stats_of(x[shard], member[shard]) for shard in shards]
    as_list = level[0].merge(level[1:])
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    magnitudes = stats_of(np.abs(x), member)
    assert_same(level[0], stats_of(x, member), magnitudes)
    assert_same(level[0], as_list, magnitudes, near=1e-12)


def test_the_order_of_adding_accumulators(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 50)).astype(np.float32)
    parts = [SliceAccumulator(["all"]).update(row, np.zeros_like(row)) for row in x]
    before = [part.compute().to_bytes() for part in parts]
    wanted = parts[0].compute().merge([part.compute() for part in parts[1:]])
    for total in (
        sum(parts),
        parts[0] + parts[1] + parts[2] + parts[3],
        parts[0].compute() + parts[1] + parts[2:3][0] + parts[3].compute(),
    ):
        assert isinstance(total, SliceAccumulator)
        assert total.compute().to_bytes() == wanted.to_bytes()
    alone = sum(parts[:1])
    assert alone is not parts[0]
    assert [part.compute().to_bytes() for part in parts] == before
    same = total = SliceAccumulator(["all"])
    for part in parts:
        total += part
    assert total is same
    assert total.compute().to_bytes() == wanted.to_bytes()
    with pytest.raises(TypeError):
        total + 1
    with pytest.raises(ValueError, match="different names"):
        total + SliceAccumulator(["other"])
    total.merge(total)
    assert total.compute()["all"].n_tokens == 400


def test_a_list_with_one_that_does_not_fit_changes_nothing() -> None:
    x = np.ones(3, np.float32)
    fits, total = (SliceAccumulator(["all"]).update(x, x) for _ in range(2))
    before = total.compute().to_bytes()
    for other in (SliceAccumulator(["all"], clip=(0.1, 0.1)), SliceAccumulator(["all"], layout=Layout(6))):
        for last in (other, other.update(x, x), other.compute()):
            with pytest.raises(ValueError, match="cannot be merged"):
                total.merge([fits, last])
            assert total.compute().to_bytes() == before


def test_an_update_that_fails_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    monkeypatch.setattr(tokens, "_BLOCK_WORDS", 8)
    x, member = torch.arange(20.0), torch.ones(20)
    accumulator = SliceAccumulator(NAMES).update(x, x * 0, [member, member])
    before = accumulator.compute().to_bytes()
    assert accumulator.compute()["a"].n_tokens == 20
    blocks = []

    def out_of_memory(*arguments: Any) -> None:
        blocks.append(fill(*arguments))
        if len(blocks) == 3:
            raise torch.OutOfMemoryError

    fill = torch_ops._fill
    monkeypatch.setattr(torch_ops, "_fill", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        accumulator.update(x, x * 0, [member, member])
    assert accumulator.compute().to_bytes() == before
    for arguments in ((x, x[1:]), (x, x, {"a": member}), (x, x, [member]), (x.int(), x), (x.to("meta"), x.to("meta"))):
        with pytest.raises((ValueError, TypeError)):
            accumulator.update(*arguments)
    assert accumulator.compute().to_bytes() == before


def test_memory_and_device_are_kept() -> None:
    accumulator = SliceAccumulator(["all"], device="cpu")
    assert accumulator._state is not None
    pointer = accumulator._state.buffer.data_ptr()
    x = torch.ones(5)
    results = []
    for _ in range(3):
        accumulator.update(x, x * 0).merge(SliceAccumulator(["all"]).update(x, x))
        results.append(accumulator.compute())
        accumulator.reset()
    assert accumulator._state.buffer.data_ptr() == pointer
    assert [int(result["all"].n_tokens) for result in results] == [10, 10, 10]  # copies
    twin = copy.deepcopy(accumulator.update(x, x))
    assert twin.update(x, x).compute()["all"].n_tokens == 10
    assert accumulator.compute()["all"].n_tokens == 5
    assert twin.device == accumulator.device
    for copied in (copy.copy(accumulator), copy.deepcopy(accumulator)):
        assert copied.reset().update(x, x).compute()["all"].n_tokens == 5
        accumulator.update(x, x)
        assert copied.compute()["all"].n_tokens == 5
    assert accumulator.compute()["all"].n_tokens == 15
    assert SliceAccumulator(["all"], device="mps").device == torch.device("cpu")  # it has no float64


@pytest.mark.parametrize(("slices", "size"), [(4, 66_208), (16, 264_832), (64, 1_059_328)])
def test_bytes_of_one_reduction(slices: int, size: int) -> None:
    """The figures of docs/streams.md."""
    assert 8 * words_of(slices, Layout()) == size
    assert pyrlstats.Layout().n_bins == 2048
