"""What the results of any quantity share: a mapping slice name -> view of statistics that are evaluated when read.

:class:`~pyrlstats.slice_stats.SliceStats` and :class:`~pyrlstats.values.ValueStats` differ in the statistics of their
views, in the names that quantiles have in ``to_dict``, in the default quantiles and in the columns of their tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast, overload

import numpy as np

from pyrlstats import quantiles as _quantiles
from pyrlstats.cells import Numbers, as_list, probabilities
from pyrlstats.memo import Memo
from pyrlstats.quantiles import Histogram
from pyrlstats.state import Array, State, on_one_device

if TYPE_CHECKING:
    from typing_extensions import Self

_KEPT = 64  # quantiles and shares kept by a result
_QUIET = functools.partial(np.errstate, all="ignore")  # empty slices divide 0 by 0 on their way to NaN


class Statistic:
    """A property of a view: one row of a function of the whole state, evaluated once for all slices.

    Attributes:
        function: of a state, (S,).
        group: of the state, that it needs; None is the core.
    """

    def __init__(self, function: Callable[[State], Array], group: str | None = None) -> None:
        self.function = function
        self.group = group
        self.name = ""
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type[View], name: str) -> None:
        self.name = name

    def __get__(self, view: View | None, owner: type[View]) -> Any:
        if view is None:
            return self
        if not self.is_in(view._stats.state):
            option = OPTION_OF.get(self.group or "", OPTION_OF["sequences"])
            raise AttributeError(f"{self.name} was not asked for: {option} adds it")
        return view._stats._evaluate(self.function)[view._index]

    def is_in(self, state: State) -> bool:
        """Whether the state has what it needs."""
        return self.group is None or any(group.name == self.group for group in state.groups)


OPTION_OF = {  # group -> the argument that adds it
    "entropy": "entropy=True",
    "probabilities": "probabilities=True",
    "truncation": "truncate=(lo, hi)",
    "policy_clip": "advantages",
    "advantages": "advantages",
    "updates": "advantages",
    "sequences": "sequences=True or cu_seqlens",
}


class View:
    """The statistics of one slice, as 0-d values on the state's device. Reading one does not sync."""

    __slots__ = ("_index", "_stats")

    def __init__(self, stats: Statistics[Any], index: int) -> None:
        self._stats = stats
        self._index = index

    if not TYPE_CHECKING:  # a type checker should go on refusing unknown names

        def __getattr__(self, name: str) -> Any:
            statistic = getattr(type(self), name, None)
            if isinstance(statistic, Statistic):
                return statistic.__get__(self, type(self))  # Python came here for its AttributeError: raise it
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{_nearest(name, type(self))}"
            )

    def quantile(self, q: Numbers) -> Array:
        """Quantile of x, in its unit: 0-d for a number, (len(q),) for a sequence; see :func:`quantiles.quantile`.

        The inverted CDF, interpolated inside a bin of relative width at most 2^-mantissa_bits and cut to [min, max];
        q = 0 and 1 are exact. Of a lattice (rewards 0 and 1, lengths, bfloat16 steps) it can lie between two points:
        ``quantile_bounds`` holds the true one.

        Raises:
            ValueError: a q outside [0, 1].
        """
        return self._stats._evaluate_at(_quantiles.quantile, *probabilities(q))[self._index]

    def quantile_bounds(self, q: Numbers) -> tuple[Array, Array]:
        """Certified (lo, hi) around the true quantile of x, in its unit, each shaped like ``quantile(q)``."""
        lo, hi = self._stats._evaluate_at(_quantiles.quantile_bounds, *probabilities(q))
        return lo[self._index], hi[self._index]

    def abs_quantile(self, q: Numbers) -> Array:
        """Quantile of abs(x), in its unit, shaped like ``quantile(q)``."""
        return self._stats._evaluate_at(_quantiles.abs_quantile, *probabilities(q))[self._index]

    def abs_quantile_bounds(self, q: Numbers) -> tuple[Array, Array]:
        """Certified (lo, hi) around the true quantile of abs(x), in its unit, each shaped like ``quantile(q)``."""
        lo, hi = self._stats._evaluate_at(_quantiles.abs_quantile_bounds, *probabilities(q))
        return lo[self._index], hi[self._index]

    def cdf(self, x: Numbers) -> Array:
        """Share with values <= x, linear inside a bin: 0-d for a number, (len(x),) for a sequence."""
        return self._stats._evaluate_at(_quantiles.cdf, *as_list("x", x))[self._index]

    def tail_mass(self, x: Numbers) -> Array:
        """Share with magnitudes > x, linear inside a bin: 0-d for a number, (len(x),) for a sequence."""
        return self._stats._evaluate_at(_quantiles.tail_mass, *as_list("x", x))[self._index]

    def histogram(self) -> Histogram:
        """Counts (2P + 1,) and edges (2P + 2,) of x, as ``numpy.histogram`` returns them; zeros have a bin."""
        counts, edges = _quantiles.histogram(self._stats.state)
        return Histogram(counts[self._index], edges)

    def __repr__(self) -> str:
        name = self._stats.state.names[self._index]
        return f"{type(self).__name__}({name!r})\n{_table(self._stats._cells([name]))}"


def scalars_of(view: type[View], state: State | None = None) -> tuple[str, ...]:
    """The names of the statistics of a view, as they are defined: those of a state, or those that need no group."""
    key: Any = view  # to a type checker, classes cannot be hashed
    return _scalars_with(key, () if state is None else _group_names(state))[0]


def _group_names(state: State) -> tuple[str, ...]:
    return tuple(group.name for group in state.groups)


@functools.lru_cache(maxsize=64)
def _scalars_with(view: Any, groups: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Callable[[State], Array], ...]]:
    """Names and functions."""
    statistics = [value for value in vars(view).values() if isinstance(value, Statistic)]
    kept = [one for one in statistics if one.group is None or one.group in groups]
    return tuple(one.name for one in kept), tuple(one.function for one in kept)


def _n_out_of_range(state: State) -> Array:
    return state.count("n_out_of_range").sum()


@functools.lru_cache(maxsize=16)  # of many slices they are long
def _keys(
    prefix: str,
    slices: tuple[str, ...],
    scalars: tuple[str, ...],
    stem: str,
    of_x: tuple[float, ...],
    of_abs: tuple[float, ...],
) -> tuple[str, ...]:
    """The keys of ``to_dict`` in its order; every step has the same."""
    statistics = (*scalars, *(stem + percentile_name(q) for q in of_x))
    statistics += tuple(f"abs_{stem}{percentile_name(q)}" for q in of_abs)
    return (f"{prefix}n_out_of_range", *(f"{prefix}{name}/{one}" for name in slices for one in statistics))


OneView = TypeVar("OneView", bound=View)
Some = TypeVar("Some", bound="Statistics[Any]")


class OnItsWay(Generic[Some]):
    """Statistics that are being copied to the host: ``wait()`` gives them."""

    def __init__(self, kind: Callable[[State], Some], wait: Callable[[], State]) -> None:
        self._kind = kind
        self._pending: Callable[[], State] | None = wait
        self._arrived: Some | None = None

    def wait(self) -> Some:
        """The statistics in NumPy memory. Waits for the copy; called once more it returns the same."""
        if self._pending is not None:
            self._arrived = self._kind(self._pending())
            self._pending = None  # with it go the state on the device and the pinned memory
        return cast("Some", self._arrived)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'on its way' if self._pending is not None else 'arrived'}: call wait())"


class Statistics(Mapping[str, OneView], Generic[OneView]):
    """Statistics of every slice: ``stats["post_tool"].quantile(0.99)``. Equal only to itself, and hashable.

    Attributes:
        state: the mergeable :class:`~pyrlstats.state.State` behind it.
        kind: what the state counts, "log_ratio" or "value": different kinds do not merge.
    """

    kind: ClassVar[str]
    _view: type[OneView]
    _stem: ClassVar[str]  # of the names of quantiles in to_dict: log_ratio_p99
    _default_quantiles: ClassVar[tuple[float, ...]]
    _default_abs_quantiles: ClassVar[tuple[float, ...]]
    _columns: ClassVar[Mapping[str, tuple[str, ...]]]  # of the table: format, statistic[, statistic that is subtracted]

    def __init__(self, state: State) -> None:
        self.state = state
        self._memo: Any = Memo(state)
        self._values: dict[Callable[[State], Array], Array] = {}
        self._values_at: dict[tuple[Callable[..., Any], float], Any] = {}

    if not TYPE_CHECKING:  # a type checker should go on refusing unknown names

        def __getattr__(self, name: str) -> Any:
            attribute = getattr(type(self), name, None)
            if isinstance(attribute, property):
                return attribute.fget(self)  # Python came here for its AttributeError: raise it
            state = self.__dict__.get("state")
            hint = ""
            if state is not None and name in state.names:
                hint = f": slices are items, [{name!r}]"
            elif state is not None and not name.startswith("_") and hasattr(self._view, name):
                hint = f": choose a slice first, [{state.names[0]!r}].{name}"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __getitem__(self, name: str) -> OneView:
        try:
            return self._view(self, self.state.names.index(name))
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.state.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.state.names)

    def __len__(self) -> int:
        return len(self.state.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @property
    def n_out_of_range(self) -> Array:
        """Tokens or values whose slice id named no slice (0-d int64): they are in none, and counted here."""
        return _n_out_of_range(self.state)

    def merge(self, other: Self | Iterable[Self]) -> Self:
        """The pooled statistics of this and ``other``, one or several, as if everything had come in one call.

        None is changed. Does not sync. What lies in NumPy memory is moved to the device of the others.

        Raises:
            TypeError: something else than statistics of this kind.
            ValueError: other slices, layout or clip, or tensors on different devices.
        """
        first, *rest = on_one_device([self.state, *(one.state for one in self._checked(other))])
        merged = first.copy()
        for state in rest:
            merged.merge_(state)
        return type(self)(merged)

    def _checked(self, other: Self | Iterable[Self]) -> list[Self]:
        one: Any = other
        several = list(one) if isinstance(one, Iterable) and not isinstance(one, (Mapping, str, bytes)) else [one]
        for each in several:
            if not self._is_kin(each):
                name = type(self).__name__
                raise TypeError(f"merge takes {name} or an iterable of {name}, got {type(each).__name__}")
        return several

    def _is_kin(self, other: object) -> bool:
        return isinstance(other, Statistics) and other.kind == self.kind

    def __add__(self, other: object) -> Self:
        return self.merge(other) if self._is_kin(other) else NotImplemented  # type: ignore[arg-type]

    def __radd__(self, other: object) -> Self:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum() starts at 0

    def to(self, device: Any) -> Self:
        """The same statistics on a torch device."""
        import torch

        buffer = self.state.buffer
        tensor = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
        return type(self)(replace(self.state, buffer=tensor.to(device)))

    @overload
    def to_host(self, async_op: Literal[False] = False) -> Self: ...

    @overload
    def to_host(self, async_op: Literal[True]) -> OnItsWay[Self]: ...

    @overload
    def to_host(self, async_op: bool) -> Self | OnItsWay[Self]: ...

    def to_host(self, async_op: bool = False) -> Self | OnItsWay[Self]:
        """The same statistics in NumPy memory, where no figure of them syncs: one copy, one sync on a GPU.

        Args:
            async_op: start the copy and return a handle whose ``wait()`` gives them. It waits for what was queued on
                the current stream before the copy, and not for what comes after: called a little later, when the next
                step's work has been queued, it waits for nothing and the GPU never for the host. Of what does not lie
                on a GPU the copy is made at once; CPU memory is shared, not copied.
        """
        wait = self.state.start_to_host() if async_op else None
        return type(self)(self.state.to_host()) if wait is None else OnItsWay(type(self), wait)

    def to_dict(
        self,
        prefix: str = "",
        *,
        quantiles: Sequence[float] | None = None,
        abs_quantiles: Sequence[float] | None = None,
    ) -> dict[str, float]:
        """Every statistic as Python numbers, for a logger. Copies the state to the host: one sync on a GPU.

        Args:
            prefix: put before every key; of values it should name the quantity, such as ``"entropy/"``.
            quantiles: of x, as ``log_ratio_p99`` of log-ratios and ``p99`` of values. None takes p0.1, p1, p50, p99
                and p99.9 of log-ratios, p1, p10, p50, p90 and p99 of values.
            abs_quantiles: of abs(x), as ``abs_log_ratio_p99_9`` of log-ratios and ``abs_p99_9`` of values. None takes
                p50, p99, p99.9 and p99.99 of log-ratios, none of values.

        Returns:
            ``{prefix + slice + "/" + statistic: value}``, int for counts and float for the rest, NaN where
            a slice has nothing finite; and ``prefix + "n_out_of_range"``. The same keys at every step.

        Raises:
            ValueError: a quantile outside [0, 1].
        """
        state = self.state.to_host()
        memo: Any = Memo(state)
        levels_of_x = self._default_quantiles if quantiles is None else tuple(quantiles)
        levels_of_abs = self._default_abs_quantiles if abs_quantiles is None else tuple(abs_quantiles)
        view: Any = self._view  # to a type checker, classes cannot be hashed
        names, functions = _scalars_with(view, _group_names(state))
        with _QUIET():
            columns = [function(memo).tolist() for function in functions]
            columns += _quantiles.quantile(memo, levels_of_x).T.tolist()
            columns += _quantiles.abs_quantile(memo, levels_of_abs).T.tolist()
        keys = _keys(prefix, state.names, names, self._stem, levels_of_x, levels_of_abs)
        values = chain([_n_out_of_range(memo).item()], *zip(*columns, strict=True))
        return dict(zip(keys, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Kind, make and version of the state and its buffer (on its device), for a checkpoint or a Ray driver."""
        return {**self.state.parts(self.kind), "buffer": self.state.buffer}

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> Self:
        """What :meth:`state_dict` gave.

        Raises:
            ValueError: another version or kind, or contents that do not fit together.
        """
        parts = dict(state_dict)
        return cls(State.from_parts(parts, cls.kind, parts.pop("buffer", None)))

    def to_bytes(self) -> bytes:
        """A versioned, checksummed binary form; see :mod:`pyrlstats.binary`. Copies the state to the host."""
        from pyrlstats import binary

        return binary.to_bytes(self.state.to_host(), self.kind)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """What :meth:`to_bytes` gave, in NumPy memory, equal to the bit.

        Raises:
            ValueError: data that is truncated, corrupted, foreign or of another version or kind.
        """
        from pyrlstats import binary

        return cls(binary.from_bytes(data, cls.kind))

    def __getstate__(self) -> dict[str, Any]:
        # in NumPy memory: a GPU's statistics can be read on a machine without one, or without torch
        return {"state": self.state.to_host()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__(pickled["state"])  # type: ignore[misc]

    def __copy__(self) -> Self:
        return type(self)(self.state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.state.copy())

    def _evaluate(self, function: Callable[[State], Array]) -> Array:
        if function not in self._values:
            self._values[function] = self._quietly(function)
        return self._values[function]

    def _evaluate_at(self, function: Callable[..., Any], points: list[float], scalar: bool) -> Any:
        """A function of the state at points; what it gives at a single one is kept, for the other slices."""
        if not scalar:
            return self._quietly(function, points)
        key = (function, points[0])
        kept = self._values_at.get(key)
        if kept is None:
            kept = self._quietly(function, points[0])
            if len(self._values_at) >= _KEPT:
                self._values_at.clear()
            self._values_at[key] = kept
        return kept

    def _quietly(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with _QUIET():
            return function(self._memo, *arguments)

    def _cells(self, names: Iterable[str]) -> list[list[str]]:
        """Head and rows of the table."""
        values = self.to_dict()
        rows = [["slice", *self._columns]]
        for name in names:
            row = [name]
            for form, key, *less in self._columns.values():
                value = values[f"{name}/{key}"] - sum(values[f"{name}/{other}"] for other in less)
                row.append("nan" if value != value else form.format(value))
            rows.append(row)
        return rows

    def __repr__(self) -> str:
        """A table of the main statistics, slices down. Copies the state to the host."""
        host = type(self)(self.state.to_host())
        return "\n".join([_table(host._cells(self)), *host._remarks()])

    def _remarks(self) -> list[str]:
        """Lines below the table."""
        n = self.n_out_of_range.item()
        return [f"{n:,} out of range: their slice id names no slice"] if n else []

    def _repr_html_(self) -> str:
        from html import escape

        host = type(self)(self.state.to_host())
        head, *rows = host._cells(self)
        html = ["<table><thead><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
        for name, *cells in rows:
            html += [f"<tr><th>{escape(name)}</th>", *(f"<td>{escape(cell)}</td>" for cell in cells), "</tr>"]
        return "".join([*html, "</tbody></table>", *(f"<p>{escape(line)}</p>" for line in host._remarks())])


@functools.lru_cache(maxsize=256)
def percentile_name(q: float) -> str:
    """``p99_9`` for 0.999."""
    return f"p{100.0 * q:.10g}".replace(".", "_")


def _nearest(name: str, owner: type) -> str:
    """A hint at the public attribute of nearly this name."""
    from difflib import get_close_matches

    near = get_close_matches(name, [one for one in dir(owner) if not one.startswith("_")], n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *numbers)))
    return "\n".join(lines)
