"""The CPU engine against the memory it reads from and against what users have: one table, one interleaved run.

    pip install --no-build-isolation --no-deps . && python benchmarks/cpu_kernel.py --json cpu.json

R is the rate at which one thread reads the same bytes, in the same run: the best of three read loops, compiled
here. Single-thread figures are CPU time, medians over calls of 4M tokens that walk through arrays larger than the
caches (64M tokens: 9 GB of memory), in huge pages where the system gives them, all cases and R taking turns. Two
virtual CPUs are often two hyperthreads of one core, and whatever runs on the other one slows down arithmetic more than
reading: single-thread figures are taken on the quietest processor, and calls with a busy neighbour before or after are
left out where enough others remain (``quiet``: the share that was kept). Every case is checked against the reference
before it is timed. What users have is compared on 8M tokens; in ``octaves`` all tokens of a call have an abs(x) of one
octave, whose counters must not slow down what else the loops read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import pyrlstats
from pyrlstats import _core, reference
from pyrlstats.backends import cpp
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import ABS_QUANTILES
from pyrlstats.slice_stats import QUANTILES as LOGGED
from pyrlstats.state import State

CLIP = (0.2, 0.2)
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 0.9999)
CALL = 1 << 22  # tokens of a timed call
COMPARED = 1 << 23  # tokens of a comparison with what users have

READER = r"""
#include <cstddef>
#include <cstdint>
// Reads `streams` arrays in step, 64 tokens at a time; bytes[j] per token. kAhead: prefetch distance in bytes.
template <int kAhead>
static uint64_t read(const char* const* arrays, const int* bytes, int streams, size_t tokens) {
  typedef uint64_t V __attribute__((vector_size(64), aligned(1)));
  V sum = {};
  for (size_t i = 0; i < tokens; i += 64) {
    for (int j = 0; j < streams; ++j) {
      const char* p = arrays[j] + i * bytes[j];
      for (int line = 0; line < bytes[j]; ++line, p += 64) {
        sum |= *(const V*)p;
        if (kAhead) __builtin_prefetch(p + kAhead);
      }
    }
  }
  uint64_t all = 0;
  for (int k = 0; k < 8; ++k) all |= sum[k];
  return all;
}
// Independent operations a cycle: about half as many while another program runs on the core's other hyperthread. (Sums
// of constants would not do: newer cores add them up before they execute anything. A product takes three cycles.)
#if defined(__x86_64__)
#include <time.h>
static double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
extern "C" double cycles_a_second() {
  uint64_t chain = 3;
  const double start = now();
  for (int i = 0; i < 2000; ++i) {
    asm volatile("imul %0, %0\n imul %0, %0\n imul %0, %0\n imul %0, %0" : "+r"(chain));
  }
  return 3 * 4 * 2000 / (now() - start);
}
extern "C" double operations_a_cycle() {
  uint64_t a = 0, b = 0, c = 0, d = 0, e = 0;
  const double cycles = cycles_a_second(), start = now();
  for (int i = 0; i < 8000; ++i) {
    asm volatile("xor $1, %0\n xor $1, %1\n xor $1, %2\n xor $1, %3\n xor $1, %4\n"
                 "xor $1, %0\n xor $1, %1\n xor $1, %2\n xor $1, %3\n xor $1, %4"
                 : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e));
  }
  return 10 * 8000 / (now() - start) / cycles;
}
#else
extern "C" double cycles_a_second() { return 0; }
extern "C" double operations_a_cycle() { return 1; }
#endif
extern "C" uint64_t read_plain(const char* const* a, const int* b, int s, size_t n) { return read<0>(a, b, s, n); }
extern "C" uint64_t read_2k(const char* const* a, const int* b, int s, size_t n) { return read<2048>(a, b, s, n); }
extern "C" uint64_t read_8k(const char* const* a, const int* b, int s, size_t n) { return read<8192>(a, b, s, n); }
"""


@dataclass
class Case:
    """Tokens, membership, and the bar: a fraction of R, or Gtok/s."""

    name: str
    logp: torch.Tensor
    old_logp: torch.Tensor
    masks: list[torch.Tensor] | None = None
    slice_ids: torch.Tensor | None = None
    bar: float | None = None
    bar_is_rate: bool = False
    isa: str = ""
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # seconds, operations a cycle

    @property
    def slices(self) -> int:
        if self.slice_ids is not None:
            return int(self.slice_ids.max()) + 1
        return 1 if self.masks is None else len(self.masks)

    def arrays(self) -> list[torch.Tensor]:
        ids = [] if self.slice_ids is None else [self.slice_ids]
        return [self.logp, self.old_logp, *(self.masks or []), *ids]

    def part(self, begin: int, end: int) -> Batch:
        masks = None if self.masks is None else tuple(mask[begin:end] for mask in self.masks)
        ids = None if self.slice_ids is None else self.slice_ids[begin:end]
        return Batch(self.logp[begin:end], self.old_logp[begin:end], masks, ids, None)

    def state(self) -> State:
        return State.empty([f"s{i}" for i in range(self.slices)], Layout(), CLIP)

    def check(self) -> None:
        """Counts and histogram of the first tokens, against the reference."""
        n = min(200_000, self.logp.numel())
        state = self.state()
        cpp.accumulate(self.part(0, n), state, 1, self.isa)
        x = reference.log_ratio(_numpy(self.logp[:n]), _numpy(self.old_logp[:n]))
        for s in range(self.slices):
            if self.slice_ids is not None:
                member = self.slice_ids[:n].numpy() == s
            else:
                member = np.ones(n, bool) if self.masks is None else self.masks[s][:n].numpy()
            wanted = reference.accumulate(x[member], Layout(), CLIP)
            if not np.array_equal(state.histogram[s], wanted["histogram"]):
                raise SystemExit(f"{self.name}: wrong histogram")
            for name in ("near_x2", "near_k3", "abs_x", "far_w", "far_k3"):
                got = state.sum(name)[s]
                if not np.isclose(got, wanted[name], rtol=5e-7, atol=1e-9):
                    raise SystemExit(f"{self.name}: {name} is {got}, not {wanted[name]}")


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def own(values: torch.Tensor, huge: bool = True) -> torch.Tensor:
    """A copy in pages of its own. (NumPy's arrays begin inside a cache line, which costs a fifth of the rate.)"""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return values.clone()
    step = 1 << 21
    size = (values.numel() * values.element_size() + step - 1) // step * step
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=values.dtype, count=values.numel()).copy_(values)


def in_runs(values: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """(n,): values drawn for runs of 50 to 500 tokens."""
    runs = n // 50 + 1
    return np.repeat(rng.choice(values, runs), rng.integers(50, 501, runs))[:n]


def masks_in_runs(n: int, rng: np.random.Generator) -> list[torch.Tensor]:
    """Four overlapping slices, six patterns of them."""
    keys = in_runs(np.array([1, 3, 5, 9, 7, 2]), n, rng)
    return [own(torch.from_numpy((keys >> s & 1).astype(bool))) for s in range(4)]


def make_cases(n: int, rng: np.random.Generator) -> list[Case]:
    def tensor(values: np.ndarray) -> torch.Tensor:
        return own(torch.from_numpy(values.astype(np.float32)))

    old = tensor(rng.normal(-1, 0.5, n))
    gauss = tensor(old.numpy() + rng.normal(0, 0.01, n).astype(np.float32))
    nan = own(gauss)
    nan[torch.from_numpy(rng.random(n) < 0.01)] = float("nan")
    one = [own(torch.ones(n, dtype=torch.bool))]
    runs = masks_in_runs(n, rng)
    random = [own(torch.from_numpy(rng.random(n) < 0.5)) for _ in range(4)]
    ids = own(torch.from_numpy(in_runs(np.arange(8), n, rng)))
    laplace = tensor(old.numpy() + rng.laplace(0, 1, n).astype(np.float32))
    half_gauss, half_old = own(gauss.bfloat16()), own(old.bfloat16())
    double_gauss, double_old = own(gauss[: n // 2].double()), own(old[: n // 2].double())
    cases = [
        Case("f32, 1 slice, Gaussian", gauss, old, one, bar=0.85),
        Case("f32, 1 slice, all zero", own(old), old, one, bar=0.88),
        Case("f32, 1 slice, Laplace(1)", laplace, old, one, bar=0.72),
        Case("f32, 1 slice, x >= 0", tensor(old.numpy() + np.abs(gauss.numpy() - old.numpy())), old, one),
        Case("f32, 1 slice, pages of 4 KB", own(gauss, huge=False), own(old, huge=False), one),
        Case("f32, no mask, Gaussian", gauss, old),
        Case("f32, 4 slices in runs", gauss, old, runs, bar=0.65),
        Case("f32, 4 slices random", gauss, old, random, bar=0.28),
        Case("f32, 8 slice_ids in runs", gauss, old, slice_ids=ids, bar=0.6),
        Case("bf16, 1 slice", half_gauss, half_old, one, bar=0.55),
        Case("bf16, 4 slices in runs", half_gauss, half_old, runs, bar=0.38),
        Case("f16, 1 slice", own(gauss.half()), own(old.half()), one),
        Case("f32, every |x| = 50", own(old + 50.0), old, one, bar=0.4, bar_is_rate=True),
        Case("f32, 1 % NaN", nan, old, one, bar=0.4, bar_is_rate=True),
        Case("f64, 1 slice", double_gauss, double_old, [one[0][: n // 2]]),
        Case("f32, every other element", gauss[::2], old[::2], [one[0][::2]]),
    ]
    for isa in cpp.instruction_sets()[1:]:
        cases.append(Case(f"{isa}: f32, 1 slice, Gaussian", gauss, old, one, isa=isa))
        cases.append(Case(f"{isa}: f32, 4 slices in runs", gauss, old, runs, isa=isa))
    return cases


class Reader:
    """Reads the bytes of a case, through loops compiled here for this machine."""

    LOOPS = ("read_plain", "read_2k", "read_8k")

    def __init__(self) -> None:
        folder = tempfile.mkdtemp()
        source, library = f"{folder}/reader.cc", f"{folder}/reader.so"
        with open(source, "w") as file:
            file.write(READER)
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, "-O3", "-march=native", "-mprefer-vector-width=512", "-shared", "-fPIC", source]
        subprocess.run([*command, "-o", library], check=True)
        self.library = ctypes.CDLL(library)
        self.operations_a_cycle = self.library.operations_a_cycle
        self.operations_a_cycle.restype = ctypes.c_double
        self.cycles_a_second = self.library.cycles_a_second
        self.cycles_a_second.restype = ctypes.c_double

    def call(self, loop: str, arrays: list[torch.Tensor]) -> Callable[[], object]:
        pointers = (ctypes.c_void_p * len(arrays))(*[array.data_ptr() for array in arrays])
        # a strided array costs the bytes between its elements too
        sizes = (ctypes.c_int * len(arrays))(*[array.element_size() * array.stride(0) for array in arrays])
        count = ctypes.c_size_t(arrays[0].numel() // 64 * 64)
        function = getattr(self.library, loop)
        return lambda: function(pointers, sizes, len(arrays), count)


def timed(call: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    start = clock()
    call()
    return clock() - start


def timed_alone(reader: Reader, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the call, and the fewest operations a cycle just before and after it."""
    before = reader.operations_a_cycle()
    seconds = timed(call)
    return seconds, min(before, reader.operations_a_cycle())


def alone_from(operations: list[float]) -> float:
    """How many operations a cycle tell that nobody was on the core's other hyperthread."""
    return 0.85 * statistics.quantiles(operations, n=10)[-1]


def _engine_call(case: Case, state: State, begin: int) -> Callable[[], object]:
    batch = case.part(begin, begin + CALL)
    return lambda: cpp.accumulate(batch, state, 1, case.isa)


@contextmanager
def quietest_cpu(reader: Reader) -> Iterator[None]:
    """Runs what is inside on the processor whose other hyperthread is the least busy."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    operations = {}
    try:
        for cpu in sorted(allowed):
            os.sched_setaffinity(0, {cpu})
            operations[cpu] = statistics.median(reader.operations_a_cycle() for _ in range(50))
        os.sched_setaffinity(0, {max(operations, key=operations.__getitem__)})
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def single_thread(cases: list[Case], reader: Reader, rounds: int) -> list[dict[str, Any]]:
    for case in cases:
        case.check()
    states = [case.state() for case in cases]
    order = [*Reader.LOOPS, "engine"]
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        for case, state in zip(cases, states, strict=True):
            parts = case.logp.numel() // CALL
            for i in range(parts):
                # each reads tokens of its own, a quarter of the arrays away from the others': not from the L3
                shuffle(order)  # nobody always follows the same one
                for j, loop in enumerate(order):
                    begin = (i + j * parts // 4) % parts * CALL
                    if loop == "engine":
                        call = _engine_call(case, state, begin)
                    else:
                        call = reader.call(loop, [array[begin : begin + CALL] for array in case.arrays()])
                    case.times.setdefault(loop, []).append(timed_alone(reader, call))
    alone = alone_from([operations for case in cases for t in case.times.values() for _, operations in t])
    rows = []
    for case in cases:
        kept, quiet = {}, 1.0
        for name, samples in case.times.items():
            times = [seconds for seconds, operations in samples if operations >= alone]
            enough = len(times) >= min(10, len(samples))
            kept[name] = times if enough else [seconds for seconds, _ in samples]
            quiet = min(quiet, len(times) / len(samples))
        medians = {name: statistics.median(times) / CALL * 1e9 for name, times in kept.items()}
        best = {name: min(times) / CALL * 1e9 for name, times in kept.items()}
        read = min(medians[loop] for loop in Reader.LOOPS)
        row = {
            "case": case.name,
            "read_gtok_s": 1 / read,
            "engine_gtok_s": 1 / medians["engine"],
            "of_read": read / medians["engine"],
            "of_plain_read": medians["read_plain"] / medians["engine"],
            "best_of_read": min(best[loop] for loop in Reader.LOOPS) / best["engine"],
            "quiet": quiet,
            "bar": case.bar,
        }
        if case.bar is not None:
            row["met"] = row["engine_gtok_s" if case.bar_is_rate else "of_read"] >= case.bar
        rows.append(row)
    return rows


def naive_torch(case: Case, n: int) -> None:
    """What a trainer writes: boolean index per slice, moments, quantiles."""
    for mask in case.masks or []:
        x = (case.logp[:n] - case.old_logp[:n])[mask[:n]]
        w = x.exp()
        _ = (x.mean(), x.var(), x.min(), x.max(), (torch.expm1(x) - x).mean(), w.sum() ** 2 / (w * w).sum())
        _ = ((w < 0.8) | (w > 1.2)).float().mean()
        for part in x.split(1 << 23):  # torch.quantile refuses more than 16M elements
            torch.quantile(part, torch.tensor(QUANTILES))


def whole_torch(case: Case, n: int) -> None:
    """The same for every figure of ``to_dict``: counts and quantiles of abs(x) too. In float32, as torch does it."""
    for mask in case.masks or []:
        x = (case.logp[:n] - case.old_logp[:n])[mask[:n]]
        finite = torch.isfinite(x)
        _ = (x.isnan().sum(), x.isposinf().sum(), x.isneginf().sum(), (x == 0).sum())
        x = x[finite]
        w, size = x.exp(), x.abs()
        _ = (x.mean(), x.std(), x.min(), x.max(), size.mean(), (x * x).mean(), (torch.expm1(x) - x).mean())
        total = w.sum()
        _ = (w.std(), total**2 / (w * w).sum(), total / x.max().exp(), (w < 0.8).sum(), (w > 1.2).sum())
        for values, levels in ((x, LOGGED), (size, ABS_QUANTILES)):
            for part in values.split(1 << 23):
                torch.quantile(part, torch.tensor(levels))


def masked_torch(case: Case, n: int) -> None:
    """Masked reductions and torch.histc: no quantiles."""
    for mask in case.masks or []:
        m = mask[:n].float()
        x = (case.logp[:n] - case.old_logp[:n]) * m
        w = x.exp() * m
        total = m.sum()
        _ = (x.sum() / total, (x * x).sum() / total, x.min(), x.max(), ((torch.expm1(x) - x) * m).sum() / total)
        _ = (w.sum() ** 2 / (w * w).sum(), (((w < 0.8) | (w > 1.2)) * m).sum() / total)
        torch.histc(x, 2048, -1.0, 1.0)


def numpy_version(case: Case, n: int) -> None:
    logp, old = case.logp[:n].numpy(), case.old_logp[:n].numpy()
    for mask in case.masks or []:
        x = (logp - old)[mask[:n].numpy()]
        w = np.exp(x)
        _ = (x.mean(), x.var(), x.min(), x.max(), (np.expm1(x) - x).mean(), w.sum() ** 2 / (w * w).sum())
        _ = ((w < 0.8) | (w > 1.2)).mean()
        np.quantile(x, QUANTILES)


def numba_backend() -> Callable[..., None] | None:
    try:
        from pyrlstats.backends import numba_cpu
    except ImportError:
        return None
    accumulate: Callable[..., None] = numba_cpu.accumulate
    return accumulate


def comparisons(cases: list[Case], threads: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    numba = numba_backend()
    n = min(COMPARED, cases[0].logp.numel())
    for case in [case for case in cases if case.name in ("f32, 1 slice, Gaussian", "f32, 4 slices in runs")]:
        state = case.state()
        batch = case.part(0, n)
        masks = {f"s{i}": mask for i, mask in enumerate(batch.masks or ())}
        for count in threads:
            torch.set_num_threads(count)
            calls: dict[str, Callable[[], object]] = {
                "engine": lambda b=batch, s=state, c=count: cpp.accumulate(b, s, c),
                "slice_stats, to_dict": lambda b=batch, m=masks: pyrlstats.slice_stats(b.logp, b.old_logp, m).to_dict(),
                "plain torch": lambda c=case: naive_torch(c, n),
                "plain torch, every figure": lambda c=case: whole_torch(c, n),
                "masked torch": lambda c=case: masked_torch(c, n),
                "NumPy": lambda c=case: numpy_version(c, n),
            }
            if numba is not None:
                calls["numba, one thread"] = lambda b=batch, s=state: numba(b, s)
            calls["portable"] = lambda b=batch, s=state, c=count: cpp.accumulate(b, s, c, "portable")
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    if not times[name]:
                        call()  # workspaces made, code compiled
                    times[name].append(timed(call, time.perf_counter))
            base = statistics.median(times["engine"])
            for name, values in times.items():
                median = statistics.median(values)
                row = {"case": case.name, "threads": count, "contender": name, "ns_per_token": median / n * 1e9}
                row |= {"slower": median / base, "slower_best": min(values) / min(times["engine"])}
                rows.append(row)
    return rows


def scaling(case: Case, reader: Reader, threads: list[int], rounds: int) -> list[dict[str, Any]]:
    """All of the case's tokens in one call, against as many threads reading its bytes."""
    n = case.logp.numel()
    rows = []

    def read_all(count: int, loop: str) -> None:
        share = n // count // 64 * 64
        calls = [
            reader.call(loop, [array[i * share : (i + 1) * share] for array in case.arrays()]) for i in range(count)
        ]
        workers = [threading.Thread(target=call) for call in calls]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    state = case.state()
    for count in threads:
        engine, reads = [], {loop: [] for loop in Reader.LOOPS}
        for _ in range(rounds):
            engine.append(timed(lambda c=count: cpp.accumulate(case.part(0, n), state, c), time.perf_counter))
            for loop, values in reads.items():
                values.append(timed(lambda c=count, name=loop: read_all(c, name), time.perf_counter))
        read = min(statistics.median(values) for values in reads.values())
        median = statistics.median(engine)
        row = {"case": case.name, "threads": count, "engine_gtok_s": n / median / 1e9}
        rows.append(row | {"read_gtok_s": n / read / 1e9, "of_read": read / median})
    return rows


def small_calls(case: Case, rounds: int) -> dict[str, float]:
    """4,096 tokens and 4 slices: the backend's call and the whole of slice_stats, in microseconds."""
    batch, state = case.part(0, 4096), case.state()
    names = [f"s{i}" for i in range(case.slices)]
    masks = dict(zip(names, batch.masks or (), strict=True))
    calls: dict[str, Callable[[], object]] = {
        "backend call": lambda: cpp.accumulate(batch, state),
        "slice_stats": lambda: pyrlstats.slice_stats(batch.logp, batch.old_logp, masks),
    }
    medians = {}
    for name, call in calls.items():
        times = [timed(call, time.perf_counter) for _ in range(200 * rounds)]
        medians[name] = statistics.median(times) * 1e6
        medians[f"{name}, best"] = min(times) * 1e6
    return medians


def one_process(case: Case, reader: Reader, alone: float, seconds: float = 5.0) -> float:
    """Nanoseconds a token of the first calls that no neighbour disturbed; NaN if they were too few."""
    state, batch, times = case.state(), case.part(0, CALL), []
    end = time.monotonic() + seconds
    while len(times) < 20 and time.monotonic() < end:
        seconds_taken, operations = timed_alone(reader, lambda: cpp.accumulate(batch, state, 1))
        if operations >= alone:
            times.append(seconds_taken)
    return statistics.median(times) / CALL * 1e9 if len(times) >= 5 else float("nan")


def octaves(rng: np.random.Generator, reader: Reader, rounds: int) -> list[dict[str, Any]]:
    """Tokens of one octave each: what the loops read must not lie where a load waits for the counters it hits."""
    n = 1 << 17  # in cache: nothing but the core's own work
    old = own(torch.zeros(n))
    rows = []
    one = [own(torch.ones(n, dtype=torch.bool))]
    for name, masks in (("1 slice", one), ("4 slices in runs", masks_in_runs(n, rng))):
        cases = {}
        for exponent in range(-24, -3):  # of abs(x) from 6e-8 to 1/8, which goes one way
            x = rng.uniform(2.0**exponent, 2.0 ** (exponent + 1), n) * rng.choice([-1, 1], n)
            cases[exponent] = Case(f"2^{exponent}", own(torch.from_numpy(x.astype(np.float32))), old, masks)
        calls = {exponent: _engine_call(case, case.state(), 0) for exponent, case in cases.items()}
        samples: dict[int, list[tuple[float, float]]] = {exponent: [] for exponent in calls}
        for _ in range(20 * rounds):
            for exponent, call in calls.items():
                samples[exponent].append(timed_alone(reader, call))
        alone = alone_from([operations for values in samples.values() for _, operations in values])
        medians = {}
        for exponent, values in samples.items():
            undisturbed = [seconds for seconds, operations in values if operations >= alone]
            medians[exponent] = statistics.median(undisturbed or [seconds for seconds, _ in values]) / n * 1e9
        slowest = max(medians, key=medians.__getitem__)
        least, greatest = min(medians.values()), medians[slowest]
        row = {"case": name, "least_ns": least, "greatest_ns": greatest, "greatest_of": f"2^{slowest}"}
        rows.append(row | {"spread": greatest / least - 1})
    return rows


def fresh_processes(count: int, reader: Reader) -> dict[str, float]:
    """The first case in fresh processes: placement in memory must not matter."""
    alone = alone_from([reader.operations_a_cycle() for _ in range(200)])
    command = [sys.executable, __file__, "--one", str(alone), "--tokens", str(CALL)]
    runs = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(count)]
    times = sorted(ns for ns in runs if ns == ns)
    result: dict[str, float] = {"processes": count, "undisturbed": len(times)}
    if times:
        result |= {"least_ns": times[0], "greatest_ns": times[-1], "spread": times[-1] / times[0] - 1}
    return result


def machine() -> dict[str, str]:
    name = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    config = _core.build_config()
    return {
        "cpu": name,
        "cpus": str(os.cpu_count()),
        "instruction sets": ", ".join(config["usable"]),
        "compiler": config["compiler"],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    if not rows:
        return
    text = [[f"{v:.3g}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()] for row in rows]
    head = list(rows[0])
    head += [name for row in rows for name in row if name not in head][: max(map(len, text)) - len(head)]
    for line in text:
        line += [""] * (len(head) - len(line))
    widths = [max(len(line[i]) for line in [head, *text]) for i in range(len(head))]
    for line in [head, *text]:
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="*", default=None, help="for scaling; default 1, 2, 4, ..")
    parser.add_argument("--fresh", type=int, default=20, help="number of fresh processes")
    parser.add_argument("--only", nargs="*", default=["single", "compare", "scaling", "small", "octaves", "fresh"])
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--one", type=float, help="print ns a token of the first case at so many operations a cycle")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    torch.set_num_threads(1)
    cases = make_cases(options.tokens, rng)
    if options.one is not None:
        print(one_process(cases[0], Reader(), options.one))
        return
    cpus = os.cpu_count() or 1
    threads = options.threads or [2**i for i in range(cpus.bit_length()) if 2**i <= cpus]
    results: dict[str, Any] = {"machine": machine()}
    print(", ".join(f"{key}: {value}" for key, value in results["machine"].items()))
    reader = Reader()
    if "single" in options.only:
        with quietest_cpu(reader):
            results["single thread"] = single_thread(cases, reader, options.rounds)
            results["clock, GHz"] = statistics.median(reader.cycles_a_second() for _ in range(50)) / 1e9
        print(f"clock: {results['clock, GHz']:.2f} GHz")
        show("One thread, of the rate R at which it reads the same bytes", results["single thread"])
    if "compare" in options.only:
        with quietest_cpu(reader):
            results["comparisons"] = comparisons(cases, [1], options.rounds)
        if cpus > 1:
            results["comparisons"] += comparisons(cases, [threads[-1]], options.rounds)
        show("Against what users have", results["comparisons"])
    if "scaling" in options.only:
        chosen = [case for case in cases if case.name in ("f32, 1 slice, Gaussian", "f32, 4 slices in runs")]
        results["scaling"] = [row for case in chosen for row in scaling(case, reader, threads, options.rounds)]
        show("Threads", results["scaling"])
    if "small" in options.only:
        torch.set_num_threads(1)
        by_name = {case.name: case for case in cases}
        with quietest_cpu(reader):
            results["4096 tokens, 4 slices, us"] = small_calls(by_name["f32, 4 slices in runs"], options.rounds)
        show("4,096 tokens, 4 slices, microseconds", [results["4096 tokens, 4 slices, us"]])
    if "octaves" in options.only:
        with quietest_cpu(reader):
            results["octaves"] = octaves(rng, reader, options.rounds)
        show("Tokens of one octave of |x|", results["octaves"])
    if "fresh" in options.only and options.fresh:
        with quietest_cpu(reader):
            results["fresh processes"] = fresh_processes(options.fresh, reader)
        show("Fresh processes", [results["fresh processes"]])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
