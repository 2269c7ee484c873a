"""Two ranks on one GPU: on halves of a batch they must train what one rank trains on the whole of it.

    ddp-launch -n 2 --share-gpu -m benchmarks.gpu.sharing cuda    # the two ranks that `measure` starts

NCCL lets ranks share a GPU from 2.30 on, if its settings allow it. Below that they agree on MPI, and the row says so.
Compared is the largest difference of any weight after a few updates, in units of the largest change of that weight's
array; in float32, so that a wrong sum is no rounding.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import collectives
import ddp
from benchmarks import harness
from benchmarks.gpu.tasks import TASKS, weights

LIMIT = 90.0  # s
TOLERANCE = 1e-4  # of float32 sums in another order
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


def compare(device: str) -> None:
    """In a rank: prints what carried the gradients and the largest difference, on rank 0."""
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


def measure(device: str) -> dict[str, Any]:
    """carried, ranks, the largest difference of a weight, and whether that is rounding.

    Raises: RuntimeError with the end of the job's output if it fails.
    """
    shared = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    share = ["--share-gpu"] if device == "cuda" else []
    command = [sys.executable, "-m", "launcher", "-n", "2", *share, "-m", "benchmarks.gpu.sharing", device]
    environment = {**os.environ, **(shared if device == "cuda" else {})}
    done = subprocess.run(command, cwd=harness.ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    printed = [line for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not printed:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    found = json.loads(printed[-1][printed[-1].index("{") :])
    return {**found, "equal": bool(found["difference"] <= TOLERANCE)}


def line(found: dict[str, Any]) -> str:
    """For the table."""
    verdict = "equal to one rank" if found["equal"] else "NOT equal to one rank"
    return f"two ranks on one device ({found['carried']}): {verdict}, largest difference {found['difference']:.1e}"


if __name__ == "__main__":
    compare(sys.argv[1])
