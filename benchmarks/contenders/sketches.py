"""Quantile sketches: DataSketches KLL, REQ and t-digest, two more compiled t-digests, DDSketch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..exact import ABS_LEVELS, Results, Tolerance
from ..inputs import Inputs
from .contender import DEFAULT, Collect, Contender, Launch, identity
from .numpy_exact import DTYPES, selected

LEVELS = list(ABS_LEVELS.values())


def _sketch(quantiles: Callable[[np.ndarray], list[float]]) -> Any:
    """Quantiles of |x[mask]| of every slice."""

    def make(inputs: Inputs) -> tuple[Launch, Collect]:
        def launch(given: Inputs) -> Results:
            rows = [quantiles(np.abs(x)) for x in selected(given)]
            return dict(zip(ABS_LEVELS, map(list, zip(*rows, strict=True)), strict=True))

        return launch, identity

    return make


def _kll(k: int) -> Callable[[np.ndarray], list[float]]:
    def quantiles(magnitude: np.ndarray) -> list[float]:
        import datasketches

        sketch = datasketches.kll_floats_sketch(k)
        sketch.update(magnitude)
        return [float(value) for value in sketch.get_quantiles(LEVELS)]

    return quantiles


def _req(magnitude: np.ndarray) -> list[float]:
    import datasketches

    sketch = datasketches.req_floats_sketch(50, True)  # accurate at high ranks
    sketch.update(magnitude)
    return [float(value) for value in sketch.get_quantiles(LEVELS)]


def _tdigest(magnitude: np.ndarray) -> list[float]:
    import datasketches

    sketch = datasketches.tdigest_float(200)
    sketch.update(magnitude)
    return [float(sketch.get_quantile(q)) for q in LEVELS]


def _fastdigest(magnitude: np.ndarray) -> list[float]:
    import fastdigest

    digest = fastdigest.TDigest.from_values(magnitude)
    return [float(digest.quantile(q)) for q in LEVELS]


def _pytdigest(magnitude: np.ndarray) -> list[float]:
    import pytdigest

    digest = pytdigest.TDigest.compute(magnitude.astype(np.float64), compression=300)
    return [float(value) for value in digest.inverse_cdf(LEVELS)]


def _ddsketch(magnitude: np.ndarray) -> list[float]:
    import ddsketch

    sketch = ddsketch.DDSketch(0.01)
    for value in magnitude.tolist():
        sketch.add(value)
    return [float(sketch.get_quantile_value(q)) for q in LEVELS]


def _contender(
    name: str, quantiles: Any, note: str, requires: str, tolerance: Tolerance = DEFAULT, log2_values: int = 24
) -> Contender:
    return Contender(
        name,
        "sketch",
        _sketch(quantiles),
        note,
        tolerance,
        requires=(requires,),
        devices=("cpu",),
        dtypes=DTYPES,
        max_values=1 << log2_values,
    )


# DataSketches states its errors itself. KLL: get_normalized_rank_error(k, as_pmf=False), the single-sided error of a
# rank at 99 % confidence. REQ: get_rank_upper_bound(rank, 3) - rank at k = 50, three standard deviations, which is
# this share of 1 - rank until the tail is held exactly (Lemma 12 of Cormode et al., 2021, Relative Error Streaming
# Quantiles, with constants that DataSketches has measured).
KLL_RANK_ERROR = {200: 0.0133, 2000: 0.00142}
REQ_TAIL_ERROR = 0.00784

CONTENDERS = (
    *(
        _contender(
            f"DataSketches KLL, k={k}", _kll(k), f"rank error {error:.2%} at 99 % confidence", "datasketches",
            Tolerance(rank=error),
        )
        for k, error in KLL_RANK_ERROR.items()
    ),
    _contender(
        "DataSketches REQ, k=50", _req, f"rank error {REQ_TAIL_ERROR:.2%} of the tail at 3 standard deviations",
        "datasketches", Tolerance(tail=REQ_TAIL_ERROR),
    ),
    _contender("DataSketches t-digest, k=200", _tdigest, "states no error", "datasketches"),
    _contender("fastdigest", _fastdigest, "t-digest in Rust, default compression; states no error", "fastdigest"),
    _contender("pytdigest", _pytdigest, "t-digest in C, compression 300; states no error", "pytdigest"),
    _contender(
        "DDSketch", _ddsketch, "ddsketch-py, relative error 1 %", "ddsketch", Tolerance(value=0.01), log2_values=20
    ),
)  # fmt: skip
