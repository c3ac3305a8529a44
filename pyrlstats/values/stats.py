"""Moments, quantiles and histogram of any quantity, by the engine of log-ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pyrlstats import quantiles as _quantiles
from pyrlstats import stats as _stats
from pyrlstats._inputs import (
    Masks,
    _as_array,
    _check_dtype,
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

    kind = "value"

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
    """An array of a floating dtype; integers as float64 where the device has it, which the engine rounds once."""
    array = _as_array(name, value)
    _check_dtype(name, array, (*_FLOATS, *_INTEGERS))
    if str(array.dtype).removeprefix("torch.") in _FLOATS:
        return array
    xp = namespace(array)
    without_float64 = xp is not np and array.device.type == "mps"
    return xp.asarray(array, dtype=xp.float32 if without_float64 else xp.float64)


def _zeros_like(array: Array) -> Array:
    """Zeros of array's shape and dtype in the memory of one: stride 0."""
    if isinstance(array, np.ndarray):
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return array.new_zeros(()).expand(array.shape)
