"""A rank of PyTorch's job in the chaos test, for torchrun: the model and the step of `chaos_worker.py`.

Rank 0 saves the state after each step, by `torch.save` to a new file that it then renames; a restart loads it. Notes
and pids are written as `jobs.py` reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models

BATCH = 16  # images a step, over all ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for notes and the state")
    parser.add_argument("digits", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step (default: 0)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (args.folder / f"pid-{rank}").write_text(str(os.getpid()))
    notes = (args.folder / f"rank-{rank}.jsonl").open("a", buffering=1)
    with np.load(args.digits) as read:
        images = torch.from_numpy(read["images"])
        labels = torch.from_numpy(read["labels"])
    torch.manual_seed(1)
    model = DistributedDataParallel(models.digits_cnn(torch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = args.folder / "state"
    step = 0
    if path.exists():
        saved = torch.load(path)
        step = saved["step"]
        for name, part in objects.items():
            part.load_state_dict(saved[name])
    while step < args.steps:
        epoch, number = divmod(step, len(labels) // BATCH)
        order = np.random.default_rng(epoch).permutation(len(labels))
        ids = order[BATCH * number : BATCH * (number + 1)][rank::size]
        time.sleep(args.pause)
        optimizer.zero_grad()
        F.cross_entropy(model(images[ids]), labels[ids]).backward()
        optimizer.step()
        scheduler.step()
        step += 1
        notes.write(json.dumps({"start": start, "size": size, "step": step, "time": time.time()}) + "\n")
        if rank == 0:
            torch.save({"step": step} | {name: part.state_dict() for name, part in objects.items()}, f"{path}.new")
            os.rename(f"{path}.new", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
