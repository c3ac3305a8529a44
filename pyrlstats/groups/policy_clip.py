"""What the advantage A of a token says of its ratio: which tokens PPO clips, and how large the updates w A are."""

from __future__ import annotations

from pyrlstats import stats as _stats
from pyrlstats.groups.tokens import Tokens
from pyrlstats.layout import clip_thresholds, log_bounds
from pyrlstats.state import Array, State, namespace


def fill(section: State, tokens: Tokens) -> None:
    """The rows of one block in an empty section."""
    x, advantages = tokens.x, tokens.advantages
    xp = namespace(x)
    low, high, dual = section.clip
    below, above = clip_thresholds((low, high))
    (far_above,) = log_bounds(dual)
    finite = xp.isfinite(advantages)
    tokens.count_in(section, "n_advantage", finite)
    tokens.count_in(section, "n_not_finite", ~finite)
    tokens.count_in(section, "low", finite & (x < below) & (advantages < 0))
    tokens.count_in(section, "high", finite & (x > above) & (advantages > 0))
    tokens.count_in(section, "dual", finite & (x > far_above) & (advantages < 0))


def updates(tokens: Tokens) -> Array:
    """w A, float64 (n,): NaN where x is not finite."""
    xp = namespace(tokens.x)
    # exp(-inf) is 0, which would count as an update of 0
    return xp.where(xp.isfinite(tokens.every_x), xp.exp(tokens.every_x), float("nan")) * tokens.advantages


def _denominator(state: State) -> Array:
    xp = namespace(state.buffer)
    n = state.group("policy_clip").count("n_advantage")
    return xp.where(n > 0, xp.asarray(n, dtype=xp.float64), float("nan"))


def n_advantage_not_finite(state: State) -> Array:
    """Tokens with finite x whose advantage is NaN or infinite: excluded from the fractions below."""
    return state.group("policy_clip").count("n_not_finite")


def policy_clip_fraction_low(state: State) -> Array:
    """Share of w < 1 - low with A < 0: PPO's gradient of these tokens is 0. Over tokens with finite x and A."""
    return state.group("policy_clip").count("low") / _denominator(state)


def policy_clip_fraction_high(state: State) -> Array:
    """Share of w > 1 + high with A > 0: PPO's gradient of these tokens is 0. Over tokens with finite x and A."""
    return state.group("policy_clip").count("high") / _denominator(state)


def policy_clip_fraction(state: State) -> Array:
    """Share of tokens whose gradient PPO clips to 0, by the sign of their advantage. Schulman et al. (2017)."""
    rows = state.group("policy_clip")
    return (rows.count("low") + rows.count("high")) / _denominator(state)


def dual_clip_fraction(state: State) -> Array:
    """Share of w > dual_clip with A < 0: what dual-clip PPO clips besides. Ye et al. (2020)."""
    return state.group("policy_clip").count("dual") / _denominator(state)


def update_ess_fraction(state: State) -> Array:
    """(sum abs(w A))^2 / sum (w A)^2 over the tokens with finite w A: 1 / n where one token makes the whole update.

    NaN where every w A is 0.
    """
    rows = state.group("updates")
    xp = namespace(state.buffer)
    n = xp.asarray(rows.n_finite(), dtype=xp.float64)
    square = rows.sum("near_x2") + rows.sum("far_x2")
    fraction = rows.sum("abs_x") ** 2 / square / n
    return xp.where(square > 0, xp.clip(fraction, None, 1.0), float("nan"))


def update_abs_mean(state: State) -> Array:
    """mean(abs(w A)), in the unit of the advantages."""
    return _stats.log_ratio_abs_mean(state.group("updates"))


def update_abs_max(state: State) -> Array:
    """max(abs(w A)), in the unit of the advantages."""
    rows = state.group("updates")
    return namespace(state.buffer).maximum(_stats.log_ratio_max(rows), -_stats.log_ratio_min(rows))
