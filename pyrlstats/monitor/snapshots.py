"""The monitor's memory at times, in files named ``<observed>_<step>_<offset in steps.jsonl>.npz``.

Of a long run some stay, the fewer the older: going back from step n to step m costs the steps between m and the
snapshot before it, which is at most about as far from m as m from n.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from pyrlstats.monitor.folder import SNAPSHOTS, RunWriter

EVERY = 100  # observed steps
_NEWEST = 4  # that always stay


class Snapshot(NamedTuple):
    """Where the memory after ``step``, the ``observed``-th step, lies; ``offset`` is where steps.jsonl ended then."""

    observed: int
    step: int
    offset: int
    file: Path


def snapshots(folder: Path) -> list[Snapshot]:
    """Those of a run folder, newest first; none where there is no folder."""
    found = []
    for file in (folder / SNAPSHOTS).glob("*.npz"):
        with contextlib.suppress(ValueError):
            observed, step, offset = map(int, file.stem.split("_"))
            found.append(Snapshot(observed, step, offset, file))
    return sorted(found, reverse=True)


def write(writer: RunWriter, observed: int, step: int, data: bytes) -> None:
    """Add one, and remove those that are not needed any more.

    Raises:
        OSError: it could not be written.
    """
    writer.replace_file(f"{SNAPSHOTS}/{observed:09}_{step}_{writer.offset}.npz", data)
    newest = observed // EVERY
    for old in snapshots(writer.path):
        number = old.observed // EVERY
        age = newest - number
        if age >= _NEWEST and number & -number < age // _NEWEST:
            old.file.unlink(missing_ok=True)


def forget(writer: RunWriter, step: int) -> None:
    """Remove those of ``step`` and later: training went back.

    Raises:
        OSError: they cannot be removed.
    """
    for snapshot in snapshots(writer.path):
        if snapshot.step >= step:
            snapshot.file.unlink(missing_ok=True)
