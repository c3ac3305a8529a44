"""Histograms with a fixed number of bins: torch.histc, NumPy, boost-histogram, fast-histogram."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..exact import ABS_LEVELS, Results
from ..inputs import Inputs
from .contender import Collect, Contender, Launch, identity
from .numpy_exact import DTYPES, selected

BINS = 2048
TINY = 1e-6  # the range where every value is 0
FLOOR, CEILING = 2.0**-24, 2.0**8  # nats: the range of a logarithmic axis


def quantiles_of(counts: np.ndarray, edges: np.ndarray) -> list[float]:
    """Quantiles of |x| by linear interpolation inside the bins: edges has one element more than counts."""
    cumulative = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    total = cumulative[-1]
    values = []
    for q in ABS_LEVELS.values():
        rank = q * total
        index = min(int(np.searchsorted(cumulative, rank, "left")), len(counts)) - 1
        index = max(index, 0)
        share = (rank - cumulative[index]) / counts[index] if counts[index] else 0.0
        values.append(float(edges[index] + share * (edges[index + 1] - edges[index])))
    return values


def results_of(histograms: list[tuple[np.ndarray, np.ndarray]]) -> Results:
    """Quantiles and the number of values that reached a bin, from (counts, edges) of every slice."""
    rows = [quantiles_of(counts, edges) for counts, edges in histograms]
    results: Results = dict(zip(ABS_LEVELS, map(list, zip(*rows, strict=True)), strict=True))
    results["n_binned"] = [float(counts.sum(dtype=np.float64)) for counts, _ in histograms]
    return results


def _histc(widen: bool) -> Any:
    def make(inputs: Inputs) -> tuple[Launch, Collect]:
        def launch(given: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
            logp, old_logp = (given.logp.float(), given.old_logp.float()) if widen else (given.logp, given.old_logp)
            log_ratio = logp - old_logp
            histograms = []
            for mask in given.members():
                magnitude = log_ratio[mask].abs()
                top = magnitude.max()
                histograms.append((torch.histc(magnitude, BINS, min=0.0, max=float(top) or TINY), top))
            return histograms

        def collect(raw: list[tuple[torch.Tensor, torch.Tensor]]) -> Results:
            return results_of(
                [(counts.double().cpu().numpy(), np.linspace(0.0, float(top) or TINY, BINS + 1)) for counts, top in raw]
            )

        return launch, collect

    return make


def _host(histogram: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Any:
    """A histogram of |x| of every slice on the CPU."""

    def make(inputs: Inputs) -> tuple[Launch, Collect]:
        return lambda given: results_of([histogram(np.abs(x)) for x in selected(given)]), identity

    return make


def _numpy(magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.histogram(magnitude, BINS, (0.0, float(magnitude.max()) or TINY))


def _fast_histogram(magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import fast_histogram

    top = np.nextafter(np.float32(magnitude.max()) or np.float32(TINY), np.float32(np.inf))  # its last bin is open
    counts = fast_histogram.histogram1d(magnitude, bins=BINS, range=(0.0, float(top)))
    return counts, np.linspace(0.0, float(top), BINS + 1)


def _boost_linear(magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import boost_histogram as bh

    top = np.nextafter(np.float32(magnitude.max()) or np.float32(TINY), np.float32(np.inf))
    histogram = bh.Histogram(bh.axis.Regular(BINS, 0.0, float(top)), storage=bh.storage.Int64())
    histogram.fill(magnitude, threads=torch.get_num_threads())
    return histogram.values(), histogram.axes[0].edges


def _boost_log(magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import boost_histogram as bh

    axis = bh.axis.Regular(BINS // 2, FLOOR, CEILING, transform=bh.axis.transform.log)
    histogram = bh.Histogram(axis, storage=bh.storage.Int64())
    histogram.fill(magnitude, threads=torch.get_num_threads())
    counts = histogram.values(flow=True)  # zeros are in the underflow bin
    edges = np.concatenate([[0.0], histogram.axes[0].edges, [float(magnitude.max())]])
    return counts, edges


CONTENDERS = (
    Contender(
        "torch.histc", "histogram", _histc(widen=True), f"{BINS} linear bins of |x[mask]| to its maximum",
        max_values=1 << 25,
    ),
    Contender(
        "torch.histc, half precision",
        "histogram",
        _histc(widen=False),
        "the same in the dtype of the log-probabilities: so are its counts",
        dtypes=("bfloat16", "float16"),
        max_values=1 << 25,
    ),
    Contender(
        "numpy.histogram", "histogram", _host(_numpy), f"{BINS} linear bins of |x[mask]|",
        devices=("cpu",), dtypes=DTYPES, max_values=1 << 24,
    ),
    Contender(
        "fast-histogram", "histogram", _host(_fast_histogram), f"{BINS} linear bins of |x[mask]|",
        requires=("fast_histogram",), devices=("cpu",), dtypes=DTYPES, max_values=1 << 25,
    ),
    Contender(
        "boost-histogram, linear", "histogram", _host(_boost_linear), f"{BINS} linear bins of |x[mask]|, all threads",
        requires=("boost_histogram",), devices=("cpu",), dtypes=DTYPES, max_values=1 << 25,
    ),
    Contender(
        "boost-histogram, log", "histogram", _host(_boost_log), f"{BINS // 2} logarithmic bins of |x[mask]|",
        requires=("boost_histogram",), devices=("cpu",), dtypes=DTYPES, max_values=1 << 24,
    ),
)  # fmt: skip
