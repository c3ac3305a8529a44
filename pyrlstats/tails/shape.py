"""``tail_shape``: the largest log-ratios of every slice, mergeable, and the estimators of the tail of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pyrlstats._inputs import Masks, as_ids, device_of, gate, resolve_names
from pyrlstats.backends import flat
from pyrlstats.backends.batch import Batch
from pyrlstats.exact import from_the_top
from pyrlstats.state import Array, namespace
from pyrlstats.tails import pareto
from pyrlstats.tails.pareto import REASONS, Fit, tail_sizes


class TailView:
    """The tail of one slice, as 0-d values on the tokens' device. Reading one does not sync, but ``reason`` does."""

    __slots__ = ("_index", "_shape")

    def __init__(self, shape: TailShape, index: int) -> None:
        self._shape = shape
        self._index = index

    @property
    def pareto_k(self) -> Array:
        """Shape of the generalized Pareto distribution that fits the exceedances of w = exp(x) over the cutoff.

        Moments of w from order 1 / k on do not exist. Below 0.5 importance-weighted means behave as usual; up to
        ``k_threshold(n)`` = min(1 - 1 / log10(n), 0.7) they still converge, slowly; above, no sample size in reach
        helps. NaN where it is undefined: see ``reason``.
        """
        return self._shape.pareto_k[self._index]

    @property
    def reason(self) -> str:
        """Why ``pareto_k`` is NaN, one of ``REASONS``; "" where it is not. Copies one number to the host."""
        return REASONS[int(self._shape.reason_codes[self._index])]

    @property
    def hill(self) -> Array:
        """Hill's estimate of the tail index of w: mean x of the tail minus x at the cutoff, nats; NaN as undefined.

        The estimate of k of weights whose tail is a pure power law; positive by construction, also for light tails.
        """
        return self._shape.hill[self._index]

    @property
    def hill_se(self) -> Array:
        """Standard error of ``hill`` for independent tokens: hill / sqrt(tokens of the tail)."""
        return self._shape.hill_se[self._index]

    @property
    def n_tail(self) -> Array:
        """Tokens strictly above the cutoff: int64; less than the tail's size where tokens tie with it."""
        return self._shape.n_tail[self._index]

    @property
    def n_finite(self) -> Array:
        """Tokens of the slice with finite x: int64."""
        return self._shape.n[self._index]

    @property
    def cutoff(self) -> Array:
        """The x that the tail lies above, nats."""
        return self._shape.cutoff[self._index]

    @property
    def largest(self) -> Array:
        """The largest x of the slice, float32 (capacity,), descending, nats; -inf where there are fewer."""
        return self._shape.largest[self._index]


@dataclass(frozen=True, eq=False)
class TailShape(Mapping[str, TailView]):
    """The largest log-ratios of every slice and what they say of the tail; mergeable. Equal only to itself.

    Attributes:
        names: the slices, in order.
        largest: float32 (S, C), the C largest finite x of each, descending, nats; -inf where there are fewer.
        n: int64 (S,), tokens with finite x.
        sample_size: of the samples whose tail is looked at, or None.
    """

    names: tuple[str, ...]
    largest: Array
    n: Array
    sample_size: int | None = None

    def __getitem__(self, name: str) -> TailView:
        try:
            return TailView(self, self.names.index(name))
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @property
    def capacity(self) -> int:
        """C."""
        return int(self.largest.shape[1])

    @cached_property
    def _fit(self) -> Fit:
        largest, n = self.largest, self.n
        in_numpy = flat.in_host_memory(n)
        if in_numpy:  # the same digits for arrays and CPU tensors
            largest, n = np.asarray(largest), np.asarray(n)
        with np.errstate(all="ignore"):  # empty slices
            found = pareto.fit(largest, n, tail_sizes(n, self.sample_size))
        if in_numpy and not isinstance(self.n, np.ndarray):
            import torch

            return Fit(*(torch.from_numpy(column) for column in found))
        return found

    @property
    def pareto_k(self) -> Array:
        """float64 (S,): :attr:`TailView.pareto_k`."""
        return self._fit.k

    @property
    def reason_codes(self) -> Array:
        """int64 (S,): why pareto_k is NaN, as index into ``REASONS``; 0 where it is not."""
        return self._fit.reason

    @property
    def hill(self) -> Array:
        """float64 (S,): :attr:`TailView.hill`."""
        return self._fit.hill

    @property
    def hill_se(self) -> Array:
        """float64 (S,): :attr:`TailView.hill_se`."""
        return self._fit.hill_se

    @property
    def n_tail(self) -> Array:
        """int64 (S,): :attr:`TailView.n_tail`."""
        return self._fit.n_tail

    @property
    def cutoff(self) -> Array:
        """float64 (S,): :attr:`TailView.cutoff`."""
        return self._fit.cutoff

    def reasons(self) -> dict[str, str]:
        """Slice -> why its pareto_k is NaN, one of ``REASONS``; only slices where it is. Syncs on a GPU."""
        return {name: REASONS[code] for name, code in zip(self.names, self.reason_codes.tolist(), strict=True) if code}

    def merge(self, other: TailShape) -> TailShape:
        """The same of the tokens of both, exactly. Does not sync.

        Raises:
            TypeError: something else than a TailShape.
            ValueError: other slices, capacity, sample size or device.
        """
        if not isinstance(other, TailShape):
            raise TypeError(f"merge takes TailShape, got {type(other).__name__}")
        for field in ("names", "capacity", "sample_size"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise ValueError(
                    f"tails with different {field} cannot be merged: {mine} and {theirs}; give both {field}="
                )
        if device_of(self.n) != device_of(other.n):
            raise ValueError(f"tails on {device_of(self.n)} and {device_of(other.n)} cannot be merged")
        both = namespace(self.n).concatenate((self.largest, other.largest), -1)
        return replace(self, largest=_top(both, self.capacity), n=self.n + other.n)

    def __add__(self, other: object) -> TailShape:
        return self.merge(other) if isinstance(other, TailShape) else NotImplemented

    def __radd__(self, other: object) -> TailShape:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum() starts at 0

    def all_reduce(self, group: Any = None) -> TailShape:
        """The same of the tokens of all ranks, on every rank, exactly: one gather of (S, C) floats and one SUM.

        Args:
            group: as for ``SliceAccumulator.all_reduce``. The first call on a group with these slices and capacity
                compares them, which syncs; later calls do not.

        Raises:
            ValueError: slices, capacity or sample size that differ between ranks; the same error on every rank.
        """
        from pyrlstats._ranks import Ranks

        request = {
            "slices": str(list(self.names)),
            "capacity": str(self.capacity),
            "sample_size": str(self.sample_size),
        }
        ranks = Ranks(group, request, device_of(self.n))
        xp = namespace(self.n)
        everyone = ranks.gather(self.largest)
        joined = xp.concatenate(list(everyone), -1)
        return replace(self, largest=_top(joined, self.capacity), n=ranks.sum(self.n))

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """pareto_k, hill, hill_se, n_tail and cutoff of every slice as Python numbers, for a logger. Syncs on a GPU.

        Returns:
            ``{prefix + slice + "/" + figure: value}``; NaN where undefined. The same keys at every step.
        """
        figures = ("pareto_k", "hill", "hill_se", "n_tail", "cutoff")
        columns = {figure: getattr(self, figure).tolist() for figure in figures}
        return {
            f"{prefix}{name}/{'tail_cutoff' if figure == 'cutoff' else figure}": columns[figure][index]
            for index, name in enumerate(self.names)
            for figure in figures
        }

    def __repr__(self) -> str:
        return f"TailShape({self.to_dict()}, undefined {self.reasons()})"


def tail_shape(
    logp: Any,
    old_logp: Any,
    masks: Masks = None,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
    capacity: int | None = None,
    sample_size: int | None = None,
    group: Any = None,
) -> TailShape:
    """How heavy the right tail of the importance weights w = exp(x) is, slice by slice: Pareto k-hat, Hill's estimator.

    The tail of a slice of n tokens with finite x are the min(n / 5, 3 sqrt(n)) largest, rounded up, and of those the
    ones strictly above the next one: a tie with the cutoff is outside. NaN and infinite x are excluded;
    ``slice_stats`` counts them.

    k-hat grows with n for most distributions (log-ratios with tails of a power law have weights without any tail
    index), and its standard deviation is about 0.08 at n = 1e4 and 0.03 at n = 1e6. So compare k-hat only at one n:
    ``sample_size=n`` looks at the same share of the tokens as the tail of n tokens has, whatever the step or slice.

    Args:
        logp, old_logp, masks, slice_ids, names, mask: as for :func:`pyrlstats.slice_stats`.
        capacity: largest x kept a slice. None keeps what the tail of all these tokens (of all ranks) needs. What is to
            be merged needs the same: that of the whole step, ``tail_size(tokens) + 1`` (with ``sample_size`` it is
            ``ceil(tokens * tail_size(sample_size) / sample_size) + 1``); k-hat is NaN with the reason "capacity" where
            it turns out too small.
        sample_size: see above.
        group: a ``torch.distributed`` process group over whose ranks' tokens, together, the tail is taken;
            None: this process alone. Without ``capacity`` the ranks first add up their tokens, which syncs.

    Returns:
        A mapping slice -> estimates, on the inputs' device, mergeable. Does not sync on a GPU. A slice whose k-hat is
        undefined has NaN and a ``reason``: "empty", "too_few" (a tail of fewer than 5 tokens, n < 21), "all_equal"
        (the whole tail ties with the cutoff, as all tokens do on policy), "ties" (all but fewer than 5 do), "capacity",
        or "range" (weights that float64 cannot hold beside each other).

    Raises:
        TypeError, ValueError: as :func:`pyrlstats.slice_stats`; a capacity or sample_size below 1; ranks that differ.

    Source:
        Vehtari, Simpson, Gelman, Yao, Gabry (2024), Pareto smoothed importance sampling, JMLR 25; Zhang, Stephens
        (2009), A new and efficient estimation method for the generalized Pareto distribution, Technometrics 51;
        Hill (1975), A simple general approach to inference about the tail of a distribution, Annals of Statistics 3.
    """
    masks, slice_ids, names = as_ids(masks, slice_ids, names)
    known = resolve_names(masks, slice_ids, names)
    batch = gate(logp, old_logp, masks, slice_ids, mask, known)
    for name, value in (("capacity", capacity), ("sample_size", sample_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer or None, got {value!r}")
    if capacity is None:
        tokens = int(np.prod(batch.logp.shape, dtype=np.int64))
        if group is not None:
            tokens = _tokens_of(tokens, known, group, device_of(batch.logp))
        capacity = 1 + int(tail_sizes(np.array([tokens]), sample_size)[0])
    shape = TailShape(known, *_largest(batch, len(known), capacity), sample_size)
    return shape if group is None else shape.all_reduce(group)


def _tokens_of(tokens: int, names: tuple[str, ...], group: Any, device: Any) -> int:
    from pyrlstats._ranks import Ranks

    return int(Ranks(group, {"slices": str(list(names)), "capacity": "None"}, device).sum(np.array([tokens]))[0])


def _largest(batch: Batch, slices: int, capacity: int) -> tuple[Array, Array]:
    """The largest finite x of every slice (S, C), and how many there are (S,)."""
    if isinstance(batch.logp, np.ndarray):
        return _largest_on_host(batch, batch, slices, capacity)
    import torch

    if flat.in_host_memory(batch.logp):
        largest, n = _largest_on_host(batch, flat.on_host(batch), slices, capacity)
        return torch.from_numpy(largest), torch.from_numpy(n)
    x = flat.log_ratio(batch)
    finite = torch.isfinite(x)
    inside = [flat.members(batch, index) & finite for index in range(slices)]
    rows = [_top(torch.where(one, x, -float("inf"))[None], capacity) for one in inside]
    return torch.cat(rows), torch.stack([one.sum() for one in inside])


def _largest_on_host(batch: Batch, tokens: Batch, slices: int, capacity: int) -> tuple[Array, Array]:
    """The same in NumPy memory, where ``tokens`` are; an exact threshold leaves few of them to sort."""
    x = flat.log_ratio(tokens)
    least = np.asarray(from_the_top(batch, slices, capacity, absolute=False), dtype=np.float32)
    finite = np.isfinite(x)
    largest = np.full((slices, capacity), -np.inf, np.float32)
    n = np.zeros(slices, np.int64)
    for index in range(slices):
        inside = flat.members(tokens, index) & finite
        n[index] = np.count_nonzero(inside)
        above = np.sort(x[np.flatnonzero(inside & (x > least[index]))])[::-1]
        largest[index, : above.size] = above
        largest[index, above.size : n[index]] = least[index]  # those that tie, as many as have a place
    return largest, n


def _top(values: Array, capacity: int) -> Array:
    """The largest of each row, (S, capacity), descending, filled up with -inf."""
    xp = namespace(values)
    kept = min(values.shape[1], capacity)
    if xp is np:
        top = np.full((len(values), capacity), -np.inf, np.float32)
        top[:, :kept] = np.sort(values)[:, ::-1][:, :kept]
        return top
    return xp.nn.functional.pad(values.topk(kept, -1).values, (0, capacity - kept), value=-float("inf"))
