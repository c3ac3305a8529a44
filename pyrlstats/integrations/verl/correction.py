"""``rollout_corr_metrics``: what verl logs under ``rollout_corr/``, with its names."""

from __future__ import annotations

import math
from typing import Any

import torch

from pyrlstats.api import slice_stats
from pyrlstats.integrations.sums import weight_moments
from pyrlstats.integrations.verl import rejection
from pyrlstats.integrations.verl.members import Members, largest, mean, sample_std, smallest, std
from pyrlstats.integrations.verl.thresholds import bounds
from pyrlstats.slice_stats import SliceStats
from pyrlstats.stats import denominator

PREFIX = "rollout_corr/"
LEVELS = ("token", "sequence")


def rollout_corr_metrics(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> dict[str, float]:
    """The metrics of verl's ``compute_rollout_correction_and_rejection_mask``, same arguments, same keys.

    ``x = old_log_prob - rollout_log_prob``, nats. Every key has verl's meaning (weights are those that are applied:
    truncated, or zeroed by IcePop), and verl's value where that is right. It differs on purpose where verl's is not;
    ``docs/trainers/verl.md`` has the list, with numbers: k3 and standard deviations do not cancel, nothing saturates at
    exp(20), sequences without tokens enter no mean, the sequence level's effective sample size is over sequences,
    nothing raises where all weights are 0, and tokens that are not finite are left out and counted.

    Args:
        old_log_prob, rollout_log_prob: (B, T), of the training and of the rollout engine; bfloat16, float16, float32 or
            float64, widened before they are subtracted. Detached.
        response_mask: (B, T); non-zero is a member. verl's rejection sampling replaces it: pass the one from before.
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold: verl's options;
            they add the same keys. The batch normalisation factor is this process's, not the world's.

    Returns:
        Floats by ``"rollout_corr/..."``, and ``rollout_corr/n_non_finite``, the tokens left out. NaN where there is
        nothing to take a mean of: an empty mask does not raise. Reads the values back: it syncs on a GPU.

    Raises:
        ValueError: shapes, or options, that do not fit.
    """
    members = Members(old_log_prob, rollout_log_prob, response_mask)
    metrics: dict[str, float] = {"n_non_finite": float(members.n_non_finite)}
    if rollout_is is not None and rollout_is_threshold is not None:
        metrics |= _weights(members, rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    if rollout_rs is not None:
        metrics |= rejection.metrics(members, rollout_rs, rollout_rs_threshold)
    metrics |= _off_policy(members, old_log_prob, rollout_log_prob)
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def _off_policy(members: Members, old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor) -> dict[str, float]:
    stats = slice_stats(old_log_prob, rollout_log_prob, members.member, sequences=True)
    every = stats["all"]
    metrics = {
        "training_ppl": every.sequence_perplexity,
        "training_log_ppl": every.sequence_log_perplexity,
        "kl": every.kl_k1,
        "k3_kl": every.kl_k3,
        "rollout_ppl": every.sequence_old_perplexity,
        "rollout_log_ppl": every.sequence_old_log_perplexity,
        "log_ppl_diff": every.sequence_log_perplexity_diff_mean,
        "log_ppl_abs_diff": every.sequence_log_perplexity_diff_abs_mean,
        "log_ppl_diff_max": every.sequence_log_perplexity_diff_max,
        "log_ppl_diff_min": every.sequence_log_perplexity_diff_min,
        "ppl_ratio": every.sequence_perplexity_ratio,
        "chi2_token": _mean_square_less_1(stats),
        "chi2_seq": _mean_square_less_1(stats.sequences),
    }
    return {name: float(value) for name, value in metrics.items()}


def _mean_square_less_1(stats: SliceStats) -> Any:
    """mean(w^2) - 1, not self-normalised, from sums of w - 1, so that nothing cancels; inf where w^2 overflows."""
    first, second = weight_moments(stats.state)
    return (second[0] + 2.0 * first[0]) / denominator(stats.state)[0]


def _weights(members: Members, level: str, threshold: str | float, normalize: bool) -> dict[str, float]:
    if level not in LEVELS:
        raise ValueError(f"rollout_is must be one of {list(LEVELS)}, got {level!r}")
    lower, upper = bounds("rollout_is_threshold", threshold)
    below = lower if lower is not None else 1.0 / upper
    by_token = level == "token"
    log_ratio = members.x[members.member].double() if by_token else members.row_sums(members.x)
    raw = log_ratio.exp()
    outside = (raw < below) | (raw > upper)
    applied = raw.clamp(max=upper) if lower is None else torch.where(outside, 0.0, raw)
    # the loss applies the weight of a sequence to each of its tokens
    lengths = None if by_token else members.lengths
    shown = applied if by_token else raw
    if by_token:
        row_applied, row_raw = (_row_means(members, values) for values in (applied, raw))
    else:
        row_applied, row_raw = applied, raw
    metrics = {
        "rollout_is_mean": mean(applied, lengths),
        "rollout_is_max": largest(shown),
        "rollout_is_min": smallest(shown),
        "rollout_is_ratio_fraction_high": mean(raw > upper),
        "rollout_is_ratio_fraction_low": mean(raw < below),
        "rollout_is_std": std(applied, lengths),
        "rollout_is_eff_sample_size": _ess_fraction(applied),
        "rollout_is_seq_mean": mean(row_applied),
        "rollout_is_seq_std": sample_std(row_applied),
        "rollout_is_seq_max": largest(row_applied),
        "rollout_is_seq_min": smallest(row_applied),
        "rollout_is_seq_max_deviation": largest((row_applied - 1.0).abs()),
        "rollout_is_seq_fraction_high": mean(row_raw > upper),
        "rollout_is_seq_fraction_low": mean(row_raw < below),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = mean(outside, lengths)
    if normalize:
        factor = mean(applied)
        metrics["rollout_is_batch_norm_factor"] = factor if not factor <= 1e-8 else 1.0
    return metrics


def _row_means(members: Members, values: torch.Tensor) -> torch.Tensor:
    """Means over each sequence of values that its members have, one after the other."""
    spread = torch.zeros(members.member.shape, dtype=torch.float64, device=values.device)
    spread[members.member] = values
    return members.row_means(spread)


def _ess_fraction(weights: torch.Tensor) -> float:
    """(sum w)^2 / (n sum w^2); NaN where every weight is 0, or there is none."""
    weights = weights / weights.max() if weights.numel() else weights
    return mean(weights) ** 2 / (mean(weights**2) or math.nan)
