"""Radix selection: how many tokens of a slice have which next digit of their key, inside an interval of keys.

The *key* of x orders as x does: the bits of float32 as an integer, negated where x < 0, and 0 for a zero of either
sign; or the bits of abs(x). Keys of finite x lie between -INF_BITS and INF_BITS, those of the others beyond.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pyrlstats import _dispatch
from pyrlstats._inputs import device_of
from pyrlstats.backends import flat
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import ABS_BITS, INF_BITS
from pyrlstats.state import Array, namespace

DIGIT_BITS = 11
DIGITS = 1 << DIGIT_BITS
_BEYOND = (1 << 31) - 1  # above every finite key


class Intervals(NamedTuple):
    """Keys [low, low + width) of Q intervals in each of S slices, int64 (S, Q) each; a width of 0 holds no token."""

    low: Array
    width: Array
    shift: Array  # the digit of a key is (key - low) >> shift, below DIGITS


def count(batch: Batch, intervals: Intervals, absolute: bool, num_threads: int | None = None) -> Array:
    """Tokens of every slice by digit, inside each of its intervals: int64 (S, Q, DIGITS). Does not sync on a GPU.

    One compiled pass on a CPU with the extension, one a slice with the GPU's kernels. Elsewhere every slice is
    sorted: 4 bytes a token, and what the sort takes.
    """
    name, backend = _dispatch.choose(device_of(batch.logp))
    if not has_kernel(name):
        return _from_sorted(batch, intervals, absolute)
    threads = {"num_threads": num_threads} if name == "cpp" else {}
    counts: Array = backend.count_digits(batch, intervals, absolute, **threads)
    return counts


def has_kernel(backend: str) -> bool:
    """Whether the backend of this name counts digits without sorting."""
    return backend in ("cpp", "triton")


def key_of(x: Array, absolute: bool) -> Array:
    """Keys, int32, of float32 x."""
    xp = namespace(x)
    bits = x.view(xp.int32)
    magnitude = bits & ABS_BITS
    return magnitude if absolute else xp.where(bits < 0, -magnitude, magnitude)


def value_of(key: Array) -> Array:
    """The x, float64, of finite keys; a zero is positive."""
    xp = namespace(key)
    magnitude = xp.asarray(xp.asarray(abs(key), dtype=xp.int32).view(xp.float32), dtype=xp.float64)
    return xp.where(key < 0, -magnitude, magnitude)


def at_ranks(batch: Batch, n: Array, rank: Array, absolute: bool) -> tuple[Array, Array]:
    """The tokens of these ranks, (S, Q) from 1, by sorting every slice once. Does not sync on a GPU.

    Returns:
        Their keys, int64 (S, Q), and whether a slice has n (S, 1) finite tokens, (S, 1).
    """
    xp = namespace(rank)
    keys, fits = [], []
    for index in range(len(rank)):
        ascending = _sorted(batch, index, absolute)
        ends = xp.searchsorted(ascending, _finite_range(ascending))
        place = xp.clip(ends[0] + rank[index] - 1, 0, None)
        keys.append(ascending[xp.clip(place, None, max(len(ascending) - 1, 0))] if len(ascending) else 0 * place)
        fits.append(ends[1] - ends[0] == n[index])
    return xp.asarray(xp.stack(keys), dtype=xp.int64), xp.stack(fits)


def _from_sorted(batch: Batch, intervals: Intervals, absolute: bool) -> Array:
    xp = namespace(intervals.low)
    digit = np.arange(DIGITS + 1) if xp is np else xp.arange(DIGITS + 1, device=intervals.low.device)
    counts = []
    for index in range(len(intervals.low)):
        low, width, shift = (field[index][:, None] for field in intervals)
        edges = low + xp.minimum(digit << shift, width)
        below = xp.searchsorted(
            _sorted(flat.on_host(batch) if xp is np else batch, index, absolute), xp.asarray(edges, dtype=xp.int32)
        )
        counts.append(below[:, 1:] - below[:, :-1])
    return xp.stack(counts)


def _sorted(batch: Batch, index: int, absolute: bool) -> Array:
    """Keys of one slice, int32 (n,), ascending, those of other tokens at the end."""
    key = key_of(flat.log_ratio(batch), absolute)
    xp = namespace(key)
    inside = xp.where(flat.members(batch, index), key, _BEYOND)
    return xp.sort(inside) if xp is np else xp.sort(inside).values


def _finite_range(like: Array) -> Array:
    """The first finite key and the one past the last, int32 (2,)."""
    xp = namespace(like)
    ends = xp.full((2,), INF_BITS, dtype=xp.int32) if xp is np else like.new_full((2,), INF_BITS)
    ends[:1] = 1 - INF_BITS  # a slice is filled on the device, an element is copied from the host
    return ends
