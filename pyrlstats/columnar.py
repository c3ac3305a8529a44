"""Many steps as a table: Arrow and Parquet, one row per step and slice (extra ``pyrlstats[parquet]``).

Columns: ``step``, ``slice``, every scalar statistic and the default quantiles under their ``to_dict`` names, then
what rebuilds the state to the bit: ``state.<accumulator>`` and the sparse histogram (``state.bins``,
``state.bin_counts``), and the same of every group as ``state.<group>.<accumulator>``. Names, layout, clip, groups and
version are in the schema's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

_METADATA = b"pyrlstats"


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Arrow and Parquet need pyarrow: pip install 'pyrlstats[parquet]'") from error
    return pyarrow


def _prefixes(state: State) -> list[str]:
    """Of the columns of the core and of every group."""
    return ["state.", *(f"state.{group.name}." for group in state.groups)]


def _state_types(state: State) -> dict[str, Any]:
    """Columns that rebuild a state like this one, and their types."""
    pa = _pyarrow()
    types = {"step": pa.int64(), "slice": pa.string()}
    for prefix, section in zip(_prefixes(state), state.sections(), strict=True):
        types |= {prefix + name: pa.int64() for name in section.rows.counts}
        types |= {prefix + name: pa.float64() for name in (*section.rows.sums, *section.rows.maxima)}
        if section.rows.binned:
            types |= {prefix + "bins": pa.list_(pa.int32()), prefix + "bin_counts": pa.list_(pa.int64())}
    return types


def to_arrow(steps: Iterable[tuple[int, SliceStats]]) -> Any:
    """A ``pyarrow.Table`` of (step, statistics) pairs. Copies each state to the host.

    Raises:
        ValueError: no steps, or steps with different slices, layout or clip.
        TypeError: other statistics than SliceStats.
        ImportError: pyarrow is missing.
    """
    pa = _pyarrow()
    rows: dict[str, list[Any]] = {}
    first: State | None = None
    for step, stats in steps:
        _check_kind(stats)
        state = stats.state.to_host()
        first = state if first is None else first
        first.check_mergeable(state)
        for name, values in _columns(step, SliceStats(state)).items():
            rows.setdefault(name, []).extend(values)
    if first is None:
        raise ValueError("steps must hold at least one (step, SliceStats) pair, got none")
    types = _state_types(first)
    fields = [
        pa.field(name, types.get(name) or (pa.int64() if isinstance(values[0], int) else pa.float64()), nullable=False)
        for name, values in rows.items()
    ]
    parts = first.parts(SliceStats.kind)
    schema = pa.schema(fields, metadata={_METADATA: json.dumps(parts).encode()})
    return pa.table({name: pa.array(values, schema.field(name).type) for name, values in rows.items()}, schema=schema)


def _check_kind(stats: object) -> None:
    if not isinstance(stats, SliceStats):
        raise TypeError(f"a table holds SliceStats, got {type(stats).__name__}: save others with to_bytes()")


def _columns(step: int, stats: SliceStats) -> dict[str, list[Any]]:
    state = stats.state
    names = list(state.names)
    flat = stats.to_dict()
    columns: dict[str, list[Any]] = {"step": [int(step)] * len(names), "slice": names}
    statistics = [key.split("/", 1)[1] for key in flat if key.startswith(f"{names[0]}/")]
    for statistic in statistics:
        columns[statistic] = [flat[f"{name}/{statistic}"] for name in names]
    for prefix, section in zip(_prefixes(state), state.sections(), strict=True):
        table = section.rows
        for name, row in zip(table.counts, section.counts.T, strict=True):
            columns[prefix + name] = row.tolist()
        for name, row in zip((*table.sums, *table.maxima), (*section.sums.T, *section.maxima.T), strict=True):
            columns[prefix + name] = row.tolist()
        if table.binned:
            filled = [np.flatnonzero(row) for row in section.histogram]
            columns[prefix + "bins"] = [bins.tolist() for bins in filled]
            columns[prefix + "bin_counts"] = [
                row[bins].tolist() for row, bins in zip(section.histogram, filled, strict=True)
            ]
    return columns


def from_arrow(table: Any) -> list[tuple[int, SliceStats]]:
    """The (step, statistics) pairs of a table that :func:`to_arrow` made, equal to the bit, in NumPy memory.

    Raises:
        ValueError: another table, or one whose contents contradict themselves.
    """
    metadata = (table.schema.metadata or {}).get(_METADATA)
    if metadata is None:
        raise ValueError("not a table of pyrlstats: its schema has no 'pyrlstats' metadata")
    try:
        parts = json.loads(metadata)
        names = list(parts["names"])
        empty = State.empty_from(parts, SliceStats.kind)
        state_columns = _state_types(empty)
        for name, wanted in state_columns.items():
            if table.schema.field(name).type != wanted:
                raise ValueError(f"column {name} must be {wanted}, got {table.schema.field(name).type}")
        columns = {name: table.column(name).to_pylist() for name in state_columns}
        steps, slices = columns.pop("step"), columns.pop("slice")
        pairs = []
        for start in range(0, len(steps), len(names)):
            rows = range(start, start + len(names))
            if slices[rows.start : rows.stop] != names or len(set(steps[rows.start : rows.stop])) != 1:
                raise ValueError(f"the rows of step {steps[start]} must be the slices {names}, in this order")
            state = empty.copy()
            for index, row in enumerate(rows):
                _fill(state, index, {name: values[row] for name, values in columns.items()})
            state.check_consistent()
            pairs.append((steps[start], SliceStats(state)))
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"not a table of pyrlstats: {error}") from error
    return pairs


def _fill(state: State, index: int, row: dict[str, Any]) -> None:
    for prefix, section in zip(_prefixes(state), state.sections(), strict=True):
        table = section.rows
        section.counts[index] = [row[prefix + name] for name in table.counts]
        section.sums[index] = [row[prefix + name] for name in table.sums]
        section.maxima[index] = [row[prefix + name] for name in table.maxima]
        if not table.binned:
            continue
        bins = np.array(row[prefix + "bins"], np.int64)
        if bins.size and not (bins[0] >= 0 and (np.diff(bins) > 0).all() and bins[-1] < section.layout.n_bins):
            raise ValueError(
                f"the bins of slice {state.names[index]!r} must ascend from 0 to {section.layout.n_bins - 1}"
            )
        section.histogram[index, bins] = row[prefix + "bin_counts"]


def write_parquet(path: str | Path, steps: Iterable[tuple[int, SliceStats]]) -> None:
    """Write (step, statistics) pairs to one Parquet file, whole or not at all; see :func:`to_arrow`."""
    table = to_arrow(steps)
    unfinished = Path(f"{path}.unfinished")
    _pyarrow().parquet.write_table(table, unfinished, write_page_checksum=True)
    os.replace(unfinished, path)


def read_parquet(path: str | Path) -> list[tuple[int, SliceStats]]:
    """The (step, statistics) pairs that :func:`write_parquet` or :class:`ParquetWriter` wrote, by step.

    A step that was written again, after a run was resumed, counts as it was written last.

    Raises:
        FileNotFoundError: nothing at ``path``, or a folder without steps.
        ValueError: something else there, or damaged.
    """
    files = _parts(path) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise FileNotFoundError(f"{path} holds no part-*.parquet: no steps have been written there")
    pairs: dict[int, SliceStats] = {}
    for file in files:
        pairs.update(_read_file(file))
    return sorted(pairs.items())


def _read_file(file: Path) -> list[tuple[int, SliceStats]]:
    pa = _pyarrow()
    try:
        table = pa.parquet.ParquetFile(file, page_checksum_verification=True).read()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{file} is not a Parquet file: {error}") from error
    return from_arrow(table)


def _parts(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob("part-*.parquet"))


class ParquetWriter:
    """Appends steps to a folder of Parquet files while a run goes on.

    Every ``rows`` steps become a file of their own, written whole or not at all: a crash costs the steps since then,
    never those before. An existing folder is continued.

    Args:
        folder: created where it does not exist.
        rows: steps kept in memory between writes.

    Raises:
        ValueError: the folder's last file is no table of pyrlstats.
    """

    def __init__(self, folder: str | Path, rows: int = 100) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows = rows
        self._pending: list[tuple[int, SliceStats]] = []
        parts = _parts(folder)
        self._like: State | None = None
        for _, stats in _read_file(parts[-1]) if parts else []:
            self._like = stats.state

    def append(self, step: int, stats: SliceStats) -> None:
        """Add one step. Copies its state to the host.

        Raises:
            TypeError: other statistics than SliceStats.
            ValueError: other slices, layout or clip than the steps before, in the folder too; nothing is changed.
        """
        _check_kind(stats)
        host = SliceStats(stats.state.to_host().copy())
        self._like = self._like or host.state
        self._like.check_mergeable(host.state)
        self._pending.append((step, host))
        if len(self._pending) >= self._rows:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        if self._pending:
            parts = _parts(self._folder)
            number = int(parts[-1].stem.split("-")[1]) + 1 if parts else 0
            write_parquet(self._folder / f"part-{number:06}.parquet", self._pending)
            self._pending = []

    def __enter__(self) -> ParquetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
