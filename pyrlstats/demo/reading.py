"""What a run shows, in words: the same for the terminal and the page."""

from __future__ import annotations

from pyrlstats.demo.display import percent
from pyrlstats.demo.windows import Window

HOW = (
    "x, the log-ratio, is how far the learner's log-probability of a token has moved from the sampler's, in nats: 0 "
    "on-policy, and more with every update that uses the same batch again. One token in a thousand is further than "
    "p99.9. ESS is the share of the tokens that still carries weight. Clipped are ratios outside the clip range, many "
    "of which give no gradient."
)


def reading(first: Window, last: Window) -> list[str]:
    """How to read the figures, and what those of the last steps say."""
    then, now = first.stats.to_dict(), last.stats.to_dict()
    tails = {name: now[f"{name}/abs_log_ratio_p99_9"] for name in last.stats if now[f"{name}/n_finite"]}
    if not tails:
        return [HOW]
    ordered = sorted(tails, key=lambda name: tails[name])
    least, most = ordered[0], ordered[-1]
    weights = {name: now[f"{name}/ess_fraction"] for name in tails}
    weakest = min(weights, key=lambda name: weights[name])
    before = then[f"{most}/abs_log_ratio_p99_9"]
    found = f"In {last.name} the far tail is longest in {most}: p99.9 is {tails[most]:.3g} nats"
    if before == before and first.name != last.name:
        found += f", and was {before:.3g} in {first.name}"
    if tails[least] > 0.0 and least != most:
        found += f". It is {tails[most] / tails[least]:.1f} times that of {least}"
    return [
        HOW,
        f"{found}. ESS is lowest in {weakest}: {percent(weights[weakest])}.",
        "A figure over all tokens would mix the slices. Look for a slice whose tail goes on growing while the reward "
        "no longer does.",
    ]
