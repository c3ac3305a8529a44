"""Two training processes, one reduction a step: the figures of all their tokens, as if one process had seen them.

    python examples/two_process.py

Each rank trains on its own rows, in micro-batches of its own sizes, and counts them into an accumulator. Once a step
``all_reduce`` pools the states (one MAX and one SUM collective) and rank 0 writes a line of JSON. At the end rank 0
fetches the tokens of the last step, which a real run would never do, counts them in one pass, and compares.

Takes a few seconds on a CPU; the backend is gloo. On GPUs only the backend and the device change.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import pyrlstats
from pyrlstats.sinks import JsonlSink, Sinks
from pyrlstats.slices import tool_slices

VOCABULARY, WIDTH = 32, 24
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logp, old_logp and slice ids, flat


class Policy(nn.Module):
    """Guesses the next token from this one."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of tokens[:, 1:], (B, T - 1)."""
        logp = self.logits(tokens[:, :-1]).log_softmax(-1)
        return logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def micro_batch(rank: int, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (B, T), and advantages and the model's tokens, (B, T - 1): every second row calls a tool."""
    rng = torch.Generator().manual_seed(10_000 * rank + 100 * step + number)
    rows = 4 + 6 * rank + 3 * number
    tokens = torch.randint(VOCABULARY, (rows, WIDTH), generator=rng)
    model = torch.ones(rows, WIDTH - 1, dtype=torch.bool)
    model[::2, 8:12] = False  # what the tool wrote
    model[:, 18:] &= torch.rand(rows, 1, generator=rng) < 0.5  # padding
    return tokens, torch.randn(rows, 1, generator=rng), model


def train(rank: int, world: int, init_file: str, options: argparse.Namespace) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world)
    torch.manual_seed(0)  # the same weights everywhere
    policy = nn.parallel.DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    acc = pyrlstats.SliceAccumulator(("text", "pre_tool", "post_tool"), device="cpu")
    with Sinks.on_main_rank(lambda: [JsonlSink(options.out / "steps.jsonl")]) as sinks:
        for step in range(1, options.steps + 1):
            batches = [micro_batch(rank, step, number) for number in range(options.micro_batches)]
            with torch.no_grad():
                old = [policy.module(tokens) for tokens, _, _ in batches]
            seen: list[Tokens] = []
            for _ in range(2):  # epochs
                for (tokens, advantages, model), old_logp in zip(batches, old, strict=True):
                    logp = policy(tokens)
                    where = tool_slices(model)
                    acc.update(logp, old_logp, slice_ids=where.ids)
                    seen.append((logp.detach().flatten(), old_logp.flatten(), where.ids.flatten()))
                    loss = -((logp - old_logp).exp() * advantages)[model].mean()
                    optimizer.zero_grad()
                    loss.backward()  # averages the gradients over the ranks
                    optimizer.step()
            stats = acc.all_reduce().compute()
            acc.reset()
            sinks.write(step, stats)
    everything: list[list[Tokens]] = [[]] * world
    dist.all_gather_object(everything, seen)
    if rank == 0:
        print(stats)
        compare(stats, [tokens for one in everything for tokens in one])
        print(f"{options.out / 'steps.jsonl'}: {options.steps} lines")
    dist.destroy_process_group()


def compare(stats: pyrlstats.SliceStats, tokens: list[Tokens]) -> None:
    """The pooled statistics against one pass over the union of the tokens.

    Raises:
        SystemExit: they differ.
    """
    logp, old_logp, ids = (torch.cat(columns) for columns in zip(*tokens, strict=True))
    one = pyrlstats.slice_stats(logp, old_logp, slice_ids=ids, names=list(stats))
    pooled, wanted = stats.to_dict(), one.to_dict()
    same = (stats.state.histogram == one.state.histogram).all() and (stats.state.counts == one.state.counts).all()
    furthest = max(abs(pooled[key] - wanted[key]) / max(abs(wanted[key]), 1e-9) for key in wanted)
    if not same or not furthest < 1e-6 or not np.isfinite(list(pooled.values())).all():
        raise SystemExit(f"the figures differ: histograms equal: {bool(same)}, by {furthest:.1e} at most")
    print(
        f"{len(logp):,} tokens of {len(tokens)} micro-batches on {dist.get_world_size()} ranks: the same counts as of"
    )
    print(f"one process on their union, bin by bin; figures differ by {furthest:.0e} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("two_process_run"), help="folder of steps.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=3, help="of each rank and step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (2, os.path.join(folder, "init"), options), nprocs=2)


if __name__ == "__main__":
    main()
