"""A rank of `startup.py`, run as a file, so that it imports nothing else: LIBRARY MATTER FOLDER.

It writes moments into the folder. The monotonic clock is the machine's, so that they may be compared.
"""

from __future__ import annotations

import os
import signal
import sys
import time

sys.path[0] = os.path.dirname(os.path.dirname(__file__))  # beside this file is another `collectives`
library, matter, folder = sys.argv[1:]
if library == "torch":
    import atexit

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    rank = dist.get_rank()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    reduce = lambda: dist.all_reduce(torch.ones(1))  # noqa: E731
else:
    import numpy as np

    if library == "mpi4py":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
        attempt = 0
        total = np.zeros(1)
        reduce = lambda: MPI.COMM_WORLD.Allreduce(np.ones(1), total)  # noqa: E731
    else:
        import collectives

        comm = collectives.init()
        rank = comm.rank
        attempt = int(os.environ.get("DDP_ATTEMPT", 0))
        reduce = lambda: comm.all_reduce(np.ones(1))  # noqa: E731


def note(name: str, value: object) -> None:
    with open(f"{folder}/{name}.{rank}.new", "w") as file:
        file.write(str(value))
    os.rename(file.name, f"{folder}/{name}.{rank}")


reduce()
note(f"first{attempt}", time.monotonic())
note("pid", os.getpid())
while matter == "memory" and not os.path.exists(f"{folder}/enough"):
    time.sleep(0.01)
if matter in ("exit", "killed", "restart") and attempt == 0:
    reduce()
    if rank == 1:
        time.sleep(0.3)  # until all is quiet
        note("failed", time.monotonic())
        if matter == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    while True:
        reduce()
