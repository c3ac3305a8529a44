"""What making and counting slices costs, for docs/slices.md, in milliseconds: ``python benchmarks/slices_cost.py``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import pyrlstats
from pyrlstats.slices import Slices, staleness_slices, tool_slices, turn_slices

ROWS, WIDTH, TURN = 64, 16_384, 800  # about 20 turns a row


def best(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = (torch.arange(WIDTH) % TURN > 200).expand(ROWS, WIDTH).contiguous()
    tool = ~model
    boundaries = torch.arange(ROWS + 1) * WIDTH
    old_logp = -torch.rand(ROWS, WIDTH)
    logp = old_logp + 0.01 * torch.randn(ROWS, WIDTH)
    tools, turns = tool_slices(model), turn_slices(model)
    ages = torch.randint(0, 10, (ROWS, 1))
    stale = tools & staleness_slices(ages, torch.zeros_like(ages))
    families = {3: tools, 18: stale, 90: stale & turns}

    def count(where: Slices, ids: bool) -> Callable[[], object]:
        if ids:
            return lambda: pyrlstats.slice_stats(logp, old_logp, slice_ids=where.ids, names=where.names)
        masks = dict(where)
        return lambda: pyrlstats.slice_stats(logp, old_logp, masks)

    calls: dict[str, Callable[[], object]] = {
        "tool_slices, rows, from holes": lambda: tool_slices(model),
        "tool_slices, rows, from a tool mask": lambda: tool_slices(model, tool),
        "tool_slices, packed": lambda: tool_slices(model.reshape(-1), cu_seqlens=boundaries),
        "product of two families": lambda: tools & turns,
    }
    for n, where in families.items():
        calls[f"slice_stats, {len(where.names)} slices: ids"] = count(where, True)
        if n < 90:
            calls[f"slice_stats, {len(where.names)} slices: masks"] = count(where, False)
    for name, call in calls.items():
        print(f"{name:40} {best(call, rounds):8.2f}")


if __name__ == "__main__":
    main()
