"""What one rank of a test of exact quantiles and tails does; see ranks.py, whose entry point it shares."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ranks
import torch
import torch.distributed as dist

from pyrlstats import SliceAccumulator, exact_quantiles, slice_stats, values
from pyrlstats.backends import flat
from pyrlstats.tails import tail_shape, tail_size, top_tokens

Q = [0.0, 0.01, 0.5, 0.9, 0.999, 1.0]
NAMES = ("all", "some", "one rank", "none")
KINDS = ("t3", "lattice", "bits", "wide")


def run_rank(connection: Any, function: str, *rest: Any) -> None:
    vars(ranks)[function] = globals()[function]
    ranks.run_rank(connection, function, *rest)


def batch(kind: str, rank: int, world: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Tokens of one rank, (rows, 50): another number on each, none on the last but one."""
    rng = np.random.default_rng([rank, len(kind)])
    n = 50 * (0 if rank == world - 2 else 40 + 13 * rank)
    if kind == "bits":
        x = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    elif kind == "wide":
        x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-44, 37, n)).astype(np.float32)
    else:
        x = (0.05 * (1 + rank) * rng.standard_t(3, n)).astype(np.float32)
        x = torch.from_numpy(x).bfloat16().float().numpy() if kind == "lattice" else x
    x = x.reshape(-1, 50)
    masks = {
        "all": np.ones(x.shape, bool),
        "some": rng.random(x.shape) < 0.3,
        "one rank": np.full(x.shape, rank == 1),
        "none": np.zeros(x.shape, bool),
    }
    return x, masks


def own(kind: str, rank: int, world: int, numpy: bool) -> tuple[Any, Any, dict[str, Any]]:
    x, masks = batch(kind, rank, world)
    if numpy:
        return x, np.zeros_like(x), masks
    return torch.from_numpy(x), torch.zeros(x.shape), {name: torch.from_numpy(mask) for name, mask in masks.items()}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in found.items()}


def everything(rank: int, world: int) -> dict[str, Any]:
    """Every kind of tokens: NumPy arrays on two ranks, tensors on one, as on a GPU on one. Errors, collectives."""
    group = dist.group.WORLD
    if rank == 3:  # goes the way of a GPU
        os.environ["PYRLSTATS_BACKEND"] = "torch"
        flat.in_host_memory = lambda _: False
    result: dict[str, Any] = {}
    for kind in KINDS:
        logp, old_logp, masks = own(kind, rank, world, numpy=rank % 2 == 0)
        pooled = SliceAccumulator(NAMES).update(logp, old_logp, masks).all_reduce(group).compute()
        capacity = tail_size(50 * world * (40 + 13 * world)) + 1
        shape = tail_shape(logp, old_logp, masks, capacity=capacity, group=group)
        top = top_tokens(logp, old_logp, masks, 7, group=group)
        result[kind] = {
            "signed": plain(exact_quantiles(logp, old_logp, masks, Q, group=group)),
            "absolute": plain(exact_quantiles(logp, old_logp, masks, Q, absolute=True, group=group)),
            "with stats": plain(exact_quantiles(logp, old_logp, masks, Q, stats=pooled, group=group)),
            "values": plain(values.exact_quantiles(logp, masks, Q, group=group)),
            "single": plain(exact_quantiles(logp, old_logp, masks, 0.5, group=group)),
            "k": shape.to_dict(),
            "k without capacity": tail_shape(logp, old_logp, masks, group=group).to_dict(),
            "n": np.asarray(shape.n),
            "top": {name: found.rows() for name, found in top.items()},
        }
    logp, old_logp, masks = own("t3", rank, world, numpy=False)
    odd = rank == 1
    mine = slice_stats(logp, old_logp, masks)
    result["errors"] = {
        "q": ranks.error_of(lambda: exact_quantiles(logp, old_logp, masks, [0.5, 0.25 if odd else 0.75], group=group)),
        "k": ranks.error_of(lambda: top_tokens(logp, old_logp, masks, 3 if odd else 4, group=group)),
        "capacity": ranks.error_of(lambda: tail_shape(logp, old_logp, masks, capacity=9 if odd else 10, group=group)),
        "own stats": ranks.error_of(lambda: exact_quantiles(logp, old_logp, masks, 0.5, stats=mine, group=group)),
    }
    pooled = SliceAccumulator(NAMES).update(logp, old_logp, masks).all_reduce(group).compute()
    calls = {
        "exact": lambda: exact_quantiles(logp, old_logp, masks, Q, stats=pooled, group=group),
        "tail": lambda: tail_shape(logp, old_logp, masks, capacity=100, group=group),
        "top": lambda: top_tokens(logp, old_logp, masks, 5, group=group),
    }
    result["collectives"] = {}
    for name, call in calls.items():
        call()
        with ranks.count_collectives() as counted:
            call()
        result["collectives"][name] = counted
    entropy = np.float32([[1, 2, 3], [10, 20, 30, 40, 50], [], []][rank])  # uneven, and two ranks without tokens
    result["uneven"] = plain(
        values.exact_quantiles(torch.from_numpy(entropy), None, [0.25, 0.5, 0.8, 1.0], group=group)
    )
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    result["half"] = plain(exact_quantiles(logp, old_logp, masks, Q, group=halves[rank % 2]))
    result["top of half"] = top_tokens(logp, old_logp, masks, 3, group=halves[rank % 2])["all"].rows()
    return result
