"""What is watched of each slice: growth of tails, weights and distances, as logarithms where they can be, upwards.

A signal is a figure of the flat mapping of ``to_dict``, or is made from the state and the frozen state of the baseline.
Logarithms make noise and growth alike at every scale: 0.1 is 10 % more, a constant rate of growth is a straight line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyrlstats.cells import abs_cells
from pyrlstats.distances import kolmogorov_smirnov
from pyrlstats.state import State

Floats = NDArray[np.float64]

TAIL = 0.999  # the baseline's quantile of abs(x) beyond which tokens are the tail


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
    """

    key: str
    label: str
    link: str = "policy update"
    count: bool = False
    stop: float = math.inf
    linear: bool = False
    optional: bool = False


# a log-ratio twice as large is four times the KL and the variance of the weights
SIGNALS = (
    Signal("abs_log_ratio_p99_9", "tail (p99.9 of |log-ratio|)", stop=2.0),
    Signal("abs_log_ratio_p99_99", "far tail (p99.99 of |log-ratio|)", stop=2.0),
    Signal("tail_mass", "tail mass (beyond the baseline's p99.9)", count=True, stop=4.0),
    Signal("chi2", "weight concentration (1/ESS - 1)", stop=4.0),
    Signal("kl_k3", "KL k3", stop=4.0),
    Signal("clip_fraction", "clip fraction", count=True, stop=4.0),
    Signal("ks_to_baseline", "distance of the CDF to the baseline"),
    Signal("zero_fraction", "share of equal log-probabilities", "numerics", count=True),
    Signal("nonzero_fraction", "share of unequal log-probabilities", "numerics", count=True),
    Signal("pareto_k", "Pareto k of the weights", linear=True, optional=True),
)
KEYS = tuple(signal.key for signal in SIGNALS)


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

    @property
    def names(self) -> tuple[str, ...]:
        return self.state.names


def tail_counts(state: State, reference: Reference) -> NDArray[np.int64]:
    """Tokens of each slice beyond the bin that holds the baseline's p99.9 of abs(x), (S,): exact."""
    counts = abs_cells(state).counts
    beyond: NDArray[np.int64] = counts[:, ::-1].cumsum(-1)[:, ::-1]
    return np.take_along_axis(beyond, reference.cell, 1)[:, 0]


def against(state: State, reference: Reference) -> dict[str, float]:
    """Figures of a state against the baseline, under ``slice/figure``: tail_mass, tail_ratio, ks_to_baseline.

    ``tail_mass`` is the share beyond the baseline's p99.9 of abs(x), ``tail_ratio`` that over the baseline's own,
    ``ks_to_baseline`` the largest distance of the CDFs. NaN where a slice has no finite tokens.
    """
    with np.errstate(all="ignore"):
        n = state.n_finite()
        mass = tail_counts(state, reference) / np.where(n > 0, n, np.nan)
        ratio = mass / reference.share
        distance = kolmogorov_smirnov(state, reference.state).estimate
    figures = {"tail_mass": mass, "tail_ratio": ratio, "ks_to_baseline": distance}
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
