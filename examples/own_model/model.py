"""A model of your own: plain PyTorch, no parallel code. A text model in the shape of a U-Net.

Blocks on the way in hand their output past the middle to the blocks on the way out: skip connections over many cuts. Atoll
may cut after any matrix product; what a skip carries then goes straight from the worker that has it to the one that needs it.

Shape legend: B samples, S tokens, W width, H heads, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "SkipText"]


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to its input; (B, S, W) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, H, S, W / H)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.feed_norm(x))))


class SkipText(nn.Module):
    """``depth`` blocks in, one in the middle, ``depth`` blocks out. ``positions``: the longest sequence."""

    def __init__(self, vocabulary: int = 257, positions: int = 128, width: int = 96, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.inward = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.middle = Block(width, heads)
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.outward = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (B, S) in, (B, S, V) out; ``atoll generate`` and ``sample`` of a job ask for it."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        kept = []
        for block in self.inward:
            x = block(x)
            kept.append(x)
        x = self.middle(x)
        for join, block in zip(self.joins, self.outward, strict=True):
            x = block(join(torch.cat([x, kept.pop()], dim=-1)))
        return self.head(self.norm(x))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss that training descends: cross entropy summed over all tokens of all samples, not their mean."""
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
