"""Records runs of the demo, healthy or growing stale: ``python -m benchmarks.detection.record FOLDER``.

Each run leaves a run folder without alerts, for the others here to replay. Staleness is the number of steps by which
the sampling policy lags behind the learner: 0 until step ``--onset``, then one more every ``--every`` steps up to
``--most``.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from pyrlstats.demo.rollout import Rollout, sample
from pyrlstats.demo.slices import Role
from pyrlstats.demo.task import draw_problem
from pyrlstats.demo.training import Settings, Step, Trainer
from pyrlstats.monitor.folder import RunWriter
from pyrlstats.slice_stats import SliceStats


class StaleTrainer(Trainer):
    """A trainer whose samples come from the policy of ``lag`` steps ago.

    Args:
        settings: of the run.
        most: largest lag, that of the memory.

    Attributes:
        lag: steps, at least 0; as far back as there are policies.
        scalars: of the last batch: reward, solved, length, entropy (mean of -logp over the sampled tokens, nats).
    """

    def __init__(self, settings: Settings, most: int) -> None:
        super().__init__(settings)
        self.lag = 0
        self.scalars: dict[str, float] = {}
        self._past = deque([copy.deepcopy(self.policy)], most + 1)

    def _sample(self) -> Rollout:
        settings = self.settings
        self._past.append(copy.deepcopy(self.policy))
        behind = self._past[-1 - min(self.lag, len(self._past) - 1)]
        drawn = [draw_problem(self._rng) for _ in range(settings.problems)]
        problems = [problem for problem in drawn for _ in range(settings.samples)]
        rollout = sample(behind, problems, self._generator)
        ours = rollout.roles == Role.MODEL
        self.scalars = {
            "reward": rollout.rewards.mean().item(),
            "reward_std": rollout.rewards.std().item(),
            "solved": rollout.solved.float().mean().item(),
            "length": ours.sum(1).float().mean().item(),
            "entropy": -rollout.logp[ours].mean().item(),
        }
        return rollout


def lags(steps: int, onset: int, every: int, most: int) -> list[int]:
    """The lag of every step from 1 on."""
    return [min(most, max(0, 1 + (step - onset) // every)) if step >= onset else 0 for step in range(1, steps + 1)]


def record(folder: Path, settings: Settings, lag_of: list[int], deadline: float) -> int:
    """Train and record until the end or the deadline (seconds of ``time.monotonic``); returns the steps done."""
    trainer = StaleTrainer(settings, max(lag_of))
    for _ in trainer.warm_up():
        pass
    writer = RunWriter(folder, time.time())
    done = 0
    for step in _learn(trainer, lag_of):
        loss = sum(each.loss for each in step.minibatches) / len(step.minibatches)
        scalars = {"loss": loss, **trainer.scalars, "staleness": float(lag_of[step.number - 1])}
        writer.append(step.number, time.time(), scalars, step.stats.state.to_host(), SliceStats.kind)
        done = step.number
        if time.monotonic() > deadline:
            break
    writer.close()
    return done


def _learn(trainer: StaleTrainer, lag_of: list[int]) -> Iterator[Step]:
    trainer.lag = lag_of[0]
    for step in trainer.learn():
        yield step
        if step.number < len(lag_of):
            trainer.lag = lag_of[step.number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--onset", type=int, default=10**9, help="first step with stale samples")
    parser.add_argument("--every", type=int, default=20, help="steps after which they are one step staler")
    parser.add_argument("--most", type=int, default=0, help="largest lag")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = replace(
        Settings(),
        seed=arguments.seed,
        steps=arguments.steps,
        problems=arguments.problems,
        learning_rate=arguments.learning_rate,
    )
    lag_of = lags(arguments.steps, arguments.onset, arguments.every, arguments.most)
    done = record(arguments.out, settings, lag_of, time.monotonic() + arguments.seconds)
    print(f"{arguments.out}: {done} steps")


if __name__ == "__main__":
    main()
