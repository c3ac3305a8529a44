"""A step in micro-batches: what is kept in between, and what is read at the end."""

from __future__ import annotations

import torch

import pyrlstats

from ..exact import ABS_LEVELS, CLIP, MOMENTS, Results
from ..inputs import Inputs
from .contender import Collect, Contender, Launch, identity
from .ours import TOLERANCE, results_of
from .torch_eager import columns, moments, quantiles_by_quantile

Tensor = torch.Tensor


def _accumulator(inputs: Inputs) -> tuple[Launch, Collect]:
    accumulator = pyrlstats.SliceAccumulator(inputs.names, layout=inputs.spec.layout, clip=CLIP, device=inputs.device)

    def launch(given: Inputs) -> pyrlstats.SliceAccumulator:
        accumulator.reset()
        for part in given.parts:
            accumulator.update(part.logp, part.old_logp, part.masks)
        return accumulator

    return launch, lambda filled: results_of(filled.compute())


def _keep_everything(inputs: Inputs) -> tuple[Launch, Collect]:
    """Keep every selected token of the step, then moments and torch.quantile once: exact, and memory grows."""

    def launch(given: Inputs) -> tuple[list[int], list[Tensor]]:
        kept: list[list[Tensor]] = [[] for _ in given.members()]
        for part in given.parts:
            log_ratio = part.logp.float() - part.old_logp.float()
            for held, mask in zip(kept, part.members(), strict=True):
                held.append(log_ratio[mask])
        whole = [torch.cat(held) for held in kept]
        return [x.numel() for x in whole], [torch.stack(moments(x) + quantiles_by_quantile(x)) for x in whole]

    def collect(raw: tuple[list[int], list[Tensor]]) -> Results:
        return {"n_finite": list(map(float, raw[0]))} | columns((*MOMENTS[1:], *ABS_LEVELS), raw[1])

    return launch, collect


def _averages(inputs: Inputs) -> tuple[Launch, Collect]:
    """Statistics of every micro-batch by .item(), averaged over micro-batches, as many loggers do."""
    names = (*MOMENTS[1:], *ABS_LEVELS)

    def launch(given: Inputs) -> Results:
        sums = [[0.0] * len(names) for _ in given.members()]
        for part in given.parts:
            log_ratio = part.logp.float() - part.old_logp.float()
            for row, mask in zip(sums, part.members(), strict=True):
                x = log_ratio[mask]
                for index, value in enumerate(moments(x) + quantiles_by_quantile(x)):
                    row[index] += value.item() / len(given.parts)
        return {name: [row[index] for row in sums] for index, name in enumerate(names)}

    return launch, identity


CONTENDERS = (
    Contender(
        "pyrlstats, micro-batches", "ours", _accumulator,
        "update every micro-batch, compute().to_dict() at the end", TOLERANCE, capturable=True,
    ),
    Contender(
        "torch, keep every token", "torch", _keep_everything,
        "x[mask] of every micro-batch kept, moments and torch.quantile at the end", max_values=1 << 24,
    ),
    Contender(
        "torch, .item() and average", "torch", _averages,
        "statistics of every micro-batch by .item(), averaged", max_values=1 << 24,
    ),
)  # fmt: skip
