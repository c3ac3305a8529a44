"""Parquet files, read back by pyarrow and as states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyrlstats.columnar import read_parquet
from pyrlstats.sinks import ParquetSink, Sinks
from pyrlstats.values import value_stats


def test_statistics_and_states(tmp_path: Path, steps: Any, wanted: Callable[[str], Any]) -> None:
    import pyarrow.parquet

    values = value_stats(np.ones(3, np.float32))
    with Sinks([ParquetSink(tmp_path, rows=2)]) as sinks:
        for step, stats in steps:
            sinks.write(step, {"rl/": stats, "rl/old/": stats + stats})
            assert len(list((tmp_path / "rl").glob("*.parquet"))) == (step >= 2)
        assert not any(sinks.failures.values())
        sinks.write(7, {"length/": values, "rl/": steps[0][1]})  # tables hold log-ratios
        assert sinks.failures == {"ParquetSink": 1, "statistics": 0}
    rows = pyarrow.parquet.read_table(tmp_path / "rl" / "part-000000.parquet").to_pylist()
    got = {(row["step"], row["slice"]): row for row in rows}
    for step, _ in steps[:2]:
        for key, value in wanted("")[step].items():
            if "/" in key:
                name, statistic = key.split("/")
                np.testing.assert_equal(got[step, name][statistic], value)
    read = read_parquet(tmp_path / "rl")
    assert [step for step, _ in read] == [1, 2, 5, 7]
    for (_, stats), (_, original) in zip(read, steps, strict=False):
        assert stats.to_bytes() == original.to_bytes()
    for (_, stats), (_, original) in zip(read_parquet(tmp_path / "rl" / "old"), steps, strict=True):
        assert stats["all"].n_tokens == 2 * original["all"].n_tokens
