"""Reductions over real processes (gloo): the same as one pass over all tokens, or the same error everywhere."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import promises
import pytest
import torch
from source_tree import imported

import pyrlstats
from pyrlstats import SliceAccumulator, SliceStats
from pyrlstats.layout import MAXIMA, SUMS
from pyrlstats.state import State

sys.path.insert(0, str(Path(__file__).parent / "distributed_workers"))  # the processes get it too
ranks: Any = importlib.import_module("ranks")
benchmark = imported("benchmarks.all_reduce")

World = Callable[..., list[Any]]
WEIGHTS = [name for name in SUMS if not re.fullmatch("(near|far)_x2?", name)]  # rounded on both sides
KINDS = {
    1: ["plain"],
    2: ["not finite", "empty"],
    3: ["plain", "huge", "tiny"],
    8: ["uneven", "empty", "not finite", "huge", "tiny", "masked", "one", "plain"],
}


@pytest.fixture(scope="module")
def context() -> Any:
    """Processes forked from one that has everything imported: a start takes milliseconds, not seconds."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(
        ["__main__", "torch.distributed", "torch._dynamo", "pyrlstats.distributed", "torchmetrics"]
    )
    return forkserver


@pytest.fixture
def run_world(context: Any, tmp_path: Path) -> World:
    def run(size: int, function: str, *arguments: Any, timeout: float = 20.0, limit: float = 40.0) -> list[Any]:
        """The result of every rank; None of one that died. Fails when they take longer than ``limit`` seconds."""
        init_file = tmp_path / f"world_{time.monotonic_ns()}"
        ends, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=ranks.run_rank, args=(theirs, function, rank, size, str(init_file), timeout, arguments)
            )
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        deadline = time.monotonic() + limit
        results: list[Any] = []
        try:
            for rank, end in enumerate(ends):
                assert end.poll(max(deadline - time.monotonic(), 0.0)), f"rank {rank} hangs"
                try:
                    ok, value = end.recv()
                except (EOFError, ConnectionResetError):
                    ok, value = True, None
                assert ok, f"rank {rank}: {value}"
                results.append(value)
        finally:
            for process, end in zip(processes, ends, strict=True):
                try:
                    end.send("done")
                except OSError:
                    process.kill()
                end.close()
            for process in processes:
                process.join(10.0)
                if process.is_alive():
                    process.kill()
                    process.join()
        return results

    return run


def union(parts: list[tuple[str, int]], absolute: bool = False) -> SliceStats:
    """One pass over the tokens of all ranks."""
    batches = [ranks.batch(kind, seed) for kind, seed in parts if kind != "empty"]
    logp = torch.cat([logp for logp, _, _ in batches])
    old_logp = torch.cat([old_logp for _, old_logp, _ in batches])
    masks = {name: torch.cat([masks[name] for _, _, masks in batches]) for name in ranks.NAMES}
    return pyrlstats.slice_stats(logp.abs() if absolute else logp, old_logp, masks)


def assert_equal(got: SliceStats | bytes, wanted: SliceStats, magnitudes: SliceStats) -> None:
    """Integers, extrema and quantiles to the bit, sums as promised: what merging adds to that is tested apart."""
    stats = SliceStats.from_bytes(got) if isinstance(got, bytes) else got
    state, expected, size = (s.state.to_host() for s in (stats, wanted, magnitudes))
    np.testing.assert_array_equal(state.counts, expected.counts)
    np.testing.assert_array_equal(state.histogram, expected.histogram)
    np.testing.assert_array_equal(state.maxima, expected.maxima)
    for name, bound in promises.sum_bounds(expected, size, parts=promises.OTHER).items():
        found, right = promises.sum_of(state, name), promises.sum_of(expected, name)
        with np.errstate(invalid="ignore"):  # inf - inf
            near = np.abs(found - right) <= (2 if name in WEIGHTS else 1) * bound
        assert (near | (found == right)).all(), name
    numbers, targets = stats.to_dict(), SliceStats(expected).to_dict()
    for key, target in targets.items():
        if "_p" in key or isinstance(target, int):
            np.testing.assert_equal(numbers[key], target)


def assert_merged(got: bytes, states: list[SliceStats]) -> None:
    """As merged one after the other: floats within 1e-12."""
    state, expected = SliceStats.from_bytes(got).state, states[0].merge(states[1:]).state.to_host()
    np.testing.assert_array_equal(state.counts, expected.counts)
    np.testing.assert_array_equal(state.histogram, expected.histogram)
    np.testing.assert_array_equal(state.maxima, expected.maxima)
    scale = sum(np.abs(one.state.to_host().sums) for one in states)
    with np.errstate(invalid="ignore"):
        close = np.abs(state.sums - expected.sums) <= 1e-12 * scale
    assert (close | (state.sums == expected.sums)).all()


@pytest.mark.parametrize("size", list(KINDS))
def test_all_reduce_is_one_pass_over_all_tokens(run_world: World, size: int) -> None:
    kinds = KINDS[size]
    results = run_world(size, "pool", kinds)
    parts = list(zip(kinds, range(size), strict=True))
    wanted, magnitudes = union(parts), union(parts, absolute=True)
    for result in results:
        assert result["first"] == results[0]["first"]
        assert result["second"] == results[0]["second"]
        assert_equal(result["first"], wanted, magnitudes)
        assert_equal(result["second"], wanted, magnitudes)
        update, all_reduce, reduce = result["again"]
        assert update.startswith("RuntimeError: update after a reduction")
        assert all_reduce == reduce
        assert all_reduce.startswith("RuntimeError: this state is already reduced")
    own = [SliceStats.from_bytes(result["own bytes"]) for result in results]
    assert_merged(results[0]["first"], own)
    # a driver without a process group
    merged = own[0].merge(own[1:]).to_bytes()
    pickled = [pickle.loads(result["own pickle"]) for result in results]
    assert pickled[0].merge(pickled[1:]).to_bytes() == merged
    dicts = [SliceStats.from_state_dict(pickle.loads(result["own state dict"])) for result in results]
    assert dicts[0].merge(dicts[1:]).to_bytes() == merged
    accumulators = [pickle.loads(result["own accumulator"]) for result in results]
    assert sum(accumulators).compute().to_bytes() == merged
    assert SliceAccumulator(ranks.NAMES).merge(accumulators).compute().to_bytes() == merged


def test_optional_statistics_are_pooled_in_the_same_two_collectives(run_world: World) -> None:
    results = run_world(4, "pool_groups", 1)
    assert [result["collectives"] for result in results] == [2] * 4
    assert len({result["bytes"] for result in results}) == 1
    batches = [ranks.rows(rank) for rank in (0, 2, 3)]
    logp, old_logp, advantages = (torch.cat(parts) for parts in zip(*batches, strict=True))
    wanted = pyrlstats.slice_stats(logp, old_logp, advantages=advantages, **ranks.GROUPS)
    got = SliceStats.from_bytes(results[0]["bytes"])
    assert got.to_dict() == pytest.approx(wanted.to_dict(), rel=1e-6, nan_ok=True)
    assert got["all"].n_sequences == len(logp)


def test_far_weights_are_rescaled_exactly(run_world: World) -> None:
    """x = 5000 on one rank and -300 on another: all of the weight is the former's, to the bit."""
    result = run_world(3, "pool", ["huge", "tiny", "empty"])[0]
    state = SliceStats.from_bytes(result["first"]).state
    alone = ranks.filled("huge", 0).compute().state
    for name in ("far_w", "far_w2"):
        np.testing.assert_array_equal(state.sum(name)[:2], alone.sum(name)[:2].numpy())
    stats = SliceStats.from_bytes(result["first"])["all"]
    assert stats.ess == pytest.approx(len(range(0, 257, 5)), rel=1e-12)


def test_a_mismatch_is_the_same_error_on_every_rank(run_world: World) -> None:
    results = run_world(3, "disagree", timeout=10.0)
    for field, text in results[0]["errors"].items():
        assert all(result["errors"][field] == text for result in results)
        assert text.startswith("ValueError: the ranks' accumulators differ: ")
        kind = field if field in ("layout", "clip", "version") else "names"
        assert f"{kind} " in text
        assert "on rank 0, 1;" in text
        assert "on rank 2. " in text
        assert ("layout Layout(mantissa_bits=5" in text) == (field == "layout")
    parts = [("plain", rank) for rank in range(3)]
    for result in results:
        assert_equal(result["after"], union(parts), union(parts, absolute=True))


def test_groups(run_world: World) -> None:
    results = run_world(4, "groups")
    for rank, result in enumerate(results):
        group = [("plain", rank % 2), ("plain", rank % 2 + 2)]
        everyone = [("plain", other) for other in range(4)]
        assert_equal(result["part"], union(group), union(group, absolute=True))
        receiver = group if rank >= 2 else [("plain", rank)]
        assert_equal(result["to 2 or 3"], union(receiver), union(receiver, absolute=True))
        assert_equal(result["orthogonal"], union(everyone), union(everyone, absolute=True))
        assert_equal(result["world"], union(everyone), union(everyone, absolute=True))
        assert_equal(result["again"], union(everyone), union(everyone, absolute=True))
        assert result["handshakes again"] == 1
        errors = result["errors"]
        assert errors["outside"].startswith(f"ValueError: rank {rank} is not in this group")
        assert errors["dst"].startswith("ValueError: dst must be a global rank of the group")
        assert errors["no group"].startswith("RuntimeError: a reduction needs a process group")


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_shards(run_world: World, size: int) -> None:
    parts = [("uneven", 0)]
    for result in run_world(size, "zigzag"):
        assert_equal(result, union(parts), union(parts, absolute=True))


@pytest.mark.parametrize("how", ["exit", "between the collectives", "sleep"])
def test_a_rank_that_does_not_come_is_an_error_in_time(run_world: World, how: str) -> None:
    timeout = 2.0
    results = run_world(3, "die", how, timeout=timeout, limit=25.0)
    for result in results[:2]:
        assert result["error"].startswith(("RuntimeError", "DistBackendError", "DistNetworkError"))
        assert result["seconds"] < timeout + 5.0


@pytest.mark.parametrize("how", ["made", "made with a device", "loaded", "copied", "copied deeply"])
def test_one_rank_has_a_new_accumulator(run_world: World, how: str) -> None:
    """The agreement is the process's: a second handshake on one rank would meet the others' reduction."""
    parts = [("plain", rank) for rank in range(3)]
    wanted, magnitudes = union(parts), union(parts, absolute=True)
    for results in run_world(3, "one_is_new", how, timeout=10.0):
        for result in results:
            assert_equal(result, wanted, magnitudes)


def test_nothing_is_agreed_while_no_rank_has_tokens(run_world: World) -> None:
    for rank, result in enumerate(run_world(2, "nobody_has_tokens")):
        assert result["handshakes"] == [2, 2]
        assert result["agreed"] == {}
        assert result["free"] == "no error"
        assert_equal(result["stats"], union([("plain", 0)]), union([("plain", 0)], absolute=True))
        assert result["agreed then"] == ["cpu"]
        kept = "ValueError: logp must be on the accumulator's device cpu, got meta"
        assert result["free without tokens"].startswith("no error" if rank else kept)


def test_merge_after_a_reduction_is_refused(run_world: World) -> None:
    for result in run_world(2, "merge_when_reduced"):
        text = "after a reduction would mix this rank's tokens into the global state: call reset() first"
        assert result["update"] == f"RuntimeError: update {text}"
        assert [*result["errors"], result["pooled"]] == [f"RuntimeError: merge {text}"] * 4
        assert result["tokens"] == 2 * 257 + 1
        assert result["after reset"] == 1


def test_reduce_reaches_one_rank(run_world: World) -> None:
    results = run_world(3, "reduce_to", 1)
    parts = [("plain", rank) for rank in range(3)]
    for rank, result in enumerate(results):
        assert result["again"].startswith("RuntimeError: update after a reduction")
        if rank == 1:
            assert_equal(result["stats"], union(parts), union(parts, absolute=True))
            assert_equal(result["async"], union(parts), union(parts, absolute=True))
        else:
            assert result["stats"] == result["own"]
            assert result["async"] == result["own"]


def test_asynchronous(run_world: World) -> None:
    parts = [("plain", rank) for rank in range(2)]
    for result in run_world(2, "asynchronous"):
        assert result["update"].startswith("RuntimeError: update after a reduction")
        assert result["reduce"].startswith("RuntimeError: this state is already reduced")
        for call in ("merge", "pickle"):
            assert result[call].startswith("RuntimeError: a reduction is under way")
        assert result["own until waited for"]
        assert_equal(result["stats"], union(parts), union(parts, absolute=True))
        assert result["tokens after reset"] == result["tokens after waiting late"] == 0
        assert_equal(result["next"], union(parts), union(parts, absolute=True))


def test_one_max_and_one_sum(run_world: World) -> None:
    slices = len(ranks.NAMES)
    for result in run_world(2, "collectives"):
        two = ["all_reduce MAX float64", "all_reduce SUM float64"]
        assert result["first"]["collectives"] == ["all_reduce MAX int64", *two]
        assert result["second"]["collectives"] == two
        assert result["async"]["collectives"] == two
        assert result["reduce"]["collectives"] == [two[0], "reduce SUM float64"]
        for call in ("second", "async", "reduce"):
            assert result[call]["syncs"] == 0
            assert result[call]["largest allocation"] <= slices * len(SUMS)  # all else is kept
            assert result[call]["kernels"] <= 20
        words = State.empty(ranks.NAMES, pyrlstats.Layout(), (0.2, 0.2)).buffer.size
        assert result["bytes"] == 8 * words
        assert words == slices * (9 + 2048 + len(SUMS) + len(MAXIMA))


def test_numpy_arrays_and_tensors_meet(run_world: World) -> None:
    parts = [("plain", 0), ("plain", 1)]
    results = run_world(3, "numpy_fed")
    assert [result["kind"] for result in results] == ["ndarray", "Tensor", "Tensor"]
    for result in results:
        assert_equal(result["stats"], union(parts), union(parts, absolute=True))
        assert result["tokens"] == 3 * 2 * 257


def test_torchmetrics_on_two_ranks(run_world: World) -> None:
    pytest.importorskip("torchmetrics")
    parts = [("plain", 0), ("huge", 1)]
    wanted = union(parts)
    for result in run_world(2, "torchmetrics_synced"):
        assert_equal(result["stats"], wanted, union(parts, absolute=True))
        assert result["synced"] == pytest.approx(wanted.to_dict(), rel=1e-6, nan_ok=True)
        assert result["local"] == 257
        shares = [result["collection"][f"{name}_all/clip_fraction_high"] for name in ("wide", "usual")]
        x = torch.cat(
            [ranks.batch(kind, seed)[0] for kind, seed in (("plain", 0), ("plain", 1), ("tiny", 0), ("tiny", 0))]
        )
        assert shares == [float((x > np.log(1.0 + high)).sum()) / len(x) for high in (1.0, 0.2)]


def test_the_documentation_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "streams.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert "tcp://127.0.0.1:29517" in code
    scope: dict[str, Any] = {}
    try:
        exec(code.replace("tcp://127.0.0.1:29517", f"file://{tmp_path / 'store'}"), scope)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert {"rl/all/n_tokens", "rl/last_20/text/ess_fraction", "rl/decayed/text/ess_fraction"} <= set(scope["log"])
    assert len(scope["saved"]) == 120


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl() -> None:
    """Compared with one pass over all ranks' tokens before anything is timed; a sync after the handshake raises."""
    assert "failed" not in benchmark.measure("nccl", 2, 20)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:Warning. Profiler clears events")
def test_a_step_of_16_micro_batches_syncs_once() -> None:
    ours = benchmark.steps()[0]
    assert ours["syncs"] == 1
    assert ours["device_to_host_copies"] == 1
    assert ours["device_allocations"] == 0
    assert benchmark.captured_update() == "ok"


def test_without_a_group() -> None:
    with pytest.raises(RuntimeError, match=r"needs a process group: call torch.distributed.init_process_group first"):
        SliceAccumulator(["all"]).all_reduce()
