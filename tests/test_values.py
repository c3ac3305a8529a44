"""Statistics of any quantity, explained variance and reward groups, against NumPy on the values themselves."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyrlstats
from pyrlstats.values import (
    VALUE_LAYOUT,
    ValueAccumulator,
    ValueStats,
    explained_variance,
    group_reward_stats,
    value_stats,
)

KINDS = ("numpy", "torch")


def array(kind: str, values: Any, dtype: Any = None) -> Any:
    made = np.array(values, dtype)
    return made if kind == "numpy" else torch.from_numpy(made)


# value_stats


def samples(rng: np.random.Generator) -> np.ndarray:
    n = 5_000
    x = np.choose(
        rng.integers(0, 3, n), [rng.normal(3.0, 2.0, n), rng.lognormal(6.0, 2.0, n), -rng.exponential(1e-3, n)]
    )
    x[rng.random(n) < 0.1] = 0.0
    return x.astype(np.float32)


def test_statistics_are_those_of_numpy(engine: Any, rng: np.random.Generator) -> None:
    x = samples(rng)
    bad = np.array([np.nan, np.inf, -np.inf, np.inf], np.float32)
    with engine.forced():
        stats = value_stats(torch.from_numpy(np.concatenate([x, bad])))["all"]
    wide = x.astype(np.float64)
    wanted = {
        "n_values": x.size + 4,
        "n_finite": x.size,
        "n_nan": 1,
        "n_pos_inf": 2,
        "n_neg_inf": 1,
        "n_zero": np.count_nonzero(x == 0),
        "zero_fraction": np.mean(x == 0),
        "positive_fraction": np.mean(x > 0),
        "negative_fraction": np.mean(x < 0),
        "mean": wide.mean(),
        "std": wide.std(),
        "min": wide.min(),
        "max": wide.max(),
        "abs_mean": np.abs(wide).mean(),
    }
    for name, value in wanted.items():
        assert float(getattr(stats, name)) == pytest.approx(value, rel=1e-9), name
    q = [0.0, 0.01, 0.25, 0.5, 0.9, 0.999, 1.0]
    true = np.quantile(wide, q, method="inverted_cdf")
    lo, hi = (np.asarray(bound) for bound in stats.quantile_bounds(q))
    assert ((lo <= true) & (true <= hi)).all()
    assert np.abs(np.asarray(stats.quantile(q)) - true) == pytest.approx(0.0, abs=(hi - lo).max())
    lo, hi = (np.asarray(bound) for bound in stats.abs_quantile_bounds(q))
    true = np.quantile(np.abs(wide), q, method="inverted_cdf")
    assert ((lo <= true) & (true <= hi)).all()
    assert np.asarray(stats.abs_quantile(q)).shape == (7,)
    assert float(stats.cdf(0.0)) == pytest.approx(np.mean(x <= 0))
    assert float(stats.tail_mass(0.0)) == pytest.approx(np.mean(x != 0))
    assert int(stats.histogram().counts.sum()) == x.size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "dtype"),
    [([3, 7, 2**24 + 2, 0], np.int64), ([200, 3, 0, 1], np.uint8), ([True, False, True, True], bool)],
)
def test_integers_and_booleans(kind: str, values: list[int], dtype: Any) -> None:
    stats = value_stats(array(kind, values, dtype))["all"]
    assert float(stats.mean) == np.mean(values)
    assert float(stats.max) == max(values)
    assert int(stats.n_zero) == values.count(0)


@pytest.mark.parametrize("exponent", [-20, -3, 0, 10, 39])
def test_the_default_bins_resolve_magnitudes_from_2_to_the_minus_24_to_2_to_the_40(exponent: int) -> None:
    x = np.array([1.0, 1.3, 1.9], np.float32) * np.float32(2.0**exponent)
    stats = value_stats(x)["all"]
    lo, hi = stats.quantile_bounds([0.3, 0.6])
    assert (hi - lo <= 2.0**-5 * x[:2]).all()
    assert VALUE_LAYOUT.n_bins == 4096


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_have_no_spread(kind: str) -> None:
    stats = value_stats(array(kind, np.full(1000, 1e6), np.float32))["all"]
    assert float(stats.std) == 0.0
    assert float(stats.quantile(0.37)) == 1e6


def test_masked_values_take_no_part() -> None:
    x = torch.tensor([[1.0, float("nan")], [3.0, float("inf")]], requires_grad=True)
    stats = value_stats(x, {"a": torch.tensor([[1, 0], [1, 0]]), "none": torch.zeros(2, 2)}, mask=x.detach() < 2)
    assert (int(stats["a"].n_values), float(stats["a"].mean)) == (1, 1.0)
    assert int(stats["none"].n_values) == 0
    assert all(np.isnan(float(getattr(stats["none"], name))) for name in ("mean", "std", "min", "max", "zero_fraction"))


def test_slice_ids_and_what_is_out_of_range() -> None:
    stats = value_stats(np.array([1.0, 2.0, 5.0]), slice_ids=np.array([0, 1, 9]), names=["a", "b"])
    assert [float(view.mean) for view in stats.values()] == [1.0, 2.0]
    assert int(stats.n_out_of_range) == 1


def test_no_name_of_a_log_ratio_shows() -> None:
    stats = value_stats(np.array([1.0, 2.0]), {"a": np.array([1, 1])})
    keys = stats.to_dict("entropy/", abs_quantiles=(0.5,))
    assert "entropy/a/p99" in keys
    assert "entropy/a/abs_p50" in keys
    visible = [*keys, *dir(stats["a"]), repr(stats)]
    assert not [one for one in visible for word in ("ratio", "kl", "ess_", "clip", "chi2", "renyi") if word in one]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_merge_to_the_whole(kind: str, rng: np.random.Generator) -> None:
    x, mask = samples(rng), rng.random(5_000) < 0.5
    parts = [(array(kind, x[i::3]), {"a": array(kind, mask[i::3]), "b": array(kind, ~mask[i::3])}) for i in range(3)]
    whole = value_stats(array(kind, x), {"a": array(kind, mask), "b": array(kind, ~mask)})
    single = [value_stats(*part) for part in parts]
    accumulator = ValueAccumulator(["a", "b"])
    for part in parts:
        accumulator.update(*part)
    merged = ValueAccumulator(["a", "b"]).merge(single[:2]).merge(ValueAccumulator(["a", "b"]).update(*parts[2]))
    for pooled in (sum(single), single[0].merge(single[1:]), accumulator.compute(), merged.compute()):
        assert np.array_equal(np.asarray(pooled.state.counts), np.asarray(whole.state.counts))
        assert np.array_equal(np.asarray(pooled.state.histogram), np.asarray(whole.state.histogram))
        assert pooled.to_dict() == pytest.approx(whole.to_dict(), rel=1e-9)
    assert int(accumulator.reset().compute()["a"].n_values) == 0


def test_other_statistics_are_not_merged() -> None:
    x = np.array([1.0])
    with pytest.raises(ValueError, match="different layout"):
        value_stats(x).merge(value_stats(x, layout=pyrlstats.Layout()))
    with pytest.raises(TypeError):
        value_stats(x) + pyrlstats.slice_stats(x, x)


def test_copies_by_bytes_pickle_and_state_dict() -> None:
    stats = value_stats(torch.tensor([1.0, -2.0, 0.0]))
    copies = [
        ValueStats.from_bytes(stats.to_bytes()),
        pickle.loads(pickle.dumps(stats)),
        ValueStats.from_state_dict(stats.state_dict()),
        stats.to("cpu"),
    ]
    for copy in copies:
        assert isinstance(copy, ValueStats)
        assert copy.to_dict() == stats.to_dict()


def test_errors_name_the_argument_that_was_given() -> None:
    with pytest.raises(ValueError, match=r"must broadcast to x's shape \(2,\)"):
        value_stats(np.ones(2), np.ones(3))
    with pytest.raises(TypeError, match="x must have one of the dtypes"):
        value_stats(np.ones(2, np.complex64))
    with pytest.raises(TypeError, match="x must be a torch tensor"):
        value_stats([1.0, 2.0])
    with pytest.raises(KeyError, match="no slice 'b'"):
        value_stats(np.ones(2))["b"]


# explained variance


def true_explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    good = np.isfinite(values) & np.isfinite(returns)
    values, returns = values[good].astype(np.float64), returns[good].astype(np.float64)
    if values.size == 0 or np.ptp(returns) == 0:
        return float("nan")
    return float(1.0 - np.var(returns - values) / np.var(returns))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_explained_variance_by_slice(kind: str, offset: float, rng: np.random.Generator) -> None:
    n = 3_000
    returns = rng.normal(size=n) + offset
    values = returns + rng.normal(size=n) * 0.3 + 0.25
    values[0], returns[1] = np.nan, np.inf
    ids = rng.integers(-1, 2, n)
    masks = {"a": ids == 0, "b": ids == 1, "all": np.ones(n, bool), "none": np.zeros(n, bool)}
    given_ = {name: array(kind, mask) for name, mask in masks.items()}
    whole = explained_variance(array(kind, values), array(kind, returns), given_)
    cuts = [slice(0, 1), slice(1, 1000), slice(1000, None)]
    parts = [
        explained_variance(
            array(kind, values[cut]), array(kind, returns[cut]), {name: one[cut] for name, one in given_.items()}
        )
        for cut in cuts
    ]
    for got in (whole, sum(parts)):
        for name, mask in masks.items():
            want = true_explained_variance(values[mask], returns[mask])
            assert float(got[name]) == pytest.approx(want, rel=1e-9, nan_ok=True), name
        assert float(got.error_mean[2]) == pytest.approx(np.mean((returns - values)[2:]), rel=1e-6)
        assert float(got.error_std[2]) == pytest.approx(np.std((returns - values)[2:]), rel=1e-9)
        assert float(got.return_std[2]) == pytest.approx(np.std(returns[2:]), rel=1e-9)
        assert got.n_non_finite.tolist() == [int(mask[:2].sum()) for mask in masks.values()]
    by_ids = explained_variance(array(kind, values), array(kind, returns), slice_ids=array(kind, ids), names=["a", "b"])
    assert [float(by_ids[name]) for name in by_ids] == [float(whole["a"]), float(whole["b"])]
    assert whole.to_dict("critic/")["critic/a/explained_variance"] == float(whole["a"])


def test_explained_variance_of_equal_returns_and_of_good_and_bad_critics() -> None:
    returns = np.array([1.0, 2.0, 3.0])
    assert float(explained_variance(returns, returns)["all"]) == 1.0
    assert float(explained_variance(np.full(3, 7.0), returns)["all"]) == pytest.approx(0.0)
    assert float(explained_variance(-returns, returns)["all"]) == pytest.approx(-3.0)
    assert np.isnan(float(explained_variance(returns, np.full(3, 0.1))["all"]))


def on_ranks(monkeypatch: pytest.MonkeyPatch, works: list[Callable[[], Any]]) -> list[Any]:
    """What each rank's work returns, with ranks as threads and a sum between them as ``all_reduce``."""
    n = len(works)
    barrier, shared = threading.Barrier(n, timeout=60), [None] * n
    rank = threading.local()

    def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
        shared[rank.number] = tensor.clone()
        barrier.wait()
        total = sum(shared)
        barrier.wait()
        tensor.copy_(total)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def run(number: int) -> Any:
        rank.number = number
        return works[number]()

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


PARTS = (slice(0, 40), slice(40, 60), slice(60, 60))


def test_explained_variance_over_ranks_is_that_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    returns = torch.from_numpy(rng.normal(size=60) + 1e6)
    values = returns + torch.from_numpy(rng.normal(size=60))
    works = [lambda part=part: explained_variance(values[part], returns[part]).all_reduce() for part in PARTS]
    want = explained_variance(values, returns).to_dict()
    for got in on_ranks(monkeypatch, works):
        assert got.to_dict() == pytest.approx(want, rel=1e-9)


def test_groups_over_ranks_are_all_groups(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    table = torch.from_numpy(rng.integers(0, 2, (60, 3)))
    works = [lambda part=part: group_reward_stats(table[part]).all_reduce() for part in PARTS]
    for got in on_ranks(monkeypatch, works):
        assert got.to_dict() == pytest.approx(group_reward_stats(table).to_dict(), rel=1e-9)
        assert got.n_groups.dtype == torch.int64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explained_variance(np.ones(2), np.ones(3)), r"returns must have values' shape \(2,\), got \(3,\)"),
        (lambda: explained_variance(np.ones(2), np.ones(2), {"a": np.ones(3)}), "mask of slice 'a' must broadcast"),
        (lambda: explained_variance(np.ones(2), np.ones(2), names=["a", "b"]), "masks are needed"),
    ],
)
def test_explained_variance_says_what_does_not_fit(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# groups

rewards = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.1, float("nan")])
grouped = st.lists(st.tuples(st.integers(-3, 3), rewards), max_size=30)


def true_groups(pairs: list[tuple[Any, float]]) -> dict[str, float]:
    groups: dict[Any, list[float]] = {}
    for key, reward in pairs:
        if np.isfinite(reward):
            groups.setdefault(key, []).append(reward)
    real = [np.array(group) for group in groups.values() if len(group) > 1]
    n = len(real)
    values = {
        "n_rewards": sum(np.isfinite(reward) for _, reward in pairs),
        "n_non_finite": sum(not np.isfinite(reward) for _, reward in pairs),
        "n_groups": n,
        "n_single": sum(len(group) == 1 for group in groups.values()),
        "n_zero_variance": sum(np.ptp(group) == 0 for group in real),
        "n_all_low": sum((group == 0).all() for group in real),
        "n_all_high": sum((group == 1).all() for group in real),
    }
    if n == 0:
        names = ("zero_variance_fraction", "all_low_fraction", "all_high_fraction", "within_group_std")
        return values | dict.fromkeys((*names, "group_std_mean", "group_mean", "between_group_std"), float("nan"))
    means = [group.mean() for group in real]
    squares = sum(((group - group.mean()) ** 2).sum() for group in real)
    return values | {
        "zero_variance_fraction": values["n_zero_variance"] / n,
        "all_low_fraction": values["n_all_low"] / n,
        "all_high_fraction": values["n_all_high"] / n,
        "within_group_std": np.sqrt(squares / (sum(map(len, real)) - n)),
        "group_std_mean": np.mean([group.std(ddof=1) for group in real]),
        "group_mean": np.mean(means),
        "between_group_std": np.std(means),
    }


@pytest.mark.parametrize("kind", KINDS)
@given(pairs=grouped, cut=st.integers(-3, 4))
def test_groups_by_id(kind: str, pairs: list[tuple[int, float]], cut: int) -> None:
    def of(chosen: list[tuple[int, float]]) -> Any:
        ids = array(kind, [key for key, _ in chosen], np.int64)
        return group_reward_stats(array(kind, [reward for _, reward in chosen], np.float64), ids)

    wanted = pytest.approx(true_groups(pairs), rel=1e-9, abs=1e-12, nan_ok=True)
    assert of(pairs).to_dict() == wanted
    halves = [[pair for pair in pairs if pair[0] < cut], [pair for pair in pairs if pair[0] >= cut]]
    assert (of(halves[0]) + of(halves[1])).to_dict() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_groups_by_shape_size_and_name(kind: str, rng: np.random.Generator) -> None:
    table = rng.integers(0, 2, (40, 4)).astype(np.float32)
    names = np.repeat([f"prompt {i}" for i in range(40)], 4)
    wanted = pytest.approx(true_groups(list(zip(names, table.reshape(-1).tolist(), strict=True))), rel=1e-9)
    assert group_reward_stats(array(kind, table)).to_dict() == wanted
    flat = array(kind, table.reshape(-1))
    assert group_reward_stats(flat, group_size=4).to_dict() == wanted
    assert group_reward_stats(flat, names).to_dict() == wanted
    assert group_reward_stats(flat, names.tolist()).to_dict() == wanted
    assert group_reward_stats(array(kind, table.astype(bool))).to_dict() == wanted
    assert (
        group_reward_stats(array(kind, -table), low=-1.0, high=0.0).to_dict()["n_all_low"] == (table == 1).all(1).sum()
    )


def test_equal_rewards_have_no_variance_though_their_mean_rounds() -> None:
    stats = group_reward_stats(np.full((1, 3), 0.1))
    assert int(stats.n_zero_variance) == 1
    assert float(stats.within_group_std) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_reward_stats(np.ones(4)), r"rewards must be \(groups, rewards a group\), got \(4,\)"),
        (lambda: group_reward_stats(np.ones(4), group_size=3), "divide the 4 rewards, got 3"),
        (lambda: group_reward_stats(np.ones(4), np.ones(3, int)), r"group_ids must have rewards' shape"),
        (lambda: group_reward_stats(np.ones(4), np.ones(4, int), group_size=2), "exclude each other"),
    ],
)
def test_groups_say_what_does_not_fit(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
