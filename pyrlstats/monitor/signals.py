"""What is watched of each slice: growth of tails, weights and distances, as logarithms where they can be, upwards.

A signal is a figure of the flat mapping of ``to_dict``, or is made from the state and the frozen state of the baseline.
Logarithms make noise and growth alike at every scale: 0.1 is 10 % more, a constant rate of growth is a straight line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyrlstats.cells import abs_cells
from pyrlstats.distances import kolmogorov_smirnov
from pyrlstats.layout import Layout
from pyrlstats.state import State

Floats = NDArray[np.float64]

TAIL = 0.999  # the baseline's quantile of abs(x) beyond which tokens are the tail
SHOULDER = 0.98  # that of tokens other than 0 beyond which they are far from the mean


@dataclass(frozen=True)
class Signal:
    """One watched figure of a slice.

    Attributes:
        key: in ``to_dict``, or of a figure that :func:`against` makes.
        label: for people.
        link: of the loop, that growth of it speaks of.
        count: it is a share of few tokens: log((k + 1/2) / (n + 1)), whose noise is at least that of counting.
        stop: how many times its baseline it is where the run should stop, if it still rises; infinite where never.
        linear: watched as it is: it may be 0 or negative, and grows by a difference.
        optional: not there in every run.
        beside: key of the signal that must have grown too; "" where none must.
    """

    key: str
    label: str
    link: str = "policy update"
    count: bool = False
    stop: float = math.inf
    linear: bool = False
    optional: bool = False
    beside: str = ""


# a log-ratio twice as large is four times the KL and the variance of the weights
SIGNALS = (
    Signal("abs_log_ratio_p99_9", "tail (p99.9 of |log-ratio|)", stop=2.0),
    Signal("abs_log_ratio_p99_99", "far tail (p99.99 of |log-ratio|)", stop=2.0),
    Signal("tail_mass", "tail mass (beyond the baseline's p99.9)", count=True, stop=4.0),
    # a mean that shrinks is no growth of the tail
    Signal("tail_to_mean", "tail relative to the slice's mean |log-ratio|", beside="abs_log_ratio_p99_9"),
    Signal("chi2", "weight concentration (1/ESS - 1)", stop=4.0),
    Signal("kl_k3", "KL k3", stop=4.0),
    Signal("clip_fraction", "clip fraction", count=True, stop=4.0),
    Signal("ks_to_baseline", "distance of the CDF to the baseline"),
    Signal("zero_fraction", "share of equal log-probabilities", "numerics", count=True),
    Signal("nonzero_fraction", "share of unequal log-probabilities", "numerics", count=True),
    Signal("pareto_k", "Pareto k of the weights", linear=True, optional=True),
)
KEYS = tuple(signal.key for signal in SIGNALS)
BESIDE = np.array([KEYS.index(signal.beside or signal.key) for signal in SIGNALS])


class Reference:
    """The frozen distribution of the warm-up and where its tail begins.

    Args:
        state: pooled over the warm-up, in NumPy memory.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        counts = abs_cells(state).counts
        through = counts.cumsum(-1)
        n = through[:, -1:]
        rank = np.maximum(np.ceil(TAIL * n), 1)
        # the first cell wholly beyond the quantile's; the zeros are never the tail
        self.cell = np.maximum((through < rank).sum(-1) + 1, 1)[:, None]
        self.cell = np.minimum(self.cell, counts.shape[-1] - 1)
        self.edges: Floats = abs_cells(state).edges[self.cell[:, 0]]
        self.share = tail_counts(state, self) / np.maximum(n[:, 0], 1)
        # logarithm of how many times its mean a token must be to lie beyond the shoulder; NaN without tokens
        through = counts[:, 1:].cumsum(-1)
        cell = (through < np.ceil(SHOULDER * through[:, -1:])).sum(-1)
        self.shoulder: Floats = _log_middles(state.layout)[cell] - _log_mean(state)

    @property
    def names(self) -> tuple[str, ...]:
        return self.state.names


def tail_counts(state: State, reference: Reference) -> NDArray[np.int64]:
    """Tokens of each slice beyond the bin that holds the baseline's p99.9 of abs(x), (S,): exact."""
    counts = abs_cells(state).counts
    beyond: NDArray[np.int64] = counts[:, ::-1].cumsum(-1)[:, ::-1]
    return np.take_along_axis(beyond, reference.cell, 1)[:, 0]


def tail_to_mean(state: State, reference: Reference) -> Floats:
    """How far tokens lie beyond the shoulder of their slice, on average over those other than 0, nats, (S,).

    mean of max(0, log(abs(x) / (c m))): m is the slice's own mean of abs(x), c m was the baseline's p98. What makes all
    tokens of a slice larger at one step, and its tail with them, cancels; what makes a few of them larger remains. Each
    token counts at the middle of its bin, so it is right to half a bin, 2^-(mantissa_bits + 1). NaN where all
    tokens are 0, now or in the baseline.

    Source:
        The sum of logarithms of Hill (1975), A simple general approach to inference about the tail of a distribution,
        divided by all tokens, not by those of the tail alone.
    """
    counts = abs_cells(state).counts[:, 1:]
    start = _log_mean(state) + reference.shoulder
    beyond = np.maximum(_log_middles(state.layout) - start[:, None], 0.0)
    with np.errstate(all="ignore"):
        result: Floats = (counts * beyond).sum(-1) / counts.sum(-1)
    return result


def _log_mean(state: State) -> Floats:
    """Logarithm of the mean of abs(x) over tokens other than 0, (S,); NaN where there are none."""
    n = state.n_finite() - state.count("n_zero")
    with np.errstate(all="ignore"):
        return np.log(np.where(n > 0, state.sum("abs_x") / n, np.nan))


@functools.cache
def _log_middles(layout: Layout) -> Floats:
    """Logarithm of the middle of each bin of abs(x); the outermost, which reach to 0 and to infinity, at their edge."""
    with np.errstate(all="ignore"):
        edges = np.log(layout.abs_edges)
        edges[0], edges[-1] = edges[1], edges[-2]
        middles: Floats = (edges[:-1] + edges[1:]) / 2.0
    return middles


def against(state: State, reference: Reference) -> dict[str, float]:
    """Figures of a state against the baseline, under ``slice/figure``.

    ``tail_mass`` is the share beyond the baseline's p99.9 of abs(x), ``tail_ratio`` that over the baseline's own,
    ``tail_to_mean`` what :func:`tail_to_mean` gives, ``ks_to_baseline`` the largest distance of the CDFs. NaN where a
    slice has no finite tokens.
    """
    with np.errstate(all="ignore"):
        n = state.n_finite()
        mass = tail_counts(state, reference) / np.where(n > 0, n, np.nan)
        ratio = mass / reference.share
        distance = kolmogorov_smirnov(state, reference.state).estimate
        relative = tail_to_mean(state, reference)
    figures = {"tail_mass": mass, "tail_ratio": ratio, "tail_to_mean": relative, "ks_to_baseline": distance}
    return {
        f"{name}/{key}": float(column[index])
        for index, name in enumerate(state.names)
        for key, column in figures.items()
    }


def values_of(signals: Mapping[str, float], names: tuple[str, ...]) -> Floats:
    """The watched signals of every slice, (S, len(SIGNALS)), as logarithms but for linear ones; NaN where there is
    none, and of the logarithm of 0."""
    result = np.full((len(names), len(SIGNALS)), np.nan)
    for row, name in enumerate(names):
        n = signals.get(f"{name}/n_finite", math.nan)
        if not n > 0:
            continue
        for column, signal in enumerate(SIGNALS):
            value = share_of(signals, name, signal.key)
            if signal.count:
                result[row, column] = math.log((value * n + 0.5) / (n + 1.0)) if value >= 0.0 else math.nan
            elif signal.linear:
                result[row, column] = value if math.isfinite(value) else math.nan
            elif 0.0 < value < math.inf:
                result[row, column] = math.log(value)
    return result


def share_of(signals: Mapping[str, float], name: str, key: str) -> float:
    """A watched figure of a slice; NaN where there is none."""
    if key == "nonzero_fraction":
        return 1.0 - signals.get(f"{name}/zero_fraction", math.nan)
    return signals.get(f"{name}/{key}", math.nan)


def least_noise(rows: Sequence[Mapping[str, float]], names: tuple[str, ...]) -> Floats:
    """The noise of counting, (S, len(SIGNALS)): 1 / sqrt(mean count + 1/2) of shares, 0 of the rest."""
    result = np.zeros((len(names), len(SIGNALS)))
    for row, name in enumerate(names):
        for column, signal in enumerate(SIGNALS):
            if signal.count:
                counts = [
                    share_of(signals, name, signal.key) * signals.get(f"{name}/n_finite", math.nan) for signals in rows
                ]
                finite = [count for count in counts if math.isfinite(count)]
                if finite:
                    result[row, column] = 1.0 / math.sqrt(sum(finite) / len(finite) + 0.5)
    return result
