"""Whole sequences: sums of x, logp and old_logp over the tokens that a slice has in each of them."""

from __future__ import annotations

import numpy as np

from pyrlstats._sequences import arange
from pyrlstats.backends.batch import Batch
from pyrlstats.backends.tokens import as_dtype, blocks
from pyrlstats.state import Array, State, namespace


def sums(batch: Batch, slices: int) -> Array:
    """Sums over each sequence of 1, x, logp and old_logp: float64 (4, S, sequences), NaN and infinities too."""
    boundaries: Array = batch.boundaries
    xp = namespace(boundaries)
    shape = (4, slices, boundaries.shape[0] - 1)
    result: Array = np.zeros(shape) if xp is np else boundaries.new_zeros(shape, dtype=xp.float64)
    for block in blocks(batch, slices):
        ends = xp.clip(boundaries, block.start, block.stop) - block.start
        members = block.members
        result[0] += _segment_sums(as_dtype(members, xp.float64), ends)
        for row, values in enumerate((block.log_ratio(), block.logp, block.old_logp), 1):
            result[row] += _segment_sums(xp.where(members, as_dtype(values, xp.float64), 0.0), ends)
    return result


def quantities(sums: Array) -> tuple[list[Array], Array, Array]:
    """One value a slice and sequence, in the order of ``options.SEQUENCE_QUANTITIES``.

    Returns:
        The values, float64 (S x sequences,) each; the slice of each, or -1 where the sequence has no token of it;
        and int64 (S,), how many of those there are. A sequence with a NaN or infinite token has such a value.
    """
    xp = namespace(sums)
    n, x, logp, old_logp = sums
    index = arange(n.shape[0], n)
    ids = xp.where(n > 0, index[:, None], -1)
    values = [x, x / n, -logp / n, -old_logp / n, -x / n]
    return [value.reshape(-1) for value in values], ids.reshape(-1), (n == 0).sum(-1)


def _segment_sums(values: Array, ends: Array) -> Array:
    """Sums of values (S, n) between consecutive ends (sequences + 1,), in [0, n]: (S, sequences), in fixed order."""
    slices, n = values.shape
    if isinstance(values, np.ndarray):
        padded = np.concatenate((values, np.zeros((slices, 1))), 1)
        sums: Array = np.add.reduceat(padded, ends[:-1], axis=1) if ends.size > 1 else np.zeros((slices, 0))
        # reduceat runs to the next start: the last one to its end, and an empty segment is not empty
        if ends.size > 1 and ends[-1] < n:
            sums[:, -1] = padded[:, ends[-2] : ends[-1]].sum(-1)
        sums[:, np.diff(ends) == 0] = 0.0
        return sums
    import torch

    starts = torch.arange(slices, device=values.device)[:, None] * n
    every = (ends + starts).reshape(slices, -1)
    # between the last end of a slice and the first of the next lie tokens of no sequence: a segment, dropped below
    offsets = torch.cat((every.reshape(-1), every.new_full((1,), slices * n)))
    lengths = torch.diff(offsets, prepend=offsets.new_zeros(1))
    segments = torch.segment_reduce(values.reshape(-1), "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
    # segment 0 of a slice lies before its first boundary
    return segments[:-1].reshape(slices, -1)[:, 1:]


def n_sequences_empty(state: State) -> Array:
    """Sequences without a token of the slice: excluded from everything else."""
    return state.group("sequences").count("n_empty")
