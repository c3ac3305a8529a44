"""Sampling: a batch of episodes side by side, the tool's results inserted where they belong."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyrlstats.demo.policy import Policy
from pyrlstats.demo.slices import Role
from pyrlstats.demo.task import INDEX, MAX_LENGTH, PAD, START, SYMBOLS, Environment, Problem, encode


@dataclass(frozen=True)
class Rollout:
    """A batch of finished episodes.

    Attributes:
        tokens: int64 (B, T), padded at the end.
        roles: int64 (B, T), :class:`~pyrlstats.demo.slices.Role` of each token.
        logp: float32 (B, T), log-probability (nats) the sampler gave each token of the model; 0 elsewhere.
        rewards: float32 (B,).
        solved: bool (B,).
    """

    tokens: torch.Tensor
    roles: torch.Tensor
    logp: torch.Tensor
    rewards: torch.Tensor
    solved: torch.Tensor


class _Row:
    """One episode of the batch and the tokens that it inserts by itself: the prompt, then tool results."""

    def __init__(self, problem: Problem) -> None:
        self.environment = Environment(problem)
        self.inserts = deque((token, Role.PROMPT) for token in encode(START + problem.prompt))

    def next(self, sampled: int) -> tuple[int, Role]:
        """The token at the next position: an inserted one, the sampled one, or padding after the end."""
        if self.inserts:
            return self.inserts.popleft()
        if self.environment.done:
            return INDEX[PAD], Role.PAD
        result = self.environment.write(SYMBOLS[sampled])
        self.inserts.extend((token, Role.TOOL) for token in encode(result))
        return sampled, Role.MODEL

    @property
    def over(self) -> bool:
        return self.environment.done and not self.inserts


@torch.no_grad()
def sample(policy: Policy, problems: Sequence[Problem], generator: torch.Generator) -> Rollout:
    """One episode for each problem, sampled at temperature 1 with a key-value cache."""
    rows = [_Row(problem) for problem in problems]
    batch = len(rows)
    tokens = torch.full((batch, MAX_LENGTH), INDEX[PAD])
    roles = torch.full((batch, MAX_LENGTH), int(Role.PAD))
    logp = torch.zeros(batch, MAX_LENGTH)
    cache = policy.new_cache(batch)
    logits = torch.zeros(batch, len(SYMBOLS))
    length = 0
    while not all(row.over for row in rows):
        distribution = torch.log_softmax(logits, -1)
        sampled = torch.multinomial(distribution.exp(), 1, generator=generator)[:, 0]
        chosen = [row.next(token) for row, token in zip(rows, sampled.tolist(), strict=True)]
        tokens[:, length] = torch.tensor([token for token, _ in chosen])
        roles[:, length] = torch.tensor([int(role) for _, role in chosen])
        logp[:, length] = distribution.gather(1, sampled[:, None])[:, 0]
        logits = policy.step(tokens[:, length], length, cache)
        length += 1
    tokens, roles, logp = tokens[:, :length], roles[:, :length], logp[:, :length]
    return Rollout(
        tokens=tokens,
        roles=roles,
        logp=torch.where(roles == Role.MODEL, logp, 0.0),
        rewards=torch.tensor([row.environment.reward() for row in rows]),
        solved=torch.tensor([row.environment.solved for row in rows]),
    )
