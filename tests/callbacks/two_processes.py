"""Trains in two processes, first with transformers, then with Lightning: ``two_processes.py FOLDER FREE_PORT ...``.

Everything is imported once, then each rank is a fork. Each writes ``FOLDER/<trainer>/<rank>.jsonl`` by its sink and
``<rank>.pkl``, what it saw.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_policy
import lightning_policy
import torch

from pyrlstats.sinks import JsonlSink


def run_transformers(folder: Path, rank: int) -> dict[str, Any]:
    from pyrlstats.integrations.transformers import SliceCallback

    callback = SliceCallback(hf_policy.NAMES, sinks=lambda: [JsonlSink(folder / f"{rank}.jsonl")])
    training = hf_policy.trainer(folder, callback, gradient_accumulation_steps=2, ddp_backend="gloo")
    callback.attach(training)
    training.train()
    assert not any(callback.reporter.failures.values()), callback.reporter.failures
    return {"batches": training.seen, "history": training.state.log_history}


def run_lightning(folder: Path, rank: int) -> dict[str, Any]:
    from pyrlstats.integrations.lightning import SliceCallback

    callback = SliceCallback(lightning_policy.NAMES, sinks=lambda: [JsonlSink(folder / f"{rank}.jsonl")])
    training, module = lightning_policy.training(folder, callback, 2, devices=2, strategy="ddp")
    training.fit(module)
    assert not any(callback.failures.values()), callback.failures
    return {"batches": module.seen, "metrics": {key: float(value) for key, value in training.callback_metrics.items()}}


def world(function: Callable[[Path, int], Any], folder: Path, port: str) -> None:
    folder.mkdir()
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
            os.environ.update(own, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
            try:
                torch.set_num_threads(1)
                (folder / f"{rank}.pkl").write_bytes(pickle.dumps(function(folder, rank)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(f"{function.__name__} failed")


if __name__ == "__main__":
    folder, *ports = sys.argv[1:]
    world(run_transformers, Path(folder, "transformers"), ports[0])
    world(run_lightning, Path(folder, "lightning"), ports[1])
