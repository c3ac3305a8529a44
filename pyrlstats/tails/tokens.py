"""``top_tokens``: where the largest abs(x) are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pyrlstats._inputs import Masks, as_ids, device_of, gate, resolve_names
from pyrlstats._sequences import _boundaries, arange
from pyrlstats.backends import flat
from pyrlstats.backends.batch import Batch
from pyrlstats.backends.digits import key_of
from pyrlstats.cells import on_device_of, take
from pyrlstats.exact import from_the_top
from pyrlstats.state import Array, namespace

_BLOCK = 1 << 32  # tokens whose places fit beside abs(x) in 63 bits


class TopTokens(NamedTuple):
    """The tokens with the largest abs(x) of one slice, largest first; (k,) each. -1 and NaN where there are fewer.

    Attributes:
        value: float64, x in nats, with its sign.
        index: int64, in the flattened batch of its rank.
        sequence: int64, row of the batch, or number of the packed sequence.
        position: int64, in that sequence, from 0.
        rank: int64, global rank whose batch it is in; 0 without a group.
    """

    value: Array
    index: Array
    sequence: Array
    position: Array
    rank: Array

    def rows(self) -> list[dict[str, Any]]:
        """The tokens there are, as dictionaries of Python numbers. Copies to the host."""
        columns = [column.tolist() for column in self]
        rows = [dict(zip(self._fields, row, strict=True)) for row in zip(*columns, strict=True)]
        return [row for row in rows if row["index"] >= 0]


def top_tokens(
    logp: Any,
    old_logp: Any,
    masks: Masks = None,
    k: int = 10,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
    cu_seqlens: Any = None,
    group: Any = None,
) -> dict[str, TopTokens]:
    """The k tokens of every slice whose log-ratio has the largest magnitude, so that a person can go and read them.

    Of equal magnitudes the one with the smaller rank comes first, then the one with the smaller index: the same tokens
    in the same order on every device. NaN and infinite x are excluded; a zero is no exception.

    Args:
        logp, old_logp, masks, slice_ids, names, mask: as for :func:`pyrlstats.slice_stats`. The last axis is one
            sequence, all before it number the sequences.
        k: tokens a slice.
        cu_seqlens: boundaries ``[0, n_1, n_1 + n_2, ...]`` of a packed batch ``[N]`` or ``[1, N]``: a tensor, an array
            or a list. Tokens beyond the last one are a sequence of their own.
        group: a ``torch.distributed`` process group among whose ranks' tokens, together, they are looked for; every
            rank gets all. One gather of (S, k, 4) integers. None: this process alone.

    Returns:
        Slice -> :class:`TopTokens`, on the inputs' device. Does not sync on a GPU, but for the first call on
        a group.

    Raises:
        TypeError, ValueError: as :func:`pyrlstats.slice_stats`; a k below 1; cu_seqlens for another layout; ranks that
            differ in slices or k.
    """
    masks, slice_ids, names = as_ids(masks, slice_ids, names)
    known = resolve_names(masks, slice_ids, names)
    batch = gate(logp, old_logp, masks, slice_ids, mask, known)
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}")
    value, index = _top(batch, len(known), k)
    sequence, position = _places(index, tuple(batch.logp.shape), cu_seqlens)
    rank = namespace(index).zeros_like(index)
    if group is not None:
        from pyrlstats._ranks import Ranks

        ranks = Ranks(group, {"slices": str(list(known)), "k": str(k)}, device_of(index))
        value, index, sequence, position, rank = _pooled(ranks, k, value, index, sequence, position)
    present = index >= 0
    rank = namespace(index).where(present, rank, -1)
    columns = (value, index, sequence, position, rank)
    return {name: TopTokens(*(column[row] for column in columns)) for row, name in enumerate(known)}


def _top(batch: Batch, slices: int, k: int) -> tuple[Array, Array]:
    """x, float64, and flat index of the top tokens, (S, k) each; NaN and -1 where there are fewer."""
    if isinstance(batch.logp, np.ndarray):
        return _top_on_host(batch, batch, slices, k)
    import torch

    if flat.in_host_memory(batch.logp):
        value, index = _top_on_host(batch, flat.on_host(batch), slices, k)
        return torch.from_numpy(value), torch.from_numpy(index)
    x = flat.log_ratio(batch)
    magnitude, finite = key_of(x, absolute=True), torch.isfinite(x)
    rows = [
        _first_of_largest(torch.where(flat.members(batch, one) & finite, magnitude, -1), k) for one in range(slices)
    ]
    index = torch.stack(rows)
    padded = x if x.shape[0] else x.new_zeros(1)
    return torch.where(index >= 0, padded[index.clip(0)].to(torch.float64), float("nan")), index


def _top_on_host(batch: Batch, tokens: Batch, slices: int, k: int) -> tuple[Array, Array]:
    """The same in NumPy memory, where ``tokens`` are; an exact threshold leaves few of them to sort."""
    x = flat.log_ratio(tokens)
    least = np.asarray(from_the_top(batch, slices, k, absolute=True), dtype=np.float32)
    magnitude, finite = np.abs(x), np.isfinite(x)
    value, found = np.full((slices, k), np.nan), np.full((slices, k), -1, np.int64)
    for one in range(slices):
        inside = flat.members(tokens, one) & finite
        above = np.flatnonzero(inside & (magnitude > least[one]))
        tied = np.flatnonzero(inside & (magnitude == least[one]))[: k - above.size]
        index = np.concatenate((above[np.argsort(-magnitude[above], kind="stable")], tied))
        found[one, : index.size], value[one, : index.size] = index, x[index]
    return value, found


def _first_of_largest(magnitude: Array, k: int) -> Array:
    """Where the k largest non-negative magnitudes are, the first of equal ones first: int64 (k,), -1 beyond.

    Magnitude and place make one integer, so that nothing ties and nothing syncs.
    """
    import torch

    blocks: list[tuple[Array, Array]] = []
    for start in range(0, magnitude.shape[0], _BLOCK):
        part = magnitude[start : start + _BLOCK]
        place = torch.arange(part.shape[0], device=part.device)
        key = torch.where(part >= 0, (part.to(torch.int64) << 32) | ((1 << 32) - 1 - place), -1)
        top = key.topk(min(k, part.shape[0])).values
        index = start + ((1 << 32) - 1 - (top & ((1 << 32) - 1)))
        blocks.append((top >> 32, torch.where(top >= 0, index, -1)))
    if not blocks:
        return torch.full((k,), -1, device=magnitude.device)
    size, index = (torch.cat(column) for column in zip(*blocks, strict=True))
    order = size.sort(descending=True, stable=True).indices[:k]  # earlier blocks first
    return torch.nn.functional.pad(index[order], (0, k - order.shape[0]), value=-1)


def _places(index: Array, shape: tuple[int, ...], cu_seqlens: Any) -> tuple[Array, Array]:
    """Sequence and position of flat indices; -1 for an index of -1."""
    xp = namespace(index)
    if cu_seqlens is None:
        length = max(shape[-1] if shape else 1, 1)
        sequence, position = index // length, index % length
    else:
        n = shape[-1] if shape else 0
        if shape not in ((n,), (1, n)):
            raise ValueError(f"cu_seqlens needs packed tokens of shape [N] or [1, N], got {shape}")
        boundaries = _boundaries(cu_seqlens, index)
        if boundaries.ndim != 1 or boundaries.shape[0] < 1:
            raise ValueError(f"cu_seqlens must be one-dimensional, got shape {tuple(boundaries.shape)}")
        if xp is np:
            sequence = np.searchsorted(boundaries, index, side="right") - 1
        else:
            sequence = xp.searchsorted(boundaries, index.contiguous(), right=True) - 1
        position = index - boundaries[xp.clip(sequence, 0, None)]
    present = index >= 0
    return xp.where(present, sequence, -1), xp.where(present, position, -1)


def _pooled(ranks: Any, k: int, *columns: Array) -> list[Array]:
    """The top tokens of all ranks: value, index, sequence, position and rank, (S, k) each."""
    value = columns[0]
    xp = namespace(value)
    packed = xp.stack((value.view(xp.int64), *columns[1:]), -1)
    everyone = ranks.gather(packed)  # (W, S, k, 4)
    joined = xp.concatenate(list(everyone), 1)  # in the order of the ranks, each in its own order
    values = joined[..., 0].view(xp.float64) if xp is not np else np.ascontiguousarray(joined[..., 0]).view(np.float64)
    size = xp.where(joined[..., 1] >= 0, abs(values), -1.0)
    order = (
        np.argsort(-size, -1, kind="stable") if xp is np else size.sort(dim=-1, descending=True, stable=True).indices
    )
    order = order[:, :k]
    numbers = xp.asarray(on_device_of(value, [float(rank) for rank in ranks.global_ranks()]), dtype=xp.int64)
    rank = take(xp.broadcast_to(numbers[arange(ranks.size * k, value) // k], size.shape), order)
    return [take(values, order), *(take(joined[..., column], order) for column in (1, 2, 3)), rank]
