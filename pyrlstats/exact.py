"""Exact quantiles: a second pass over the tokens, for when the bounds of a bin are not enough.

The histogram of a state says which bin holds a quantile's rank. A radix selection inside that bin finds the token
itself: integers are counted and compared, so the answer is that of a sort, to the bit, for any tokens, any number of
them and any number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats import _dispatch
from pyrlstats._inputs import Masks, as_ids, device_of, gate, resolve_names
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.backends import digits, flat
from pyrlstats.backends.batch import Batch
from pyrlstats.backends.digits import DIGIT_BITS, DIGITS, Intervals
from pyrlstats.cells import Numbers, abs_cells, first_at_least, on_device_of, probabilities, signed_cells, take
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import Array, State, namespace

if TYPE_CHECKING:
    from pyrlstats._ranks import Ranks

_KEY_BITS = 31  # of the widest interval
_ROUNDS = -(-_KEY_BITS // DIGIT_BITS)
_SORTED_TOKENS = 1 << 25  # 4 slices of 8M tokens on an H200: 4.0 ms sorted, 5.0 ms by digits
_DEFAULT_LAYOUT = Layout()


def exact_quantiles(
    logp: Any,
    old_logp: Any,
    masks: Masks,
    q: Numbers,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
    absolute: bool = False,
    stats: SliceStats | None = None,
    group: Any = None,
    num_threads: int | None = None,
) -> dict[str, Array]:
    """Quantiles of the log-ratio of every slice, exact to the bit: the token of rank max(1, ceil(q n_finite)).

    As ``slice_stats(...)[name].quantile(q)`` (with ``absolute``: ``abs_quantile``), without interpolation: always the
    log-ratio of a token, so right for tokens on a lattice too. Two to four passes over the tokens on a CPU; on other
    devices every slice is sorted once (with ``group`` three times), in memory of its own of about 20 bytes a token.

    Args:
        logp, old_logp, masks, slice_ids, names, mask, num_threads: as for :func:`pyrlstats.slice_stats`.
        q: a number or a sequence in [0, 1].
        absolute: of abs(x).
        stats: the statistics of these tokens, of any layout: saves a pass. With ``group``, those of all ranks.
        group: a ``torch.distributed`` process group over whose ranks' tokens, together, quantiles are taken; every
            rank calls with the same slices and q. Costs three SUM collectives of 16 KB for every slice and q, and
            without ``stats`` those of ``SliceAccumulator.all_reduce``. The first call of a kind syncs. None: this
            process alone; ``torch.distributed.group.WORLD`` is everyone.

    Returns:
        Slice name -> float64 on the inputs' device, nats, 0-d for a number and (len(q),) for a sequence; NaN for a
        slice without finite tokens. A zero is 0.0, of whatever sign. Does not sync on a GPU.

    Raises:
        TypeError, ValueError: as :func:`pyrlstats.slice_stats`; a q outside [0, 1]; ``stats`` of other slices, or
            of other tokens in the bins that hold the quantiles (on a GPU the latter gives NaN, since an error would
            sync); ranks that differ in what they ask.
    """
    masks, slice_ids, names = as_ids(masks, slice_ids, names)
    known = resolve_names(masks, slice_ids, names)
    batch = gate(logp, old_logp, masks, slice_ids, mask, known)
    if stats is not None and not isinstance(stats, SliceStats):
        raise TypeError(f"stats must be SliceStats, got {type(stats).__name__}")
    state = None if stats is None else stats.state
    return select(batch, known, q, absolute, state, group, num_threads, _DEFAULT_LAYOUT)


def select(
    batch: Batch,
    names: tuple[str, ...],
    q: Numbers,
    absolute: bool,
    state: State | None,
    group: Any,
    num_threads: int | None,
    layout: Layout,
) -> dict[str, Array]:
    """The quantiles of a batch that has passed the gate; ``layout`` is that of the first pass, without ``state``."""
    values, scalar = probabilities(q)
    if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
        raise ValueError(f"num_threads must be a positive integer or None, got {num_threads!r}")
    device = device_of(batch.logp)
    if state is not None:
        if state.names != names:
            raise ValueError(f"stats must have the slices {list(names)}, got {list(state.names)}")
        if type(state) is not State:
            raise TypeError("stats must count tokens: the counts of decayed statistics are weighted")
    ranks = None
    if group is not None:
        from pyrlstats._ranks import Ranks

        request = {"slices": str(list(names)), "q": str(values), "absolute": str(absolute)}
        request["first pass"] = str(layout if state is None else f"given, {state.layout}")
        ranks = Ranks(group, request, device)
    if state is None:
        state = _counted(batch, names, layout, group, num_threads)
    found = _values(batch, _beside(batch, state), values, absolute, ranks, num_threads)
    if isinstance(found, np.ndarray) and device is not None:
        import torch

        found = torch.from_numpy(found)
    return {name: row[0] if scalar else row for name, row in zip(names, found, strict=True)}


def _beside(batch: Batch, state: State) -> State:
    """The state where its numbers are worked on: in NumPy memory for CPU tensors too, since they are few."""
    if flat.in_host_memory(batch.logp):
        return state.to_host()
    return SliceStats(state).to(device_of(batch.logp)).state


def _counted(batch: Batch, names: tuple[str, ...], layout: Layout, group: Any, num_threads: int | None) -> State:
    """The first pass, over the tokens of all ranks."""
    state = State.empty(names, layout, (0.2, 0.2), device_of(batch.logp))
    _dispatch.accumulate(batch, state, num_threads)
    if group is None:
        return state
    accumulator = SliceAccumulator(names, layout=layout, device=device_of(batch.logp))
    pooled: State = accumulator.merge(SliceStats(state)).all_reduce(group).compute().state
    return pooled


def from_the_top(batch: Batch, slices: int, k: int, absolute: bool) -> Array:
    """The k-th largest x (or abs(x)) of every slice, or the smallest of fewer: float64 (S,), NaN for an empty slice."""
    state = State.empty([str(index) for index in range(slices)], _DEFAULT_LAYOUT, (0.2, 0.2), device_of(batch.logp))
    _dispatch.accumulate(batch, state)
    state = _beside(batch, state)
    return _at_ranks(batch, state, state.n_finite()[:, None] - (k - 1), absolute, None, None)[:, 0]


def _values(
    batch: Batch, state: State, q: list[float], absolute: bool, ranks: Ranks | None, num_threads: int | None
) -> Array:
    """float64 (S, len(q))."""
    n = state.n_finite()[:, None]
    rank = _integers(namespace(n).ceil(on_device_of(n, q) * n))
    return _at_ranks(batch, state, rank, absolute, ranks, num_threads)


def _at_ranks(
    batch: Batch, state: State, rank: Array, absolute: bool, ranks: Ranks | None, num_threads: int | None
) -> Array:
    """The tokens of these ranks, int64 (S, Q), from 1, in ascending order; smaller ranks count as 1."""
    rank = namespace(rank).clip(rank, 1, None)
    if ranks is None and not isinstance(rank, np.ndarray) and _sorts(batch, len(rank)):
        n = state.n_finite()[:, None]
        key, fits = digits.at_ranks(batch, n, rank, absolute)
        return namespace(rank).where(fits & (n > 0), digits.value_of(key), float("nan"))
    return _by_digits(batch, state, rank, absolute, ranks, num_threads)


def _sorts(batch: Batch, slices: int) -> bool:
    """Whether a device sorts every slice: without a kernel, and where the rounds' many small kernels take longer."""
    has_kernel = digits.has_kernel(_dispatch.choose(device_of(batch.logp))[0])
    return not has_kernel or slices * batch.logp.numel() <= _SORTED_TOKENS


def _by_digits(
    batch: Batch, state: State, rank: Array, absolute: bool, ranks: Ranks | None, num_threads: int | None
) -> Array:
    """The same in rounds, of the tokens of all ranks."""
    cells = abs_cells(state) if absolute else signed_cells(state)
    xp = namespace(cells.counts)
    cumulative = xp.cumsum(cells.counts, -1)
    n = cumulative[:, -1:]
    # past the end only where n is 0
    cell = xp.clip(first_at_least(cumulative, rank), 0, cumulative.shape[-1] - 1)
    holds = take(cells.counts, cell)
    rank = rank - (take(cumulative, cell) - holds)
    edges, bits_of = _keys(state.layout, cells.signed)
    edge = _integers(on_device_of(n, edges))
    low, width, bits = edge[cell], edge[cell + 1] - edge[cell], _integers(on_device_of(n, bits_of))[cell]
    fits = (n > 0) & (rank > 0)
    for _ in range(_ROUNDS):
        wide = fits & (width > 1)
        if ranks is None and xp is np and not wide.any():
            break
        shift = xp.clip(bits - DIGIT_BITS, 0, None)
        counts = digits.count(batch, Intervals(low, xp.where(wide, width, 0), shift), absolute, num_threads)
        if ranks is not None:
            counts = ranks.sum(counts)
        rows = counts.reshape(-1, DIGITS)
        ascending = xp.cumsum(rows, -1)
        digit = xp.clip(first_at_least(ascending, rank.reshape(-1, 1)), 0, DIGITS - 1)
        inside = take(rows, digit).reshape(rank.shape)
        before = take(ascending, digit).reshape(rank.shape) - inside
        fits = fits & (~wide | (ascending[:, -1].reshape(rank.shape) == holds))
        step = xp.where(wide, digit.reshape(rank.shape) << shift, 0)
        low = low + step
        width = xp.minimum(width - step, xp.ones_like(shift) << shift)
        rank, holds, bits = xp.where(wide, rank - before, rank), xp.where(wide, inside, holds), shift
    if xp is np and (~fits & (n > 0)).any():
        raise ValueError("stats must be those of these tokens (with group, of the tokens of all ranks), got others")
    return xp.where(fits, digits.value_of(low), float("nan"))


@functools.lru_cache(maxsize=16)
def _keys(layout: Layout, signed: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Keys at which the cells begin, (cells + 1,) with the end of the last; and how many bits tell a cell's keys apart.

    Whole numbers; float64 because that is what is uploaded.
    """
    from_zero = np.array(layout.abs_edges, dtype=np.float32).view(np.int32).astype(np.int64)
    from_zero[0] = 1  # the first bin begins above the zeros
    edges = np.concatenate((1 - from_zero[:0:-1], [0], from_zero) if signed else ([0], from_zero))
    bits = [int(width - 1).bit_length() for width in np.diff(edges)]
    return edges.astype(np.float64), np.array(bits, dtype=np.float64)


def _integers(values: Array) -> Array:
    xp = namespace(values)
    return xp.asarray(values, dtype=xp.int64)


__all__ = ["exact_quantiles"]
