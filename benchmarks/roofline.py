"""The ceiling: reading the same bytes and reducing them to a number, in the same rounds as everybody else.

On a CPU the better of NumPy (a bitwise or of 64-bit words, chunks spread over threads) and torch (a 64-bit sum) is
the ceiling; on a GPU the best of torch (a 64-bit sum) and a Triton kernel that does nothing but read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from .inputs import Inputs

CHUNK = 1 << 17  # words: 1 MiB


@dataclass(frozen=True)
class Reader:
    """One way to read every byte of some inputs."""

    name: str
    threads: int | None  # None on a GPU
    read: Callable[[Inputs], Any]


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


def _numpy_one(given: Inputs) -> int:
    return max(int(np.bitwise_or.reduce(words.numpy())) for words in given.words)


def _numpy_many(count: int) -> Callable[[Inputs], int]:
    def read(given: Inputs) -> int:
        arrays = [words.numpy() for words in given.words]
        chunks = [array[start : start + CHUNK] for array in arrays for start in range(0, array.size, CHUNK)]
        if len(chunks) < 2 * count:
            return max(int(np.bitwise_or.reduce(array)) for array in arrays)

        def share(index: int) -> int:
            return max(int(np.bitwise_or.reduce(chunk)) for chunk in chunks[index::count])

        return max(_threads(count).map(share, range(count)))

    return read


def _torch(given: Inputs) -> list[torch.Tensor]:
    return [words.sum() for words in given.words]


def readers(device: str, threads: int) -> list[Reader]:
    """Every reader that runs here with so many threads (and, on a CPU, with one)."""
    if device == "cuda":
        from . import roofline_cuda

        return [Reader("read, torch", None, _torch), Reader("read, Triton", None, roofline_cuda.read)]
    found = [Reader("read, 1 thread (NumPy)", 1, _numpy_one)]
    if threads == 1:
        found.append(Reader("read, 1 thread (torch)", 1, _torch))
    else:
        found += [
            Reader(f"read, {threads} threads (NumPy)", threads, _numpy_many(threads)),
            Reader(f"read, {threads} threads (torch)", threads, _torch),
        ]
    return found
