"""The definition of the optional statistics, straight from the tokens of one slice, in NumPy float64.

Written to be read and to be slow, like :mod:`pyrlstats.reference`: no state, no histogram, one sequence at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import clip_thresholds, log_bounds
from pyrlstats.reference import Float32, Float64, log_ratio, quantile, statistics

NAN = float("nan")


def _mean(values: NDArray[Any]) -> float:
    return float(np.mean(values)) if values.size else NAN


def _kish(weights: Float64) -> float:
    """(sum w)^2 / (n sum w^2), of weights that may be scaled; NaN where there are none, or all are 0."""
    largest = weights.max(initial=0.0)
    if largest == 0.0:
        return NAN
    scaled = weights / largest
    return float(scaled.sum() ** 2 / (scaled**2).sum() / scaled.size)


def probability_statistics(logp: NDArray[Any], old_logp: NDArray[Any]) -> dict[str, float]:
    """Of p = exp(logp) and q = exp(old_logp), over the tokens with finite x."""
    finite = np.isfinite(log_ratio(logp, old_logp))
    p, q = np.exp(logp[finite].astype(np.float64)), np.exp(old_logp[finite].astype(np.float64))
    d = np.abs(p - q)
    varies = d.size > 0 and np.ptp(p) > 0 and np.ptp(q) > 0
    return {
        "probability_diff_mean": _mean(d),
        "probability_diff_std": float(np.std(d)) if d.size else NAN,
        "probability_diff_max": float(d.max()) if d.size else NAN,
        "probability_correlation": float(np.corrcoef(p, q)[0, 1]) if varies else NAN,
    }


def truncation_statistics(x: Float32, truncate: tuple[float, float]) -> dict[str, float]:
    """Of the ratios clamped into (lo, hi), and masked to 0 outside."""
    lo, hi = truncate
    low, high = log_bounds(lo, hi)
    finite = x[np.isfinite(x)].astype(np.float64)
    below, above = finite < low, finite > high
    inside = ~(below | above)
    # scale-free figures need the weights up to a factor only: where all lie inside, that of the largest
    shift = finite[inside].max(initial=-np.inf) if inside.all() else 0.0
    with np.errstate(over="ignore"):
        weights = np.exp(np.where(inside, finite, 0.0) - (shift if np.isfinite(shift) else 0.0))
    clamped = np.where(below, lo, np.where(above, hi, weights))
    masked = np.where(inside, weights, 0.0)
    with np.errstate(over="ignore"):
        raw = np.exp(np.where(inside, finite, 0.0))
    hi = hi if above.any() else 0.0  # inf clamps nothing
    return {
        "truncated_fraction_low": _mean(below),
        "truncated_fraction_high": _mean(above),
        "truncated_fraction": _mean(~inside),
        "clamped_ratio_mean": _mean(np.where(below, lo, np.where(above, hi, raw))),
        "clamped_ess_fraction": _kish(clamped),
        "masked_ratio_mean": _mean(np.where(inside, raw, 0.0)),
        "masked_ess_fraction": 0.0 if finite.size and not inside.any() else _kish(masked),
    }


def advantage_statistics(
    x: Float32, advantages: NDArray[Any], clip: tuple[float, float] = (0.2, 0.2), dual_clip: float = 3.0
) -> dict[str, float]:
    """Of the advantages A, of what PPO clips by their sign, and of the updates w A."""
    low, high = clip_thresholds(clip)
    (dual,) = log_bounds(dual_clip)
    values = advantages.astype(np.float32)
    both = np.isfinite(x) & np.isfinite(advantages)
    xs, signs = x[both], np.sign(advantages[both])
    clipped_low, clipped_high = (xs < low) & (signs < 0), (xs > high) & (signs > 0)
    a = values[np.isfinite(values)].astype(np.float64)
    with np.errstate(all="ignore"):
        u = np.abs((np.exp(x.astype(np.float64)) * advantages.astype(np.float64)).astype(np.float32))
    u = u[np.isfinite(x) & np.isfinite(u)].astype(np.float64)
    return {
        "n_advantage_not_finite": int(np.count_nonzero(np.isfinite(x) & ~np.isfinite(advantages))),
        "policy_clip_fraction_low": _mean(clipped_low),
        "policy_clip_fraction_high": _mean(clipped_high),
        "policy_clip_fraction": _mean(clipped_low | clipped_high),
        "dual_clip_fraction": _mean((xs > dual) & (signs < 0)),
        "advantage_mean": _mean(a),
        "advantage_std": float(np.std(a)) if a.size else NAN,
        "advantage_min": float(a.min()) if a.size else NAN,
        "advantage_max": float(a.max()) if a.size else NAN,
        "advantage_positive_fraction": _mean(a > 0),
        "update_ess_fraction": _kish(u),
        "update_abs_mean": _mean(u),
        "update_abs_max": float(u.max()) if u.size else NAN,
        "update_abs_p50": quantile(u, 0.5),
        "update_abs_p99": quantile(u, 0.99),
        "update_abs_p99_9": quantile(u, 0.999),
    }


def sequence_values(
    logp: NDArray[Any], old_logp: NDArray[Any], member: NDArray[np.bool_], sequence: NDArray[np.int64], n_sequences: int
) -> tuple[dict[str, Float32], int]:
    """One value a sequence with a token of the slice, and how many sequences have none.

    Args:
        logp, old_logp, member: (n,).
        sequence: int64 (n,), of each token; -1 is none.
    """
    x = log_ratio(logp, old_logp).astype(np.float64)
    values: dict[str, list[float]] = {"sums": [], "means": [], "log_perplexities": [], "old_log_perplexities": []}
    n_empty = 0
    for index in range(n_sequences):
        tokens = member & (sequence == index)
        if not tokens.any():
            n_empty += 1
            continue
        values["sums"].append(x[tokens].sum())
        values["means"].append(x[tokens].mean())
        values["log_perplexities"].append(-logp[tokens].astype(np.float64).mean())
        values["old_log_perplexities"].append(-old_logp[tokens].astype(np.float64).mean())
    return {name: np.array(column, np.float32) for name, column in values.items()}, n_empty


def sequence_statistics(
    logp: NDArray[Any],
    old_logp: NDArray[Any],
    member: NDArray[np.bool_],
    sequence: NDArray[np.int64],
    n_sequences: int,
    clip: tuple[float, float] = (0.2, 0.2),
) -> dict[str, float]:
    """Over sequences: of the sums of x, of its means, and of the perplexities; arguments of :func:`sequence_values`."""
    with np.errstate(invalid="ignore"):
        values, n_empty = sequence_values(logp, old_logp, member, sequence, n_sequences)
    sums, means = statistics(values["sums"], clip), statistics(values["means"], clip)
    new, old = statistics(values["log_perplexities"]), statistics(values["old_log_perplexities"])
    difference = statistics(-values["means"])
    finite = values["sums"][np.isfinite(values["sums"])].astype(np.float64)
    largest = finite.max(initial=-np.inf)
    unnormalised = NAN
    if finite.size:
        unnormalised = float(2.0 * largest + np.log(np.mean(np.exp(2.0 * (finite - largest)))))
    return {
        "n_sequences": sums["n_tokens"],
        "n_sequences_finite": sums["n_finite"],
        "n_sequences_empty": n_empty,
        **{
            f"sequence_{name}": sums[name]
            for name in (
                *("log_ratio_mean", "log_ratio_std", "log_ratio_min", "log_ratio_max"),
                *("ratio_mean", "ratio_std", "ratio_min", "ratio_max", "ess_fraction", "chi2", "renyi2"),
            )
        },
        "sequence_renyi2_unnormalised": unnormalised,
        **{
            f"sequence_geometric_{name}": means[name]
            for name in ("ratio_mean", "ratio_std", "ratio_min", "ratio_max", "ess_fraction", "clip_fraction")
        },
        "sequence_perplexity": new["ratio_mean"],
        "sequence_old_perplexity": old["ratio_mean"],
        "sequence_log_perplexity": new["log_ratio_mean"],
        "sequence_old_log_perplexity": old["log_ratio_mean"],
        "sequence_log_perplexity_diff_mean": difference["log_ratio_mean"],
        "sequence_log_perplexity_diff_abs_mean": difference["log_ratio_abs_mean"],
        "sequence_log_perplexity_diff_min": difference["log_ratio_min"],
        "sequence_log_perplexity_diff_max": difference["log_ratio_max"],
        "sequence_perplexity_ratio": difference["ratio_mean"],
    }
