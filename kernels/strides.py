"""Dimensions of tensors of one shape, as few as their strides allow."""

from __future__ import annotations

from collections.abc import Iterable

import torch

MAX_COLUMNS = 1 << 30  # 32-bit arithmetic inside a tile


def merged(tensors: list[torch.Tensor], order: Iterable[int]) -> list[tuple[int, list[int]]]:
    """(size, stride in every tensor) of the dimensions in this order, without those of size 1."""
    dims: list[tuple[int, list[int]]] = []
    for d in order:
        size, strides = tensors[0].shape[d], [tensor.stride(d) for tensor in tensors]
        if size == 1:
            continue
        if dims and all(outer == inner * size for outer, inner in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    return dims
