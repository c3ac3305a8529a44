"""TensorBoard: scalars, and histograms made of our bins (extra ``pyrlstats[tensorboard]``)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from pyrlstats.results import Statistics
from pyrlstats.sinks.bars import bars_of, without_empty_runs
from pyrlstats.sinks.clients import client


def _extra() -> str:
    return "tensorboard" if importlib.util.find_spec("torch") is not None else "torch,tensorboard"


class TensorBoardSink:
    """Writes scalars under their keys and the histogram of each slice as ``prefix + slice + "/log_ratio"``.

    TensorBoard keeps scalars as float32, NaN and infinity included; it draws those as triangles. A histogram has at
    most 512 bars, exact counts, and the exact min, max, sum and sum of squares of the slice.

    Args:
        writer: a folder, or a ``SummaryWriter`` (of torch or tensorboardX), which is then not closed.
        histograms: whether to write them.

    Raises:
        ImportError: torch or tensorboard is missing.
    """

    def __init__(self, writer: Any, *, histograms: bool = True) -> None:
        self._owned = isinstance(writer, (str, os.PathLike))
        if self._owned:
            writer = client("torch.utils.tensorboard", _extra()).SummaryWriter(os.fspath(writer))
        self._writer = writer
        self._histograms = histograms

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Queue one step; the writer's own thread takes it to the file."""
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)
        for prefix, one in stats.items() if self._histograms else ():
            for name in one:
                self._add_histogram(f"{prefix}{name}/{one.kind}", one, name, step)

    def _add_histogram(self, tag: str, stats: Statistics[Any], name: str, step: int) -> None:
        bars = bars_of(stats, name)
        if bars is None:
            return
        counts, edges = without_empty_runs(bars)
        state = stats.state
        row = state.names.index(name)
        near_and_far = ("near_x", "far_x"), ("near_x2", "far_x2")
        first, second = (sum(float(state.sum(part)[row]) for part in parts) for parts in near_and_far)
        self._writer.add_histogram_raw(
            tag,
            min=float(-state.maximum("neg_min_x")[row]),
            max=float(state.maximum("max_x")[row]),
            num=float(counts.sum()),
            sum=first,
            sum_squares=second,
            bucket_limits=edges[1:].tolist(),  # the left edge of the first is the minimum
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def close(self) -> None:
        """Close the folder's writer; flush one that was given."""
        if self._owned:
            self._writer.close()
        else:
            self._writer.flush()
