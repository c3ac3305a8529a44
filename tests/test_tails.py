"""The tail of a slice: k-hat and Hill's estimator against other code and the definition, and its top tokens."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrlstats.backends import flat
from pyrlstats.slices import Slices
from pyrlstats.tails import REASONS, TailShape, k_threshold, reference, tail_shape, tail_size, tokens, top_tokens

sys.path.insert(0, str(Path(__file__).parent))
samples: Any = importlib.import_module("tail_samples")

# by arviz 0.23.4: tests/tail_samples.py prints them
ARVIZ_K = {
    ("normal", 1000): 0.31408,
    ("normal", 10000): 0.32949,
    ("normal", 100000): 0.29476,
    ("normal", 1000000): 0.24070,
    ("t3", 1000): 0.21201,
    ("t3", 10000): 0.41849,
    ("t3", 100000): 0.55952,
    ("t3", 1000000): 0.54957,
    ("t2", 1000): 0.80421,
    ("t2", 10000): 0.69154,
    ("t2", 100000): 1.02234,
    ("t2", 1000000): 1.38796,
    ("laplace", 1000): 0.78742,
    ("laplace", 10000): 0.80006,
    ("laplace", 100000): 0.81818,
    ("laplace", 1000000): 0.85671,
    ("bfloat16 of -1.5", 1000): 0.05221,
    ("bfloat16 of -1.5", 10000): -0.32447,
    ("bfloat16 of -1.5", 100000): -0.22519,
    ("bfloat16 of -1.5", 1000000): -0.14473,
    ("bfloat16 of -0.3", 1000): -0.32611,
    ("bfloat16 of -0.3", 10000): -0.01497,
    ("bfloat16 of -0.3", 100000): -0.18845,
    ("bfloat16 of -0.3", 1000000): -0.14267,
}
KINDS = ("numpy", "torch")


def shape_of(x: Any, kind: str = "numpy", **options: Any) -> TailShape:
    x = np.asarray(x, np.float32)
    if kind == "numpy":
        return tail_shape(x, np.zeros_like(x), **options)
    masks = options.pop("masks", None)
    if masks is not None:
        options["masks"] = {name: torch.from_numpy(mask) for name, mask in masks.items()}
    return tail_shape(torch.from_numpy(x), torch.zeros(x.shape), **options)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the way of a GPU's: whole tensors, no boolean index."""
    monkeypatch.setattr(flat, "in_host_memory", lambda _: False)


# ---- k-hat


@pytest.mark.parametrize(("kind", "n"), list(ARVIZ_K))
def test_k_hat_is_that_of_arviz(kind: str, n: int) -> None:
    view = shape_of(samples.sample(kind, n))["all"]
    assert float(view.pareto_k) == pytest.approx(ARVIZ_K[kind, n], abs=1e-5)
    assert view.reason == ""
    assert float(shape_of(samples.sample(kind, n), "torch")["all"].pareto_k) == pytest.approx(view.pareto_k, abs=1e-9)
    if kind in samples.LATTICES and n > 1000:
        assert int(view.n_tail) < tail_size(n)  # ties with the cutoff are outside


@pytest.mark.parametrize("n", samples.SIZES)
@pytest.mark.parametrize("kind", samples.CONTINUOUS)
def test_k_hat_is_that_of_arviz_stats(kind: str, n: int) -> None:
    """It rounds the size of the tail down, which is seen in the second digit where there are 1000 tokens."""
    arviz = pytest.importorskip("arviz_stats.base", reason="arviz-stats is not installed: it needs Python 3.11")
    x = samples.sample(kind, n)
    wanted = float(arviz.array_stats.psislw(-x.astype(np.float64))[1])
    down = math.floor(min(n / 5, 3 * math.sqrt(n)))
    same = reference.pareto_k(x.astype(np.float64), down)
    assert same == pytest.approx(wanted, abs=1e-6 if len(set(x)) == n else 0.01)
    if n > 1000:
        assert float(shape_of(x)["all"].pareto_k) == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize("kind", [*samples.CONTINUOUS, *samples.LATTICES])
@pytest.mark.parametrize("n", [25, 30, 225, 226, 1000, 10_000])
def test_the_estimators_are_those_of_the_definition(kind: str, n: int) -> None:
    x = samples.sample(kind, n)
    view = shape_of(x)["all"]
    wide = x.astype(np.float64)
    np.testing.assert_allclose(float(view.pareto_k), reference.pareto_k(wide), atol=1e-9)
    np.testing.assert_allclose([float(view.hill), float(view.hill_se)], reference.hill(wide), rtol=1e-9)
    assert float(view.cutoff) == np.sort(wide)[-tail_size(n) - 1]
    assert int(view.n_tail) == np.count_nonzero(wide > float(view.cutoff))


@settings(max_examples=60, deadline=None)
@given(
    x=st.lists(st.floats(-3000, 3000, width=32), min_size=0, max_size=200),
    grid=st.sampled_from([0.0, 1.0, 0.25, 100.0]),
)
def test_any_tokens(x: list[float], grid: float) -> None:
    values = np.array(x, np.float32)
    values = np.round(values / np.float32(grid)) * np.float32(grid) if grid else values
    view = shape_of(values)["all"]
    with np.errstate(all="ignore"):
        wanted = reference.pareto_k(values.astype(np.float64)) if values.size else math.nan
    if math.isfinite(wanted):
        assert float(view.pareto_k) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    else:
        assert math.isnan(view.pareto_k)
        assert view.reason in REASONS[1:]


def test_a_tail_of_a_known_index(rng: np.random.Generator) -> None:
    """Weights whose tail is a power law with k = 1 / alpha: log w is exponential with mean k."""
    for k in (0.3, 0.7, 1.2):
        view = shape_of(rng.exponential(k, 1_000_000))["all"]
        assert float(view.pareto_k) == pytest.approx(k, abs=0.2)
        assert abs(float(view.hill) - k) < 5 * float(view.hill_se)
        assert float(view.hill_se) == pytest.approx(float(view.hill) / math.sqrt(tail_size(1_000_000)))


def test_the_scale_of_the_weights_does_not_matter(rng: np.random.Generator) -> None:
    x = (rng.integers(-200, 200, 5000) / 64).astype(np.float32) + rng.standard_exponential(5000).astype(np.float32)
    x = np.round(x * 1024) / 1024  # sums below are exact
    wanted = float(shape_of(x)["all"].pareto_k)
    for shift in (-4000.0, -300.0, 300.0, 5000.0):
        assert float(shape_of(x + np.float32(shift))["all"].pareto_k) == pytest.approx(wanted, abs=1e-9)


REASONED = {
    "empty": ([], [np.nan], [np.inf, -np.inf]),
    "too_few": ([1.0], list(range(20)), [*range(20), np.nan, np.inf]),
    "all_equal": ([0.0] * 1000, [5000.0] * 30, [0.0, -0.0] * 100, [*range(100), *[100.0] * 60]),
    "ties": ([0.0] * 996 + [1.0, 2.0, 3.0, 4.0],),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", REASONED)
def test_nan_and_a_reason_where_it_is_undefined(reason: str, kind: str) -> None:
    for x in REASONED[reason]:
        shape = shape_of(x, kind)
        assert math.isnan(shape["all"].pareto_k)
        assert shape["all"].reason == reason
        assert shape.reasons() == {"all": reason}
        assert math.isnan(shape["all"].hill) == (reason != "ties")


def test_one_huge_weight_among_equal_ones_is_no_infinite_k() -> None:
    shape = shape_of([0.0] * 9999 + [30.0])
    assert shape.reasons() == {"all": "ties"}
    assert int(shape["all"].n_tail) == 1


def test_weights_that_float64_cannot_hold_beside_each_other() -> None:
    """Tails beside one weight that is larger by a factor near 1e308, the largest number there is."""
    x = np.concatenate((np.full(900, -1000.0), np.linspace(-708.2, -707.9, 99), [0.0]))
    view = shape_of(x)["all"]
    assert (view.reason, math.isnan(view.pareto_k)) == ("range", True)
    assert float(view.hill) > 0
    x[:-1] -= 100.0  # now they vanish beside it
    assert shape_of(x)["all"].reason == "ties"
    assert float(shape_of(np.linspace(-50_000, -40_000, 1000))["all"].pareto_k) > 100


def test_fits_of_equal_exceedances_pass_through_the_exponential_limit() -> None:
    """A grid point of the fit is 0 exactly where a tail of 100 tokens is one value: 0 / 0 elsewhere."""
    x = np.repeat(np.float32([0.0, 1.0]), [1012, 100])
    view = shape_of(x)["all"]
    assert int(view.n_tail) == 100
    assert tail_size(x.size) == 101
    assert float(view.pareto_k) == pytest.approx(reference.pareto_k(x.astype(np.float64)))
    assert float(view.pareto_k) < -1


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_apart_and_masked_tokens_take_no_part(kind: str, rng: np.random.Generator) -> None:
    x = samples.sample("t3", 20_000)
    masks = {"most": rng.random(x.size) < 0.9, "few": rng.random(x.size) < 0.01, "none": np.zeros(x.size, bool)}
    hidden = np.where(masks["most"] | masks["few"], x, np.nan)
    shape = shape_of(hidden, kind, masks=masks)
    for name in ("most", "few"):
        assert float(shape[name].pareto_k) == pytest.approx(reference.pareto_k(x[masks[name]].astype(float)), abs=1e-9)
        assert int(shape[name].n_finite) == masks[name].sum()
    assert shape.reasons() == {"none": "empty"}
    ids = np.where(masks["few"], 1, np.where(masks["most"], 0, -1)).astype(np.int8)
    by_id = tail_shape(x, 0 * x, Slices(ids, ["most", "few"]), mask=x < 1)
    for index, name in enumerate(by_id):
        inside = (ids == index) & (x < 1)
        assert float(by_id[name].pareto_k) == pytest.approx(reference.pareto_k(x[inside].astype(float)), abs=1e-9)


@pytest.mark.parametrize("kind", [*samples.CONTINUOUS, *samples.LATTICES, "equal", "none"])
def test_the_way_of_a_device_is_the_same(kind: str, rng: np.random.Generator, on_a_device: None) -> None:
    x = {"equal": np.zeros(999, np.float32), "none": np.zeros(0, np.float32)}.get(kind)
    x = samples.sample(kind, 10_000) if x is None else x
    x[::50] = np.nan
    inside = rng.random(x.size) < 0.8
    there = shape_of(x, "torch", masks={"some": inside})
    kept = x[inside & np.isfinite(x)]
    assert there.n.tolist() == [kept.size]
    np.testing.assert_array_equal(there.largest[0, : kept.size], np.sort(kept)[::-1][: there.capacity])
    if kept.size:
        np.testing.assert_allclose(there.pareto_k[0], reference.pareto_k(kept.astype(float)), atol=1e-9)


# ---- pooling, capacity, sample size


@pytest.mark.parametrize("kind", KINDS)
def test_parts_merge_to_the_whole_exactly(kind: str, rng: np.random.Generator) -> None:
    x = samples.sample("bfloat16 of -1.5", 10_000)
    whole = shape_of(x, kind)
    parts = [shape_of(part, kind, capacity=whole.capacity) for part in np.split(x, [1, 50, 7000])]
    for order in (parts, parts[::-1]):
        pooled = sum(order)
        assert isinstance(pooled, TailShape)
        np.testing.assert_array_equal(pooled.largest, whole.largest)
        assert pooled.to_dict() == whole.to_dict()


def test_what_does_not_merge() -> None:
    one = shape_of(np.arange(100))
    with pytest.raises(ValueError, match=r"different capacity cannot be merged: 21 and 41; give both capacity="):
        one + shape_of(np.arange(200))
    with pytest.raises(ValueError, match="different names"):
        one + shape_of(np.arange(100), names=["b"])
    with pytest.raises(ValueError, match="different sample_size"):
        one + shape_of(np.arange(100), capacity=21, sample_size=50)
    with pytest.raises(ValueError, match="None and cpu"):
        one + shape_of(np.arange(100), "torch")
    with pytest.raises(TypeError, match="merge takes TailShape, got int"):
        one.merge(3)  # type: ignore[arg-type]


def test_a_capacity_that_is_too_small_is_said() -> None:
    shape = shape_of(np.arange(1000), capacity=50)
    assert shape.reasons() == {"all": "capacity"}
    assert math.isnan(shape["all"].hill)
    assert math.isnan(shape["all"].cutoff)
    assert shape_of(np.arange(1000), capacity=96).reasons() == {}
    assert shape_of(np.arange(40), capacity=5000).reasons() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_size_too_small_for_a_tail(kind: str) -> None:
    for size in (1, 4, 20):
        assert shape_of(np.arange(1000), kind, sample_size=size).reasons() == {"all": "too_few"}


def test_one_sample_size_looks_at_one_share_of_the_tokens() -> None:
    """k-hat of t2 log-ratios grows with n, but hardly at a fixed share."""
    found, fixed = [], []
    for n in (10_000, 1_000_000):
        x = samples.sample("t2", n)
        found.append(float(shape_of(x)["all"].pareto_k))
        view = shape_of(x, sample_size=10_000)["all"]
        fixed.append(float(view.pareto_k))
        assert int(view.n_tail) == pytest.approx(0.03 * n, abs=1)
        assert fixed[-1] == pytest.approx(reference.pareto_k(x.astype(float), int(0.03 * n)), abs=1e-9)
    assert found[1] > found[0] + 0.4
    assert abs(fixed[1] - fixed[0]) < 0.25


def test_thresholds() -> None:
    assert tail_size(1000) == 95
    assert [tail_size(n) for n in (0, 20, 21, 225, 226)] == [0, 4, 5, 45, 46]
    assert [reference.tail_size(n) for n in range(3000)] == [tail_size(n) for n in range(3000)]
    assert k_threshold(100) == 0.5
    assert k_threshold(10**6) == 0.7
    with pytest.raises(ValueError, match="n must be at least 2"):
        k_threshold(1)


def test_numbers_for_a_logger() -> None:
    x = samples.sample("laplace", 1000)
    numbers = tail_shape(x, 0 * x, {"a": x == x, "b": x > 100}).to_dict("tail/")
    assert list(numbers)[:5] == [f"tail/a/{name}" for name in ("pareto_k", "hill", "hill_se", "n_tail", "tail_cutoff")]
    assert numbers["tail/a/n_tail"] == 95
    assert math.isnan(numbers["tail/b/pareto_k"])
    assert all(type(value) in (int, float) for value in numbers.values())
    with pytest.raises(KeyError, match=r"no slice 'c'; there are \['all'\]"):
        shape_of(x)["c"]
    assert "too_few" in repr(shape_of(x[:3]))


@pytest.mark.parametrize("name", ["capacity", "sample_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_bad_sizes(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer or None"):
        shape_of([1.0], **{name: value})


# ---- top tokens


def by_hand(x: np.ndarray, inside: np.ndarray, k: int) -> list[tuple[float, int]]:
    flat = [
        (-abs(float(v)), i, float(v)) for i, v in enumerate(x.reshape(-1)) if inside.reshape(-1)[i] and np.isfinite(v)
    ]
    return [(v, i) for _, i, v in sorted(flat)[:k]]


@pytest.mark.parametrize("way", ["numpy", "torch", "device"])
@pytest.mark.parametrize("kind", ["t3", "bfloat16 of -0.3", "equal", "zeros", "odd"])
@pytest.mark.parametrize("k", [1, 7, 400])
def test_top_tokens_are_those_of_a_sort(
    way: str, kind: str, k: int, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    if way == "device":
        request.getfixturevalue("on_a_device")
    made = {
        "equal": np.full(300, -0.5, np.float32),
        "zeros": np.float32([0.0, -0.0] * 150),
        "odd": rng.choice(np.float32([np.nan, np.inf, -np.inf, 2.0, -2.0, 1e-45, 0.0]), 300),
    }.get(kind)
    x = (samples.sample(kind, 1000)[:300] if made is None else made).reshape(20, 15)
    masks = {"some": rng.random(x.shape) < 0.7, "none": np.zeros(x.shape, bool)}
    if way == "numpy":
        found = top_tokens(x, np.zeros_like(x), masks, k)
    else:
        there = {name: torch.from_numpy(mask) for name, mask in masks.items()}
        found = top_tokens(torch.from_numpy(x), torch.zeros(x.shape), there, k)
    wanted = by_hand(x, masks["some"], k)
    rows = found["some"].rows()
    assert [(row["value"], row["index"]) for row in rows] == wanted
    assert all((row["sequence"], row["position"]) == divmod(row["index"], 15) for row in rows)
    assert {row["rank"] for row in rows} == {0}
    assert found["none"].rows() == []
    for name, top in found.items():
        beyond = len(top.rows())
        assert [tuple(column.shape) for column in top] == [(k,)] * 5
        assert np.isnan(np.asarray(top.value)[beyond:]).all(), name
        assert all((np.asarray(column)[beyond:] == -1).all() for column in top[1:])


def test_blocks_of_a_tensor_keep_the_order(on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than have a place beside abs(x) in one integer."""
    monkeypatch.setattr(tokens, "_BLOCK", 7)
    x = torch.tensor([1.0, -3, 2, 3, 3, -3, 0, 3, 5, -3])
    found = top_tokens(x, torch.zeros(10), None, 6)["all"]
    assert found.index.tolist() == [8, 1, 3, 4, 5, 7]
    assert found.value.tolist() == [5, -3, 3, 3, -3, 3]
    assert top_tokens(x[:0], x[:0], None, 2)["all"].rows() == []


@pytest.mark.parametrize("way", ["list", "numpy", "torch", "device"])
@pytest.mark.parametrize("flat", [True, False])
def test_places_in_a_packed_batch(way: str, flat: bool, request: pytest.FixtureRequest) -> None:
    if way == "device":
        request.getfixturevalue("on_a_device")
    x = np.float32([1, 2, 3, 4, 5, 6, 7])
    boundaries: Any = [0, 3, 3, 5]  # an empty sequence, and two tokens beyond
    given_x, old = (x, 0 * x) if way == "numpy" else (torch.from_numpy(x), torch.zeros(7))
    boundaries = boundaries if way == "list" else np.array(boundaries) if way == "numpy" else torch.tensor(boundaries)
    if not flat:
        given_x, old = given_x[None], old[None]
    found = top_tokens(given_x, old, None, 8, cu_seqlens=boundaries)["all"]
    rows = found.rows()
    assert [(row["index"], row["sequence"], row["position"]) for row in rows] == [
        (6, 3, 1),
        (5, 3, 0),
        (4, 2, 1),
        (3, 2, 0),
        (2, 0, 2),
        (1, 0, 1),
        (0, 0, 0),
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: top_tokens(x, x, None, 0), "k must be a positive integer, got 0"),
        (lambda x: top_tokens(x, x, None, True), "k must be a positive integer, got True"),
        (lambda x: top_tokens(x, x, None, 2, cu_seqlens=[0, 2]), r"cu_seqlens needs packed tokens .*\(2, 3\)"),
        (lambda x: top_tokens(x[0], x[0], None, 2, cu_seqlens=np.zeros((2, 2), int)), "one-dimensional"),
        (lambda x: top_tokens(x, x[0], None), "old_logp must have logp's shape"),
    ],
)
def test_what_top_tokens_refuse(call: Callable[[np.ndarray], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.zeros((2, 3), np.float32))


def test_a_single_number() -> None:
    one = top_tokens(np.array(-2.0, np.float32), np.zeros((), np.float32))["all"].rows()
    assert one == [{"value": -2.0, "index": 0, "sequence": 0, "position": 0, "rank": 0}]
    assert tail_shape(np.zeros((), np.float32), np.zeros((), np.float32)).reasons() == {"all": "too_few"}
