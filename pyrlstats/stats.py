"""Every scalar statistic as a pure function of a state: one name, one formula, one place.

All functions take a :class:`~pyrlstats.state.State` of S slices and return an array of shape (S,): a NumPy
array or a torch tensor on the state's device, like the state itself. Nothing here reads a token, allocates by
data or syncs. Counts are int64; everything else is float64 and NaN for a slice without finite tokens.

Samples come from the old (behaviour) policy: ``x = logp - old_logp`` in nats, weight and ratio ``w = exp(x)``.
Fractions and means are over ``n_finite``; NaN and infinite x are counted and excluded from everything else.
"""

from __future__ import annotations

from pyrlstats.layout import LOG2E
from pyrlstats.memo import shared
from pyrlstats.state import Array, State, namespace, power_of_two, scale_exponent

# the largest unit in which w - 1 and w of far tokens still share one float64 sum
_LARGEST_SHARED_UNIT = 2.0**32


def n_tokens(state: State) -> Array:
    """Members of the slice, finite or not. Tokens."""
    return state.count("n_tokens")


def n_nan(state: State) -> Array:
    """Members whose x is NaN (also inf - inf). Tokens."""
    return state.count("n_nan")


def n_pos_inf(state: State) -> Array:
    """Members whose x is +inf. Tokens."""
    return state.count("n_pos_inf")


def n_neg_inf(state: State) -> Array:
    """Members whose x is -inf. Tokens."""
    return state.count("n_neg_inf")


@shared
def n_finite(state: State) -> Array:
    """Members with finite x: the denominator of every fraction and mean. Tokens."""
    return state.n_finite()


def n_zero(state: State) -> Array:
    """Members with x == 0 exactly, either sign. Tokens."""
    return state.count("n_zero")


@shared
def _holds_any(state: State) -> Array:
    return n_finite(state) > 0


@shared
def denominator(state: State) -> Array:
    """n_finite as float64, NaN where it is 0."""
    xp = namespace(state.buffer)
    return xp.where(_holds_any(state), xp.asarray(n_finite(state), dtype=xp.float64), float("nan"))


def positive_fraction(state: State) -> Array:
    """Share of x > 0, exact."""
    return state.histogram[:, state.layout.bins_per_sign :].sum(-1) / denominator(state)


def negative_fraction(state: State) -> Array:
    """Share of x < 0, exact."""
    return state.histogram[:, : state.layout.bins_per_sign].sum(-1) / denominator(state)


def _nan_if_empty(state: State, values: Array) -> Array:
    return namespace(values).where(_holds_any(state), values, float("nan"))


def zero_fraction(state: State) -> Array:
    """Share of x == 0. 1.0 on the first minibatch of an on-policy step whose engines agree bit for bit."""
    return n_zero(state) / denominator(state)


@shared
def log_ratio_mean(state: State) -> Array:
    """mean(x), nats. The negative of ``kl_k1``."""
    return (state.sum("near_x") + state.sum("far_x")) / denominator(state)


@shared
def _mean_square(state: State) -> Array:
    return (state.sum("near_x2") + state.sum("far_x2")) / denominator(state)


@shared
def _variance(state: State) -> Array:
    return _mean_square(state) - log_ratio_mean(state) ** 2


def log_ratio_std(state: State) -> Array:
    """Population standard deviation of x, nats.

    From float64 sums; held between 0 and half the range of x, so that equal tokens give exactly 0.
    """
    xp = namespace(state.buffer)
    return xp.minimum(xp.sqrt(_variance(state).clip(0.0, None)), _range(state) / 2.0)


@shared
def log_ratio_min(state: State) -> Array:
    """Smallest finite x, exact. Nats."""
    return _nan_if_empty(state, -state.maximum("neg_min_x"))


@shared
def log_ratio_max(state: State) -> Array:
    """Largest finite x, exact. Nats."""
    return _nan_if_empty(state, state.maximum("max_x"))


@shared
def _range(state: State) -> Array:
    return log_ratio_max(state) - log_ratio_min(state)


def log_ratio_abs_mean(state: State) -> Array:
    """mean(abs(x)), nats."""
    return state.sum("abs_x") / denominator(state)


def kl_k1(state: State) -> Array:
    """mean(-x), nats: the unbiased, high-variance estimator of KL(old, new). Schulman (2020), k1."""
    return -log_ratio_mean(state)


def kl_k2(state: State) -> Array:
    """mean(x^2) / 2, nats: a biased, low-variance estimator of KL(old, new). Schulman (2020), k2."""
    return _mean_square(state) / 2.0


def kl_k3(state: State) -> Array:
    """mean(expm1(x) - x), nats: an unbiased estimator of KL(old, new), never negative. Schulman (2020), k3.

    Does not cancel at small x; +inf where float64 overflows (x above 709).
    """
    return (state.sum("near_k3") + state.sum("far_k3")) / denominator(state)


@shared
def _scale(state: State) -> Array:
    """k: the far weights of the state are scaled by 2^-k."""
    return scale_exponent(state.maximum("max_x"))


@shared
def _unit(state: State) -> Array:
    """2^k, the unit of the far weights."""
    return power_of_two(_scale(state))


@shared
def _near_offsets(state: State) -> tuple[Array, Array]:
    """sum (w - 1) and sum (w - 1)^2 over near tokens."""
    return state.sum("near_x") + state.sum("near_k3"), state.sum("near_x2") + state.sum("near_excess")


@shared
def scaled_weight_sums(state: State) -> tuple[Array, Array]:
    """2^-k sum w and 2^-2k sum w^2, over near and far tokens."""
    n_near = n_finite(state) - state.count("n_far")
    offset, offset2 = _near_offsets(state)
    unit = _unit(state).clip(0.5, None)  # a near token keeps k at -1 or above; without one its sums are 0
    first = (n_near + offset) / unit + state.sum("far_w")
    second = (n_near + 2.0 * offset + offset2) / unit / unit + state.sum("far_w2")  # the square would overflow
    return first, second


@shared
def chi2(state: State) -> Array:
    """n sum w^2 / (sum w)^2 - 1, dimensionless: chi-square divergence of the self-normalised weights.

    Scale-free: adding a constant to every x changes nothing. From sums of w - 1 while the largest weight is
    below 2^32, so that it is right at std(x) = 1e-5; from scaled sums of w above. Held to what the exact extrema
    allow: at most sinh^2(R / 2), R = max x - min x (Kantorovich's inequality), so that equal tokens give exactly
    0; and within e^-2R and e^2R times the variance of x (mean value theorem), which is right under any offset.

    Error: at most 1e-6 (chi2 + mean(x)^2) where every abs(x) is below 0.5, else 1e-6 (1 + chi2).
    """
    xp = namespace(state.buffer)
    n = denominator(state)
    n_far = state.count("n_far")
    offset, offset2 = _near_offsets(state)
    unit = _unit(state).clip(None, _LARGEST_SHARED_UNIT)
    far_w, far_w2 = unit * state.sum("far_w"), unit**2 * state.sum("far_w2")
    mean = (offset + (far_w - n_far)) / n  # mean (w - 1)
    mean2 = (offset2 + (far_w2 - 2.0 * far_w + n_far)) / n  # mean (w - 1)^2
    # all weights far below 1: w - 1 is -1 for all, so only the scaled sums hold the digits
    offset_form = (mean2 - mean**2) / (1.0 + mean) ** 2
    first, second = scaled_weight_sums(state)
    scaled_form = n * second / first**2 - 1.0
    shared_sum = _unit(state) <= _LARGEST_SHARED_UNIT
    value = xp.where(shared_sum & (mean > -0.5), offset_form, scaled_form)
    variance, error = _variance(state), 3e-12 * _mean_square(state)  # the sums are right to 1e-12
    extent = _range(state).clip(None, 350.0)
    least = xp.exp(-2.0 * extent) * (variance - error).clip(0.0, None)
    most = xp.minimum(xp.exp(2.0 * extent) * (variance + error), xp.sinh(extent / 2.0) ** 2)
    return xp.minimum(xp.maximum(value, least), most)


def renyi2(state: State) -> Array:
    """log(1 + chi2), nats: Renyi divergence of order 2 of the self-normalised weights."""
    return namespace(state.buffer).log1p(chi2(state))


def renyi2_unnormalised(state: State) -> Array:
    """log(mean(w^2)), nats: Renyi divergence of order 2 of weights that are not normalised. Never overflows.

    Its expm1 is mean(w^2) - 1, which estimates the chi-square divergence and overflows. Error: at most 1e-6 nats.
    """
    _, second = scaled_weight_sums(state)
    return 2.0 * _scale(state) / LOG2E + namespace(second).log(second / denominator(state))


def ess(state: State) -> Array:
    """(sum w)^2 / sum w^2, tokens: Kish's effective sample size, from 1 to n_finite. Scale-free.

    Source: Kish (1965), Survey Sampling.
    """
    return ess_fraction(state) * denominator(state)


@shared
def ess_fraction(state: State) -> Array:
    """ess / n_finite, from 1 / n_finite to 1; equals 1 / (1 + chi2)."""
    return 1.0 / (1.0 + chi2(state))


def max_weight_ess_fraction(state: State) -> Array:
    """(sum w / max w) / n_finite: the share of tokens that the largest weight leaves. Scale-free.

    Source: Elvira, Martino, Robert (2022), Rethinking the effective sample size.
    """
    xp = namespace(state.buffer)
    first, _ = scaled_weight_sums(state)
    largest = xp.exp2(log_ratio_max(state) * LOG2E - _scale(state))
    return first / largest / denominator(state)


@shared
def ratio_mean(state: State) -> Array:
    """mean(w), raw, never truncated; +inf where float64 overflows."""
    first, _ = scaled_weight_sums(state)
    return _unit(state) * (first / denominator(state))


def ratio_std(state: State) -> Array:
    """Population standard deviation of w, raw; mean(w) sqrt(chi2), so that nothing cancels."""
    xp = namespace(state.buffer)
    spread = xp.sqrt(chi2(state))
    return xp.where(spread == 0.0, 0.0, ratio_mean(state) * spread)  # equal weights: also where they overflow


def ratio_min(state: State) -> Array:
    """Smallest w, raw."""
    return namespace(state.buffer).exp(log_ratio_min(state))


def ratio_max(state: State) -> Array:
    """Largest w, raw; +inf where float64 overflows."""
    return namespace(state.buffer).exp(log_ratio_max(state))


def clip_fraction_low(state: State) -> Array:
    """Share of w < 1 - low, decided on x with the threshold rounded to float32. Not signed by advantage."""
    return state.count("clip_low") / denominator(state)


def clip_fraction_high(state: State) -> Array:
    """Share of w > 1 + high, decided on x with the threshold rounded to float32. Not signed by advantage."""
    return state.count("clip_high") / denominator(state)


def clip_fraction(state: State) -> Array:
    """Share of w outside [1 - low, 1 + high]. Not signed by advantage."""
    return (state.count("clip_low") + state.count("clip_high")) / denominator(state)
