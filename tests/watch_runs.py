"""Runs made for the tests of what looks at runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import pyrlstats
from pyrlstats.monitor.alerts import Alert, Level
from pyrlstats.monitor.folder import RunWriter
from pyrlstats.slice_stats import SliceStats

START = 1_764_304_000.0
NAMES = ("text", "pre_tool", "post_tool")
Scale = Callable[[int, str], float]


def growing(step: int, name: str) -> float:
    """The scale of post_tool's log-ratios doubles every 13 steps from step 40 on."""
    return 0.01 * (2.0 ** (max(0, step - 40) / 13.0) if name == "post_tool" else 1.0)


def step_stats(step: int, *, tokens: int = 2000, scale: Scale = growing, names: tuple[str, ...] = NAMES) -> SliceStats:
    """One step through the engine, the same for the same step."""
    rng = np.random.default_rng(step)
    x = np.concatenate([scale(step, name) * rng.standard_normal(tokens) for name in names]).astype(np.float32)
    x[rng.random(len(x)) < 0.1] = 0.0
    ids = np.repeat(np.arange(len(names)), tokens)
    return pyrlstats.slice_stats(x, np.zeros_like(x), slice_ids=ids, names=names)


def step_scalars(step: int) -> dict[str, float]:
    rng = np.random.default_rng(10_000 + step)
    return {
        "reward": 0.5 + 0.01 * rng.standard_normal(),
        "loss": 0.02 + 0.001 * rng.standard_normal(),
        "grad_norm": 0.4 + 0.01 * rng.standard_normal(),
    }


def alert(step: int, level: Level = "warning", name: str = "growth", slice_name: str | None = "post_tool") -> Alert:
    evidence = {"a": 1.23456789}
    message = f"{slice_name}: it <grows> | more"
    return Alert(step, name, level, f"{slice_name}/kl_k3", message, "policy update", slice_name, evidence)


def write_run(
    path: Path,
    steps: int = 80,
    *,
    scale: Scale = growing,
    alerts: tuple[Alert, ...] = (),
    scalars: Callable[[int], Mapping[str, float]] = step_scalars,
    first: int = 1,
    tokens: int = 2000,
) -> Path:
    """A run folder of so many steps; an existing one is continued."""
    writer = RunWriter(path, START)
    for step in range(first, first + steps):
        state = step_stats(step, scale=scale, tokens=tokens).state
        writer.append(step, START + 30.0 * step, scalars(step), state, SliceStats.kind)
    for each in alerts:
        writer.append_alert(each)
    writer.close()
    return path
