"""Radix selection: the tokens of one slice by the next digit of their key, inside intervals of keys.

Keys are those of backends/digits.py. Where few tokens of a tile lie in an interval, each adds one to its count in
memory; where many do, such as ties, they are counted on the SM first: all at one address, they would queue.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from pyrlstats.kernels import tile
from pyrlstats.kernels.start import Prepared, interpreted

Tensor = torch.Tensor
BLOCK = 4096
FEW = BLOCK // 32
PROGRAMS_A_MULTIPROCESSOR = 4


@triton.jit(do_not_specialize=["n", "intervals"])
def count_kernel(x_ptr, member_ptr, low_ptr, width_ptr, shift_ptr, counts_ptr, n: tl.int64, intervals: tl.int32,
                 ABSOLUTE: tl.constexpr, DIGITS: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """x float32 [n], members bytes [n], intervals int64 [Q] each; adds to counts int64 [Q, DIGITS]."""
    lane = tl.arange(0, BLOCK)
    bins = tl.arange(0, 2 * DIGITS)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        keep = start + lane < n
        bits = tl.load(x_ptr + start + lane, mask=keep, other=0.0).to(tl.int32, bitcast=True)
        member = keep & (tl.load(member_ptr + start + lane, mask=keep, other=0) != 0)
        key = bits & tile.ABS_BITS
        if not ABSOLUTE:
            key = tl.where(bits < 0, -key, key)
        for q in range(intervals):
            low = tl.load(low_ptr + q).to(tl.int32)
            width = tl.load(width_ptr + q).to(tl.uint32)
            shift = tl.load(shift_ptr + q).to(tl.uint32)
            above = (key - low).to(tl.uint32, bitcast=True)
            inside = member & (above < width)
            digit = (above >> shift).to(tl.int32)
            found = tl.sum(inside.to(tl.int32), axis=0)
            at = counts_ptr + q * DIGITS
            if found > FEW:
                # the others to a bin that no one reads, not by mask=, which miscounts on CUDA with Triton 3.6
                counted = tl.histogram(tl.where(inside, digit, 2 * DIGITS - 1), 2 * DIGITS).to(tl.int64)
                tl.atomic_add(at + bins, counted, mask=(bins < DIGITS) & (counted != 0), sem="relaxed")
            elif found > 0:
                tl.atomic_add(at + digit, tl.full((BLOCK,), 1, tl.int64), mask=inside, sem="relaxed")


@lru_cache
def _prepared(device: torch.device, absolute: bool, digits: int, aligned: tuple[bool, ...]) -> Prepared:
    constants = {"ABSOLUTE": absolute, "DIGITS": digits, "FEW": FEW, "BLOCK": BLOCK}
    return Prepared((device, count_kernel, absolute, digits, aligned), count_kernel, constants, {"num_warps": 8})


@lru_cache
def _programs_max(device: torch.device) -> int:
    if interpreted(count_kernel):
        return 2
    return PROGRAMS_A_MULTIPROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def count_(
    x: Tensor, member: Tensor, low: Tensor, width: Tensor, shift: Tensor, absolute: bool, counts: Tensor
) -> None:
    """Add the tokens of a slice to ``counts``, in place, on the current stream. Does not sync.

    Args:
        x: float32 (n,), contiguous.
        member: bool (n,).
        low, width, shift: int64 (Q,): keys [low, low + width), whose digit is (key - low) >> shift.
        absolute: keys of abs(x).
        counts: int64 (Q, digits), contiguous; digits a power of two.
    """
    if x.numel() == 0:
        return
    if not interpreted(count_kernel) and torch.cuda.current_device() != x.device.index:
        with torch.cuda.device(x.device):
            return count_(x, member, low, width, shift, absolute, counts)
    tensors = (x, member.contiguous().view(torch.uint8), low, width, shift, counts)
    aligned = tuple([tensor.data_ptr() & 15 == 0 for tensor in tensors])
    programs = min(-(-x.numel() // BLOCK), _programs_max(x.device))
    _prepared(x.device, absolute, counts.shape[1], aligned)(programs, *tensors, x.numel(), len(low))
