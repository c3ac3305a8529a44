"""One run from start to report."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from pyrlstats.demo import records
from pyrlstats.demo.display import FEW, Display, choose_display, describe, tail_line
from pyrlstats.demo.figures import draw
from pyrlstats.demo.interrupt import Interrupt
from pyrlstats.demo.reading import reading
from pyrlstats.demo.report import write_page
from pyrlstats.demo.rollout import sample
from pyrlstats.demo.training import Score, Settings, Step, Trainer
from pyrlstats.demo.windows import first_and_last

EPISODES_SHOWN = 12


def run(settings: Settings, folder: Path) -> bool:
    """Train, show it, and write the report into ``folder`` (made by :func:`records.prepare`).

    Ctrl-C ends training after the step in progress; the report is then about the steps done.

    Returns:
        False if it was interrupted.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    trainer = Trainer(settings)
    steps: list[Step] = []
    scores: dict[str, Score] = {}
    with choose_display(settings.steps) as display, Interrupt() as interrupt:
        _train(trainer, folder, display, interrupt, steps, scores)
        if interrupt.asked:
            display.say(f"interrupted after {len(steps)} steps")
        if not steps:
            display.say("no training step was finished: nothing to report")
            return False
        _score(trainer, "after training", display, scores)
        times = records.Times(time.perf_counter() - wall, time.process_time() - cpu)
        summary = records.summarise(settings, steps, scores, times, interrupted=interrupt.asked)
        records.write_summary(folder, summary)
        records.write_tokens(folder, steps[-1].minibatches)
        draw(steps, scores, folder / records.FIGURE)
        problems = trainer.evaluation_problems()[:EPISODES_SHOWN]
        episodes = sample(trainer.policy, problems, torch.Generator().manual_seed(0))
        write_page(folder / records.PAGE, folder / records.FIGURE, steps, scores, summary, episodes)
        windows = first_and_last(steps)
        for window in windows:
            display.say(tail_line(window))
        display.say("how to read this:")
        for line in (*reading(*windows), f"{FEW}."):
            display.say(f"  {line}")
        display.say(f"{times.wall_seconds:.0f} s on the clock, {times.cpu_seconds:.0f} s of processor time")
        display.say(f"report: {folder / records.PAGE}")
        display.say(f"next: {program()} watch --once {folder}, check {folder}, report {folder}")
    return not interrupt.asked


def _train(
    trainer: Trainer,
    folder: Path,
    display: Display,
    interrupt: Interrupt,
    steps: list[Step],
    scores: dict[str, Score],
) -> None:
    """Train and fill ``steps`` and ``scores`` as far as it gets."""
    _score(trainer, "untrained", display, scores)
    display.begin("warm-up on random episodes", trainer.settings.warmup_steps)
    for _ in trainer.warm_up():
        display.advance()
        if interrupt.asked:
            return
    _score(trainer, "after warm-up", display, scores)
    display.begin("training", trainer.settings.steps)
    with ExitStack() as opened:
        for step in trainer.learn():
            if steps:
                steps[-1].minibatches.clear()  # only the last step's tokens are kept
            else:
                monitor = opened.enter_context(records.begin(folder, trainer.settings))
            steps.append(step)
            records.watch(monitor, step)
            display.step(step)
            if interrupt.asked:
                return


def program() -> str:
    """How this program is called again: by its name where it is on the path, else by where it lies."""
    called = Path(sys.argv[0])
    if called.name != "pyrlstats":
        return f"{Path(sys.executable).name} -m pyrlstats"
    found = shutil.which("pyrlstats")
    return "pyrlstats" if found and Path(found).samefile(called) else str(called)


def _score(trainer: Trainer, name: str, display: Display, scores: dict[str, Score]) -> None:
    scores[name] = trainer.evaluate()
    display.say(f"{name + ':':<16} {describe(scores[name])}")
