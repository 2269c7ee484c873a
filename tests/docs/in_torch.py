"""Runs PyTorch's side of a page on this rank of a job: `in_torch.py PAGE FOLDER`.

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
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp.data.distributed_sampler import epoch_order
from tests.docs.blocks import pairs
from tests.docs.snippets import Builder, builders, outcome, run, start_alike


def shuffled(length: int, generator: torch.Generator) -> torch.Tensor:
    """In the place of `torch.randperm`: our order of the epoch. DistributedSampler seeds with seed + epoch, seed 0."""
    return torch.from_numpy(epoch_order(length, 0, generator.initial_seed()))


def of_theirs(rank: int) -> dict[str, Builder]:
    """All names that a snippet may use."""
    theirs: dict[str, Builder] = {
        "os": lambda get: os,
        "dist": lambda get: dist,
        "DDP": lambda get: DDP,
        "rank": lambda get: rank,
        "model": lambda get: DDP(get("net")),
    }
    return builders(torch, rank) | theirs


def main(page: Path, folder: Path) -> None:
    warnings.simplefilter("ignore")  # what PyTorch deprecates next is not this page's business
    kind: Any = nn.Linear
    kind.reset_parameters = start_alike(torch)
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
            names = run(block.compiled(), block.code, of_theirs(rank))
            results.update({f"{block.line}:{name}": array for name, array in outcome(names).items()})
    dist.destroy_process_group()
    np.savez(folder / f"{rank}.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
