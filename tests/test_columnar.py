"""Tables of many steps: read back equal to the bit, foreign or damaged ones refused, a crash costs little."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest
import torch

from pyrlstats import SliceAccumulator, SliceStats
from pyrlstats.columnar import ParquetWriter, from_arrow, read_parquet, to_arrow, write_parquet
from pyrlstats.layout import Layout
from pyrlstats.values import value_stats
from pyrlstats.windows import between

NAMES = ("all", "post_tool", "none")


def step_stats(step: int, **options: Any) -> SliceStats:
    rng = np.random.default_rng(step)
    x = (rng.standard_normal(60) * 10.0 ** rng.uniform(-6.0, 0.7, 60)).astype(np.float32)
    x[:4] = [0.0, 5000.0, np.nan, -np.inf]  # sum k3 is inf
    if step % 5 == 3:
        x[:] = np.nan
    accumulator = SliceAccumulator(NAMES, **options)
    masks = {"all": np.full(60, step % 5 != 4), "post_tool": rng.random(60) < 0.3, "none": np.zeros(60, bool)}
    return accumulator.update(x, np.zeros_like(x), masks).compute()


STEPS = [(step, step_stats(step)) for step in range(12)]


def assert_equal(got: list[tuple[int, SliceStats]], wanted: list[tuple[int, SliceStats]]) -> None:
    assert [step for step, _ in got] == [step for step, _ in wanted]
    for (_, mine), (_, theirs) in zip(got, wanted, strict=True):
        assert mine.to_bytes() == theirs.to_bytes()


def test_round_trip(tmp_path: Path) -> None:
    table = to_arrow(STEPS)
    assert_equal(from_arrow(table), STEPS)
    write_parquet(tmp_path / "steps.parquet", STEPS)
    assert_equal(read_parquet(tmp_path / "steps.parquet"), STEPS)
    assert_equal(read_parquet(str(tmp_path / "steps.parquet")), STEPS)
    assert os.listdir(tmp_path) == ["steps.parquet"]
    one = [(7, step_stats(1))]
    assert_equal(from_arrow(to_arrow(iter(one))), one)


def test_other_tools_read_the_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "steps.parquet", STEPS)
    table = pyarrow.parquet.read_table(tmp_path / "steps.parquet")
    assert table.num_rows == len(STEPS) * len(NAMES)
    rows = table.select(["step", "slice", "n_tokens", "ess_fraction", "log_ratio_p99", "kl_k3"]).to_pylist()
    for row in rows:
        numbers = dict(STEPS)[row["step"]].to_dict()
        for name in ("n_tokens", "ess_fraction", "log_ratio_p99", "kl_k3"):
            np.testing.assert_equal(row[name], numbers[f"{row['slice']}/{name}"])
    assert table.schema.field("n_tokens").type == pa.int64()
    chosen = table.filter(pa.compute.equal(table["slice"], "none"))
    assert set(chosen["n_tokens"].to_pylist()) == {0}
    assert all(np.isnan(chosen["kl_k3"].to_numpy()))


def test_tensors_and_layouts(tmp_path: Path) -> None:
    for layout in (Layout(0, -4, 4), Layout(7, -24, 40)):
        steps = [(3, step_stats(0, layout=layout).to("cpu"))]
        assert isinstance(steps[0][1].state.buffer, torch.Tensor)
        write_parquet(tmp_path / "one.parquet", steps)
        assert_equal(read_parquet(tmp_path / "one.parquet"), steps)


def test_a_range_of_saved_steps(tmp_path: Path) -> None:
    write_parquet(tmp_path / "steps.parquet", STEPS)
    saved = read_parquet(tmp_path / "steps.parquet")
    wanted = STEPS[3][1].merge([stats for _, stats in STEPS[4:8]])
    assert between(saved, 3, 7).to_bytes() == wanted.to_bytes()
    assert between(saved, -5, 0).to_bytes() == STEPS[0][1].to_bytes()
    with pytest.raises(ValueError, match="no step lies from 12 to 20"):
        between(saved, 12, 20)
    with pytest.raises(ValueError, match="different clip"):
        between([*saved, (12, step_stats(0, clip=(0.1, 0.1)))], 0, 12)


def test_what_cannot_be_one_table() -> None:
    with pytest.raises(ValueError, match="at least one"):
        to_arrow([])
    with pytest.raises(ValueError, match="different layout"):
        to_arrow([STEPS[0], (1, step_stats(1, layout=Layout(4)))])


def replaced(column: str, row: int, value: Any) -> pa.Table:
    table = to_arrow(STEPS)
    values = table[column].to_pylist()
    values[row] = value
    index = table.column_names.index(column)
    return table.set_column(index, table.schema.field(column), pa.array(values, table.schema.field(column).type))


def without_metadata(metadata: bytes | None) -> pa.Table:
    return to_arrow(STEPS).replace_schema_metadata(None if metadata is None else {b"pyrlstats": metadata})


def parts_with(**changed: Any) -> bytes:
    return json.dumps({**STEPS[0][1].state.parts(SliceStats.kind), **changed}).encode()


def cast(column: str, kind: Any) -> pa.Table:
    table = to_arrow(STEPS)
    index = table.column_names.index(column)
    return table.set_column(index, column, table[column].cast(kind))


DAMAGED = {
    "no metadata": lambda: without_metadata(None),
    "metadata of no object": lambda: without_metadata(b"[1]"),
    "metadata of no JSON": lambda: without_metadata(b"{"),
    "metadata without names": lambda: without_metadata(b"{}"),
    "metadata with a bad layout": lambda: without_metadata(parts_with(layout=[99, 0, 1])),
    "another version": lambda: without_metadata(parts_with(version=2)),
    "another kind": lambda: without_metadata(parts_with(kind="value")),
    "a foreign table": lambda: pa.table({"step": [1], "slice": ["all"]}, metadata={b"pyrlstats": b"{}"}),
    "a bin too far": lambda: replaced("state.bins", 0, [2048]),
    "a negative bin": lambda: replaced("state.bins", 0, [-1]),
    "a bin twice": lambda: replaced("state.bins", 0, [5, 5]),
    "bins in disorder": lambda: replaced("state.bins", 0, [6, 5]),
    "fewer counts than bins": lambda: replaced("state.bin_counts", 0, [1]),
    "a negative count": lambda: replaced("state.n_nan", 0, -1),
    "a count too many": lambda: replaced("state.n_tokens", 0, 61),
    "no extremum": lambda: replaced("state.max_x", 0, float("nan")),
    "a null": lambda: cast("state.n_nan", pa.int64()).set_column(
        to_arrow(STEPS).column_names.index("state.n_nan"), "state.n_nan", pa.nulls(36, pa.int64())
    ),
    "another slice": lambda: replaced("slice", 1, "all"),
    "another step": lambda: replaced("step", 1, 5),
    "a missing row": lambda: to_arrow(STEPS).slice(0, 35),
    "rows in disorder": lambda: to_arrow(STEPS).sort_by([("slice", "ascending")]),
    "a missing column": lambda: to_arrow(STEPS).drop_columns(["state.far_w"]),
    "a column of floats": lambda: cast("state.n_tokens", pa.float64()),
}


@pytest.mark.parametrize("damage", list(DAMAGED))
def test_refused_tables(damage: str) -> None:
    with pytest.raises(ValueError):
        from_arrow(DAMAGED[damage]())


def test_the_metadata_is_read_back() -> None:
    assert_equal(from_arrow(without_metadata(parts_with())), STEPS)


def test_refused_files(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(FileNotFoundError):
        read_parquet(path)
    write_parquet(path, STEPS)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for data in (b"", b"PAR1", b"PAR1" * 100, whole[:-5], whole[: len(whole) // 2], whole[4:]):
        path.write_bytes(data)
        with pytest.raises(ValueError):
            read_parquet(path)
    for _ in range(20):  # a flipped bit is refused or was in what no state needs
        damaged = bytearray(whole)
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            read_parquet(path)


def test_writer(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "steps"
    writer = ParquetWriter(folder, rows=5)
    for step, stats in STEPS[:7]:
        writer.append(step, stats)
    # as after a crash: what was flushed is there, and complete
    assert_equal(read_parquet(folder), STEPS[:5])
    (folder / "part-000001.parquet.unfinished").write_bytes(b"PAR1")  # a write that was cut off
    # the run resumes from a checkpoint at step 4: steps are written again
    with ParquetWriter(folder, rows=3) as resumed:
        for step, stats in STEPS[4:]:
            resumed.append(step, stats)
        with pytest.raises(ValueError, match="different clip"):
            resumed.append(12, step_stats(0, clip=(0.1, 0.1)))
    assert_equal(read_parquet(folder), STEPS)
    assert len(list(folder.glob("part-*.parquet"))) == 4
    again = ParquetWriter(folder)
    again.append(2, STEPS[0][1])
    again.flush()
    again.flush()
    assert read_parquet(folder)[2][1].to_bytes() == STEPS[0][1].to_bytes()
    with pytest.raises(ValueError, match="different clip"):
        again.append(13, step_stats(0, clip=(0.1, 0.1)))
    with pytest.raises(FileNotFoundError, match=r"holds no part-\*\.parquet"):
        read_parquet(tmp_path)


def test_a_writer_continues_only_what_it_fits(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path / "run") as writer:
        writer.append(*STEPS[0])
    before = read_parquet(tmp_path / "run")
    with pytest.raises(ValueError, match="different clip"):
        ParquetWriter(tmp_path / "run").append(1, step_stats(0, clip=(0.1, 0.1)))
    assert_equal(read_parquet(tmp_path / "run"), before)


def test_other_statistics_are_not_labelled_as_log_ratios(tmp_path: Path) -> None:
    rewards = value_stats(np.ones(3, np.float32))
    with pytest.raises(TypeError, match="a table holds SliceStats, got ValueStats"):
        to_arrow([(0, rewards)])
    with ParquetWriter(tmp_path) as writer, pytest.raises(TypeError, match="a table holds SliceStats, got ValueStats"):
        writer.append(0, rewards)  # type: ignore[arg-type]


def test_writer_keeps_what_it_was_given(tmp_path: Path) -> None:
    accumulator = SliceAccumulator(["all"]).update(np.ones(3, np.float32), np.zeros(3, np.float32))

    def run() -> None:
        with ParquetWriter(tmp_path) as writer:
            writer.append(0, SliceStats(accumulator._state))  # type: ignore[arg-type]
            accumulator.reset()
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert read_parquet(tmp_path)[0][1]["all"].n_tokens == 3
