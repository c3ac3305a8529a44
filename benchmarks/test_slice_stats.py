"""Speed of ``slice_stats`` on the CPU, as ratios within one run; every timed result is checked.

Disabled by default; ``pytest benchmarks --benchmark-enable -s`` runs it and prints the ratios. Nothing asserts a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats

LEVELS = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
LIMIT = 1 << 24  # elements that torch.quantile takes


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """float32 (n,) log-probabilities whose ratio is nearly 1 with heavy tails, and four overlapping bool masks."""
    generator = torch.Generator().manual_seed(0)
    old_logp = -torch.rand(n, generator=generator) * 3
    noise = torch.randn(n, generator=generator)
    logp = old_logp + 1e-3 * noise * (1 + noise.abs() ** 3)
    chance = torch.rand(n, generator=generator)
    masks = {
        "response": torch.ones(n, dtype=torch.bool),
        "text": chance < 0.5,
        "pre_tool": (chance > 0.3) & (chance < 0.7),
        "post_tool": chance > 0.6,
    }
    return logp, old_logp, masks


def plain_torch(
    logp: torch.Tensor, old_logp: torch.Tensor, masks: dict[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """What trainers write: boolean indexing, moments, quantiles."""
    results = {}
    for name, mask in masks.items():
        x = (logp - old_logp)[mask]
        w = x.exp()
        levels = torch.tensor(LEVELS)
        if x.numel() <= LIMIT:
            quantiles = torch.quantile(x, levels)
        else:
            ordered = x.sort().values
            quantiles = ordered[(levels * (x.numel() - 1)).long()]
        results[name] = {
            "n_tokens": x.numel(),
            "log_ratio_mean": x.mean(),
            "log_ratio_std": x.std(correction=0),
            "log_ratio_min": x.min(),
            "log_ratio_max": x.max(),
            "log_ratio_abs_mean": x.abs().mean(),
            "kl_k3": (w - 1 - x).mean(),
            "ratio_mean": w.mean(),
            "ratio_std": w.std(correction=0),
            "ess_fraction": w.sum() ** 2 / (w * w).sum() / x.numel(),
            "clip_fraction": ((w < 0.8) | (w > 1.2)).float().mean(),
            "quantiles": quantiles,
        }
    return results


def check(stats: pyrlstats.SliceStats, wanted: dict[str, dict[str, Any]]) -> None:
    """Both computed the same figures, to what float32 and a bin allow."""
    for name, values in wanted.items():
        view = stats[name]
        for statistic, value in values.items():
            if statistic == "quantiles" and values["n_tokens"] < 10_000:
                continue  # torch interpolates between tokens, which are far apart here
            elif statistic == "quantiles":
                np.testing.assert_allclose(view.quantile(LEVELS), value, rtol=2.0**-5, atol=1e-7)
            else:
                # float32 sums of w and of w - 1 - x carry few digits
                loose = 5e-2 if statistic in ("kl_k3", "log_ratio_mean") else 1e-3
                assert float(getattr(view, statistic)) == pytest.approx(float(value), rel=loose), (name, statistic)


def seconds(function: Callable[[], Any], repeats: int) -> float:
    """Median of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.benchmark(group="8M tokens, 4 overlapping masks")
def test_large_batch(benchmark):
    """Against plain torch on as many threads, in one run."""
    n = 8_000_000 if benchmark.enabled else 100_000
    batch = tokens(n)

    def ours() -> pyrlstats.SliceStats:
        stats = pyrlstats.slice_stats(*batch)
        for view in stats.values():
            view.quantile(LEVELS)
        return stats

    check(ours(), plain_torch(*batch))
    if benchmark.enabled:
        slow = seconds(lambda: plain_torch(*batch), 3)
        fast = seconds(ours, 15)
        print(
            f"\n{n:,} tokens, 4 masks, {torch.get_num_threads()} threads: "
            f"{1e3 * fast:.1f} ms, plain torch {1e3 * slow:.0f} ms, ratio {slow / fast:.0f}"
        )
        benchmark.extra_info["plain_torch_ms"] = 1e3 * slow
        benchmark.extra_info["ratio"] = slow / fast
    benchmark(ours)


@pytest.mark.benchmark(group="8M tokens, 4 overlapping masks")
def test_large_batch_plain_torch(benchmark):
    """The same work in plain torch, for the table."""
    batch = tokens(8_000_000 if benchmark.enabled else 100_000)
    results = benchmark.pedantic(plain_torch, args=batch, rounds=3, iterations=1)
    check(pyrlstats.slice_stats(*batch), results)


@pytest.mark.benchmark(group="4,096 tokens, 4 slices")
@pytest.mark.parametrize("kind", ["masks", "slice_ids", "numpy", "bfloat16"])
def test_small_batch(benchmark, kind):
    """One micro-batch from Python: the cost of a call."""
    logp, old_logp, masks = tokens(4096)
    options: dict[str, Any] = {"masks": masks}
    if kind == "slice_ids":
        options = {"slice_ids": torch.arange(4096) % 4, "names": list(masks)}
    if kind == "bfloat16":
        logp, old_logp = logp.bfloat16(), old_logp.bfloat16()
    if kind == "numpy":
        logp, old_logp = logp.numpy(), old_logp.numpy()
        options = {"masks": {name: mask.numpy() for name, mask in masks.items()}}
    stats = benchmark(pyrlstats.slice_stats, logp, old_logp, **options)
    if kind in ("masks", "numpy"):
        check(stats, plain_torch(*tokens(4096)))
    else:
        assert int(stats["response"].n_tokens) == (1024 if kind == "slice_ids" else 4096)
    if benchmark.enabled:
        print(f"\n4,096 tokens, 4 slices, {kind}: {1e6 * benchmark.stats.stats.median:.0f} us")


@pytest.mark.benchmark(group="4,096 tokens, 4 slices")
def test_small_update(benchmark):
    """The same in a loop, into memory that is there."""
    logp, old_logp, masks = tokens(4096)
    accumulator = pyrlstats.SliceAccumulator(list(masks), device="cpu")
    benchmark(accumulator.update, logp, old_logp, masks)
    total = accumulator.compute()
    calls = int(total["response"].n_tokens) // 4096
    assert torch.equal(total.state.histogram, calls * pyrlstats.slice_stats(logp, old_logp, masks).state.histogram)
    if benchmark.enabled:
        print(f"\n4,096 tokens, 4 slices, update: {1e6 * benchmark.stats.stats.median:.0f} us")


@pytest.mark.benchmark(group="results")
def test_to_dict(benchmark):
    """All statistics and nine quantiles of four slices, once a step."""
    stats = pyrlstats.slice_stats(*tokens(100_000))
    values = benchmark(stats.to_dict, "rl/")
    assert values["rl/response/n_tokens"] == 100_000
    if benchmark.enabled:
        print(f"\nto_dict of 4 slices: {1e6 * benchmark.stats.stats.median:.0f} us")
