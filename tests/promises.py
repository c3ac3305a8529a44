"""How far off a state's float sums may be. ``x`` and ``x2`` are the sums of near and far tokens together."""

from __future__ import annotations

import numpy as np

from pyrlstats.layout import SUMS
from pyrlstats.state import State

EXACT, OTHER = 1e-12, 5e-7  # relative: sums of x and x^2; any other sum
WHOLES = ("x", "x2")


def sum_of(state: State, name: str) -> np.ndarray:
    return state.sum(f"near_{name}") + state.sum(f"far_{name}") if name in WHOLES else state.sum(name)


def sum_bounds(wanted: State, magnitudes: State, parts: float = EXACT, other: float = OTHER) -> dict[str, np.ndarray]:
    """The greatest error of each sum of each slice.

    Args:
        wanted: the right sums.
        magnitudes: those of the same tokens with abs(x) in place of x.
        parts: of near ones' x and x^2 where some token is far: far ones' may make up for what they lack.
        other: of the sums that float32 may hold.
    """
    bounds = {name: other * np.abs(wanted.sum(name)) for name in SUMS}
    part = np.where(wanted.count("n_far") > 0, parts, EXACT)
    for name in WHOLES:
        bounds[f"near_{name}"] = part * magnitudes.sum(f"near_{name}")
        bounds[f"far_{name}"] = part * sum_of(magnitudes, name)
        bounds[name] = EXACT * sum_of(magnitudes, name)
    # only ever added to near_x2; terms of +abs(x) are at most 1.8 times those of -abs(x)
    bounds["near_excess"] = other / 1.8 * magnitudes.sum("near_excess") + part * wanted.sum("near_x2")
    return bounds
