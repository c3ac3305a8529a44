"""What trainers for language models log today, each re-implemented from its idea in a few lines."""

from __future__ import annotations

import math

import torch

from ..exact import ABS_LEVELS, Results
from ..inputs import Inputs
from .contender import Collect, Contender, Launch
from .torch_eager import columns

Tensor = torch.Tensor
RATIO_EDGES = 257  # from 1e-4 to 1e4: 32 a decade, 7.5 % each
RADIX = 8  # bits a round


def _radix_select(inputs: Inputs) -> tuple[Launch, Collect]:
    """Exact order statistics in four rounds of eight bits; a round is one histogram that ranks could sum."""

    def select(keys: Tensor, ranks: list[int]) -> Tensor:
        found = torch.zeros(len(ranks), dtype=torch.int64, device=keys.device)
        left = torch.tensor(ranks, device=keys.device)
        for shift in range(32 - RADIX, -1, -RADIX):
            for index in range(len(ranks)):
                inside = keys if shift == 32 - RADIX else keys[(keys >> (shift + RADIX)) == found[index]]
                counts = torch.bincount((inside >> shift) & ((1 << RADIX) - 1), minlength=1 << RADIX)
                cumulative = counts.cumsum(0)
                digit = torch.searchsorted(cumulative, left[index], right=True)
                left[index] -= cumulative[digit] - counts[digit]
                found[index] = (found[index] << RADIX) | digit
        return found.to(torch.int32).view(torch.float32)

    def launch(given: Inputs) -> list[Tensor]:
        log_ratio = given.logp.float() - given.old_logp.float()
        rows = []
        for mask in given.members():
            keys = log_ratio[mask].abs().view(torch.int32)
            n = keys.numel()
            rows.append(select(keys, [min(n - 1, int(q * n)) for q in ABS_LEVELS.values()]))
        return rows

    return launch, lambda rows: columns(tuple(ABS_LEVELS), rows)


def _gather_median(inputs: Inputs) -> tuple[Launch, Collect]:
    """Every token of every slice to the host, then the median: one rank's share of gathering all tokens."""

    def launch(given: Inputs) -> list[Tensor]:
        log_ratio = given.logp.float() - given.old_logp.float()
        return [log_ratio[mask].abs().cpu().median() for mask in given.members()]

    return launch, lambda rows: columns(("abs_log_ratio_p50",), [row[None] for row in rows])


def _logspace(inputs: Inputs) -> tuple[Launch, Collect]:
    """The ratio bucketized into logarithmic bins around 1; its quantiles interpolated in the bin."""
    edges = torch.logspace(-4, 4, RATIO_EDGES, device=inputs.device)

    def launch(given: Inputs) -> list[Tensor]:
        log_ratio = given.logp.float() - given.old_logp.float()
        histograms = []
        for mask in given.members():
            bins = torch.bucketize(log_ratio[mask].exp(), edges)
            histograms.append(torch.bincount(bins, minlength=RATIO_EDGES + 1).float())
        return histograms

    def quantile(counts: list[float], q: float) -> float:
        rank, seen = q * sum(counts), 0.0
        for index, count in enumerate(counts):
            if count and seen + count >= rank:
                low = float(edges[max(index - 1, 0)])
                high = float(edges[min(index, RATIO_EDGES - 1)])
                return low + (rank - seen) / count * (high - low)
            seen += count
        return math.nan

    def collect(histograms: list[Tensor]) -> Results:
        rows = [counts.tolist() for counts in histograms]
        return {
            name: [math.log(quantile(row, q)) for row in rows]
            for name, q in (("log_ratio_p99", 0.99), ("log_ratio_p99_9", 0.999))
        }

    return launch, collect


CONTENDERS = (
    Contender(
        "trainer: radix select", "trainer", _radix_select,
        "exact quantiles of |x[mask]| in four passes of torch.bincount", max_values=1 << 24,
    ),
    Contender(
        "trainer: gather, then median", "trainer", _gather_median,
        "all tokens to the host, torch.median; no other quantile", max_values=1 << 24,
    ),
    Contender(
        "trainer: logspace histogram", "trainer", _logspace,
        "exp(x[mask]) bucketized into 256 logarithmic bins, torch.bincount", max_values=1 << 24,
    ),
)  # fmt: skip
