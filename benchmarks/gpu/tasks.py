"""The models of the GPU benchmarks, written once for `ddp` and `torch` alike: `t` is either of them.

Weights and batches come from seeds, so that all implementations of a task train the same model on the same numbers, and
their losses can be compared before their times are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a task is. width, layers, heads, vocabulary: of a GPT; batch, length: of what it reads."""

    batch: int
    length: int = 0
    width: int = 0
    layers: int = 0
    heads: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained.

    model: (t, size) to a module; batch: (size, seed) to the arrays of one; half: products in bfloat16 by autocast;
    channels_last: how images lie in memory; cudnn: without it a GPU takes much slower ways, which are not measured;
    tiny: the size that a CPU can do, for tests; items: in a batch, and of what
    """

    model: Callable[[Any, Size], Any]
    batch: Callable[[Size, int], tuple[Any, Any]]
    size: Size
    tiny: Size
    half: bool = True
    channels_last: bool = False
    cudnn: bool = False
    unit: str = "tokens"

    def small(self) -> Task:
        """This task in its tiny size."""
        return replace(self, size=self.tiny)

    @property
    def items(self) -> int:
        """How many items a step reads."""
        return self.size.batch * (self.size.length or 1)


def gpt(t: Any, size: Size) -> Any:
    """GPT-2's architecture: (N, T) tokens to (N, T, vocabulary) logits, the head tied to the embedding."""
    nn, functional, d = t.nn, t.nn.functional, size.width

    class Block(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.before, self.qkv, self.project = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.between, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(self, x: Any) -> Any:
            n, s, _ = x.shape
            cut = self.qkv(self.before(x)).reshape(n, s, 3, size.heads, d // size.heads)
            q, k, v = cut.permute(2, 0, 3, 1, 4).unbind(0)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(seen.transpose(1, 2).reshape(n, s, d))
            return x + self.expanded(self.between(x))

        def expanded(self, x: Any) -> Any:
            up, down = self.up, self.down
            if hasattr(functional, "feed_forward"):  # what a user of ours writes; PyTorch fuses when it compiles
                return functional.feed_forward(x, up.weight, up.bias, down.weight, down.bias, "gelu", "tanh")
            return down(functional.gelu(up(x), approximate="tanh"))

    class Model(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(size.vocabulary, d), nn.Embedding(size.length, d)
            self.blocks = nn.Sequential(*(Block() for _ in range(size.layers)))
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, size.vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x: Any) -> Any:
            x = self.tokens(x) + self.positions(t.arange(x.shape[1], device=x.device))
            return self.head(self.norm(self.blocks(x)))

    return Model()


def resnet18(t: Any, size: Size) -> Any:
    """ResNet-18 for (N, 3, 32, 32) images: its stem is one convolution. Source: He et al. 2015, arXiv:1512.03385."""
    nn = t.nn

    class Block(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.norm_one = nn.BatchNorm2d(outputs)
            self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.norm_two = nn.BatchNorm2d(outputs)
            self.relu = nn.ReLU()
            self.short = nn.Identity()
            if stride > 1 or inputs != outputs:
                shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
                self.short = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

        def forward(self, x: Any) -> Any:
            y = self.norm_two(self.two(self.relu(self.norm_one(self.one(x)))))
            return self.relu(y + self.short(x))

    width = size.width
    layers: list[Any] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(4):
        inputs, outputs = width * 2 ** max(stage - 1, 0), width * 2**stage
        layers += [Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 10))


def _tokens(size: Size, seed: int) -> tuple[Any, Any]:
    read = np.random.default_rng(seed).integers(0, size.vocabulary, (size.batch, size.length + 1))
    return np.ascontiguousarray(read[:, :-1]), np.ascontiguousarray(read[:, 1:])


def _images(size: Size, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.standard_normal((size.batch, 3, 32, 32)).astype(np.float32), random.integers(0, 10, size.batch)


TASKS = {
    # The vocabulary of GPT-2, 50257, rounded up to what products like, as everybody trains it.
    "gpt2": Task(
        model=gpt,
        batch=_tokens,
        size=Size(batch=8, length=1024, width=768, layers=12, heads=12, vocabulary=50304),
        tiny=Size(batch=2, length=16, width=32, layers=2, heads=2, vocabulary=96),
        cudnn=True,
    ),
    "small-gpt": Task(
        model=gpt,
        batch=_tokens,
        size=Size(batch=4, length=128, width=256, layers=4, heads=4, vocabulary=96),
        tiny=Size(batch=2, length=8, width=16, layers=1, heads=2, vocabulary=32),
    ),
    "resnet18": Task(
        model=resnet18,
        batch=_images,
        size=Size(batch=256, width=64),
        tiny=Size(batch=2, width=4),
        channels_last=True,
        cudnn=True,
        unit="images",
    ),
}


def weights(model: Any) -> dict[str, Any]:
    """A value for each parameter, by its name and shape alone: matrices small, biases 0, the scales of norms 1."""
    found = {}
    for name, p in model.named_parameters():
        if len(p.shape) > 1:
            random = np.random.default_rng(zlib.crc32(name.encode()))
            scale = 0.02 if len(p.shape) == 2 else float(np.prod(p.shape[1:])) ** -0.5
            found[name] = (scale * random.standard_normal(tuple(p.shape))).astype(np.float32)
        else:
            found[name] = np.full(tuple(p.shape), not name.endswith("bias"), np.float32)
    return found
