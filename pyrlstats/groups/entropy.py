"""Entropy of the importance weights."""

from __future__ import annotations

from pyrlstats.groups.tokens import Tokens
from pyrlstats.layout import LOG2E, NEAR_LIMIT
from pyrlstats.state import Array, State, namespace, power_of_two, scale_exponent
from pyrlstats.stats import denominator


def fill(section: State, tokens: Tokens) -> None:
    """The rows of one block in an empty section."""
    x = tokens.x
    xp = namespace(x)
    tokens.maximum_in(section, "max_x", x)
    near = xp.abs(x) < NEAR_LIMIT
    near_w = xp.where(near, xp.exp(xp.where(near, x, 0.0)), 0.0)
    tokens.sum_in(section, "near_w", near_w)
    tokens.sum_in(section, "near_wx", near_w * x)
    exponent = scale_exponent(section.maximum("max_x"))[:, None]
    # a token outside the slice may lie above its scale
    far_w = xp.where(near, 0.0, xp.exp2(xp.clip(x * LOG2E - exponent, None, 1.0)))
    tokens.sum_in(section, "far_w", far_w)
    tokens.sum_in(section, "far_wx", far_w * x)


def perplexity_ess_fraction(state: State) -> Array:
    """exp(H) / n_finite, from 1 / n_finite to 1: H is the entropy of the weights w / sum w, in nats. Scale-free.

    Source: Martino, Elvira, Louzada (2017), Effective sample size for importance sampling based on discrepancy
    measures.
    """
    xp = namespace(state.buffer)
    entropy = state.group("entropy")
    k = scale_exponent(entropy.maximum("max_x"))
    k_near = xp.clip(k, -1.0, None)  # a near token keeps k at -1 or above; without one its sum is 0
    weights = power_of_two(-k_near) * entropy.sum("near_w") + entropy.sum("far_w")
    products = power_of_two(-k_near) * entropy.sum("near_wx") + entropy.sum("far_wx")
    # log sum w - sum w x / sum w - log n, where sum w = 2^k weights
    n = denominator(state)
    fraction = xp.exp(k / LOG2E + xp.log(weights / n) - products / weights)
    return xp.clip(fraction, 1.0 / n, xp.ones_like(n))
