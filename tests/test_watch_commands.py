"""The command line over recorded runs: what it prints, where it writes, and how it ends."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result
from watch_runs import NAMES, alert, step_stats, write_run

from pyrlstats import _dispatch, slice_stats
from pyrlstats.cli import build_app
from pyrlstats.columnar import write_parquet
from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.rules import builtin_rules
from pyrlstats.sinks import JsonlSink
from pyrlstats.watch import doctor
from pyrlstats.watch.runs import open_run
from pyrlstats.watch.summary import scalars_of
from pyrlstats.watch.terminal import ago, short, sparkline


def call(*arguments: object, columns: int = 120) -> Result:
    """One call of the application, at a width."""
    return CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(
        build_app(), [str(each) for each in arguments]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "grown", alerts=(alert(55), alert(70, "stop")))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "quiet", 60, scale=lambda step, name: 0.01)


def json_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 160, 240])
def test_watch_prints_one_frame_that_fits(folder: Path, columns: int) -> None:
    done = call("watch", folder, "--once", "--width", columns)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert lines[0].startswith("grown  run folder")
    assert lines[0].rstrip().endswith("1 stop, 1 warning")
    assert "step 80" in lines[1]
    assert "30 s/step" in lines[1]
    if columns >= 80:
        row = next(line for line in lines if line.strip().startswith("post_tool"))
        value = f"{float(step_stats(80)['post_tool'].abs_quantile(0.999)):.3g}"
        assert value in row
        assert "2,000" in row
        assert "▁" in row
        assert "█" in row
        assert "…" not in row
    alerts = [line for line in lines if "growth" in line]
    assert "stop" in alerts[0]  # the last first
    assert "warning" in alerts[1]
    assert "reward" in done.stdout


def test_what_cannot_be_read_is_said_by_every_command(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"step": 1')
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty", torn):
        for command in (["watch", path, "--once"], ["report", path], ["check", path], ["replay", path]):
            done = call(*command)
            assert (done.exit_code, done.stderr.count("\n")) == (3, 1), command
            assert done.stderr.startswith(f"pyrlstats {command[0]}: {path}")
        assert call("compare", path, path).exit_code == 3


def test_damage_that_shows_late_is_said_too(tmp_path: Path) -> None:
    table = tmp_path / "damaged.parquet"
    write_parquet(table, [(step, step_stats(step)) for step in range(1, 41)])
    import pyarrow.parquet as pq

    row_group = pq.ParquetFile(table).metadata.row_group(0)
    place = next(
        row_group.column(index).data_page_offset + 200
        for index in range(row_group.num_columns)
        if row_group.column(index).path_in_schema.startswith("state.bin_counts")
    )
    data = bytearray(table.read_bytes())
    data[place] ^= 0xFF
    table.write_bytes(data)
    for command in (["report", table, "--markdown"], ["check", table], ["replay", table], ["compare", table, table]):
        done = call(*command)
        assert done.exit_code == 3, command
        assert "damaged.parquet cannot be read: " in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("steps", [0, 1])
def test_watch_of_a_run_that_has_just_begun(tmp_path: Path, steps: int) -> None:
    done = call("watch", write_run(tmp_path / "run", steps), "--once", "--width", 80)
    assert done.exit_code == 0
    assert ("no steps yet" in done.stdout) == (steps == 0)


def test_statistics_on_request_are_no_scalars_of_the_trainer(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(0, 0.1, (4, 100))
    path = tmp_path / "steps.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 5):
        tool = {"post_tool": np.arange(100) > step}
        stats = slice_stats(x * step, np.zeros_like(x), tool, advantages=x[:, 0], truncate=(0.5, 2))
        sink.write(
            step, {}, stats.to_dict("rl/") | {"reward": float(step), "mine/loss": 1.0 / step, "mine/n_tokens": step}
        )
    scalars = scalars_of(open_run(path), builtin_rules(), 50)
    assert {"reward", "mine/loss"} <= set(scalars) <= {"reward", "mine/loss", "mine/n_tokens"}


def test_watch_of_scalars(tmp_path: Path) -> None:
    path = json_lines(
        tmp_path / "log.jsonl", *({"step": i, "loss": 0.5 - i / 100, "time": 100.0 + 7 * i} for i in range(30))
    )
    done = call("watch", path, "--once", "--width", 100)
    assert done.exit_code == 0
    row = next(line for line in done.stdout.splitlines() if " loss " in line)
    assert "0.21" in row
    assert "0.21 .. 0.5" in row
    assert "7 s/step" in done.stdout


def test_watch_follows_a_run_in_a_terminal(tmp_path: Path) -> None:
    pyte = pytest.importorskip("pyte")
    pty = pytest.importorskip("pty")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    path = write_run(tmp_path / "run", 10)
    columns, rows = 80, 24
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        command = [sys.executable, "-m", "pyrlstats", "watch", str(path), "--every", "0.2"]
        os.execve(sys.executable, command, {**environment, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)

    def seen(text: str) -> bool:
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                stream.feed(os.read(terminal, 65536))
            if text in "\n".join(screen.display):
                return True
        return False

    try:
        assert seen("step 10"), "\n".join(screen.display)
        write_run(path, 2, first=11, alerts=(alert(12, "stop"),))
        assert seen("step 12"), "\n".join(screen.display)
        assert "1 stop" in screen.display[0]
        assert screen.display[rows - 1].strip() == ""  # nothing is cut off at the bottom
        os.kill(child, signal.SIGINT)
        while True:
            try:
                if not os.read(terminal, 65536):
                    break
            except OSError:
                break
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)


def test_report_writes_a_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("report", folder, "-o", tmp_path / "page.html")
    assert done.exit_code == 0
    assert re.fullmatch(r".*page\.html \(\d\.\d MB\)\n", done.stdout)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    monkeypatch.chdir(tmp_path)
    done = call("report", folder, "--markdown")
    assert done.stdout.startswith("# grown\n")
    done = call("report", folder, "--markdown", "-o", "page.md")
    assert (tmp_path / "page.md").read_text(encoding="utf-8").startswith("# grown\n")


def test_report_says_where_it_cannot_write(folder: Path, tmp_path: Path) -> None:
    done = call("report", folder, "--markdown", "-o", tmp_path / "none" / "page.md")
    assert done.exit_code == 3
    assert "No such file or directory; choose another file with -o" in done.stderr


ALERTS = {
    0: (alert(9, "info"),),
    1: (alert(9, "info"), alert(12)),
    2: (alert(9), alert(12, "stop")),
}


@pytest.mark.parametrize("status", ALERTS)
def test_check_ends_with_the_worst_alert(tmp_path: Path, status: int) -> None:
    path = write_run(tmp_path / "run", 20, alerts=ALERTS[status])
    done = call("check", path)
    assert done.exit_code == status
    assert done.stdout.splitlines()[0] == "info    step 9: growth: post_tool: it <grows> | more" if status < 2 else True
    assert done.stdout.splitlines()[-1].startswith("20 steps (1 to 20): 1")
    assert call("check", path, "-q").stdout == ""


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([{"step": i, "loss": 0.1} for i in range(50)], 0),
        ([{"step": i, "clip_ratio/region_mean": 0.6} for i in range(50)], 1),
        ([{"step": i, "loss": math.nan} for i in range(50)], 2),
        ([{"step": 1}], 0),
    ],
)
def test_check_asks_the_rules_about_scalars(tmp_path: Path, records: list[Any], status: int) -> None:
    assert call("check", json_lines(tmp_path / "log.jsonl", *records)).exit_code == status
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": records}))
    assert call("check", state).exit_code == status


def test_check_of_what_cannot_be_read_is_3(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = write_run(tmp_path / "run", 3)
    file = damaged / "steps.jsonl"
    file.write_bytes(b"x" + file.read_bytes().replace(b"\n", b"\nx", 2))
    bad = tmp_path / "rules.toml"
    bad.write_text("rules = 3")
    good = write_run(tmp_path / "good", 3)
    none = write_run(tmp_path / "zero", 0)
    for arguments in (
        [tmp_path / "none"],
        [empty],
        [damaged],
        [none],
        [good, "--rules", bad],
        [],
        [good, "--nonsense"],
    ):
        done = call("check", *arguments)
        assert done.exit_code == 3, arguments
        assert done.stderr
    assert call("check", good).exit_code == 0


def test_check_asks_own_rules_beside_the_monitor(folder: Path, quiet: Path, tmp_path: Path) -> None:
    text = '[[rules]]\nname = "mine"\ntitle = "t"\nlevel = "stop"\nlink = "reward"\n'
    text += 'when = [{ scalar = "reward", above = 0 }]\n'
    own = tmp_path / "own.toml"
    own.write_text(text)
    assert call("check", quiet).exit_code == 0
    done = call("check", quiet, "--rules", own)
    assert done.exit_code == 2
    assert "stop    step 1: mine: t: reward = " in done.stdout


def test_replay_says_what_would_have_alarmed(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '[[rules]]\nname = "mine"\ntitle = "KL is high"\nlevel = "stop"\nlink = "policy update"\nslices = ["post_*"]\n'
        'when = [{ statistic = "kl_k3", above = 0.002 }]\nfor_steps = 2\n'
    )
    kl = np.array([float(step_stats(step)["post_tool"].kl_k3) for step in range(1, 81)])
    first = next(step for step in range(2, 81) if (kl[step - 2 : step] > 0.002).all())
    done = call("replay", folder, "--rules", own, "--no-builtin", "--json")
    assert done.exit_code == 0
    (record,) = (Alert.from_json(json.loads(line)) for line in done.stdout.splitlines())
    assert (record.step, record.name, record.slice, record.level) == (first, "mine", "post_tool", "stop")
    assert record.evidence["conditions"][0]["value"] == kl[first - 1]
    done = call("replay", folder, "--rules", own, "--warmup", 30)
    assert f"step {first} stop mine policy update" in done.stdout
    assert "47 rules over 80 steps (1 to 80), baseline of 30: 1 stop, " in done.stdout
    assert re.fullmatch(
        r"\d+ of 47 rules have nothing to look at: --verbose names them\n"
        "rules only: what the monitor's own detectors found is not replayed, see pyrlstats check\n",
        done.stderr,
    )
    named = call("replay", folder, "--verbose").stderr
    assert "entropy-floor" in named
    assert "this run has no" in named


def test_rules_are_listed_explained_and_checked(tmp_path: Path) -> None:
    done = call("rules")
    assert done.exit_code == 0
    for name in ("entropy-floor", "tail-growing", "kl-above-target"):
        assert name in done.stdout
    done = call("rules", "--explain", "staleness-*")
    assert "staleness-high" in done.stdout
    assert "async/staleness_mean" in done.stdout
    done = call("rules", "--explain", "entropy-flor")
    assert done.exit_code == 3
    assert "no rule is 'entropy-flor' (did you mean 'entropy-floor'?)" in done.stderr
    assert "no rule is 'zzz': pyrlstats rules lists them" in call("rules", "--explain", "zzz").stderr
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('disable = ["grad-*"]')
    bad.write_text('[[rules]]\nname = "x"')
    assert call("rules", good).stdout.replace("\n", "") == f"{good}: no errors; 42 rules in all"
    done = call("rules", bad)
    assert done.exit_code == 3
    assert f"{bad}: rule 'x': level: is missing" in done.stderr


def test_the_code_and_the_rules_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "watch.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (own,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "watch.md", "exec"), {})
    assert call("watch", "run", "--once").exit_code == 0
    Path("my_rules.toml").write_text(own)
    assert "no errors" in call("rules", "my_rules.toml").stdout
    Path("my_rules.toml").write_text(own.replace("abs_log_ratio_p99_9", "ess_fracton", 1))
    assert call("rules", "my_rules.toml").stderr.strip() in page


def test_the_reference_of_the_docs_is_that_of_the_data() -> None:
    page = (Path(__file__).parent.parent / "docs" / "watch.md").read_text()
    assert call("rules", "--markdown").stdout.strip() in page


def test_compare_puts_the_effect_first(folder: Path, quiet: Path, tmp_path: Path) -> None:
    done = call("compare", folder, quiet, "--last", 10, columns=100)
    assert done.exit_code == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert done.stdout.splitlines()[0].startswith("grown, steps 71 to 80 against quiet, steps 51 to 60")
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if len(line.split()) == 9}
    grown = step_stats(71).merge([step_stats(step) for step in range(72, 81)])["post_tool"]
    flat = step_stats(51, scale=lambda step, name: 0.01).merge(
        [step_stats(step, scale=lambda step, name: 0.01) for step in range(52, 61)]
    )["post_tool"]
    ratio = float(grown.abs_quantile(0.5)) / float(flat.abs_quantile(0.5))
    assert rows["post_tool"][1] == f"×{ratio:.2g}"  # noqa: RUF001
    table = tmp_path / "one.parquet"
    write_parquet(table, [(step, step_stats(step)) for step in range(1, 11)])
    assert call("compare", table, quiet).exit_code == 0


def test_compare_needs_states_and_a_common_slice(folder: Path, tmp_path: Path) -> None:
    scalars = json_lines(tmp_path / "log.jsonl", {"step": 1, "loss": 1.0})
    done = call("compare", folder, scalars)
    assert done.exit_code == 3
    assert "has no states to compare: scalars are not enough" in done.stderr.replace("\n", " ")
    other = tmp_path / "other.parquet"
    write_parquet(other, [(1, step_stats(1, names=("else",)))])
    done = call("compare", folder, other)
    assert done.exit_code == 3
    assert "no slice in common" in done.stderr


def test_doctor_tests_every_backend() -> None:
    done = call("doctor")
    assert done.exit_code == 0
    for name in _dispatch.BACKENDS:
        row = next(line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert "yes" in row or "no:" in row
    assert "all usable backends agree" in done.stdout
    assert done.stdout.count("equal to the reference") >= 2
    assert "pydantic" in done.stdout
    if not torch.cuda.is_available():
        assert re.search(r"triton +cuda +(yes|no: torch sees no GPU)", done.stdout)


def test_doctor_knows_every_extra() -> None:
    """But for that of the benchmarks' contenders."""
    extras = importlib.metadata.metadata("pyrlstats").get_all("Provides-Extra")
    assert set(doctor.EXTRAS) == set(extras) - {"contenders"}
    assert all(doctor._version(name) is None for name in ("no_such_package", "no_such_package.part"))


def test_doctor_finds_a_backend_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyrlstats.backends import torch_ops

    right = torch_ops.accumulate

    def wrong(batch: Any, state: Any) -> None:
        right(batch, state)
        state.counts[0, 0] += 1

    monkeypatch.setattr(torch_ops, "accumulate", wrong)
    assert doctor.self_test("torch") == "other counts"
    done = call("doctor")
    assert done.exit_code == 1
    assert "other counts" in done.stdout
    monkeypatch.setattr(torch_ops, "accumulate", lambda batch, state: 1 / 0)
    assert doctor.self_test("torch") == "raises ZeroDivisionError: division by zero"
    assert doctor.self_test("reference") is None


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else find(name))
    done = call("doctor", "--quick")
    assert "jinja2 missing" in done.stdout
    assert "pip install 'pyrlstats[watch]'" in done.stdout
    done = call("report", "x")
    assert (done.exit_code, "needs jinja2: pip install 'pyrlstats[watch]'" in done.stderr) == (3, True)


def test_small_pictures_and_words() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.001], 8) == "▄▄"  # flat
    assert sparkline([1.0, math.nan, 8.0], 8) == "▁ █"
    assert sparkline([], 8) == sparkline([math.nan], 8) == ""
    assert len(sparkline(np.arange(1000.0), 17)) == 17
    assert sparkline([0.0, 1.0, 1e4, 1e7], 8, log=True) == " ▁▅█"
    assert [short(value) for value in (0, 9999, 20_000, 1_500_000, 3e12)] == ["0", "9,999", "20k", "1.5M", "3T"]
    assert [ago(seconds) for seconds in (-5, 7, 119, 600, 9000, 200_000)] == [
        "0 s",
        "7 s",
        "119 s",
        "10 min",
        "2 h",
        "2 d",
    ]


def test_names_are_not_taken_for_markup(tmp_path: Path) -> None:
    path = write_run(tmp_path / "[red]run", 5, alerts=(alert(3, name="odd"),))
    for arguments in (["watch", path, "--once"], ["replay", path], ["compare", path, path], ["check", path]):
        assert call(*arguments).exit_code == (1 if arguments[0] == "check" else 0)
    assert "[red]run" in call("watch", path, "--once").stdout
    assert "[red]run" in call("compare", path, path).stdout
    assert set(NAMES) <= set(call("compare", path, path).stdout.split())


def test_without_its_extra_the_command_line_does_not_say_warning() -> None:
    code = "import sys; sys.modules['typer'] = None; import pyrlstats.cli"
    done = subprocess.run([sys.executable, "-c", code, "check", "x"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        3,
        "pyrlstats: the command line needs typer: pip install 'pyrlstats[watch]'\n",
    )
