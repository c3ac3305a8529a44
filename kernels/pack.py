"""A section of a state to the float64 buffer that ranks add up, and back: one launch each way.

What state.rescale_ does to the scaled sums is done on the way out. As array operations it takes 20 launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from pyrlstats.kernels import far
from pyrlstats.kernels.start import Prepared, interpreted

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


class Section:
    """A section of a state and its places in the packed buffers, fixed for ever: what is launched is prepared once.

    Args:
        words: int64, a section of a state.
        own, common: float64 (S, len(table.maxima)), contiguous: this rank's maxima and those of all.
        total: float64 (n_integers + S len(table.sums),), what is added up.
        n_integers: of the words, how many are counts.
        table: what the rows are.
    """

    def __init__(
        self, words: Tensor, own: Tensor, common: Tensor, total: Tensor, n_integers: int, table: Table
    ) -> None:
        self._device = words.device
        n_sums = own.shape[0] * len(table.sums)
        arguments = (words, own, common, total, n_integers, n_sums)
        self._pack = _Fixed(pack_kernel, arguments, n_integers + n_sums, table)
        arguments = (words, common, total, n_integers, n_sums, common.numel())
        self._unpack = _Fixed(unpack_kernel, arguments, n_integers + n_sums + common.numel(), None)

    def pack(self) -> None:
        """Fill ``total``, the scaled sums brought from the own scale to the common one. Does not sync."""
        self._on_device(self._pack)

    def unpack(self) -> None:
        """The reverse, with the common maxima. Does not sync."""
        self._on_device(self._unpack)

    def _on_device(self, launch: Callable[[], None]) -> None:
        if interpreted(pack_kernel) or torch.cuda.current_device() == self._device.index:
            launch()
            return
        with torch.cuda.device(self._device):
            launch()


class _Fixed:
    """One launch with the same arguments for ever."""

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], n: int, table: Table | None) -> None:
        aligned = [argument.data_ptr() & 15 == 0 for argument in arguments if isinstance(argument, Tensor)]
        key = (arguments[0].device, kernel, table, *aligned)
        self._launch = Prepared(key, kernel, constants(table), {"num_warps": 4})
        self._arguments, self._programs = arguments, -(-n // BLOCK)

    def __call__(self) -> None:
        if self._programs:
            self._launch(self._programs, *self._arguments)


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
