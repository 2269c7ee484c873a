"""One rank of `sharing`: two ranks on halves of a batch train what one rank trains on the whole of it.

    ddp-launch -n 2 --share-gpu -m benchmarks.gpu.pair cuda

Rank 0 prints what carried the gradients (below NCCL 2.30 it cannot be NCCL, which refuses ranks that share a GPU), and
the largest difference of any weight after a few updates, in units of the largest change of that weight's array. In
float32, so that a wrong sum is no rounding.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import collectives
import ddp
from benchmarks.gpu.tasks import TASKS, weights

UPDATES = 4


def trained(device: str, part: slice, comm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights before and after, as NumPy arrays. part: of the batch; comm: None for the bare model."""
    task = TASKS["small-gpt"].small()
    model = task.model(ddp, task.size)
    model.load_state_dict({key: ddp.from_numpy(value) for key, value in weights(model).items()}, strict=False)
    if comm is not None:  # those that no seed gave are rank 0's everywhere
        for _, value in sorted(model.state_dict().items()):
            value.copy_(ddp.from_numpy(comm.broadcast(value.numpy(), 0)))
    before = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    model = model.to(device)
    wrapped = model if comm is None else ddp.DataParallel(model, comm)
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.5)  # Adam's signs would hide a wrong scale
    for seed in range(UPDATES):
        x, y = (ddp.from_numpy(each[part]).to(device) for each in task.batch(task.size, seed))
        optimizer.zero_grad()
        out = wrapped(x)
        ddp.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)).backward()
        optimizer.step()
    return before, {key: value.cpu().numpy() for key, value in model.state_dict().items()}


def main() -> None:
    device = sys.argv[1]
    chosen: list[str] = []  # what collectives log of how arrays on GPUs travel, once the ranks have chosen
    handler = logging.Handler()
    handler.emit = lambda record: chosen.append(record.getMessage())  # type: ignore[method-assign]  # all it does
    logger = logging.getLogger("collectives")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    comm = collectives.init("auto" if device == "cuda" else "mpi", timeout=60)
    batch = TASKS["small-gpt"].small().size.batch
    half = slice(comm.rank * batch // comm.size, (comm.rank + 1) * batch // comm.size)
    ddp.manual_seed(0)
    before, shared = trained(device, half, comm)
    ddp.manual_seed(0)
    _, alone = trained(device, slice(None), None)
    worst = 0.0
    for key, value in alone.items():
        change = float(abs(value - before[key]).max())
        worst = max(worst, float(abs(shared[key] - value).max()) / (change or 1.0))
    if comm.rank == 0:
        carried = next((each for each in chosen if each.startswith("arrays on GPUs")), comm.backend)
        print(json.dumps({"carried": carried, "ranks": comm.size, "difference": worst}), flush=True)


if __name__ == "__main__":
    main()
