"""The right answers, in float64 and by sorting, and how far a contender is from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pyrlstats.layout import clip_thresholds

from .inputs import Inputs

Results = dict[str, list[float]]  # statistic -> one number a slice

MOMENTS = (
    "n_finite",
    "log_ratio_mean",
    "log_ratio_std",
    "log_ratio_min",
    "log_ratio_max",
    "kl_k3",
    "ess_fraction",
    "clip_fraction",
)
ABS_LEVELS = {
    "abs_log_ratio_p50": 0.5,
    "abs_log_ratio_p99": 0.99,
    "abs_log_ratio_p99_9": 0.999,
    "abs_log_ratio_p99_99": 0.9999,
}
SIGNED_LEVELS = {"log_ratio_p99": 0.99, "log_ratio_p99_9": 0.999}
LEVELS = {**ABS_LEVELS, **SIGNED_LEVELS}
STATISTICS = (*MOMENTS, *LEVELS)
CLIP = (0.2, 0.2)

ATOL = 2.0**-22  # nats: two roundings of a float32 log-probability of 1


@dataclass(frozen=True)
class Tolerance:
    """What a contender states about itself; the gate holds it to that.

    Attributes:
        value: relative error of a quantile of the log-ratio, beside every order statistic that one of the usual
            definitions of a quantile could return.
        rank: error of the rank instead, as a share of the tokens, where that is what is guaranteed.
        tail: error of the rank instead, as a share of the tokens above it.
        moments: relative error of ESS and k3; 0.1 of it for the standard deviation.
    """

    value: float = 0.05
    rank: float = 0.0
    tail: float = 0.0
    moments: float = 1e-2

    def rank_error(self, q: float) -> float:
        """Of the q-quantile, as a share of the tokens; 0 where the value is what is guaranteed."""
        return self.rank or self.tail * (1.0 - q)

    def text(self) -> str:
        if self.rank or self.tail:
            return f"rank {self.rank:.2%}" if self.rank else f"rank {self.tail:.2%} of the tail"
        return f"quantiles {self.value:.2g}, moments {self.moments:.0e}"


@dataclass
class Exact:
    """Every statistic of every slice, and the sorted values that quantiles are checked against."""

    values: Results
    sorted: dict[str, list[Any]] = field(default_factory=dict)  # "abs", "signed" -> one array a slice


def exact(inputs: Inputs, quantiles: bool = True) -> Exact:
    """All statistics of these inputs from float64 sums and full sorts."""
    inputs, times = inputs.head()  # repeating tokens changes no statistic but their number
    values: Results = {name: [] for name in STATISTICS}
    answer = Exact(values, {"abs": [], "signed": []})
    low, high = clip_thresholds(CLIP)
    x_all = log_ratio(inputs)
    for mask in inputs.members():
        x32 = x_all[mask]
        x = x32.double()
        n = x.numel()
        if n == 0:
            row = dict.fromkeys(MOMENTS, math.nan) | {"n_finite": 0}
        else:
            mean = x.mean()
            excess = torch.expm1(x - mean)  # of weights, scaled: ESS does not care
            row = {
                "n_finite": n * times,
                "log_ratio_mean": float(mean),
                "log_ratio_std": float((x - mean).square().mean().sqrt()),
                "log_ratio_min": float(x.min()),
                "log_ratio_max": float(x.max()),
                "kl_k3": float((torch.expm1(x) - x).mean()),
                "ess_fraction": float((1 + excess.mean()).square() / (1 + excess).square().mean()),
                "clip_fraction": float(((x < low) | (x > high)).double().mean()),
            }
            del excess
        for name, value in row.items():
            values[name].append(value)
        del x
        if quantiles:
            ordered = _sort(x32)
            positive = _sort(x32.abs())
            answer.sorted["signed"].append(ordered)
            answer.sorted["abs"].append(positive)
            for name, q in LEVELS.items():
                source = positive if name in ABS_LEVELS else ordered
                values[name].append(float(source[max(1, math.ceil(q * n)) - 1]) if n else math.nan)
    return answer


def log_ratio(inputs: Inputs) -> torch.Tensor:
    wide = torch.float64 if inputs.logp.dtype == torch.float64 else torch.float32
    return (inputs.logp.to(wide) - inputs.old_logp.to(wide)).float()


def _sort(values: torch.Tensor) -> Any:
    if values.device.type == "cpu":
        return np.sort(values.numpy())  # several times faster than torch's
    return values.sort().values


def relative_error(value: float, truth: float) -> float:
    """|value - truth| / |truth|, |value| where the truth is 0; 0 where both are NaN, inf where only one is."""
    if value == truth or (math.isnan(value) and math.isnan(truth)):
        return 0.0
    if math.isnan(value) or math.isnan(truth):
        return math.inf
    return abs(value - truth) / (abs(truth) or 1.0)


def errors(results: Results, answer: Exact) -> dict[str, float]:
    """Largest relative error over the slices, for every statistic that both hold."""
    return {
        name: max(map(relative_error, values, answer.values[name]))
        for name, values in results.items()
        if answer.values.get(name)
    }
