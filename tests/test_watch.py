"""Recorded runs: read whatever wrote them, pooled exactly, judged, and reported on one page."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from watch_runs import NAMES, START, alert, growing, step_scalars, step_stats, write_run

import pyrlstats
from pyrlstats.columnar import ParquetWriter, write_parquet
from pyrlstats.monitor.folder import RunWriter
from pyrlstats.monitor.rules import builtin_rules
from pyrlstats.slice_stats import SliceStats
from pyrlstats.watch.judging import ask_rules, judge, with_statistics
from pyrlstats.watch.live import Follower
from pyrlstats.watch.pooling import merge, pool, statistics
from pyrlstats.watch.report import html, markdown
from pyrlstats.watch.runs import Run, RunError, flatten, open_run
from pyrlstats.watch.summary import shift_in_words, summarise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "grown", alerts=(alert(55), alert(70, "stop")))


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return open_run(folder)


def flat(steps: int, tokens: int = 2000) -> list[tuple[int, SliceStats]]:
    return [(step, step_stats(step, tokens=tokens)) for step in range(1, steps + 1)]


def test_a_run_folder_is_read(run: Run) -> None:
    assert run.kind == "run folder"
    assert run.steps.tolist() == list(range(1, 81))
    assert run.times[0] == START + 30.0
    assert run.table.signals["reward"][41] == step_scalars(42)["reward"]
    assert run.alerts is not None
    assert [each.step for each in run.alerts] == [55, 70]
    assert run.damaged == 0
    assert run.states is not None
    assert run.states.names == NAMES
    states = list(run.states.read([0, 41]))
    assert states[1] is not None
    assert (states[1].buffer == step_stats(42).state.buffer).all()


@pytest.mark.parametrize("most", [1, 3, 7, 80, 1000])
def test_pooling_is_merging(run: Run, most: int) -> None:
    pooled = pool(run, most)
    size = -(-80 // most)
    assert len(pooled.groups) == -(-80 // size)
    assert len(pooled.groups) <= most
    assert sum(group.count for group in pooled.groups) == 80
    assert (pooled.groups[0].first, pooled.groups[0].last) == (1, size)
    assert pooled.groups[-1].last == 80
    for group in pooled.groups[:3]:
        expected = step_stats(group.first).merge([step_stats(step) for step in range(group.first + 1, group.last + 1)])
        state = group.stats.state
        assert (state.counts == expected.state.counts).all()
        assert (state.histogram == expected.state.histogram).all()
        assert (state.maxima == expected.state.maxima).all()
        assert state.sums == pytest.approx(expected.state.sums, rel=1e-12)


def test_pooling_rescales_far_weights(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, START)
    levels = [5000.0, -300.0, 0.1, 700.0] * 300  # more than are summed before they are folded
    pieces = []
    for step, level in enumerate(levels):
        x = np.array([level, level - 1.0, 0.0], np.float32)
        stats = pyrlstats.slice_stats(x, np.zeros_like(x))
        pieces.append(stats)
        writer.append(step, START, {}, stats.state, SliceStats.kind)
    writer.close()
    (group,) = pool(open_run(tmp_path), 1).groups
    expected = pieces[0].merge(pieces[1:])
    for name in ("ess", "ess_fraction", "log_ratio_mean", "max_weight_ess_fraction", "renyi2"):
        found, wanted = (float(getattr(stats["all"], name)) for stats in (group.stats, expected))
        assert found == pytest.approx(wanted, rel=1e-12)
    assert float(group.stats["all"].ess) == pytest.approx(300 * (1 + math.exp(-1)) ** 2 / (1 + math.exp(-2)))


def test_statistics_of_every_step_are_those_of_its_state(run: Run) -> None:
    names = ["ess_fraction", "kl_k3", "abs_log_ratio_p99_9", "log_ratio_p50", "n_tokens", "log_ratio_p0_5"]
    columns = statistics(run, names)
    for step in (1, 40, 64, 65, 80):
        expected = step_stats(step).to_dict(quantiles=[0.5, 0.005])
        for name in NAMES:
            for key in names:
                assert columns[f"{name}/{key}"][step - 1] == expected[f"{name}/{key}"]


def test_a_step_written_again_takes_back_those_from_it_on(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    writer = RunWriter(tmp_path, START)
    writer.append(8, START, {"reward": 9.0}, step_stats(8, scale=lambda step, name: 1.0).state, SliceStats.kind)
    writer.close()
    run = open_run(tmp_path)
    assert run.steps.tolist() == list(range(1, 9))
    assert run.table.signals["reward"][7] == 9.0
    assert statistics(run, ["log_ratio_std"])["text/log_ratio_std"][7] > 0.5


def test_a_torn_folder_is_read_as_far_as_it_goes(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "torn")
    file = tmp_path / "torn" / "steps.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[10] = lines[10][:50] + b"x" + lines[10][51:]
    lines[-1] = lines[-1][:100]
    file.write_bytes(b"".join(lines))
    run = open_run(tmp_path / "torn")
    assert len(run.steps) == 78
    assert run.damaged == 1  # the line in flight is none
    assert "1 lines" in markdown(run, builtin_rules())


def test_parquet_is_read(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path / "folder", rows=7) as writer:
        for step, stats in flat(20):
            writer.append(step, stats)
        for step, stats in flat(3):  # resumed
            writer.append(step + 17, stats)
    write_parquet(tmp_path / "one.parquet", flat(20))
    run, one = open_run(tmp_path / "folder"), open_run(tmp_path / "one.parquet")
    assert run.steps.tolist() == one.steps.tolist() == list(range(1, 21))
    assert run.states is not None
    for index, state in enumerate(run.states.read(range(20))):
        assert state is not None
        assert (state.buffer == step_stats(index + 1 if index < 17 else index - 16).state.buffer).all()
    assert one.table.signals["post_tool/kl_k3"][4] == float(step_stats(5)["post_tool"].kl_k3)
    table = with_statistics(one, ["kl_k3", "log_ratio_p99_5", "nonfinite_fraction"], 10)
    assert table.signals["text/log_ratio_p99_5"][3] == float(step_stats(4)["text"].quantile(0.995))
    assert len(pool(one, 4).groups) == 4


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def test_json_lines_of_any_trainer_are_read(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "log.jsonl",
        {"step": 1, "loss": 0.5, "note": "x", "flag": True, "timestamp": 5.0},
        {"step": 1, "eval": {"score": 0.25}},
        {"step": 2, "metrics": {"loss": "NaN"}, "actor/entropy": None},
        "{torn",
        [1],
        "",
        {"step": 3, "loss": 0.25, "list": [1]},
    )
    run = open_run(path)
    assert run.steps.tolist() == [1, 2, 3]
    assert run.table.signals["loss"].tolist()[::2] == [0.5, 0.25]
    assert math.isnan(run.table.signals["loss"][1])
    assert run.table.present["loss"].tolist() == [True, True, True]
    assert run.table.signals["eval/score"][0] == 0.25
    assert run.table.present["actor/entropy"].tolist() == [False, True, False]
    assert set(run.table.signals) == {"loss", "eval/score", "actor/entropy"}
    assert (run.damaged, run.times[0]) == (2, 5.0)
    assert run.alerts is None


def test_json_lines_without_steps_and_with_a_step_back(tmp_path: Path) -> None:
    run = open_run(lines(tmp_path / "a.jsonl", {"loss": 1}, {"loss": 2}))
    assert run.steps.tolist() == [0, 1]
    back = [{"_step": step, "loss": step} for step in (1, 2, 3, 4)] + [{"_step": 3, "loss": 30}]
    run = open_run(lines(tmp_path / "b.jsonl", *back))
    assert run.steps.tolist() == [1, 2, 3]
    assert run.table.signals["loss"].tolist() == [1, 2, 30]


def test_a_trainer_state_is_read_alone_and_in_its_folder(tmp_path: Path) -> None:
    history = [
        {"step": 10, "loss": 0.5, "completions/mean_length": 90.0, "epoch": 0.1},
        {"step": 20, "loss": float("nan")},
        {"step": 20, "eval_reward": 0.3},
        {"train_runtime": 3.0},
    ]
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for path in (tmp_path, checkpoint, checkpoint / "trainer_state.json"):
        run = open_run(path)
        assert run.kind == "trainer_state.json"
        assert run.steps.tolist() == [10, 20]
        assert run.table.signals["eval_reward"][1] == 0.3
        assert run.damaged == 1


def test_flatten_takes_numbers_only() -> None:
    assert flatten({"a": 1, "b": {"c": 2.5, "d": "x"}, "metrics": {"e": 3}, "scalars": {"f": 4}}) == {
        "a": 1.0, "b/c": 2.5, "e": 3.0, "f": 4.0,
    }  # fmt: skip


def broken() -> Iterator[tuple[str, Any, str]]:
    yield "nothing", None, "is not there"
    yield "empty", {}, "it is empty"
    yield "other", {"a.txt": "x"}, "holds no run"
    yield "several", {"a.jsonl": "{}", "b.jsonl": "{}"}, "several files of lines (a.jsonl, b.jsonl): name one"
    yield "a.txt", "x", "is no run"
    yield "a.jsonl", "not json\nneither\n", "no line that is a JSON object, and 2 that are none"
    yield "a.json", "{", "is not JSON"
    yield "b.json", "{}", "it has no log_history"
    yield "a.parquet", "x", "is no Parquet file of pyrlstats"
    yield "run", {"run.json": "{"}, "is not JSON"
    yield "run2", {"run.json": "{}"}, "is not that of a monitored run"
    yield "run3", {"run.json": '{"format": 9, "pyrlstats": "9", "start": 0, "make": null}'}, "has format 9"


@pytest.mark.parametrize(("name", "content", "complaint"), list(broken()))
def test_what_is_no_run_is_refused_with_a_cure(tmp_path: Path, name: str, content: Any, complaint: str) -> None:
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.mkdir()
        for file, text in content.items():
            (path / file).write_text(text)
    with pytest.raises(RunError, match=re.escape(complaint)):
        open_run(path)


def test_a_monitored_run_answers_for_its_monitors_alerts(run: Run) -> None:
    judged = judge(run, builtin_rules())
    assert (judged.source, judged.worst, len(judged.alerts)) == ("monitor", "stop", 2)


def test_rules_see_the_growth_from_states_alone(run: Run) -> None:
    found = ask_rules(run, builtin_rules(), warmup=30)
    names = {each.name for each in found.alerts}
    assert {"tail-far-from-baseline", "one-slice-leaves-the-text", "tail-mass-beyond-baseline"} <= names
    assert {each.slice for each in found.alerts} == {"post_tool"}
    assert min(each.step for each in found.alerts) > 40
    assert ask_rules(run, builtin_rules(), warmup=100).alerts == []  # the baseline is not complete


class Page(HTMLParser):
    """What a page loads, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def pictures_of(page: str) -> list[str]:
    encoded = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)
    return [base64.b64decode(each).decode() for each in encoded]


def test_the_page_is_whole_and_needs_nothing_else(run: Run) -> None:
    text = html(run, builtin_rules())
    page = Page(text)
    assert page.open == []
    assert all(each.startswith("data:") for each in page.loads)
    assert "<script" not in text
    words = " ".join(page.words)
    for title in ("Alerts", "Alerts on the time line", "Slices, then and now", "Tails of the log-ratio"):
        assert title in words
    assert "it <grows> | more" in words  # escaped, so not a tag
    assert "80 steps (1 to 80)" in words
    assert "2 (1 stop, 1 warning)" in words
    tokens = sum(int(step_stats(step)[name].n_tokens) for step in (1,) for name in NAMES) * 80
    assert f"{tokens:,}" in words
    drawn = pictures_of(text)
    assert len(drawn) == 6
    for picture in drawn:
        ElementTree.fromstring(picture)
    assert "image/png" in drawn[4]  # the heat map is one image, not thousands of rectangles
    assert len(text) < 3_000_000


def test_the_figures_of_the_page_are_those_of_the_pooled_steps(run: Run) -> None:
    then = step_stats(1).merge([step_stats(step) for step in range(2, 9)])
    summary = summarise(run, pool(run, 200), judge(run, builtin_rules()))
    assert summary.then is not None
    assert (summary.then.first, summary.then.last) == (1, 8)
    change = next(each for each in summary.changes if each.name == "post_tool")
    cells = {name: early for name, early, _ in change.cells}
    assert cells["|x| p99.9"] == f"{float(then['post_tool'].abs_quantile(0.999)):.3g}"
    assert cells["tokens"] == f"{int(then['post_tool'].n_tokens):,}"
    assert cells["ESS"] == f"{float(then['post_tool'].ess_fraction):.2%}"
    assert "times as many" in change.verdict
    assert "times;" in change.verdict  # p99.9 of |x| 3.2 times
    other = next(each for each in summary.changes if each.name == "text")
    assert re.match(r"p99\.9 of \|x\| (unchanged|[+-]\d%)", other.verdict)


def test_words_for_shifts() -> None:
    assert [shift_in_words(math.log(value)) for value in (1.0, 1.1, 0.5, 4.2)] == [
        "unchanged",
        "+10%",
        "-50%",
        "4.2 times",
    ]
    assert shift_in_words(math.inf) == "from 0"


def test_markdown_has_the_same_figures(run: Run) -> None:
    text = markdown(run, builtin_rules())
    assert "| 55 | warning | growth | policy update | post_tool: it <grows> \\| more |" in text
    assert "### post_tool" in text
    assert "- recorded: 80 steps (1 to 80)" in text
    for line in text.splitlines():
        if line.startswith("|") and "---" not in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (4, 6)


def nothing_but_nan(step: int) -> dict[str, float]:
    return {"loss": math.nan, "reward": math.nan, "kl": math.inf}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_runs_of_few_steps_have_a_page(tmp_path: Path, steps: int) -> None:
    run = open_run(write_run(tmp_path / "run", steps))
    text = html(run, builtin_rules())
    Page(text)
    assert ("No steps have been recorded yet" in text) == (steps == 0)
    assert len(pictures_of(text)) == (0 if steps == 0 else 5)
    markdown(run, builtin_rules())


@pytest.mark.filterwarnings("error")
def test_nan_everywhere_has_a_page(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", 30, scale=lambda step, name: math.nan, scalars=nothing_but_nan))
    assert run.states is not None
    text = html(run, builtin_rules())
    assert "no tokens to compare" in text
    assert "30 steps (1 to 30)" in text
    found = {each.name for each in ask_rules(run, builtin_rules()).alerts}
    assert {"many-log-ratios-not-finite", "loss-not-finite"} <= found
    markdown(run, builtin_rules())


def test_scalars_alone_have_a_page(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 0.1, "grad_norm": 0.4 if step < 60 else 40.0} for step in range(100)]
    run = open_run(lines(tmp_path / "log.jsonl", *records))
    text = html(run, builtin_rules())
    words = " ".join(Page(text).words)
    assert "grad-norm-spike" in words
    assert "Clip the gradient norm" in words  # what the rule says to try
    assert "rules have nothing to look at" in words
    assert len(pictures_of(text)) == 2


def test_many_steps_stay_small(tmp_path: Path) -> None:
    from pyrlstats.monitor.records import decode_line, encode_line

    write_run(tmp_path, 20)
    file = tmp_path / "steps.jsonl"
    some = [decode_line(line) for line in file.read_bytes().splitlines()]
    with file.open("wb") as stream:
        for step in range(3000):
            fields = {key: value for key, value in some[step % 20].items() if key != "crc"}
            stream.write(encode_line({**fields, "step": step + 1}))
    run = open_run(tmp_path)
    text = html(run, builtin_rules())
    assert "200 points of 15 steps pooled exactly" in text
    assert len(text) < 2_000_000
    total = merge(pool(run, 200).groups).stats
    assert int(total["text"].n_tokens) == 3000 * 2000


def test_many_slices_are_not_all_drawn(tmp_path: Path) -> None:
    names = tuple(f"turn_{i}" for i in range(9))
    writer = RunWriter(tmp_path, START)
    for step in range(1, 4):
        stats = step_stats(step, tokens=100 * step, names=names, scale=lambda step, name: 0.01)
        writer.append(step, START, {}, stats.state, SliceStats.kind)
    writer.append_alert(alert(2, slice_name="turn_8"))
    writer.close()
    text = html(open_run(tmp_path), builtin_rules())
    assert "Not shown: turn_5, turn_6, turn_7." in text


def test_a_follower_sees_what_is_added(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 5)
    follower = Follower(path, builtin_rules())
    first = follower.look()
    assert first.run.steps[-1] == 5
    assert first.slices == NAMES
    assert first.tails["text"] == pytest.approx(
        [float(step_stats(step)["text"].abs_quantile(0.999)) for step in range(1, 6)]
    )
    assert follower.look() is first  # nothing new
    write_run(path, 3, first=6, alerts=(alert(7),))
    second = follower.look()
    assert second.run.steps[-1] == 8
    assert [each.step for each in second.alerts] == [7]
    assert second.last is not None
    assert float(second.last["text"].kl_k3) == float(step_stats(8)["text"].kl_k3)


def test_a_follower_asks_rules_where_no_monitor_watches(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 0.1} for step in range(20)]
    path = lines(tmp_path / "log.jsonl", *records)
    follower = Follower(path, builtin_rules())
    assert follower.look().alerts == []
    lines(path, *records, {"step": 20, "loss": "nan"}, {"step": 21, "loss": "inf"})
    assert [each.name for each in follower.look().alerts] == ["loss-not-finite"]


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, pyrlstats, pyrlstats.watch.commands;"
        "heavy = ('pydantic', 'matplotlib', 'jinja2', 'torch', 'pyarrow', 'yaml');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")
def test_the_page_opens_in_a_browser_without_errors(tmp_path: Path, run: Run) -> None:
    page = tmp_path / "report.html"
    page.write_text(html(run, builtin_rules()), encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [
        "--enable-logging=stderr",
        f"--screenshot={tmp_path / 'shot.png'}",
        "--window-size=1200,2000",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" not in done.stderr
    assert (tmp_path / "shot.png").read_bytes().startswith(b"\x89PNG")
    assert growing(40, "post_tool") == 0.01
