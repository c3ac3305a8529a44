"""The GPU engine against the roofline, plain torch and float64, on this machine.

    PYTHONPATH=. python benchmarks/gpu_kernel.py [--json PATH] [--only large,small,host,torch,accuracy,huge] [--sweep]

R is a Triton kernel that reads the same bytes and adds them up, timed in the same run. Data: Gaussian log-ratios of
sigma 0.01, masks in runs of 128 tokens, unless a row says otherwise. The whole core state is on everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import pyrlstats
from pyrlstats.backends import triton_gpu
from pyrlstats.layout import SUMS, Layout
from pyrlstats.state import State

launch = triton_gpu.launch
tile, slice_hist = triton_gpu.tile, launch.slice_hist
LARGE = 1 << 28
CLIP = (0.2, 0.2)
CUDA = torch.device("cuda")


@triton.jit
def read_kernel(a, b, m0, m1, m2, m3, out, n, MASKS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
        at = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(a + at).to(tl.float32) - tl.load(b + at).to(tl.float32)
        if MASKS > 0:
            x += tl.load(m0 + at).to(tl.float32)
        if MASKS > 1:
            x += tl.load(m1 + at).to(tl.float32)
        if MASKS > 2:
            x += tl.load(m2 + at).to(tl.float32)
        if MASKS > 3:
            x += tl.load(m3 + at).to(tl.float32)
        total += x
    tl.atomic_add(out, tl.sum(total))


@triton.jit
def bare_kernel(a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r, s, A: tl.constexpr, B: tl.constexpr,
                C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, G: tl.constexpr,
                H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, M: tl.constexpr):  # fmt: skip
    pass


@dataclass
class Data:
    """Tokens of one case, and how its slices are given."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    mode: int
    members: tuple[torch.Tensor, ...]
    names: list[str]

    @property
    def n(self) -> int:
        return self.logp.numel()

    @property
    def bytes_a_token(self) -> int:
        tensors = (self.logp, self.old_logp, *self.members)
        return sum(tensor.element_size() for tensor in tensors)

    def empty(self) -> State:
        return State.empty(self.names, Layout(), CLIP, CUDA)

    def add(self, state: State, config: Any = None) -> None:
        launch.slice_hist_(self.logp, self.old_logp, self.mode, self.members, None, state, config=config)


def log_ratio(n: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    x = torch.empty(n, device=CUDA)
    if kind == "gauss":
        return x.normal_(0, 0.01, generator=generator)
    if kind == "zero":
        return x.zero_()
    if kind == "equal":
        return x.fill_(0.3)
    if kind == "laplace":
        x.exponential_(1, generator=generator)
        return x.mul_(torch.randint(0, 2, (n,), device=CUDA, generator=generator, dtype=torch.int8).mul_(2).sub_(1))
    if kind == "t2":  # Student t with 2 degrees of freedom: normal / sqrt(exponential)
        scale = torch.empty(n, device=CUDA).exponential_(1, generator=generator).sqrt_()
        return x.normal_(generator=generator).div_(scale)
    raise ValueError(f"kind must be gauss, zero, equal, laplace or t2, got {kind!r}")


def uneven_runs(n: int, generator: torch.Generator) -> torch.Tensor:
    """Bool [n]: runs of 50 to 500 tokens, every other one set."""
    lengths = torch.randint(50, 501, (n // 200 + 1,), device=CUDA, generator=generator)
    flags = torch.arange(lengths.numel(), device=CUDA) % 2 == 0
    return flags.repeat_interleave(lengths)[:n].contiguous()


def make(n: int, dtype: torch.dtype, how: str, kind: str = "gauss", seed: int = 0) -> Data:
    """how: all, bits1, bits4, bool1, bool4, ids8:int8, ids8:int32, ids8:int64.

    Masks are runs of 128 tokens; bits4:anywhere has runs of 50 to 500, bits4:each draws every token.
    """
    generator = torch.Generator(CUDA).manual_seed(seed)
    old = torch.empty(n, device=CUDA).exponential_(1, generator=generator).neg_()
    if kind == "lattice":  # both on the bf16 lattice, half of them equal: what a bf16 trainer logs
        old = old.bfloat16().float()
        logp = (old + 0.02 * torch.randn(n, device=CUDA, generator=generator)).bfloat16()
    elif kind in ("zero", "equal"):
        old.zero_()
        logp = log_ratio(n, kind, generator)
    else:
        logp = log_ratio(n, kind, generator).add_(old)
    logp, old = logp.to(dtype), old.to(dtype)

    def runs(share: float) -> torch.Tensor:
        mask = torch.rand(n // 128 + 1, device=CUDA, generator=generator) < share
        return mask.repeat_interleave(128)[:n].contiguous()

    name, _, detail = how.partition(":")
    if name == "all":
        return Data(logp, old, tile.ALL.value, (), ["all"])
    slices = int(name[-1])
    names = [f"s{s}" for s in range(slices)]
    if name.startswith("ids"):
        ids = torch.randint(-1, slices, (n // 128 + 1,), device=CUDA, generator=generator, dtype=torch.int8)
        ids = ids.to(getattr(torch, detail)).repeat_interleave(128)[:n].contiguous()
        return Data(logp, old, tile.IDS.value, (ids,), names)
    if detail == "each":
        packed = torch.randint(0, 1 << slices, (n,), dtype=torch.uint8, device=CUDA, generator=generator)
        return Data(logp, old, tile.BITS.value, (packed,), names)
    if detail == "anywhere":
        masks = [uneven_runs(n, generator) for _ in range(slices)]
    else:
        masks = [runs(share) for share in (0.7, 0.5, 0.5, 0.3)[:slices]]
    if name.startswith("bits"):
        packed = torch.zeros(n, dtype=torch.uint8, device=CUDA)
        for s, mask in enumerate(masks):
            packed |= mask.to(torch.uint8) << s
        return Data(logp, old, tile.BITS.value, (packed,), names)
    return Data(logp, old, tile.MASKS.value, tuple(masks), names)


def gpu_time(call: Callable[[], Any], repeats: int = 12) -> float:
    """Median seconds of a call, by events; a large input flushes the L2 by itself."""
    for _ in range(2):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in events)[repeats // 2] * 1e-3


def graph_time(call: Callable[[], Any], calls: int = 20, repeats: int = 20) -> float:
    """Seconds of GPU time a call: a graph of many calls, replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return gpu_time(graph.replay, repeats) / calls


def host_time(call: Callable[[], Any], calls: int = 200) -> float:
    """Median seconds of the host in a call; the queue is emptied every so often, outside the timed part."""
    times = []
    for i in range(calls):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return float(np.median(times))


def roofline(data: Data) -> float:
    out = torch.zeros(1, device=CUDA)
    tensors = [*data.members, *[data.logp] * 4][:4]
    tensors = [tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in tensors]
    best = 1e9
    for block, warps, per_sm in ((2048, 8, 4), (4096, 8, 4), (2048, 4, 8), (4096, 16, 2)):

        def read(block: int = block, warps: int = warps, grid: tuple[int] = (132 * per_sm,)) -> None:
            read_kernel[grid](
                data.logp, data.old_logp, *tensors, out, data.n, len(data.members), block, num_warps=warps
            )

        best = min(best, gpu_time(read, 8))
    return best


def torch_statistics(data: Data, quantiles: bool = True) -> None:
    """What people write: masked moments and quantiles by sort, one mask at a time."""
    x = data.logp.float() - data.old_logp.float()
    for mask in data.members:
        value = x[mask]
        w = value.exp()
        value.mean(), value.std(), value.min(), value.max(), value.abs().mean()
        (w - 1 - value).mean(), w.sum().square() / w.square().sum()
        (value < -0.22).float().mean(), (value > 0.18).float().mean()
        if quantiles:
            ordered = value.sort().values
            index = torch.tensor([0.5, 0.9, 0.99, 0.999], device=CUDA).mul(ordered.numel() - 1).long()
            ordered[index]


def rows_large(sweep: bool) -> list[dict[str, Any]]:
    cases = [
        ("f32, 1 slice, no mask", torch.float32, "all", "gauss"),
        ("f32, 1 slice, one byte", torch.float32, "bits1", "gauss"),
        ("f32, 4 overlapping slices, one byte", torch.float32, "bits4", "gauss"),
        ("f32, 4 slices, runs of 50 to 500", torch.float32, "bits4:anywhere", "gauss"),
        ("f32, 4 slices, every token drawn", torch.float32, "bits4:each", "gauss"),
        ("f32, 4 bool masks", torch.float32, "bool4", "gauss"),
        ("f32, 8 slice_ids int8", torch.float32, "ids8:int8", "gauss"),
        ("f32, 8 slice_ids int32", torch.float32, "ids8:int32", "gauss"),
        ("f32, 8 slice_ids int64", torch.float32, "ids8:int64", "gauss"),
        ("bf16, 1 slice, one byte", torch.bfloat16, "bits1", "gauss"),
        ("bf16, 4 overlapping slices, one byte", torch.bfloat16, "bits4", "gauss"),
        ("bf16, 4 bool masks", torch.bfloat16, "bool4", "gauss"),
        ("f32, 1 slice, all zero", torch.float32, "bits1", "zero"),
        ("f32, 1 slice, all 0.3", torch.float32, "bits1", "equal"),
        ("f32, 1 slice, Laplace(1)", torch.float32, "bits1", "laplace"),
        ("f32, 1 slice, t2", torch.float32, "bits1", "t2"),
        ("f32, 4 slices, all zero", torch.float32, "bits4", "zero"),
        ("f32, 4 slices, all 0.3", torch.float32, "bits4", "equal"),
        ("f32, 4 slices, bf16 lattice", torch.float32, "bits4", "lattice"),
        ("f32, 4 slices, Laplace(1)", torch.float32, "bits4", "laplace"),
        ("f32, 4 slices, t2", torch.float32, "bits4", "t2"),
    ]
    rows = []
    roof: dict[tuple[Any, ...], float] = {}
    for label, dtype, how, kind in cases:
        data = make(LARGE, dtype, how, kind)
        if (dtype, how) not in roof:
            roof[dtype, how] = roofline(data)
        state = data.empty()
        configs = [None]
        if sweep and kind == "gauss":
            configs += [
                slice_hist.Config(rows, v, 16, per_sm, many, min(255, 65536 // (rows * per_sm)))
                for rows, v, per_sm, many in itertools.product((256, 512), (4, 8), (1, 2), (False, True))
                if not (many and per_sm > 1) and rows * per_sm <= 512
            ]
        for config in configs:
            try:
                seconds = gpu_time(lambda: data.add(state, config))  # noqa: B023
            except Exception as error:
                print(label, config, type(error).__name__, str(error)[:80])
                continue
            rows.append({
                "case": label, "config": None if config is None else tuple(config), "gtok_s": data.n / seconds / 1e9,
                "gb_s": data.n * data.bytes_a_token / seconds / 1e9, "of_R": roof[dtype, how] / seconds,
                "R_gtok_s": data.n / roof[dtype, how] / 1e9,
            })  # fmt: skip
            row = rows[-1]
            shape = "" if config is None else str(tuple(config))
            print(f"{label:38s} {shape:22s} {row['gtok_s']:7.1f} Gtok/s {row['gb_s']:6.0f} GB/s "
                  f"{row['of_R']:.3f} R (R {row['R_gtok_s']:.0f})", flush=True)  # fmt: skip
        data = state = None
        torch.cuda.empty_cache()
    return rows


def rows_small(sweep: bool) -> list[dict[str, Any]]:
    rows = []
    for n, how in itertools.product((4096, 16384, 65536, 262144, 1 << 20, 1 << 22), ("bits1", "bits4", "bool4")):
        data = make(n, torch.bfloat16, how)
        state = data.empty()
        configs = [None]
        if sweep and how != "bits1":
            configs += [
                slice_hist.Config(rows, v, 8, per_sm, many, min(255, 65536 // (rows * per_sm)))
                for rows, v, per_sm, many in itertools.product((128, 256, 512), (4, 8), (1, 2), (False, True))
                if not (many and per_sm > 1)
            ]
        for config in configs:
            seconds = graph_time(lambda: data.add(state, config))  # noqa: B023
            rows.append({"case": f"bf16, {how}, {n}", "us": seconds * 1e6, "config": config and tuple(config)})
            print(f"graph replay, bf16 {how} {n:8d} {config and tuple(config)} {seconds * 1e6:7.2f} us", flush=True)
    return rows


def rows_host() -> list[dict[str, Any]]:
    data = make(65536, torch.bfloat16, "bool4")
    named = dict(zip(data.names, data.members, strict=True))
    accumulator = pyrlstats.SliceAccumulator(data.names, device="cuda")
    state = data.empty()

    scratch = torch.empty(1000, dtype=torch.float64, device=CUDA)
    ticket = torch.zeros(1, dtype=torch.int32, device=CUDA)

    def launch_bare() -> None:
        bare_kernel[(32,)](
            data.logp, data.old_logp, *data.members, data.logp, state.buffer, scratch, ticket, 65536, 4, 0, 1,
            -0.2, 0.2, 5, A=256, B=8, C=4, D=1, E=False, F=False, G=1024, H=18, K=3, L=0, M=4096, num_warps=8,
        )  # fmt: skip

    calls = {
        "bare Triton launch, as many arguments": launch_bare,
        "launch.slice_hist_": lambda: data.add(state),
        "acc.update": lambda: accumulator.update(data.logp, data.old_logp, named),
        "slice_stats": lambda: pyrlstats.slice_stats(data.logp, data.old_logp, named),
        "torch.zeros": lambda: torch.zeros(9000, dtype=torch.int64, device=CUDA),
    }
    for call in calls.values():
        call()
    rows = []
    for _ in range(2):
        rows = [{"case": f"host, {name}", "us": host_time(call) * 1e6} for name, call in calls.items()]
    for row in rows:
        print(f"{row['case']:45s} {row['us']:7.1f} us", flush=True)
    return rows


def rows_torch() -> list[dict[str, Any]]:
    rows = []
    for n in (LARGE, 1 << 20, 65536):
        data = make(n, torch.float32, "bool4")
        state = data.empty()

        def wall(call: Callable[[], Any], repeats: int) -> float:
            call()
            times = []
            for _ in range(repeats):
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            return float(np.median(times))

        repeats = 3 if n == LARGE else 20
        moments = wall(lambda: torch_statistics(data, quantiles=False), repeats)  # noqa: B023
        everything = wall(lambda: torch_statistics(data), repeats)  # noqa: B023
        ours = wall(lambda: data.add(state), 20)  # noqa: B023
        named = dict(zip(data.names, data.members, strict=True))
        whole = wall(lambda: pyrlstats.slice_stats(data.logp, data.old_logp, named), 20)  # noqa: B023
        rows.append({
            "case": f"plain torch, f32, 4 bool masks, {n}", "torch_moments_ms": moments * 1e3,
            "torch_ms": everything * 1e3, "kernel_ms": ours * 1e3, "slice_stats_ms": whole * 1e3,
            "speed_up": everything / whole,
        })  # fmt: skip
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()})
        data = None
        torch.cuda.empty_cache()
    return rows


def rows_accuracy() -> list[dict[str, Any]]:
    """Sums of 1e9 tokens against float64 torch, in blocks."""
    rows = []
    for kind in ("gauss", "laplace"):
        data = make(1_000_000_000, torch.float32, "all", kind)
        state = data.empty()
        data.add(state)
        wanted = dict.fromkeys(SUMS, 0.0)
        size = dict.fromkeys(SUMS, 0.0)
        for block in range(0, data.n, 1 << 26):
            x = (data.logp[block : block + (1 << 26)] - data.old_logp[block : block + (1 << 26)]).double()
            near = torch.where(x.abs() < 0.5, x, 0.0)
            far = x[x.abs() >= 0.5]
            k3 = near.square() * sum(near**j / float(np.prod(np.arange(1, j + 3), dtype=float)) for j in range(16))
            k = float(np.floor(state.maximum("max_x")[0].item() * np.log2(np.e)))
            w = far.exp() * 2.0**-k
            terms = {
                "near_x": near, "near_x2": near.square(), "near_k3": k3, "near_excess": k3 * (2 * near + k3),
                "abs_x": x.abs(), "far_x": far, "far_x2": far.square(), "far_k3": far.expm1() - far,
                "far_w": w, "far_w2": w.square(),
            }  # fmt: skip
            for name, term in terms.items():
                wanted[name] += term.sum().item()
                size[name] += term.abs().sum().item()
        errors = {
            name: abs(state.sum(name)[0].item() - wanted[name]) / size[name] if size[name] else 0.0 for name in SUMS
        }
        rows.append({"case": f"error relative to the sum of magnitudes, 1e9 {kind}", **errors})
        print(rows[-1]["case"], {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
        data = x = near = far = k3 = w = terms = term = None
        torch.cuda.empty_cache()
    return rows


def rows_huge() -> list[dict[str, Any]]:
    """8G tokens of bf16 in one call: 5 bytes each would be 40 GB, so with the byte of slices."""
    n = 8 << 30
    logp = torch.empty(n, dtype=torch.bfloat16, device=CUDA)
    old = torch.empty(n, dtype=torch.bfloat16, device=CUDA)
    packed = torch.empty(n, dtype=torch.uint8, device=CUDA)
    part = make(LARGE, torch.bfloat16, "bits4")
    for i in range(n // LARGE):
        at = slice(i * LARGE, (i + 1) * LARGE)
        logp[at], old[at], packed[at] = part.logp, part.old_logp, part.members[0]
    data = Data(logp, old, tile.BITS.value, (packed,), part.names)
    one, many = part.empty(), data.empty()
    part.add(one)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    data.add(many)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    times = n // LARGE
    exact = torch.equal(many.counts, one.counts * times) and torch.equal(many.histogram, one.histogram * times)
    small, large = gpu_time(lambda: part.add(one)), gpu_time(lambda: data.add(many), 3)
    row = {
        "case": "bf16, 4 slices, 8G tokens in one call", "gtok_s": n / large / 1e9,
        "of_the_268M_rate": (n / large) / (part.n / small), "counts_exact": exact, "extra_bytes": extra,
    }  # fmt: skip
    print(row, flush=True)
    return [row]


def memory() -> list[dict[str, Any]]:
    data = make(LARGE, torch.float32, "bool4")
    state = data.empty()
    torch.cuda.synchronize()
    launch._scratch.clear()
    launch._tickets.clear()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    data.add(state)
    torch.cuda.synchronize()
    row = {"case": "extra device memory, first call on a stream", "bytes": torch.cuda.max_memory_allocated() - before}
    print(row, flush=True)
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="where to write the rows")
    parser.add_argument("--only", default="large,small,host,torch,accuracy,memory,huge")
    parser.add_argument("--sweep", action="store_true", help="other launch shapes too")
    options = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "cuda": torch.version.cuda,
    }  # fmt: skip
    print(machine, flush=True)
    parts = {
        "large": lambda: rows_large(options.sweep), "small": lambda: rows_small(options.sweep), "host": rows_host,
        "torch": rows_torch, "accuracy": rows_accuracy, "memory": memory, "huge": rows_huge,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for part in options.only.split(","):
        rows += parts[part]()
        if options.json:  # after every part: a run that is cut short leaves something
            with open(options.json, "w") as file:
                json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
