"""Distribution statistics of any quantity: entropy, reward, advantage, value, return, gradient norm, length.

:func:`value_stats` runs the engine of :func:`pyrlstats.slice_stats` on the values themselves: the same histogram,
the same exact counts, merging and quantiles, without the names that only log-ratios have. :func:`explained_variance`
compares predicted values with returns, :func:`group_reward_stats` looks at the groups of GRPO-style training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pyrlstats import quantiles as _quantiles
from pyrlstats import stats as _stats
from pyrlstats._inputs import (
    Masks,
    _as_array,
    _broadcast,
    _check_dtype,
    _masks_by_name,
    _on_common_ground,
    device_of,
    resolve_names,
)
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.api import slice_stats
from pyrlstats.layout import Layout
from pyrlstats.quantiles import Histogram, Numbers
from pyrlstats.slice_stats import SliceStats, percentile_name
from pyrlstats.state import Array, State, namespace

VALUE_LAYOUT = Layout(max_exp=40)
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
ABS_QUANTILES: tuple[float, ...] = ()

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
_FLOATS = ("float32", "bfloat16", "float16", "float64")


# What follows are functions of a whole state, (S,) each, like those of pyrlstats.stats, in the values' own unit.


def n_values(state: State) -> Array:
    """Members of the slice, finite or not."""
    return _stats.n_tokens(state)


def mean(state: State) -> Array:
    """Mean of the finite values, in their unit."""
    return _stats.log_ratio_mean(state)


def std(state: State) -> Array:
    """Population standard deviation of the finite values, in their unit; exactly 0 where all are equal.

    From float64 sums: its absolute error is at most 2e-6 times the largest magnitude.
    """
    return _stats.log_ratio_std(state)


def minimum(state: State) -> Array:
    """Smallest finite value, exact."""
    return _stats.log_ratio_min(state)


def maximum(state: State) -> Array:
    """Largest finite value, exact."""
    return _stats.log_ratio_max(state)


def abs_mean(state: State) -> Array:
    """Mean magnitude of the finite values, in their unit."""
    return _stats.log_ratio_abs_mean(state)


def _share(state: State, counts: Array) -> Array:
    xp = namespace(counts)
    n = _stats.n_finite(state)
    return counts / xp.where(n > 0, xp.asarray(n, dtype=xp.float64), float("nan"))


def positive_fraction(state: State) -> Array:
    """Share of the finite values above 0, exact."""
    return _share(state, state.histogram[:, state.layout.bins_per_sign :].sum(-1))


def negative_fraction(state: State) -> Array:
    """Share of the finite values below 0, exact."""
    return _share(state, state.histogram[:, : state.layout.bins_per_sign].sum(-1))


class _Statistic:
    """A property of a view: one row of a function of the whole state, evaluated once for all slices."""

    def __init__(self, function: Callable[[State], Array]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, view: ValueView | None, owner: type[ValueView]) -> Any:
        if view is None:
            return self
        return view._stats._evaluate(self.function)[view._index]


class ValueView:
    """The statistics of one slice of values, as 0-d values on the state's device.

    Counts are int64, everything else float64, in the unit of the values; NaN for a slice without finite values.
    Reading one does not sync.
    """

    __slots__ = ("_index", "_stats")

    n_values = _Statistic(n_values)
    n_finite = _Statistic(_stats.n_finite)
    n_nan = _Statistic(_stats.n_nan)
    n_pos_inf = _Statistic(_stats.n_pos_inf)
    n_neg_inf = _Statistic(_stats.n_neg_inf)
    n_zero = _Statistic(_stats.n_zero)
    zero_fraction = _Statistic(_stats.zero_fraction)
    positive_fraction = _Statistic(positive_fraction)
    negative_fraction = _Statistic(negative_fraction)
    mean = _Statistic(mean)
    std = _Statistic(std)
    min = _Statistic(minimum)
    max = _Statistic(maximum)
    abs_mean = _Statistic(abs_mean)

    def __init__(self, stats: ValueStats, index: int) -> None:
        self._stats = stats
        self._index = index

    def quantile(self, q: Numbers) -> Array:
        """Quantile of the values: 0-d for a number, (len(q),) for a sequence.

        The inverted CDF, interpolated inside a bin of relative width at most 2^-mantissa_bits and cut to
        [min, max]; q = 0 and 1 are exact. Of a lattice (rewards 0 and 1, lengths) it can give a value between two
        points: ``quantile_bounds`` holds the true one.

        Raises:
            ValueError: a q outside [0, 1].
        """
        return _quantiles.quantile(self._stats.state, q)[self._index]

    def quantile_bounds(self, q: Numbers) -> tuple[Array, Array]:
        """Certified (lo, hi) around the true quantile, each shaped like ``quantile(q)``."""
        lo, hi = _quantiles.quantile_bounds(self._stats.state, q)
        return lo[self._index], hi[self._index]

    def abs_quantile(self, q: Numbers) -> Array:
        """Quantile of the magnitudes, shaped like ``quantile(q)``."""
        return _quantiles.abs_quantile(self._stats.state, q)[self._index]

    def abs_quantile_bounds(self, q: Numbers) -> tuple[Array, Array]:
        """Certified (lo, hi) around the true quantile of the magnitudes, each shaped like ``quantile(q)``."""
        lo, hi = _quantiles.abs_quantile_bounds(self._stats.state, q)
        return lo[self._index], hi[self._index]

    def cdf(self, x: Numbers) -> Array:
        """Share of values <= x, linear inside a bin: 0-d for a number, (len(x),) for a sequence."""
        return self._stats._quietly(_quantiles.cdf, x)[self._index]

    def tail_mass(self, x: Numbers) -> Array:
        """Share of magnitudes > x, linear inside a bin: 0-d for a number, (len(x),) for a sequence."""
        return self._stats._quietly(_quantiles.tail_mass, x)[self._index]

    def histogram(self) -> Histogram:
        """Counts (2P + 1,) and edges (2P + 2,), as ``numpy.histogram`` returns them; zeros have a bin."""
        counts, edges = _quantiles.histogram(self._stats.state)
        return Histogram(counts[self._index], edges)

    def __repr__(self) -> str:
        name = self._stats.state.names[self._index]
        return f"ValueView({name!r})\n{_table(self._stats, [name])}"


SCALARS: tuple[str, ...] = tuple(name for name, value in vars(ValueView).items() if isinstance(value, _Statistic))


class ValueStats(Mapping[str, ValueView]):
    """Statistics of a quantity in every slice: ``stats["post_tool"].quantile(0.99)``.

    Attributes:
        state: the mergeable :class:`~pyrlstats.state.State` behind it, of x = value.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self._values: dict[Callable[[State], Array], Array] = {}

    def __getitem__(self, name: str) -> ValueView:
        try:
            return ValueView(self, self.state.names.index(name))
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.state.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.state.names)

    def __len__(self) -> int:
        return len(self.state.names)

    @property
    def n_out_of_range(self) -> Array:
        """Values whose slice id named no slice (0-d int64): they are in none, and counted here."""
        return self.state.count("n_out_of_range").sum()

    def merge(self, other: ValueStats | Iterable[ValueStats]) -> ValueStats:
        """The pooled statistics of this and ``other``, one or several, as if all values had come in one call.

        None is changed. Does not sync.

        Raises:
            ValueError: other slices, layout or device.
        """
        merged = self.state.copy()
        for one in [other] if isinstance(other, ValueStats) else other:
            merged.merge_(one.state)
        return ValueStats(merged)

    def __add__(self, other: object) -> ValueStats:
        return self.merge(other) if isinstance(other, ValueStats) else NotImplemented

    def __radd__(self, other: object) -> ValueStats:
        return self if other == 0 else NotImplemented  # sum() starts at 0

    def to(self, device: Any) -> ValueStats:
        """The same statistics on a torch device."""
        return ValueStats(SliceStats(self.state).to(device).state)

    def to_dict(
        self,
        prefix: str = "",
        *,
        quantiles: Sequence[float] = QUANTILES,
        abs_quantiles: Sequence[float] = ABS_QUANTILES,
    ) -> dict[str, float]:
        """Every statistic as Python numbers, for a logger. Copies the state to the host: one sync on a GPU.

        Args:
            prefix: put before every key; it should name the quantity, such as ``"entropy/"``.
            quantiles: of the values, as ``p99``.
            abs_quantiles: of the magnitudes, as ``abs_p99``.

        Returns:
            ``{prefix + slice + "/" + statistic: value}``, int for counts and float for the rest, NaN where
            a slice has no finite values; and ``prefix + "n_out_of_range"``. The same keys at every step.

        Raises:
            ValueError: a quantile outside [0, 1].
        """
        host = ValueStats(self.state.to_host())
        columns = {name: host._evaluate(getattr(ValueView, name).function).tolist() for name in SCALARS}
        for stem, function, levels in (
            ("", _quantiles.quantile, quantiles),
            ("abs_", _quantiles.abs_quantile, abs_quantiles),
        ):
            values = host._quietly(function, list(levels))
            for q, column in zip(levels, values.T.tolist(), strict=True):
                columns[f"{stem}{percentile_name(q)}"] = column
        result: dict[str, float] = {f"{prefix}n_out_of_range": host.n_out_of_range.item()}
        for index, name in enumerate(self.state.names):
            for statistic, column in columns.items():
                result[f"{prefix}{name}/{statistic}"] = column[index]
        return result

    def state_dict(self) -> dict[str, Any]:
        """Names, layout, version and the state's buffer (on its device), for a checkpoint or a Ray driver."""
        return SliceStats(self.state).state_dict()

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> ValueStats:
        """What :meth:`state_dict` gave.

        Raises:
            ValueError: another version, or contents that do not fit together.
        """
        return cls(SliceStats.from_state_dict(state_dict).state)

    def to_bytes(self) -> bytes:
        """A versioned, checksummed binary form; see :mod:`pyrlstats.binary`. Copies the state to the host."""
        return SliceStats(self.state).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> ValueStats:
        """What :meth:`to_bytes` gave, in NumPy memory, equal to the bit.

        Raises:
            ValueError: data that is truncated, corrupted, foreign or of another version.
        """
        return cls(SliceStats.from_bytes(data).state)

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__(pickled["state"])  # type: ignore[misc]

    def _evaluate(self, function: Callable[[State], Array]) -> Array:
        if function not in self._values:
            self._values[function] = self._quietly(function)
        return self._values[function]

    def _quietly(self, function: Callable[..., Array], *arguments: Any) -> Array:
        # empty slices divide 0 by 0 on their way to NaN
        with np.errstate(all="ignore"):
            return function(self.state, *arguments)

    def __repr__(self) -> str:
        """A table of the main statistics, slices down. Copies the state to the host."""
        return _table(self, list(self))


def _table(stats: ValueStats, names: list[str]) -> str:
    values = stats.to_dict()
    columns = ("n_values", "n_finite", "mean", "std", "min", "p1", "p50", "p99", "max")
    rows = [["slice", *columns]]
    rows += [[name, *(f"{values[f'{name}/{column}']:.6g}" for column in columns)] for name in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *numbers)))
    return "\n".join(lines)


def value_stats(
    x: Any,
    masks: Masks = None,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
    layout: Layout = VALUE_LAYOUT,
) -> ValueStats:
    """Distribution statistics of any quantity, slice by slice, in one pass.

    Args:
        x: the values, one a token, a sequence or a step: any shape and strides; float32, bfloat16, float16, float64,
            bool or a signed integer or uint8. Values count as float32: float64 and integers are rounded once, and
            beyond 3.4e38 they count as infinite.
        masks, slice_ids, names, mask: as for :func:`pyrlstats.slice_stats`, for x's shape.
        layout: bins of the histogram; the default resolves magnitudes from 2^-24 (6e-8) to 2^40 (1.1e12).

    Returns:
        A mapping slice name -> statistics, on x's device (NumPy in, NumPy out), mergeable. Does not sync. NaN and
        infinite values are counted and excluded from everything else; a slice without finite values has NaN
        statistics and counts of 0.

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: shapes, devices or names that do not fit.
    """
    values = _floats("x", x)
    options = {"slice_ids": slice_ids, "names": names, "mask": mask, "layout": layout}
    with _naming("x"):
        return ValueStats(slice_stats(values, _zeros_like(values), masks, **options).state)


class ValueAccumulator:
    """Adds up the states of many batches of values: micro-batches, ranks, steps. As ``SliceAccumulator``.

    Args:
        names: slice names, distinct, not empty, without "/".
        layout: bins of the histogram.
        device: where the values will be; None takes the first batch's device.

    Raises:
        ValueError: names that do not fit.
    """

    def __init__(self, names: Sequence[str], *, layout: Layout = VALUE_LAYOUT, device: Any = None) -> None:
        self._accumulator = SliceAccumulator(names, layout=layout, device=device)

    @property
    def names(self) -> tuple[str, ...]:
        """The slices, in order."""
        return self._accumulator.names

    def update(self, x: Any, masks: Masks = None, *, slice_ids: Any = None, mask: Any = None) -> ValueAccumulator:
        """Count one batch; the arguments are those of :func:`value_stats`. Does not sync.

        Raises:
            TypeError, ValueError, RuntimeError: as ``SliceAccumulator.update``. Nothing has been counted then.
        """
        values = _floats("x", x)
        with _naming("x"):
            self._accumulator.update(values, _zeros_like(values), masks, slice_ids=slice_ids, mask=mask)
        return self

    def compute(self) -> ValueStats:
        """The statistics of everything counted so far. A copy: later updates do not change it. Does not sync."""
        return ValueStats(self._accumulator.compute().state)

    def reset(self) -> ValueAccumulator:
        """Forget every value; names, layout and memory stay."""
        self._accumulator.reset()
        return self

    def merge(self, other: ValueAccumulator | ValueStats | Iterable[ValueAccumulator | ValueStats]) -> ValueAccumulator:
        """Count what ``other``, one or several, has counted too. ``other`` is not changed. Does not sync.

        Raises:
            ValueError: other names, layout or device; nothing is changed.
        """
        others = [other] if isinstance(other, (ValueAccumulator, ValueStats)) else list(other)
        self._accumulator.merge(
            [one._accumulator if isinstance(one, ValueAccumulator) else SliceStats(one.state) for one in others]
        )
        return self

    def all_reduce(self, group: Any = None) -> ValueAccumulator:
        """Replace the state by the pooled one of all ranks: see ``SliceAccumulator.all_reduce``.

        Raises:
            ValueError, RuntimeError: as there.
        """
        self._accumulator.all_reduce(group)
        return self


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Errors of the engine's gate, which knows logp, name the argument that the caller knows."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if error.args and "logp" in str(error):
            error.args = (str(error).replace("old_logp", argument).replace("logp", argument),)
        raise


def _floats(name: str, value: Any) -> Array:
    """An array of a floating dtype; integers as float64, which the engine rounds once."""
    array = _as_array(name, value)
    _check_dtype(name, array, (*_FLOATS, *_INTEGERS))
    if str(array.dtype).removeprefix("torch.") in _FLOATS:
        return array
    xp = namespace(array)
    return xp.asarray(_on_common_ground({name: array})[name], dtype=xp.float64)


def _zeros_like(array: Array) -> Array:
    """Zeros of array's shape and dtype in the memory of one: stride 0."""
    if isinstance(array, np.ndarray):
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return array.new_zeros(()).expand(array.shape)


# explained variance


@dataclass(frozen=True, eq=False)
class ExplainedVariance(Mapping[str, Any]):
    """How much of the returns' variance the predicted values explain, slice by slice; mergeable.

    Attributes:
        names: the slices, in order.
        n: int64 (S,), pairs with both finite.
        n_non_finite: int64 (S,), pairs with a NaN or infinite value or return: excluded.
        mean_return, mean_error: float64 (S,), means of the returns and of ``return - value``; 0 where n is 0.
        m2_return, m2_error: float64 (S,), sums of squared deviations from those means.
    """

    names: tuple[str, ...]
    n: Array
    n_non_finite: Array
    mean_return: Array
    m2_return: Array
    mean_error: Array
    m2_error: Array

    def __getitem__(self, name: str) -> Array:
        """The explained variance of one slice, 0-d."""
        try:
            return self.explained_variance[self.names.index(name)]
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def explained_variance(self) -> Array:
        """float64 (S,): 1 - var(return - value) / var(return), at most 1; NaN without pairs or for equal returns."""
        xp = namespace(self.m2_return)
        return 1.0 - self.m2_error / xp.where(self.m2_return > 0, self.m2_return, float("nan"))

    @property
    def error_mean(self) -> Array:
        """float64 (S,): mean(return - value), the bias that explained variance does not see."""
        return namespace(self.n).where(self.n > 0, self.mean_error, float("nan"))

    @property
    def error_std(self) -> Array:
        """float64 (S,): population standard deviation of return - value."""
        return self._std(self.m2_error)

    @property
    def return_std(self) -> Array:
        """float64 (S,): population standard deviation of the returns."""
        return self._std(self.m2_return)

    def _std(self, m2: Array) -> Array:
        xp = namespace(m2)
        return xp.sqrt(m2 / xp.where(self.n > 0, xp.asarray(self.n, dtype=xp.float64), float("nan")))

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """The same of the pairs of both, by Chan, Golub and LeVeque's update: nothing cancels. Does not sync.

        Raises:
            ValueError: other slices.
        """
        if self.names != other.names:
            raise ValueError(f"explained variances of different slices cannot be merged: {self.names}, {other.names}")
        moments: dict[str, Array] = {}
        for what in ("return", "error"):
            mean_name, m2_name = f"mean_{what}", f"m2_{what}"
            moments[mean_name], moments[m2_name] = _pooled(
                (self.n, getattr(self, mean_name), getattr(self, m2_name)),
                (other.n, getattr(other, mean_name), getattr(other, m2_name)),
            )
        return ExplainedVariance(self.names, self.n + other.n, self.n_non_finite + other.n_non_finite, **moments)

    def __add__(self, other: object) -> ExplainedVariance:
        return self.merge(other) if isinstance(other, ExplainedVariance) else NotImplemented

    def __radd__(self, other: object) -> ExplainedVariance:
        return self if other == 0 else NotImplemented  # sum() starts at 0

    def all_reduce(self, group: Any = None) -> ExplainedVariance:
        """The pooled one of all ranks: two SUM collectives of fixed size, no sync. Torch inputs only.

        Every rank of the group must call it, with or without pairs, with the same slices.
        """
        import torch
        import torch.distributed as dist

        n = self.n.to(torch.float64)
        first = torch.stack((n, self.n_non_finite.to(torch.float64), n * self.mean_return, n * self.mean_error))
        dist.all_reduce(first, group=group)
        total = first[0].clamp(min=1.0)
        means = first[2:] / total
        own = torch.stack((self.mean_return, self.mean_error))
        second = torch.stack((self.m2_return, self.m2_error)) + n * (own - means) ** 2
        dist.all_reduce(second, group=group)
        counts = first[:2].to(torch.int64)
        return ExplainedVariance(self.names, counts[0], counts[1], means[0], second[0], means[1], second[1])

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """``{prefix + slice + "/" + statistic: value}`` as Python numbers. One copy to the host: syncs on a GPU."""
        keys = ("explained_variance", "error_mean", "error_std", "return_std", "n", "n_non_finite")
        xp = namespace(self.n)
        table = xp.stack([xp.asarray(getattr(self, key), dtype=xp.float64) for key in keys]).T.tolist()
        return {
            f"{prefix}{name}/{key}": int(value) if key.startswith("n") else value
            for name, row in zip(self.names, table, strict=True)
            for key, value in zip(keys, row, strict=True)
        }

    def __repr__(self) -> str:
        return f"ExplainedVariance({self.to_dict()})"


def _pooled(one: tuple[Array, Array, Array], two: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Mean and sum of squared deviations of two parts given as (n, mean, m2)."""
    (n_one, mean_one, m2_one), (n_two, mean_two, m2_two) = one, two
    xp = namespace(n_one)
    # float64 by hand: torch divides integers in float32
    share = xp.asarray(n_two, dtype=xp.float64) / xp.clip(n_one + n_two, 1, None)
    gap = mean_two - mean_one
    return mean_one + gap * share, m2_one + m2_two + gap**2 * n_one * share


def explained_variance(
    values: Any,
    returns: Any,
    masks: Masks = None,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
) -> ExplainedVariance:
    """1 - var(returns - values) / var(returns) of each slice, from two passes in float64: nothing cancels.

    1 is a perfect critic, 0 one as good as a constant, below 0 worse than a constant. A constant error does not
    show: see ``error_mean``.

    Args:
        values: predicted values, any shape; float32, bfloat16, float16 or float64.
        returns: of the same shape.
        masks, slice_ids, names, mask: as for :func:`pyrlstats.slice_stats`.

    Returns:
        Per slice, on the inputs' device, mergeable. Does not sync. Pairs with a NaN or infinite value or return are
        excluded and counted; NaN for a slice without pairs or whose returns are all equal.

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: shapes, devices or names that do not fit.
    """
    arrays = {"values": _floats("values", values), "returns": _floats("returns", returns)}
    shape = tuple(arrays["values"].shape)
    if tuple(arrays["returns"].shape) != shape:
        raise ValueError(f"returns must have values' shape {shape}, got {tuple(arrays['returns'].shape)}")
    checked = resolve_names(masks, slice_ids, names)
    own = {}
    if masks is not None:
        own = dict(zip(checked, _masks_by_name(masks, checked), strict=True))
        arrays |= {f"mask of slice {name!r}": _as_array(name, one) for name, one in own.items()}
    if slice_ids is not None:
        arrays["slice_ids"] = _as_array("slice_ids", slice_ids)
    elif masks is None and len(checked) != 1:
        raise ValueError(f"masks are needed for the slices {list(checked)}: give a mapping name -> mask")
    if mask is not None:
        arrays["mask"] = _as_array("mask", mask)
    arrays = _on_common_ground(arrays)
    with _naming("values"):
        arrays = {key: _broadcast(key, array, shape) for key, array in arrays.items()}
    xp = namespace(arrays["values"])
    target = xp.asarray(arrays["returns"], dtype=xp.float64)
    error = target - xp.asarray(arrays["values"], dtype=xp.float64)
    finite = xp.isfinite(error) & xp.isfinite(target)  # inf - inf is NaN
    inside = arrays["mask"] != 0 if mask is not None else xp.ones_like(finite)
    rows = []
    for index, name in enumerate(checked):
        member = inside
        if own:
            member = inside & (arrays[f"mask of slice {name!r}"] != 0)
        elif slice_ids is not None:
            member = inside & (arrays["slice_ids"] == index)
        chosen = member & finite
        n = chosen.sum()
        rows.append((n, (member & ~finite).sum(), *_moments(target, chosen, n), *_moments(error, chosen, n)))
    n, bad, mean_return, m2_return, mean_error, m2_error = (xp.stack(column) for column in zip(*rows, strict=True))
    return ExplainedVariance(checked, n, bad, mean_return, m2_return, mean_error, m2_error)


def _moments(x: Array, chosen: Array, n: Array) -> tuple[Array, Array]:
    """Mean (0 where n is 0) and sum of squared deviations of the chosen x."""
    xp = namespace(x)
    average = xp.where(chosen, x, 0.0).sum() / xp.clip(n, 1, None)
    deviation = xp.where(chosen, x - average, 0.0)
    # the second term corrects the rounding of the mean
    return average, (deviation**2).sum() - deviation.sum() ** 2 / xp.clip(n, 1, None)


# groups


@dataclass(frozen=True, eq=False)
class GroupRewardStats:
    """Rewards within the groups of one prompt (GRPO, RLOO, DAPO): sums, so that batches add up.

    A group of which all rewards are equal has advantage 0 everywhere and teaches nothing. Fractions are over the
    groups of at least two finite rewards, ``n_groups``.

    Attributes, 0-d, counts int64 and sums float64:
        n_rewards: finite rewards, in groups of any size.
        n_non_finite: NaN and infinite rewards: excluded.
        n_groups: groups of at least two finite rewards.
        n_single: groups of one finite reward, which have no spread: in no fraction.
        n_zero_variance: groups whose rewards are all equal, exactly.
        n_all_low, n_all_high: groups whose rewards all equal ``low``, or ``high``.
        n_in_groups: finite rewards in the ``n_groups`` groups.
        sum_std: sum over groups of the sample standard deviation (n - 1), by which GRPO divides.
        sum_within: sum over groups of squared deviations from the group's mean.
        mean_of_means, m2_of_means: mean over the groups of their mean reward, and sum of squared deviations from it.
    """

    n_rewards: Array
    n_non_finite: Array
    n_groups: Array
    n_single: Array
    n_zero_variance: Array
    n_all_low: Array
    n_all_high: Array
    n_in_groups: Array
    sum_std: Array
    sum_within: Array
    mean_of_means: Array
    m2_of_means: Array

    def _over(self, total: Array, n: Array) -> Array:
        xp = namespace(self.n_groups)
        return total / xp.where(n > 0, xp.asarray(n, dtype=xp.float64), float("nan"))

    @property
    def zero_variance_fraction(self) -> Array:
        """Share of groups whose rewards are all equal."""
        return self._over(self.n_zero_variance, self.n_groups)

    @property
    def all_low_fraction(self) -> Array:
        """Share of groups that all failed: every reward equals ``low``."""
        return self._over(self.n_all_low, self.n_groups)

    @property
    def all_high_fraction(self) -> Array:
        """Share of groups that all succeeded: every reward equals ``high``."""
        return self._over(self.n_all_high, self.n_groups)

    @property
    def within_group_std(self) -> Array:
        """sqrt(sum of squared deviations / (rewards - groups)): the pooled sample standard deviation."""
        return namespace(self.n_groups).sqrt(self._over(self.sum_within, self.n_in_groups - self.n_groups))

    @property
    def group_std_mean(self) -> Array:
        """Mean over groups of the sample standard deviation, 0 of zero-variance groups included."""
        return self._over(self.sum_std, self.n_groups)

    @property
    def group_mean(self) -> Array:
        """Mean over groups of their mean reward."""
        return namespace(self.n_groups).where(self.n_groups > 0, self.mean_of_means, float("nan"))

    @property
    def between_group_std(self) -> Array:
        """Population standard deviation over groups of their mean reward: how much prompts differ in difficulty."""
        return namespace(self.n_groups).sqrt(self._over(self.m2_of_means, self.n_groups))

    def merge(self, other: GroupRewardStats) -> GroupRewardStats:
        """The same of the groups of both. A group must lie in one of them whole. Does not sync."""
        added = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        added["mean_of_means"], added["m2_of_means"] = _pooled(
            (self.n_groups, self.mean_of_means, self.m2_of_means),
            (other.n_groups, other.mean_of_means, other.m2_of_means),
        )
        return GroupRewardStats(**added)

    def __add__(self, other: object) -> GroupRewardStats:
        return self.merge(other) if isinstance(other, GroupRewardStats) else NotImplemented

    def __radd__(self, other: object) -> GroupRewardStats:
        return self if other == 0 else NotImplemented  # sum() starts at 0

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """``{prefix + statistic: value}`` as Python numbers. One copy to the host: syncs on a GPU."""
        counts = ("n_rewards", "n_non_finite", "n_groups", "n_single", "n_zero_variance", "n_all_low", "n_all_high")
        shares = ("zero_variance_fraction", "all_low_fraction", "all_high_fraction")
        spreads = ("within_group_std", "group_std_mean", "group_mean", "between_group_std")
        keys = (*counts, *shares, *spreads)
        xp = namespace(self.n_groups)
        row = xp.stack([xp.asarray(getattr(self, key), dtype=xp.float64) for key in keys]).tolist()
        return {prefix + key: int(value) if key in counts else value for key, value in zip(keys, row, strict=True)}

    def __repr__(self) -> str:
        return f"GroupRewardStats({self.to_dict()})"


def group_reward_stats(
    rewards: Any,
    group_ids: Any = None,
    *,
    group_size: int | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> GroupRewardStats:
    """Spread of the rewards within the groups of answers to one prompt.

    Args:
        rewards: one a trajectory: ``(G, K)``, a group a row; or any shape with ``group_ids`` or ``group_size``.
            Floats, integers or bool.
        group_ids: of rewards' shape: any integers, or strings in a NumPy array or a list; equal = one group.
        group_size: rewards in row-major order form groups of so many.
        low, high: the rewards of failure and of success.

    Returns:
        Counts and sums, 0-d on the rewards' device (NumPy in, NumPy out), mergeable. Does not sync, and allocates
        by the number of rewards only (string ids are compared on the host and uploaded).

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: both or neither way of grouping, a size that does not divide the rewards, or shapes that differ.
    """
    array = _floats("rewards", rewards)
    array = _on_common_ground({"rewards": array})["rewards"]
    xp = namespace(array)
    if group_ids is not None and group_size is not None:
        raise ValueError("group_ids and group_size exclude each other: give one of them")
    shape = tuple(array.shape)
    count = int(np.prod(shape))
    if group_ids is None:
        size = group_size
        if size is None:
            if len(shape) != 2:
                raise ValueError(f"rewards must be (groups, rewards a group), got {shape}: or give group_ids")
            size = shape[1]
        elif size < 1 or count % size:
            raise ValueError(f"group_size must be at least 1 and divide the {count} rewards, got {size}")
        group = _arange(count, array) // max(size, 1)
        flat = xp.asarray(array.reshape(-1), dtype=xp.float64)
    else:
        ids = _group_ids(group_ids, array)
        if tuple(ids.shape) != shape:
            raise ValueError(f"group_ids must have rewards' shape {shape}, got {tuple(ids.shape)}")
        order = _stable_order(ids.reshape(-1))
        ordered = ids.reshape(-1)[order]
        begins = xp.concatenate((ordered[:1] != ordered[:1], ordered[1:] != ordered[:-1]))
        group = xp.cumsum(begins, -1)
        flat = xp.asarray(array.reshape(-1), dtype=xp.float64)[order]
    return _group_sums(flat, group, low, high)


def _group_sums(reward: Array, group: Array, low: float, high: float) -> GroupRewardStats:
    """From float64 (B,) rewards and int64 (B,) groups, each in [0, B)."""
    xp = namespace(reward)
    finite = xp.isfinite(reward)
    known = xp.where(finite, reward, 0.0)
    n = _per_group(finite * 1.0, group)
    safe = xp.clip(n, 1.0, None)
    means = _per_group(known, group) / safe
    deviation = xp.where(finite, reward - means[group], 0.0)
    m2 = _per_group(deviation**2, group)
    smallest = _smallest_of_group(known, finite, group)
    # compared, not by m2 == 0, which rounding of the mean would spoil
    equal = _per_group((finite & (reward == smallest[group])) * 1.0, group) == n
    m2 = xp.where(equal, 0.0, m2)
    real = n > 1.0
    n_groups = real.sum()
    average = xp.where(real, means, 0.0).sum() / xp.clip(n_groups, 1, None)
    std = xp.sqrt(m2 / xp.clip(n - 1.0, 1.0, None))
    return GroupRewardStats(
        n_rewards=finite.sum(),
        n_non_finite=(~finite).sum(),
        n_groups=n_groups,
        n_single=(n == 1.0).sum(),
        n_zero_variance=(real & equal).sum(),
        n_all_low=(real & equal & (smallest == low)).sum(),
        n_all_high=(real & equal & (smallest == high)).sum(),
        n_in_groups=xp.asarray(xp.where(real, n, 0.0).sum(), dtype=xp.int64),
        sum_std=xp.where(real, std, 0.0).sum(),
        sum_within=xp.where(real, m2, 0.0).sum(),
        mean_of_means=average,
        m2_of_means=(xp.where(real, means - average, 0.0) ** 2).sum(),
    )


def _per_group(values: Array, group: Array) -> Array:
    """Sums by group, as many as there are values."""
    if isinstance(values, np.ndarray):
        return np.bincount(group, weights=values, minlength=values.size)[: values.size]
    return values.new_zeros(values.shape).index_add(0, group, values)


def _smallest_of_group(values: Array, finite: Array, group: Array) -> Array:
    """The smallest finite value of each group, 0 where there is none."""
    if isinstance(values, np.ndarray):
        smallest = np.full(values.shape, np.inf)
        np.minimum.at(smallest, group[finite], values[finite])
        return np.where(np.isfinite(smallest), smallest, 0.0)
    torch = namespace(values)
    masked = torch.where(finite, values, float("inf"))
    smallest = torch.full_like(values, float("inf")).scatter_reduce(0, group, masked, "amin")
    return torch.where(torch.isfinite(smallest), smallest, 0.0)


def _group_ids(group_ids: Any, like: Array) -> Array:
    if isinstance(group_ids, (list, tuple)):
        group_ids = np.asarray(group_ids)
    if isinstance(group_ids, np.ndarray) and group_ids.dtype.kind in "UO":
        codes = np.unique(group_ids.astype(str), return_inverse=True)[1].reshape(group_ids.shape)
        if isinstance(like, np.ndarray):
            return codes
        import torch

        return torch.from_numpy(codes).to(device_of(like), non_blocking=True)
    ids = _as_array("group_ids", group_ids)
    _check_dtype("group_ids", ids, _INTEGERS)
    return _on_common_ground({"rewards": like, "group_ids": ids})["group_ids"]


def _stable_order(ids: Array) -> Array:
    if isinstance(ids, np.ndarray):
        return np.argsort(ids, kind="stable")
    return ids.argsort(dim=-1, stable=True)


def _arange(n: int, like: Array) -> Array:
    xp = namespace(like)
    return np.arange(n) if xp is np else xp.arange(n, device=like.device)
