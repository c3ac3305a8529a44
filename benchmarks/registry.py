"""The cases: what is measured, on how many tokens of which kind, by whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyrlstats import Layout

from .contenders import ALL
from .inputs import Spec

K, M, G = 1 << 10, 1 << 20, 1 << 30

STATISTICS = (
    "torch, boolean index + quantile",
    "torch, boolean index + sort",
    "torch, boolean index",
    "torch, mask multiply",
    "torch.compile, mask multiply",
    "NumPy, boolean index + partition",
)
QUANTILES = (
    *(
        name
        for name, contender in ALL.items()
        if contender.family in ("numpy", "histogram", "sketch", "trainer", "cupy")
        and name not in (*STATISTICS, "torch.histc, half precision")
    ),
    "torch.quantile",
    "torch.sort",
    "torch.kthvalue",
)
# where the data is harder: one or two of each kind
HARDER = (
    "numpy.partition",
    "torch.histc",
    "fast-histogram",
    "boost-histogram, log",
    "DataSketches KLL, k=2000",
    "DataSketches REQ, k=50",
    "DataSketches t-digest, k=200",
    "fastdigest",
    "trainer: radix select",
    "trainer: logspace histogram",
    "CuPy histogram",
    "torch.sort",
)
REFERENCE = {
    "cpu": ("torch, boolean index + quantile", "torch, mask multiply", "NumPy, boolean index + partition"),
    "cuda": ("torch, boolean index + sort", "torch, mask multiply"),
}
STREAMING = ("pyrlstats, micro-batches", "torch, keep every token", "torch, .item() and average")


@dataclass(frozen=True)
class Case:
    """One table: contenders that do the same work on the same inputs.

    Attributes:
        name: unique, "axis: value".
        axis: cases of one axis differ in one thing and are plotted together.
        spec: what the tokens look like.
        tokens: in one call.
        contenders: names in :data:`benchmarks.contenders.ALL`.
        threads: of torch, on a CPU.
        micro_batches: the call's tokens come in so many parts.
        seconds: of measuring, about.
        memory: whether peak extra memory is measured.
    """

    name: str
    axis: str
    spec: Spec
    tokens: int
    contenders: tuple[str, ...]
    threads: int = 1
    micro_batches: int = 1
    seconds: float = 2.0
    memory: bool = False

    @property
    def n_bytes(self) -> int:
        """What must be read."""
        return self.tokens * self.spec.bytes_per_token()


def cases(device: str, quick: bool, threads: int = 1) -> list[Case]:
    """Every case for this device, the most telling first.

    On a CPU the axes run on one thread, where a busy neighbour disturbs least; with ``threads`` > 1, ours on all
    CPUs is measured beside, and (not in quick runs: torch's threads wait long for a busy neighbour) the first case once
    more on so many threads.
    """
    return [*_headline(device, quick, threads), *_axes(device, quick, threads)]


def _ours(device: str, threads: int) -> tuple[str, ...]:
    if device == "cuda":
        return ("pyrlstats accumulator",)
    return ("pyrlstats", "pyrlstats, all threads") if threads > 1 else ("pyrlstats",)


def size(tokens: int) -> str:
    """1M for 2^20."""
    for unit, letter in ((G, "G"), (M, "M"), (K, "k")):
        if tokens >= unit:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def _headline(device: str, quick: bool, threads: int) -> Iterator[Case]:
    ours = _ours(device, threads)
    compiled = () if quick and device == "cpu" else ("torch.compile, mask multiply",)
    statistics = (*ours, *(name for name in STATISTICS if "compile" not in name), *compiled)
    tokens = 16 * M if device == "cuda" else M if quick else 4 * M
    few = 4 * M if device == "cuda" else M // 4 if quick else M
    short, long = (2.0, 4.0) if device == "cuda" else (1.5, 3.0) if quick else (6.0, 12.0)
    yield Case(
        f"statistics: {size(tokens)} tokens, 4 slices",
        "statistics",
        Spec(4),
        tokens,
        statistics,
        seconds=short,
        memory=True,
    )
    if device == "cpu" and threads > 1 and not quick:
        name = f"statistics: {size(tokens)} tokens, 4 slices, {threads} threads"
        yield Case(name, "statistics", Spec(4), tokens, statistics, threads, seconds=short)
    spec = Spec(1)
    name = f"quantiles: {size(few)} tokens, 1 slice"
    yield Case(name, "quantiles", spec, few, (*ours, *QUANTILES), seconds=long, memory=True)
    for distribution in ("gauss 3e-3", "heavy tail"):
        spec = Spec(1, distribution=distribution)
        yield Case(f"quantiles: {distribution}", "quantiles", spec, few, (*ours, *HARDER), seconds=short)
    half = ("torch.histc", "torch.histc, half precision", "torch.sort", "trainer: radix select")
    yield Case("quantiles: half precision", "quantiles", Spec(1, "bfloat16"), few, (*ours, *half), seconds=short / 2)
    yield Case(
        "streaming: 16 micro-batches of 64k tokens, 4 slices",
        "streaming",
        Spec(4),
        M,
        STREAMING,
        micro_batches=16,
        seconds=short,
        memory=True,
    )


def _axes(device: str, quick: bool, threads: int) -> Iterator[Case]:
    ours, reference = _ours(device, threads), REFERENCE[device]
    everyone = (*ours, *reference[1:]) if quick and device == "cpu" else (*ours, *reference)
    tokens = 16 * M if device == "cuda" else M // 2 if quick else M
    seconds = 0.3 if quick else 1.0 if device == "cuda" else 2.0
    yield from _tokens(device, quick, (*ours, *reference))
    for slices in (1, 4, 8, 32) if quick else (1, 2, 4, 8, 32):
        n = tokens // 4 if slices > 8 else tokens
        name = f"slices: {slices}" + (f" ({size(n)} tokens)" if n != tokens else "")
        yield Case(name, "slices", Spec(slices), n, everyone, seconds=seconds)
    for dtype in ("bfloat16", "float64") if quick else ("bfloat16", "float16", "float64"):
        yield Case(f"dtype: {dtype}", "dtype", Spec(4, dtype), tokens, everyone, seconds=seconds)
    easy = () if quick else ("bf16 lattice", "all equal")
    for distribution in ("zeros", "gauss 1e-4", "heavy tail", *easy):
        spec = Spec(4, distribution=distribution)
        naive = ("torch, boolean index, naive k3",) if distribution == "gauss 1e-4" else ()
        yield Case(f"distribution: {distribution}", "distribution", spec, tokens, (*everyone, *naive), seconds=seconds)
    for masks in ("random", "ids") if quick else ("random", "mostly empty", "none", "ids"):
        spec = Spec(1 if masks == "none" else 4, masks=masks)
        yield Case(f"masks: {masks}", "masks", spec, tokens, everyone, seconds=seconds)
    for bits in (4, 7) if quick else (4, 6, 7):
        spec = Spec(4, layout=Layout(mantissa_bits=bits))
        yield Case(f"layout: {bits} mantissa bits", "layout", spec, tokens, ours, seconds=seconds)
    yield Case("memory: transposed", "memory", Spec(4, transposed=True), tokens, everyone, seconds=seconds)


def _tokens(device: str, quick: bool, everyone: tuple[str, ...]) -> Iterator[Case]:
    seconds = 0.5 if quick else 1.0 if device == "cuda" else 2.0
    sizes = [4 * K, 64 * K, M] if quick else [4 * K, 16 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M, 256 * M]
    if device == "cuda":
        sizes = [4 * K, 64 * K, M, 16 * M, 256 * M]
    for n in sizes:
        yield Case(f"tokens: {size(n)}", "tokens", Spec(4), n, everyone, seconds=seconds)
    if device == "cuda":
        spec = Spec(1, "bfloat16", masks="none")
        yield Case("tokens: 1G, bfloat16, no mask", "tokens", spec, G, everyone, seconds=seconds)
