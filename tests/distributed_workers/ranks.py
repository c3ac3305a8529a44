"""What one rank of a test does: the functions here run in processes of their own, one call a rank.

Each takes (rank, world) and what the test passes on, and returns something that can be pickled.
"""

from __future__ import annotations

import copy
import datetime
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pyrlstats import Layout, SliceAccumulator, distributed

NAMES = ("all", "even", "none")
VIEWS = ("aten.view", "aten.select", "aten.detach", "aten.unbind", "c10d.")
Batch = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def run_rank(
    connection: Connection, function: str, rank: int, world: int, init_file: str, timeout: float, arguments: Any
) -> None:
    """Entry point of a process: join the world, call the function, send (ok, result or error) back."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{init_file}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = (True, globals()[function](rank, world, *arguments))
    except Exception as error:
        result = (False, f"{type(error).__name__}: {error}")
    connection.send(result)
    if connection.poll(20):  # until the test lets go: a rank that leaves early would fail the others
        os._exit(0)


def batch(kind: str, seed: int) -> Batch:
    """Tokens of one rank."""
    rng = np.random.default_rng(seed)
    n = {"uneven": 1311, "one": 1}.get(kind, 257)
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-6.0, 0.7, n)
    x[rng.random(n) < 0.1] = 0.0
    if kind == "not finite":
        x[rng.random(n) < 0.3] = np.nan
        x[::7], x[1::7] = np.inf, -np.inf
    elif kind == "huge":
        x[::5] = 5000.0
    elif kind == "tiny":
        x[:] = -300.0
    x = x.astype(np.float32)
    old = np.zeros(n, np.float32)
    everyone = np.zeros(n, bool) if kind == "masked" else np.ones(n, bool)
    masks = {"all": everyone, "even": everyone & (np.arange(n) % 2 == 0), "none": np.zeros(n, bool)}
    return torch.from_numpy(x), torch.from_numpy(old), {name: torch.from_numpy(mask) for name, mask in masks.items()}


def accumulator(**options: Any) -> SliceAccumulator:
    return SliceAccumulator(options.pop("names", NAMES), **options)


def filled(kind: str, seed: int, **options: Any) -> SliceAccumulator:
    """An accumulator that has seen the tokens of ``kind``; "empty" never sees an update."""
    made = accumulator(**options)
    if kind != "empty":
        logp, old_logp, masks = batch(kind, seed)
        half = len(logp) // 2
        for part in (slice(0, half), slice(half, None)):
            made.update(logp[part], old_logp[part], {name: masks[name][part] for name in masks})
    return made


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def pool(rank: int, world: int, kinds: list[str]) -> dict[str, Any]:
    """All ranks' tokens, twice in a row, and this rank's own as a driver gets them."""
    made = filled(kinds[rank], rank)
    own = made.compute()
    first = made.all_reduce().compute()
    again = [
        error_of(lambda: made.update(*batch("one", 0))),
        error_of(lambda: made.all_reduce()),
        error_of(lambda: made.reduce()),
    ]
    made.reset()
    if kinds[rank] != "empty":
        made.update(*batch(kinds[rank], rank))
    second = made.all_reduce().compute()
    return {
        "first": first.to_bytes(),
        "second": second.to_bytes(),
        "again": again,
        "own bytes": own.to_bytes(),
        "own pickle": pickle.dumps(own),
        "own accumulator": pickle.dumps(filled(kinds[rank], rank)),
        "own state dict": pickle.dumps(own.state_dict()),
    }


def disagree(rank: int, world: int) -> dict[str, Any]:
    """Each kind of mismatch, then a reduction that fits."""
    odd = rank == world - 1
    options: dict[str, dict[str, Any]] = {
        "names": {"names": ("all", "even", "odd")},
        "order": {"names": ("even", "all", "none")},
        "more": {"names": (*NAMES, "more")},
        "layout": {"layout": Layout(mantissa_bits=4)},
        "clip": {"clip": (0.2, 0.28)},
    }
    errors = {}
    for field, option in options.items():
        made = accumulator(**(option if odd else {}))
        made.merge(filled("plain", rank, **(option if odd else {})) if field in ("layout", "clip") else [])
        before = made.compute().to_bytes()
        start = time.monotonic()
        errors[field] = error_of(made.all_reduce)
        assert time.monotonic() - start < 5.0
        assert made.compute().to_bytes() == before
        made.update(torch.ones(3), torch.zeros(3), [torch.ones(3)] * len(made.names))  # it goes on
    distributed.STATE_VERSION = 1 + int(odd)
    errors["version"] = error_of(accumulator().all_reduce)
    distributed.STATE_VERSION = 1
    return {"errors": errors, "after": filled("plain", rank).all_reduce().compute().to_bytes()}


def groups(rank: int, world: int) -> dict[str, Any]:
    """Sub-groups, the group one is not in, and a world that is destroyed and made again."""
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    made = filled("plain", rank)
    mine, other = parts[rank % 2], parts[1 - rank % 2]
    errors = {
        "outside": error_of(lambda: made.all_reduce(other)),
        "dst": error_of(lambda: made.reduce(1 - rank % 2, mine)),
    }
    result = {"errors": errors, "part": made.all_reduce(mine).compute().to_bytes()}
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # orthogonal ones, one after the other
    result["orthogonal"] = accumulator().merge(made.compute()).all_reduce(rows[rank // 2]).compute().to_bytes()
    made.reset().merge(filled("plain", rank))
    result["to 2 or 3"] = made.reduce(2 + rank % 2, mine).compute().to_bytes()
    made.reset().merge(filled("plain", rank))
    result["world"] = made.all_reduce().compute().to_bytes()
    assert len(distributed._agreements) == 3  # mine, my row, everyone
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    mine = other = None
    parts.clear()
    made.reset().merge(filled("plain", rank))
    errors["no group"] = error_of(made.all_reduce)
    dist.init_process_group(store=dist.PrefixStore("again", store), rank=rank, world_size=world)  # no backend named
    with count_collectives() as calls:
        result["again"] = made.all_reduce().compute().to_bytes()
    result["handshakes again"] = calls.count("all_reduce MAX int64")
    return result


def zigzag(rank: int, world: int) -> bytes:
    """A context-parallel shard: of 2 x world chunks of a sequence, the rank-th from each end."""
    logp, old_logp, masks = batch("uneven", 0)
    chunks = np.array_split(np.arange(len(logp)), 2 * world)
    mine = np.concatenate([chunks[rank], chunks[2 * world - 1 - rank]])
    made = accumulator().update(logp[mine], old_logp[mine], {name: mask[mine] for name, mask in masks.items()})
    return made.all_reduce().compute().to_bytes()


def die(rank: int, world: int, how: str) -> dict[str, Any]:
    """The last rank does not come to the second reduction."""
    made = filled("plain", rank)
    made.all_reduce()
    made.reset().merge(filled("plain", rank))
    before = made.compute().to_bytes()
    if rank == world - 1:
        if how == "exit":
            os._exit(1)
        if how == "between the collectives":
            made._reduction._buffers.pack_sums = lambda: os._exit(1)  # type: ignore[union-attr, method-assign]
            made.all_reduce()
        time.sleep(12.0)  # longer than the others may wait: its end would be an error too
        return {}
    start = time.monotonic()
    error = error_of(made.all_reduce)
    seconds = time.monotonic() - start
    assert made.compute().to_bytes() == before
    made.update(*batch("one", 0))  # counts on
    return {"error": error, "seconds": seconds}


def one_is_new(rank: int, world: int, how: str) -> list[bytes]:
    """All reduce, then rank 0 goes on with an accumulator of the same make that has not reduced yet."""
    made = filled("plain", rank)
    results = [made.all_reduce().compute().to_bytes()]
    if rank == 0:
        made = {
            "made": accumulator,
            "made with a device": lambda: accumulator(device="cpu"),
            "loaded": lambda: pickle.loads(pickle.dumps(made)),
            "copied": lambda: copy.copy(made),
            "copied deeply": lambda: copy.deepcopy(made),
        }[how]()
    for _ in range(2):
        made.reset().update(*batch("plain", rank))
        results.append(made.all_reduce().compute().to_bytes())
    return results


def nobody_has_tokens(rank: int, world: int) -> dict[str, Any]:
    """A group that serves the CPU and an accelerator, reduced before any rank knows where its tokens will be.

    The words and buffers of the accelerator stay on the CPU here: gloo in the place of its backend.
    """
    dist.get_backend_config = lambda group: "cpu:gloo,cuda:nccl"
    group = dist.group.WORLD
    made = accumulator()
    result: dict[str, Any] = {"handshakes": []}
    for _ in range(2):
        with count_collectives() as calls:
            tokens = [int(made.all_reduce().compute()["all"].n_tokens)]
            made.reset()
            made = pickle.loads(pickle.dumps(made))
            tokens.append(int(made.all_reduce().compute()["all"].n_tokens))
        made.reset()
        result["handshakes"].append(calls.count("all_reduce MAX int64"))
        assert tokens == [0, 0]
        assert made._state is None
    result["agreed"] = dict(distributed._agreements.get(group, {}))
    result["free"] = error_of(lambda: made._state_for(torch.device("meta")))  # any device would do
    made = accumulator()
    if rank == 0:
        made.update(*batch("plain", rank))
    result["stats"] = made.all_reduce().compute().to_bytes()
    result["agreed then"] = list(distributed._agreements[group].values())
    made.reset()
    result["free without tokens"] = error_of(lambda: made._state_for(torch.device("meta")))
    return result


def merge_when_reduced(rank: int, world: int) -> dict[str, Any]:
    made = filled("plain", rank)
    more = filled("one", rank)
    before = made.all_reduce().compute().to_bytes()

    def add() -> None:
        nonlocal made
        made += more

    errors = [error_of(lambda: made.merge(more)), error_of(lambda: made.merge([more.compute()])), error_of(add)]
    assert made.compute().to_bytes() == before
    pooled = made + more  # a new one, reduced as well
    return {
        "errors": errors,
        "update": error_of(lambda: made.update(*batch("one", 0))),
        "tokens": int(pooled.compute()["all"].n_tokens),
        "pooled": error_of(lambda: pooled.merge(more)),
        "after reset": int(made.reset().merge(more).compute()["all"].n_tokens),
    }


def reduce_to(rank: int, world: int, dst: int) -> dict[str, Any]:
    made = filled("plain", rank)
    own = made.compute().to_bytes()
    stats = made.reduce(dst).compute().to_bytes()
    again = error_of(lambda: made.update(*batch("one", 0)))
    made.reset().merge(filled("plain", rank))
    handle = made.reduce(dst, async_op=True)
    return {"own": own, "stats": stats, "again": again, "async": handle.wait().compute().to_bytes()}


def asynchronous(rank: int, world: int) -> dict[str, Any]:
    made = filled("plain", rank)
    own = made.compute().to_bytes()
    handle = made.all_reduce(async_op=True)
    result: dict[str, Any] = {
        "update": error_of(lambda: made.update(*batch("one", 0))),
        "merge": error_of(lambda: made.merge(filled("one", 0))),
        "reduce": error_of(lambda: made.all_reduce()),
        "pickle": error_of(lambda: pickle.dumps(made)),
        "own until waited for": made.compute().to_bytes() == own,
    }
    assert handle.wait() is made
    assert handle.wait() is made
    result["stats"] = made.compute().to_bytes()
    made.reset().merge(filled("plain", rank))
    abandoned = made.all_reduce(async_op=True)
    made.reset()  # finishes it first
    result["tokens after reset"] = int(made.compute()["all"].n_tokens)
    abandoned.wait()
    result["tokens after waiting late"] = int(made.compute()["all"].n_tokens)
    result["next"] = made.merge(filled("plain", rank)).all_reduce().compute().to_bytes()
    return result


@contextmanager
def count_collectives() -> Iterator[list[str]]:
    """Every collective of torch.distributed in order: name, operation, dtype."""
    calls: list[str] = []
    originals = {}

    def counted(name: str) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            operation = next((arg for arg in args if isinstance(arg, type(dist.ReduceOp.SUM))), "")
            dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
            calls.append(f"{name} {str(operation).rpartition('.')[2]} {dtype}")
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in dir(dist):
        if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv", "isend", "barrier")):
            function = getattr(dist, name)
            if callable(function) and not isinstance(function, type):
                originals[name] = function
                setattr(dist, name, counted(name))
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


class Operators(TorchDispatchMode):
    """Records the operators that run, and the largest tensor that one of them allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        memory = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in memory:
            self.largest = max(self.largest, result.numel())
        return result


def collectives(rank: int, world: int) -> dict[str, Any]:
    """What is called in the first and in the second reduction, blocking, asynchronous and to one rank."""
    made = filled("plain", rank, device="cpu")
    result: dict[str, Any] = {}
    for name, call in {
        "first": made.all_reduce,
        "second": made.all_reduce,
        "async": lambda: made.all_reduce(async_op=True).wait(),
        "reduce": made.reduce,
    }.items():
        made.reset()
        made.update(*batch("plain", rank))
        state = made._state
        assert state is not None
        pointer = state.buffer.data_ptr()
        with Operators() as operators, count_collectives() as calls:
            call()
        assert made._state is state
        assert state.buffer.data_ptr() == pointer
        result[name] = {
            "collectives": calls,
            "syncs": sum("_local_scalar_dense" in operator for operator in operators.names),
            "kernels": len([name for name in operators.names if not name.startswith(VIEWS)]),
            "largest allocation": operators.largest,
        }
        buffers = made._reduction._buffers  # type: ignore[union-attr]
        result["bytes"] = 8 * (buffers.total.numel() + buffers.maxima.numel())  # type: ignore[union-attr]
    return result


def numpy_fed(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 counts NumPy arrays, rank 1 tensors, rank 2 nothing."""
    made = accumulator()
    logp, old_logp, masks = batch("plain", rank)
    arrays = (logp.numpy(), old_logp.numpy(), {name: mask.numpy() for name, mask in masks.items()})
    if rank == 0:
        made.update(*arrays)
    elif rank == 1:
        made.update(logp, old_logp, masks)
    stats = made.all_reduce().compute()
    result = {"stats": stats.to_bytes(), "kind": type(stats.state.buffer).__name__}
    made.reset().update(*arrays)
    made.update(logp, old_logp, masks)
    result["tokens"] = int(made.all_reduce().compute()["all"].n_tokens)
    return result


def torchmetrics_synced(rank: int, world: int) -> dict[str, Any]:
    import torchmetrics

    from pyrlstats.integrations.torchmetrics import SliceMetric

    metric = SliceMetric(NAMES)
    metric.update(*batch(["plain", "huge"][rank], rank))
    synced = metric.compute()
    with metric.sync_context():
        stats = metric.stats.to_bytes()
    local = int(metric.stats["all"].n_tokens)
    collection = torchmetrics.MetricCollection(
        {"wide": SliceMetric(NAMES, clip=(0.5, 1.0)), "usual": SliceMetric(NAMES)}
    )
    collection.update(*batch("tiny", 0))
    collection.update(*batch("plain", rank))
    return {
        "synced": synced,
        "stats": stats,
        "local": local,
        "collection": collection.compute(),
    }


GROUPS = {"sequences": True, "truncate": (0.5, 2.0), "entropy": True, "probabilities": True}


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, old_logp and advantages of one rank: as many sequences as it likes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (seed + 2, 40)
    base, x = -torch.rand(shape, generator=generator) - 20.0, torch.randn(shape, generator=generator) * 3.0**seed
    return base + x, base, torch.randn(shape[0], generator=generator)


def pool_groups(rank: int, world: int, empty: int) -> dict[str, Any]:
    """Every optional statistic over all ranks, one of which has no tokens; and the collectives of a second step."""
    made = accumulator(names=["all"], advantages=True, **GROUPS)
    calls = []
    reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return reduce(*args, **kwargs)

    distributed.dist.all_reduce = counted
    try:
        for _ in range(2):
            made.reset()
            calls.clear()
            if rank != empty:
                logp, old_logp, advantages = rows(rank)
                made.update(logp, old_logp, advantages=advantages)
            made.all_reduce()
    finally:
        distributed.dist.all_reduce = reduce
    return {"bytes": made.compute().to_bytes(), "collectives": len(calls)}
