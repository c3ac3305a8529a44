"""Steps with everything that can be hard to write: an empty slice, NaN and infinite ratios, an infinite k3."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyrlstats import SliceStats, slice_stats

Steps = list[tuple[int, SliceStats]]


@pytest.fixture
def steps(rng: np.random.Generator) -> Steps:
    """Three steps of the slices all, tail, positive and empty."""
    found = []
    for step in (1, 2, 5):
        x = rng.standard_t(2, 5000).astype(np.float32) * 0.01
        x[:7] = [0.0, -0.0, np.nan, np.inf, -np.inf, 800.0, -3e-9]
        tail = np.abs(x) > 0.05
        masks = {"all": np.ones(5000, bool), "tail": tail, "positive": (x > 0) & (x < 1), "empty": np.zeros(5000, bool)}
        found.append((step, slice_stats(x, np.zeros(5000, np.float32), masks)))
    return found


@pytest.fixture
def wanted(steps: Steps) -> Callable[[str], dict[int, dict[str, float]]]:
    """What ``to_dict`` gives for every step."""
    return lambda prefix: {step: stats.to_dict(prefix) for step, stats in steps}
