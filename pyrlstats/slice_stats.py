"""Results: ``SliceStats``, a mapping slice name -> view of its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from pyrlstats import quantiles as _quantiles
from pyrlstats import stats as _stats
from pyrlstats.layout import STATE_VERSION
from pyrlstats.quantiles import Histogram, Numbers
from pyrlstats.state import Array, State, on_one_device

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
ABS_QUANTILES = (0.5, 0.99, 0.999, 0.9999)


class _Statistic:
    """A property of a view: one row of a function of the whole state, evaluated once for all slices."""

    def __init__(self, function: Callable[[State], Array]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, view: SliceView | None, owner: type[SliceView]) -> Any:
        if view is None:
            return self
        return view._stats._evaluate(self.function)[view._index]


class SliceView:
    """The statistics of one slice, as 0-d values on the state's device.

    Counts are int64, everything else float64; NaN for a slice without finite tokens. Reading one does not sync
    (``float()``, ``print`` and ``bool`` of a GPU value do, as always in torch). Each name is defined, with
    formula, unit and source, by the function of the same name in :mod:`pyrlstats.stats`.
    """

    __slots__ = ("_index", "_stats")

    n_tokens = _Statistic(_stats.n_tokens)
    n_finite = _Statistic(_stats.n_finite)
    n_nan = _Statistic(_stats.n_nan)
    n_pos_inf = _Statistic(_stats.n_pos_inf)
    n_neg_inf = _Statistic(_stats.n_neg_inf)
    n_zero = _Statistic(_stats.n_zero)
    zero_fraction = _Statistic(_stats.zero_fraction)
    log_ratio_mean = _Statistic(_stats.log_ratio_mean)
    log_ratio_std = _Statistic(_stats.log_ratio_std)
    log_ratio_min = _Statistic(_stats.log_ratio_min)
    log_ratio_max = _Statistic(_stats.log_ratio_max)
    log_ratio_abs_mean = _Statistic(_stats.log_ratio_abs_mean)
    kl_k1 = _Statistic(_stats.kl_k1)
    kl_k2 = _Statistic(_stats.kl_k2)
    kl_k3 = _Statistic(_stats.kl_k3)
    ratio_mean = _Statistic(_stats.ratio_mean)
    ratio_std = _Statistic(_stats.ratio_std)
    ratio_min = _Statistic(_stats.ratio_min)
    ratio_max = _Statistic(_stats.ratio_max)
    ess = _Statistic(_stats.ess)
    ess_fraction = _Statistic(_stats.ess_fraction)
    max_weight_ess_fraction = _Statistic(_stats.max_weight_ess_fraction)
    chi2 = _Statistic(_stats.chi2)
    renyi2 = _Statistic(_stats.renyi2)
    clip_fraction_low = _Statistic(_stats.clip_fraction_low)
    clip_fraction_high = _Statistic(_stats.clip_fraction_high)
    clip_fraction = _Statistic(_stats.clip_fraction)

    def __init__(self, stats: SliceStats, index: int) -> None:
        self._stats = stats
        self._index = index

    def quantile(self, q: Numbers) -> Array:
        """Quantile of x (nats): 0-d for a number, (len(q),) for a sequence; see :func:`quantiles.quantile`.

        Interpolated inside a bin of relative width at most 2^-mantissa_bits; q = 0 and 1 are exact.

        Raises:
            ValueError: a q outside [0, 1].
        """
        return _quantiles.quantile(self._stats.state, q)[self._index]

    def quantile_bounds(self, q: Numbers) -> tuple[Array, Array]:
        """Certified (lo, hi) around the true quantile of x (nats), each shaped like ``quantile(q)``."""
        lo, hi = _quantiles.quantile_bounds(self._stats.state, q)
        return lo[self._index], hi[self._index]

    def abs_quantile(self, q: Numbers) -> Array:
        """Quantile of abs(x) (nats), shaped like ``quantile(q)``."""
        return _quantiles.abs_quantile(self._stats.state, q)[self._index]

    def abs_quantile_bounds(self, q: Numbers) -> tuple[Array, Array]:
        """Certified (lo, hi) around the true quantile of abs(x) (nats), each shaped like ``quantile(q)``."""
        lo, hi = _quantiles.abs_quantile_bounds(self._stats.state, q)
        return lo[self._index], hi[self._index]

    def cdf(self, x: Numbers) -> Array:
        """Share of tokens with log-ratio <= x (nats): 0-d for a number, (len(x),) for a sequence."""
        return self._stats._with_errors_ignored(_quantiles.cdf, x)[self._index]

    def tail_mass(self, x: Numbers) -> Array:
        """Share of tokens with abs(log-ratio) > x (nats): 0-d for a number, (len(x),) for a sequence."""
        return self._stats._with_errors_ignored(_quantiles.tail_mass, x)[self._index]

    def histogram(self) -> Histogram:
        """Counts (2P + 1,) and edges (2P + 2,) of x, as ``numpy.histogram`` returns them; zeros have a bin."""
        counts, edges = _quantiles.histogram(self._stats.state)
        return Histogram(counts[self._index], edges)

    def __repr__(self) -> str:
        name = self._stats.state.names[self._index]
        return f"SliceView({name!r})\n{_table(self._stats, [name])}"


SCALARS: tuple[str, ...] = tuple(name for name, value in vars(SliceView).items() if isinstance(value, _Statistic))


class SliceStats(Mapping[str, SliceView]):
    """Statistics of every slice: ``stats["post_tool"].ess_fraction``.

    Attributes:
        state: the mergeable :class:`~pyrlstats.state.State` behind it.
    """

    kind = "log_ratio"

    def __init__(self, state: State) -> None:
        self.state = state
        self._values: dict[Callable[[State], Array], Array] = {}

    def __getitem__(self, name: str) -> SliceView:
        try:
            return SliceView(self, self.state.names.index(name))
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.state.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.state.names)

    def __len__(self) -> int:
        return len(self.state.names)

    @property
    def n_out_of_range(self) -> Array:
        """Tokens whose slice id named no slice (0-d int64): they are in none, and counted here."""
        return self.state.count("n_out_of_range").sum()

    def merge(self, other: SliceStats | Iterable[SliceStats]) -> SliceStats:
        """The pooled statistics of this and ``other``, one or several, as if all tokens had come in one call.

        None is changed. Does not sync. What lies in NumPy memory is moved to the device of the others.

        Raises:
            ValueError: other slices, layout or clip, or tensors on different devices.
        """
        others = [other] if isinstance(other, SliceStats) else other
        first, *rest = on_one_device([self.state, *(one.state for one in others)])
        merged = first.copy()
        for state in rest:
            merged.merge_(state)
        return SliceStats(merged)

    def __add__(self, other: object) -> SliceStats:
        if not isinstance(other, SliceStats):
            return NotImplemented
        return self.merge(other)

    def __radd__(self, other: object) -> SliceStats:
        return self if other == 0 else NotImplemented  # sum() starts at 0

    def to(self, device: Any) -> SliceStats:
        """The same statistics on a torch device."""
        import torch

        buffer = self.state.buffer
        tensor = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
        return SliceStats(replace(self.state, buffer=tensor.to(device)))

    def to_dict(
        self,
        prefix: str = "",
        *,
        quantiles: Sequence[float] = QUANTILES,
        abs_quantiles: Sequence[float] = ABS_QUANTILES,
    ) -> dict[str, float]:
        """Every statistic as Python numbers, for a logger. Copies the state to the host: one sync on a GPU.

        Args:
            prefix: put before every key.
            quantiles: of x, as ``log_ratio_p99``.
            abs_quantiles: of abs(x), as ``abs_log_ratio_p99_9``.

        Returns:
            ``{prefix + slice + "/" + statistic: value}``, int for counts and float for the rest, NaN where
            a slice has no finite tokens; and ``prefix + "n_out_of_range"``. The same keys at every step.

        Raises:
            ValueError: a quantile outside [0, 1].
        """
        host = SliceStats(self.state.to_host())
        columns = {name: host._evaluate(getattr(SliceView, name).function).tolist() for name in SCALARS}
        for stem, function, levels in (
            ("log_ratio", _quantiles.quantile, quantiles),
            ("abs_log_ratio", _quantiles.abs_quantile, abs_quantiles),
        ):
            values = host._with_errors_ignored(function, list(levels))
            for q, column in zip(levels, values.T.tolist(), strict=True):
                columns[f"{stem}_{percentile_name(q)}"] = column
        result: dict[str, float] = {f"{prefix}n_out_of_range": host.n_out_of_range.item()}
        for index, name in enumerate(self.state.names):
            for statistic, column in columns.items():
                result[f"{prefix}{name}/{statistic}"] = column[index]
        return result

    def state_dict(self) -> dict[str, Any]:
        """Names, layout, clip, version and the state's buffer (on its device), for a checkpoint or a Ray driver."""
        return {
            "version": STATE_VERSION,
            "names": list(self.state.names),
            "layout": astuple(self.state.layout),
            "clip": self.state.clip,
            "buffer": self.state.buffer,
        }

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> SliceStats:
        """What :meth:`state_dict` gave.

        Raises:
            ValueError: another version, or contents that do not fit together.
        """
        return cls(State.from_parts(**state_dict))

    def to_bytes(self) -> bytes:
        """A versioned, checksummed binary form; see :mod:`pyrlstats.binary`. Copies the state to the host."""
        from pyrlstats import binary

        return binary.to_bytes(self.state.to_host())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> SliceStats:
        """What :meth:`to_bytes` gave, in NumPy memory, equal to the bit.

        Raises:
            ValueError: data that is truncated, corrupted, foreign or of another version.
        """
        from pyrlstats import binary

        return cls(binary.from_bytes(data))

    def __getstate__(self) -> dict[str, Any]:
        # in NumPy memory: a GPU's statistics can be read on a machine without one, or without torch
        return {"state": self.state.to_host()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__(pickled["state"])  # type: ignore[misc]

    def __copy__(self) -> SliceStats:
        return SliceStats(self.state)

    def __deepcopy__(self, memo: dict[int, Any]) -> SliceStats:
        return SliceStats(self.state.copy())

    def _evaluate(self, function: Callable[[State], Array]) -> Array:
        if function not in self._values:
            self._values[function] = self._with_errors_ignored(function)
        return self._values[function]

    def _with_errors_ignored(self, function: Callable[..., Array], *arguments: Any) -> Array:
        # empty slices divide 0 by 0 on their way to NaN
        with np.errstate(all="ignore"):
            return function(self.state, *arguments)

    def __repr__(self) -> str:
        """A table of the main statistics, slices down. Copies the state to the host."""
        return _table(self, list(self))

    def _repr_html_(self) -> str:
        from html import escape

        head, *rows = _cells(self, list(self))
        html = ["<table><thead><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
        for name, *cells in rows:
            html += [f"<tr><th>{escape(name)}</th>", *(f"<td>{escape(cell)}</td>" for cell in cells), "</tr>"]
        return "".join([*html, "</tbody></table>"])


def percentile_name(q: float) -> str:
    """``p99_9`` for 0.999."""
    return f"p{100.0 * q:.10g}".replace(".", "_")


_COLUMNS = {
    "tokens": ("n_tokens", "{:,}"),
    "not finite": (None, "{:,}"),
    "zero": ("zero_fraction", "{:.2%}"),
    "ESS": ("ess_fraction", "{:.2%}"),
    "KL k3": ("kl_k3", "{:.3g}"),
    "|x| p50": ("abs_log_ratio_p50", "{:.3g}"),
    "|x| p99": ("abs_log_ratio_p99", "{:.3g}"),
    "|x| p99.9": ("abs_log_ratio_p99_9", "{:.3g}"),
    "min x": ("log_ratio_min", "{:.3g}"),
    "max x": ("log_ratio_max", "{:.3g}"),
    "clipped": ("clip_fraction", "{:.2%}"),
}


def _cells(stats: SliceStats, names: list[str]) -> list[list[str]]:
    values = stats.to_dict(abs_quantiles=(0.5, 0.99, 0.999))
    rows = [["slice", *_COLUMNS]]
    for name in names:
        row = [name]
        for key, form in _COLUMNS.values():
            if key is None:
                value: float = values[f"{name}/n_tokens"] - values[f"{name}/n_finite"]
            else:
                value = values[f"{name}/{key}"]
            row.append("nan" if value != value else form.format(value))
        rows.append(row)
    return rows


def _table(stats: SliceStats, names: list[str]) -> str:
    rows = _cells(stats, names)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *numbers)))
    return "\n".join(lines)
