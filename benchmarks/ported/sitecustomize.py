"""Runs first in every process of a ported script: chooses the library, and makes two libraries comparable.

PORTS_LIBRARY "ddp": every import of torch is one of ddp; "torch": it is PyTorch, whose random numbers (initial
weights, dropout, noise, the order of samples) are then drawn by ddp, which is left as it is. Both compute in float64,
also where a script says float. What the script's own files give to `backward()` and get from `item()` goes into a file
of PORTS_OUT, a line each, one file a process. PORTS_SEED: where random numbers begin.
"""

from __future__ import annotations

import importlib
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import ddp

HERE = os.getcwd()


class Swap:
    """Finds each module of torch: the one of ddp of that name."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        loader: Any = Swap
        return ModuleSpec(name, loader) if name.partition(".")[0] == "torch" else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType | None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module("ddp" + module.__name__.removeprefix("torch"))


def compute_in_float64(library: Any) -> None:
    library.set_default_dtype(library.float64)
    file = io.BytesIO()
    library.save(library.zeros(1, dtype=library.float64), file)
    file.seek(0)
    library.load(file)  # PyTorch makes its table of dtypes at the first load, before float becomes double
    library.float = library.float64
    library.Tensor.float = library.Tensor.double


def record(library: Any) -> None:
    """Notes the value of each loss that goes backward, and each number that the script takes out of a tensor."""
    folder = os.environ["PORTS_OUT"]
    backward = library.Tensor.backward
    item = library.Tensor.item
    began: dict[int, float] = {}

    def note(value: float) -> None:
        if not os.path.abspath(sys._getframe(2).f_code.co_filename).startswith(HERE + os.sep):
            return
        name = began.setdefault(os.getpid(), time.time())
        with open(f"{folder}/{name:020.6f}", "a") as file:
            file.write(f"{value!r}\n")

    def noted_backward(self: Any, *args: Any, **options: Any) -> Any:
        if self.numel() == 1:
            note(float(item(self)))
        return backward(self, *args, **options)

    def noted_item(self: Any) -> Any:
        value = item(self)
        note(float(value))
        return value

    library.Tensor.backward = noted_backward
    library.Tensor.item = noted_item


def draw_from_ddp(torch: Any) -> None:
    """Has PyTorch take its random numbers from ddp."""

    def name(dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    def taken(x: Any) -> Any:
        return torch.from_numpy(np.array(x.numpy()))

    def made(function: str) -> None:
        original = getattr(ddp, function)

        def draw(*args: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **options: Any) -> Any:
            kind = dtype or (torch.int64 if function.startswith("randint") or function == "randperm" else torch.float64)
            return taken(original(*args, dtype=name(kind), **options)).requires_grad_(requires_grad)

        setattr(torch, function, draw)

    def made_like(function: str) -> None:
        original = getattr(ddp, function.removesuffix("_like"))
        setattr(torch, function, lambda x, **_: taken(original(*x.shape, dtype=name(x.dtype))))

    def filled(method: str) -> None:
        def fill(self: Any, *args: Any, generator: Any = None, **options: Any) -> Any:
            drawn = getattr(ddp.empty(tuple(self.shape), dtype=name(self.dtype)), method)(*args, **options)
            with torch.no_grad():
                return self.copy_(taken(drawn))

        setattr(torch.Tensor, method, fill)

    def dropped(function: str) -> None:
        original = getattr(ddp.nn.functional, function)

        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if not training or p == 0:
                return input
            kept = taken(original(ddp.ones(tuple(input.shape), dtype=name(input.dtype)), p))
            return input.mul_(kept) if inplace else input * kept

        setattr(torch.nn.functional, function, dropout)

    def iterate(self: Any) -> Iterator[Any]:
        if not hasattr(self, "_ours"):
            shuffle = isinstance(self.sampler, torch.utils.data.RandomSampler)
            options = {"shuffle": shuffle, "drop_last": self.drop_last, "collate_fn": self.collate_fn}
            self._ours = ddp.data.DataLoader(self.dataset, self.batch_size, **options)
        return iter(self._ours)

    def multinomial(input: Any, num_samples: int, replacement: bool = False, generator: Any = None) -> Any:
        given = ddp.from_numpy(input.detach().numpy())
        return taken(ddp.multinomial(given, num_samples, replacement, generator=generator))

    def normal(mean: Any, std: Any, *size: Any, **options: Any) -> Any:
        shape = size[0] if size else options.get("size") or mean.shape
        return mean + std * torch.randn(*shape)

    seed: Callable[[int], Any] = torch.manual_seed

    def manual_seed(number: int) -> Any:
        ddp.manual_seed(number)
        return seed(number)

    for function in ("rand", "randn", "randint", "randperm"):
        made(function)
    for function in ("rand_like", "randn_like"):
        made_like(function)
    for method in ("uniform_", "normal_", "bernoulli_"):
        filled(method)
    for function in ("dropout", "dropout1d", "dropout2d"):
        dropped(function)
    torch.Generator = ddp.Generator
    torch.normal = normal
    torch.multinomial = multinomial
    torch.manual_seed = manual_seed
    torch.utils.data.DataLoader.__iter__ = iterate


if "PORTS_LIBRARY" in os.environ:
    if os.environ["PORTS_LIBRARY"] == "ddp":
        sys.meta_path.insert(0, Swap)  # type: ignore[arg-type]
    import torch

    compute_in_float64(torch)
    if torch is not ddp:
        compute_in_float64(ddp)
        draw_from_ddp(torch)
    record(torch)
    seed = int(os.environ.get("PORTS_SEED", "0"))
    ddp.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    assert Path(torch.__file__).parent.name == os.environ["PORTS_LIBRARY"]
