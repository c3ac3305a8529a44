"""What a case measures on: pools of synthetic tokens, cut into inputs that are cold in the caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pyrlstats import Layout

COLUMNS = 4096  # tokens a row
SHARES = (0.7, 0.35, 0.2, 0.1)  # of the tokens, in slice 0, 1, 2, 3, and again
RUNS = (50, 500)  # shortest and longest run of tokens with the same slices
BASE = 1 << 24  # tokens; longer inputs repeat these
RARE = 0.002  # share of the tokens in a mostly empty slice

DEFAULT_LAYOUT = Layout()

Generator = np.random.Generator


def _gauss(rng: Generator, n: int, sigma: float) -> np.ndarray:
    return rng.standard_normal(n, np.float32) * np.float32(sigma)


def _heavy_tail(rng: Generator, n: int) -> np.ndarray:
    """Gaussian of 1e-2, one token in 1000 Laplace of scale 3."""
    x = _gauss(rng, n, 1e-2)
    rare = rng.random(n, np.float32) < 1e-3
    x[rare] = rng.laplace(0.0, 3.0, np.count_nonzero(rare)).astype(np.float32)
    return x


def _on_policy(rng: Generator, n: int) -> np.ndarray:
    return np.zeros(n, np.float32)


DISTRIBUTIONS: dict[str, Callable[[Generator, int], np.ndarray]] = {
    "zeros": _on_policy,
    "gauss 1e-4": functools.partial(_gauss, sigma=1e-4),
    "gauss 3e-3": functools.partial(_gauss, sigma=3e-3),
    "gauss 1e-2": functools.partial(_gauss, sigma=1e-2),
    "heavy tail": _heavy_tail,
    "bf16 lattice": functools.partial(_gauss, sigma=1e-2),  # and both log-probabilities rounded to bfloat16
    "all equal": lambda rng, n: np.full(n, 0.0625, np.float32),
}


@dataclass(frozen=True)
class Spec:
    """What tokens look like; together with a number of tokens it fixes the inputs to the bit.

    Attributes:
        slices: number of overlapping slices.
        dtype: of both log-probabilities.
        distribution: of the log-ratio, one of :data:`DISTRIBUTIONS`.
        masks: "runs" (of 50 to 500 tokens), "random" (per token), "mostly empty", "none" (one slice of every
            token) or "ids" (one integer a token: disjoint slices).
        layout: bins of the histogram.
        transposed: the log-probabilities and masks are not contiguous.
    """

    slices: int = 1
    dtype: str = "float32"
    distribution: str = "gauss 1e-2"
    masks: str = "runs"
    layout: Layout = DEFAULT_LAYOUT
    transposed: bool = False

    def bytes_per_token(self) -> int:
        """What must be read: every operand once."""
        masks = {"none": 0, "ids": 1}.get(self.masks, self.slices)
        return 2 * getattr(torch, self.dtype).itemsize + masks


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call's arguments, on one device."""

    spec: Spec
    logp: torch.Tensor
    old_logp: torch.Tensor
    masks: dict[str, torch.Tensor] | None
    slice_ids: torch.Tensor | None
    micro_batches: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return slice_names(self.spec)

    @property
    def tokens(self) -> int:
        return self.logp.numel()

    @property
    def n_bytes(self) -> int:
        return self.tokens * self.spec.bytes_per_token()

    @property
    def device(self) -> torch.device:
        return self.logp.device

    def members(self) -> list[torch.Tensor]:
        """One mask a slice; everything where there are none."""
        if self.slice_ids is not None:
            return [self.slice_ids == index for index in range(self.spec.slices)]
        if self.masks is None:
            return [self.everything]
        return list(self.masks.values())

    def head(self) -> tuple[Inputs, int]:
        """The inputs whose repetition these are, and how often they hold them."""
        if self.tokens <= BASE:
            return self, 1
        return self._rows(0, BASE // COLUMNS), self.tokens // BASE

    def _rows(self, start: int, stop: int) -> Inputs:
        return Inputs(
            self.spec,
            self.logp[start:stop],
            self.old_logp[start:stop],
            None if self.masks is None else {name: mask[start:stop] for name, mask in self.masks.items()},
            None if self.slice_ids is None else self.slice_ids[start:stop],
        )

    @cached_property
    def everything(self) -> torch.Tensor:
        return torch.ones_like(self.logp, dtype=torch.bool)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """(logp, old_logp, one mask a slice) as NumPy arrays over the same memory."""
        return self.logp.numpy(), self.old_logp.numpy(), [mask.numpy() for mask in self.members()]

    @cached_property
    def words(self) -> list[torch.Tensor]:
        """Every operand as contiguous int64 words, for readers that only want the bytes."""
        operands = [self.logp, self.old_logp, *(self.masks or {}).values()]
        operands += [] if self.slice_ids is None else [self.slice_ids]
        contiguous = (tensor.t() if self.spec.transposed else tensor for tensor in operands)
        return [tensor.reshape(-1).view(torch.uint8).view(torch.int64) for tensor in contiguous]

    @cached_property
    def parts(self) -> list[Inputs]:
        """The same tokens, row by row, as micro-batches."""
        rows = self.logp.shape[0] // self.micro_batches
        return [self._rows(index * rows, (index + 1) * rows) for index in range(self.micro_batches)]


def slice_names(spec: Spec) -> tuple[str, ...]:
    return ("all",) if spec.masks == "none" else tuple(f"slice_{index}" for index in range(spec.slices))


@dataclass(frozen=True, eq=False)
class Pool:
    """Tokens enough for many inputs: contiguous operands of one length."""

    spec: Spec
    logp: torch.Tensor
    old_logp: torch.Tensor
    masks: dict[str, torch.Tensor] | None
    slice_ids: torch.Tensor | None

    def cut(self, tokens: int, micro_batches: int = 1) -> Iterator[Inputs]:
        """Every stretch of so many tokens as its own inputs, views of this pool."""
        for start in range(0, self.logp.numel() - tokens + 1, tokens):
            yield Inputs(
                self.spec,
                self._view(self.logp, start, tokens),
                self._view(self.old_logp, start, tokens),
                None if self.masks is None else {k: self._view(m, start, tokens) for k, m in self.masks.items()},
                None if self.slice_ids is None else self._view(self.slice_ids, start, tokens),
                micro_batches,
            )

    def _view(self, flat: torch.Tensor, start: int, tokens: int) -> torch.Tensor:
        rows = flat[start : start + tokens].view(-1, min(COLUMNS, tokens))
        return rows.t() if self.spec.transposed else rows


@functools.lru_cache(maxsize=2)
def pool(spec: Spec, tokens: int, device: str) -> Pool:
    """Tokens as ``spec`` describes them, the same on every machine and in every run; beyond BASE they repeat."""
    n = min(tokens, BASE)
    times = -(-tokens // n)
    old = _old_logp(n)
    if spec.distribution == "all equal":  # exactly: -2 + 0.0625 loses nothing in any of the dtypes
        old = np.full_like(old, -2.0)
    new = old + _log_ratio(spec.distribution, n)
    if spec.distribution == "bf16 lattice":
        old, new = (torch.from_numpy(values).bfloat16().float().numpy() for values in (old, new))
    members = _members(spec.masks, slice_names(spec), n)

    def on_device(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.from_numpy(array).to(device, dtype).repeat(times)[:tokens]

    dtype = getattr(torch, spec.dtype)
    return Pool(
        spec,
        on_device(new, dtype),
        on_device(old, dtype),
        {name: on_device(mask) for name, mask in members.items()} if isinstance(members, dict) else None,
        on_device(members) if isinstance(members, np.ndarray) else None,
    )


# what cases share is made once


@functools.lru_cache(maxsize=1)
def _old_logp(n: int) -> np.ndarray:
    return -np.abs(_gauss(np.random.default_rng(1), n, 2.0)) - np.float32(0.05)


@functools.lru_cache(maxsize=1)
def _log_ratio(distribution: str, n: int) -> np.ndarray:
    return DISTRIBUTIONS[distribution](np.random.default_rng(2), n)


@functools.lru_cache(maxsize=1)
def _members(masks: str, names: tuple[str, ...], n: int) -> dict[str, np.ndarray] | np.ndarray | None:
    """One mask a slice, or ids, or nothing."""
    rng = np.random.default_rng(3)
    if masks == "none":
        return None
    if masks == "random":
        return {name: rng.random(n, np.float32) < SHARES[index % len(SHARES)] for index, name in enumerate(names)}
    lengths = rng.integers(*RUNS, n // RUNS[0] + 1)
    runs = np.repeat(np.arange(lengths.size), lengths)[:n]  # of every token
    if masks == "ids":
        return rng.integers(-1, len(names), lengths.size).astype(np.int8)[runs]
    shares = [RARE] * len(names) if masks == "mostly empty" else SHARES
    return {name: (rng.random(lengths.size) < shares[index % len(shares)])[runs] for index, name in enumerate(names)}
