"""What a reduction costs beyond its two collectives, and what one step's statistics sync.

``PYTHONPATH=. python benchmarks/all_reduce.py`` runs from a source tree: gloo with 2 ranks on the CPU, NCCL with 2
ranks and with as many as there are GPUs, then 16 micro-batches x 4 slices on one GPU under the profiler. Every
reduced state is compared with one pass over all ranks' tokens before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import pyrlstats
from benchmarks.machine import describe, line
from benchmarks.timing import Figure, in_words
from pyrlstats.layout import SUMS

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor, dict[str, Tensor]]
NAMES = ("all", "pre_tool", "post_tool", "text")
MICRO_BATCHES = 16
ROWS, COLUMNS = 8, 2048
PROFILED_STEPS = 3
TIMEOUT = timedelta(seconds=60)


def tokens(seed: int, device: Any) -> Batch:
    """One micro-batch: log-probabilities and four overlapping masks."""
    rng = torch.Generator().manual_seed(seed)
    old_logp = -torch.rand(ROWS, COLUMNS, generator=rng) * 3.0
    x = torch.randn(ROWS, COLUMNS, generator=rng) * 10.0 ** (-4.0 + 4.0 * torch.rand(ROWS, COLUMNS, generator=rng))
    masks = {name: torch.rand(ROWS, COLUMNS, generator=rng) < 1.0 / (1 + i) for i, name in enumerate(NAMES)}
    return (old_logp + x).to(device), old_logp.to(device), {name: mask.to(device) for name, mask in masks.items()}


def check(stats: pyrlstats.SliceStats, batches: list[Batch]) -> None:
    """Raise unless the state is that of one pass over all batches: integers and extrema to the bit."""
    whole = [torch.cat(parts) for parts in zip(*((logp, old) for logp, old, _ in batches), strict=True)]
    masks = {name: torch.cat([masks[name] for *_, masks in batches]) for name in NAMES}
    got, wanted = stats.state, pyrlstats.slice_stats(*whole, masks).state
    same = all(torch.equal(getattr(got, part), getattr(wanted, part)) for part in ("counts", "histogram", "maxima"))
    scale = wanted.sum("abs_x")[:, None] + wanted.sums.abs()
    if not same or not bool(((got.sums - wanted.sums).abs() <= 1e-6 * scale).all()):
        raise RuntimeError(
            f"the reduced state is wrong: {dict(zip(SUMS, (got.sums - wanted.sums).T.tolist(), strict=True))}"
        )


def reduce_rank(rank: int, world: int, backend: str, folder: str, rounds: int) -> None:
    """One rank: correctness, then ours and the bare collectives in turns. Rank 0 writes the row."""
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )  # fmt: skip
    batches = [tokens(seed, device) for seed in range(world)]
    accumulator = pyrlstats.SliceAccumulator(NAMES, device=device)
    check(accumulator.update(*batches[rank]).all_reduce().compute(), batches)
    accumulator.reset().update(*batches[rank])
    with no_sync(on_gpu):
        accumulator.all_reduce()
    check(accumulator.compute(), batches)
    accumulator.reset().update(*batches[rank])
    check(accumulator.all_reduce(async_op=True).wait().compute(), batches)
    accumulator.reset().update(*batches[rank])
    check(accumulator.reduce(world - 1).compute(), batches if rank == world - 1 else [batches[rank]])
    check_mixed(rank, batches, device)

    buffers = accumulator._reduction._buffers  # type: ignore[union-attr]
    maxima, total = torch.ones_like(buffers.maxima), torch.ones_like(buffers.total)  # type: ignore[union-attr]

    def bare() -> None:
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        dist.all_reduce(total, dist.ReduceOp.SUM)

    samples: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    for index in range(rounds + 10):
        for name, call in (("ours", accumulator.all_reduce), ("bare", bare)):
            if name == "ours":
                accumulator.reset().update(*batches[rank])
            maxima.fill_(1.0)
            total.fill_(1.0)
            dist.barrier()
            synchronize(on_gpu)
            start = time.perf_counter()
            call()
            launched = time.perf_counter()
            synchronize(on_gpu)
            if index >= 10:
                samples[name].append((time.perf_counter() - start, launched - start))
    mine = torch.tensor([[Figure.of([s[i] for s in samples[name]]).median for i in (0, 1)] for name in samples],
                        dtype=torch.float64, device=device)  # fmt: skip
    dist.all_reduce(mine, dist.ReduceOp.MAX)  # the slowest rank's medians
    (ours, ours_launched), (bare_time, bare_launched) = (1e6 * mine).tolist()
    row = {
        "backend": backend,
        "ranks": world,
        "slices": len(NAMES),
        "bytes": 8 * (total.numel() + maxima.numel()),
        "bare_us": bare_time,
        "ours_us": ours,
        "beyond_us": ours - bare_time,
        "host_beyond_us": ours_launched - bare_launched,
        "p20_p80_us": [1e6 * x for f in (Figure.of([s[0] for s in samples["ours"]]),) for x in (f.p20, f.p80)],
        "rounds": rounds,
        "syncs": "none after the handshake" if on_gpu else None,
    }
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def check_mixed(rank: int, batches: list[Batch], device: torch.device) -> None:
    """Rank 0 counts where the collectives run, rank 1 on the CPU, the others nothing and nowhere."""
    mixed = pyrlstats.SliceAccumulator(NAMES)
    for _ in range(2):
        if rank < 2:
            logp, old_logp, masks = batches[rank]
            where = (device, torch.device("cpu"))[rank]
            mixed.update(logp.to(where), old_logp.to(where), {name: mask.to(where) for name, mask in masks.items()})
        check(mixed.all_reduce().compute().to(device), batches[:2])
        mixed.reset()


@contextmanager
def no_sync(on_gpu: bool) -> Any:
    """Inside, whatever makes the host wait for the GPU raises."""
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def measure(backend: str, world: int, rounds: int) -> dict[str, Any]:
    """The row of one world; every rank in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=reduce_rank, args=(rank, world, backend, folder, rounds)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 90.0
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        if any(codes) or None in codes:
            return {"backend": backend, "ranks": world, "failed": f"exit codes {codes}"}
        row: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
        return row


def ours(batches: list[Batch], accumulator: pyrlstats.SliceAccumulator) -> dict[str, float]:
    """A step with pyrlstats: all statistics and quantiles, 4 slices."""
    for batch in batches:
        accumulator.update(*batch)
    numbers = accumulator.compute().to_dict()
    accumulator.reset()
    return numbers


def item_by_item(batches: list[Batch]) -> dict[str, float]:
    """A step as trainers have it: every scalar of every micro-batch read with .item(), then averaged."""
    sums: dict[str, float] = {}
    for logp, old_logp, masks in batches:
        for name, mask in masks.items():
            x = (logp - old_logp)[mask]
            w = x.exp()
            scalars = {
                "kl_k1": -x.mean(),
                "kl_k3": (torch.expm1(x) - x).mean(),
                "ratio_mean": w.mean(),
                "ratio_max": w.max(),
                "ratio_min": w.min(),
                "ess_fraction": w.sum() ** 2 / (w**2).sum() / x.numel(),
                "clip_fraction": ((w < 0.8) | (w > 1.2)).float().mean(),
                "p99": x.abs().quantile(0.99),
            }
            for key, value in scalars.items():
                sums[f"{name}/{key}"] = sums.get(f"{name}/{key}", 0.0) + value.item()
    return {key: value / len(batches) for key, value in sums.items()}


def sums_only(batches: list[Batch]) -> list[list[float]]:
    """A step of careful plain torch: masked sums kept on the device, read once; no quantiles."""
    total = None
    for logp, old_logp, masks in batches:
        x = (logp - old_logp).double()
        w = x.exp()
        terms = torch.stack([torch.ones_like(x), -x, torch.expm1(x) - x, w, w * w, ((w < 0.8) | (w > 1.2)).double()])
        members = torch.stack(list(masks.values())).double()
        part = torch.einsum("tij,sij->st", terms, members)
        total = part if total is None else total + part
    assert total is not None
    return total.tolist()


def profile_step(step: Callable[[], Any]) -> dict[str, Any]:
    """Syncs, copies and time of one step."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats().get("num_device_alloc", 0)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED_STEPS):
            with record_function("step"):
                step()
            torch.cuda.synchronize()  # outside of the step, so not counted
    events = recorded.events()
    spans = [event.time_range for event in events if event.name == "step" and "CPU" in str(event.device_type)]
    inside = [e for e in events if any(span.start <= e.time_range.start <= span.end for span in spans)]
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "syncs": sum("Synchronize" in event.name for event in inside) / len(spans),
        "sync_calls": sorted({event.name for event in inside if "Synchronize" in event.name}),
        "device_to_host_copies": sum("Memcpy DtoH" in event.name for event in events) / len(spans),
        "host_to_device_copies": sum("Memcpy HtoD" in event.name for event in events) / len(spans),
        "kernels": sum("CUDA" in str(e.device_type) and not e.name.startswith(("Mem", "step")) for e in events)
        / len(spans),
        "device_allocations": torch.cuda.memory_stats().get("num_device_alloc", 0) - allocations,
        "milliseconds": Figure.of(times).median,
    }


def captured_update() -> str:
    """Whether an update that a CUDA graph replays counts as it should: "ok", or what went wrong."""
    device = torch.device("cuda", 0)
    batches = [tokens(0, device)]
    accumulator = pyrlstats.SliceAccumulator(NAMES, device=device).update(*batches[0])
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):  # nothing runs yet
            accumulator.update(*batches[0])
        accumulator.reset()
        for _ in range(3):
            graph.replay()
        check(accumulator.compute(), batches * 3)
    except RuntimeError as error:
        return in_words(error)
    return "ok"


def steps() -> list[dict[str, Any]]:
    """Rows of the profiled steps, on the first GPU."""
    device = torch.device("cuda", 0)
    batches = [tokens(seed, device) for seed in range(MICRO_BATCHES)]
    accumulator = pyrlstats.SliceAccumulator(NAMES, device=device)
    for batch in batches:
        accumulator.update(*batch)
    check(accumulator.compute(), batches)
    with no_sync(True):
        for batch in batches:
            accumulator.update(*batch)
        accumulator.compute()
        accumulator.reset()
    contenders: dict[str, Callable[[], Any]] = {
        "pyrlstats, everything": lambda: ours(batches, accumulator),
        "plain torch, 8 scalars by .item()": lambda: item_by_item(batches),
        "plain torch, 6 sums, no quantiles": lambda: sums_only(batches),
    }
    return [{"step": name, **profile_step(step)} for name, step in contenders.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    worlds = [("gloo", 2), *(("nccl", n) for n in sorted({2, gpus}) if 2 <= n <= gpus)]
    machine = describe("cuda" if gpus else "cpu")
    print(line(machine))
    print("\nbackend  ranks  bytes  bare MAX + SUM    all_reduce        beyond   (us, slowest rank's median)")
    rows = []
    for backend, world in worlds:
        row = measure(backend, world, options.rounds)
        rows.append(row)
        times = "".join(f"{row[key]:14.1f}" for key in ("bare_us", "ours_us", "beyond_us") if key in row)
        print(f"{backend:7}  {world:5}  {row.get('bytes', '')}  {times or row['failed']}", flush=True)
    profiled = steps() if gpus else []
    if profiled:
        print(f"\n{MICRO_BATCHES} micro-batches x {len(NAMES)} slices, {ROWS * COLUMNS} tokens each, a step:")
        print(f"{'':34}{'syncs':>8}{'D2H':>8}{'H2D':>8}{'kernels':>10}{'allocations':>13}{'ms':>8}")
    for row in profiled:
        counts = "".join(f"{row[key]:8.1f}" for key in ("syncs", "device_to_host_copies", "host_to_device_copies"))
        rest = f"{row['kernels']:10.0f}{row['device_allocations']:13}{row['milliseconds']:8.2f}"
        print(f"{row['step']:34}{counts}{rest}")
    captured = captured_update() if gpus else None
    print(f"update under CUDA graph capture: {captured}")
    result = {"machine": machine, "reductions": rows, "steps": profiled, "captured": captured}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
