"""Statistics of any quantity, explained variance and reward groups, against NumPy on the values themselves."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyrlstats
from pyrlstats.slices import tool_slices
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


def test_what_has_another_kind_is_named() -> None:
    x = np.array([1.0])
    values, ratios = value_stats(x), pyrlstats.slice_stats(x, x)
    assert (type(values).kind, type(ratios).kind) == ("value", "log_ratio")
    for other in (ratios, [values, ratios], "all", 3, None):
        got = type(other[1] if isinstance(other, list) else other).__name__
        with pytest.raises(TypeError, match=f"merge takes ValueStats or an iterable of ValueStats, got {got}"):
            values.merge(other)
    with pytest.raises(TypeError, match="merge takes ValueAccumulator, ValueStats or an iterable of them, got"):
        ValueAccumulator(["all"]).merge(ratios)


def test_results_are_equal_to_themselves_only_and_hashable() -> None:
    x = np.array([1.0, 2.0])
    for make in (lambda: value_stats(x), lambda: explained_variance(x, x), lambda: group_reward_stats(x, group_size=2)):
        one, other = make(), make()
        assert one == one
        assert one != other
        assert len({one, other, one}) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_pickled_in_numpy_memory_and_merge_with_tensors(kind: str) -> None:
    x = array(kind, [1.0, 2.0, 4.0])
    for one in (value_stats(x), explained_variance(x, x**2), group_reward_stats(x, group_size=3)):
        copy = pickle.loads(pickle.dumps(one))
        arrays = [copy.state.buffer] if isinstance(copy, ValueStats) else list(vars(copy).values())
        assert not any(isinstance(value, torch.Tensor) for value in arrays)
        for pooled in (one.merge(copy), copy.merge(one), deepcopy(copy) + one):
            assert pooled.to_dict() == pytest.approx((one + one).to_dict(), nan_ok=True)


def test_a_table_in_a_notebook() -> None:
    html = value_stats(np.array([1.0, 2.0]), names=["<b>"])._repr_html_()
    assert "&lt;b&gt;" in html
    assert html.count("<tr>") == 2


def test_accumulators_of_values_reduce_as_those_of_log_ratios(tmp_path: Path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        accumulator = ValueAccumulator(["all"]).update(torch.tensor([1.0, 3.0]))
        handle = accumulator.all_reduce(async_op=True)
        assert handle.wait() is accumulator
        assert float(accumulator.compute()["all"].mean) == 2.0
        with pytest.raises(RuntimeError, match="reset"):
            accumulator.update(torch.ones(1))
        accumulator.reset().update(torch.tensor([5.0]))
        assert accumulator.all_reduce() is accumulator
        assert float(accumulator.compute()["all"].mean) == 5.0
    finally:
        dist.destroy_process_group()


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


def test_names_of_slices_are_left_alone_in_errors() -> None:
    for x, masks in (
        (np.ones(2), {"my_logp_slice": np.ones(3)}),
        (np.ones(2), {"my_logp_slice": np.array(["a", "b"])}),
    ):
        for call in (
            lambda: value_stats(x, masks),  # noqa: B023
            lambda: explained_variance(x, x, masks),  # noqa: B023
            lambda: ValueAccumulator(["my_logp_slice"]).update(x, masks),  # noqa: B023
        ):
            with pytest.raises((ValueError, TypeError), match="mask of slice 'my_logp_slice' must"):
                call()


def test_errors_name_the_argument_that_was_given() -> None:
    accumulator = ValueAccumulator(["all"], device="cpu")
    with pytest.raises(ValueError, match="x must be on the accumulator's device cpu, got meta"):
        accumulator.update(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="mask must be on x's device cpu, got meta"):
        value_stats(torch.ones(2), mask=torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"masks must hold exactly the slices \['all'\]: missing"):
        accumulator.update(torch.ones(2), {"other": torch.ones(2)})
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


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_whose_id_names_no_slice_are_counted(kind: str) -> None:
    x = array(kind, [1.0, 2.0, 3.0, 4.0])
    mask = array(kind, [1, 1, 1, 0])
    for dtype, big in ((np.int64, 9), (np.uint8, 200), (np.uint64, 2**63 + 1)):
        ids = array(kind, [0, 0, big, big], dtype)
        critic = explained_variance(x, x**2, slice_ids=ids, names=["a"], mask=mask)
        assert (int(critic.n[0]), int(critic.n_out_of_range)) == (2, 1)
        assert (critic + critic).to_dict("c/")["c/n_out_of_range"] == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x: explained_variance(x, x, {"a": np.ones(2, np.complex64)}),
        lambda x: explained_variance(x, x, slice_ids=np.zeros(2), names=["a"]),
        lambda x: explained_variance(x, x, mask=np.array(["a", "b"])),
        lambda x: explained_variance(x, x, np.ma.masked_array(np.ones(2), [0, 1])),
    ],
)
def test_explained_variance_refuses_what_slice_stats_refuses(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="must"):
        call(np.ones(2))


def test_explained_variance_takes_a_family_of_slices() -> None:
    family = tool_slices(np.array([1, 1, 0, 1]))
    critic = explained_variance(np.arange(4.0), np.arange(4.0), family)
    assert critic.n.tolist() == [0, 2, 1]


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
@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "uint8", "uint16", "uint32", "uint64"])
def test_groups_by_ids_of_any_integers(kind: str, dtype: str) -> None:
    ids = array(kind, [1, 0, 1, 0], dtype)
    assert int(group_reward_stats(array(kind, [1.0, 0.0, 1.0, 1.0]), ids).n_zero_variance) == 1
    if dtype == "uint64":
        far = array(kind, [2**63 + 1, 1, 2**63 + 1, 1], dtype)
        assert int(group_reward_stats(array(kind, [1.0, 0.0, 1.0, 1.0]), far).n_groups) == 2


def test_groups_of_other_rewards_of_failure_and_success_do_not_merge() -> None:
    table = np.array([[0.0, 0.0], [1.0, 1.0]])
    one, two = group_reward_stats(table), group_reward_stats(table, low=-1.0)
    before = one.to_dict(), two.to_dict()
    with pytest.raises(ValueError, match="low=0 and high=1 and with low=-1 and high=1 cannot be merged"):
        one.merge(two)
    assert (one.to_dict(), two.to_dict()) == before
    with pytest.raises(TypeError, match="merge takes GroupRewardStats, got str"):
        one.merge("a")


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
