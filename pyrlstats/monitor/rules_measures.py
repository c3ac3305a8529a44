"""What a condition compares with its threshold, at every observation of a signal: pure functions of arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pyrlstats.monitor.rules import Condition

Floats = NDArray[np.float64]

_BLOCK = 1 << 20  # elements of the windows that are looked at together


def measured(
    condition: Condition, values: Floats, steps: NDArray[Any], baseline: float | None, spread: float | None = None
) -> Floats:
    """The measure of a condition at its observations.

    Args:
        condition: what is measured.
        values: the signal's observations, oldest first, (m,), without NaN (for ``nonfinite``, with).
        steps: their steps, (m,).
        baseline: the frozen median of the signal; None while there is none.
        spread: the robust standard deviation of the signal over the same steps, for ``robust_z``.

    Returns:
        float64 (m,); NaN where window or baseline are not there yet.
    """
    if condition.measure == "nonfinite":
        return (~np.isfinite(values)).astype(np.float64)
    if condition.needs_window:
        return _over_windows(condition, values, steps)
    if condition.take != "last":
        values = _over_windows(condition, values, steps)
    return _against(condition, values, baseline, spread)


def at_end(
    condition: Condition, values: Floats, steps: NDArray[Any], frozen: tuple[float | None, float | None]
) -> Floats:
    """The last measure, (1,), from the last ``window`` observations: as :func:`measured`, sooner."""
    with np.errstate(all="ignore"):
        if condition.needs_window:
            return _figure(condition, values[None], steps[None])
        values = values[-1:] if condition.take == "last" else _figure(condition, values[None], steps[None])
        return _against(condition, values, *frozen)


def _against(condition: Condition, values: Floats, baseline: float | None, spread: float | None) -> Floats:
    if not condition.needs_baseline:
        return values
    if baseline is None:
        return np.full(len(values), math.nan)
    with np.errstate(all="ignore"):
        if condition.measure == "difference":
            return values - baseline
        if condition.measure == "robust_z":
            return (values - baseline) / spread if spread else np.full(len(values), math.nan)
        return values / baseline  # 0 / 0 is NaN: nothing to compare


def holds(condition: Condition, measures: Floats) -> NDArray[np.bool_]:
    """Where the comparison is true; NaN never is."""
    if condition.above is not None:
        return np.asarray(measures > condition.threshold)
    return np.asarray(measures < condition.threshold)


def _over_windows(condition: Condition, values: Floats, steps: NDArray[Any]) -> Floats:
    """A figure of the last ``window`` observations, at each; NaN before there are as many."""
    size = condition.window or 1
    result = np.full(len(values), math.nan)
    if len(values) < size:
        return result
    windows, at = sliding_window_view(values, size), sliding_window_view(steps, size)
    block = max(1, _BLOCK // size)
    with np.errstate(all="ignore"):
        for start in range(0, len(windows), block):
            part = slice(start, start + block)
            figures = _figure(condition, windows[part], at[part])
            result[size - 1 + start : size - 1 + start + len(figures)] = figures
    return result


def _figure(condition: Condition, windows: Floats, steps: NDArray[Any]) -> Floats:
    if not condition.needs_window:
        return _take(condition.take, windows)
    if condition.measure in ("growth", "doubling_steps"):
        windows = np.where(windows > 0.0, np.log(windows), math.nan)
    half = windows.shape[1] // 2
    if condition.measure == "change":
        return _take("median", windows[:, -half:]) / _take("median", windows[:, :half]) - 1.0
    rises = windows[:, -half:] - windows[:, :half]
    if condition.measure == "trend":
        return np.asarray(np.sign(rises).mean(axis=1))
    # Theil (1950), the incomplete method: the median over pairs half a window apart
    rates = rises / (steps[:, -half:] - steps[:, :half])
    rates[~np.isfinite(rates)] = math.nan
    rates.sort(axis=1)  # NaN last
    known = np.isfinite(rates).sum(axis=1)
    rows = np.arange(len(rates))
    middle = (rates[rows, np.maximum(known - 1, 0) // 2] + rates[rows, np.minimum(known // 2, half - 1)]) / 2.0
    rate: Floats = np.where(2 * known >= half, middle, math.nan)
    if condition.measure == "doubling_steps":
        return np.where(rate > 0.0, math.log(2.0) / rate, np.where(rate == rate, math.inf, math.nan))
    return rate


def _take(take: str, windows: Floats) -> Floats:
    if take == "mean":
        return np.asarray(windows.mean(axis=1))
    if take == "median":
        middle = windows.shape[1] // 2
        ordered = np.partition(windows, (middle - 1, middle) if windows.shape[1] % 2 == 0 else middle, axis=1)
        if windows.shape[1] % 2:
            return np.asarray(ordered[:, middle])
        return np.asarray((ordered[:, middle - 1] + ordered[:, middle]) / 2.0)
    if take == "min":
        return np.asarray(windows.min(axis=1))
    if take == "max":
        return np.asarray(windows.max(axis=1))
    if take == "p95":
        rank = max(0, math.ceil(0.95 * windows.shape[1]) - 1)
        return np.asarray(np.partition(windows, rank, axis=1)[:, rank])
    return np.asarray(windows.std(axis=1))
