"""pyrlstats, every statistic of every slice."""

from __future__ import annotations

import os
from typing import Any

import pyrlstats

from ..exact import CLIP, LEVELS, MOMENTS, Results, Tolerance
from ..inputs import Inputs
from .contender import Collect, Contender, Launch

TOLERANCE = Tolerance(value=2.0**-5, moments=1e-6)


def results_of(stats: pyrlstats.SliceStats) -> Results:
    """Every statistic as Python numbers, as a logger gets them."""
    values = stats.to_dict()
    return {name: [values[f"{slice_}/{name}"] for slice_ in stats] for name in (*MOMENTS, *LEVELS)}


def _call(num_threads: int | None) -> Any:
    def make(inputs: Inputs) -> tuple[Launch, Collect]:
        names = inputs.names if inputs.slice_ids is not None else None

        def launch(given: Inputs) -> pyrlstats.SliceStats:
            return pyrlstats.slice_stats(
                given.logp,
                given.old_logp,
                given.masks,
                slice_ids=given.slice_ids,
                names=names,
                clip=CLIP,
                layout=given.spec.layout,
                num_threads=num_threads,
            )

        return launch, results_of

    return make


def _accumulator(inputs: Inputs) -> tuple[Launch, Collect]:
    accumulator = pyrlstats.SliceAccumulator(inputs.names, layout=inputs.spec.layout, clip=CLIP, device=inputs.device)

    def launch(given: Inputs) -> pyrlstats.SliceAccumulator:
        return accumulator.update(given.logp, given.old_logp, given.masks, slice_ids=given.slice_ids)

    return launch, lambda filled: results_of(filled.compute())


ALL_THREADS = os.cpu_count() or 1

CONTENDERS = (
    Contender(
        "pyrlstats",
        "ours",
        _call(None),
        "slice_stats(...).to_dict(): every statistic",
        TOLERANCE,
        devices=("cpu",),
    ),
    Contender(
        "pyrlstats, all threads",
        "ours",
        _call(ALL_THREADS),
        "the same on every CPU",
        TOLERANCE,
        devices=("cpu",),
        threads=ALL_THREADS,
    ),
    Contender(
        "pyrlstats accumulator",
        "ours",
        _accumulator,
        "SliceAccumulator.update, then compute().to_dict(): every statistic",
        TOLERANCE,
        devices=("cuda",),
        capturable=True,
    ),
)
