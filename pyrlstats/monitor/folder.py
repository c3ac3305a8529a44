"""The run folder: what a monitored run leaves behind, written while it runs and read by anybody at any time.

::

    run.json                  what the run is, replaced as a whole
    steps.jsonl               one line a step: step, time, scalars, figures of the tails, sparse states; see records.py
    alerts.jsonl              one line an alert, as Alert.to_json gives it
    alerts/<step>-<name>/     alert.json, and figure.png where matplotlib is installed
    snapshots/*.npz           the monitor's own memory at times, so that resuming need not read every step

run.json holds ``format`` (1), ``pyrlstats`` (version), ``start`` (seconds since 1970), and ``make`` (version, kind,
names, layout and clip of the states; null until the first statistics came).

Lines of both .jsonl files carry a checksum and are only ever appended, each by one write. A process that is killed
loses at most the step in flight; a torn last line is cut off when the run is resumed, and readers pass over lines that
are torn or damaged and count them. Nothing is forced to the disk before ``close``: a machine that loses power can lose
what its kernel still held.

A step that comes again, or a step below the last one, means that training went back to a checkpoint: it takes back the
steps written before it from that step on. In alerts.jsonl a line ``{"back_to": step}`` does so. What was taken back
stays in the files, and the folders of its alerts where they are.

One process writes (it holds a lock where the system has them), any number read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pyrlstats._build import version
from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.records import (
    decode_line,
    decode_scalars,
    decode_words,
    encode_line,
    encode_scalars,
    encode_words,
)
from pyrlstats.monitor.tails import Tails
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

FORMAT = 1
RUN, STEPS, ALERTS, ARTIFACTS, SNAPSHOTS = "run.json", "steps.jsonl", "alerts.jsonl", "alerts", "snapshots"


class RunWriter:
    """Appends to a run folder; an existing one is continued.

    Args:
        path: of the folder; created where it does not exist.
        start: seconds since 1970, kept if the folder has one.

    Raises:
        OSError: the folder cannot be written, or another process writes it (BlockingIOError).
        ValueError: the folder holds something else, or a newer format.
    """

    def __init__(self, path: str | Path, start: float) -> None:
        self.path = Path(path)
        info = read_info(self.path)  # something else is left as it is
        for name in (STEPS, ALERTS):
            file = self.path / name
            if info is None and file.exists() and file.stat().st_size > 0:
                raise ValueError(f"{file} was written by something else: use another run folder")
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (ARTIFACTS, SNAPSHOTS):
            (self.path / folder).mkdir(exist_ok=True)
        self._steps = _Lines(self.path / STEPS)
        try:
            self._alerts = _Lines(self.path / ALERTS)
            self.info = info or {"format": FORMAT, "pyrlstats": version(), "start": start, "make": None}
            self._write_info()
        except BaseException:
            self._steps.close()
            raise

    @property
    def offset(self) -> int:
        """Where steps.jsonl ends."""
        return self._steps.end

    @property
    def torn(self) -> int:
        """Torn lines that were cut off when the folder was opened."""
        return self._steps.torn + self._alerts.torn

    def append(
        self,
        step: int,
        time: float,
        scalars: Mapping[str, float],
        state: State | None,
        kind: str,
        tails: Tails | None = None,
    ) -> None:
        """Add one step.

        Raises:
            OSError: it could not be written; the file ends where it ended before.
            ValueError: a state of another make than those before; nothing is written.
        """
        fields: dict[str, Any] = {"step": step, "time": time, "scalars": encode_scalars(scalars)}
        if tails is not None:
            fields["tails"] = tails.to_json()
        if state is not None:
            self._check_make(state.parts(kind))
            fields["state"] = encode_words(state.buffer)
        self._steps.append(encode_line(fields))

    def _check_make(self, make: dict[str, Any]) -> None:
        if self.info["make"] is None:
            self.info["make"] = make
            try:
                self._write_info()
            except OSError:
                self.info["make"] = None
                raise
        elif self.info["make"] != make:
            raise ValueError(f"this run's states are {self.info['make']}, got {make}: use another run folder")

    def append_alert(self, alert: Alert) -> None:
        """Add one alert; OSError as :meth:`append`."""
        self._alerts.append(encode_line(alert.to_json()))

    def back_to(self, step: int) -> None:
        """Take back the alerts from ``step`` on; OSError as :meth:`append`."""
        self._alerts.append(encode_line({"back_to": step}))

    def replace_file(self, name: str, data: bytes) -> None:
        """Write a file of the folder whole or not at all.

        Raises:
            OSError: it could not be written.
        """
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.unfinished")
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, target)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _write_info(self) -> None:
        self.replace_file(RUN, (json.dumps(self.info, indent=2, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Force everything to the disk and let go of the lock.

        Raises:
            OSError: the disk refuses.
        """
        try:
            self._alerts.close()
        finally:
            self._steps.close()


class _Lines:
    """A file of lines that is appended to, and always ends with a whole line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(self._file, path)
            size = os.fstat(self._file).st_size
            self.end = _end_of_lines(self._file, size)
            self.torn = int(self.end < size)
            if self.torn:
                os.ftruncate(self._file, self.end)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])  # says why the first one stopped, or finishes it
            end = self.end + len(line)
            if os.fstat(self._file).st_size != end:
                raise OSError(f"wrote {written} of {len(line)} bytes")
            self.end = end
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.end)
            raise

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                os.fsync(file)
            finally:
                os.close(file)


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"another process writes {path}") from None
    except OSError:  # file systems without locks
        return


def _end_of_lines(file: int, size: int, chunk: int = 1 << 16) -> int:
    """Where the last whole line ends."""
    end = size
    while end > 0:
        start = max(0, end - chunk)
        os.lseek(file, start, os.SEEK_SET)
        feed = os.read(file, end - start).rfind(b"\n")
        if feed >= 0:
            return start + feed + 1
        end = start
    return 0


def read_info(path: str | Path) -> dict[str, Any] | None:
    """run.json of a folder; None where there is none.

    Raises:
        ValueError: something else, or a newer format.
        OSError: it cannot be read.
    """
    file = Path(path) / RUN
    try:
        info = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(info, dict) or not {"format", "pyrlstats", "start", "make"} <= set(info):
        raise ValueError(f"{file} is not that of a monitored run")
    if info["format"] != FORMAT:
        raise ValueError(f"{file} has format {info['format']!r}, {FORMAT} is supported: use the pyrlstats it names")
    return info


@dataclass(frozen=True)
class Record:
    """One observed step.

    Attributes:
        step: its number.
        time: seconds since 1970.
        scalars: the trainer's numbers; NaN and infinities as they were.
        has_stats: whether there are statistics of slices.
        tails: figures of the far tail; None where there are none.
    """

    step: int
    time: float
    scalars: dict[str, float]
    has_stats: bool
    _reader: RunReader = field(repr=False)
    _offset: int = field(repr=False)
    tails: Tails | None = None

    @property
    def stats(self) -> SliceStats | None:
        """The statistics, equal to the bit, read from the file at each call.

        Raises:
            ValueError: the file has been damaged.
            OSError: it cannot be read.
        """
        return self._reader._stats_at(self._offset) if self.has_stats else None


class RunReader:
    """Reads a run folder, also while it is written. Keeps offsets and scalars in memory, never states.

    Args:
        path: of the folder.
        start: offset in steps.jsonl at which reading begins, the end of a line.

    Raises:
        FileNotFoundError: no run.json there.
        ValueError: something else there, or a newer format.

    Attributes:
        info: run.json, as of the last :meth:`refresh`.
        damaged: lines that were passed over.
    """

    def __init__(self, path: str | Path, start: int = 0) -> None:
        self.path = Path(path)
        self.damaged = 0
        self._offset = start
        self._alerts_offset = 0
        self._records: list[Record] = []
        self._alerts: list[Alert] = []
        self.info = self._read_info()
        self.refresh()

    def _read_info(self) -> dict[str, Any]:
        info = read_info(self.path)
        if info is None:
            raise FileNotFoundError(f"{self.path} holds no {RUN}: no monitored run has written there")
        return info

    def refresh(self) -> list[Record]:
        """Read what was written since the last call; returns the new records in the order written."""
        if self.info["make"] is None:
            self.info = self._read_info()
        new: list[Record] = []
        for offset, fields in self._lines(self.path / STEPS, self._offset):
            try:
                scalars = decode_scalars(fields["scalars"])
                tails = Tails.from_json(fields["tails"]) if "tails" in fields else None
                record = Record(fields["step"], fields["time"], scalars, "state" in fields, self, offset, tails)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.damaged += 1
                continue
            new.append(record)
            while self._records and self._records[-1].step >= record.step:  # training went back
                self._records.pop()
            self._records.append(record)
        self._offset = self._read_to
        for _, fields in self._lines(self.path / ALERTS, self._alerts_offset):
            fields.pop("crc")
            try:
                if "back_to" in fields:
                    self._alerts = [alert for alert in self._alerts if alert.step < fields["back_to"]]
                else:
                    self._alerts.append(Alert.from_json(fields))
            except TypeError:
                self.damaged += 1
        self._alerts_offset = self._read_to
        return new

    @property
    def steps(self) -> list[Record]:
        """Every step that was not taken back, ascending."""
        return list(self._records)

    @property
    def alerts(self) -> list[Alert]:
        """Every alert that was not taken back, in the order raised."""
        return list(self._alerts)

    def artifact(self, alert: Alert) -> Path:
        """The folder of an alert, which may be absent."""
        return self.path / ARTIFACTS / artifact_name(alert)

    def _lines(self, file: Path, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Offset and fields of every whole line from ``start`` on; sets ``_read_to``."""
        self._read_to = start
        try:
            stream: BinaryIO = file.open("rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(start)
            for line in stream:
                if not line.endswith(b"\n"):
                    return  # in flight
                offset = self._read_to
                self._read_to += len(line)
                try:
                    fields = decode_line(line)
                except ValueError:
                    self.damaged += 1
                    continue
                yield offset, fields

    def _stats_at(self, offset: int) -> SliceStats:
        with (self.path / STEPS).open("rb") as stream:
            stream.seek(offset)
            fields = decode_line(stream.readline())
        make = self.info["make"] or self._read_info()["make"]
        if make is None:
            raise ValueError(f"{self.path / RUN} does not say what the states are")
        words = State.empty_from(make, SliceStats.kind).buffer.size
        return SliceStats(State.from_parts(make, SliceStats.kind, decode_words(fields["state"], words)))


def artifact_name(alert: Alert) -> str:
    """Of an alert's folder: step, name and slice, in letters that every file system takes."""
    name = f"{alert.step:07}-{alert.name}" + (f"-{alert.slice}" if alert.slice else "")
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "_" for letter in name)[
        :100
    ]
