"""What statistics share is evaluated once, and gives the bits that each gives alone."""

from __future__ import annotations

import numpy as np
import pytest

from pyrlstats import quantiles, slice_stats, stats
from pyrlstats.memo import Memo, shared
from pyrlstats.results import Statistic
from pyrlstats.slice_stats import SliceView

GROUPS = (None, "entropy", "probabilities", "truncation", "policy_clip", "advantages", "updates")
NAMES = [n for n, one in vars(SliceView).items() if isinstance(one, Statistic) and one.group in GROUPS]


@pytest.fixture
def result():
    rng = np.random.default_rng(3)
    x = np.concatenate((rng.normal(0, 0.01, 4000), rng.standard_t(2, 1000), [np.nan, 800.0])).astype(np.float32)
    advantages = rng.normal(size=len(x)).astype(np.float32)
    options = {"entropy": True, "probabilities": True, "truncate": (0.5, 2.0), "advantages": advantages}
    masks = {"all": np.ones(len(x), bool), "near": np.abs(x) < 0.4, "empty": np.zeros(len(x), bool)}
    return slice_stats(x, np.zeros_like(x), masks, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_memo_changes_no_bit(result, name):
    function = getattr(SliceView, name).function
    memo = Memo(result.state)
    with np.errstate(all="ignore"):
        for other in NAMES:  # what was kept for others is what this one would have found
            getattr(SliceView, other).function(memo)
        assert function(memo).tobytes() == function(result.state).tobytes()


def test_what_is_shared_is_evaluated_once_for_a_memo_and_never_kept_for_a_state(result):
    calls = []

    @shared
    def counted(state):
        calls.append(state)
        return stats.n_finite(state)

    memo = Memo(result.state)
    assert counted(memo) is counted(memo)
    assert len(calls) == 1
    counted(result.state), counted(result.state)
    assert len(calls) == 3


def test_a_memo_stands_for_its_state(result):
    memo = Memo(result.state)
    assert memo.names == result.state.names
    assert memo.layout is result.state.layout
    assert memo.histogram is memo.histogram
    np.testing.assert_array_equal(memo.maxima, result.state.maxima)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_to_dict_holds_the_bits_that_the_functions_give(result, device):
    levels = (0.0, 0.01, 0.5, 0.999, 1.0)
    given = (result if device is None else result.to(device)).to_dict("a/", quantiles=levels, abs_quantiles=levels)
    with np.errstate(all="ignore"):
        columns = [getattr(SliceView, name).function(result.state).tolist() for name in NAMES]
        columns += quantiles.quantile(result.state, levels).T.tolist()
        columns += quantiles.abs_quantile(result.state, levels).T.tolist()
    wanted = [0, *(value for row in zip(*columns, strict=True) for value in row)]
    assert [repr(value) for value in given.values()] == [repr(value) for value in wanted]
    assert list(given)[:2] == ["a/n_out_of_range", "a/all/n_tokens"]
    assert list(given)[-1] == "a/empty/abs_log_ratio_p100"


def test_no_slice_changes_a_bit_of_another():
    rng = np.random.default_rng(5)
    x = np.concatenate((rng.normal(0, 0.01, 3000), rng.normal(5000, 1, 300), [np.nan, -300, 0, 0])).astype(np.float32)
    masks = {f"s{i}": rng.random(len(x)) < share for i, share in enumerate((0.0, 0.5, 0.0, 1e-3, 1.0, 0.0))}
    together = slice_stats(x, np.zeros_like(x), masks).to_dict()
    for name, mask in masks.items():
        alone = slice_stats(x, np.zeros_like(x), {name: mask}).to_dict()
        assert {key: repr(together[key]) for key in alone} == {key: repr(value) for key, value in alone.items()}


def test_to_dict_sees_a_state_that_has_changed():
    x = np.array([0.5, -0.5], np.float32)
    result = slice_stats(x, np.zeros_like(x))
    assert result.to_dict()["all/n_tokens"] == 2
    result.state.merge_(slice_stats(x, np.zeros_like(x)).state)
    assert result.to_dict()["all/n_tokens"] == 4
