"""What the sums of sequences cost on a GPU: the kernel beside array operations, and beside reading the same bytes.

``PYTHONPATH=. python benchmarks/sequences_cost.py [--json PATH]`` runs from a source tree. float32 tokens, four bool
masks, sequences of random lengths. The sums are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from benchmarks.machine import describe, line
from benchmarks.roofline_cuda import read

import pyrlstats
from pyrlstats import _dispatch
from pyrlstats.backends import triton_gpu
from pyrlstats.backends.batch import Batch
from pyrlstats.backends.tokens import _BLOCK_WORDS
from pyrlstats.groups import sequences
from pyrlstats.groups.accumulate import accumulate
from pyrlstats.groups.options import Options, groups_of
from pyrlstats.layout import Layout
from pyrlstats.state import State

Tensor = torch.Tensor
SIZES = (1 << 24, 1 << 26)
MEAN_LENGTHS = (1, 64, 1024, 16384, None)  # None: one sequence
SHARES = (0.7, 0.35, 0.2, 0.1)
NAMES = tuple("abcd")
CLIP = (0.2, 0.2)
MOST_SEGMENTS = 1 << 25  # of array operations: blocks x slices x sequences; more take seconds
MOST_SUMS = 1 << 28  # of a whole call, which makes five quantities of each


class Operands:
    """What a reader reads."""

    def __init__(self, *tensors: Tensor) -> None:
        self.words = [tensor.view(torch.uint8).view(torch.int64) for tensor in tensors]
        self.device = tensors[0].device


def tokens(n: int) -> Batch:
    generator = torch.Generator("cuda").manual_seed(0)
    old_logp = torch.empty(n, device="cuda").exponential_(1, generator=generator).neg_()
    logp = torch.empty(n, device="cuda").normal_(0, 0.01, generator=generator).add_(old_logp)
    runs = [torch.rand(n // 128, device="cuda", generator=generator) < share for share in SHARES]
    return Batch(logp, old_logp, tuple(run.repeat_interleave(128) for run in runs), None, None)


def boundaries(n: int, mean: int | None) -> Tensor:
    """Cuts at random: exponential lengths."""
    ends = torch.tensor([0, n], device="cuda")
    if mean is None:
        return ends
    generator = torch.Generator("cuda").manual_seed(1)
    cuts = torch.randint(0, n + 1, (n // mean - 1,), device="cuda", generator=generator)
    return torch.cat((ends, cuts)).sort().values


def milliseconds(call: Callable[[], Any], most: float = 0.25) -> float:
    """Median of a call between events, of some ``most`` seconds together."""
    times: list[float] = []
    call()
    while len(times) < 3 or (sum(times) < 1e3 * most and len(times) < 25):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def check(batch: Batch, by_arrays: bool) -> None:
    """Compare all sums, or those of the first sequences where array operations would take too long."""
    whole = triton_gpu.sequence_sums(batch, len(NAMES))
    part = batch
    if not by_arrays:
        first = 1 << 16
        n = int(batch.boundaries[first])
        part = Batch(batch.logp[:n], batch.old_logp[:n], tuple(mask[:n] for mask in batch.masks or ()), None, None)
        part = replace(part, boundaries=batch.boundaries[: first + 1])
        whole = whole[..., :first]
    wanted = sequences.sums(part, len(NAMES))
    size = sequences.sums(replace(part, logp=part.logp.abs() + part.old_logp.abs()), len(NAMES)).abs()
    if not torch.equal(whole[0], wanted[0]):
        raise RuntimeError("the kernel counts other tokens than the array operations")
    worst = ((whole - wanted).abs() / size.clamp(min=1e-30))[1:].max().item()
    if not worst < 1e-12:
        raise RuntimeError(f"the kernel's sums differ from those of the array operations by {worst}")


def rows() -> Iterator[dict[str, Any]]:
    groups = groups_of(Options(sequences=True), CLIP)
    for n in SIZES:
        batch = tokens(n)
        named = dict(zip(NAMES, batch.masks or (), strict=True))
        operands: Any = Operands(batch.logp, batch.old_logp, *named.values())
        reading = milliseconds(lambda: read(operands))  # noqa: B023
        default = milliseconds(lambda: pyrlstats.slice_stats(batch.logp, batch.old_logp, named))  # noqa: B023
        yield {"tokens": n, "case": "slice_stats, nothing asked for", "ms": default, "read_ms": reading}
        for mean in MEAN_LENGTHS:
            batch = replace(batch, boundaries=boundaries(n, mean))
            count = len(batch.boundaries) - 1
            sums = len(NAMES) * count
            by_arrays = sums * (n * len(NAMES) // _BLOCK_WORDS) <= MOST_SEGMENTS
            check(batch, by_arrays)
            state = State.empty(NAMES, Layout(), CLIP, batch.logp.device, groups)

            def call(own: Any, batch: Batch = batch, state: State = state) -> None:
                accumulate(batch, state, triton_gpu.accumulate, sequence_sums=own)

            whole = 4 * sums <= MOST_SUMS
            yield {
                "tokens": n, "case": f"mean length {mean or n}", "sequences": count,
                "written_gb": 32e-9 * sums,
                "ms": milliseconds(lambda: triton_gpu.sequence_sums(batch, len(NAMES))),  # noqa: B023
                "arrays_ms": milliseconds(lambda: sequences.sums(batch, len(NAMES))) if by_arrays else None,  # noqa: B023
                "read_ms": reading,
                "update_ms": milliseconds(lambda: call(triton_gpu.sequence_sums)) if whole else None,  # noqa: B023
                "update_arrays_ms": milliseconds(lambda: call(sequences.sums)) if whole and by_arrays else None,  # noqa: B023
            }  # fmt: skip
            state = None
        batch = named = operands = None
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the rows")
    path = parser.parse_args().json
    machine = describe("cuda")
    print(line(machine), flush=True)
    assert _dispatch.unavailable("triton") is None
    found = []
    for row in rows():
        found.append(row)
        times = {name: f"{row[name]:9.3f}" if row.get(name) is not None else f"{'-':>9}" for name in (
            "ms", "arrays_ms", "read_ms", "update_ms", "update_arrays_ms")}  # fmt: skip
        print(f"{row['tokens']:>10,} {row['case']:32}", *(f"{name} {text}" for name, text in times.items()), flush=True)
        if path:
            with open(path, "w") as file:
                json.dump({"machine": machine, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
