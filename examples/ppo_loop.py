"""A PPO loop in plain PyTorch, with statistics of its log-ratios by slice, one line of JSON an update.

    python examples/ppo_loop.py --out ppo_run

A fleet of boats holds its position. In every episode a gust hits each of them once: what the policy does after it, it
does in states that it sees less often. The slices are the actions before and after the gust, which overlap with those
of the first pass over the data and of the later ones: there the policy has moved away from the one that acted.

Takes about ten seconds on a CPU; needs torch and pyrlstats only.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import pyrlstats
from pyrlstats.sinks import JsonlSink, Sinks

SLICES = ("before_gust", "after_gust", "first_epoch", "later_epochs")
CLIP = 0.2


@dataclass
class Rollout:
    """One episode of every boat: (T, B), and (T, B, 4) of states."""

    states: torch.Tensor
    actions: torch.Tensor
    old_logp: torch.Tensor
    rewards: torch.Tensor
    values: torch.Tensor
    gusted: torch.Tensor


class Boats:
    """Boats on a line: state (position, speed, time left, 1). Actions push left, nothing, right."""

    def __init__(self, boats: int, steps: int, generator: torch.Generator) -> None:
        self.boats, self.steps, self.generator = boats, steps, generator

    def reset(self) -> torch.Tensor:
        self.time = 0
        self.position = torch.randn(self.boats, generator=self.generator)
        self.speed = torch.zeros(self.boats)
        self.gust_at = torch.randint(self.steps // 4, self.steps, (self.boats,), generator=self.generator)
        return self._state()

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next state and the reward: minus a tenth of the distance from the buoy."""
        self.speed = 0.9 * self.speed + 0.1 * (actions - 1)
        self.speed = self.speed + torch.where(self.gust_at == self.time, 0.8, 0.0)
        self.position = self.position + self.speed
        self.time += 1
        return self._state(), -self.position.abs() / 10.0

    def gusted(self) -> torch.Tensor:
        """Boats that have been hit: what they do now is a reaction."""
        return self.gust_at < self.time

    def _state(self) -> torch.Tensor:
        left = torch.full((self.boats,), 1.0 - self.time / self.steps)
        return torch.stack([self.position, self.speed, left, torch.ones(self.boats)], -1)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action, self.value = nn.Linear(64, 3), nn.Linear(64, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        hidden = self.body(states)
        return torch.distributions.Categorical(logits=self.action(hidden)), self.value(hidden).squeeze(-1)


@torch.no_grad()
def roll_out(policy: Policy, boats: Boats) -> Rollout:
    state = boats.reset()
    columns: list[tuple[torch.Tensor, ...]] = []
    for _ in range(boats.steps):
        distribution, value = policy(state)
        action = torch.multinomial(distribution.probs, 1, generator=boats.generator).squeeze(-1)
        gusted = boats.gusted()
        following, reward = boats.step(action)
        columns.append((state, action, distribution.log_prob(action), reward, value, gusted))
        state = following
    return Rollout(*(torch.stack(column) for column in zip(*columns, strict=True)))


def advantages_of(rollout: Rollout, discount: float = 0.98, trace: float = 0.95) -> torch.Tensor:
    """Generalised advantage estimates, (T, B)."""
    following = torch.cat([rollout.values[1:], torch.zeros_like(rollout.values[:1])])
    errors = rollout.rewards + discount * following - rollout.values
    advantages = torch.zeros_like(errors)
    running = torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        running = errors[t] + discount * trace * running
        advantages[t] = running
    return advantages


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout, acc: pyrlstats.SliceAccumulator, epochs: int
) -> None:
    """Epochs of clipped policy gradients over minibatches of boats; each minibatch is counted as its loss sees it."""
    advantages = advantages_of(rollout)
    returns = advantages + rollout.values
    normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for epoch in range(epochs):
        for boats in torch.randperm(rollout.actions.shape[1]).chunk(4):
            distribution, values = policy(rollout.states[:, boats])
            logp, old_logp = distribution.log_prob(rollout.actions[:, boats]), rollout.old_logp[:, boats]
            ratio, advantage = (logp - old_logp).exp(), normal[:, boats]
            clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            loss = loss + 0.5 * (values - returns[:, boats]).square().mean() - 0.01 * distribution.entropy().mean()
            gusted, first = rollout.gusted[:, boats], torch.tensor(epoch == 0)
            masks = dict(zip(SLICES, (~gusted, gusted, first, ~first), strict=True))
            acc.update(logp, old_logp, masks, advantages=advantage)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ppo_run"), help="folder of steps.jsonl")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--boats", type=int, default=64)
    parser.add_argument("--steps", type=int, default=64, help="of an episode")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    torch.manual_seed(options.seed)
    boats = Boats(options.boats, options.steps, torch.Generator().manual_seed(options.seed))
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.lr)
    acc = pyrlstats.SliceAccumulator(SLICES, clip=(CLIP, CLIP), advantages=True)
    with Sinks([JsonlSink(options.out / "steps.jsonl")], prefix="ppo/") as sinks:
        for number in range(1, options.updates + 1):
            rollout = roll_out(policy, boats)
            update(policy, optimizer, rollout, acc, options.epochs)
            stats = acc.compute()
            acc.reset()
            reward = float(rollout.rewards.mean())
            sinks.write(number, stats, {"reward": reward})
            if number == 1 or number % 10 == 0:
                after, before = stats["after_gust"], stats["before_gust"]
                print(
                    f"update {number:3}  reward {reward:6.2f}  |x| p99.9 before the gust "
                    f"{before.abs_quantile(0.999):.3f}, after {after.abs_quantile(0.999):.3f}  "
                    f"clipped {before.policy_clip_fraction:.1%}, {after.policy_clip_fraction:.1%}"
                )
    print(stats)
    print(f"{options.out / 'steps.jsonl'}: {options.updates} lines")


if __name__ == "__main__":
    main()
