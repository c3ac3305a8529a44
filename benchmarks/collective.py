"""Reducing over ranks, with gloo on this machine: what one step's global statistics cost in collectives.

``measure`` starts the ranks; this module run as a script with RANK WORLD FOLDER TOKENS ROUNDS is one of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .timing import Figure

Tensor = torch.Tensor
SLICES = 4
STATISTICS = 12  # scalars a slice that a trainer reduces one by one
LEVEL = 0.999
TIMEOUT = 120  # seconds


def measure(world: int = 2, tokens: int = 1 << 16, rounds: int = 20) -> dict[str, Any]:
    """Times of every way to reduce on rank 0, whether each was right, and the bytes that a rank sends."""
    with tempfile.TemporaryDirectory() as folder:
        # what could be imported here can be imported there
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, *map(str, (rank, world, folder, tokens, rounds))],
                env=environment,
            )
            for rank in range(world)
        ]
        try:
            codes = [process.wait(TIMEOUT) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise RuntimeError(f"a rank failed: exit codes {codes}")
        rows = json.loads((Path(folder) / "rows.json").read_text())
    return {"backend": "gloo", "ranks": world, "tokens_per_rank": tokens, "slices": SLICES, "rows": rows}


def _rank(rank: int, world: int, folder: str, tokens: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
    )
    generator = torch.Generator().manual_seed(rank)
    x = 1e-2 * torch.randn(SLICES, tokens, generator=generator)
    everything = torch.cat(_gathered(x), 1)
    truth = everything.abs().sort(1).values[:, int(LEVEL * everything.shape[1])]
    median = everything.median(1).values
    contenders: dict[str, tuple[Callable[[], Callable[[], Tensor]], Tensor | None, float, int]] = {
        "pyrlstats all_reduce": (_ours(x), truth, 2.0**-5, 0),
        "one all-reduce a statistic": (lambda: _one_by_one(x), None, 0.0, 4 * SLICES * STATISTICS),
        "gather all tokens, then median": (lambda: lambda: _gather(x), median, 1e-6, x.nbytes),
        "radix select, 4 rounds": (lambda: lambda: _radix(x), truth, 1e-6, 4 * SLICES * 256 * 8),
    }
    rows = []
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, Tensor] = {}
    for _ in range(rounds + 1):
        for name, (prepare, *_) in contenders.items():
            run = prepare()
            dist.barrier()
            start = time.perf_counter()
            answers[name] = run()
            samples[name].append(time.perf_counter() - start)
    for name, (_, right, tolerance, sent) in contenders.items():
        error = None if right is None else float(((answers[name] - right) / right).abs().max())
        wrong = error is not None and error > tolerance
        rows.append(
            {
                "contender": name,
                "status": "wrong" if wrong else "ok",
                "reason": f"off by {error:.2%}" if wrong else None,
                "error": error,
                "bytes": sent or _state_bytes(),
                "seconds": None if wrong else dataclasses.asdict(Figure.of(samples[name][1:])),
            }
        )
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _state_bytes() -> int:
    from pyrlstats import Layout
    from pyrlstats.state import words_of

    return 8 * words_of(SLICES, Layout())


def _ours(x: Tensor) -> Callable[[], Callable[[], Tensor]]:
    import pyrlstats

    names = [f"slice_{index}" for index in range(SLICES)]
    accumulator = pyrlstats.SliceAccumulator(names, device="cpu")
    members = {name: torch.arange(SLICES)[:, None] == index for index, name in enumerate(names)}

    def prepare() -> Callable[[], Tensor]:
        accumulator.reset()
        accumulator.update(x, torch.zeros_like(x), members)

        def run() -> Tensor:
            stats = accumulator.all_reduce().compute()
            return torch.stack([stats[name].abs_quantile(LEVEL) for name in names])

        return run

    return prepare


def _one_by_one(x: Tensor) -> Callable[[], Tensor]:
    local = [row.mean() for row in x for _ in range(STATISTICS)]

    def run() -> Tensor:
        for value in local:
            dist.all_reduce(value)
        return torch.stack(local) / dist.get_world_size()

    return run


def _gathered(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def _gather(x: Tensor) -> Tensor:
    return torch.cat(_gathered(x), 1).median(1).values


def _radix(x: Tensor) -> Tensor:
    keys = x.abs().view(torch.int32)
    left = torch.full((SLICES, 1), int(LEVEL * x.shape[1] * dist.get_world_size()))
    found = torch.zeros(SLICES, 1, dtype=torch.int64)
    for shift in (24, 16, 8, 0):
        inside = (keys >> (shift + 8)) == found if shift < 24 else torch.ones_like(keys, dtype=torch.bool)
        counts = torch.zeros(SLICES, 256, dtype=torch.int64)
        counts.scatter_add_(1, ((keys >> shift) & 255).long(), inside.long())
        dist.all_reduce(counts)
        cumulative = counts.cumsum(1)
        digit = (cumulative <= left).sum(1, keepdim=True)
        left = left - (cumulative - counts).gather(1, digit)
        found = (found << 8) | digit
    return found.to(torch.int32).view(torch.float32)[:, 0]


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
