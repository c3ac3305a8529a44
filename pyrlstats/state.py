"""The mergeable state: what the kernels fill and every statistic reads.

One flat buffer of int64 words, so that a state is one allocation, one copy to the host and one payload::

    [ counts: S x len(COUNTS) | histogram: S x 2P | sums: S x len(SUMS) | maxima: S x len(MAXIMA) ]

The last two are float64 views of the same words. Groups that were asked for follow in the same form, each with the
rows of its own table. The size depends on slices, layout and groups, never on data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyrlstats.layout import (
    CORE,
    LOG2E,
    STATE_VERSION,
    TABLES,
    Layout,
    Table,
    check_clip,
    check_names,
    check_thresholds,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Array = Any  # a NumPy array or a torch tensor

PARTS = {"version", "kind", "names", "layout", "clip"}  # that a saved state names beside its buffer; groups may follow

_NEGATIVE_INFINITY = int(np.float64(-np.inf).view(np.int64))  # its bits
_MAX_COUNT = 2**53  # what float64 holds exactly
_MAX_FLOAT32 = 3.4028234663852886e38


def namespace(array: Array) -> Any:
    """``torch`` for a tensor, ``numpy`` otherwise: the functions used on states have the same names in both."""
    if isinstance(array, np.ndarray):
        return np
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else np


def scale_exponent(max_x: Array) -> Array:
    """k of the far weights' scale 2^-k: floor(max x log2 e) in float64, 0 for an empty slice.

    The same bits on every backend: one IEEE multiplication and a floor.
    """
    xp = namespace(max_x)
    # each of them is slow in the other: 12 us against 3 in NumPy, 5 kernels against 1 in torch
    finite = np.where(np.isfinite(max_x), max_x, 0.0) if xp is np else max_x.nan_to_num(0.0, 0.0, 0.0)
    return xp.floor(finite * LOG2E)


def power_of_two(exponent: Array) -> Array:
    """2^exponent exactly, for float64 integers; 0 below 2^-1022, inf above 2^1023."""
    xp = namespace(exponent)
    biased = xp.asarray(exponent.clip(-1023.0, 1024.0), dtype=xp.int64) + 1023
    return (biased << 52).view(xp.float64)


class Group(NamedTuple):
    """One group of rows beside the core, for every slice.

    Attributes:
        name: of the group, such as "entropy".
        table: name of its rows in ``layout.TABLES``.
        layout: bins of its histogram, where it has one.
        thresholds: what its counts are decided by.
    """

    name: str
    table: str
    layout: Layout
    thresholds: tuple[float, ...] = ()

    def said(self) -> str:
        """The name and what its counts are decided by, for messages."""
        return f"{self.name} {self.thresholds}" if self.thresholds else self.name


def _all_counts(values: Array) -> bool:
    return bool(values.min() >= 0 and values.max() <= _MAX_COUNT)


def on_one_device(states: Sequence[State]) -> list[State]:
    """The states, those in NumPy memory moved to the device of the first that is a tensor (if one is).

    They share memory with the states given where nothing moves. Does not sync.
    """
    tensors = [state.buffer for state in states if not isinstance(state.buffer, np.ndarray)]
    if not tensors:
        return list(states)
    import torch

    return [
        replace(state, buffer=torch.from_numpy(state.buffer).to(tensors[0].device))
        if isinstance(state.buffer, np.ndarray)
        else state
        for state in states
    ]


def rescale_(table: Table, sums: Array, up: Array) -> None:
    """Multiply the scaled rows of sums (S, len(table.sums)) by 2^(p up) (S,), up <= 0, in place: exact.

    Merging never raises a scale, except that of an empty state, which has nothing scaled: up > 0 counts as 0.
    """
    if table.scaled:
        factor = power_of_two(namespace(up).clip(up, None, 0.0))
        for name, power in table.scaled:
            row = sums[:, table.sums.index(name)]
            row *= factor if power == 1 else factor**power


def words_of(slices: int, layout: Layout, table: Table = CORE) -> int:
    """Size of the buffer of a state without groups, in int64 words."""
    bins = layout.n_bins if table.binned else 0
    return slices * (len(table.counts) + bins + len(table.sums) + len(table.maxima))


@lru_cache(maxsize=64)
def _places(
    slices: int, layout: Layout, groups: tuple[Group, ...], first: str = "core"
) -> tuple[int, tuple[slice, ...]]:
    """Size of a state's buffer in words, and where in it the maxima of the ``first`` table and of every group lie."""
    words, maxima = 0, []
    for its_layout, name in ((layout, first), *((group.layout, group.table) for group in groups)):
        table = TABLES[name]
        words += words_of(slices, its_layout, table)
        maxima.append(slice(words - slices * len(table.maxima), words))
    return words, tuple(maxima)


def _forget_maxima(buffer: Array, maxima: tuple[slice, ...]) -> None:
    if isinstance(buffer, np.ndarray):
        for place in maxima:
            buffer[place] = _NEGATIVE_INFINITY
    else:
        for place in maxima:
            buffer[place].fill_(_NEGATIVE_INFINITY)


class _Spare(NamedTuple):
    """States of no tokens on a GPU: one to copy, and copies not yet given out."""

    model: Any
    copies: list[Any]


_SPARE_COPIES = 8
_SPARE_BYTES = 512 << 10
_LINE = 16  # words: kernels take it that a buffer begins at a multiple of 16 bytes
_spare: dict[tuple[Any, ...], _Spare] = {}  # by what they are of, device and stream


def _empty_tensor(slices: int, layout: Layout, groups: tuple[Group, ...], device: Any) -> Any:
    """The buffer of a state of no tokens. On a GPU one of several made by one copy: 2 us of host time, not 16."""
    import torch

    key: tuple[Any, ...] | None = None
    # a graph would go on reading what is thrown away later
    if device.type == "cuda" and device.index is not None and not torch.cuda.is_current_stream_capturing():
        # of the same stream: nothing else says when they have been filled
        key = (slices, layout, groups, device, torch._C._cuda_getCurrentRawStream(device.index))
        spare = _spare.get(key)
        if spare is not None:
            try:
                return spare.copies.pop()
            except IndexError:  # not asked first: another thread may take the last one
                return _copies_of(spare)
    words, maxima = _places(slices, layout, groups)
    buffer = torch.zeros(words, dtype=torch.int64, device=device)
    _forget_maxima(buffer, maxima)
    if key is not None and type(buffer) is torch.Tensor:
        if len(_spare) == 16:
            _spare.clear()
        _spare[key] = _Spare(buffer.clone(), [])
    return buffer


def _copies_of(spare: _Spare) -> Any:
    """A copy of the model; where it is small, of as many as are kept for the next calls too."""
    words = len(spare.model)
    stride = -(-words // _LINE) * _LINE
    count = min(_SPARE_COPIES, _SPARE_BYTES // (8 * stride))
    if count < 2:
        return spare.model.clone()
    rows = spare.model.new_empty((count, stride))[:, :words]
    rows.copy_(spare.model)
    first, *others = rows.unbind()
    spare.copies.extend(others)
    return first


@dataclass(frozen=True)
class State:
    """Mergeable state of ``S`` slices, on one device.

    Attributes:
        names: the slices, in order.
        layout: bins of the histogram.
        clip: (low, high) of the clip counts; the thresholds of its own counts in the state of a group.
        buffer: int64 (words,), the whole state. The views below share its memory.
        groups: what follows the core in the buffer.
        table: name of its rows in ``layout.TABLES``.
        counts: int64 (S, len(COUNTS)), tokens.
        histogram: int64 (S, 2P), tokens; bins ascend in value; zeros and non-finite tokens are in no bin.
        sums: float64 (S, len(SUMS)).
        maxima: float64 (S, len(MAXIMA)), nats; -inf for an empty slice.
    """

    names: tuple[str, ...]
    layout: Layout
    clip: tuple[float, ...]
    buffer: Array
    groups: tuple[Group, ...] = ()
    table: str = "core"

    @property
    def rows(self) -> Table:
        """What the counts, sums and maxima are of."""
        return TABLES[self.table]

    @classmethod
    def empty(
        cls,
        names: Sequence[str],
        layout: Layout,
        clip: tuple[float, ...],
        device: Any = None,
        groups: tuple[Group, ...] = (),
    ) -> State:
        """A state of no tokens: on a torch device, or in NumPy memory where ``device`` is None."""
        if device is not None:
            import torch

            if torch.is_inference_mode_enabled():  # an accumulator is updated inside and outside of it
                with torch.inference_mode(False):
                    return cls.empty(names, layout, clip, device, groups)
            buffer: Array = _empty_tensor(len(names), layout, groups, torch.device(device))
            return cls(tuple(names), layout, clip, buffer, groups)
        words, maxima = _places(len(names), layout, groups)
        buffer = np.zeros(words, np.int64)
        _forget_maxima(buffer, maxima)
        return cls(tuple(names), layout, clip, buffer, groups)

    def core(self) -> Self:
        """The state without its groups, in the same memory."""
        if not self.groups:
            return self
        words = words_of(len(self.names), self.layout, self.rows)
        return type(self)(self.names, self.layout, self.clip, self.buffer[:words], (), self.table)

    def sections(self) -> Iterator[Self]:
        """The core and every group as states of their own, in the same memory, in the order of the buffer."""
        yield self.core()
        slices = len(self.names)
        start = words_of(slices, self.layout, self.rows)
        for group in self.groups:
            stop = start + words_of(slices, group.layout, TABLES[group.table])
            yield type(self)(self.names, group.layout, group.thresholds, self.buffer[start:stop], (), group.table)
            start = stop

    def group(self, name: str) -> Self:
        """One group as a state of its own, in the same memory.

        Raises:
            KeyError: it has not been asked for.
        """
        names = [group.name for group in self.groups]
        if name not in names:
            raise KeyError(name)
        return list(self.sections())[1 + names.index(name)]

    def parts(self, kind: str) -> dict[str, Any]:
        """What tells a saved buffer's meaning, as plain values: the ``kind`` of its statistics, and its make."""
        return {
            "version": STATE_VERSION,
            "kind": kind,
            "names": list(self.names),
            "layout": list(astuple(self.layout)),
            "clip": list(self.clip),
            **({"groups": [group_parts(group) for group in self.groups]} if self.groups else {}),
        }

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any], kind: str, buffer: Array) -> State:
        """A state from what :meth:`parts` gave, checked.

        Args:
            parts: version, kind, names, layout and clip.
            kind: of the statistics wanted: "log_ratio" or "value".
            buffer: int64 (words,), taken as it is, not copied.

        Raises:
            ValueError: other parts, another version or kind, bad names, layout or clip, or a buffer that does not fit.
        """
        names, layout, clip, groups = _make_from(parts, kind)
        state = cls(names, layout, clip, buffer, groups)
        words, _ = _places(len(names), layout, groups)
        dtype, shape = getattr(buffer, "dtype", type(buffer).__name__), tuple(getattr(buffer, "shape", ()))
        if shape != (words,) or dtype != namespace(buffer).int64:
            raise ValueError(f"buffer must hold {words} int64 words, got {dtype} of shape {shape}")
        return state

    @classmethod
    def empty_from(cls, parts: Mapping[str, Any], kind: str) -> State:
        """A state of no tokens of the make that :meth:`parts` gave, in NumPy memory.

        Raises:
            ValueError: as :meth:`from_parts`.
        """
        names, layout, clip, groups = _make_from(parts, kind)
        return cls.empty(names, layout, clip, None, groups)

    def check_consistent(self) -> None:
        """Raise ValueError unless the counts could come from tokens. Syncs."""
        for part in self.to_host().sections():
            part._check_section()

    def _check_section(self) -> None:
        host = self
        if not self.rows.binned:
            if (self.counts.size and not _all_counts(self.counts)) or np.isnan(self.maxima).any():
                raise ValueError("the counts of this state contradict each other: the data is damaged")
            return
        counts = {name: host.count(name) for name in CORE.counts}
        finite = host.histogram.sum(-1) + counts["n_zero"]
        highest, lowest = host.maximum("max_x"), -host.maximum("neg_min_x")
        extrema_fit = np.where(
            finite > 0,
            (lowest >= -_MAX_FLOAT32) & (lowest <= highest) & (highest <= _MAX_FLOAT32),
            (highest == -np.inf) & (lowest == np.inf),
        )
        if (
            not _all_counts(host.counts)
            or not _all_counts(host.histogram)
            or host.histogram.sum(-1, dtype=np.float64).max() > _MAX_COUNT
            or (counts["n_tokens"] != finite + counts["n_nan"] + counts["n_pos_inf"] + counts["n_neg_inf"]).any()
            or (counts["clip_low"] + counts["clip_high"] > finite).any()
            or (counts["n_far"] > finite - counts["n_zero"]).any()
            or not extrema_fit.all()
            or np.isnan(host.sums).any()
        ):
            raise ValueError("the counts of this state contradict each other: the data is damaged")

    def _view(self, start: int, columns: int) -> Array:
        slices = len(self.names)
        return self.buffer[slices * start : slices * (start + columns)].reshape(slices, columns)

    @property
    def _bins(self) -> int:
        return self.layout.n_bins if self.rows.binned else 0

    @property
    def counts(self) -> Array:
        return self._view(0, len(self.rows.counts))

    @property
    def histogram(self) -> Array:
        return self._view(len(self.rows.counts), self._bins)

    @property
    def sums(self) -> Array:
        words = self._view(len(self.rows.counts) + self._bins, len(self.rows.sums))
        return words.view(namespace(words).float64)

    @property
    def maxima(self) -> Array:
        words = self._view(len(self.rows.counts) + self._bins + len(self.rows.sums), len(self.rows.maxima))
        return words.view(namespace(words).float64)

    def count(self, name: str) -> Array:
        """One row of the table's counts for every slice: int64 (S,)."""
        return self.counts[:, self.rows.counts.index(name)]

    def sum(self, name: str) -> Array:
        """One row of the table's sums for every slice: float64 (S,)."""
        return self.sums[:, self.rows.sums.index(name)]

    def maximum(self, name: str) -> Array:
        """One row of the table's maxima for every slice: float64 (S,)."""
        return self.maxima[:, self.rows.maxima.index(name)]

    def n_finite(self) -> Array:
        """Members with finite x of every slice: int64 (S,)."""
        return self.count("n_tokens") - self.count("n_nan") - self.count("n_pos_inf") - self.count("n_neg_inf")

    def copy(self) -> State:
        """The same state in memory of its own, on the same device. Does not sync."""
        xp = namespace(self.buffer)
        return replace(self, buffer=self.buffer.clone() if xp is not np else self.buffer.copy())

    def to_host(self) -> State:
        """The same state in NumPy memory: one device-to-host copy, which syncs on a GPU."""
        if namespace(self.buffer) is np:
            return self
        if self.buffer.device.type == "cuda":
            import torch

            pinned = self._on_its_way()
            torch.cuda.current_stream(self.buffer.device).synchronize()
            return _in_host_memory(self, pinned)
        return replace(self, buffer=self.buffer.cpu().numpy())

    def start_to_host(self) -> Callable[[], State]:
        """Start :meth:`to_host`; what is returned waits for this copy alone, not for what is queued behind it."""
        if namespace(self.buffer) is np or self.buffer.device.type != "cuda":
            host = self.to_host()
            return lambda: host
        import torch

        pinned = self._on_its_way()
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self.buffer.device))

        def wait() -> State:
            arrived.synchronize()
            return _in_host_memory(self, pinned)

        return wait

    def _on_its_way(self) -> Array:
        """Pinned memory that the buffer is being copied to: the copy engine writes to it directly."""
        import torch

        pinned = torch.empty(self.buffer.shape, dtype=self.buffer.dtype, pin_memory=True)
        return pinned.copy_(self.buffer, non_blocking=True)

    def clear_(self) -> None:
        """Forget every token, in place."""
        self.buffer[...] = 0
        _forget_maxima(self.buffer, _places(len(self.names), self.layout, self.groups, self.table)[1])

    def check_mergeable(self, other: State) -> None:
        """Raise ValueError, naming what differs, unless ``other`` holds the same slices, layout and clip."""
        if type(self) is not type(other):
            raise ValueError("exact and decayed statistics never merge: the counts of the latter are weighted")
        for field in ("names", "layout", "clip", "groups"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                if field == "groups":
                    mine, theirs = ([group.said() for group in groups] for groups in (mine, theirs))
                raise ValueError(
                    f"states with different {field} cannot be merged: {mine} and {theirs}; "
                    f"make both with the same {field}"
                )
        xp = namespace(self.buffer)
        if xp is not namespace(other.buffer):
            raise ValueError(
                "a state in NumPy memory and one in torch memory cannot be merged: "
                "make both from the same kind of input"
            )
        if xp is not np and self.buffer.device != other.buffer.device:
            raise ValueError(
                f"states on {self.buffer.device} and {other.buffer.device} cannot be merged: move one with .to(device)"
            )

    def merge_(self, other: State) -> None:
        """Pool ``other`` into this state, in place: SUM, MAX, and the exact rescale of the far weights.

        Raises:
            ValueError: other slices, layout, clip or device; both states are left unchanged.
        """
        self.check_mergeable(other)
        for mine, theirs in zip(self.sections(), other.sections(), strict=True):
            mine._merge_section(theirs)

    def _merge_section(self, other: State) -> None:
        maxima = namespace(self.buffer).maximum(self.maxima, other.maxima)
        sums = self._sums_at(maxima) + other._sums_at(maxima)
        for mine, theirs in ((self.counts, other.counts), (self.histogram, other.histogram)):
            mine += theirs
        self.sums[...] = sums
        self.maxima[...] = maxima

    def _sums_at(self, maxima: Array) -> Array:
        """A copy of the sums on the scale of these maxima, exactly."""
        sums = self.sums + 0.0
        if self.rows.scaled:
            max_x = self.rows.maxima.index("max_x")
            rescale_(self.rows, sums, scale_exponent(self.maxima[:, max_x]) - scale_exponent(maxima[:, max_x]))
        return sums


def _in_host_memory(state: State, pinned: Array) -> State:
    """The state in NumPy memory of its own, so that the cached pinned block goes back at once."""
    return replace(state, buffer=pinned.numpy().copy())


def _make_from(
    parts: Mapping[str, Any], kind: str
) -> tuple[tuple[str, ...], Layout, tuple[float, float], tuple[Group, ...]]:
    """Names, layout, clip and groups that :meth:`State.parts` gave, checked."""
    if set(parts) - {"groups"} != PARTS:
        raise ValueError(f"the parts of a state are {sorted(PARTS)}, got {sorted(map(str, parts))}")
    if parts["version"] != STATE_VERSION:
        raise ValueError(
            f"state version {STATE_VERSION} is supported, got {parts['version']!r}: use the same pyrlstats"
        )
    if parts["kind"] != kind:
        raise ValueError(f"statistics of kind {kind!r} are wanted, got {parts['kind']!r}: read them as those")
    try:
        low, high = parts["clip"]
        groups = tuple(group_from(group) for group in parts.get("groups", ()))
        return check_names(parts["names"]), Layout(*parts["layout"]), check_clip((low, high)), groups
    except (TypeError, IndexError) as error:
        raise ValueError(f"not the parts of a state: {error}") from error


def group_parts(group: Group) -> list[Any]:
    """A group as plain values."""
    return [group.name, group.table, list(astuple(group.layout)), list(group.thresholds)]


def group_from(parts: Sequence[Any]) -> Group:
    """What :func:`group_parts` gave, checked.

    Raises:
        ValueError, TypeError: something else.
    """
    name, table, layout, thresholds = parts
    if not isinstance(name, str) or table not in TABLES:
        raise ValueError(f"no group of rows {name!r} of table {table!r}: it is of another pyrlstats")
    return Group(name, table, Layout(*layout), check_thresholds(table, thresholds))
