"""Truncated importance weights, beside the raw ones: clamped into bounds, or left out beyond them."""

from __future__ import annotations

from pyrlstats.groups.tokens import Tokens
from pyrlstats.layout import LOG2E, log_bounds
from pyrlstats.memo import shared
from pyrlstats.state import Array, State, namespace, power_of_two, scale_exponent
from pyrlstats.stats import denominator


def fill(section: State, tokens: Tokens) -> None:
    """The rows of one block in an empty section."""
    x = tokens.x
    xp = namespace(x)
    low, high = log_bounds(*section.clip)
    tokens.count_in(section, "below", x < low)
    tokens.count_in(section, "above", x > high)
    inside = tokens._replace(members=tokens.members & (x >= low) & (x <= high))
    inside.maximum_in(section, "max_x", x)
    exponent = scale_exponent(section.maximum("max_x"))[:, None]
    # a token outside the bounds may lie above the scale
    scaled = xp.exp2(xp.clip(x * LOG2E - exponent, None, 1.0))
    inside.sum_in(section, "inside_w", scaled)
    inside.sum_in(section, "inside_w2", scaled * scaled)


def truncated_fraction_low(state: State) -> Array:
    """Share of w < lo, decided on x with log(lo) rounded to float32."""
    return state.group("truncation").count("below") / denominator(state)


def truncated_fraction_high(state: State) -> Array:
    """Share of w > hi, decided on x with log(hi) rounded to float32."""
    return state.group("truncation").count("above") / denominator(state)


def truncated_fraction(state: State) -> Array:
    """Share of w outside [lo, hi]: clamped, or left out."""
    rows = state.group("truncation")
    return (rows.count("below") + rows.count("above")) / denominator(state)


@shared
def _sums(state: State) -> tuple[Array, Array, Array]:
    """k, 2^-k sum w and 2^-2k sum w^2 of the weights inside the bounds."""
    rows = state.group("truncation")
    return scale_exponent(rows.maximum("max_x")), rows.sum("inside_w"), rows.sum("inside_w2")


def masked_ratio_mean(state: State) -> Array:
    """mean of w inside [lo, hi], 0 outside, over n_finite: masked importance sampling (IcePop)."""
    k, first, _ = _sums(state)
    return power_of_two(k) * (first / denominator(state))


def masked_ess_fraction(state: State) -> Array:
    """Kish's effective sample size of the masked weights over n_finite; 0 where every token is masked."""
    xp = namespace(state.buffer)
    _, first, second = _sums(state)
    n = denominator(state)
    fraction = first**2 / xp.where(second > 0, second, 1.0) / n
    return xp.minimum(fraction, 1.0 - truncated_fraction(state))


@shared
def _clamped_sums(state: State) -> tuple[Array, Array, Array]:
    """e, 2^-e sum w and 2^-2e sum w^2 of the clamped weights."""
    xp = namespace(state.buffer)
    rows = state.group("truncation")
    lo, hi = rows.clip
    k, first, second = _sums(state)
    n_above = xp.asarray(rows.count("above"), dtype=xp.float64)
    n_below = xp.asarray(rows.count("below"), dtype=xp.float64)
    # an infinite bound clamps nothing, 0 adds nothing
    at_hi, at_lo = (n_above * hi if hi < float("inf") else 0.0 * n_above), n_below * lo
    at_hi2, at_lo2 = (at_hi * hi if hi < float("inf") else at_hi), at_lo * lo
    # tiny weights keep their scale unless others stand beside them
    e = xp.where(at_hi + at_lo > 0, xp.clip(k, 0.0, None), k)
    up, down = power_of_two(k - e), power_of_two(xp.where(at_hi + at_lo > 0, -e, 0.0))
    return e, up * first + down * (at_hi + at_lo), up**2 * second + down**2 * (at_hi2 + at_lo2)


def clamped_ratio_mean(state: State) -> Array:
    """mean of min(max(w, lo), hi): truncated importance sampling (TIS)."""
    e, first, _ = _clamped_sums(state)
    return power_of_two(e) * (first / denominator(state))


def clamped_ess_fraction(state: State) -> Array:
    """Kish's effective sample size of the clamped weights over n_finite."""
    xp = namespace(state.buffer)
    _, first, second = _clamped_sums(state)
    return xp.clip(first**2 / second / denominator(state), None, 1.0)
