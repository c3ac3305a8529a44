"""What the optional statistics of docs/optional.md cost, in milliseconds: ``python benchmarks/optional_cost.py``."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import pyrlstats

WIDTH = 1024


def masks_in_runs(rows: int) -> dict[str, torch.Tensor]:
    runs = torch.rand(4, rows * WIDTH // 128) < 0.5
    return {name: one.repeat_interleave(128).reshape(rows, WIDTH) for name, one in zip("abcd", runs, strict=True)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    everything: dict[str, Any] = {"entropy": True, "probabilities": True, "truncate": (0.5, 2.0), "sequences": True}
    for rows, calls in ((64, 25), (8192, 7)):
        logp = torch.randn(rows, WIDTH) * 0.01 - 1.0
        old_logp, masks = logp + torch.randn(rows, WIDTH) * 0.01, masks_in_runs(rows)
        advantages = {"advantages": torch.randn(rows)}
        asked = [{}, *({name: value} for name, value in everything.items()), advantages, everything | advantages]
        for options in asked:
            best = float("inf")
            for _ in range(calls):
                start = time.perf_counter()
                pyrlstats.slice_stats(logp, old_logp, masks, **options)
                best = min(best, time.perf_counter() - start)
            print(f"{rows * WIDTH:>9,} tokens  {', '.join(options) or 'nothing':60} {1e3 * best:8.2f}")


if __name__ == "__main__":
    main()
