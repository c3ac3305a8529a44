"""Bars are our bins, merged exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyrlstats import Layout, slice_stats
from pyrlstats.sinks.bars import Bars, bars_of, without_empty_runs
from pyrlstats.values import value_stats


def check(bars: Bars, x: np.ndarray, at_most: int) -> None:
    """Counts against numpy's own, with the edges' sides as our bins have them: away from 0 is inside."""
    assert len(bars.counts) <= at_most
    assert len(bars.edges) == len(bars.counts) + 1
    assert np.isfinite(bars.edges).all()
    assert (np.diff(bars.edges) > 0).all()
    assert bars.counts.sum() == len(x)
    assert bars.counts[0] > 0
    assert bars.counts[-1] > 0
    below_edges = [np.count_nonzero(x <= edge if edge < 0 else x < edge) for edge in bars.edges[1:-1]]
    assert np.cumsum(bars.counts)[:-1].tolist() == below_edges
    assert bars.edges[0] <= x.min()
    assert x.max() <= bars.edges[-1]


@pytest.mark.parametrize("at_most", [3, 10, 64, 512, 4095])
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.normal(0, 0.01, 4000),
        lambda rng: rng.standard_cauchy(4000),
        lambda rng: rng.lognormal(-6, 3, 4000),
        lambda rng: -rng.lognormal(-6, 3, 4000),
        lambda rng: rng.choice([-2.0, 0.0, 0.5, 1.0, 300.0, -1e-9], 4000),
        lambda rng: np.full(3, 0.25),
        lambda rng: np.full(3, -1e6),
        lambda rng: np.zeros(3),
    ],
)
def test_counts_and_edges(draw: Any, at_most: int, rng: np.random.Generator) -> None:
    x = draw(rng).astype(np.float32)
    bars = bars_of(slice_stats(x, np.zeros_like(x)), "all", at_most)
    assert bars is not None
    check(bars, x, at_most)
    compact = without_empty_runs(bars)
    check(compact, x, at_most)
    assert not ((compact.counts[1:] == 0) & (compact.counts[:-1] == 0)).any()


def test_bars_are_as_fine_as_they_may_be(rng: np.random.Generator) -> None:
    x = rng.uniform(0.5, 1.0, 2000).astype(np.float32)
    bars = bars_of(slice_stats(x, np.zeros_like(x), layout=Layout(8)), "all", 512)
    assert bars is not None
    assert len(bars.counts) == 256  # all bins of an octave


def test_every_slice_and_other_quantities(rng: np.random.Generator) -> None:
    x = rng.normal(5, 3, 1000).astype(np.float32)
    stats = value_stats(x, {"low": x < 5, "none": x > 1e9, "high": x >= 5})
    for name, members in (("low", x < 5), ("high", x >= 5)):
        bars = bars_of(stats, name)
        assert bars is not None
        check(bars, x[members], 512)
    assert bars_of(stats, "none") is None
