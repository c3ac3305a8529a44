"""Faults seen in the metrics of trainers and of general tools: one small input each, and the right value.

Each docstring says in one line what goes wrong elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats import SliceAccumulator, slice_stats


def of(x: Any, mask: Any = None, **options: Any) -> Any:
    """The view of the only slice, for log-ratios x."""
    x = torch.as_tensor(x, dtype=torch.float32)
    masks = None if mask is None else torch.as_tensor(mask)
    return slice_stats(x, torch.zeros_like(x), masks, **options)["all"]


def of_ratios(w: Any, mask: Any = None) -> Any:
    return of(torch.tensor(w, dtype=torch.float64).log(), mask)


# ---- arithmetic


def test_k3_of_tiny_log_ratios_does_not_cancel():
    """exp(x) - 1 - x in float32 has no digit left at sigma = 1e-4, and is negative for a third of the tokens."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 1e-4
    naive = x.exp() - 1 - x
    assert (naive < 0).double().mean() > 0.2
    truth = (torch.expm1(x.double()) - x.double()).mean().item()
    assert float(of(x).kl_k3) == pytest.approx(truth, rel=5e-7)
    assert float(of(x[:1]).kl_k3) >= 0


def test_std_of_ratios_near_one_does_not_cancel():
    """sqrt(E[w^2] - E[w]^2) in float32 gives 0 for a spread of 1e-4."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 1e-4
    w = x.exp()
    naive = ((w * w).mean() - w.mean() ** 2).clamp(min=0).sqrt().item()
    truth = torch.expm1(x.double()).std(correction=0).item()
    assert abs(naive - truth) > 0.1 * truth
    assert float(of(x).ratio_std) == pytest.approx(truth, rel=1e-6)
    assert float(of(x).log_ratio_std) == pytest.approx(x.double().std(correction=0).item(), rel=1e-9)


def test_ess_is_of_the_raw_weights():
    """Truncating weights at 2 before the ESS shows 0.9999 where one token holds all the weight."""
    view = of([0.0] * 9999 + [30.0])
    assert float(view.ess_fraction) == pytest.approx(1e-4, rel=1e-6)
    assert float(view.max_weight_ess_fraction) == pytest.approx(1e-4, rel=1e-6)


def test_ess_has_no_floor():
    """Clamping weights to [1/2, 2] keeps the ESS fraction above 0.64 whatever happens."""
    assert float(of([3.0] + [-3.0] * 9).ess_fraction) < 0.11


def test_ess_when_every_weight_vanishes():
    """A division by zero where every weight underflows or is filtered out."""
    assert float(of([-800.0, -800.0]).ess_fraction) == 1.0
    assert math.isnan(of([-math.inf, -math.inf]).ess_fraction)
    assert math.isnan(of([1.0, 2.0], [0, 0]).ess)


def test_one_huge_ratio_spoils_the_mean_only():
    """An overflowing exp turns every statistic of the batch into inf or NaN."""
    view = of([0.0, 0.0, 0.0, 100.0])
    assert float(view.ratio_mean) == pytest.approx(math.exp(100.0) / 4, rel=1e-6)
    assert float(view.kl_k3) == pytest.approx(math.exp(100.0) / 4, rel=1e-6)
    assert float(view.ess) == pytest.approx(1.0)
    view = of([0.0, 0.0, 0.0, 800.0])
    assert float(view.ratio_mean) == float(view.kl_k3) == math.inf
    assert float(view.quantile(0.5)) == 0.0
    assert float(view.ess) == pytest.approx(1.0)
    assert float(view.log_ratio_mean) == 200.0


def test_a_ratio_of_5e8_is_reported_as_it_is():
    """Three good tokens and one at 20: clamping hides it, no clamping loses the rest."""
    view = of([0.0, 0.0, 0.0, 20.0])
    assert float(view.kl_k3) == pytest.approx((math.exp(20) - 21) / 4, rel=5e-7)
    assert float(view.log_ratio_max) == 20.0
    assert view.quantile([0.1, 0.5, 0.75]).tolist() == [0.0, 0.0, 0.0]
    assert float(view.abs_quantile(1.0)) == 20.0


def test_chi2_in_the_range_where_a_clamp_saturates():
    """exp(2 clamp(x, 20)) - 1 saturates at e^40: the self-normalised chi-square of one outlier is n - 1."""
    assert float(of([0.0] * 99 + [60.0]).chi2) == pytest.approx(99.0, rel=1e-6)
    assert float(of([0.0] * 99 + [60.0]).renyi2) == pytest.approx(math.log(100.0), rel=1e-6)


# ---- masks, NaN and infinities


def test_nan_under_a_zero_of_the_mask():
    """x * mask keeps NaN * 0 = NaN: one padded NaN spoils the mean."""
    logp, old_logp = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.nan]])
    for dtype in (torch.int64, torch.float32, torch.bool):
        view = slice_stats(logp, old_logp, torch.tensor([[1, 0]]).to(dtype))["all"]
        assert int(view.n_tokens) == int(view.n_zero) == 1
        assert int(view.n_nan) == 0
        assert float(view.log_ratio_mean) == float(view.kl_k3) == 0.0


def test_infinite_log_ratios_are_counted_not_hidden():
    """Turned into 0 they count as perfectly on policy; dropped they leave no trace; kept they spoil every sum."""
    view = of([0.0, math.inf])
    assert (int(view.n_pos_inf), int(view.n_finite), int(view.n_tokens)) == (1, 1, 2)
    assert float(view.log_ratio_mean) == float(view.log_ratio_max) == 0.0
    view = of([0.5, -math.inf])
    assert (int(view.n_neg_inf), float(view.ratio_min)) == (1, pytest.approx(math.exp(0.5)))


def test_nan_of_the_sampler_under_the_mask_is_counted():
    """A missing log-probability under mask = 1 becomes NaN and then NaN everywhere, or a ratio of 1."""
    view = slice_stats(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, math.nan]))["all"]
    assert (int(view.n_nan), int(view.n_finite)) == (1, 1)
    assert float(view.log_ratio_mean) == 0.5


def test_minimum_and_spread_do_not_see_masked_tokens():
    """ratio * mask makes the minimum 0 and adds the padding to the spread."""
    view = of_ratios([1.1, 0.9], [1, 0])
    assert float(view.ratio_min) == pytest.approx(1.1, rel=1e-6)
    assert float(view.ratio_std) == 0.0
    assert float(view.log_ratio_min) > 0


def test_numerator_and_denominator_use_the_same_mask():
    """A sum over everything divided by the masked count: 26 instead of 1."""
    x = torch.tensor([[1.0, 100.0], [1.0, -50.0]])
    view = of(x, [[1, 0], [1, 0]])
    assert float(view.log_ratio_mean) == 1.0
    assert float(of([1.0, 0.0, 1.0, 0.0], [1, 1, 1, 1]).log_ratio_mean) == 0.5
    assert float(of([1.0, 9.0, 0.0, 9.0], [1, 0, 1, 0]).log_ratio_mean) == 0.5


def test_an_empty_mask_is_nan_with_a_count_of_0():
    """0 or a perplexity of 1 for an empty slice biases every average that follows."""
    view = of([[1.0, 2.0]], [[0, 0]])
    assert int(view.n_tokens) == 0
    for name in ("kl_k3", "ratio_mean", "ess_fraction", "clip_fraction", "log_ratio_max", "zero_fraction"):
        assert math.isnan(getattr(view, name)), name


def test_an_empty_part_does_not_enter_the_pool():
    """A fully masked row or micro-batch counts as 0, or as on policy, in a mean of means."""
    full, empty = of([1.0, 3.0])._stats, of([7.0, 7.0], [0, 0])._stats
    pooled = (full + empty)["all"]
    assert int(pooled.n_tokens) == 2
    assert float(pooled.log_ratio_mean) == 2.0
    assert float(pooled.log_ratio_max) == 3.0


def test_statistics_are_of_raw_ratios():
    """Maximum and mean after truncation never show the tail that was cut."""
    view = of_ratios([0.5, 1.0, 8.0])
    assert float(view.ratio_max) == pytest.approx(8.0, rel=1e-6)
    assert float(view.ratio_mean) == pytest.approx(9.5 / 3, rel=1e-6)
    assert float(view.clip_fraction_high) == float(view.clip_fraction_low) == 1 / 3


def test_the_low_tail_is_reported_too():
    """Watching only the maximum is blind to tokens that the new policy dropped."""
    view = of([-4.0, -0.1, 0.0, 0.2, 1.0])
    assert float(view.ratio_min) == pytest.approx(math.exp(-4), rel=1e-12)
    assert float(view.ratio_max) == pytest.approx(math.exp(1), rel=1e-12)
    assert float(view.quantile(0.0)) == -4.0


def test_a_mean_over_kept_tokens_has_no_zeros_of_dropped_ones():
    """With zeros of filtered tokens inside, the mean weight is one minus the filtered share."""
    assert float(of([0.0, 0.0, 0.0, 5.0], [1, 1, 1, 0]).ratio_mean) == 1.0


def test_tool_tokens_stay_outside():
    """Placeholder log-probabilities of tool results inside the mask inflate the mismatch."""
    logp = torch.tensor([-1.0, -2.0, -9.0, -8.0, -0.5])
    old_logp = torch.tensor([-1.0, -2.1, 0.0, 0.0, -0.5])
    view = slice_stats(logp, old_logp, torch.tensor([1, 1, 0, 0, 1]))["all"]
    assert int(view.n_tokens) == 3
    assert float(view.log_ratio_abs_mean) == pytest.approx(0.1 / 3, rel=1e-5)
    assert float(view.zero_fraction) == pytest.approx(2 / 3)


def test_slices_by_turn_of_a_conversation():
    """One figure for all turns hides the turn where policies part."""
    mask = torch.tensor([1, 1, 1, 0, 0, 1, 1, 0, 1, 1])
    turn = torch.where(mask > 0, torch.cumsum(torch.diff(mask, prepend=mask[:1] * 0) == 1, 0) - 1, -1)
    x = torch.tensor([0.0, 0.0, 0.0, 9.0, 9.0, 0.1, -0.1, 9.0, 0.5, 1.5])
    stats = slice_stats(x, torch.zeros(10), slice_ids=turn, names=["round_1", "round_2", "round_3"])
    assert [int(view.n_tokens) for view in stats.values()] == [3, 2, 2]
    assert [float(view.log_ratio_max) for view in stats.values()] == [0.0, float(np.float32(0.1)), 1.5]


def test_a_slice_of_special_tokens():
    """End-of-turn tokens differ by orders of magnitude more than the rest: one mean mixes them up."""
    x = torch.tensor([1e-4, -1e-4, 0.02, 1e-4, -0.04])
    special = torch.tensor([0, 0, 1, 0, 1])
    stats = slice_stats(x, torch.zeros(5), {"text": special == 0, "end": special})
    assert float(stats["end"].log_ratio_abs_mean) == pytest.approx(0.03, rel=1e-5)
    assert float(stats["text"].log_ratio_abs_mean) == pytest.approx(1e-4, rel=1e-5)


# ---- pooling


def test_shares_are_pooled_over_micro_batches():
    """A mean of means weighs 12 tokens like 4: a half instead of 6 of 16."""
    accumulator = SliceAccumulator(["all"])
    accumulator.update(torch.tensor([1.0] * 3 + [0.0] * 9), torch.zeros(12))
    accumulator.update(torch.tensor([1.0] * 3 + [0.0]), torch.zeros(4))
    assert float(accumulator.compute()["all"].clip_fraction) == 0.375


def test_extrema_are_extrema_over_micro_batches():
    """Averaged maxima: 5 for 1 and 9."""
    accumulator = SliceAccumulator(["all"])
    accumulator.update(torch.tensor([1.0, 2.0]), torch.zeros(2)).update(torch.tensor([9.0]), torch.zeros(1))
    view = accumulator.compute()["all"]
    assert float(view.log_ratio_mean) == 4.0
    assert (float(view.log_ratio_min), float(view.log_ratio_max)) == (1.0, 9.0)


def test_the_number_of_micro_batches_does_not_matter(rng):
    """Metrics that scale with gradient accumulation; the last micro-batch only."""
    x = torch.from_numpy(rng.normal(0, 1, (8, 100)).astype(np.float32))
    results = []
    for pieces in (1, 2, 4, 8):
        accumulator = SliceAccumulator(["all"])
        for part in x.chunk(pieces):
            accumulator.update(part, torch.zeros_like(part))
        results.append(accumulator.compute())
    for result in results[1:]:
        assert torch.equal(result.state.histogram, results[0].state.histogram)
        assert torch.equal(result.state.counts, results[0].state.counts)
        for key, value in result.to_dict().items():
            assert value == pytest.approx(results[0].to_dict()[key], rel=1e-6), key


def test_packing_does_not_matter(rng):
    """The same tokens padded, packed, as one row, or split in a zig-zag over two shards."""
    x = torch.from_numpy(rng.normal(0, 1, (4, 64)).astype(np.float32))
    keep = torch.from_numpy(rng.random((4, 64)) < 0.7)
    padded = slice_stats(x, torch.zeros_like(x), keep)
    packed = x[keep]
    for other in (
        slice_stats(packed, torch.zeros_like(packed)),
        slice_stats(packed[None], torch.zeros_like(packed[None])),
        sum(
            slice_stats(part, torch.zeros_like(part), mask)
            for part, mask in (
                (torch.cat((x[:, :16], x[:, 48:]), 1), torch.cat((keep[:, :16], keep[:, 48:]), 1)),
                (x[:, 16:48], keep[:, 16:48]),
            )
        ),
    ):
        assert torch.equal(other.state.histogram, padded.state.histogram)
        assert torch.equal(other.state.counts, padded.state.counts)


def test_every_batch_fills_the_same_state():
    """Keys that exist only where a slice has tokens hang a reduction key by key."""
    full = slice_stats(torch.ones(3), torch.zeros(3), {"a": torch.ones(3), "b": torch.ones(3)})
    none = slice_stats(torch.ones(3), torch.zeros(3), {"a": torch.zeros(3), "b": torch.zeros(3)})
    assert full.to_dict().keys() == none.to_dict().keys()
    assert full.state.buffer.shape == none.state.buffer.shape


def test_the_kind_of_a_statistic_is_not_guessed_from_its_name():
    """Reductions chosen by a substring: a slice called "max" is pooled like any other."""
    parts = [
        slice_stats(torch.tensor(x), torch.zeros(len(x)), {"max_kl": torch.ones(1), "min": torch.ones(1)})
        for x in ([1.0, 2.0], [9.0])
    ]
    pooled = sum(parts)
    for name in ("max_kl", "min"):
        assert float(pooled[name].log_ratio_mean) == 4.0


# ---- bins, counts, quantiles


def test_bins_resolve_ratios_near_one():
    """Bins of 7 % around 1 report p95 = 1.067 for a spread of 0.3 %, and 0.9965 when every ratio is 1."""
    x = 0.003 * torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    p95 = math.exp(float(of(x).quantile(0.95)))
    assert p95 == pytest.approx(float(np.exp(np.quantile(x.numpy(), 0.95))), abs=2e-5)
    ones = of(torch.zeros(1000))
    assert ones.quantile([0.05, 0.5, 0.95]).tolist() == [0.0, 0.0, 0.0]
    assert float(ones.zero_fraction) == 1.0


def test_mismatch_of_1e_5_is_resolved():
    """Medians of 1.4e-5 and outliers of 50 in one histogram: uniform bins see only one of them."""
    x = torch.cat((torch.full((9_000,), 1.44e-5), torch.full((999,), 1.3e-4), torch.tensor([50.0])))
    view = of(x)
    assert float(view.abs_quantile(0.5)) == pytest.approx(1.44e-5, rel=2.0**-5)
    assert float(view.abs_quantile(0.99)) == pytest.approx(1.3e-4, rel=2.0**-5)
    assert float(view.abs_quantile(1.0)) == 50.0


def test_bfloat16_is_widened_before_the_subtraction():
    """A bfloat16 difference of bfloat16 numbers loses the digits that are the mismatch."""
    logp, old_logp = torch.tensor([-1.0078125, -4.03125]).bfloat16(), torch.tensor([-0.00390625, -0.015625]).bfloat16()
    narrow = (logp - old_logp).float()
    exact = logp.double() - old_logp.double()
    assert not torch.equal(narrow.double(), exact)
    view = slice_stats(logp, old_logp)["all"]
    assert float(view.log_ratio_min) == float(exact.min())
    assert float(view.log_ratio_max) == float(exact.max())


def test_a_difference_of_5e_7_is_no_zero():
    """Bitwise agreement of two engines is a count of exact zeros, not a tolerance."""
    old_logp = torch.tensor([-1.0, -1.0, -1.0])
    logp = old_logp + torch.tensor([0.0, 4.8e-7, 0.0])
    assert float(slice_stats(logp, old_logp)["all"].zero_fraction) == pytest.approx(2 / 3)


def test_counts_do_not_stop_at_2_to_the_24():
    """float32 counts stick: 2^24 + 1 equals 2^24."""
    n = (1 << 24) + 1
    assert torch.tensor(float(n)).item() == 1 << 24
    view = slice_stats(torch.zeros(1).expand(n), torch.zeros(1).expand(n))["all"]
    assert int(view.n_tokens) == int(view.n_zero) == n


def test_counts_do_not_take_the_dtype_of_the_data():
    """torch.histc counts 4096 of 100 000 float16 zeros; see also the counts of bfloat16."""
    for dtype in (torch.float16, torch.bfloat16):
        zeros = torch.zeros(100_000, dtype=dtype)
        assert torch.histc(zeros, 1, -1, 1).item() != 100_000
        assert int(slice_stats(zeros, zeros)["all"].n_zero) == 100_000
        ones = torch.ones(100_000, dtype=dtype)
        assert int(slice_stats(ones, zeros)["all"].histogram().counts.max()) == 100_000


def test_quantiles_of_more_than_2_to_the_24_tokens():
    """torch.quantile refuses more than 2^24 elements."""
    n = (1 << 24) + 1
    big = torch.zeros(1).expand(n)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(big, 0.5)
    assert float(slice_stats(big, torch.zeros(1).expand(n))["all"].quantile(0.999)) == 0.0


def test_quantiles_beside_infinities():
    """Interpolating between infinities gives NaN; here they are counted and stay outside."""
    x = torch.tensor([-math.inf, 1.0, 2.0, 3.0, math.inf, math.inf])
    view = of(x)
    assert float(view.quantile(1.0)) == 3.0
    assert float(view.quantile(0.5)) == pytest.approx(2.0, rel=2.0**-5)
    assert not math.isnan(view.quantile(0.999))


def test_nan_of_either_sign_does_not_sort_into_the_tail():
    """NaN with the sign bit set sorts first and shifts every rank."""
    negative_nan = torch.tensor([0xFFC00000 - (1 << 32)], dtype=torch.int32).view(torch.float32)
    x = torch.cat((torch.arange(1.0, 100.0), negative_nan, torch.tensor([math.nan])))
    view = of(x)
    assert int(view.n_nan) == 2
    assert (float(view.quantile(0.0)), float(view.quantile(1.0))) == (1.0, 99.0)


def test_a_histogram_of_bfloat16_with_nan_does_not_crash():
    """Loggers die on bfloat16, NaN or infinity in a histogram."""
    x = torch.tensor([math.nan, math.inf, 0.5, -0.5]).bfloat16()
    counts, edges = slice_stats(x, torch.zeros(4).bfloat16())["all"].histogram()
    assert int(counts.sum()) == 2
    assert len(edges) == len(counts) + 1


def test_zeros_of_both_signs_are_one_atom():
    """-0.0 and 0.0 have different bits: in different bins half of the on-policy tokens look negative."""
    view = of([0.0, -0.0, -0.0, 0.0, 1.0])
    assert int(view.n_zero) == 4
    assert [float(bound) for bound in view.quantile_bounds(0.5)] == [0.0, 0.0]


def test_equal_values_and_single_values():
    """Sketches that answer NaN for one value, or spread equal ones."""
    assert of([0.25] * 1000).quantile([0.0, 0.3, 0.999, 1.0]).tolist() == [0.25] * 4
    assert float(of([-0.125]).quantile(0.5)) == -0.125


def test_values_on_bin_edges_fall_to_the_right_side():
    """A multiplication rounded the wrong way moves a value on an edge into the bin below."""
    edges = torch.tensor(pyrlstats.Layout().abs_edges[1:-1])
    counts = of(edges).histogram().counts
    positive = counts[len(counts) // 2 + 1 :]
    assert positive[0] == 0
    assert (positive[1:] == 1).all()


def test_pooled_quantiles_are_not_averages_of_quantiles(rng):
    """One stale shard of 16 with 5 times the spread: averaged p99.9 is a third of the pooled one."""
    shards = [rng.normal(0, 0.05 if index == 0 else 0.01, 20_000).astype(np.float32) for index in range(16)]
    views = [slice_stats(shard, np.zeros_like(shard)) for shard in shards]
    pooled = float(sum(views)["all"].abs_quantile(0.999))
    truth = np.quantile(np.abs(np.concatenate(shards)), 0.999, method="inverted_cdf")
    assert pooled == pytest.approx(truth, rel=2e-2)
    averaged = np.mean([float(view["all"].abs_quantile(0.999)) for view in views])
    assert averaged < 0.6 * truth


def test_uneven_shards_and_an_empty_one():
    """Thresholds from local quantiles, or a gather of unequal lengths: 3, 5 and no tokens."""
    shards = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0, 40.0, 50.0], []]
    pooled = sum(of(shard)._stats for shard in shards)["all"]
    assert int(pooled.n_tokens) == 8
    assert float(pooled.quantile(0.5)) == pytest.approx(10.0, rel=2.0**-5)
    assert float(pooled.quantile(1.0)) == 50.0


def test_padding_values_do_not_enter_a_quantile():
    """A padding value repeated thousands of times becomes the quantile."""
    x = torch.full((4, 1000), 4.9226)
    x[:, :10] = torch.arange(10.0)
    mask = torch.zeros(4, 1000)
    mask[:, :10] = 1
    view = of(x, mask)
    assert float(view.quantile(1.0)) == 9.0
    assert float(view.quantile(0.45)) == pytest.approx(4.0, rel=2.0**-5)


def test_log_ratios_of_one_offset_sequence():
    """Five log-ratios from -10 to 0.8 with known figures."""
    view = of([0.1, -1.5, 0.8, -10.0, 0.3])
    assert float(view.kl_k1) == pytest.approx(2.06, rel=1e-6)
    assert (float(view.log_ratio_min), float(view.log_ratio_max)) == (-10.0, float(np.float32(0.8)))
    assert float(view.clip_fraction) == 0.8
    assert float(view.clip_fraction_low) == 0.4
    weights = np.exp(np.float32([0.1, -1.5, 0.8, -10.0, 0.3]).astype(float))
    assert float(view.ess) == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-6)


def test_graph_attached_log_probabilities_are_not_kept():
    """Statistics that hold the graph of the log-probabilities run out of memory."""
    logp = torch.randn(10, requires_grad=True) * 2
    accumulator = SliceAccumulator(["all"]).update(logp, torch.zeros(10))
    assert accumulator.compute()["all"].kl_k3.grad_fn is None
    assert not accumulator.compute().state.buffer.requires_grad
