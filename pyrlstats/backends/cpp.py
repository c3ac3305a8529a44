"""The ``cpp`` backend: the compiled CPU engine, reading NumPy arrays and CPU tensors where they lie."""

from __future__ import annotations

import os
import sys
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrlstats import _core  # ImportError where the extension is not built
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import STATE_VERSION, clip_thresholds
from pyrlstats.state import Array, State

if TYPE_CHECKING:
    from pyrlstats.backends.digits import Intervals

if _core.STATE_VERSION != STATE_VERSION:
    raise ImportError("the extension pyrlstats._core is of another version: reinstall pyrlstats")

Operand = tuple[int, int, "tuple[int, ...] | None"]
Arguments = tuple[
    "tuple[int, ...]", bool, Operand, Operand, "tuple[Operand, ...] | None", "Operand | None", "Operand | None", int
]


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that are built in and run on this machine, best first."""
    return tuple(_core.build_config()["usable"])


@cache
def _torch_codes() -> dict[Any, int]:
    """torch.dtype -> dtype code of the extension."""
    torch = sys.modules["torch"]
    return {getattr(torch, name): code for name, code in _core.DTYPES.items() if hasattr(torch, name)}


@lru_cache(maxsize=64)
def _thresholds(clip: tuple[float, ...]) -> tuple[float, float]:
    return clip_thresholds(clip)


def _tensor_operand(tensor: Any) -> Operand:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return tensor.data_ptr(), _torch_codes()[tensor.dtype], strides


def _array_operand(array: Any) -> Operand:
    interface = array.__array_interface__  # 0.6 us; array.ctypes.data takes 1.5
    return interface["data"][0], _array_code(array.dtype), interface["strides"]


@cache
def _array_code(dtype: Any) -> int:
    return int(_core.DTYPES[dtype.name])


def accumulate(batch: Batch, state: State, num_threads: int | None = None, isa: str = "") -> None:
    """Add a batch to a state, in place. Nothing is allocated that grows with the number of tokens.

    Args:
        batch: NumPy arrays or CPU tensors, checked by the input gate.
        state: of one slice per mask (or of one, without masks), in NumPy memory or on the CPU.
        num_threads: at most so many threads; ``None``: torch.get_num_threads() for tensors, else the CPUs
            this process may use. Small batches use one. The same bits for any number.
        isa: instruction set; "" for the best usable one, or the one that PYRLSTATS_ISA names.

    Raises:
        ValueError: an instruction set that is unknown or not usable.
    """
    _core.accumulate(
        _address(state.buffer),
        len(state.names),
        (state.layout.mantissa_bits, state.layout.min_exp, state.layout.max_exp),
        _thresholds(state.clip),
        *_arguments(batch, num_threads),
        isa=isa,
    )


def count_digits(
    batch: Batch, intervals: Intervals, absolute: bool, num_threads: int | None = None, isa: str = ""
) -> Array:
    """As :func:`pyrlstats.backends.digits.count`, in one pass. Arguments as for :func:`accumulate`."""
    slices, n = intervals.low.shape
    counts = np.zeros((slices, n, _core.DIGITS), np.int64)
    columns = [np.asarray(field).reshape(-1).tolist() for field in intervals]
    rows = [(index // n, *row) for index, row in enumerate(zip(*columns, strict=True))]
    _core.count_digits(_address(counts), rows, absolute, slices, *_arguments(batch, num_threads), isa=isa)
    return counts if isinstance(intervals.low, np.ndarray) else sys.modules["torch"].from_numpy(counts)


def _arguments(batch: Batch, num_threads: int | None) -> Arguments:
    """The batch and the number of threads, as the extension takes them."""
    is_array = type(batch.logp).__module__ == "numpy"
    operand = _array_operand if is_array else _tensor_operand
    if num_threads is None:
        num_threads = _cpus() if is_array else sys.modules["torch"].get_num_threads()
    return (
        tuple(batch.logp.shape),
        is_array,
        operand(batch.logp),
        operand(batch.old_logp),
        None if batch.masks is None else tuple([operand(mask) for mask in batch.masks]),
        None if batch.slice_ids is None else operand(batch.slice_ids),
        None if batch.base_mask is None else operand(batch.base_mask),
        num_threads,
    )


def _address(buffer: Array) -> int:
    if type(buffer).__module__ == "numpy":
        return int(buffer.__array_interface__["data"][0])
    return int(buffer.data_ptr())


def _cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
