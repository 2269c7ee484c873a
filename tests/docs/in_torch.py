"""Runs PyTorch's side of a page on this rank of a torchrun job: `in_torch.py PAGE FOLDER`.

The whole programs go first, each as it stands; then all snippets in one process group, whose results are written to
FOLDER/RANK.npz as `line of the snippet:name`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp.data.distributed_sampler import epoch_order
from tests.docs.blocks import pairs
from tests.docs.snippets import Builder, outcome, run, samples, weights


def start_alike(layer: Any) -> None:
    """In the place of `Linear.reset_parameters`."""
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weights(tuple(layer.weight.shape))))
        layer.bias.copy_(torch.from_numpy(weights(tuple(layer.bias.shape))))


def shuffled(length: int, generator: torch.Generator) -> torch.Tensor:
    """In the place of `torch.randperm`: our order of the epoch. DistributedSampler seeds with seed + epoch, seed 0."""
    return torch.from_numpy(epoch_order(length, 0, generator.initial_seed()))


def builders(rank: int) -> dict[str, Builder]:
    """The names that a snippet may use."""
    x, t = samples(rank)

    def batches(get: Any) -> Any:
        parts = [samples(10 * (step + 1) + rank) for step in range(2 + rank)]
        return [(torch.from_numpy(x), torch.from_numpy(t)) for x, t in parts]

    return {
        "np": lambda get: np,
        "os": lambda get: os,
        "torch": lambda get: torch,
        "dist": lambda get: dist,
        "nn": lambda get: nn,
        "F": lambda get: F,
        "DDP": lambda get: DDP,
        "rank": lambda get: rank,
        "net": lambda get: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        "model": lambda get: DDP(get("net")),
        "optimizer": lambda get: torch.optim.SGD(get("model").parameters(), lr=0.1, momentum=0.9),
        "x": lambda get: torch.from_numpy(x),
        "t": lambda get: torch.from_numpy(t),
        "batches": batches,
        "dataset": lambda get: list(zip(x, t, strict=True)),
    }


def main(page: Path, folder: Path) -> None:
    warnings.simplefilter("ignore")  # what PyTorch deprecates next is not this page's business
    kind: Any = nn.Linear
    kind.reset_parameters = start_alike
    theirs = [block for block, _ in pairs(page) if block is not None]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.chdir(folder)
    randperm, torch.randperm = torch.randperm, shuffled  # type: ignore[assignment]
    for block in theirs:
        if block.is_script:
            exec(block.compiled(), {"__name__": "__main__"})
    torch.randperm = randperm
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results: dict[str, Any] = {}
    for block in theirs:
        if not block.is_script:
            made = run(block.compiled(), block.code, builders(rank))
            results.update({f"{block.line}:{name}": array for name, array in outcome(made).items()})
    dist.destroy_process_group()
    np.savez(folder / f"{rank}.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
