"""What exact quantiles, tails and top tokens cost, beside sorting and partitioning every slice.

``PYTHONPATH=. python benchmarks/second_pass.py`` runs from a source tree, on a GPU where there is one. Every quantile
is compared with the sorted slice before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import pyrlstats
from benchmarks.machine import describe, line
from pyrlstats import exact_quantiles
from pyrlstats.tails import tail_shape, top_tokens

Q = [0.001, 0.01, 0.5, 0.99, 0.999]
SHARES = (0.7, 0.35, 0.2, 0.007)

Tensor = torch.Tensor


def tokens(n: int, device: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """t-distributed log-ratios, 3 degrees of freedom, and four overlapping masks."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy((0.05 * rng.standard_t(3, n)).astype(np.float32))
    masks = {f"{share:.1%}": torch.from_numpy(rng.random(n) < share).to(device) for share in SHARES}
    return x.to(device), torch.zeros(n, device=device), masks


def places(n: int) -> list[int]:
    return [max(1, int(np.ceil(q * n))) - 1 for q in Q]


def partitioned(logp: Tensor, old_logp: Tensor, masks: dict[str, Tensor]) -> dict[str, Any]:
    x = logp.numpy() - old_logp.numpy()
    found = {}
    for name, mask in masks.items():
        inside = x[mask.numpy()]
        found[name] = np.partition(inside, places(inside.size))[places(inside.size)]
    return found


def sorted_(logp: Tensor, old_logp: Tensor, masks: dict[str, Tensor]) -> dict[str, Any]:
    x = logp - old_logp
    found = {}
    for name, mask in masks.items():
        inside = x[mask].sort().values
        found[name] = inside[places(inside.numel())]
    return found


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, quantiles in wanted.items():
        if not torch.equal(torch.as_tensor(found[name]).cpu().double(), torch.as_tensor(quantiles).cpu().double()):
            raise RuntimeError(f"the quantiles of {name} are wrong: {found[name]}, not {quantiles}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = tokens(options.tokens, device)
    stats = pyrlstats.slice_stats(*batch)
    check(exact_quantiles(*batch, Q), sorted_(*batch))
    shape = tail_shape(*batch)
    calls: dict[str, Callable[[], Any]] = {
        "slice_stats": lambda: pyrlstats.slice_stats(*batch),
        "exact_quantiles, 5 q": lambda: exact_quantiles(*batch, Q),
        "exact_quantiles, 5 q, stats given": lambda: exact_quantiles(*batch, Q, stats=stats),
        "tail_shape, largest tokens": lambda: tail_shape(*batch),
        "tail_shape, the fit": lambda: replace(shape).pareto_k,
        "top_tokens, k = 10": lambda: top_tokens(*batch),
        "torch: index and sort": lambda: sorted_(*batch),
    }
    if device == "cpu":
        calls["numpy: index and partition"] = lambda: partitioned(*batch)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    print(line(describe(device)))
    print(
        f"{options.tokens:,} float32 tokens, 4 masks ({', '.join(batch[2])}), ms: median and best of {options.rounds}"
    )
    for name, samples in seconds.items():
        print(f"{name:36}{1e3 * statistics.median(samples):10.1f}{1e3 * min(samples):10.1f}")


if __name__ == "__main__":
    main()
