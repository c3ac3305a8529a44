"""What a run leaves behind: a monitor's run folder, a summary, and the tokens of the last step to check them with."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shutil
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
from pyrlstats.monitor import Monitor
from pyrlstats.monitor.folder import ALERTS, ARTIFACTS, RUN, SNAPSHOTS, STEPS

SUMMARY, TOKENS, FIGURE, PAGE = "summary.json", "last_step.npz", "report.png", "report.html"

# the policy is at first far from settled, which is no trouble: nothing is compared with these steps
SKIP, BASELINE = 20, 20


@dataclass(frozen=True)
class Times:
    """Seconds: on the clock, and of processor time over all threads."""

    wall_seconds: float
    cpu_seconds: float


def prepare(folder: Path) -> None:
    """Make the folder and find out whether it can be written; files of an earlier run stay until there are new ones.

    Raises:
        OSError: it cannot, or it holds a run that is no demo.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RUN).exists() and not (folder / SUMMARY).exists():
        raise FileExistsError(errno.EEXIST, "it holds another run")
    with tempfile.TemporaryFile(dir=folder):
        pass


def begin(folder: Path, settings: Settings) -> Monitor:
    """A monitor that writes its run folder here, in place of what an earlier demo left."""
    if (folder / SUMMARY).exists():
        for name in (RUN, STEPS, ALERTS):
            (folder / name).unlink(missing_ok=True)
        for name in (ARTIFACTS, SNAPSHOTS):
            shutil.rmtree(folder / name, ignore_errors=True)
    write_summary(folder, {"settings": asdict(settings)})
    return Monitor(folder, baseline=BASELINE, skip=SKIP)


def watch(monitor: Monitor, step: Step) -> None:
    """One step: its score, its mean loss, and the state behind every statistic."""
    loss = sum(batch.loss for batch in step.minibatches) / len(step.minibatches)
    monitor.observe(step.number, step.stats, {**asdict(step.score), "loss": loss})


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
