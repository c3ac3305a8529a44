"""Exact quantiles, tails and top tokens over 4 processes (gloo): those of the union of their tokens, to the bit."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyrlstats import reference
from pyrlstats.tails import reference as tail_reference

sys.path.insert(0, str(Path(__file__).parent / "distributed_workers"))  # the processes get it too
workers: Any = importlib.import_module("token_ranks")

WORLD = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of every rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch.distributed", "pyrlstats.distributed", "pyrlstats.tails"])
    init_file = str(tmp_path_factory.mktemp("world") / "init")
    ends, processes = [], []
    for rank in range(WORLD):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=workers.run_rank, args=(theirs, "everything", rank, WORLD, init_file, 60.0, ()), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    deadline = time.monotonic() + 120.0
    found = []
    try:
        for rank, end in enumerate(ends):
            assert end.poll(max(deadline - time.monotonic(), 0.0)), f"rank {rank} hangs"
            found.append(end.recv())
        failed = [f"rank {rank}: {error}" for rank, (ok, error) in enumerate(found) if not ok]
        assert not failed, failed
    finally:
        for end, process in zip(ends, processes, strict=True):
            try:
                end.send("done")
            except OSError:
                process.kill()
            end.close()
            process.join(10.0)
    return [value for _, value in found]


def union(kind: str, name: str, members: tuple[int, ...] = tuple(range(WORLD))) -> np.ndarray:
    batches = [workers.batch(kind, rank, WORLD) for rank in members]
    x = np.concatenate([x[masks[name]] for x, masks in batches])
    return x[np.isfinite(x)].astype(np.float64)


def check(found: dict[str, np.ndarray], kind: str, q: list[float], absolute: bool = False, **options: Any) -> None:
    for name in workers.NAMES:
        x = union(kind, name, **options)
        wanted = np.array([reference.quantile((np.abs(x) if absolute else x) + 0.0, one) for one in q])
        got = found[name].reshape(-1)
        same = np.array_equal(got.view(np.int64), wanted.view(np.int64))
        assert same or (np.isnan(got).all() and np.isnan(wanted).all()), name


@pytest.mark.parametrize("kind", workers.KINDS)
def test_exact_quantiles_equal_a_sort_of_the_union_to_the_bit(kind: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        check(result[kind]["signed"], kind, workers.Q)
        check(result[kind]["with stats"], kind, workers.Q)
        check(result[kind]["values"], kind, workers.Q)
        check(result[kind]["absolute"], kind, workers.Q, absolute=True)
        check(result[kind]["single"], kind, [0.5])
        assert result[kind]["single"]["all"].shape == ()


@pytest.mark.parametrize("kind", ["t3", "lattice"])
def test_tails_are_those_of_the_union(kind: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, n in zip(workers.NAMES, result[kind]["n"], strict=True):
            x = union(kind, name)
            assert n == x.size
            for numbers in (result[kind]["k"], result[kind]["k without capacity"]):
                k, hill = numbers[f"{name}/pareto_k"], numbers[f"{name}/hill"]
                if name == "none":
                    assert np.isnan([k, hill]).all()
                else:
                    np.testing.assert_allclose(k, tail_reference.pareto_k(x), atol=1e-9)
                    np.testing.assert_allclose(hill, tail_reference.hill(x)[0], rtol=1e-9)
    for result in results[1:3]:  # on rank 3 other code sums up the fit
        np.testing.assert_equal(result[kind], results[0][kind])


@pytest.mark.parametrize("kind", workers.KINDS)
def test_top_tokens_name_the_rank(kind: str, results: list[dict[str, Any]]) -> None:
    for name in workers.NAMES:
        candidates = []
        for rank in range(WORLD):
            x, masks = workers.batch(kind, rank, WORLD)
            inside = np.flatnonzero((masks[name] & np.isfinite(x)).reshape(-1))
            candidates += [(-abs(float(x.flat[i])), rank, int(i), float(x.flat[i])) for i in inside]
        wanted = [
            {"value": value, "index": index, "sequence": index // 50, "position": index % 50, "rank": rank}
            for _, rank, index, value in sorted(candidates)[:7]
        ]
        for result in results:
            assert result[kind]["top"][name] == wanted


def test_what_differs_is_the_same_error_on_every_rank(results: list[dict[str, Any]]) -> None:
    errors = [result["errors"] for result in results]
    own = [error.pop("own stats") for error in errors]
    assert errors == [errors[0]] * WORLD
    assert "q [0.5, 0.75] on rank 0, 2, 3; q [0.5, 0.25] on rank 1" in errors[0]["q"]
    assert "k 4 on rank 0, 2, 3; k 3 on rank 1" in errors[0]["k"]
    assert "capacity 10 on rank 0, 2, 3; capacity 9 on rank 1" in errors[0]["capacity"]
    for rank in (0, 1):  # rank 2 has no tokens to find this out by, and on a device it is NaN
        assert "stats must be those of these tokens (with group, of the tokens of all ranks)" in own[rank]


def test_the_collectives_of_a_call(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["collectives"] == {
            "exact": ["all_reduce SUM int64"] * 3,
            "tail": ["all_gather  ", "all_reduce SUM int64"],
            "top": ["all_gather  "],
        }


def test_thresholds_are_of_the_union_of_uneven_ranks(results: list[dict[str, Any]]) -> None:
    """Local quantiles disagree, and a gather of unequal lengths hangs: 3, 5, no and no tokens."""
    for result in results:
        assert result["uneven"]["all"].tolist() == [2.0, 10.0, 40.0, 50.0]


def test_sub_groups(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        members = (rank % 2, rank % 2 + 2)
        check(result["half"], "t3", workers.Q, members=members)
        assert {row["rank"] for row in result["top of half"]} <= set(members)
