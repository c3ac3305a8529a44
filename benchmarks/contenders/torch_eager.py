"""Plain torch: boolean indexing, multiplication by the mask, and torch.compile of the latter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..exact import ABS_LEVELS, MOMENTS, Results
from ..inputs import Inputs
from .contender import Collect, Contender, Launch

Tensor = torch.Tensor
SMALL = ("n_finite", *MOMENTS[1:])


def columns(names: tuple[str, ...], rows: list[Tensor]) -> Results:
    """Rows (one 1-D tensor a slice, a value for every name) as lists of numbers: one copy to the host."""
    table = torch.stack(rows).tolist()
    return {name: [row[index] for row in table] for index, name in enumerate(names)}


def moments(x: Tensor, naive_k3: bool = False) -> list[Tensor]:
    """MOMENTS[1:] of the selected log-ratios, in float32 as trainers compute them."""
    w = torch.exp(x)
    k3 = w - x - 1 if naive_k3 else torch.expm1(x) - x
    return [
        x.mean(),
        x.std(correction=0),
        x.min(),
        x.max(),
        k3.mean(),
        w.sum().square() / w.square().sum() / x.numel(),
        ((w < 0.8) | (w > 1.2)).float().mean(),
    ]


def quantiles_by_quantile(x: Tensor) -> list[Tensor]:
    levels = torch.tensor(list(ABS_LEVELS.values()), device=x.device)
    return list(torch.quantile(x.abs(), levels))


def quantiles_by_sort(x: Tensor) -> list[Tensor]:
    ordered = x.abs().sort().values
    n = ordered.numel()
    return [ordered[min(n - 1, int(q * n))] for q in ABS_LEVELS.values()]


def quantiles_by_kthvalue(x: Tensor) -> list[Tensor]:
    magnitude = x.abs()
    n = magnitude.numel()
    return [magnitude.kthvalue(min(n, int(q * n) + 1)).values for q in ABS_LEVELS.values()]


def _boolean_index(quantiles: Callable[[Tensor], list[Tensor]] | None, naive_k3: bool = False) -> Any:
    names = (*MOMENTS[1:], *(ABS_LEVELS if quantiles else ()))

    def make(inputs: Inputs) -> tuple[Launch, Collect]:
        def launch(given: Inputs) -> tuple[list[int], list[Tensor]]:
            log_ratio = given.logp.float() - given.old_logp.float()
            counts, rows = [], []
            for mask in given.members():
                x = log_ratio[mask]
                counts.append(x.numel())
                rows.append(torch.stack(moments(x, naive_k3) + (quantiles(x) if quantiles else [])))
            return counts, rows

        def collect(raw: tuple[list[int], list[Tensor]]) -> Results:
            return {"n_finite": list(map(float, raw[0]))} | columns(names, raw[1])

        return launch, collect

    return make


def masked_moments(logp: Tensor, old_logp: Tensor, masks: list[Tensor]) -> Tensor:
    """MOMENTS of every slice without selecting: (S, len(MOMENTS)) float64, no sync."""
    x = logp.float() - old_logp.float()
    w = torch.exp(x)
    k3 = torch.expm1(x) - x
    clipped = ((w < 0.8) | (w > 1.2)).float()
    rows = []
    for mask in masks:
        m = mask.float()
        n = mask.sum()
        mean = (x * m).sum() / n
        rows.append(
            torch.stack(
                [
                    n.double(),
                    mean.double(),
                    (((x - mean).square() * m).sum() / n).sqrt().double(),
                    torch.where(mask, x, torch.inf).min().double(),
                    torch.where(mask, x, -torch.inf).max().double(),
                    ((k3 * m).sum() / n).double(),
                    ((w * m).sum().square() / (w * w * m).sum() / n).double(),
                    ((clipped * m).sum() / n).double(),
                ]
            )
        )
    return torch.stack(rows)


def _collect_moments(table: Tensor) -> Results:
    return columns(MOMENTS, list(table))


def _mask_multiply(inputs: Inputs) -> tuple[Launch, Collect]:
    return lambda given: masked_moments(given.logp, given.old_logp, given.members()), _collect_moments


def _compiled(inputs: Inputs) -> tuple[Launch, Collect]:
    torch._dynamo.reset()
    function = torch.compile(masked_moments, dynamic=False, fullgraph=True)
    function(inputs.logp, inputs.old_logp, inputs.members())  # compiles
    return lambda given: function(given.logp, given.old_logp, given.members()), _collect_moments


def _only_quantiles(quantiles: Callable[[Tensor], list[Tensor]]) -> Any:
    def make(inputs: Inputs) -> tuple[Launch, Collect]:
        def launch(given: Inputs) -> list[Tensor]:
            log_ratio = given.logp.float() - given.old_logp.float()
            return [torch.stack(quantiles(log_ratio[mask])) for mask in given.members()]

        return launch, lambda rows: columns(tuple(ABS_LEVELS), rows)

    return make


CONTENDERS = (
    Contender(
        "torch, boolean index + quantile",
        "torch",
        _boolean_index(quantiles_by_quantile),
        "x[mask], moments in float32, torch.quantile of |x|",
        max_values=1 << 24,
    ),
    Contender(
        "torch, boolean index + sort",
        "torch",
        _boolean_index(quantiles_by_sort),
        "x[mask], moments in float32, a full sort of |x|",
        max_values=1 << 24,
    ),
    Contender(
        "torch, boolean index",
        "torch",
        _boolean_index(None),
        "x[mask], moments in float32, no quantiles",
        max_values=1 << 26,
    ),
    Contender(
        "torch, boolean index, naive k3",
        "torch",
        _boolean_index(None, naive_k3=True),
        "the same with k3 = exp(x) - x - 1 in float32",
        max_values=1 << 24,
    ),
    Contender(
        "torch, mask multiply",
        "torch",
        _mask_multiply,
        "moments as sums of x * mask, no quantiles, no sync",
        max_values=1 << 26,
        capturable=True,
    ),
    Contender(
        "torch.compile, mask multiply",
        "torch",
        _compiled,
        "torch.compile of the same",
        max_values=1 << 26,
        capturable=True,
    ),
    Contender(
        "torch.quantile", "torch", _only_quantiles(quantiles_by_quantile), "of |x[mask]|", max_values=1 << 24
    ),
    Contender("torch.sort", "torch", _only_quantiles(quantiles_by_sort), "of |x[mask]|", max_values=1 << 24),
    Contender(
        "torch.kthvalue", "torch", _only_quantiles(quantiles_by_kthvalue), "of |x[mask]|, a call a quantile",
        max_values=1 << 24,
    ),
)  # fmt: skip
