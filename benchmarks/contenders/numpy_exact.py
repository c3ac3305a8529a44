"""NumPy: boolean index and partition."""

from __future__ import annotations

import numpy as np

from ..exact import ABS_LEVELS, MOMENTS, Results
from ..inputs import Inputs
from .contender import Collect, Contender, Launch, identity

DTYPES = ("float32", "float16", "float64")


def selected(given: Inputs) -> list[np.ndarray]:
    """x of every slice, as float32."""
    logp, old_logp, masks = given.arrays
    log_ratio = logp.astype(np.float32, copy=False) - old_logp.astype(np.float32, copy=False)
    return [log_ratio[mask] for mask in masks]


def _partition(magnitude: np.ndarray) -> list[float]:
    n = magnitude.size
    ranks = [min(n - 1, int(q * n)) for q in ABS_LEVELS.values()]
    return np.partition(magnitude, ranks)[ranks].tolist()


def _everything(inputs: Inputs) -> tuple[Launch, Collect]:
    def launch(given: Inputs) -> Results:
        results: Results = {name: [] for name in (*MOMENTS, *ABS_LEVELS)}
        for x in selected(given):
            w = np.exp(x)
            row = [
                float(x.size),
                float(x.mean()),
                float(x.std()),
                float(x.min()),
                float(x.max()),
                float((np.expm1(x) - x).mean()),
                float(w.sum() ** 2 / np.square(w).sum() / x.size),
                float(np.count_nonzero((w < 0.8) | (w > 1.2)) / x.size),
                *_partition(np.abs(x)),
            ]
            for values, value in zip(results.values(), row, strict=True):
                values.append(value)
        return results

    return launch, identity


def _only_quantiles(inputs: Inputs) -> tuple[Launch, Collect]:
    def launch(given: Inputs) -> Results:
        rows = [_partition(np.abs(x)) for x in selected(given)]
        return dict(zip(ABS_LEVELS, map(list, zip(*rows, strict=True)), strict=True))

    return launch, identity


CONTENDERS = (
    Contender(
        "NumPy, boolean index + partition",
        "numpy",
        _everything,
        "x[mask], moments in float32, numpy.partition of |x|",
        devices=("cpu",),
        dtypes=DTYPES,
        max_values=1 << 26,
    ),
    Contender(
        "numpy.partition",
        "numpy",
        _only_quantiles,
        "of |x[mask]|",
        devices=("cpu",),
        dtypes=DTYPES,
        max_values=1 << 26,
    ),
)
