"""The far tail before the monitor: growth of Pareto k, its rule, what is recorded of it, and the worst tokens."""

import io
import json

import numpy as np
import pytest
from test_monitor import NAMES, stats_at, tokens

from pyrlstats import Monitor
from pyrlstats.monitor import Alert, RunReader
from pyrlstats.monitor.worst import in_words
from pyrlstats.tails import TailShape, tail_shape, tail_size, top_tokens

SIZE = 10_000


def shape_at(step, k=(0.3, 0.3, 0.3), sample_size=SIZE):
    """Tails of three slices of 10,000 tokens whose weights beyond the cutoff are generalized Pareto of shape k."""
    rng = np.random.default_rng([step, 5])
    u = rng.random((len(k), tail_size(SIZE)))
    shapes = np.array(k)[:, None]
    exceedance = np.sort(0.1 / shapes * (u**-shapes - 1.0), 1)[:, ::-1]
    largest = np.concatenate((np.log1p(exceedance), np.zeros((len(k), 1))), 1)
    return TailShape(NAMES[: len(k)], largest.astype(np.float32), np.full(len(k), SIZE), sample_size)


BASELINE, ONSET = 40, 60


def heavier(step):
    return (0.3, 0.3, 0.3 + 0.01 * max(0, step - ONSET))


def run(monitor, steps, **options):
    for step in steps:
        monitor.observe(step, stats_at(step, n=8000), {"reward": 0.5}, tails=shape_at(step, heavier(step)), **options)
    return monitor


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """A run in which nothing changes but the shape of post_tool's tail, by 0.01 a step from step 60 on."""
    from pyrlstats.monitor.rules_evaluation import RuleBook

    folder = tmp_path_factory.mktemp("heavy")
    monitor = run(Monitor(folder, RuleBook.load(), baseline=BASELINE), range(145))
    monitor.close()
    return folder, monitor


def test_growth_of_pareto_k_is_found_and_localised(heavy):
    _, monitor = heavy
    first, rule = monitor.alerts
    assert (first.name, first.level, first.slice, first.signal) == (
        "growth",
        "warning",
        "post_tool",
        "post_tool/pareto_k",
    )
    assert ONSET < first.step < ONSET + 35
    assert first.message.startswith("post_tool: Pareto k of the weights is 0.")
    assert " and rising, 0." in first.message
    assert "text, pre_tool" in first.message
    assert 0.1 < first.evidence["difference"] < 0.5
    assert "growth" not in first.evidence
    assert 0.004 < first.evidence["slope_per_step"] < 0.02
    assert first.evidence["doubling_steps"] == "nan"
    # k passes 0.7 at step 100, and the median of 50 steps some 25 steps later
    assert (rule.name, rule.level, rule.slice) == ("pareto-k-high", "warning", "post_tool")
    assert 115 < rule.step < 140
    assert monitor.lost == {}


def test_resumed_it_is_the_same(heavy, tmp_path):
    folder, whole = heavy
    from pyrlstats.monitor.rules_evaluation import RuleBook

    for steps in (range(55), range(55, 73), range(73, 145)):
        monitor = run(Monitor(tmp_path, RuleBook.load(), baseline=BASELINE), steps)
        monitor.close()
    assert monitor.alerts == whole.alerts
    records = RunReader(tmp_path).steps
    assert records[100].tails == RunReader(folder).steps[100].tails
    assert records[100].tails.sample_size == SIZE
    assert records[100].tails.figures == pytest.approx(shape_at(100, heavier(100)).to_dict())
    resumed = Monitor(tmp_path, baseline=BASELINE)
    resumed.observe(145, stats_at(145), tails=shape_at(145, sample_size=SIZE // 2))
    assert resumed.lost == {"tails": 1}
    resumed.close()


def test_what_cannot_be_compared_is_refused_and_said_once(tmp_path, caplog):
    monitor = Monitor(tmp_path, baseline=20)
    bad = [shape_at(0, sample_size=None), {"text": 0.3}, shape_at(0), shape_at(0, sample_size=5)]
    for step, tails in enumerate(bad):
        monitor.observe(step, stats_at(step), tails=tails)
    x, ids = tokens(4)
    monitor.observe(4, stats_at(4), tails=tail_shape(x, 0 * x, {"other": ids == 0}, sample_size=SIZE))
    monitor.close()
    assert monitor.lost == {"tails": 4}
    assert sum("sample_size" in message for message in caplog.messages) == 1
    assert [record.tails is not None for record in RunReader(tmp_path).steps] == [False, False, True, False, False]
    assert all(record.has_stats for record in RunReader(tmp_path).steps)


def test_a_capacity_that_is_too_small_is_said_once(caplog):
    monitor = Monitor()
    for step in range(3):
        tails = shape_at(step)
        small = TailShape(NAMES, tails.largest[:, :50], tails.n, SIZE)
        monitor.observe(step, stats_at(step), tails=small)
    assert monitor.lost == {"tails": 3}
    assert sum("capacity of 50" in message for message in caplog.messages) == 1


def test_a_run_without_tails_shares_its_false_alarms_among_the_rest():
    without, among = (Monitor(baseline=20) for _ in range(2))
    for step in range(20):
        without.observe(step, stats_at(step))
        among.observe(step, stats_at(step), tails=shape_at(step))
    watched = [monitor._watcher.frozen.drift.baseline.watched for monitor in (without, among)]
    assert watched[1].sum() == watched[0].sum() + len(NAMES)
    assert not watched[0].reshape(len(NAMES), -1)[:, -1].any()


def test_the_tail_of_real_tokens():
    monitor = Monitor(baseline=20)
    for step in range(30):
        x, ids = tokens(step)
        masks = {name: ids == index for index, name in enumerate(NAMES)}
        monitor.observe(step, stats_at(step), tails=tail_shape(x, 0 * x, masks, sample_size=2000))
    assert monitor.alerts == []
    assert not monitor.lost
    history = monitor._watcher.rings
    assert np.isfinite(history.last("post_tool/pareto_k", 30)).all()
    assert history.baseline("post_tool/pareto_k") is not None


def test_tails_are_shown(heavy):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from rich.console import Console

    from pyrlstats.monitor.rules import builtin_rules
    from pyrlstats.watch.judging import ask_rules
    from pyrlstats.watch.live import Follower
    from pyrlstats.watch.report import html, markdown
    from pyrlstats.watch.runs import open_run
    from pyrlstats.watch.terminal import Frame

    folder, monitor = heavy
    recorded = open_run(folder)
    page = html(recorded, builtin_rules())
    assert "<h2>Pareto k of the weights</h2>" in page
    text = markdown(recorded, builtin_rules())
    assert "Pareto k of the weights 0.3" in text
    replayed = [alert for alert in ask_rules(recorded, builtin_rules()).alerts if alert.name == "pareto-k-high"]
    assert [alert.step for alert in replayed] == [monitor.alerts[-1].step]
    console = Console(width=160, file=io.StringIO())
    console.print(Frame(Follower(folder, builtin_rules()).look()))
    drawn = console.file.getvalue()
    header = next(line for line in drawn.splitlines() if "p99.9" in line)
    row = next(line for line in drawn.splitlines() if line.strip().startswith("post_tool"))
    last = recorded.table.signals["post_tool/pareto_k"][-1]
    assert f" {last:.2f} " in row
    assert " k " in header


def worst(step, k=30):
    x, ids = tokens(step, onset=60, growth=0.03)
    masks = {name: ids.reshape(20, -1) == index for index, name in enumerate(NAMES)}
    return top_tokens(x.reshape(20, -1), np.zeros_like(x).reshape(20, -1), masks, k=k)


def alarmed(folder, **options):
    monitor = Monitor(folder, baseline=BASELINE)
    for step in range(100):
        monitor.observe(
            step,
            stats_at(step, onset=60, growth=0.03),
            **{name: make(step) for name, make in options.items()},
        )
    monitor.close()
    return monitor


def test_an_alert_names_its_worst_tokens(tmp_path):
    calls = []

    def only_when_asked(step):
        return lambda: calls.append(step) or worst(step)

    plainly = alarmed(tmp_path / "a", top_tokens=worst)
    lazily = alarmed(tmp_path / "b", top_tokens=only_when_asked)
    assert plainly.lost == lazily.lost == {}
    assert lazily.alerts == plainly.alerts
    assert calls == [alert.step for alert in plainly.alerts]
    for alert in plainly.alerts:
        found = alert.evidence["top_tokens"]
        x, ids = tokens(alert.step, onset=60, growth=0.03)
        order = np.argsort(-np.abs(np.where(ids == 2, x, 0.0)), kind="stable")[:10]
        assert [each["index"] for each in found] == order.tolist()
        assert [each["value"] for each in found] == x[order].astype(float).tolist()
        assert (found[0]["sequence"], found[0]["position"]) == divmod(int(order[0]), 200)
        values = ", ".join(f"{value:.3g}" for value in x[order[:3]])
        places = ", ".join(f"{index // 200}:{index % 200}" for index in order[:3])
        assert alert.message.endswith(f"; worst tokens {values} nats at {places} (sequence:position)")
    read = RunReader(tmp_path / "a")
    assert read.alerts == plainly.alerts
    told = json.loads((read.artifact(read.alerts[0]) / "alert.json").read_text())
    assert Alert.from_json(told) == read.alerts[0]


def test_of_several_ranks_the_rank_is_said():
    rows = [{"value": -9.3125, "rank": 1, "sequence": 12, "position": 403}]
    rows += [{"value": 8.0, "rank": 0, "sequence": 7, "position": 19}]
    assert in_words(rows) == "worst tokens -9.31, 8 nats at 1/12:403, 0/7:19 (rank/sequence:position)"


def test_the_report_lists_the_worst_tokens(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from pyrlstats.monitor.rules import builtin_rules
    from pyrlstats.watch.report import html
    from pyrlstats.watch.runs import open_run

    monitor = alarmed(tmp_path, top_tokens=worst)
    page = html(open_run(tmp_path), builtin_rules())
    assert page.count("tokens with the largest |log-ratio| of post_tool at this step") == len(monitor.alerts)
    token = monitor.alerts[0].evidence["top_tokens"][9]
    cells = (float(f"{token['value']:.5g}"), 0, token["sequence"], token["position"])
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page


@pytest.mark.parametrize("bad", [lambda step: 3, lambda step: lambda: 1 / 0, lambda step: {"post_tool": None}])
def test_worst_tokens_that_cannot_be_had_cost_only_themselves(bad):
    wanted = alarmed(None)
    monitor = alarmed(None, top_tokens=bad)
    assert monitor.alerts == wanted.alerts
    assert monitor.lost == {"top tokens": len(wanted.alerts)}
