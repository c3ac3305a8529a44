"""Moments, quantiles and histogram of any quantity, by the engine of log-ratios."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pyrlstats import stats as _stats
from pyrlstats._inputs import Masks, device_of
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.api import slice_stats
from pyrlstats.backends.tokens import zeros_like
from pyrlstats.layout import Layout
from pyrlstats.results import Statistic, Statistics, View, scalars_of
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import Array, State
from pyrlstats.values.arguments import as_floats, prepared

VALUE_LAYOUT = Layout(max_exp=40)
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
ABS_QUANTILES: tuple[float, ...] = ()

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


def positive_fraction(state: State) -> Array:
    """Share of the finite values above 0, exact."""
    return _stats.positive_fraction(state)


def negative_fraction(state: State) -> Array:
    """Share of the finite values below 0, exact."""
    return _stats.negative_fraction(state)


class ValueView(View):
    """The statistics of one slice of values, as 0-d values on the state's device; quantiles are of the values.

    Counts are int64, everything else float64, in the unit of the values; NaN for a slice without finite values.
    Reading one does not sync.
    """

    __slots__ = ()

    n_values = Statistic(n_values)
    n_finite = Statistic(_stats.n_finite)
    n_nan = Statistic(_stats.n_nan)
    n_pos_inf = Statistic(_stats.n_pos_inf)
    n_neg_inf = Statistic(_stats.n_neg_inf)
    n_zero = Statistic(_stats.n_zero)
    zero_fraction = Statistic(_stats.zero_fraction)
    positive_fraction = Statistic(positive_fraction)
    negative_fraction = Statistic(negative_fraction)
    mean = Statistic(mean)
    std = Statistic(std)
    min = Statistic(minimum)
    max = Statistic(maximum)
    abs_mean = Statistic(abs_mean)


SCALARS = scalars_of(ValueView)


class ValueStats(Statistics[ValueView]):
    """Statistics of a quantity in every slice: ``stats["post_tool"].quantile(0.99)``. Equal only to itself.

    Attributes:
        state: the mergeable :class:`~pyrlstats.state.State` behind it, of x = value.
    """

    kind = "value"
    _view = ValueView
    _stem = ""
    _default_quantiles = QUANTILES
    _default_abs_quantiles = ABS_QUANTILES
    _columns: ClassVar = {
        name: ("{:.6g}", name) for name in ("n_values", "n_finite", "mean", "std", "min", "p1", "p50", "p99", "max")
    }


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
    values, given = prepared({"x": as_floats("x", x)}, masks, slice_ids, mask, names)
    names = given.pop("names")
    if given["masks"] is None:
        given["names"] = names
    return ValueStats(slice_stats(values["x"], zeros_like(values["x"]), **given, layout=layout).state)


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
        values, given = prepared({"x": as_floats("x", x)}, masks, slice_ids, mask, self.names, exactly=True)
        mine, device = self._accumulator.device, device_of(values["x"])
        if mine is not None and device != mine and not (device is None and mine.type == "cpu"):
            raise ValueError(
                f"x must be on the accumulator's device {mine}, got {device or 'cpu'}: move it with "
                f".to({str(mine)!r}), or use one accumulator a device and merge their statistics"
            )
        del given["names"]
        self._accumulator.update(values["x"], zeros_like(values["x"]), **given)
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
            TypeError: something else than statistics or accumulators of values.
            ValueError: other names, layout or device; nothing is changed.
        """
        one: Any = other
        others: list[Any] = [one] if isinstance(one, (Mapping, str)) or not isinstance(one, Iterable) else list(one)
        for each in others:
            if not isinstance(each, (ValueAccumulator, ValueStats)):
                raise TypeError(
                    f"merge takes ValueAccumulator, ValueStats or an iterable of them, got {type(each).__name__}"
                )
        self._accumulator.merge(
            [each._accumulator if isinstance(each, ValueAccumulator) else SliceStats(each.state) for each in others]
        )
        return self

    def all_reduce(self, group: Any = None, async_op: bool = False) -> Any:
        """Replace the state by the pooled one of all ranks: as ``SliceAccumulator.all_reduce``, errors included.

        Returns:
            The accumulator; with ``async_op`` a handle whose ``wait()`` gives it.
        """
        handle = ValueHandle(self, self._accumulator.all_reduce(group, async_op=True))
        return handle if async_op else handle.wait()


class ValueHandle:
    """A reduction under way; the accumulator takes nothing in until it is finished."""

    def __init__(self, accumulator: ValueAccumulator, handle: Any) -> None:
        self._accumulator = accumulator
        self._handle = handle

    def wait(self) -> ValueAccumulator:
        """Finish, as :meth:`pyrlstats.distributed.Handle.wait`. Returns the accumulator; once more does nothing."""
        self._handle.wait()
        return self._accumulator
