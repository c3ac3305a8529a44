"""Peak extra memory of one call: what it holds beyond its inputs, at its worst moment."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def peak_extra_bytes(run: Callable[[], Any], device: str) -> int | None:
    """Bytes by which ``run`` raised the peak above what was held before; None where it cannot be measured.

    On a GPU: torch's allocator, and CuPy's pool where CuPy is used. On Linux: the resident set of this process, after
    its free memory has gone back to the system; resolution about half a MiB.
    """
    if device == "cuda":
        return _cuda(run)
    return _resident(run)


def _cuda(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pool = _cupy_pool()
    run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    return extra + (pool.total_bytes() if pool is not None else 0)


def _cupy_pool() -> Any:
    import sys

    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    return pool


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {field} in /proc/self/status")


def _resident(run: Callable[[], Any]) -> int | None:
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError):
        return None
