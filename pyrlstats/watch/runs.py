"""Recorded runs of every kind, read alike: our run folder, our Parquet, JSON lines of scalars, a trainer_state.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import COUNTS, MAXIMA, SUMS, Layout
from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.folder import RUN, STEPS, Record, RunReader
from pyrlstats.monitor.records import decode_line, decode_words
from pyrlstats.monitor.rules_names import as_number
from pyrlstats.monitor.rules_replay import Table
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

Floats = NDArray[np.float64]


class RunError(ValueError):
    """A run that cannot be read: what was found, and what would do."""


class States(Protocol):
    """The states of a run's steps, never all in memory."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def has(self, index: int) -> bool:
        """Whether this step came with statistics."""
        ...

    def read(self, indices: Sequence[int]) -> Iterator[State | None]:
        """The states of these steps, which ascend; None of one that cannot be read, or has none."""
        ...


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        path: where it is.
        kind: in words.
        table: scalars, and statistics where they were logged as figures, by step.
        times: seconds since 1970 of each step, (n,), NaN where unknown.
        states: of the steps; None where only figures were logged.
        alerts: that a monitor raised; None where no monitor watched.
        damaged: lines that could not be read.
    """

    path: Path
    kind: str
    table: Table
    times: Floats
    states: States | None = None
    alerts: list[Alert] | None = None
    damaged: int = 0

    @property
    def steps(self) -> NDArray[np.int64]:
        """Numbers of the steps, ascending."""
        return self.table.steps


def open_run(path: str | Path) -> Run:
    """Read a run, whatever wrote it.

    Args:
        path: a run folder of the monitor; a folder of ``ParquetWriter``, or one Parquet file; a .jsonl file of scalars,
            one object a line; a trainer_state.json, or a folder that holds one of these.

    Raises:
        RunError: nothing of the kind, or it cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.exists():
            raise RunError(
                f"{path} is not there: give a run folder, a .jsonl or .parquet file, or a trainer_state.json"
            )
        return _open_file(path)
    except RunError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def _open_folder(path: Path) -> Run:
    if (path / RUN).exists():
        return _monitored(path)
    if any(path.glob("part-*.parquet")):
        return _parquet(path, sorted(path.glob("part-*.parquet")))
    for name in ("trainer_state.json", "steps.jsonl", "metrics.jsonl"):
        if (path / name).is_file():
            return _open_file(path / name)
    checkpoints = sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda each: each.stat().st_mtime)
    if checkpoints:
        return _open_file(checkpoints[-1])
    lines = sorted([*path.glob("*.jsonl"), *path.glob("*.ndjson")])
    if len(lines) == 1:
        return _open_file(lines[0])
    if lines:
        raise RunError(f"{path} holds several files of lines ({', '.join(each.name for each in lines)}): name one")
    raise RunError(
        f"{path} holds no run: neither {RUN}, part-*.parquet, a .jsonl file nor a trainer_state.json"
        + ("" if any(path.iterdir()) else "; it is empty")
    )


def _open_file(path: Path) -> Run:
    if path.suffix == ".parquet":
        return _parquet(path, [path])
    if path.suffix in (".jsonl", ".ndjson"):
        return _json_lines(path)
    if path.suffix == ".json":
        return _trainer_state(path)
    raise RunError(f"{path} is no run: give a folder, a .jsonl, .parquet or .json file")


class Rows:
    """Signals of steps as they are read; a step that comes again is added to, one below the last goes back to it."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._rows: list[dict[str, float]] = []
        self._times: list[float] = []

    def add(self, step: int, values: Mapping[str, float], time: float = math.nan) -> None:
        """One line of figures."""
        while self._steps and step < self._steps[-1]:
            for each in (self._steps, self._rows, self._times):
                each.pop()
        if self._steps and step == self._steps[-1]:
            self._rows[-1].update(values)
            return
        self._steps.append(step)
        self._rows.append(dict(values))
        self._times.append(time)

    def table(self) -> Table:
        """All of it as columns."""
        return table_of(self._steps, self._rows)

    @property
    def times(self) -> Floats:
        """Of each step."""
        return np.array(self._times, np.float64)


def table_of(steps: Iterable[int], rows: Sequence[Mapping[str, float]]) -> Table:
    """Rows of figures as columns."""
    columns: dict[str, Floats] = {}
    present: dict[str, NDArray[np.bool_]] = {}
    n = len(rows)
    for index, row in enumerate(rows):
        for key, value in row.items():
            column = columns.get(key)
            if column is None:
                column = columns[key] = np.full(n, math.nan)
            column[index] = value
            if value != value:
                present.setdefault(key, np.zeros(n, bool))[index] = True
    for key, where in present.items():
        where |= columns[key] == columns[key]
    return Table(np.array(list(steps), np.int64), columns, present)


@dataclass(frozen=True)
class _FolderStates:
    """States of a run folder, read from its file one after the other."""

    names: tuple[str, ...]
    _reader: RunReader = field(repr=False)
    _records: Sequence[Record] = field(repr=False)

    def has(self, index: int) -> bool:
        return self._records[index].has_stats

    def read(self, indices: Sequence[int]) -> Iterator[State | None]:
        # what Record.stats does, without opening the file and checking the make again for each of 100,000 steps
        make = self._reader.info["make"]
        empty = State.empty_from(make, SliceStats.kind)
        with (self._reader.path / STEPS).open("rb") as lines:
            for index in indices:
                record = self._records[index]
                if not record.has_stats:
                    yield None
                    continue
                lines.seek(record._offset)
                try:
                    buffer = decode_words(decode_line(lines.readline())["state"], empty.buffer.size)
                except (ValueError, KeyError):
                    yield None
                    continue
                yield replace(empty, buffer=buffer).core()  # what was kept on request is not shown


def _monitored(path: Path) -> Run:
    return run_of(RunReader(path))


def run_of(reader: RunReader) -> Run:
    """The run of a reader, as far as it has read."""
    records = reader.steps
    make = reader.info["make"]
    states = None
    if make is not None and any(record.has_stats for record in records):
        states = _FolderStates(tuple(make["names"]), reader, records)
    return Run(
        path=reader.path,
        kind="run folder",
        table=table_of([record.step for record in records], [_figures(record) for record in records]),
        times=np.array([record.time for record in records], np.float64),
        states=states,
        alerts=reader.alerts,
        damaged=reader.damaged,
    )


def _figures(record: Record) -> Mapping[str, float]:
    return record.scalars if record.tails is None else {**record.scalars, **record.tails.figures}


_ROWS = 64  # steps of a Parquet file that are in memory together


@dataclass(frozen=True)
class _ParquetStates:
    """States of Parquet files, read in batches."""

    names: tuple[str, ...]
    _files: Sequence[Path] = field(repr=False)
    _places: Sequence[tuple[int, int]] = field(repr=False)  # of each step: file, index in it

    def has(self, index: int) -> bool:
        return True

    def read(self, indices: Sequence[int]) -> Iterator[State | None]:
        wanted = iter(indices)
        index = next(wanted, None)
        while index is not None:
            file, before = self._places[index][0], index
            for at, state in self._states_of(file):
                if self._places[index] == (file, at):
                    yield state
                    index = next(wanted, None)
                    if index is None:
                        return
            if index == before:
                raise RunError(f"{self._files[file]} has changed while it was read: try again")

    def _states_of(self, file: int) -> Iterator[tuple[int, State]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._files[file]
        try:
            reader = pq.ParquetFile(path, page_checksum_verification=True)
            make = json.loads(reader.schema_arrow.metadata[b"pyrlstats"])
            columns = [name for name in reader.schema_arrow.names if name.startswith("state.")]
            at = 0
            for batch in reader.iter_batches(batch_size=_ROWS * len(self.names), columns=["slice", *columns]):
                for state in self._dense(batch, make):
                    yield at, state
                    at += 1
        except (pa.ArrowException, KeyError, ValueError, IndexError, OSError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error

    def _dense(self, batch: Any, make: Mapping[str, Any]) -> Iterator[State]:
        """The states of a batch of rows; what ``columnar.from_arrow`` does, for all of them at once."""
        size = len(self.names)
        if batch.column("slice").to_pylist() != list(self.names) * (batch.num_rows // size):
            raise ValueError(f"the rows of a step must be the slices {list(self.names)}, in this order")
        low, high = make["clip"]
        layout = Layout(*make["layout"])
        counts, sums, maxima = (
            np.array([batch.column(f"state.{name}").to_numpy() for name in names]).T for names in (COUNTS, SUMS, MAXIMA)
        )
        histogram = np.zeros((batch.num_rows, layout.n_bins), np.int64)
        bins = batch.column("state.bins")
        row = np.repeat(np.arange(batch.num_rows), bins.value_lengths().to_numpy(zero_copy_only=False))
        places = bins.flatten().to_numpy()
        if len(places) and places.min() < 0:
            raise ValueError(f"the bins must ascend from 0 to {layout.n_bins - 1}")
        histogram[row, places] = batch.column("state.bin_counts").flatten().to_numpy()
        for start in range(0, batch.num_rows, size):
            rows = slice(start, start + size)
            parts = (counts[rows], histogram[rows], sums[rows], maxima[rows])
            words = np.concatenate([np.ascontiguousarray(part).ravel().view(np.int64) for part in parts])
            yield State(self.names, layout, (low, high), words)


def _parquet(path: Path, files: list[Path]) -> Run:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise RunError(f"{path} needs pyarrow: pip install 'pyrlstats[parquet]'") from error
    places: dict[int, tuple[int, int]] = {}
    figures: dict[str, list[Floats]] = {}
    names: tuple[str, ...] = ()
    read: list[int] = []
    for number, file in enumerate(files):
        try:
            schema = pq.read_schema(file)
            metadata = json.loads((schema.metadata or {})[b"pyrlstats"])
            wanted = [column for column in schema.names if not column.startswith("state.")]
            table = pq.read_table(file, columns=wanted)
        except (pa.ArrowException, KeyError, OSError) as error:
            raise RunError(f"{file} is no Parquet file of pyrlstats: {error}") from error
        if names and tuple(metadata["names"]) != names:
            raise RunError(f"{file} has the slices {metadata['names']}, the files before it {list(names)}")
        names = tuple(metadata["names"])
        steps = table.column("step").to_numpy()[:: len(names)]
        for index, step in enumerate(steps.tolist()):
            places[step] = (number, index)
        read.extend(steps.tolist())
        for column in wanted[2:]:
            values = table.column(column).to_numpy().astype(np.float64).reshape(-1, len(names))
            for slice_index, name in enumerate(names):
                figures.setdefault(f"{name}/{column}", []).append(values[:, slice_index])
    # a step that was written again counts as it was written last
    last = {step: row for row, step in enumerate(read)}
    order = sorted(last)
    rows = np.array([last[step] for step in order], np.int64)
    columns = {key: np.concatenate(parts)[rows] for key, parts in figures.items()}
    steps = np.array(order, np.int64)
    states = _ParquetStates(names, files, [places[step] for step in order])
    return Run(path, "Parquet", Table(steps, columns), np.full(len(steps), math.nan), states)


_STEP_KEYS = ("step", "_step", "global_step", "training/global_step", "trainer/global_step", "train/global_step",
              "iteration", "iter", "update")  # fmt: skip
_TIME_KEYS = ("time", "timestamp", "_timestamp")


def _json_lines(path: Path) -> Run:
    rows, damaged, counted = Rows(), 0, 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                damaged += 1
                continue
            if not isinstance(record, dict):
                damaged += 1
                continue
            values = flatten(record)
            step, time = _take(values, _STEP_KEYS), _take(values, _TIME_KEYS)
            if step is None or not math.isfinite(step):
                step = counted
            counted = int(step) + 1
            rows.add(int(step), values, math.nan if time is None else time)
    if not counted and damaged:
        raise RunError(f"{path} holds no line that is a JSON object, and {damaged} that are none")
    return Run(path, "JSON lines", rows.table(), rows.times, damaged=damaged)


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record; those of an object inside are ``object/key``, of "metrics" and "scalars" ``key``."""
    values: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict) and len(prefix) < 200:
            inner = prefix if key in ("metrics", "scalars") else f"{prefix}{key}/"
            values.update(flatten(value, inner))
            continue
        number = as_number(value)
        if number is not None:
            values[f"{prefix}{key}"] = number
    return values


def _take(values: dict[str, float], names: Sequence[str]) -> float | None:
    for name in names:
        if name in values:
            return values.pop(name)
    return None


def _trainer_state(path: Path) -> Run:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    history = document.get("log_history") if isinstance(document, dict) else None
    if not isinstance(history, list):
        raise RunError(f"{path} is no trainer_state.json: it has no log_history")
    rows, damaged = Rows(), 0
    for record in history:
        step = as_number(record.get("step")) if isinstance(record, dict) else None
        if step is None or not math.isfinite(step):
            damaged += 1
            continue
        values = flatten(record)
        values.pop("step", None)
        rows.add(int(step), values)
    return Run(path, "trainer_state.json", rows.table(), rows.times, damaged=damaged)
