"""The ``cpp`` backend: the compiled CPU engine, reading NumPy arrays and CPU tensors where they lie."""

from __future__ import annotations

import os
import sys
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrlstats import _core  # ImportError where the extension is not built
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import STATE_VERSION, clip_thresholds, log_bounds
from pyrlstats.state import Array, State

if TYPE_CHECKING:
    from pyrlstats.backends.digits import Intervals

if _core.STATE_VERSION != STATE_VERSION:
    raise ImportError("the extension pyrlstats._core is of another version: reinstall pyrlstats")

_SECTIONS = ("entropy", "probabilities", "truncation", "policy_clip")

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


def fill_groups(batch: Batch, state: State, num_threads: int | None = None, isa: str = "") -> tuple[Array, Array]:
    """Fill the empty sections without a histogram of a state's groups, in one pass; as :func:`accumulate`.

    Returns:
        float32 of logp's shape, the updates w A, or None where they are not asked for; float64 (4, S, sequences), the
        sums over sequences of 1, x, logp and old_logp, or None.
    """
    asked = {group.name: group for group in state.groups}
    is_array = isinstance(state.buffer, np.ndarray)
    xp: Any = np if is_array else sys.modules["torch"]
    updates: Array = xp.zeros(tuple(batch.logp.shape), dtype=xp.float32) if "updates" in asked else None
    boundaries: Array = None
    sums: Array = None
    if "sequences" in asked:
        given: Array = batch.boundaries
        boundaries = np.ascontiguousarray(given) if is_array else given.contiguous()
        sums = xp.zeros((4, len(state.names), boundaries.shape[0] - 1), dtype=xp.float64)
    operand: Any = _array_operand if is_array else _tensor_operand
    low, high = _thresholds(state.clip)
    least, most = log_bounds(*asked["truncation"].thresholds) if "truncation" in asked else (0.0, 0.0)
    (dual,) = log_bounds(asked["policy_clip"].thresholds[2]) if "policy_clip" in asked else (0.0,)
    entropy, probabilities, truncation, policy_clip = (
        _address(state.group(name).buffer) if name in asked else 0 for name in _SECTIONS
    )
    _core.accumulate_groups(
        (entropy, probabilities, truncation, policy_clip),
        (least, most),
        (low, high, dual),
        operand(batch.advantages) if "policy_clip" in asked else None,
        0 if updates is None else _address(updates),
        0 if boundaries is None else _address(boundaries),
        0 if boundaries is None else boundaries.shape[0] - 1,
        0 if sums is None else _address(sums),
        len(state.names),
        *_arguments(batch, num_threads),
        isa=isa,
    )
    return updates, sums


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
