"""The demo: the tool and the task, the slices, that it learns, and what a run leaves behind."""

from __future__ import annotations

import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats.demo import records
from pyrlstats.demo.calculator import calculate
from pyrlstats.demo.display import percent
from pyrlstats.demo.policy import Policy
from pyrlstats.demo.rollout import Rollout, sample
from pyrlstats.demo.slices import NAMES, Role, slices_of
from pyrlstats.demo.task import MAX_LENGTH, SYMBOLS, Environment, Problem, decode, draw_problem
from pyrlstats.demo.training import Minibatch, Score, Settings, Step, Trainer, advantages, log_probabilities
from pyrlstats.demo.warmup import random_episode
from pyrlstats.monitor import RunReader

TWO_STEPS = Problem("12*34+56?", ("12*34", "08+56"), "64")
READ_BACK = Problem("#471902?", (), "471902")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The same numbers everywhere, and no threads that wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(problem: Problem, text: str) -> tuple[Environment, str]:
    """The environment after the policy has written a text, and all that the tool answered."""
    environment = Environment(problem)
    return environment, "".join(environment.write(symbol) for symbol in text)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("12*34", "08"),
        ("99+01", "00"),
        ("03-05", "98"),
        ("7*8", "56"),
        ("12", "!!"),
        ("1+2+3", "!!"),
        ("[", "!!"),
        ("", "!!"),
    ],
)
def test_calculator(expression: str, shown: str) -> None:
    assert calculate(expression) == shown


@pytest.mark.parametrize(
    ("problem", "text", "tool", "reward"),
    [
        (TWO_STEPS, "[12*34][08+56]64.", ">08>64", 1.0),
        (TWO_STEPS, "[12*34][08+57]65.", ">08>65", 0.5 * (1 + 4 / 5 + 1 / 2) / 3),  # follows the tool, right so far
        (TWO_STEPS, "[12*34]64.", ">08", 0.5 + 0.5 * (1 + 0 + 1) / 3),
        (TWO_STEPS, "64.", "", 0.5 + 0.5 * 1 / 3),
        (TWO_STEPS, "[12*34][08+56]64", ">08>64", 0.5 * 2 / 3),  # never ended
        (TWO_STEPS, "[12*3", "", 0.0),
        (TWO_STEPS, "[+]", ">!!", 0.0),
        (READ_BACK, "471902.", "", 1.0),
        (READ_BACK, "471900.", "", 0.5 * 5 / 6),
        (READ_BACK, "[01+02]471902.", ">03", 0.5 + 0.5 / 2),  # a call that was not needed
        (READ_BACK, ".", "", 0.0),
    ],
)
def test_environment_runs_the_tool_and_rewards(problem: Problem, text: str, tool: str, reward: float) -> None:
    environment, answered = write(problem, text)
    assert answered == tool
    assert environment.reward() == pytest.approx(reward)
    assert environment.solved == (reward > 0.5)


def test_an_episode_ends() -> None:
    assert write(TWO_STEPS, "64.")[0].done
    assert write(TWO_STEPS, "[1+1][1+1][1+1]")[0].done
    assert write(TWO_STEPS, "0" * 22)[0].done
    assert not write(TWO_STEPS, "[12*34]08")[0].done


def test_problems_are_solved_by_their_solution() -> None:
    rng = random.Random(0)
    problems = [draw_problem(rng) for _ in range(300)]
    assert {len(problem.calls) for problem in problems} == {0, 1, 2}
    for problem in problems:
        text = "".join(f"[{call}]" for call in problem.calls) + problem.answer + "."
        assert write(problem, text)[0].reward() == 1.0


def test_warm_up_episodes_have_the_form_and_are_right_only_by_chance() -> None:
    rng = random.Random(0)
    rewards = []
    for _ in range(500):
        problem = draw_problem(rng)
        tokens, roles = zip(*random_episode(problem, rng), strict=True)
        assert re.fullmatch(r"\^[^?]+\?(\[\d\d[+*-]\d\d\]>\d\d){0,2}(\d\d|\d{6})\.", decode(list(tokens)))
        own = decode([token for token, role in zip(tokens, roles, strict=True) if role == Role.MODEL])
        rewards.append(write(problem, own)[0].reward())
    assert 0.1 < np.mean(rewards) < 0.4


@pytest.fixture(scope="module")
def untrained() -> tuple[Policy, Rollout, list[Problem]]:
    """Episodes of a policy with random weights: calls of every kind, broken ones and none at all."""
    torch.manual_seed(0)
    policy = Policy(len(SYMBOLS), MAX_LENGTH)
    torch.nn.init.normal_(policy.head.weight, std=0.2)
    rng = random.Random(0)
    problems = [draw_problem(rng) for _ in range(300)]
    return policy, sample(policy, problems, torch.Generator().manual_seed(0)), problems


def test_slices_partition_the_models_tokens(untrained: tuple[Policy, Rollout, list[Problem]]) -> None:
    _, rollout, _ = untrained
    masks = {name: mask.tolist() for name, mask in slices_of(rollout.roles).items()}
    assert tuple(masks) == NAMES
    seen = dict.fromkeys(NAMES, 0)
    for row, roles in enumerate(rollout.roles.tolist()):
        first_result = roles.index(Role.TOOL) if Role.TOOL in roles else None
        for position, role in enumerate(roles):
            expected = None
            if role == Role.MODEL:
                before = first_result is None or position < first_result
                expected = "post_tool" if not before else "text" if first_result is None else "pre_tool"
                seen[expected] += 1
            assert [name for name in NAMES if masks[name][row][position]] == ([expected] if expected else [])
    assert min(seen.values()) > 20


def test_tool_results_stand_where_the_tool_was_called(untrained: tuple[Policy, Rollout, list[Problem]]) -> None:
    _, rollout, problems = untrained
    for tokens, roles, problem in zip(rollout.tokens.tolist(), rollout.roles.tolist(), problems, strict=True):
        text = {role: decode([t for t, r in zip(tokens, roles, strict=True) if r == role]) for role in Role}
        assert text[Role.PROMPT] == "^" + problem.prompt
        environment, answered = write(problem, text[Role.MODEL])
        assert environment.done
        assert text[Role.TOOL] == answered
        whole = decode(tokens).rstrip("_")
        assert whole.startswith("^" + problem.prompt)
        for call in environment.calls:
            assert f"[{call}]>{calculate(call)}" in whole


def test_the_sampler_and_the_learner_agree_on_one_policy(untrained: tuple[Policy, Rollout, list[Problem]]) -> None:
    policy, rollout, _ = untrained
    with torch.no_grad():
        logp = log_probabilities(policy, rollout.tokens)
    ours = rollout.roles[:, 1:] == Role.MODEL
    torch.testing.assert_close(logp[ours], rollout.logp[:, 1:][ours], rtol=0, atol=2e-5)
    assert not rollout.logp[rollout.roles != Role.MODEL].any()


def test_advantages_compare_episodes_of_one_problem() -> None:
    result = advantages(torch.tensor([0.0, 1.0, 0.5, 0.5]), samples=2)
    assert result[:2].sum() == pytest.approx(0.0, abs=1e-6)
    assert result[1] > 0.5
    assert result[2:].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_it_learns() -> None:
    trainer = Trainer(Settings(seed=3, steps=12, problems=32, evaluation_problems=256))
    untrained = trainer.evaluate()
    for _ in trainer.warm_up():
        pass
    before = trainer.evaluate()
    steps = list(trainer.learn())
    after = trainer.evaluate()
    assert untrained.reward < 0.05
    assert after.reward > before.reward + 0.15
    assert trainer.evaluate() == after
    # several epochs: the policy has left the sampler, and no token was counted that is not the model's
    for step in steps:
        assert all(float(step.stats[name].log_ratio_abs_mean) > 1e-6 for name in NAMES)
        counted = sum(int(mask.sum()) for batch in step.minibatches for mask in batch.masks.values())
        assert counted == sum(int(step.stats[name].n_tokens) for name in NAMES)


def command(*arguments: str, folder: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-m", "pyrlstats"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a quick run."""
    folder = tmp_path_factory.mktemp("demo")
    done = command("demo", "--quick", "--seed", "7", "--threads", "1", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "demo_run", done.stdout


def strict(text: str) -> Any:
    """JSON without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_quick_run_leaves_its_files(quick_run: tuple[Path, str]) -> None:
    folder, output = quick_run
    assert {path.name for path in folder.iterdir()} == {
        "report.html",
        "report.png",
        "summary.json",
        "last_step.npz",
        *("run.json", "steps.jsonl", "alerts.jsonl", "alerts", "snapshots"),  # the monitor's run folder
    }
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    summary = strict((folder / "summary.json").read_text())
    found = list(numbers(summary))
    assert len(found) > 15
    assert all(math.isfinite(number) for number in found)
    assert summary["settings"]["seed"] == 7
    assert summary["steps_done"] == summary["settings"]["steps"] == 4
    assert list(summary["scores"]) == ["untrained", "after warm-up", "after training"]
    assert "\x1b" not in output
    assert all(line in output for line in ("untrained:", "step 4/4", "post_tool", "report.html"))
    assert re.search(
        r"how to read this:\n  x, the log-ratio, .*\n  In step 4 the far tail is longest in \w+: p99.9 is ", output
    )
    assert re.search(r"  text +\d+ +[\d.]+% +~[\d.]+ ", output), "fewer than 10 tokens beyond"
    assert re.search(r"next: python\S* -m pyrlstats watch --once demo_run, check demo_run, report demo_run\n", output)


def test_shares_that_are_not_quite_all() -> None:
    assert [percent(share) for share in (1.0, 0.99999, 0.9999, 0.5)] == ["100.00%", ">99.99%", "99.99%", "50.00%"]


def test_what_it_leaves_is_a_run_like_any_other(quick_run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = quick_run
    seen = command("watch", "--once", str(folder), folder=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert all(word in seen.stdout for word in ("post_tool", "reward", "solved", "loss", "step 4", "quiet"))
    checked = command("check", str(folder), folder=tmp_path)
    assert (checked.returncode, checked.stdout) == (0, "4 steps (1 to 4): no alerts\n")
    assert command("report", str(folder), folder=tmp_path).returncode == 0


def test_a_second_demo_begins_anew_but_spares_other_runs(tmp_path: Path) -> None:
    """What the first one left, and had not finished, is gone; a run of somebody else's is refused."""
    for seed, steps in ((0, 3), (1, 2)):
        monitor = records.begin(tmp_path, Settings(seed=seed))
        for number in range(1, steps + 1):
            one = pyrlstats.slice_stats(np.full(9, seed, "f4"), np.zeros(9, "f4"))
            batch = Minibatch(torch.zeros(1), torch.zeros(1), {}, 0.5)
            records.watch(monitor, Step(number, Score(0.25, 0.5), one, [batch]))
        monitor.close()
        records.prepare(tmp_path)
    found = RunReader(tmp_path).steps
    assert [record.step for record in found] == [1, 2]
    assert found[0].scalars == {"reward": 0.25, "solved": 0.5, "loss": 0.5}
    assert found[0].stats is not None
    assert float(found[0].stats["all"].log_ratio_mean) == 1.0
    (tmp_path / "summary.json").unlink()
    with pytest.raises(FileExistsError, match="it holds another run"):
        records.prepare(tmp_path)


def test_page_is_self_contained(quick_run: tuple[Path, str]) -> None:
    page = (quick_run[0] / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<link|<script|@import|url\(", page)
    assert re.findall(r'src="([^"]{15})', page) == ["data:image/png;"]
    assert all(name in page for name in NAMES)
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page).lower()


def test_figures_of_the_last_step_follow_from_its_tokens(quick_run: tuple[Path, str]) -> None:
    folder, _ = quick_run
    recorded = RunReader(folder).steps
    assert [record.step for record in recorded] == [1, 2, 3, 4]
    assert recorded[-1].stats is not None
    figures = recorded[-1].stats.to_dict()
    tokens = np.load(folder / "last_step.npz")
    for name in NAMES:
        x = (tokens["logp"] - tokens["old_logp"])[tokens[name]].astype(np.float64)
        w = np.exp(x)
        expected = {
            "n_tokens": len(x),
            "n_finite": len(x),
            "log_ratio_mean": x.mean(),
            "log_ratio_max": x.max(),
            "ess_fraction": w.sum() ** 2 / (w**2).sum() / len(x),
            "kl_k3": np.mean(np.expm1(x) - x),
            "clip_fraction": np.mean((w < 0.8) | (w > 1.2)),
            "chi2": len(x) * (w**2).sum() / w.sum() ** 2 - 1,
        }
        for key, value in expected.items():
            assert figures[f"{name}/{key}"] == pytest.approx(value, rel=1e-6), (name, key)
        magnitudes = np.sort(np.abs(x))
        for q, key in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99_9")):
            exact = magnitudes[max(1, math.ceil(q * len(x))) - 1]
            assert figures[f"{name}/abs_log_ratio_{key}"] == pytest.approx(exact, rel=2**-5), (name, key)


def test_interrupt_writes_the_report_of_what_was_done(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "pyrlstats", "demo", "--quick", "--steps", "100000", "--threads", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    steps = tmp_path / "demo_run" / "steps.jsonl"
    while not steps.exists() or not steps.read_text():
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=200)
    assert run.returncode == 130, errors
    assert "interrupted after" in output
    summary = strict((tmp_path / "demo_run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps_done"] == len(steps.read_text().splitlines())
    assert "interrupted" in (tmp_path / "demo_run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["torch", "rich", "matplotlib", "jinja2", "typer"])
def test_a_missing_package_is_named_with_its_cure(package: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from pyrlstats.cli import main; main()"
    done = command("demo", folder=tmp_path, code=code)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert package in done.stderr
    assert "pip install 'pyrlstats[demo]'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("demo", "--out", "file/inside", folder=tmp_path)
    assert done.returncode == 1
    assert "cannot write into file/inside" in done.stderr
    assert "--out" in done.stderr
    assert done.stdout == ""


def test_version_and_info(tmp_path: Path) -> None:
    assert command("--version", folder=tmp_path).stdout == f"pyrlstats {pyrlstats.__version__}\n"
    assert strict(command("info", folder=tmp_path).stdout) == pyrlstats.build_info()


def test_import_pyrlstats_leaves_the_demo_alone(tmp_path: Path) -> None:
    code = "import sys, pyrlstats; print(*sorted({name.partition('.')[0] for name in sys.modules}), *sys.modules)"
    loaded = command(folder=tmp_path, code=code).stdout.split()
    assert "pyrlstats" in loaded
    assert not {"torch", "typer", "rich", "matplotlib", "jinja2", "pyrlstats.demo", "pyrlstats.cli"} & set(loaded)
