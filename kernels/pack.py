"""A section of a state to the float64 buffer that ranks add up, and back: one launch each way.

What state.rescale_ does to the scaled sums is done on the way out. As array operations it takes 20 launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pyrlstats.kernels import far
from pyrlstats.kernels.start import interpreted, launch_kernel

from pyrlstats.layout import Table

Tensor = torch.Tensor
BLOCK = 1024


@triton.jit(do_not_specialize=["n_integers", "n_sums"])
def pack_kernel(words_ptr, own_ptr, common_ptr, total_ptr, n_integers: tl.int32, n_sums: tl.int32,
                SUMS: tl.constexpr, MAXIMA: tl.constexpr, MAX_X: tl.constexpr,
                ONCE: tl.constexpr, TWICE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Words [n_integers + n_sums] to float64; own and common maxima [S, MAXIMA]; bits of the columns to be scaled."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + at, mask=at < n_integers + n_sums, other=0)
    value = tl.where(at < n_integers, word.to(tl.float64), word.to(tl.float64, bitcast=True))
    if MAX_X >= 0:
        is_sum = (at >= n_integers) & (at < n_integers + n_sums)
        cell = tl.where(is_sum, at - n_integers, 0)
        column = cell % SUMS
        max_x = (cell // SUMS) * MAXIMA + MAX_X
        own = far.scale_exponent(tl.load(own_ptr + max_x, mask=is_sum, other=0.0))
        common = far.scale_exponent(tl.load(common_ptr + max_x, mask=is_sum, other=0.0))
        factor = far.power_of_two(tl.minimum(own - common, 0.0))
        twice = ((TWICE >> column) & 1) != 0
        once = ((ONCE >> column) & 1) != 0
        factor = tl.where(twice, factor * factor, tl.where(once, factor, 1.0))
        value = tl.where(is_sum, value * factor, value)
    tl.store(total_ptr + at, value, mask=at < n_integers + n_sums)


@triton.jit(do_not_specialize=["n_integers", "n_sums", "n_maxima"])
def unpack_kernel(words_ptr, common_ptr, total_ptr, n_integers: tl.int32, n_sums: tl.int32, n_maxima: tl.int32,
                  BLOCK: tl.constexpr):  # fmt: skip
    """float64 [n_integers + n_sums] and [n_maxima] to words."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(total_ptr + at, mask=at < n_integers + n_sums, other=0.0)
    first = n_integers + n_sums
    greatest = tl.load(common_ptr + (at - first), mask=(at >= first) & (at < first + n_maxima), other=0.0)
    bits = tl.where(at < first, total, greatest).to(tl.int64, bitcast=True)
    whole = tl.where(at < n_integers, total, 0.0).to(tl.int64)
    tl.store(words_ptr + at, tl.where(at < n_integers, whole, bits), mask=at < first + n_maxima)


def pack_(words: Tensor, own: Tensor, common: Tensor, total: Tensor, n_integers: int, table: Table) -> None:
    """Fill ``total`` from a section's words, scaled sums brought from the own scale to the common one. No sync.

    Args:
        words: int64, a section of a state.
        own, common: float64 (S, len(table.maxima)), contiguous.
        total: float64, at least as long as the section without its maxima.
        n_integers: of the words, how many are counts.
        table: what the rows are.
    """
    slices = own.shape[0]
    n_sums = slices * len(table.sums)
    arguments = (words, own, common, total, n_integers, n_sums)
    _start(pack_kernel, arguments, n_integers + n_sums, table)


def unpack_(words: Tensor, common: Tensor, total: Tensor, n_integers: int, table: Table) -> None:
    """The reverse of :func:`pack_`, with the common maxima. No sync."""
    slices = common.shape[0]
    n_sums = slices * len(table.sums)
    arguments = (words, common, total, n_integers, n_sums, common.numel())
    _start(unpack_kernel, arguments, n_integers + n_sums + common.numel(), None)


def _start(kernel: Any, arguments: tuple[Any, ...], n: int, table: Table | None) -> None:
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    device = tensors[0].device
    if not interpreted(kernel) and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _start(kernel, arguments, n, table)
    key = (device, kernel, table, *[tensor.data_ptr() & 15 == 0 for tensor in tensors])
    launch_kernel(key, kernel, -(-n // BLOCK), arguments, lambda: constants(table), lambda: {"num_warps": 4})


def constants(table: Table | None) -> dict[str, int]:
    """The constexpr arguments: of pack_kernel for a table, of unpack_kernel for None."""
    if table is None:
        return {"BLOCK": BLOCK}
    powers = dict(table.scaled)
    bits = [sum(1 << i for i, name in enumerate(table.sums) if powers.get(name) == power) for power in (1, 2)]
    return {
        "SUMS": max(len(table.sums), 1), "MAXIMA": len(table.maxima),
        "MAX_X": table.maxima.index("max_x") if powers else -1,
        "ONCE": bits[0], "TWICE": bits[1], "BLOCK": BLOCK,
    }  # fmt: skip
