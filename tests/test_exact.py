"""Exact quantiles against a sort, to the bit, on every engine and over ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyrlstats import Layout, exact, exact_quantiles, reference, slice_stats, values
from pyrlstats._inputs import gate
from pyrlstats.backends import cpp, digits, flat
from pyrlstats.slices import Slices
from pyrlstats.windows import DecayedStats

Q = [0.0, 0.001, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0]
ENGINES = ("cpp", "torch", "reference")
SHAPES = ("numpy", "torch")


def sorted_quantiles(x: np.ndarray, q: list[float], absolute: bool = False) -> list[float]:
    """The definition, with a zero that is positive."""
    finite = x[np.isfinite(x)].astype(np.float64)
    finite = (np.abs(finite) if absolute else finite) + 0.0
    return [reference.quantile(finite, one) for one in q]


def same_bits(got: Any, wanted: list[float]) -> bool:
    mine = [struct.pack("<d", value) for value in np.asarray(got).tolist()]
    theirs = [struct.pack("<d", value) for value in wanted]
    return mine == theirs or (np.isnan(got).all() and np.isnan(wanted).all())


def data(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "bits":
        return rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    if kind == "wide":
        return (rng.standard_normal(n) * 10.0 ** rng.uniform(-44, 37, n)).astype(np.float32)
    if kind == "equal":
        return np.full(n, -0.0123, np.float32)
    if kind == "zeros":
        return np.where(rng.random(n) < 0.5, -0.0, 0.0).astype(np.float32)
    if kind == "subnormal":
        return rng.integers(-50, 50, n).astype(np.int32).astype(np.float32) * np.float32(1.4e-45)
    if kind == "lattice":
        return torch.from_numpy(rng.normal(0, 0.05, n).astype(np.float32)).bfloat16().float().numpy()
    if kind == "outside":  # beyond both ends of the default window
        return np.where(rng.random(n) < 0.5, rng.normal(0, 1e-9, n), rng.normal(0, 1e5, n)).astype(np.float32)
    if kind == "infinite":
        return rng.choice(np.array([-np.inf, np.inf, np.nan, 1.0, -2.0], np.float32), n)
    return (0.01 * rng.standard_t(3, n)).astype(np.float32)


KINDS = ("t3", "bits", "wide", "equal", "zeros", "subnormal", "lattice", "outside", "infinite")


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 1000, 20_011])
def test_equal_to_a_sort_to_the_bit(
    backend: str, kind: str, n: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", backend)
    if backend == "torch":  # the way of a GPU, which asks for no value
        monkeypatch.setattr(flat, "in_host_memory", lambda _: False)
    x = data(kind, n, rng)
    masks = {"all": np.ones(n, bool), "some": rng.random(n) < 0.3, "none": np.zeros(n, bool)}
    give = torch.from_numpy if backend == "torch" else np.asarray
    given_masks = {name: give(mask) for name, mask in masks.items()}
    for absolute in (False, True):
        got = exact_quantiles(give(x), give(np.zeros_like(x)), given_masks, Q, absolute=absolute)
        assert list(got) == list(masks)
        for name, mask in masks.items():
            assert same_bits(got[name], sorted_quantiles(x[mask], Q, absolute)), (name, absolute)


class Alone:
    """The only rank of a world."""

    def sum(self, integers: Any) -> Any:
        return integers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absolute", [False, True])
def test_rounds_on_a_device(
    kind: str, absolute: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ranks to ask, a device does not sort once but counts in rounds."""
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    monkeypatch.setattr(flat, "in_host_memory", lambda _: False)
    x = data(kind, 3000, rng)
    masks = {"all": np.ones(x.size, bool), "some": rng.random(x.size) < 0.3, "none": np.zeros(x.size, bool)}
    tensors = [torch.from_numpy(x), torch.zeros(x.size), {name: torch.from_numpy(mask) for name, mask in masks.items()}]
    batch = gate(*tensors, None, None, tuple(masks))
    state = slice_stats(*tensors).state
    got = exact._values(batch, state, Q, absolute, Alone(), None)
    for row, mask in zip(got, masks.values(), strict=True):
        assert same_bits(row, sorted_quantiles(x[mask], Q, absolute))


@given(
    bits=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=40),
    q=st.floats(0.0, 1.0),
    absolute=st.booleans(),
    backend=st.sampled_from(ENGINES),
    layout=st.sampled_from([Layout(), Layout(0, -126, 2), Layout(10, -1, 1), Layout(3, 100, 128 - 12)]),
)
def test_any_bits_and_any_layout(bits: list[int], q: float, absolute: bool, backend: str, layout: Layout) -> None:
    x = np.array(bits, np.uint32).view(np.float32)
    give = torch.from_numpy if backend == "torch" else np.asarray
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYRLSTATS_BACKEND", backend)
        logp, old_logp = give(x), give(np.zeros_like(x))
        stats = slice_stats(logp, old_logp, layout=layout)
        got = exact_quantiles(logp, old_logp, None, q, stats=stats, absolute=absolute)["all"]
    assert same_bits([float(got)], sorted_quantiles(x, [q], absolute))


@pytest.mark.parametrize("isa", cpp.instruction_sets())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_instruction_sets_and_threads(
    isa: str, threads: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYRLSTATS_ISA", isa)
    x = data("wide", 700_001, rng)
    ids = rng.integers(-1, 4, x.size)
    got = exact_quantiles(
        x, np.zeros_like(x), None, Q, slice_ids=ids, names=["a", "b", "c"], mask=x > -1, num_threads=threads
    )
    for index, name in enumerate("abc"):
        assert same_bits(got[name], sorted_quantiles(x[(ids == index) & (x > -1)], Q))


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("old", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_masks_and_strides(
    backend: str, new: torch.dtype, old: torch.dtype, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", backend)
    logp = torch.from_numpy(rng.normal(-2, 1, (60, 70))).to(new)[:, ::2].T
    old_logp = torch.from_numpy(rng.normal(-2, 1, (35, 60))).to(old)
    keep = torch.from_numpy(rng.integers(0, 3, 60).astype(np.int16))
    rows = torch.from_numpy(rng.random((35, 1)).astype(np.float32)).round()
    wide = torch.float64 if torch.float64 in (new, old) else torch.float32
    x = (logp.to(wide) - old_logp.to(wide)).float().numpy()
    got = exact_quantiles(logp, old_logp, {"keep": keep, "rows": rows}, Q, mask=keep < 2)
    for name, mask in (("keep", keep), ("rows", rows)):
        member = np.broadcast_to(((mask != 0) & (keep < 2)).numpy(), x.shape)
        assert same_bits(got[name], sorted_quantiles(x[member], Q))
        assert got[name].dtype == torch.float64


def test_slice_ids_of_every_dtype_and_a_family() -> None:
    x = np.arange(8, dtype=np.float32)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        ids = np.array([0, 1, 1, 0, 100, 1, 0, 0]).astype(dtype)
        for give in (np.asarray, torch.from_numpy):
            got = exact_quantiles(give(x), give(0 * x), None, 0.5, slice_ids=give(ids), names=["a", "b"])
            assert [float(value) for value in got.values()] == [3.0, 2.0]
    family = Slices(np.int8([0, 1, 1, 0, -1, 1, 0, 0]), ["a", "b"])
    assert exact_quantiles(x, 0 * x, family, 1.0) == {"a": 7.0, "b": 5.0}


def test_other_statistics_give_nan_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    monkeypatch.setattr(flat, "in_host_memory", lambda _: False)
    x = torch.linspace(-1, 1, 100)
    stats = slice_stats(x, torch.zeros(100))
    assert math.isnan(exact_quantiles(x[1:], torch.zeros(99), None, 0.5, stats=stats)["all"])


def test_more_slices_than_bits_in_a_word(rng: np.random.Generator) -> None:
    x = data("t3", 5000, rng)
    masks = {f"m{index}": rng.random(x.size) < 0.02 * index for index in range(70)}
    for name, found in exact_quantiles(x, 0 * x, masks, [0.5, 0.99]).items():
        assert same_bits(found, sorted_quantiles(x[masks[name]], [0.5, 0.99]))


def test_shapes_of_the_result_are_those_of_q() -> None:
    x = np.arange(1, 11, dtype=np.float32)
    single = exact_quantiles(x, 0 * x, None, 0.5)["all"]
    assert (single.shape, single.dtype, float(single)) == ((), np.float64, 5.0)
    several = exact_quantiles(torch.from_numpy(x), torch.zeros(10), None, (0.1, 0.11))["all"]
    assert (several.shape, several.dtype, several.tolist()) == ((2,), torch.float64, [1.0, 2.0])
    assert exact_quantiles(x, 0 * x, None, [])["all"].shape == (0,)
    assert math.isnan(exact_quantiles(x[:0], x[:0], None, 0.5)["all"])


def test_no_interpolation_between_the_points_of_a_lattice() -> None:
    """Where the quantile of the histogram lies between two values, this one is a value."""
    x = torch.tensor([0.0078125, 0.00793457]).bfloat16().float().repeat(500)
    assert float(exact_quantiles(x, torch.zeros_like(x), None, 0.5)["all"]) in x.tolist()
    assert float(slice_stats(x, torch.zeros_like(x))["all"].quantile(0.4)) not in x.tolist()


def test_within_the_bounds_of_the_histogram(rng: np.random.Generator) -> None:
    x = data("t3", 50_000, rng)
    stats = slice_stats(x, 0 * x)
    lo, hi = stats["all"].quantile_bounds(Q)
    exact = exact_quantiles(x, 0 * x, None, Q, stats=stats)["all"]
    assert ((lo <= exact) & (exact <= hi)).all()


def test_given_statistics_save_a_pass_and_must_be_of_these_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.linspace(-1, 1, 1001, dtype=np.float32)
    stats = slice_stats(x, 0 * x)
    calls = []
    count = digits.count
    monkeypatch.setattr(digits, "count", lambda *args: calls.append(args) or count(*args))
    with monkeypatch.context() as patch:
        patch.setattr("pyrlstats._dispatch.accumulate", lambda *_: pytest.fail("a first pass"))
        assert float(exact_quantiles(x, 0 * x, None, 0.75, stats=stats)["all"]) == 0.5
    assert len(calls) == 2  # 18 bits inside a bin, 11 at a time
    for other in (x[:700], 2 * x):
        with pytest.raises(ValueError, match="stats must be those of these tokens"):
            exact_quantiles(other, 0 * other, None, [0.1, 0.75], stats=stats)
    as_tensors = exact_quantiles(torch.from_numpy(x), torch.zeros(1001), None, 0.75, stats=stats)["all"]
    assert isinstance(as_tensors, torch.Tensor)
    assert float(exact_quantiles(x, 0 * x, None, 0.75, stats=stats.to("cpu"))["all"]) == 0.5


def test_given_statistics_may_hold_groups(rng: np.random.Generator) -> None:
    x = data("t3", 1000, rng).reshape(10, 100)
    stats = slice_stats(x, 0 * x, sequences=True, entropy=True, advantages=x)
    for given_stats in (stats, stats.to("cpu")):
        assert same_bits(exact_quantiles(x, 0 * x, None, Q, stats=given_stats)["all"], sorted_quantiles(x, Q))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: exact_quantiles(x, x, None, 1.5), ValueError, "q must lie in"),
        (lambda x: exact_quantiles(x, x[:2], None, 0.5), ValueError, "old_logp must have logp's shape"),
        (lambda x: exact_quantiles(x, x, {"a": x[:2]}, 0.5), ValueError, "mask of slice 'a' must broadcast"),
        (
            lambda x: exact_quantiles(x, x, None, 0.5, stats=slice_stats(x, x, {"a": x})),
            ValueError,
            r"stats .* \['all'\]",
        ),
        (lambda x: exact_quantiles(x, x, None, 0.5, stats={}), TypeError, "stats must be SliceStats, got dict"),
        (
            lambda x: values.exact_quantiles(x, None, 0.5, stats=slice_stats(x, x)),
            TypeError,
            "stats must be ValueStats",
        ),
        (lambda x: exact_quantiles(x, x, None, 0.5, num_threads=0), ValueError, "num_threads must be a positive"),
        (lambda x: exact_quantiles(x, x, None, 0.5, group=object()), RuntimeError, "needs a process group"),
        (
            lambda x: exact_quantiles(x, x, None, 0.5, stats=DecayedStats(0.9).push(slice_stats(x, x))),
            TypeError,
            "stats must be SliceStats, got DecayedStats",
        ),
    ],
)
def test_errors(call: Callable[[np.ndarray], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(np.zeros(5, np.float32))


def test_values(rng: np.random.Generator) -> None:
    rewards = np.array([0, 1, 1, 0, 1, 1], np.int64)
    assert float(values.exact_quantiles(rewards, None, 0.5)["all"]) == 1.0
    lengths = torch.from_numpy(rng.integers(1, 100_000, 999))
    late = torch.arange(999) > 500
    stats = values.value_stats(lengths, {"late": late})
    got = values.exact_quantiles(lengths, {"late": late}, [0.5, 0.99], stats=stats)["late"]
    assert got.tolist() == sorted_quantiles(lengths[late].numpy(), [0.5, 0.99])
    wide = rng.normal(0, 1e30, 100)  # float64 is rounded to float32 once
    assert values.exact_quantiles(wide, None, Q)["all"].tolist() == sorted_quantiles(wide.astype(np.float32), Q)
    assert math.isnan(values.exact_quantiles(np.array([np.nan]), None, 0.5)["all"])


def test_keys_order_as_values_do(rng: np.random.Generator) -> None:
    x = np.sort(np.concatenate((data("bits", 1000, rng), data("wide", 1000, rng))))
    x = x[np.isfinite(x)]
    key = digits.key_of(x, False)
    assert (np.diff(key.astype(np.int64)) >= 0).all()
    np.testing.assert_array_equal(digits.value_of(key), x.astype(np.float64))
    assert digits.DIGITS == cpp._core.DIGITS
