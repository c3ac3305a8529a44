"""What only a GPU can show: no sync, graphs, streams, the same bits from run to run, large inputs."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_sync import no_sync

import pyrlstats
from pyrlstats.backends.batch import Batch
from pyrlstats.groups import sequences
from pyrlstats.layout import Layout
from pyrlstats.state import State

triton_gpu = pytest.importorskip("pyrlstats.backends.triton_gpu")
launch = triton_gpu.launch
histogram, slice_hist, tile = launch.histogram, launch.slice_hist, launch.tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available(), reason="no CUDA or ROCm device"
    ),
]
NAMES = ["a", "b", "c", "d"]


@pytest.fixture(autouse=True)
def _default_backend(monkeypatch):
    monkeypatch.delenv("PYRLSTATS_BACKEND", raising=False)


def batch(n, seed, dtype=torch.bfloat16, scale=0.01):
    generator = torch.Generator("cuda").manual_seed(seed)
    old_logp = torch.randn(n, device="cuda", generator=generator).mul_(2).to(dtype)
    logp = (old_logp + scale * torch.randn(n, device="cuda", generator=generator)).to(dtype)
    runs = torch.rand(4, n // 128 + 1, device="cuda", generator=generator) < 0.5
    masks = [mask.repeat_interleave(128)[:n].contiguous() for mask in runs]
    return logp, old_logp, masks


def empty():
    return State.empty(NAMES, Layout(), (0.2, 0.2), torch.device("cuda"))


def add(state, logp, old_logp, masks, **options):
    launch.slice_hist_(logp, old_logp, tile.MASKS.value, tuple(masks), None, state, **options)
    return state


def buffer(state):
    return state.buffer.cpu().numpy()


def test_no_sync():
    logp, old_logp, masks = batch(100_000, 1)
    named = dict(zip(NAMES, masks, strict=True))
    torch.cuda.synchronize()
    with no_sync():
        stats = pyrlstats.slice_stats(logp, old_logp, named)
        accumulator = pyrlstats.SliceAccumulator(NAMES, device="cuda")
        for _ in range(2):
            accumulator.update(logp, old_logp, named)
        value = accumulator.compute()["a"].ess_fraction + stats["b"].quantile(0.99)
    assert torch.isfinite(value).item()


def test_a_copy_to_the_host_waits_for_nothing_behind_it():
    logp, old_logp, masks = batch(100_000, 1)
    accumulator = pyrlstats.SliceAccumulator(NAMES, device="cuda").update(logp, old_logp, masks)
    wanted = accumulator.compute().to_dict()
    with no_sync():
        copied = accumulator.compute().to_host(async_op=True)
        accumulator.reset()
    torch.cuda._sleep(1_000_000_000)  # cycles: half a second
    behind = torch.cuda.Event()
    behind.record()
    assert copied.wait().to_dict() == wanted
    assert not behind.query()
    assert accumulator.compute()["a"].n_tokens.item() == 0


def test_graph_replay_with_new_data():
    static = batch(70_000, 2)
    add(empty(), *static)  # compiles
    state = empty()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(state, *static)
        add(state, *static)
    state.clear_()
    wanted = empty()
    for seed in (3, 4):
        fresh = batch(70_000, seed)
        for target, source in zip((*static[:2], *static[2]), (*fresh[:2], *fresh[2]), strict=True):
            target.copy_(source)
        graph.replay()
        add(add(wanted, *fresh), *fresh)
    torch.cuda.synchronize()
    assert np.array_equal(buffer(state), buffer(wanted))


def test_graph_of_the_accumulator():
    logp, old_logp, masks = batch(4096, 5)
    named = dict(zip(NAMES, masks, strict=True))
    accumulator = pyrlstats.SliceAccumulator(NAMES, device="cuda")
    accumulator.update(logp, old_logp, named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulator.update(logp, old_logp, named)
    accumulator.reset()
    for _ in range(3):
        graph.replay()
    stats = accumulator.compute()
    once = pyrlstats.slice_stats(logp, old_logp, named)
    assert all((stats[name].n_tokens == 3 * once[name].n_tokens).item() for name in NAMES)


def test_two_streams_at_once():
    data = [batch(2_000_000, seed, scale=0.3) for seed in (6, 7)]
    wanted = [buffer(add(empty(), *part)) for part in data]
    streams = [torch.cuda.Stream() for _ in data]
    torch.cuda.synchronize()
    for _ in range(10):
        states = [empty() for _ in data]
        torch.cuda.synchronize()
        for stream, state, part in zip(streams, states, data, strict=True):
            with torch.cuda.stream(stream):
                add(state, *part)
        torch.cuda.synchronize()
        assert all(np.array_equal(buffer(state), want) for state, want in zip(states, wanted, strict=True))


def test_results_share_nothing_though_made_by_the_dozen():
    """Their buffers come from few allocations: on every stream, kept or dropped, each holds its own call alone."""
    side = torch.cuda.Stream()
    calls = [batch(5_000 + 100 * i, i) for i in range(21)]
    torch.cuda.synchronize()
    kept = []
    for i, (logp, old_logp, masks) in enumerate(calls):
        with torch.cuda.stream(side if i % 3 == 0 else torch.cuda.current_stream()):
            pyrlstats.slice_stats(logp, old_logp, masks, names=NAMES)  # dropped at once
            kept.append(pyrlstats.slice_stats(logp, old_logp, masks, names=NAMES))
            assert kept[-1].state.buffer.data_ptr() % 128 == 0
    torch.cuda.synchronize()
    assert len({stats.state.buffer.data_ptr() for stats in kept}) == len(calls)
    for stats, (logp, old_logp, masks) in zip(kept, calls, strict=True):
        assert (buffer(stats.state) == buffer(add(empty(), logp, old_logp, masks))).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 500.0])
@pytest.mark.parametrize("n", [1000, 65_536, 6_000_000])
def test_same_bits_from_run_to_run(n, scale):
    part = batch(n, 8, torch.float32, scale)
    first = buffer(add(empty(), *part))
    for _ in range(5):
        assert np.array_equal(buffer(add(empty(), *part)), first)


@pytest.mark.parametrize("rows", [256, 512])
@pytest.mark.parametrize("v", [4, 8])
def test_every_way_gives_the_same_integers(rows, v):
    logp, old_logp, masks = batch(5_000_001, 9, torch.float32, 0.6)
    integers = len(NAMES) * (9 + Layout().n_bins)
    results = []
    for many_rows in (False, True):
        config = slice_hist.Config(rows=rows, v=v, run=3, per_sm=1, many_rows=many_rows, registers=128)
        results.append(buffer(add(empty(), logp, old_logp, masks, config=config))[:integers])
    results.append(buffer(add(empty(), logp, old_logp, masks, portable=True))[:integers])
    for way, result in zip(("one row a slice", "one row a pattern", "portable"), results, strict=True):
        wrong = np.flatnonzero(result != results[0])
        assert wrong.size == 0, (way, wrong[:10], result[wrong[:10]], results[0][wrong[:10]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_large_inputs_of_every_width(dtype, mask_dtype):
    """2^21 tokens take another launch shape than the small inputs of test_kernels.py; so does a strided view."""
    logp, old_logp, masks = batch((1 << 21) + 64, 11, dtype, 0.3)
    masks = [mask.to(mask_dtype) for mask in masks]
    flat = buffer(add(empty(), logp, old_logp, masks))
    portable = buffer(add(empty(), logp, old_logp, masks, portable=True))
    views = [tensor.view(64, -1)[:, :-1] for tensor in (logp, old_logp, *masks)]
    strided = buffer(add(empty(), views[0], views[1], views[2:]))
    copied = buffer(add(empty(), *[view.contiguous() for view in views[:2]], [view.contiguous() for view in views[2:]]))
    integers = len(NAMES) * (9 + Layout().n_bins)
    assert np.array_equal(flat[:integers], portable[:integers])
    assert np.array_equal(strided[:integers], copied[:integers])


def test_bits_equal_masks():
    logp, old_logp, masks = batch(500_000, 10)
    packed = sum(mask.to(torch.uint8) << s for s, mask in enumerate(masks))
    state = empty()
    launch.slice_hist_(logp, old_logp, tile.BITS.value, (packed,), None, state)
    assert np.array_equal(buffer(state), buffer(add(empty(), logp, old_logp, masks)))


def test_shared_memory_fits():
    """What is left of the larger claim before the rows, for Triton's own exchanges."""
    for g, way in ((4, histogram.PATTERNS.value), (8, histogram.SINGLE.value)):
        rows = histogram.shared_bytes(g, Layout().bins_per_sign, way)
        assert rows + launch.MANY_SPARE <= histogram.CLAIMS[1]


def test_more_than_2_32_tokens():
    """Halves of one column tensor, so that 2^32 + 5 tokens cost 3 bytes each."""
    n = (1 << 32) + 5
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * n:
        pytest.skip(f"needs {5 * n >> 30} GiB of device memory, {free >> 30} are free")
    logp = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    logp[-3:] = 1.0
    old_logp = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    old_logp[: 1 << 31] = 0.25
    stats = pyrlstats.slice_stats(logp, old_logp)["all"]
    assert stats.n_tokens.item() == n
    assert stats.n_zero.item() == n - (1 << 31) - 3
    assert stats.log_ratio_min.item() == -0.25
    assert stats.log_ratio_max.item() == 1.0
    assert stats.log_ratio_mean.item() == pytest.approx((3 - 0.25 * (1 << 31)) / n, rel=1e-13)
    assert stats.clip_fraction_low.item() == pytest.approx((1 << 31) / n, rel=1e-13)


@pytest.mark.parametrize("by_digits", [False, True])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
def test_exact_quantiles_are_those_of_a_sort(kind, by_digits, monkeypatch):
    if by_digits:
        monkeypatch.setattr("pyrlstats.exact._SORTED_TOKENS", 0)
    logp, old_logp, masks = batch(1_000_003, 5, torch.bfloat16 if kind == "ties" else torch.float32, 0.3)
    if kind == "equal":
        logp = old_logp = torch.zeros_like(logp)
    named = dict(zip(NAMES, masks, strict=True))
    q = [0.0, 0.001, 0.5, 0.999, 1.0]
    for absolute in (False, True):
        with no_sync():
            found = pyrlstats.exact_quantiles(logp, old_logp, named, q, absolute=absolute)
        for name, mask in named.items():
            x = (logp.float() - old_logp.float())[mask]
            ordered = (x.abs() if absolute else x).sort().values.double()
            places = [max(1, int(np.ceil(one * len(ordered)))) - 1 for one in q]
            assert torch.equal(found[name] + 0.0, ordered[places] + 0.0), (name, absolute)


@pytest.mark.parametrize("mean", [2, 64, 1024, 20_000, None])
def test_sums_of_sequences_are_those_of_array_operations(mean):
    """With the lanes and parts that the usual lengths get, in a graph too; the same bits every time."""
    n = 3_000_001 if mean != 2 else 300_001
    logp, old_logp, masks = batch(n, 12, torch.float32, 0.3)
    cuts = torch.randint(5, n - 5, (0 if mean is None else n // mean,), device="cuda")
    ends = torch.cat((torch.tensor([5, n - 5], device="cuda"), cuts)).sort().values
    given = Batch(logp, old_logp, tuple(masks), None, None, None, ends)
    wanted = sequences.sums(given, 4)
    x = (logp - old_logp).abs()
    sizes = sequences.sums(replace(given, logp=logp.abs(), old_logp=old_logp.abs()), 4)
    sizes[1] = sequences.sums(replace(given, logp=x, old_logp=torch.zeros_like(x)), 4)[1]
    with no_sync():
        found = triton_gpu.sequence_sums(given, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = triton_gpu.sequence_sums(given, 4)
    graph.replay()
    assert torch.equal(found, again)
    assert torch.equal(found[0], wanted[0])
    assert ((found - wanted).abs() <= 1e-12 * sizes).all()


def test_an_accumulator_of_sequences_in_a_graph():
    logp, old_logp, masks = batch(64 * 512, 13, torch.float32, 0.3)
    rows = [tensor.view(64, 512) for tensor in (logp, old_logp, *masks)]
    named = dict(zip(NAMES, rows[2:], strict=True))
    once = pyrlstats.SliceAccumulator(NAMES, device="cuda", sequences=True).update(rows[0], rows[1], named).compute()
    accumulator = pyrlstats.SliceAccumulator(NAMES, device="cuda", sequences=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulator.update(rows[0], rows[1], named)
    accumulator.reset()
    for _ in range(3):
        graph.replay()
    stats = accumulator.compute()
    for name in NAMES:
        assert stats[name].n_sequences.item() == 3 * once[name].n_sequences.item() > 0
        assert stats[name].sequence_log_ratio_mean.item() == pytest.approx(once[name].sequence_log_ratio_mean.item())
