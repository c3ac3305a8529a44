"""Many steps as a table: Arrow and Parquet, one row per step and slice (extra ``pyrlstats[parquet]``).

Columns: ``step``, ``slice``, every scalar statistic and the default quantiles under their ``to_dict`` names, then
what rebuilds the state to the bit: ``state.<accumulator>`` and the sparse histogram (``state.bins``,
``state.bin_counts``). Names, layout, clip and version are in the schema's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pyrlstats.layout import COUNTS, MAXIMA, STATE_VERSION, SUMS, Layout
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State, words_of

_METADATA = b"pyrlstats"


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Arrow and Parquet need pyarrow: pip install 'pyrlstats[parquet]'") from error
    return pyarrow


def to_arrow(steps: Iterable[tuple[int, SliceStats]]) -> Any:
    """A ``pyarrow.Table`` of (step, statistics) pairs. Copies each state to the host.

    Raises:
        ValueError: no steps, or steps with different slices, layout or clip.
        ImportError: pyarrow is missing.
    """
    pa = _pyarrow()
    rows: dict[str, list[Any]] = {}
    first: State | None = None
    for step, stats in steps:
        state = stats.state.to_host()
        first = state if first is None else first
        first.check_mergeable(state)
        for name, values in _columns(step, SliceStats(state)).items():
            rows.setdefault(name, []).extend(values)
    if first is None:
        raise ValueError("steps must hold at least one (step, SliceStats) pair, got none")
    types = {"step": pa.int64(), "slice": pa.string(), "state.bins": pa.list_(pa.int32())}
    types["state.bin_counts"] = pa.list_(pa.int64())
    types |= {f"state.{name}": pa.int64() for name in COUNTS}
    integers = [name for name, values in rows.items() if isinstance(values[0], int)]
    fields = [
        pa.field(name, types.get(name, pa.int64() if name in integers else pa.float64()), nullable=False)
        for name in rows
    ]
    make = {
        "version": STATE_VERSION,
        "names": first.names,
        "layout": astuple(first.layout),
        "clip": first.clip,
    }
    schema = pa.schema(fields, metadata={_METADATA: json.dumps(make).encode()})
    return pa.table({name: pa.array(values, schema.field(name).type) for name, values in rows.items()}, schema=schema)


def _columns(step: int, stats: SliceStats) -> dict[str, list[Any]]:
    state = stats.state
    names = list(state.names)
    flat = stats.to_dict()
    columns: dict[str, list[Any]] = {"step": [int(step)] * len(names), "slice": names}
    statistics = [key.split("/", 1)[1] for key in flat if key.startswith(f"{names[0]}/")]
    for statistic in statistics:
        columns[statistic] = [flat[f"{name}/{statistic}"] for name in names]
    for name in COUNTS:
        columns[f"state.{name}"] = state.count(name).tolist()
    for name in SUMS:
        columns[f"state.{name}"] = state.sum(name).tolist()
    for name in MAXIMA:
        columns[f"state.{name}"] = state.maximum(name).tolist()
    filled = [np.flatnonzero(row) for row in state.histogram]
    columns["state.bins"] = [bins.tolist() for bins in filled]
    columns["state.bin_counts"] = [row[bins].tolist() for row, bins in zip(state.histogram, filled, strict=True)]
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
        make = json.loads(metadata)
        slices = len(make["names"])
        words = words_of(slices, Layout(*make["layout"]))
        columns = {name: table.column(name).to_pylist() for name in table.column_names if name.startswith("state.")}
        steps = table.column("step").to_pylist()
        pairs = []
        for start in range(0, len(steps), slices):
            state = State.from_parts(**make, buffer=np.zeros(words, np.int64))
            for index in range(slices):
                _fill_row(state, index, {name: values[start + index] for name, values in columns.items()})
            state.check_consistent()
            pairs.append((steps[start], SliceStats(state)))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a table of pyrlstats: {error}") from error
    return pairs


def _fill_row(state: State, index: int, row: dict[str, Any]) -> None:
    state.counts[index] = [row[f"state.{name}"] for name in COUNTS]
    state.sums[index] = [row[f"state.{name}"] for name in SUMS]
    state.maxima[index] = [row[f"state.{name}"] for name in MAXIMA]
    state.histogram[index, row["state.bins"]] = row["state.bin_counts"]


def write_parquet(path: str | Path, steps: Iterable[tuple[int, SliceStats]]) -> None:
    """Write (step, statistics) pairs to a Parquet file; see :func:`to_arrow`."""
    table = to_arrow(steps)
    _pyarrow().parquet.write_table(table, path)


def read_parquet(path: str | Path) -> list[tuple[int, SliceStats]]:
    """The (step, statistics) pairs of a file that :func:`write_parquet` or :class:`ParquetWriter` wrote.

    Raises:
        ValueError: no such table in the file.
    """
    pa = _pyarrow()
    try:
        table = pa.parquet.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    return from_arrow(table)


class ParquetWriter:
    """Appends steps to one Parquet file while a run goes on: a row group per ``rows`` steps, closed at the end.

    Args:
        path: the file to create.
        rows: steps kept in memory between writes.
    """

    def __init__(self, path: str | Path, rows: int = 100) -> None:
        self._path = path
        self._rows = rows
        self._pending: list[tuple[int, SliceStats]] = []
        self._writer: Any = None

    def append(self, step: int, stats: SliceStats) -> None:
        """Add one step. Copies its state to the host.

        Raises:
            ValueError: other slices, layout or clip than the steps before; the file is left as it was.
        """
        host = SliceStats(stats.state.to_host())
        if self._pending:
            self._pending[0][1].state.check_mergeable(host.state)
        self._pending.append((step, host))
        if len(self._pending) >= self._rows:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        table = to_arrow(self._pending)
        if self._writer is None:
            self._writer = _pyarrow().parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
        self._pending = []

    def close(self) -> None:
        """Write what is pending and finish the file."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> ParquetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def between(pairs: Iterable[tuple[int, SliceStats]], first: int, last: int) -> SliceStats:
    """The pooled statistics of the saved steps from ``first`` to ``last``, both included.

    Raises:
        ValueError: no saved step lies there, or the steps differ in slices, layout or clip.
    """
    chosen: Iterator[SliceStats] = (stats for step, stats in pairs if first <= step <= last)
    start = next(chosen, None)
    if start is None:
        raise ValueError(f"no saved step lies from {first} to {last}")
    return start.merge(chosen)
