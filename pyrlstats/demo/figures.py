"""The picture: reward, effective sample size, tail quantiles, and the distribution at the start and at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyrlstats.demo.slices import NAMES
from pyrlstats.demo.training import Score, Step
from pyrlstats.demo.windows import Window, first_and_last
from pyrlstats.intervals import abs_quantile_interval

COLOURS = {"text": "#4477aa", "pre_tool": "#228833", "post_tool": "#cc3311"}
LEVELS = {0.5: "p50", 0.99: "p99", 0.999: "p99.9", 0.9999: "p99.99"}

Style = dict[str, Any]
FIRST: Style = {"ls": "--", "alpha": 0.6}
LAST: Style = {"ls": "-"}

# nats: what logarithmic axes show
SMALLEST = 1e-6
_MAGNITUDES = np.geomspace(SMALLEST, 100.0, 400)
_SIGNED = np.concatenate((-_MAGNITUDES[::-1], [0.0], _MAGNITUDES))


def draw(steps: list[Step], scores: dict[str, Score], path: Path) -> None:
    """Draw the run and save it as PNG."""
    figure = Figure(figsize=(13, 15), dpi=110, layout="constrained")
    grid = figure.add_gridspec(4, 6)
    _draw_reward(figure.add_subplot(grid[0, :3]), steps, scores)
    _draw_ess(figure.add_subplot(grid[0, 3:]), steps)
    compared = list(zip(first_and_last(steps), (FIRST, LAST), strict=True))
    for row in (1, 2, 3):
        shared: Axes | None = None
        for index, name in enumerate(NAMES):
            axes = figure.add_subplot(grid[row, 2 * index : 2 * index + 2], sharex=shared, sharey=shared)
            shared = shared or axes
            if row == 1:
                _draw_quantiles(axes, steps, name)
            elif row == 2:
                _draw_cdf(axes, compared, name)
            else:
                _draw_tail(axes, compared, name)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def _draw_reward(axes: Axes, steps: list[Step], scores: dict[str, Score]) -> None:
    numbers = [step.number for step in steps]
    axes.plot(numbers, [step.score.reward for step in steps], color="black", label="mean reward of the batch")
    axes.plot(numbers, [step.score.solved for step in steps], color="grey", lw=1, label="share of it solved")
    for (name, score), style in zip(scores.items(), (":", "--", "-"), strict=False):
        axes.axhline(score.reward, color="#aa7744", ls=style, lw=1, label=f"{name}: {score.reward:.3f}")
    axes.set(title="Reward (horizontal: three policies on the same problems)", xlabel="step", ylim=(-0.03, 1.03))


def _draw_ess(axes: Axes, steps: list[Step]) -> None:
    numbers = [step.number for step in steps]
    for name in NAMES:
        axes.plot(numbers, [float(step.stats[name].ess_fraction) for step in steps], color=COLOURS[name], label=name)
    axes.set(title="Effective sample size over tokens", xlabel="step")


def _draw_quantiles(axes: Axes, steps: list[Step], name: str) -> None:
    numbers = [step.number for step in steps]
    found = [abs_quantile_interval(step.stats[name], list(LEVELS)) for step in steps]
    values, reliable = (
        np.array([getattr(one, field)[0].tolist() for one in found]) for field in ("estimate", "reliable")
    )
    for index, (label, alpha) in enumerate(zip(LEVELS.values(), (0.35, 0.55, 0.8, 1.0), strict=True)):
        style: Style = {"color": COLOURS[name], "alpha": alpha}
        column = np.maximum(values[:, index], SMALLEST)
        # dotted where fewer than ten tokens lie beyond: hardly more than the extreme one
        axes.plot(numbers, column, ls=":", lw=1, **style)
        axes.plot(numbers, np.where(reliable[:, index], column, np.nan), label=label, **style)
    axes.set(title=f"{name}: quantiles of |log-ratio|", ylabel="nats", yscale="log")
    axes.set_xlabel("step (dotted: fewer than 10 tokens beyond)")


# the linear part of the axis lies between the two around 0
_CDF_TICKS = {-10.0: "-10", -0.1: "-0.1", -1e-3: "-0.001", 0.0: "0", 1e-3: "0.001", 0.1: "0.1", 10.0: "10"}

Compared = list[tuple[Window, Style]]


def _draw_cdf(axes: Axes, compared: Compared, name: str) -> None:
    for window, style in compared:
        axes.plot(_SIGNED, window.stats[name].cdf(_SIGNED.tolist()), color=COLOURS[name], label=window.name, **style)
    axes.set_xscale("symlog", linthresh=1e-4)
    axes.set_xticks(*zip(*_CDF_TICKS.items(), strict=True))
    axes.set(title=f"{name}: CDF of the log-ratio", xlabel="log-ratio, nats", ylabel="share of tokens below")


def _draw_tail(axes: Axes, compared: Compared, name: str) -> None:
    for window, style in compared:
        mass = np.asarray(window.stats[name].tail_mass(_MAGNITUDES.tolist()))
        seen = mass > 0
        axes.plot(_MAGNITUDES[seen], mass[seen], color=COLOURS[name], label=window.name, **style)
    axes.set(title=f"{name}: tail of |log-ratio|", xlabel="t, nats", ylabel="share of tokens with |log-ratio| > t")
    axes.set(xscale="log", yscale="log", xlim=(1e-4, 30.0))
