"""The ``triton`` backend: fused GPU kernels, CUDA and ROCm, no sync."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

from pyrlstats.backends import flat
from pyrlstats.backends.batch import Batch
from pyrlstats.backends.digits import DIGITS, Intervals
from pyrlstats.state import Array, State


def _find_kernels() -> None:
    """In a source tree the kernels lie beside the package: make them importable as ``pyrlstats.kernels``."""
    if "pyrlstats.kernels" in sys.modules or importlib.util.find_spec("pyrlstats.kernels") is not None:
        return
    folder = Path(__file__).resolve().parents[2] / "kernels"
    if not folder.is_dir():
        raise ImportError("pyrlstats.kernels is missing: reinstall pyrlstats")
    spec = importlib.machinery.ModuleSpec("pyrlstats.kernels", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules["pyrlstats.kernels"] = importlib.util.module_from_spec(spec)


_find_kernels()

from pyrlstats.kernels import digits, launch, pack, sequences, tile  # noqa: E402

__all__ = [
    "accumulate",
    "count_digits",
    "digits",
    "launch",
    "pack",
    "sequence_sums",
    "sequences",
    "tile",
    "unavailable_reason",
]


def unavailable_reason() -> str | None:
    """Why this backend cannot run here, or None where it can."""
    return None if launch.INTERPRETED or torch.cuda.is_available() else "torch finds no CUDA or ROCm device"


def accumulate(batch: Batch, state: State) -> None:
    """Add the tokens of ``batch`` to ``state``, in place, on the current stream. Does not sync."""
    launch.slice_hist_(batch.logp, batch.old_logp, *_members(batch), batch.base_mask, state)


def sequence_sums(batch: Batch, slices: int) -> Array:
    """As :func:`pyrlstats.groups.sequences.sums`, in one launch for four slices. Does not sync."""
    boundaries: Array = batch.boundaries
    return sequences.sums(batch.logp, batch.old_logp, *_members(batch), batch.base_mask, boundaries, slices)


def count_digits(batch: Batch, intervals: Intervals, absolute: bool) -> Array:
    """As :func:`pyrlstats.backends.digits.count`: x and one launch a slice. Does not sync."""
    x = flat.log_ratio(batch)
    slices, n = intervals.low.shape
    counts = torch.zeros((slices, n, DIGITS), dtype=torch.int64, device=x.device)
    low, width, shift = (field.contiguous() for field in intervals)
    for index in range(slices):
        member = flat.members(batch, index)
        digits.count_(x, member, low[index], width[index], shift[index], absolute, counts[index])
    return counts


def _members(batch: Batch) -> tuple[int, tuple[Array, ...]]:
    """How the slices are given, and in which tensors."""
    if batch.slice_ids is not None:
        return tile.IDS.value, (batch.slice_ids,)
    if batch.masks is not None:
        return tile.MASKS.value, batch.masks
    return tile.ALL.value, ()
