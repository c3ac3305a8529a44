"""What monitoring costs: a training step of a small transformer with and without statistics.

On a CPU the step runs on one thread: the overhead is a ratio, and threads that wait for each other are what a busy
machine disturbs most.

Every round runs one step of every variant, so that what disturbs the machine disturbs all alike; the overhead of a
variant is that of its step over the plain one of the same round. The plain step runs twice a round: the difference
of the two is the noise. Every step ends with ``loss.item()``, as trainers log their loss.

On a GPU forward and backward are CUDA graphs: launched one by one, the kernels of a model this small leave the GPU
waiting for the host, and the host is what would be measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import pyrlstats

from .contenders.torch_eager import moments, quantiles_by_quantile
from .timing import Figure

Tensor = torch.Tensor
PLAIN, AGAIN = "no statistics", "no statistics, again"


@dataclass(frozen=True)
class Size:
    """A transformer and the tokens of one step."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    rows: int  # of a micro-batch
    columns: int
    micro_batches: int
    rounds: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.rows * self.columns * self.micro_batches


SIZES = {
    "cpu": Size(192, 3, 4, 2048, 2, 256, 4, 20, torch.float32),
    "cuda": Size(768, 12, 12, 32000, 4, 1024, 4, 60, torch.bfloat16),
}
QUICK = {
    "cpu": dataclasses.replace(SIZES["cpu"], micro_batches=2, rounds=6),
    "cuda": dataclasses.replace(SIZES["cuda"], rounds=6),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, columns, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, columns, width))
        return x + self.feed(self.norms[1](x))


class Policy(nn.Module):
    """Log-probabilities of the sampled tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(size.columns, size.width))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.embedding(tokens) + self.positions))
        logits = hidden @ self.embedding.weight.t()
        return -F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="none").view(tokens.shape)


@dataclass
class MicroBatch:
    tokens: Tensor
    old_logp: Tensor
    advantages: Tensor
    masks: dict[str, Tensor]


class Trainer:
    """A policy, its optimiser and one step's micro-batches."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.model = Policy(size).to(device, size.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")
        self.batches = [self._batch(size, device) for _ in range(size.micro_batches)]
        self.forward: Callable[..., Any] = self.model
        if device == "cuda":
            self.forward = torch.cuda.make_graphed_callables(self.model, (self.batches[0].tokens,))
        for parameter in self.model.parameters():
            # a graph writes its gradients to one place: they must be added to another
            parameter.grad = torch.zeros_like(parameter)

    def _batch(self, size: Size, device: str) -> MicroBatch:
        shape = (size.rows, size.columns)
        tokens = torch.randint(size.vocabulary, shape, device=device)
        with torch.no_grad():
            old_logp = self.model(tokens).float() + 0.01 * torch.randn(shape, device=device)
        column = torch.arange(size.columns, device=device)
        response = (column > size.columns // 8).expand(shape)
        late = column > size.columns // 2
        masks = {
            "response": response.contiguous(),
            "pre_tool": response & ~late,
            "post_tool": response & late,
            "rare": torch.rand(shape, device=device) < 0.01,
        }
        return MicroBatch(tokens, old_logp, torch.randn((size.rows, 1), device=device), masks)

    def step(self, watch: Watch) -> float:
        """One optimiser step on all micro-batches; returns the loss."""
        total: Any = 0.0
        for batch in self.batches:
            logp = self.forward(batch.tokens)
            watch.micro_batch(logp, batch)
            ratio = (logp - batch.old_logp).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean() / len(self.batches)
            loss.backward()
            watch.after_backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        watch.end_of_step()
        return float(total)


class Watch:
    """Nothing is computed."""

    def micro_batch(self, logp: Tensor, batch: MicroBatch) -> None:
        pass

    def after_backward(self) -> None:
        pass

    def end_of_step(self) -> None:
        pass


class Ours(Watch):
    """Update every micro-batch; every statistic as Python numbers at the end of the step."""

    def __init__(self, names: list[str], device: str) -> None:
        self.accumulator = pyrlstats.SliceAccumulator(names, device=device)

    def micro_batch(self, logp: Tensor, batch: MicroBatch) -> None:
        self.accumulator.update(logp, batch.old_logp, batch.masks)

    def end_of_step(self) -> None:
        self.logged = self.accumulator.compute().to_dict("rl/")
        self.accumulator.reset()


class OursLate(Ours):
    """The same numbers, copied while the next step begins and read in it: the GPU never waits for the host."""

    def __init__(self, names: list[str], device: str) -> None:
        super().__init__(names, device)
        self.copied: Any = None

    def micro_batch(self, logp: Tensor, batch: MicroBatch) -> None:
        super().micro_batch(logp, batch)
        if self.copied is not None:
            self.logged = self.copied.wait().to_dict("rl/")
            self.copied = None

    def end_of_step(self) -> None:
        self.copied = self.accumulator.compute().to_host(async_op=True)
        self.accumulator.reset()


class OursAside(OursLate):
    """The same on a stream of its own: the next kernel of the training does not wait for ours."""

    def __init__(self, names: list[str], device: str) -> None:
        super().__init__(names, device)
        self.stream = torch.cuda.Stream()

    def micro_batch(self, logp: Tensor, batch: MicroBatch) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            super().micro_batch(logp, batch)

    def after_backward(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)  # long done; from here on logp's memory may be used anew

    def end_of_step(self) -> None:
        with torch.cuda.stream(self.stream):
            super().end_of_step()


class PlainTorch(Watch):
    """Every selected log-ratio is kept; moments and torch.quantile at the end of the step."""

    def __init__(self, names: list[str]) -> None:
        self.kept: dict[str, list[Tensor]] = {name: [] for name in names}

    def micro_batch(self, logp: Tensor, batch: MicroBatch) -> None:
        log_ratio = logp.detach().float() - batch.old_logp
        for name, mask in batch.masks.items():
            self.kept[name].append(log_ratio[mask])

    def end_of_step(self) -> None:
        rows = []
        for held in self.kept.values():
            x = torch.cat(held)
            rows.append(torch.stack(moments(x) + quantiles_by_quantile(x)))
            held.clear()
        self.logged = torch.stack(rows).tolist()


class Items(Watch):
    """Moments and torch.quantile of every micro-batch, each number by .item()."""

    def micro_batch(self, logp: Tensor, batch: MicroBatch) -> None:
        log_ratio = logp.detach().float() - batch.old_logp
        self.logged = {}
        for name, mask in batch.masks.items():
            x = log_ratio[mask]
            self.logged[name] = [value.item() for value in moments(x) + quantiles_by_quantile(x)]


def watches(device: str, names: list[str]) -> dict[str, Watch]:
    found: dict[str, Watch] = {
        PLAIN: Watch(),
        "pyrlstats, read at the end of the step": Ours(names, device),
        AGAIN: Watch(),
    }
    if device == "cuda":
        found["pyrlstats, read during the next step"] = OursLate(names, device)
        found["pyrlstats, the same on a stream of its own"] = OursAside(names, device)
    found["torch, quantiles at the end of the step"] = PlainTorch(names)
    found["torch, .item() every micro-batch"] = Items()
    return found


def measure(
    device: str, quick: bool = False, size: Size | None = None, advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Step times and overheads of every variant, as JSON."""
    size = size or (QUICK if quick else SIZES)[device]
    if device == "cpu":
        torch.set_num_threads(1)
    trainer = Trainer(size, device)
    variants = watches(device, list(trainer.batches[0].masks))
    for watch in variants.values():  # warms up
        trainer.step(watch)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(size.rounds):
        for name, watch in variants.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            trainer.step(watch)  # ends with a sync
            seconds[name].append(time.perf_counter() - start)
        advance()
    plain = seconds[PLAIN]
    rows = [
        {
            "variant": name,
            "seconds": dataclasses.asdict(Figure.of(taken)),
            "overhead": dataclasses.asdict(
                Figure.of([one / base - 1.0 for one, base in zip(taken, plain, strict=True)])
            ),
            "note": (type(variants[name]).__doc__ or "").splitlines()[0],
        }
        for name, taken in seconds.items()
        if name != PLAIN
    ]
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "tokens": size.tokens,
        "micro_batches": size.micro_batches,
        "dtype": str(size.dtype).removeprefix("torch."),
        "slices": len(trainer.batches[0].masks),
        "rounds": size.rounds,
        "plain_seconds": dataclasses.asdict(Figure.of(plain)),
        "rows": rows,
    }
