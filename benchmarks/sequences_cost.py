"""What the sums of sequences cost on a GPU: the kernel beside array operations, and beside reading the same bytes.

``PYTHONPATH=. python benchmarks/sequences_cost.py [--json PATH] [--sweep]`` runs from a source tree. float32 tokens,
four bool masks, sequences of random lengths. The sums are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import pyrlstats
from benchmarks.machine import describe, line
from benchmarks.roofline_cuda import read
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
WHOLE_UPDATE = 1024  # the mean length with which an update is timed too: others would compile other kernels
SHARES = (0.7, 0.35, 0.2, 0.1)
NAMES = tuple("abcd")
CLIP = (0.2, 0.2)
MOST_SEGMENTS = 1 << 27  # blocks x slices x sequences: with more the array operations take seconds
COLUMNS = ("ms", "arrays_ms", "read_ms", "of_read", "update_ms", "update_arrays_ms")


class Operands:
    """What a reader reads."""

    def __init__(self, batch: Batch) -> None:
        tensors = (batch.logp, batch.old_logp, *(batch.masks or ()))
        self.words = [tensor.view(torch.uint8).view(torch.int64) for tensor in tensors]
        self.device = batch.logp.device


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


def milliseconds(call: Callable[..., Any], *arguments: Any) -> float:
    """Median of a call between events, of a tenth of a second or one call; these inputs flush the L2 by themselves."""
    times: list[float] = []
    call(*arguments)
    while not times or (sum(times) < 100.0 and len(times) < 25):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(*arguments)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def first_sequences(batch: Batch, count: int) -> Batch:
    n = int(batch.boundaries[count])
    masks = tuple(mask[:n] for mask in batch.masks or ())
    return Batch(batch.logp[:n], batch.old_logp[:n], masks, None, None, None, batch.boundaries[: count + 1])


def check(batch: Batch, by_arrays: bool) -> None:
    """Compare all sums, or those of the first sequences where array operations would take too long."""
    found = triton_gpu.sequence_sums(batch, len(NAMES))
    if not by_arrays:
        batch = first_sequences(batch, 1 << 16)
        found = found[..., : 1 << 16]
    wanted = sequences.sums(batch, len(NAMES))
    x = (batch.logp - batch.old_logp).abs()
    sizes = sequences.sums(replace(batch, logp=x, old_logp=torch.zeros_like(x)), len(NAMES))
    sizes[2:] = sequences.sums(replace(batch, logp=batch.logp.abs(), old_logp=batch.old_logp.abs()), len(NAMES))[2:]
    if not torch.equal(found[0], wanted[0]):
        raise RuntimeError("the kernel counts other tokens than the array operations")
    if not ((found - wanted).abs() <= 1e-12 * sizes).all():
        raise RuntimeError("the kernel's sums are not those of the array operations")


def updater(batch: Batch, sums: Callable[..., Any]) -> Callable[[], None]:
    """One update of an accumulator that keeps sequences, with these sums."""
    groups = groups_of(Options(sequences=True), CLIP)
    state = State.empty(NAMES, Layout(), CLIP, batch.logp.device, groups)
    return lambda: accumulate(batch, state, triton_gpu.accumulate, sequence_sums=sums)


def rows() -> Iterator[dict[str, Any]]:
    """Milliseconds: ``ms`` of the kernel, ``arrays_ms`` of array operations, ``read_ms`` of reading the tokens once."""
    for n in SIZES:
        batch = tokens(n)
        reading = milliseconds(read, Operands(batch))
        named = dict(zip(NAMES, batch.masks or (), strict=True))
        default = milliseconds(pyrlstats.slice_stats, batch.logp, batch.old_logp, named)
        yield {"tokens": n, "case": "slice_stats, without sequences", "ms": default, "read_ms": reading}
        for mean in MEAN_LENGTHS:
            batch = replace(batch, boundaries=boundaries(n, mean))
            sums = len(NAMES) * (len(batch.boundaries) - 1)
            by_arrays = sums * (n * len(NAMES) // _BLOCK_WORDS) <= MOST_SEGMENTS
            check(batch, by_arrays)
            row = {"tokens": n, "case": f"mean length {mean or n:,}", "written_gb": 32e-9 * sums, "read_ms": reading}
            row["ms"] = milliseconds(triton_gpu.sequence_sums, batch, len(NAMES))
            row["of_read"] = reading / row["ms"]
            if by_arrays:
                row["arrays_ms"] = milliseconds(sequences.sums, batch, len(NAMES))
            if mean == WHOLE_UPDATE:
                row["update_ms"] = milliseconds(updater(batch, triton_gpu.sequence_sums))
                row["update_arrays_ms"] = milliseconds(updater(batch, sequences.sums))
            yield row


def sweep() -> Iterator[dict[str, Any]]:
    """Other launch shapes; the kernel's choice is marked."""
    shape = triton_gpu.sequences.Shape
    for n in SIZES:
        batch = tokens(n)
        for mean in (8, 64, 256, 1024, 4096, 16384, None):
            ends = boundaries(n, mean)
            count = len(ends) - 1
            usual = triton_gpu.sequences.shape(n, count, batch.logp.device)
            lanes = (128,) if mean is None else (4, 8, 16, 32, 64, 128) if mean <= 256 else (32, 64, 128)
            parts = [-(-usual.parts * times // 4) for times in (1, 2, 4, 8, 16)]
            for chosen in sorted({shape(some, many) for some in lanes for many in parts} | {usual}):
                arguments = (batch.logp, batch.old_logp, triton_gpu.tile.MASKS.value, batch.masks, None, ends)
                ms = milliseconds(triton_gpu.sequences.sums, *arguments, len(NAMES), chosen)
                case = f"mean length {mean or n:,}, {chosen.lanes} lanes, {chosen.parts} parts"
                yield {"tokens": n, "case": case + (" *" if chosen == usual else ""), "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the rows")
    parser.add_argument("--sweep", action="store_true", help="other launch shapes instead")
    options = parser.parse_args()
    machine = describe("cuda")
    print(line(machine), flush=True)
    print(f"{'tokens':>10} {'case':44}", *(f"{name:>16}" for name in COLUMNS))
    found = []
    for row in sweep() if options.sweep else rows():
        found.append(row)
        figures = (f"{row[name]:16.3f}" if name in row else f"{'-':>16}" for name in COLUMNS)
        print(f"{row['tokens']:>10,} {row['case']:44}", *figures, flush=True)
        if options.json:  # after every row: a run that is cut short leaves something
            with open(options.json, "w") as file:
                json.dump({"machine": machine, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
