"""What a run leaves behind: the figures of each step, a summary, and the tokens of the last step to check them with."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyrlstats._build import version
from pyrlstats.demo.slices import NAMES
from pyrlstats.demo.training import Minibatch, Score, Settings, Step
from pyrlstats.demo.windows import first_and_last

STEPS, SUMMARY, TOKENS, FIGURE, PAGE = "steps.jsonl", "summary.json", "last_step.npz", "report.png", "report.html"


@dataclass(frozen=True)
class Times:
    """Seconds: on the clock, and of processor time over all threads."""

    wall_seconds: float
    cpu_seconds: float


def prepare(folder: Path) -> None:
    """Make the folder and find out whether it can be written; files of an earlier run stay until there are new ones.

    Raises:
        OSError: it cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_step(folder: Path, step: Step) -> None:
    """One line of JSON: the step, its score and every statistic; null where a slice had no tokens."""
    record = {"step": step.number, **asdict(step.score), **step.stats.to_dict()}
    with (folder / STEPS).open("w" if step.number == 1 else "a") as file:
        file.write(json.dumps(_strict(record), allow_nan=False) + "\n")


def _strict(values: dict[str, float]) -> dict[str, float | None]:
    """As JSON takes it: no NaN, no infinity."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def write_tokens(folder: Path, minibatches: list[Minibatch]) -> None:
    """Every token that the last step's statistics counted: ``logp``, ``old_logp`` and one boolean array a slice."""
    arrays: dict[str, Any] = {name: _flat(batch.masks[name] for batch in minibatches) for name in NAMES}
    arrays["logp"] = _flat(batch.logp for batch in minibatches)
    arrays["old_logp"] = _flat(batch.old_logp for batch in minibatches)
    np.savez_compressed(folder / TOKENS, **arrays)


def _flat(tensors: Iterable[torch.Tensor]) -> np.ndarray[Any, Any]:
    return np.concatenate([tensor.numpy().ravel() for tensor in tensors])


def summarise(
    settings: Settings, steps: list[Step], scores: dict[str, Score], times: Times, *, interrupted: bool
) -> dict[str, Any]:
    """What the run was and what came out of it."""
    return {
        "settings": asdict(settings),
        "steps_done": len(steps),
        "interrupted": interrupted,
        "scores": {name: asdict(score) for name, score in scores.items()},
        "windows": {window.name: _strict(window.stats.to_dict()) for window in first_and_last(steps)},
        "times": asdict(times),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "versions": {
            "pyrlstats": version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """The summary as JSON."""
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
