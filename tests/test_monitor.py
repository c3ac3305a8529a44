"""The monitor: what it says, when, and that nothing that happens to it reaches the trainer.

Every step's tokens depend on its number only, so that a run can be had from any step on. As a script this is a trainer
to be killed: ``test_monitor.py FOLDER FIRST LAST [KILLED_AT]``.
"""

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import pyrlstats
from pyrlstats import Monitor, slice_stats
from pyrlstats.monitor import Alert, RunReader, snapshots
from pyrlstats.monitor.folder import RunWriter
from pyrlstats.monitor.frozen import OtherSignals
from pyrlstats.monitor.history import DEPTH
from pyrlstats.monitor.watcher import Watcher

NAMES = ("text", "pre_tool", "post_tool")
SHARES = (0.5, 0.3, 0.2)


def tokens(step, n=4000, seed=0, onset=10**9, growth=0.0, share=1.0):
    """Log-ratios and slice ids of a step; from ``onset`` on, a share of post_tool grows by ``growth`` a step."""
    rng = np.random.default_rng([seed, step])
    ids = rng.choice(len(NAMES), n, p=SHARES)
    x = 0.01 * rng.standard_t(5, n)
    grows = (ids == 2) & (rng.random(n) < share)
    x[grows] *= np.exp(growth * max(0, step - onset))
    return x.astype(np.float32), ids


def stats_at(step, **options):
    x, ids = tokens(step, **options)
    return slice_stats(x, np.zeros_like(x), slice_ids=ids, names=NAMES)


def scalars_at(step, seed=0):
    rng = np.random.default_rng([seed, step, 7])
    return {"reward": 0.5 + 0.02 * rng.standard_normal(), "loss": 0.01 * rng.standard_normal()}


BASELINE, STEPS = 40, 180
GROWTH = {"onset": 70, "growth": 0.015}


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.INFO, "pyrlstats.monitor")


def run(monitor, steps, **options):
    for step in steps:
        monitor.observe(step, stats_at(step, **options), scalars_at(step))
    return monitor


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A run whose post_tool tail grows by 1.5 % a step from step 70 on."""
    folder = tmp_path_factory.mktemp("run")
    monitor = run(Monitor(folder, baseline=BASELINE), range(STEPS), **GROWTH)
    monitor.close()
    return folder, monitor


def test_growth_of_a_slice_is_found_and_localised(grown):
    _, monitor = grown
    first, second = monitor.alerts
    assert (first.level, second.level) == ("warning", "stop")
    assert first.slice == second.slice == "post_tool"
    assert 70 < first.step < 110
    assert monitor.should_stop
    assert first.message.startswith("post_tool: ")
    assert "text" in first.message.split("; ")[-1] or "text" in first.message
    others = second.evidence["slices"]
    assert others["post_tool"]["tail_ratio"] > 3.0
    for name in ("text", "pre_tool"):
        assert abs(others[name]["tail_log_ratio"]) < 4.0 * others[name]["tail_log_ratio_se"]
    # 1.5 % a step doubles in 46 steps; the tail mass grows several times as fast
    assert 4.0 < second.evidence["doubling_steps"] < 70.0
    assert abs(first.evidence["since_step"] - 70) < 30
    assert (
        second.evidence["slices"]["post_tool"]["now"]["p99.9"]
        > 1.5 * second.evidence["slices"]["post_tool"]["then"]["p99.9"]
    )
    assert second.evidence["context"]["reward"] == "flat"


def test_an_alert_leaves_a_small_folder(grown):
    folder, monitor = grown
    reader = RunReader(folder)
    assert reader.alerts == [Alert.from_json(alert.to_json()) for alert in monitor.alerts]
    for alert in reader.alerts:
        path = reader.artifact(alert)
        assert Alert.from_json(json.loads((path / "alert.json").read_text())) == alert
        if (path / "figure.png").exists():
            assert (path / "figure.png").read_bytes().startswith(b"\x89PNG")
        assert sum(file.stat().st_size for file in path.iterdir()) < 200_000


def test_a_stationary_run_is_quiet():
    monitor = run(Monitor(baseline=BASELINE), range(250))
    assert monitor.alerts == []
    assert monitor.frozen
    assert not monitor.lost


@pytest.mark.parametrize(("killed_at", "resumed_at"), [(20, 0), (95, 95), (130, 75)])
def test_killed_and_resumed_the_alerts_are_the_same(grown, tmp_path, killed_at, resumed_at):
    def process(*arguments):
        return subprocess.run([sys.executable, __file__, tmp_path, *map(str, arguments)], check=False).returncode

    assert process(0, STEPS, killed_at) == -9
    assert [record.step for record in RunReader(tmp_path).steps] == list(range(killed_at))
    assert process(resumed_at, STEPS) == 0
    folder, _ = grown
    wanted, got = RunReader(folder), RunReader(tmp_path)
    assert got.damaged == 0
    assert [record.step for record in got.steps] == list(range(STEPS))
    assert got.alerts == wanted.alerts
    for one, two in zip(got.steps[::50], wanted.steps[::50], strict=True):
        assert (one.stats.state.buffer == two.stats.state.buffer).all()


def test_going_back_takes_alerts_back(tmp_path):
    monitor = run(Monitor(tmp_path, baseline=BASELINE), range(150), **GROWTH)
    before = monitor.alerts
    assert before
    run(monitor, range(75, 90))  # from an earlier checkpoint, and this time nothing grows
    assert monitor.alerts == []
    assert RunReader(tmp_path).alerts == []
    run(monitor, range(75, 150), **GROWTH)
    assert monitor.alerts == before
    assert not monitor.lost
    monitor.close()


def test_going_back_forgets_snapshots_though_alerts_cannot_be_taken_back(tmp_path, monkeypatch):
    monitor = run(Monitor(tmp_path, baseline=BASELINE), range(100))

    def fail(step):
        raise OSError("no space")

    monkeypatch.setattr(monitor._writer, "back_to", fail)
    run(monitor, range(30, 36))
    assert monitor.lost == {"alerts": 1}
    monitor._writer.close()  # dropped, not closed
    assert Monitor(tmp_path, baseline=BASELINE)._watcher.last_step == 35


def test_without_a_folder_going_back_counts_as_new(caplog):
    monitor = run(Monitor(baseline=20), [1, 2, 2, 1])
    assert monitor.lost == {"going back": 2}
    assert sum("going back" in message for message in caplog.messages) == 1


def test_going_back_without_what_was_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monitor = run(Monitor(tmp_path / "file" / "run", baseline=20), [1, 2, 3, 2, 3])
    assert monitor.lost == {"run folder": 1, "steps": 5, "going back": 1}
    monitor.close()


def test_skipped_steps(tmp_path):
    monitor = run(Monitor(tmp_path, baseline=BASELINE), range(0, 900, 5), onset=300, growth=0.005)
    (first, *_) = monitor.alerts
    assert first.slice == "post_tool"
    assert first.step % 5 == 0
    # in steps, not in observations: 0.5 % a step is a doubling in 139
    assert 15.0 < monitor.alerts[-1].evidence["doubling_steps"] < 200.0
    monitor.close()


def test_values_that_are_not_finite():
    monitor = Monitor(baseline=20)
    for step in range(30):
        x, ids = tokens(step)
        if step in (10, 11):
            x[np.flatnonzero(ids == 1)[:3]] = [math.nan, math.inf, -math.inf]
        if step == 20:
            x[ids == 2] = math.nan
        stats = slice_stats(x, np.zeros_like(x), slice_ids=ids, names=NAMES)
        monitor.observe(step, stats)
    one, two = monitor.alerts
    assert (one.step, one.level, one.slice, one.link) == (10, "warning", "pre_tool", "numerics")
    assert "1 nan, 1 pos inf, 1 neg inf" in one.message
    assert (two.step, two.level, two.slice) == (20, "stop", "post_tool")


def test_everything_is_nan():
    monitor = Monitor(baseline=20)
    nothing = np.full(100, math.nan, np.float32)
    for step in range(60):
        monitor.observe(step, slice_stats(nothing, nothing), {"loss": math.nan, "reward": math.inf})
    assert not monitor.lost
    assert {alert.name for alert in monitor.alerts} == {"non-finite", "non-finite-scalar"}
    assert len(monitor.alerts) == 2


def test_scalars_that_are_not_finite():
    monitor = Monitor()
    for step in range(40):
        monitor.observe(
            step,
            None,
            {
                "loss": math.nan if step >= 20 else 0.5,
                "grad_norm": math.inf if step == 10 else 1.0,
                "eval": 0.5 if step % 10 == 0 else math.nan,  # there now and then: no trouble
            },
        )
    assert [(alert.step, alert.level, alert.signal) for alert in monitor.alerts] == [
        (10, "warning", "grad_norm"),
        (20, "warning", "loss"),
        (22, "stop", "loss"),
    ]


def test_collapse_of_the_weights():
    monitor = Monitor(baseline=20)
    for step in range(40):
        x, ids = tokens(step)
        if step >= 30:
            x[np.flatnonzero(ids == 2)[0]] = 12.0
        monitor.observe(step, slice_stats(x, np.zeros_like(x), slice_ids=ids, names=NAMES))
    collapse = [alert for alert in monitor.alerts if alert.name == "collapse"]
    assert [(alert.step, alert.level, alert.slice) for alert in collapse] == [(32, "stop", "post_tool")]


def test_a_slice_that_vanishes():
    monitor = Monitor(baseline=20)
    for step in range(40):
        x, ids = tokens(step)
        ids = np.where((ids == 2) & (step >= 25), 0, ids)
        monitor.observe(step, slice_stats(x, np.zeros_like(x), slice_ids=ids, names=NAMES))
    vanished = [alert for alert in monitor.alerts if alert.name == "vanished"]
    assert [(alert.step, alert.slice, alert.link) for alert in vanished] == [(34, "post_tool", "environment")]


def test_old_log_probabilities_that_are_not_recorded_any_more():
    monitor = Monitor(baseline=20)
    for step in range(30):
        x, ids = tokens(step)
        x = x * (step < 25)
        monitor.observe(step, slice_stats(x, np.zeros_like(x), slice_ids=ids, names=NAMES))
    assert {(alert.step, alert.name) for alert in monitor.alerts if alert.name == "blind"} == {(27, "blind")}


def test_a_single_spike_is_no_growth():
    monitor = Monitor(baseline=BASELINE)
    for step in range(120):
        x, ids = tokens(step)
        monitor.observe(
            step, slice_stats(x * (10.0 if step == 100 else 1.0), np.zeros_like(x), slice_ids=ids, names=NAMES)
        )
    assert monitor.alerts == []


def test_the_baseline_waits_for_the_learning_rate():
    monitor = Monitor(baseline=20)
    for step in range(60):
        rate = min(step + 1, 30) / 30
        x, ids = tokens(step)
        monitor.observe(
            step, slice_stats(x * np.float32(rate), np.zeros_like(x), slice_ids=ids, names=NAMES), {"lr": rate}
        )
        assert monitor.frozen == (step >= 49)
    assert monitor.alerts == []


def test_scalars_have_a_baseline_without_statistics(tmp_path):
    """And a long run of them is resumed from what was remembered, not from its first line."""

    class Asks:
        def evaluate(self, step, signals, history):
            known[step] = history.baseline("a"), history.spread("a"), history.baseline("late")
            return []

    known = {}
    monitor = Monitor(tmp_path, rules=Asks(), baseline=20, skip=5)
    for step in range(250):
        scalars = {"a": float(step), "lr": min(step, 10) / 10} | ({"late": 1.0} if step > 100 else {})
        stats = slice_stats(np.zeros(0, np.float32), np.zeros(0, np.float32)) if step % 2 else None  # without a token
        monitor.observe(step, stats, scalars)
    assert known[29] == (None, None, None)
    assert known[30] == known[249] == (20.5, 1.4826 * 5.0, None)  # steps 11 to 30: the rate rose until 10
    assert not monitor.frozen
    monitor.close()
    (tmp_path / "steps.jsonl").write_bytes(b"x" * (tmp_path / "steps.jsonl").stat().st_size)
    known.clear()
    resumed = Monitor(tmp_path, rules=Asks(), baseline=20, skip=5)
    resumed.observe(250, None, {"a": 1.0, "lr": 0.5})
    assert known == {250: (20.5, 1.4826 * 5.0, None)}
    resumed.close()


class Loud:
    """A rule that holds whenever the scalar is above 1."""

    def evaluate(self, step, signals, history):
        assert history.last("noise", 1)[0] == signals["noise"]
        if signals["noise"] > 1.0:
            return [Alert(step, "loud", "warning", "noise", "too loud", "environment")]
        return []


def test_rules_are_told_once_an_episode():
    noise = [0] * 5 + [2] * 10 + [0] * 3 + [2] * 10 + [0] * 40 + [2] * 5
    monitor = Monitor(rules=Loud())
    told = [monitor.observe(step, None, {"noise": value}) for step, value in enumerate(noise)]
    assert [step for step, alerts in enumerate(told) if alerts] == [5, 68]


def test_rules_that_fail_cost_only_themselves(caplog):
    class Broken:
        def evaluate(self, step, signals, history):
            raise KeyError("kl")

    monitor = Monitor(rules=Broken())
    for step in range(5):
        assert monitor.observe(step, None, {"a": 1.0}) == []
    assert monitor.lost == {"rules": 5}
    assert len(caplog.records) == 1


def test_history_is_bounded_and_right(tmp_path):
    seen = []

    class Looks:
        def evaluate(self, step, signals, history):
            seen.append((history.steps(3).tolist(), history.last("a", 3).tolist(), history.last("none", 3).size))
            return []

    monitor = Monitor(rules=Looks())
    for step in range(DEPTH + 10):
        monitor.observe(step, None, {"a": float(step)})
    assert seen[0] == ([0], [0.0], 0)
    last = DEPTH + 9
    assert seen[-1] == ([last - 2, last - 1, last], [last - 2.0, last - 1.0, last * 1.0], 0)


def test_callbacks_may_fail(caplog):
    told = []

    def callback(alert):
        told.append(alert)
        raise RuntimeError("no network")

    monitor = Monitor(on_alert=callback)
    for step in range(10):
        monitor.observe(step, None, {"loss": 1.0 if step < 5 else math.nan})
    assert [alert.level for alert in told] == ["warning", "stop"]
    assert monitor.lost == {"on_alert": 2}


def test_alerts_are_logged(caplog):
    monitor = Monitor()
    for step in range(10):
        monitor.observe(step, None, {"loss": 1.0 if step < 5 else math.nan})
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "loss is nan" in caplog.messages[0]


@pytest.mark.parametrize("bad", [{"step": "x"}, {"step": 0, "stats": 3}, {"step": 0, "scalars": 7}, {"step": None}])
def test_bad_calls_do_not_raise(bad, caplog):
    monitor = Monitor()
    assert monitor.observe(**bad) == []
    assert sum(monitor.lost.values()) == 1
    assert len(caplog.records) == 1


def test_scalars_that_are_no_numbers(caplog):
    monitor = Monitor()
    for step in range(3):
        monitor.observe(step, None, {"note": "fine", "empty": None, "lr": np.float32(0.5), "n": 3, "flag": True})
    assert monitor.lost == {"scalars": 6}
    assert len(caplog.records) == 1


def test_statistics_of_other_slices_are_refused(tmp_path):
    monitor = run(Monitor(tmp_path, baseline=20), range(3))
    x, _ = tokens(3)
    monitor.observe(3, slice_stats(x, np.zeros_like(x)), {"loss": 1.0})
    assert monitor.lost == {"statistics": 1}
    monitor.close()
    records = RunReader(tmp_path).steps
    assert [record.has_stats for record in records] == [True, True, True, False]


def test_a_read_only_place_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monitor = run(Monitor(tmp_path / "file" / "run", baseline=BASELINE), range(150), **GROWTH)
    assert monitor.should_stop
    assert monitor.lost["run folder"] == 1
    assert monitor.lost["steps"] == 150
    assert sum("training goes on" in message for message in caplog.messages) == 1
    monitor.close()


def test_a_full_disk_is_said_once_and_what_fits_is_kept(tmp_path, monkeypatch, caplog):
    monitor = run(Monitor(tmp_path, baseline=BASELINE), range(50))
    real = os.write

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    run(monitor, range(50, 80))
    monkeypatch.setattr(os, "write", real)
    run(monitor, range(80, 150), **GROWTH)
    assert monitor.lost == {"steps": 30}
    assert len([message for message in caplog.messages if "No space" in message]) == 1
    assert monitor.should_stop
    monitor.close()
    assert [record.step for record in RunReader(tmp_path).steps] == [*range(50), *range(80, 150)]


def test_a_damaged_snapshot_is_passed_over(grown, tmp_path):
    monitor = run(Monitor(tmp_path, baseline=BASELINE), range(120), **GROWTH)
    monitor.close()
    newest = max((tmp_path / "snapshots").iterdir())
    newest.write_bytes(newest.read_bytes()[:1000])
    monitor = run(Monitor(tmp_path, baseline=BASELINE), range(120, STEPS), **GROWTH)
    assert monitor.lost == {"snapshots": 1}
    assert monitor.alerts == grown[1].alerts
    monitor.close()


def test_a_run_of_other_signals_is_watched_anew_and_tells_nothing(tmp_path, monkeypatch, caplog):
    run(Monitor(tmp_path, baseline=BASELINE), range(STEPS), **GROWTH).close()
    (tmp_path / "alerts.jsonl").unlink()  # as if what is found now had not been found then

    def refuse(self, data):
        raise OtherSignals("saved with other signals")

    monkeypatch.setattr(Watcher, "restore", refuse)
    told = []
    with Monitor(tmp_path, baseline=BASELINE, on_alert=told.append) as monitor:
        assert monitor.frozen
        assert monitor.lost["snapshots"] >= 1
        assert (told, monitor.alerts, monitor.should_stop) == ([], [], False)
    assert len([message for message in caplog.messages if "watched anew" in message]) == 1


def test_a_foreign_folder_is_left_alone(tmp_path, caplog):
    (tmp_path / "run.json").write_text('{"a": 1}')
    monitor = run(Monitor(tmp_path, baseline=20), range(30))
    assert monitor.frozen
    assert monitor.lost["run folder"] == 1
    assert (tmp_path / "run.json").read_text() == '{"a": 1}'
    assert os.listdir(tmp_path) == ["run.json"]
    monitor.close()


def test_a_clock_that_goes_backwards(tmp_path, monkeypatch):
    times = iter(range(1000, 0, -1))
    monkeypatch.setattr("time.time", lambda: float(next(times)))
    monitor = Monitor(tmp_path)
    for step in range(5):
        monitor.observe(step, None, {"loss": 1.0})
    monitor.close()
    assert not monitor.lost
    assert [record.time for record in RunReader(tmp_path).steps] == [999.0, 998.0, 997.0, 996.0, 995.0]


def test_other_ranks_decide_alike_and_write_nothing(tmp_path, monkeypatch, grown):
    told = []
    monkeypatch.setenv("RANK", "3")
    monitor = run(Monitor(tmp_path / "none", baseline=BASELINE, on_alert=told.append), range(STEPS), **GROWTH)
    assert monitor.alerts == grown[1].alerts
    assert monitor.should_stop
    assert told == []
    assert not (tmp_path / "none").exists()
    resumed = Monitor(grown[0], baseline=BASELINE)
    assert [alert.step for alert in resumed.alerts] == [alert.step for alert in monitor.alerts]
    assert not resumed.should_stop  # whoever started it again has decided to go on


def test_snapshots_stay_few(tmp_path):
    writer = RunWriter(tmp_path, 0.0)
    for observed in range(100, 20_001, 100):
        snapshots.write(writer, observed, observed - 1, b"memory")
        assert len(snapshots.snapshots(tmp_path)) <= 22
    kept = [snapshot.observed for snapshot in snapshots.snapshots(tmp_path)]
    assert kept[:4] == [20_000, 19_900, 19_800, 19_700]
    # going back any distance costs about that distance at most
    for target in range(100, 20_000, 50):
        before = max((observed for observed in kept if observed <= target), default=0)
        assert target - before <= max(20_000 - target, 400)
    snapshots.forget(writer, 10_000)
    assert max(snapshot.step for snapshot in snapshots.snapshots(tmp_path)) < 10_000
    writer.close()


def test_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    monitor = Monitor(tmp_path, baseline=20)
    for step in range(30):
        x, ids = tokens(step)
        logp = torch.from_numpy(x)
        stats = slice_stats(logp, torch.zeros_like(logp), slice_ids=torch.from_numpy(ids), names=NAMES)
        monitor.observe(step, stats, {"loss": torch.tensor(0.5 + step), "kl": torch.tensor([0.25])})
    monitor.close()
    assert not monitor.lost
    record = RunReader(tmp_path).steps[3]
    assert record.scalars == {"loss": 3.5, "kl": 0.25}
    assert (record.stats.state.buffer == stats_at(3).state.buffer).all()


def test_a_closed_monitor_observes_nothing(tmp_path):
    with Monitor(tmp_path) as monitor:
        monitor.observe(1, None, {"a": 1.0})
    monitor.close()
    assert monitor.observe(2, None, {"a": 1.0}) == []
    assert monitor.lost == {"observe": 1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"baseline": 5}, "20 to 512"),
        ({"baseline": 1000}, "20 to 512"),
        ({"skip": -1}, "at least 0"),
        ({"false_warnings": 0.0}, "false_warnings"),
        ({"false_stops": 1.0}, "false_stops"),
    ],
)
def test_bad_settings_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Monitor(**options)


def test_importing_the_statistics_stays_light():
    code = "import sys, pyrlstats; print('pyrlstats.monitor' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
    assert pyrlstats.Monitor is Monitor
    with pytest.raises(AttributeError, match="nothing"):
        pyrlstats.nothing  # noqa: B018


def trainer(folder, first, last, killed_at=None):
    """Trains; is killed in the middle of writing a step."""
    write = os.write

    def torn(file, data):
        if data.find(f'"step":{killed_at},'.encode(), 0, 60) > 0:
            write(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data)

    os.write = torn
    run(Monitor(folder, baseline=BASELINE), range(first, last), **GROWTH).close()


if __name__ == "__main__":
    trainer(sys.argv[1], *map(int, sys.argv[2:]))
