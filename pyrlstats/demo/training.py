"""Training: a short supervised start, then GRPO with clipped ratios and several epochs over each batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.demo.policy import Policy
from pyrlstats.demo.rollout import Rollout, sample
from pyrlstats.demo.slices import NAMES, Role, slices_of
from pyrlstats.demo.task import INDEX, MAX_LENGTH, PAD, SYMBOLS, Problem, draw_problem
from pyrlstats.demo.warmup import random_episode
from pyrlstats.slice_stats import SliceStats


@dataclass(frozen=True)
class Settings:
    """All that decides a run.

    Attributes:
        seed: of weights, problems and sampling.
        steps: sampled batches to learn from.
        problems, samples: problems a batch, episodes a problem (the group whose mean is the baseline).
        epochs, minibatches: passes over a batch, updates a pass.
        learning_rate, clip: of the policy update; clip is (low, high) of the ratio.
        warmup_steps, warmup_batch, warmup_learning_rate: of the supervised start.
        evaluation_problems: problems, always the same, that the policies are compared on.
    """

    seed: int = 0
    steps: int = 60
    problems: int = 64
    samples: int = 8
    epochs: int = 3
    minibatches: int = 4
    learning_rate: float = 1e-3
    clip: tuple[float, float] = (0.2, 0.2)
    warmup_steps: int = 300
    warmup_batch: int = 64
    warmup_learning_rate: float = 3e-3
    evaluation_problems: int = 512


QUICK = Settings(
    steps=4, problems=16, warmup_steps=40, warmup_batch=32, evaluation_problems=128
)  # shows the form, learns little


@dataclass(frozen=True)
class Score:
    """Means over episodes: of the reward, and of whether the answer was right."""

    reward: float
    solved: float


@dataclass(frozen=True)
class Minibatch:
    """One update: its loss, and what its statistics were made of, (b, T) each: log-probabilities (nats) and masks."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    masks: dict[str, torch.Tensor]
    loss: float


@dataclass(frozen=True)
class Step:
    """One step: the sampled batch's score, the statistics of all its updates, and what they were made of."""

    number: int
    score: Score
    stats: SliceStats
    minibatches: list[Minibatch] = field(repr=False)


def log_probabilities(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability (nats) of each token after those before it, (B, T - 1): the learner's own computation."""
    distribution = torch.log_softmax(policy(tokens[:, :-1]), -1)
    return distribution.gather(2, tokens[:, 1:, None])[..., 0]


def advantages(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards relative to the episodes of the same problem: mean 0 and, if they differ, deviation 1."""
    groups = rewards.view(-1, samples)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-2)).view(-1)


class Trainer:
    """A policy in training.

    Args:
        settings: all that decides the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._rng = random.Random(settings.seed)
        self._generator = torch.Generator().manual_seed(settings.seed)
        torch.manual_seed(settings.seed)
        self.policy = Policy(len(SYMBOLS), MAX_LENGTH)
        self._accumulator = SliceAccumulator(NAMES, clip=settings.clip)

    def evaluate(self) -> Score:
        """The policy's score on problems that do not depend on training: the same at every call and for every seed."""
        problems = self.evaluation_problems()
        return _score(sample(self.policy, problems, torch.Generator().manual_seed(0)))

    def evaluation_problems(self) -> list[Problem]:
        """The problems of :meth:`evaluate`."""
        rng = random.Random(0)
        return [draw_problem(rng) for _ in range(self.settings.evaluation_problems)]

    def warm_up(self) -> Iterator[float]:
        """Learn the form of episodes from random ones; yields the loss (nats a token) after each update."""
        settings = self.settings
        optimizer = torch.optim.Adam(self.policy.parameters(), settings.warmup_learning_rate)
        for _ in range(settings.warmup_steps):
            episodes = [random_episode(draw_problem(self._rng), self._rng) for _ in range(settings.warmup_batch)]
            length = max(map(len, episodes))
            padded = [[*episode, *[(INDEX[PAD], Role.PAD)] * (length - len(episode))] for episode in episodes]
            tokens, roles = torch.tensor(padded).unbind(-1)
            ours = roles[:, 1:] == Role.MODEL
            loss = -log_probabilities(self.policy, tokens)[ours].mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            yield loss.item()

    def learn(self) -> Iterator[Step]:
        """Sample a batch, learn from it, report; ``settings.steps`` times."""
        optimizer = torch.optim.Adam(self.policy.parameters(), self.settings.learning_rate, betas=(0.9, 0.95))
        for number in range(1, self.settings.steps + 1):
            rollout = self._sample()
            self._accumulator.reset()
            minibatches = [self._update(optimizer, rollout, rows) for rows in self._shuffled(len(rollout.tokens))]
            yield Step(number, _score(rollout), self._accumulator.compute(), minibatches)

    def _sample(self) -> Rollout:
        settings = self.settings
        drawn = [draw_problem(self._rng) for _ in range(settings.problems)]
        return sample(self.policy, [problem for problem in drawn for _ in range(settings.samples)], self._generator)

    def _shuffled(self, episodes: int) -> Iterator[torch.Tensor]:
        """Rows of each minibatch of each epoch."""
        for _ in range(self.settings.epochs):
            yield from torch.randperm(episodes, generator=self._generator).chunk(self.settings.minibatches)

    def _update(self, optimizer: torch.optim.Optimizer, rollout: Rollout, rows: torch.Tensor) -> Minibatch:
        """One update of the policy on some rows, counted by the accumulator before it is made."""
        advantage = advantages(rollout.rewards, self.settings.samples)[rows, None]
        old_logp = rollout.logp[rows, 1:]
        ours = rollout.roles[rows, 1:] == Role.MODEL
        slices = slices_of(rollout.roles[rows, 1:])  # the first token is the prompt's

        logp = log_probabilities(self.policy, rollout.tokens[rows])
        self._accumulator.update(logp, old_logp, slices)

        low, high = self.settings.clip
        ratio = torch.exp(torch.where(ours, logp - old_logp, 0.0))
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        loss = -(gain * ours).sum() / ours.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        optimizer.step()
        return Minibatch(logp.detach(), old_logp, dict(slices), loss.item())


def _score(rollout: Rollout) -> Score:
    return Score(rollout.rewards.mean().item(), rollout.solved.float().mean().item())
