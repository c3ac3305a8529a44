"""The run folder: equal to the bit when read back, whatever happens to the process or the disk."""

import errno
import json
import math
import os

import numpy as np
import pytest

from pyrlstats import slice_stats
from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.folder import RunReader, RunWriter, artifact_name
from pyrlstats.monitor.records import decode_line, decode_words, encode_line, encode_words

NAMES = ("text", "post_tool")


def stats_of(seed, names=NAMES):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, 500).astype("f4") * 0.01
    x[:3] = [np.nan, np.inf, 600.0]
    return slice_stats(x, np.zeros_like(x), {name: rng.random(500) < 0.5 for name in names})


def write(path, steps, **scalars):
    writer = RunWriter(path, 1000.0)
    for step in steps:
        stats = stats_of(step)
        writer.append(step, 1000.0 + step, scalars, stats.state, stats.kind)
    writer.close()


def test_steps_come_back_to_the_bit(tmp_path):
    scalars = {"loss": 0.1 + 0.2, "bad": math.nan, "worse": -math.inf, "lengths/mean": 7}
    write(tmp_path, [1, 2, 3], **scalars)
    reader = RunReader(tmp_path)
    assert [record.step for record in reader.steps] == [1, 2, 3]
    for record in reader.steps:
        np.testing.assert_equal(record.scalars, scalars)
        assert record.time == 1000.0 + record.step
        wanted = stats_of(record.step).state
        assert record.stats.state.names == wanted.names
        assert (record.stats.state.buffer == wanted.buffer).all()
    assert reader.info["make"]["names"] == list(NAMES)
    assert reader.damaged == 0


def test_the_lines_are_strict_json(tmp_path):
    write(tmp_path, [1], loss=math.nan)
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(constant)

    fields = json.loads(line, parse_constant=refuse)
    assert fields["step"] == 1
    assert fields["scalars"] == {"loss": "nan"}


def test_scalars_alone(tmp_path):
    writer = RunWriter(tmp_path, 0.0)
    writer.append(5, 1.0, {"loss": 1.5}, None, "log_ratio")
    writer.close()
    (record,) = RunReader(tmp_path).steps
    assert not record.has_stats
    assert record.stats is None
    assert record.scalars == {"loss": 1.5}


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path, cut):
    write(tmp_path, [1, 2, 3])
    file = tmp_path / "steps.jsonl"
    os.truncate(file, file.stat().st_size - cut)
    assert [record.step for record in RunReader(tmp_path).steps] == [1, 2]
    writer = RunWriter(tmp_path, 5.0)
    assert writer.torn == 1
    assert writer.info["start"] == 1000.0
    writer.append(3, 1.0, {}, None, "log_ratio")
    writer.close()
    reader = RunReader(tmp_path)
    assert [record.step for record in reader.steps] == [1, 2, 3]
    assert reader.damaged == 0


def test_every_cut_leaves_the_whole_lines(tmp_path):
    write(tmp_path / "run", range(3))
    data = (tmp_path / "run" / "steps.jsonl").read_bytes()
    ends = [position + 1 for position, byte in enumerate(data) if byte == ord("\n")]
    for cut in [*range(0, len(data), 97), *(end - 1 for end in ends), *ends]:
        (tmp_path / "run" / "steps.jsonl").write_bytes(data[:cut])
        assert len(RunReader(tmp_path / "run").steps) == sum(end <= cut for end in ends)


def test_a_damaged_line_in_the_middle_costs_only_itself(tmp_path):
    write(tmp_path, [1, 2, 3])
    file = tmp_path / "steps.jsonl"
    data = bytearray(file.read_bytes())
    data[data.index(b'"step":2') + 7] ^= 1
    file.write_bytes(data)
    reader = RunReader(tmp_path)
    assert [record.step for record in reader.steps] == [1, 3]
    assert reader.damaged == 1


def test_a_step_takes_back_those_from_it_on(tmp_path):
    write(tmp_path, [1, 2, 3, 4], loss=1.0)
    reader = RunReader(tmp_path)
    write(tmp_path, [2, 3], loss=2.0)
    reader.refresh()
    for each in (reader, RunReader(tmp_path)):
        assert [(record.step, record.scalars["loss"]) for record in each.steps] == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_a_reader_follows_a_writer(tmp_path):
    writer = RunWriter(tmp_path, 0.0)
    reader = RunReader(tmp_path)
    assert reader.steps == []
    for step in (1, 2):
        stats = stats_of(step)
        writer.append(step, 0.0, {}, stats.state, stats.kind)
        (record,) = reader.refresh()
        assert (record.stats.state.buffer == stats.state.buffer).all()
    assert reader.refresh() == []
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.write(encode_line({"step": 3})[:-4])  # in flight
    assert reader.refresh() == []
    assert reader.damaged == 0
    writer.close()


def test_alerts_are_read_back_and_taken_back(tmp_path):
    alerts = [
        Alert(step, "growth", "warning", "a/kl_k3", "it grows", "policy update", "a", {"z": math.inf, "n": [1, 2]})
        for step in (5, 9)
    ]
    writer = RunWriter(tmp_path, 0.0)
    for alert in alerts:
        writer.append_alert(alert)
    reader = RunReader(tmp_path)
    assert [alert.step for alert in reader.alerts] == [5, 9]
    assert reader.alerts[0].evidence == {"z": "inf", "n": [1, 2]}
    assert reader.alerts[0].key == "growth:a/kl_k3"
    writer.back_to(8)
    reader.refresh()
    assert [alert.step for alert in reader.alerts] == [5]
    writer.close()


def test_states_of_another_make_are_refused(tmp_path):
    writer = RunWriter(tmp_path, 0.0)
    first, other = stats_of(0), stats_of(0, ("x",))
    writer.append(1, 0.0, {}, first.state, first.kind)
    with pytest.raises(ValueError, match="use another run folder"):
        writer.append(2, 0.0, {}, other.state, other.kind)
    writer.close()
    assert [record.step for record in RunReader(tmp_path).steps] == [1]


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path, 0.0)
    writer.append(1, 0.0, {"loss": 1.0}, None, "log_ratio")
    real, room = os.write, [10]

    def full(file, data):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(room[0], len(data))
        room[0] -= taken
        return real(file, data[:taken])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer.append(2, 0.0, {"loss": 1.0}, None, "log_ratio")
    monkeypatch.undo()
    writer.append(3, 0.0, {"loss": 1.0}, None, "log_ratio")
    writer.close()
    reader = RunReader(tmp_path)
    assert [record.step for record in reader.steps] == [1, 3]
    assert reader.damaged == 0


def test_one_writer_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    writer = RunWriter(tmp_path, 0.0)
    with pytest.raises(BlockingIOError, match="another process"):
        RunWriter(tmp_path, 0.0)
    writer.close()
    RunWriter(tmp_path, 0.0).close()


def test_a_foreign_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        RunReader(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 99, "pyrlstats": "9", "start": 0, "make": null}')
    with pytest.raises(ValueError, match="format 99"):
        RunReader(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="not that of a monitored run"):
        RunWriter(tmp_path, 0.0)


def test_sparse_words():
    words = np.zeros(1000, np.int64)
    words[[0, 7, 999]] = [1, -(2**63), 2**63 - 1]
    text = encode_words(words)
    assert (decode_words(text, 1000) == words).all()
    assert (decode_words(encode_words(np.zeros(10, np.int64)), 10) == 0).all()
    with pytest.raises(ValueError, match="outside a state"):
        decode_words(text, 999)
    for damaged in (text[:-8], "AAAA", "", "?"):
        with pytest.raises(ValueError):
            decode_words(damaged, 1000)


def test_lines():
    line = encode_line({"a": 1})
    assert decode_line(line)["a"] == 1
    for damaged in (line.replace(b"1}", b"2}"), b"", b"{}", line[3:]):
        with pytest.raises(ValueError):
            decode_line(damaged)


def test_artifact_names_are_plain():
    alert = Alert(12, "growth", "warning", "../x/kl", "m", "numerics", "../é x")
    assert artifact_name(alert) == "0000012-growth-_____x"


def test_what_was_kept_on_request_comes_back_too(tmp_path):
    """Groups beside the core: to the bit in the folder, also of a resumed monitor; left aside where runs are shown."""
    from pyrlstats import Monitor
    from pyrlstats.watch.pooling import pool
    from pyrlstats.watch.runs import open_run

    rng = np.random.default_rng(5)

    def steps(first, last):
        for step in range(first, last):
            x = rng.normal(0.0, 0.01, (4, 500)).astype("f4")
            yield step, slice_stats(x, np.zeros_like(x), {"a": x > 0, "b": x < 0.01}, sequences=True, entropy=True)

    kept = {}
    for first, last in ((0, 30), (30, 45)):
        with Monitor(tmp_path / "run", baseline=20) as monitor:
            for step, stats in steps(first, last):
                kept[step] = stats
                monitor.observe(step, stats)
        assert not monitor.lost
    for record in RunReader(tmp_path / "run").steps:
        assert record.stats.state.groups == kept[record.step].state.groups
        assert np.array_equal(record.stats.state.buffer, kept[record.step].state.buffer)
    pooled = pool(open_run(tmp_path / "run"), 4)
    assert pooled.lost == 0
    assert sum(int(group.stats["a"].n_tokens) for group in pooled.groups) == sum(
        int(stats["a"].n_tokens) for stats in kept.values()
    )
