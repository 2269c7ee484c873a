"""One rank that trains on request, and answers how long it took: for overlap.py, compression.py, micro_batches.py.

    python -m benchmarks.training_worker LIBRARY SOCKET RANK SIZE

Each library has ranks of its own, as it has for its users, which live for the whole run (`worker_pool.py`). Rank r has
the r-th core of this machine to itself, with all its threads, and no other core.

`ddp` finds its ranks as a job of its own does; PyTorch's use gloo, and meet by a file beside the socket.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.train_step import STEPS, Task, gpt, loss_of, mlp, sgd
from benchmarks.worker_pool import serve

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of a host of its own
LIMIT = 120.0  # s
FIRST = 6  # steps, in which buckets are planned anew; ours for the last time after the fourth
MIB = 1 << 20
Found = dict[str, Any]


def wide_mlp(t: Any, batch: int, seed: int) -> Task:
    """Six layers of 1024x1024: 24 MiB of gradients."""
    return mlp(t, (1024,) * 7, batch, sgd, seed)


TASKS: dict[str, tuple[str, Callable[[Any, int], Task]]] = {
    "mlp-512": ("MLP of 6 layers of 1024, batch 512, SGD", lambda t, seed: wide_mlp(t, 512, seed)),
    "mlp-1024": ("MLP of 6 layers of 1024, batch 1024, SGD", lambda t, seed: wide_mlp(t, 1024, seed)),
    "gpt": (STEPS["gpt"][0], lambda t, seed: gpt(t, seed=seed)),
    "tiny": ("MLP 64-64-10, batch 32, SGD", lambda t, seed: mlp(t, (64, 64, 10), 32, sgd, seed)),
}


class Ours:
    """Ranks of `ddp`."""

    def __init__(self) -> None:
        import collectives
        import ddp

        self.t: Any = ddp
        self.comm = collectives.init(timeout=LIMIT)
        self.rank = self.comm.rank
        self.barrier = self.comm.barrier
        self._alone = self.comm.duplicate()

    def wrap(self, net: Any, options: dict[str, Any]) -> Any:
        """The net under data parallelism."""
        hook = {"comm_hook": our_hook(options["comm_hook"])} if "comm_hook" in options else {}
        return self.t.DataParallel(net, self.comm, **options | hook)

    def array(self, length: int) -> Any:
        """A float32 array to be reduced."""
        return self._alone.empty(length)

    def all_reduce(self, x: Any) -> Any:
        """Starts it; waits with `wait()`."""
        return self._alone.all_reduce(x, "sum", scale=0.5, out=x, async_op=True)


class Theirs:
    """Ranks of PyTorch, with gloo. store: the file by which they meet"""

    def __init__(self, store: str, rank: int, size: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.t: Any = torch
        self._dist: Any = torch.distributed
        limit = datetime.timedelta(seconds=LIMIT)
        self._dist.init_process_group("gloo", f"file://{store}", limit, size, rank)
        self.rank = rank
        self.barrier = self._dist.barrier

    def wrap(self, net: Any, options: dict[str, Any]) -> Any:
        return self.t.nn.parallel.DistributedDataParallel(net, **options)

    def array(self, length: int) -> Any:
        return self.t.zeros(length)

    def all_reduce(self, x: Any) -> Any:
        return self._dist.all_reduce(x, async_op=True)


def our_hook(name: str) -> Any:
    """`our_hook("powersgd:4")`: one of `comm_hooks`, with its rank or ratio if it has one."""
    from ddp.parallel import comm_hooks

    hook_name, _, number = name.partition(":")
    if hook_name == "powersgd":
        return comm_hooks.PowerSGD(int(number or 1))
    if hook_name == "topk":
        return comm_hooks.TopK(float(number or 0.01))
    return getattr(comm_hooks, hook_name)


class Trained:
    """One implementation: a net, wrapped or not, and its training.

    parts: of a batch, each with a forward and a backward of its own; a step reduces the sum of their gradients once
    """

    def __init__(self, ranks: Ours | Theirs, task: str, options: dict[str, Any] | None, parts: int) -> None:
        ranks.t.manual_seed(0)
        self._t = ranks.t
        self._task = TASKS[task][1](ranks.t, 1000 * ranks.rank)  # other samples on each rank
        self.names, self.parameters = zip(*self._task.model.named_parameters(), strict=True)
        self.model = self._task.model if options is None else ranks.wrap(self._task.model, options)
        pieces = zip(self._task.x.chunk(parts), self._task.y.chunk(parts), strict=True)
        self._parts = [replace(self._task, x=x, y=y) for x, y in pieces]
        self._accumulates = parts > 1 and options is not None and "micro_batches" not in options
        self._optimizer = self._task.optimizer(ranks.t, self.model)
        self._ready = [0.0] * len(self.parameters)
        self._noted = options is None
        if self._noted:
            for index, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(self._note(index))

    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [int(np.prod(parameter.shape)) for parameter in self.parameters]

    def steps(self, number: int) -> Found:
        """Seconds of one step, its parts, and of the core's time.

        ready: since backward began, of each gradient; of a bare net only
        """
        clock = time.perf_counter
        marks = np.zeros((number, 4))
        ready = np.zeros((number, len(self._ready)))
        cpu = time.process_time()
        for step in range(number):
            marks[step, 0] = clock()
            self._optimizer.zero_grad()
            for part in self._parts[:-1]:
                with self.model.no_sync() if self._accumulates else contextlib.nullcontext():
                    loss_of(self._t, self.model, part).backward()
            loss = loss_of(self._t, self.model, self._parts[-1])
            marks[step, 1] = clock()
            loss.backward()
            marks[step, 2] = clock()
            self._optimizer.step()
            marks[step, 3] = clock()
            ready[step] = np.subtract(self._ready, marks[step, 1])
        forward, backward, update = np.diff(marks).mean(0).tolist()
        return {
            "step": float(marks[-1, 3] - marks[0, 0]) / number,
            "cpu": (time.process_time() - cpu) / number,
            "forward": forward,
            "update": update,
            "gradients": forward + backward,
            "ready": ready.mean(0).tolist() if self._noted else None,
        }

    def _note(self, index: int) -> Callable[[Any], None]:
        def complete(_: Any) -> None:
            self._ready[index] = time.perf_counter()

        return complete


class Worker:
    """Answers requests: each public method is one."""

    def __init__(self, join: Callable[[], Any]) -> None:
        self._join = join
        self._trained: dict[str, Trained] = {}

    def join(self) -> int:
        """Joins the other ranks; which rank this is."""
        self._ranks = self._join()
        pin(self._ranks.rank)
        return int(self._ranks.rank)

    def build(self, name: str, task: str, options: dict[str, Any] | None, parts: int = 1) -> list[int]:
        """Makes an implementation, and has it do its first steps, after which its buckets stay as they are.

        Returns: elements of each parameter
        """
        trained = self._trained[name] = Trained(self._ranks, task, options, parts)
        trained.steps(FIRST)
        return trained.sizes()

    def plan(self, name: str) -> list[list[int]]:
        """The buckets of an implementation of ours, as numbers of its parameters."""
        trained = self._trained[name]
        return [[trained.names.index(parameter) for parameter in bucket] for bucket in trained.model.plan.buckets]

    def drop(self, name: str) -> None:
        """Forgets an implementation."""
        del self._trained[name]

    def train(self, name: str, steps: int) -> Found:
        """One step that is not timed, and `steps` that are."""
        trained = self._trained[name]
        self._ranks.barrier()
        trained.steps(1)
        self._ranks.barrier()
        before = sent()
        results = trained.steps(steps)
        after = sent()
        return results if before is None or after is None else {**results, "sent": (after - before) / steps}

    def reduce(self, lengths: list[int], times: int) -> Found:
        """Seconds that the buckets take one after the other, with nothing computed meanwhile."""
        arrays = [self._ranks.array(length) for length in lengths]

        def call() -> None:
            for work in [self._ranks.all_reduce(x) for x in arrays]:
                work.wait()

        self._ranks.barrier()
        call()
        taken = []
        cpu = time.process_time()
        for _ in range(times):
            self._ranks.barrier()
            taken.append(harness.seconds(call))
        return {"seconds": statistics.mean(taken), "cpu": (time.process_time() - cpu) / times}

    def digest(self, name: str) -> str:
        """What is equal on all ranks if their parameters are."""
        digest = hashlib.sha256()
        for parameter in self._trained[name].parameters:
            digest.update(np.ascontiguousarray(parameter.detach().numpy()).tobytes())
        return digest.hexdigest()


def sent() -> int | None:
    """Bytes that this host put on its wire so far; None on a host without one."""
    return int(SENT.read_text()) if SENT.exists() else None


def pin(rank: int) -> None:
    """Leaves this process and all its threads one core, the rank's."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), {core})


def main() -> None:
    library, path, rank, size = sys.argv[1:]
    serve(path, Worker(Ours if library == "ddp" else lambda: Theirs(f"{path}.store", int(rank), int(size))))
    if library != "ddp":
        import torch.distributed

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
