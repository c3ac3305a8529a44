"""Weights & Biases: scalars and histograms of a run (extra ``pyrlstats[wandb]``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyrlstats.results import Statistics
from pyrlstats.sinks.bars import bars_of
from pyrlstats.sinks.clients import client


class WandbSink:
    """Logs scalars under their keys and the histogram of each slice as ``prefix + slice + "/log_ratio"``.

    NaN and infinity are kept. A histogram has at most 512 bars with exact counts. Uploads are
    the client's own, beside training.

    W&B drops what comes for a step below its own counter, which every ``run.log`` without ``step=`` moves. Where a
    trainer logs without it (Hugging Face's does), give ``step_key``.

    Args:
        run: a ``wandb.Run``; None is the one that ``wandb.init()`` has made.
        histograms: whether to log them.
        step_key: log without ``step=``, with the step under this key (``"train/global_step"``), over which the
            charts of our keys are then drawn.

    Raises:
        ImportError: wandb is missing.
        RuntimeError: there is no run.
    """

    def __init__(self, run: Any = None, *, histograms: bool = True, step_key: str | None = None) -> None:
        self._wandb = client("wandb", "wandb")
        self._run = self._wandb.run if run is None else run
        if self._run is None:
            raise RuntimeError("there is no wandb run: call wandb.init() first, or give run=")
        self._histograms = histograms
        self._step_key = step_key
        self._defined: set[str] = set()

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Log one step.

        Raises:
            ValueError: a step below the run's own: W&B would drop it.
        """
        data: dict[str, Any] = dict(scalars)
        for prefix, one in stats.items() if self._histograms else ():
            for name in one:
                bars = bars_of(one, name, self._wandb.Histogram.MAX_LENGTH)
                if bars is not None:
                    data[f"{prefix}{name}/{one.kind}"] = self._wandb.Histogram(np_histogram=bars)
        if self._step_key is None:
            if step < self._run.step:
                raise ValueError(
                    f"step {step} is below step {self._run.step} of the wandb run, which drops it: "
                    "make the sink with step_key='train/global_step'"
                )
            self._run.log(data, step=step)
            return
        for prefix in stats.keys() - self._defined:
            self._run.define_metric(f"{prefix}*", step_metric=self._step_key)
            self._defined.add(prefix)
        self._run.log({self._step_key: step} | data)

    def close(self) -> None:
        """Nothing: the run is the caller's to finish."""
