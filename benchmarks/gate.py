"""The correctness gate: no time is shown for a contender that does not compute what it says it computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .exact import ABS_LEVELS, ATOL, LEVELS, Exact, Results, Tolerance, relative_error

EXACT = ("n_finite", "n_binned")  # integers


def check(results: Results, answer: Exact, tolerance: Tolerance) -> str | None:
    """The worst violation in words, or None where every number is within the tolerance."""
    worst = max(_violations(results, answer, tolerance), default=None, key=lambda violation: violation[0])
    return None if worst is None else worst[1]


def _violations(results: Results, answer: Exact, tolerance: Tolerance) -> Iterator[tuple[float, str]]:
    for name, values in results.items():
        truths = answer.values["n_finite" if name == "n_binned" else name]
        if len(values) != len(answer.values["n_finite"]):
            yield math.inf, f"{name}: {len(values)} values for {len(truths)} slices"
            continue
        for index, value in enumerate(values):
            if name in LEVELS:
                violation = _quantile(name, index, value, answer, tolerance)
            else:
                violation = _moment(name, value, truths[index], answer.values["log_ratio_std"][index], tolerance)
            if violation is not None:
                yield violation


def _moment(name: str, value: float, truth: float, spread: float, tolerance: Tolerance) -> tuple[float, str] | None:
    error = relative_error(value, truth)
    text = f"{name} is {value:.6g}, must be {truth:.6g}"
    if name in EXACT:
        return (error, text) if error else None
    if math.isnan(value) or math.isnan(truth):
        return (error, text) if error else None
    if name == "log_ratio_mean":
        wrong = abs(value - truth) > 1e-3 * spread + ATOL
    elif name == "log_ratio_std":
        wrong = abs(value - truth) > 0.1 * tolerance.moments * truth + ATOL
    elif name == "clip_fraction":
        wrong = abs(value - truth) > 1e-5 + 1e-3 * truth
    elif name in ("log_ratio_min", "log_ratio_max"):
        wrong = abs(value - truth) > 1e-6 * abs(truth) + ATOL
    else:
        wrong = error > tolerance.moments and abs(value - truth) > 1e-15
    return (error, text) if wrong else None


def _quantile(name: str, index: int, value: float, answer: Exact, tolerance: Tolerance) -> tuple[float, str] | None:
    kind = "abs" if name in ABS_LEVELS else "signed"
    if not answer.sorted[kind]:
        return None
    ordered = answer.sorted[kind][index]
    if len(ordered) == 0:
        return None if math.isnan(value) else (math.inf, f"{name} of an empty slice is {value:.6g}, must be NaN")
    rank = tolerance.rank_error(LEVELS[name])
    lowest, highest = order_statistics(ordered, LEVELS[name], rank)
    relative = 0.0 if rank else tolerance.value
    if lowest - relative * abs(lowest) - ATOL <= value <= highest + relative * abs(highest) + ATOL:
        return None
    truth = answer.values[name][index]
    error = relative_error(value, truth)
    return error, f"{name} is {value:.4g}, must be {truth:.4g} (off by {error:.1%})"


def order_statistics(ordered: Any, q: float, rank: float = 0.0) -> tuple[float, float]:
    """The smallest and the largest value that a definition of the q-quantile could give, ranks off by ``rank`` n."""
    n = len(ordered)
    lowest = math.floor((q - rank) * (n - 1)) - 1
    highest = math.ceil((q + rank) * n)
    return float(ordered[min(max(lowest, 0), n - 1)]), float(ordered[min(max(highest, 0), n - 1)])
