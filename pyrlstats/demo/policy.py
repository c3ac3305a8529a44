"""The policy: a small causal transformer with a key-value cache for sampling."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, (B, heads, T, width / heads) each."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return q, k, v

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        result: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A whole sequence, (B, T, width)."""
        q, k, v = self._split(x)
        return self._finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def step(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int) -> torch.Tensor:
        """One position, (B, 1, width); its key and value are written into the cache."""
        q, k, v = self._split(x)
        keys[:, :, position], values[:, :, position] = k[:, :, 0], v[:, :, 0]
        end = position + 1
        return self._finish(x, F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end]))


class Policy(nn.Module):
    """Next-symbol distribution over a small vocabulary.

    Args:
        vocabulary: number of symbols.
        max_length: longest sequence.
        width, layers, heads: size of the transformer.
    """

    def __init__(self, vocabulary: int, max_length: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.max_length = max_length
        self.symbol = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        nn.init.zeros_(self.head.weight)  # starts out uniform
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, vocabulary) of the symbol after each of tokens (B, T)."""
        x = self.symbol(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def new_cache(self, batch: int) -> Cache:
        """Room for the keys and values of a batch, layer by layer."""
        width = self.symbol.embedding_dim
        cache = []
        for block in self.blocks:
            assert isinstance(block, Block)
            shape = (batch, block.heads, self.max_length, width // block.heads)
            cache.append((torch.zeros(shape), torch.zeros(shape)))
        return cache

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, position: int, cache: Cache) -> torch.Tensor:
        """Logits (B, vocabulary) after one more symbol of each row, (B,); the cache holds those before it."""
        x = (self.symbol(tokens) + self.place.weight[position])[:, None]
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            assert isinstance(block, Block)
            x = block.step(x, keys, values, position)
        logits: torch.Tensor = self.head(self.norm(x))[:, 0]
        return logits
