"""Parquet: every statistic as a column, and the states themselves (extra ``pyrlstats[parquet]``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyrlstats.columnar import ParquetWriter
from pyrlstats.results import Statistics
from pyrlstats.sinks.clients import client
from pyrlstats.slice_stats import SliceStats


class ParquetSink:
    """Appends to a folder of Parquet files for each prefix: ``folder / prefix``, read by ``read_parquet``.

    See :class:`pyrlstats.columnar.ParquetWriter`. Floats are kept as they are, NaN and infinity too. The caller's own
    scalars are left out.

    Args:
        folder: created where it does not exist.
        rows: steps kept in memory between writes.

    Raises:
        ImportError: pyarrow is missing.
    """

    def __init__(self, folder: str | os.PathLike[str], rows: int = 100) -> None:
        client("pyarrow.parquet", "parquet")
        self._folder = Path(folder)
        self._rows = rows
        self._writers: dict[str, ParquetWriter] = {}

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Add one step.

        Raises:
            TypeError: statistics other than SliceStats; those that are have been added.
            ValueError: other slices, layout or clip than the folder holds.
        """
        others = {prefix: one for prefix, one in stats.items() if not isinstance(one, SliceStats)}
        for prefix, one in stats.items():
            if prefix not in others:
                self._writer(prefix).append(step, one)  # type: ignore[arg-type]
        if others:
            kinds = {prefix: type(one).__name__ for prefix, one in others.items()}
            raise TypeError(f"Parquet files hold SliceStats, got {kinds}: those are left out")

    def _writer(self, prefix: str) -> ParquetWriter:
        if prefix not in self._writers:
            self._writers[prefix] = ParquetWriter(self._folder / prefix.strip("/"), self._rows)
        return self._writers[prefix]

    def close(self) -> None:
        """Write what is pending."""
        for writer in self._writers.values():
            writer.flush()
