"""Toy modules of a user, for tests: each takes its inputs by name and returns the loss summed over the samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class SkipModel(nn.Module):
    """Token model whose first blocks feed late blocks directly: two skip connections over at least two cuts each."""

    def __init__(self, width: int = 16, vocabulary: int = 32, depth: int = 6, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        kept = []
        half = len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index >= half:
                x = x + kept[len(self.blocks) - 1 - index]
            x = block(x)
            kept.append(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class FunctionalModel(nn.Module):
    """One module with all its mathematics in ``forward``, parameters made by hand, and work in place."""

    def __init__(self, width: int = 8, vocabulary: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, width) * 0.1)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width) * width**-0.5) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("positions", torch.linspace(-1, 1, 64)[:, None] * torch.ones(width))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table[tokens]
        x = x + self.positions[: tokens.shape[1]]
        for weight in self.weights:
            y = x @ weight
            y.tanh_()
            x = x + y
        logits = (x * self.scale) @ self.table.t()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class SmallUNet(nn.Module):
    """Convolutions down and up with concatenated skips; float inputs; the squared error of a noise."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.leave = nn.Conv2d(2 * channels, 3, 3, padding=1)

    @staticmethod
    def example_inputs(samples: int, sequence_length: int) -> dict[str, torch.Tensor]:
        return {"image": torch.zeros(samples, 3, 8, 8), "noise": torch.zeros(samples, 3, 8, 8)}

    def forward(self, image: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        wide = functional.relu(self.enter(0.8 * image + 0.6 * noise), inplace=True)
        deep = functional.silu(self.norm(self.deep(self.down(wide))))
        narrow = self.leave(torch.cat([self.up(deep), wide], dim=1))
        return (narrow - noise).square().sum()


class TwoTowers(nn.Module):
    """Two inputs, one of them only needed late, a detached branch, and integers that depend on what was learned."""

    def __init__(self, width: int = 8, vocabulary: int = 32) -> None:
        super().__init__()
        self.left = nn.Embedding(vocabulary, width)
        self.right = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(2 * width, width)
        self.experts = nn.Embedding(width, width)

    @staticmethod
    def example_inputs(samples: int, sequence_length: int) -> dict[str, torch.Tensor]:
        zeros = torch.zeros(samples, sequence_length, dtype=torch.int64)
        return {"users": zeros, "items": zeros.clone(), "clicks": torch.zeros(samples, sequence_length)}

    def forward(self, users: torch.Tensor, items: torch.Tensor, clicks: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.left(users), self.right(items)], dim=-1)
        mixed = self.mix(both)
        chosen = mixed.argmax(dim=-1)
        score = (mixed * self.experts(chosen)).sum(-1) + 0.1 * mixed.detach().mean(-1)
        return functional.binary_cross_entropy_with_logits(score, clicks, reduction="sum")


class NanoGPT(nn.Module):
    """Initialises its weights the way many users do: ``self.apply`` with a function of ``nn.init`` calls."""

    def __init__(self, width: int = 16, vocabulary: int = 32, positions: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.head.weight
        self.register_buffer("causal", torch.tril(torch.ones(positions, positions)), persistent=False)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.5)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.wte(tokens) + self.wpe(torch.arange(length, device=tokens.device))
        q, k, v = self.qkv(x).split(x.shape[-1], dim=-1)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(self.causal[:length, :length] == 0, float("-inf"))
        x = x + self.proj(scores.softmax(-1) @ v)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


class Dropped(SkipModel):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.embed(tokens), 0.1, self.training)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


class BatchNormed(SmallUNet):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)  # type: ignore[assignment]


class Counting(SkipModel):
    """Keeps state between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(tokens, targets)


class Mean(SkipModel):
    """Returns logits instead of a loss."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class Frozen(SkipModel):
    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)


class Shadowing(SkipModel):
    """A part that bears the name of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Identity()


class Branching(SkipModel):
    """Looks at values while it runs: cannot be traced."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets) if tokens.sum() > 3 else super().forward(tokens + 1, targets)


class Odd(SkipModel):
    """Takes something no data set is known to give."""

    def forward(self, tokens: torch.Tensor, length: int) -> torch.Tensor:  # type: ignore[override]
        return self.embed(tokens).sum() * length
