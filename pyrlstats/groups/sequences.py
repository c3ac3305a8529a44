"""Whole sequences: sums of x, logp and old_logp over the tokens that a slice has in each of them."""

from __future__ import annotations

import numpy as np

from pyrlstats.backends.batch import Batch
from pyrlstats.backends.tokens import as_dtype, blocks
from pyrlstats.state import Array, State, namespace


def quantities(batch: Batch, slices: int) -> tuple[list[Array], Array, Array]:
    """One value a slice and sequence, in the order of ``options.SEQUENCE_QUANTITIES``.

    Returns:
        The values, float64 (S x sequences,) each; the slice of each, or -1 where the sequence has no token of it;
        and int64 (S,), how many of those there are. A sequence with a NaN or infinite token has such a value.
    """
    boundaries: Array = batch.boundaries
    xp = namespace(boundaries)
    shape = (slices, boundaries.shape[0] - 1)
    zeros = np.zeros(shape) if xp is np else boundaries.new_zeros(shape, dtype=xp.float64)
    n, x_sum, logp_sum, old_sum = zeros, zeros, zeros, zeros
    for block in blocks(batch, slices):
        ends = xp.clip(boundaries, block.start, block.stop) - block.start
        members = block.members
        n = n + _segment_sums(as_dtype(members, xp.float64), ends)
        x_sum = x_sum + _segment_sums(xp.where(members, as_dtype(block.log_ratio(), xp.float64), 0.0), ends)
        logp_sum = logp_sum + _segment_sums(xp.where(members, as_dtype(block.logp, xp.float64), 0.0), ends)
        old_sum = old_sum + _segment_sums(xp.where(members, as_dtype(block.old_logp, xp.float64), 0.0), ends)
    index = np.arange(slices) if xp is np else xp.arange(slices, device=boundaries.device)
    ids = xp.where(n > 0, index[:, None], -1)
    mean = x_sum / n
    values = [x_sum, mean, -logp_sum / n, -old_sum / n, -mean]
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
