"""More faults that users of trainers have reported: one small input each, and the right value. See test_faults.py.

Each docstring says in one line what goes wrong elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyrlstats import SliceAccumulator, exact_quantiles, slice_stats
from pyrlstats.slices import group_slices, pool, position_slices, staleness_slices, tool_slices, turn_slices
from pyrlstats.tails import tail_shape, top_tokens
from pyrlstats.values import value_stats


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


# ---- overhead


def packed(documents: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Documents of 8 tokens, [model model TOOL TOOL model model model model] each: mask, boundaries, logp, old_logp."""
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1]).repeat(documents)
    logp = torch.linspace(-0.1, 0.1, mask.numel())
    return mask, torch.arange(0, mask.numel() + 1, 8), logp, zeros(logp)


def test_a_packed_batch_costs_no_work_per_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three syncs for every packed document: 256 documents take 256 times as many."""
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")  # whose operators can be counted
    counts = []
    for documents in (2, 256):
        mask, boundaries, logp, old_logp = packed(documents)
        with Operators() as operators:
            where = tool_slices(mask, cu_seqlens=boundaries) & turn_slices(mask, cu_seqlens=boundaries)
            stats = slice_stats(logp, old_logp, slice_ids=where.ids, names=where.names)
        assert not [name for name in operators.names if "_local_scalar_dense" in name or "nonzero" in name]
        assert int(stats["pre_tool__turn_0"].n_tokens) == 2 * documents
        assert int(stats["post_tool__turn_1"].n_tokens) == 4 * documents
        counts.append(len(operators.names))
    assert counts[0] == counts[1]


def test_boundaries_on_the_host_or_on_the_device_are_the_same() -> None:
    """Boundaries that are read one by one wait for the device once a sequence."""
    mask, boundaries, logp, old_logp = packed(5)
    wanted = tool_slices(mask.view(5, 8)).ids.reshape(-1)
    for given in (boundaries, boundaries.int(), boundaries.tolist(), boundaries.numpy()):
        assert torch.equal(tool_slices(mask, cu_seqlens=given).ids, wanted)
        top = top_tokens(logp, old_logp, mask, 2, cu_seqlens=given)["all"]
        assert [(row["sequence"], row["position"]) for row in top.rows()] == [(0, 0), (4, 7)]


def test_sixteen_micro_batches_copy_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten scalars of 16 micro-batches, each read as it is made: 160 syncs."""
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    accumulator = SliceAccumulator(["all"], device="cpu")
    x = torch.linspace(-1, 1, 100)
    with Operators() as operators:
        for _ in range(16):
            accumulator.update(x, zeros(x))
        stats = accumulator.compute()
    assert not [name for name in operators.names if "_local_scalar_dense" in name]
    with Operators() as operators:
        numbers = stats.to_dict()
    assert numbers["all/n_tokens"] == 1600
    assert len(operators.names) <= 3  # the copy of one buffer, and views


def test_graph_attached_inputs_of_second_passes() -> None:
    """Diagnostics on log-probabilities that require grad keep the graph until memory runs out."""
    logp = torch.linspace(-1, 1, 100, requires_grad=True) * 2
    old_logp = torch.zeros(100, requires_grad=True)
    assert exact_quantiles(logp, old_logp, None, 1.0)["all"].item() == 2.0
    assert tail_shape(logp, old_logp)["all"].pareto_k.grad_fn is None
    assert not top_tokens(logp, old_logp)["all"].value.requires_grad


def test_exact_quantiles_of_more_than_2_to_the_24_tokens() -> None:
    """torch.quantile refuses more than 2^24 elements."""
    x = torch.arange(4097.0).expand(4097, 4097)  # every number 4097 times
    assert x.numel() > 1 << 24
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(x.reshape(-1), 0.5)
    got = exact_quantiles(x, torch.zeros(1).expand(x.shape), None, [0.0, 0.5, 0.999, 1.0])["all"]
    assert got.tolist() == [0.0, 2048.0, 4092.0, 4096.0]


# ---- NaN and empty rows


def test_a_fully_masked_row_of_nan() -> None:
    """A mean over each row first: the row without tokens is 0 / 0, and so is every mean over rows."""
    logp = torch.tensor([[-1.0, -2.0], [math.nan, math.nan]])
    old_logp = torch.tensor([[-1.5, -2.5], [-1.0, math.nan]])
    view = slice_stats(logp, old_logp, torch.tensor([[1], [0]]))["all"]
    assert (int(view.n_tokens), int(view.n_nan), float(view.log_ratio_mean)) == (2, 0, 0.5)
    assert float(view.kl_k1) == -0.5
    assert exact_quantiles(logp, old_logp, torch.tensor([[1], [0]]), 1.0)["all"].item() == 0.5


def test_one_token_that_the_new_policy_rules_out() -> None:
    """log 0 = -inf for one rare token makes the loss and every metric NaN or infinite."""
    logp, old_logp = torch.tensor([-1.0, -math.inf, -2.0]), torch.tensor([-1.25, -9.0, -2.25])
    view = slice_stats(logp, old_logp)["all"]
    assert (int(view.n_neg_inf), int(view.n_finite)) == (1, 2)
    assert (float(view.log_ratio_mean), float(view.log_ratio_min)) == (0.25, 0.25)
    assert [row["index"] for row in top_tokens(logp, old_logp)["all"].rows()] == [0, 2]
    assert tail_shape(logp, old_logp)["all"].reason == "too_few"


def test_infinite_and_nan_rates_are_shares_of_all_tokens() -> None:
    """Non-finite ratios are dropped before anything counts them."""
    logp = torch.tensor([0.0, math.inf, -math.inf, math.nan, math.nan, 1.0, 0.0, 0.0])
    view = slice_stats(logp, torch.zeros(8))["all"]
    rates = [int(count) / int(view.n_tokens) for count in (view.n_nan, view.n_pos_inf, view.n_neg_inf)]
    assert rates == [0.25, 0.125, 0.125]


# ---- values: entropy, lengths, staleness


def test_a_masked_mean_divides_by_the_mask() -> None:
    """The mean of a masked quantity over all positions, padding included."""
    values = torch.tensor([[1.0, 0.0, 7.0], [1.0, 0.0, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert float(value_stats(values, mask)["all"].mean) == 0.5
    assert float(value_stats(torch.tensor([1.0, 0.0, 1.0, 0.0]))["all"].mean) == 0.5


def test_entropy_is_of_the_response_alone() -> None:
    """Entropies of padding, where the logits are noise, inside mean and threshold."""
    entropy = torch.full((2, 6), 4.9226)
    entropy[0, :3], entropy[1, :5] = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.0, 4.0, 4.5])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    view = value_stats(entropy, mask)["all"]
    assert int(view.n_values) == 8
    assert float(view.mean) == pytest.approx(15.1 / 8)
    assert float(view.max) == 4.5


def test_staleness_is_weighted_by_tokens_with_true_extrema() -> None:
    """A mean over samples of their mean age, and a mean of maxima, logged as the maximum."""
    ages = torch.tensor([[0, 0, 0, 0], [6, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    view = value_stats(ages, mask)["all"]
    assert (float(view.mean), float(view.max), float(view.min)) == (1.2, 6.0, 0.0)


def test_versions_of_a_sequence_that_three_policies_wrote() -> None:
    """One version a sample, where weights changed while it was sampled; prompt tokens carry -1."""
    versions = torch.tensor([-1, 7, 7, 8, 9, 9])
    x = torch.tensor([9.0, 0.3, 0.3, 0.2, 0.0, 0.0])
    ages = staleness_slices(9, versions)
    stats = slice_stats(x, zeros(x), slice_ids=ages.ids, names=ages.names)
    assert [int(view.n_tokens) for view in stats.values()] == [2, 1, 2, 0, 0, 0]
    assert float(stats["stale_0"].zero_fraction) == 1.0  # engine mismatch alone
    assert float(stats["stale_2"].log_ratio_mean) == pytest.approx(0.3)
    assert math.isnan(stats["stale_8_up"].log_ratio_mean)


# ---- slices


def test_tool_tokens_with_a_dummy_log_probability() -> None:
    """Tool results inside the mask, whose sampling log-probability is a dummy 0, inflate the mismatch."""
    logp = torch.tensor([-0.5, -1.0, -7.0, -8.0, -0.25])
    old_logp = torch.tensor([-0.5, -1.0, 0.0, 0.0, -0.5])
    response, model = torch.tensor([1, 1, 1, 1, 1]), torch.tensor([1, 1, 0, 0, 1])
    polluted = slice_stats(logp, old_logp, response)["all"]
    assert float(polluted.log_ratio_abs_mean) > 3.0
    where = tool_slices(model, response_mask=response)
    stats = slice_stats(logp, old_logp, slice_ids=where.ids, names=where.names)
    assert (int(stats["pre_tool"].n_tokens), int(stats["post_tool"].n_tokens)) == (2, 1)
    assert float(stats["pre_tool"].zero_fraction) == 1.0
    assert float(stats["post_tool"].log_ratio_mean) == 0.25
    assert float(pool(stats, {"model": where.names})["model"].log_ratio_abs_mean) == pytest.approx(0.25 / 3)


def test_mismatch_by_round_of_a_conversation() -> None:
    """One mismatch for all rounds, where the later ones drift."""
    mask = torch.tensor([1, 1, 1, 0, 0, 1, 1, 0, 1, 1])
    x = torch.tensor([0.0, 0.0, 0.0, 99.0, 99.0, 0.1, 0.1, 99.0, 0.5, 0.7])
    where = turn_slices(mask)
    stats = slice_stats(x, zeros(x), slice_ids=where.ids, names=where.names)
    means = [float(stats[name].log_ratio_abs_mean) for name in ("turn_0", "turn_1", "turn_2")]
    assert means == pytest.approx([0.0, 0.1, 0.6])


def test_the_first_token_of_a_response() -> None:
    """A discrepancy of the first token alone disappears in a mean over thousands."""
    x = torch.full((4, 1000), 1e-4)
    x[:, 100] = 0.8  # after the prompt
    mask = torch.arange(1000).expand(4, 1000) >= 100
    where = position_slices(mask, buckets=(0, 1, 16))
    stats = slice_stats(x, zeros(x), slice_ids=where.ids, names=where.names)
    assert float(stats["position_0"].log_ratio_mean) == pytest.approx(0.8)
    assert float(stats["position_1_15"].log_ratio_max) == pytest.approx(1e-4)
    assert {row["position"] for row in top_tokens(x, zeros(x), mask, 4)["all"].rows()} == {100}


def test_environments_are_weighted_by_their_tokens() -> None:
    """One environment's metric per sample, another's per token: they cannot be compared, nor added up."""
    x = torch.zeros(3, 100)
    x[0, :10], x[1, :90], x[2, :50] = 1.0, 2.0, 4.0
    mask = x > 0
    where = group_slices(["math", "math", "code"], ["math", "code"], device="cpu") & mask
    stats = slice_stats(x, zeros(x), slice_ids=where.ids, names=where.names)
    assert float(stats["math"].log_ratio_mean) == pytest.approx(190 / 100)  # of samples it would be 1.5
    assert float(stats["code"].log_ratio_mean) == 4.0
    assert float(pool(stats, {"all": where.names})["all"].log_ratio_mean) == pytest.approx(390 / 150)


# ---- distribution and tails


def test_percentiles_of_an_engine_mismatch_to_the_digit() -> None:
    """Mean 2.24e-5, p50 1.44e-5, p99 1.30e-4 took code that was thrown away afterwards."""
    d = np.concatenate((np.full(60, 1.44e-5), np.full(38, 2.9368e-5), np.full(2, 1.30e-4)))
    d = (d * np.where(np.arange(100) % 2, 1, -1)).astype(np.float32)
    view = slice_stats(d, 0 * d)["all"]
    assert float(view.log_ratio_abs_mean) == pytest.approx(2.24e-5, rel=0.01)
    exact = exact_quantiles(d, 0 * d, None, [0.5, 0.99], absolute=True)["all"]
    assert exact.tolist() == [np.float32(1.44e-5), np.float32(1.30e-4)]
    assert view.abs_quantile([0.5, 0.99]).tolist() == pytest.approx(exact.tolist(), rel=2.0**-5)


def test_both_tails_of_the_ratio() -> None:
    """A maximum and a p99 see tokens that became likelier; those that became impossible stay unseen."""
    x = torch.zeros(1000)
    x[:20], x[20:30] = -3.0, 1.0
    view = slice_stats(x, zeros(x))["all"]
    low, high = exact_quantiles(x, zeros(x), None, [0.01, 0.99])["all"].tolist()
    assert (low, high) == (-3.0, 0.0)
    assert exact_quantiles(x, zeros(x), None, 0.991)["all"].item() == 1.0
    assert (float(view.clip_fraction_low), float(view.clip_fraction_high)) == (0.02, 0.01)
    assert float(view.ratio_min) == pytest.approx(math.exp(-3))


def test_the_whole_distribution_of_the_ratio() -> None:
    """Mean, minimum and maximum of the ratio where the distribution was asked for."""
    x = torch.tensor([-0.5, 0.0, 0.0, 0.25, 0.25, 4.0])
    counts, edges = slice_stats(x, zeros(x))["all"].histogram()
    kept = counts.nonzero()[:, 0]
    assert counts[kept].tolist() == [1, 2, 2, 1]
    for value, place in zip((-0.5, 0.0, 0.25, 4.0), kept.tolist(), strict=True):
        assert float(edges[place]) <= value <= float(edges[place + 1])


def test_the_tokens_behind_a_tail_can_be_read() -> None:
    """A maximum of the mismatch says that something is wrong, not where."""
    x = torch.full((3, 50), 1e-3)
    x[2, 7], x[0, 49], x[1, 0] = -5.0, 4.0, math.nan
    rows = top_tokens(x, zeros(x), k=2)["all"].rows()
    assert [(row["sequence"], row["position"], row["value"]) for row in rows] == [(2, 7, -5.0), (0, 49, 4.0)]


def test_on_policy_weights_have_no_infinite_k() -> None:
    """k-hat of equal weights is reported as infinite: the alarm rings at every first minibatch."""
    shape = tail_shape(torch.zeros(4096), torch.zeros(4096))
    assert math.isnan(shape["all"].pareto_k)
    assert shape["all"].reason == "all_equal"


def test_infinite_and_nan_ratios_are_no_infinite_k() -> None:
    """One NaN or infinity makes k-hat infinite for the whole batch."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    wanted = float(tail_shape(x, zeros(x))["all"].pareto_k)
    spoilt = torch.cat((x, torch.tensor([math.nan, math.inf, -math.inf])))
    assert float(tail_shape(spoilt, zeros(spoilt))["all"].pareto_k) == wanted


# ---- sequences, truncated weights, probabilities


def test_sum_and_mean_over_a_sequence_are_two_ratios() -> None:
    """A sequence of 80 tokens, each 0.7 % less likely: its ratio is 0.569 as a product, 0.993 as a geometric mean."""
    logp = torch.full((1, 80), -1.00705)
    view = slice_stats(logp, torch.full((1, 80), -1.0), sequences=True)["all"]
    assert float(view.sequence_ratio_mean) == pytest.approx(0.569, abs=5e-4)
    assert float(view.sequence_geometric_ratio_mean) == pytest.approx(0.993, abs=5e-4)


def test_the_share_of_sequences_above_a_threshold_is_of_raw_weights() -> None:
    """The mean of weights clamped at 2 is never above 2: the share of such sequences is always 0."""
    x = torch.full((4, 10), math.log(3.0))
    stats = slice_stats(x, zeros(x), sequences=True, truncate=(0.5, 2.0))
    assert 1.0 - float(stats.sequence_means["all"].cdf(math.log(2.0))) == 1.0
    assert float(stats["all"].sequence_geometric_ratio_mean) == pytest.approx(3.0)
    assert float(stats["all"].clamped_ratio_mean) == 2.0
    assert float(stats["all"].ratio_mean) == pytest.approx(3.0)


def test_a_sequence_counts_once_however_long_it_is() -> None:
    """The ESS of sequences from weights spread over their tokens is that of the long ones: 0.97 for 0.64."""
    x = torch.zeros(4, 100)
    x[0, 0] = math.log(4.0)
    mask = torch.ones(4, 100)
    mask[0, 1:] = 0
    view = slice_stats(x, zeros(x), mask, sequences=True)["all"]
    assert float(view.sequence_ess_fraction) == pytest.approx(49 / 76)


def test_a_row_without_tokens_is_no_sequence_of_ratio_1() -> None:
    """Rows that are masked out count with a sum of 0: ratio 1, perplexity 1."""
    logp, old_logp = torch.full((3, 4), -2.0), torch.full((3, 4), -2.25)
    mask = torch.tensor([[1], [0], [1]])
    view = slice_stats(logp, old_logp, mask, sequences=True)["all"]
    assert (int(view.n_sequences), int(view.n_sequences_empty)) == (2, 1)
    assert float(view.sequence_log_ratio_min) == 1.0
    assert float(view.sequence_perplexity) == pytest.approx(math.exp(2.0))


def test_chi2_of_sequences_does_not_saturate() -> None:
    """exp(2 clamp(sum x, 20)) - 1 ends at e^40 = 2.4e17, where a sum is 60."""
    x = torch.tensor([[60.0, 0.0], [0.0, 0.0]])
    view = slice_stats(x, zeros(x), sequences=True)["all"]
    assert float(view.sequence_renyi2_unnormalised) == pytest.approx(120.0 - math.log(2.0))
    assert float(view.sequence_chi2) == pytest.approx(1.0)


def test_extrema_of_sequences_over_micro_batches() -> None:
    """The mean over micro-batches of the smallest and of the largest sequence."""
    accumulator = SliceAccumulator(["all"], sequences=True)
    for sums in ([1.0, 2.0], [9.0]):
        x = torch.tensor(sums)[:, None]
        accumulator.update(x, zeros(x))
    view = accumulator.compute()["all"]
    extrema = (view.sequence_log_ratio_mean, view.sequence_log_ratio_max, view.sequence_log_ratio_min)
    assert [float(one) for one in extrema] == [4.0, 9.0, 1.0]


def test_packed_sequences_cost_no_work_per_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of packed sequences in a loop over them, each with a sync."""
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    counts = []
    for documents in (2, 256):
        mask, boundaries, _, _ = packed(documents)
        x = torch.full((8 * documents,), 0.01)
        with Operators() as operators:
            view = slice_stats(x, zeros(x), mask, cu_seqlens=boundaries)["all"]
        assert not [name for name in operators.names if "_local_scalar_dense" in name or "nonzero" in name]
        assert int(view.n_sequences) == documents
        assert float(view.sequence_log_ratio_mean) == pytest.approx(0.06, rel=1e-6)
        counts.append(len(operators.names))
    assert counts[0] == counts[1]


def test_environments_by_sample_and_by_token() -> None:
    """Both weightings of one environment are wanted, each under its own name."""
    x = torch.zeros(3, 100)
    x[0, :10], x[1, :90], x[2, :50] = 1.0, 2.0, 4.0
    where = group_slices(["math", "math", "code"], ["math", "code"], device="cpu") & (x > 0)
    stats = slice_stats(x, zeros(x), slice_ids=where.ids, names=where.names, sequences=True)
    assert float(stats["math"].log_ratio_mean) == pytest.approx(1.9)
    assert float(stats.sequence_means["math"].log_ratio_mean) == pytest.approx(1.5)
    assert float(stats.sequence_means["code"].log_ratio_mean) == 4.0


def test_raw_ratios_beside_the_share_that_truncation_changes() -> None:
    """A ratio logged after truncation: its maximum is the bound, and nobody knows for how many tokens."""
    x = torch.tensor([0.0, 0.0, 0.0, math.log(40.0)])
    view = slice_stats(x, zeros(x), truncate=(0.5, 2.0))["all"]
    assert float(view.ratio_max) == pytest.approx(40.0)
    assert float(view.ratio_mean) == pytest.approx(43 / 4)
    assert float(view.clamped_ratio_mean) == pytest.approx(5 / 4)
    assert float(view.truncated_fraction_high) == 0.25
    assert float(view.ess_fraction) == pytest.approx(43**2 / 4 / 1603)
    assert float(view.clamped_ess_fraction) == pytest.approx(25 / 4 / 7)


def test_truncation_that_filters_everything() -> None:
    """A division by zero where masking leaves no weight at all."""
    x = torch.full((5,), math.log(10.0))
    view = slice_stats(x, zeros(x), truncate=(0.5, 2.0))["all"]
    assert float(view.truncated_fraction) == 1.0
    assert float(view.masked_ratio_mean) == 0.0
    assert not float(view.masked_ess_fraction) > 0.0
    assert float(view.ess_fraction) == pytest.approx(1.0)


def test_zeros_of_filtered_tokens_are_no_weights() -> None:
    """A mean with the zeros of filtered tokens is one less their share, whatever the weights."""
    x = torch.tensor([0.1, -0.1, 0.0, 5.0])
    view = slice_stats(x, zeros(x), truncate=(0.5, 2.0))["all"]
    kept = float(view.masked_ratio_mean) / (1.0 - float(view.truncated_fraction))
    assert kept == pytest.approx((math.exp(0.1) + math.exp(-0.1) + 1.0) / 3)
    assert float(view.masked_ratio_mean) == pytest.approx(0.75 * kept)


def test_probabilities_where_log_ratios_exaggerate() -> None:
    """A token of probability 1e-6 dominates the log-ratio; the engines agree on every token that matters."""
    p, q = torch.tensor([0.5, 0.25, 1e-6]), torch.tensor([0.25, 0.25, 1e-9])
    view = slice_stats(p.log(), q.log(), probabilities=True)["all"]
    assert float(view.log_ratio_max) == pytest.approx(math.log(1000.0), rel=1e-5)
    assert float(view.probability_diff_max) == pytest.approx(0.25, rel=1e-6)
    assert float(view.probability_diff_mean) == pytest.approx(0.25 / 3, rel=1e-5)


def test_clipping_is_where_the_gradient_vanishes() -> None:
    """The share of ratios outside the clip range, where the sign of the advantage decides."""
    x = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    view = slice_stats(x, zeros(x), advantages=advantages)["all"]
    assert float(view.clip_fraction) == 0.8
    assert (float(view.policy_clip_fraction_high), float(view.policy_clip_fraction_low)) == (0.2, 0.2)


def test_advantages_of_one_sign_are_seen() -> None:
    """A mean of 0 hides a batch in which one token in eight is rewarded."""
    advantages = torch.tensor([7.0, -1, -1, -1, -1, -1, -1, -1])
    x = torch.zeros(8)
    view = slice_stats(x, zeros(x), advantages=advantages)["all"]
    assert float(view.advantage_mean) == 0.0
    assert float(view.advantage_positive_fraction) == 0.125
    assert (float(view.advantage_min), float(view.advantage_max)) == (-1.0, 7.0)
