"""The checks of a known toolkit for post-training, written anew from a description of its rules and thresholds.

It looks at the scalars of a trainer, every 10 steps at the last 200 records, and stops the run at any finding it calls
of high severity. Of its checks those are here that can fire on a GRPO run's reward, KL, entropy and length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Records = Mapping[str, Floats]

BUFFER, EVERY, LEAST = 200, 10, 10


def _head(values: Floats, n: int) -> float:
    return float(values[:n].mean())


def _tail(values: Floats, n: int) -> float:
    return float(values[-n:].mean())


def _slope(values: Floats) -> float:
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def kl_level(records: Records) -> bool:
    """KL above 0.3."""
    return bool(records["kl"][-1] > 0.3)


def instability_window(records: Records) -> bool:
    """Squared z-scores of reward and KL, summed, averaged over 30 records: at least 2 anywhere in the buffer."""
    if len(records["kl"]) < 30:
        return False
    squares = np.zeros(len(records["kl"]))
    for name in ("reward", "kl"):
        values = records[name]
        squares += ((values - values.mean()) / (values.std(ddof=1) + 1e-12)) ** 2
    return bool(np.convolve(squares, np.full(30, 1 / 30), "valid").max() >= 2.0)


def reward_hacking(records: Records) -> bool:
    """Reward rises, KL rises faster than 0.005 a record, and 3 times as fast as the reward."""
    reward, kl = _slope(records["reward"][-50:]), _slope(records["kl"][-50:])
    return reward > 0.0 and kl > 0.005 and kl > 3.0 * reward


def entropy_collapse(records: Records) -> bool:
    """Mean entropy of 20 records below 0.1, or of 30 below 1.0."""
    return _tail(records["entropy"], 20) < 0.1 or _tail(records["entropy"], 30) < 1.0


def length_collapse(records: Records) -> bool:
    """Output length down by more than 35 %."""
    before = _head(records["length"], 30)
    return (before - _tail(records["length"], 30)) / before > 0.35


CHECKS: dict[str, Callable[[Records], bool]] = {
    "KL level": kl_level,
    "instability window": instability_window,
    "reward hacking": reward_hacking,
    "entropy collapse": entropy_collapse,
    "length collapse": length_collapse,
}


def first_stop(records: Records) -> tuple[int, str] | None:
    """Step at which the run is stopped, and by which check."""
    steps = len(records["kl"])
    for step in range(EVERY - 1, steps, EVERY):
        if step + 1 < LEAST:
            continue
        seen = {name: values[max(0, step + 1 - BUFFER) : step + 1] for name, values in records.items()}
        for name, check in CHECKS.items():
            if check(seen):
                return step, name
    return None
