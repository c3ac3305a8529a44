"""CuPy on the same GPU memory: its histogram (CUB where it applies) and its sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..exact import ABS_LEVELS, Results
from ..inputs import Inputs
from .contender import Collect, Contender, Launch
from .histograms import BINS, TINY, results_of


def _selected(given: Inputs) -> list[Any]:
    """|x| of every slice as CuPy arrays."""
    import cupy

    log_ratio = cupy.from_dlpack((given.logp.float() - given.old_logp.float()).detach())
    return [cupy.abs(log_ratio[cupy.from_dlpack(mask.view(torch.uint8)).view(cupy.bool_)]) for mask in given.members()]


def _histogram(inputs: Inputs) -> tuple[Launch, Collect]:
    import cupy

    def launch(given: Inputs) -> list[tuple[Any, Any]]:
        return [
            cupy.histogram(magnitude, BINS, (0.0, float(magnitude.max()) or TINY)) for magnitude in _selected(given)
        ]

    def collect(raw: list[tuple[Any, Any]]) -> Results:
        return results_of([(cupy.asnumpy(counts), cupy.asnumpy(edges)) for counts, edges in raw])

    return launch, collect


def _sort(inputs: Inputs) -> tuple[Launch, Collect]:
    import cupy

    def launch(given: Inputs) -> list[Any]:
        rows = []
        for magnitude in _selected(given):
            magnitude.sort()
            n = magnitude.size
            rows.append(magnitude[cupy.asarray([min(n - 1, int(q * n)) for q in ABS_LEVELS.values()])])
        return rows

    def collect(rows: list[Any]) -> Results:
        table = np.stack([cupy.asnumpy(row) for row in rows])
        return {name: table[:, index].tolist() for index, name in enumerate(ABS_LEVELS)}

    return launch, collect


CONTENDERS = (
    Contender(
        "CuPy histogram", "cupy", _histogram, f"cupy.histogram, {BINS} linear bins of |x[mask]|",
        requires=("cupy",), devices=("cuda",), max_values=1 << 25,
    ),
    Contender(
        "CuPy sort", "cupy", _sort, "cupy.sort of |x[mask]|",
        requires=("cupy",), devices=("cuda",), max_values=1 << 25,
    ),
)  # fmt: skip
