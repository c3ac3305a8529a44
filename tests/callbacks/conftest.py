"""A float64 recomputation of what callbacks report, from the tensors that the loss saw."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Seen = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]  # logp, old_logp, masks of one micro-batch


def recomputed(batches: Sequence[Seen], prefix: str) -> dict[str, float]:
    """Statistics of the union of micro-batches, in float64, without this library."""
    found: dict[str, float] = {}
    for name in batches[0][2]:
        x = np.concatenate([(logp - old)[masks[name] != 0].astype(np.float64) for logp, old, masks in batches])
        w = np.exp(x)
        magnitudes = np.sort(np.abs(x))
        numbers = {
            "n_tokens": len(x),
            "log_ratio_mean": x.mean(),
            "log_ratio_std": x.std(),
            "log_ratio_min": x.min(),
            "log_ratio_max": x.max(),
            "kl_k1": -x.mean(),
            "kl_k2": (x**2).mean() / 2,
            "kl_k3": (np.expm1(x) - x).mean(),
            "ratio_mean": w.mean(),
            "ess_fraction": w.sum() ** 2 / (w**2).sum() / len(x),
            "chi2": len(x) * (w**2).sum() / w.sum() ** 2 - 1,
            "clip_fraction": ((w < 0.8) | (w > 1.2)).mean(),
            "abs_log_ratio_p99": magnitudes[int(np.ceil(0.99 * len(x))) - 1],
        }
        found |= {f"{prefix}{name}/{statistic}": float(value) for statistic, value in numbers.items()}
    return found


@pytest.fixture(scope="session")
def assert_recomputed() -> Callable[[Mapping[str, float], Sequence[Seen], str], None]:
    """Asserts that every reported number that has a recomputation equals it; how many there must be depends on it."""

    def check(reported: Mapping[str, float], batches: Sequence[Seen], prefix: str = "rl/") -> None:
        __tracebackhide__ = True
        wanted = {key: value for key, value in recomputed(batches, prefix).items() if key in reported}
        assert len(wanted) >= 7 * len(batches[0][2])
        for key, value in wanted.items():
            within = {"rel": 2**-5} if key.endswith("_p99") else {"rel": 1e-6, "abs": 1e-9}
            assert reported[key] == pytest.approx(value, **within), key

    return check


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """Runs two_processes.py once; gives the folder of a trainer and what each rank saw."""
    folder = tmp_path_factory.mktemp("two")
    ran: list[Any] = []

    def result(trainer: str) -> tuple[Path, list[Any]]:
        if not ran:
            command = [sys.executable, str(Path(__file__).with_name("two_processes.py")), str(folder), *_free_ports(2)]
            ran.append(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300))
        assert ran[0].returncode == 0, ran[0].stderr[-4000:]
        return folder / trainer, [pickle.loads((folder / trainer / f"{rank}.pkl").read_bytes()) for rank in (0, 1)]

    return result


def _free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
