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

from benchmarks import models


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
    """GPT-2's architecture."""
    sizes = {"vocabulary": size.vocabulary, "layers": size.layers, "heads": size.heads, "length": size.length}
    return models.gpt(t, width=size.width, tanh=True, **sizes)


def resnet18(t: Any, size: Size) -> Any:
    """ResNet-18 for (N, 3, 32, 32) images."""
    return models.resnet18(t, width=size.width, classes=10, small_images=True)


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
    values = {}
    for name, p in model.named_parameters():
        if len(p.shape) > 1:
            random = np.random.default_rng(zlib.crc32(name.encode()))
            scale = 0.02 if len(p.shape) == 2 else float(np.prod(p.shape[1:])) ** -0.5
            values[name] = (scale * random.standard_normal(tuple(p.shape))).astype(np.float32)
        else:
            values[name] = np.full(tuple(p.shape), not name.endswith("bias"), np.float32)
    return values
