"""JSON lines: one object a step, for ``tail -f``, jq and DataFrames."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyrlstats.results import Statistics


class JsonlSink:
    """Appends ``{"step": ..., "time": ..., key: value, ...}`` to a file: strict JSON, one write a step.

    ``time`` is in seconds since 1970. NaN is written as null, infinity as the strings "inf" and "-inf";
    :func:`read_jsonl` gives the floats back. Histograms are left out: :class:`ParquetSink` keeps them. A line that a
    killed process left unfinished is cut off when the file is opened again.

    Args:
        path: of the file, continued where it exists; its folder is created.

    Raises:
        OSError: it cannot be created.
        ValueError: it is a file of a monitor's run folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._check_owner()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            _cut_torn_line(file)

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            ValueError: a scalar named "step" or "time", or a monitor has begun to write the file.
            OSError: it could not be written.
        """
        self._check_owner()
        reserved = {"step", "time"} & set(scalars)
        if reserved:
            raise ValueError(f"scalars must not be named {sorted(reserved)}: every line has those")
        fields = {"step": step, "time": time.time()} | {key: _to_json(value) for key, value in scalars.items()}
        line = json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())

    def _check_owner(self) -> None:
        from pyrlstats.monitor.folder import ALERTS, RUN, STEPS  # here: brings the whole monitor with it

        if self.path.name in (STEPS, ALERTS) and (self.path.parent / RUN).exists():
            raise ValueError(f"{self.path} belongs to the run folder of a Monitor: use another name or folder")

    def close(self) -> None:
        """Nothing is kept back."""


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a :class:`JsonlSink`, NaN and infinity as floats; an unfinished last line is left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no JSON object, with its number.
    """
    *lines, unfinished = Path(path).read_bytes().split(b"\n")
    del unfinished
    records = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            records.append({key: _from_json(value) for key, value in fields.items()})
        except (ValueError, AttributeError) as error:
            raise ValueError(f"line {number} of {path} is no line of a JsonlSink: {error}") from error
    return records


def _to_json(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else str(float(value))


def _from_json(value: Any) -> Any:
    return math.nan if value is None else float(value) if value in ("inf", "-inf") else value


def _cut_torn_line(file: Any) -> None:
    size = file.seek(0, os.SEEK_END)
    whole = size
    while whole:
        start = max(0, whole - 65536)
        file.seek(start)
        newline = file.read(whole - start).rfind(b"\n")
        if newline >= 0:
            whole = start + newline + 1
            break
        whole = start
    if whole < size:
        file.truncate(whole)
