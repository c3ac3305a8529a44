"""One rank of a test: a stand-in for prime-rl's step, on the micro-batches of this rank, with our hook attached."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyrlstats.integrations import prime_rl

sys.path.insert(0, str(Path(__file__).parent))
sites: Any = importlib.import_module("call_sites")


def run(rank: int, world: int, init_file: str, results: Any) -> None:
    """Two steps; sends what was logged at each, and the collectives of the second."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world)
    module = sites.prime_module()
    prime_rl.attach(module)
    own = [sites.world()[rank]]
    first = sites.prime_step(module, own)
    calls: Counter[str] = Counter()
    real = dist.all_reduce

    def counted(tensor: Any, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        calls[str(op)] += 1
        return real(tensor, op, *args, **kwargs)

    dist.all_reduce = counted
    second = sites.prime_step(module, own)
    results.put((rank, first, second, sum(calls.values())))
    dist.barrier()
    dist.destroy_process_group()
