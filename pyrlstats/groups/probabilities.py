"""Probabilities rather than their logarithms: p = exp(logp), q = exp(old_logp)."""

from __future__ import annotations

from pyrlstats.groups.tokens import Tokens
from pyrlstats.state import Array, State, namespace
from pyrlstats.stats import denominator


def fill(section: State, tokens: Tokens) -> None:
    """The rows of one block in an empty section."""
    xp = namespace(tokens.x)
    p, q = xp.exp(tokens.logp), xp.exp(tokens.old_logp)
    d = xp.abs(p - q)
    for name, values in {"p": p, "q": q, "p2": p * p, "q2": q * q, "pq": p * q, "d": d, "d2": d * d}.items():
        tokens.sum_in(section, name, values)
    for name, values in {"max_p": p, "neg_min_p": -p, "max_q": q, "neg_min_q": -q, "max_d": d}.items():
        tokens.maximum_in(section, name, values)


def probability_diff_mean(state: State) -> Array:
    """mean(abs(p - q)), p = exp(logp), q = exp(old_logp): how far apart the two policies' probabilities are."""
    return state.group("probabilities").sum("d") / denominator(state)


def probability_diff_std(state: State) -> Array:
    """Population standard deviation of abs(p - q)."""
    xp = namespace(state.buffer)
    mean_square = state.group("probabilities").sum("d2") / denominator(state)
    return xp.sqrt(xp.clip(mean_square - probability_diff_mean(state) ** 2, 0.0, None))


def probability_diff_max(state: State) -> Array:
    """Largest abs(p - q)."""
    return state.group("probabilities").maximum("max_d") + 0.0 * denominator(state)


def probability_correlation(state: State) -> Array:
    """Pearson's correlation of p and q, from -1 to 1. NaN where either is the same for all tokens."""
    xp = namespace(state.buffer)
    rows, n = state.group("probabilities"), denominator(state)
    mean_p, mean_q = rows.sum("p") / n, rows.sum("q") / n
    variance_p = rows.sum("p2") / n - mean_p**2
    variance_q = rows.sum("q2") / n - mean_q**2
    covariance = rows.sum("pq") / n - mean_p * mean_q
    varies = (rows.maximum("max_p") > -rows.maximum("neg_min_p")) & (rows.maximum("max_q") > -rows.maximum("neg_min_q"))
    correlation = covariance / xp.sqrt(xp.clip(variance_p * variance_q, 0.0, None))
    return xp.where(varies, xp.clip(correlation, -1.0, 1.0), float("nan"))
