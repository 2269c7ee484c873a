"""`ddp-launch --trace` for training with PyTorch: records the collectives that each backward pass starts.

The record has the format that `ddp.tracing` reads. A step is a backward pass that starts at least one collective.
DistributedDataParallel starts one per bucket. `fully_shard` usually starts two per layer, an all-gather and a
reduce-scatter. Nothing here runs unless the environment asks for a trace. Then forwards of modules are timed, and
`torch.autograd.backward`, which `Tensor.backward` calls. The latest 1,000 steps are written at exit. All times are on
rank 0's clock.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import secrets
import socket
from collections import deque
from time import monotonic_ns
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.modules import module

from collectives.communicator import Communicator
from collectives.engine.call import Work
from collectives.world import TRACE


class StepRecorder:
    """Records the steps of this rank from its creation on.

    world: a communicator of all ranks, which create their recorders together
    folder: the folder into which each rank writes its part of the trace
    """

    def __init__(self, world: Communicator, folder: str) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=1000)
        self._numbers = itertools.count()
        self._calls: list[tuple[Work[Any], int]] = []  # the calls of the running backward, and the bytes of each
        self._entered = self._left = 0  # since the last backward: the first and the latest time in `_pass`
        self._begun = self._computed = 0  # start of the running backward (0: none runs), end of its computing
        self._ended = 0
        self._backward = torch.autograd.backward
        world.barrier()  # which all ranks leave at nearly the same moment
        now = monotonic_ns()
        node, job, first = world.broadcast_object((world.node, secrets.randbits(62), now))
        # Nanoseconds by which this host's clock is ahead of that of rank 0's host.
        self._ahead = 0 if node == world.node else now - first
        self._path = os.path.join(folder, f"rank-{world.rank}.steps.json")
        self._part = {"rank": world.rank, "size": world.size, "host": socket.gethostname(), "job": job}
        module.register_module_forward_pre_hook(self._pass)
        module.register_module_forward_hook(self._pass)
        torch.autograd.backward = self._run
        atexit.register(self._write)

    def add(self, work: Work[Any], nbytes: int) -> None:
        """Adds a call that the running backward has made."""
        if not self._calls:
            Variable._execution_engine.queue_callback(self._end_computing)
        self._calls.append((work, nbytes))

    def _now(self) -> int:
        return monotonic_ns() - self._ahead

    def _pass(self, *_: Any) -> None:
        """Called when the forward of any module begins, and when it has ended."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not self._begun:
            self._left = self._now()
            self._entered = self._entered or self._left

    def _run(self, *args: Any, **more: Any) -> None:
        if self._begun:  # inside another backward: `torch.utils.checkpoint` calls one
            return self._backward(*args, **more)
        self._begun = self._now()
        self._calls = []
        try:
            self._backward(*args, **more)
            if self._calls:
                self._steps.append(self._step())
        finally:
            self._begun = self._entered = 0

    def _end_computing(self) -> None:
        self._computed = self._now()

    def _step(self) -> dict[str, Any]:
        """The record of the backward that has just ended."""
        since = self._ended
        self._ended = self._now()
        times = [[time - self._ahead for time in work.times() or ()] for work, _ in self._calls]
        return {
            "number": next(self._numbers),
            "contents": [([str(work)], nbytes) for work, nbytes in self._calls],
            "since": since,
            "forward": (self._entered, self._left) if self._entered else None,
            "begun": self._begun,
            "computed": self._computed,
            "ended": self._ended,
            "ready": [call[0] if call else self._begun for call in times],
            "times": [call[1:] or None for call in times],
        }

    def _write(self) -> None:
        with open(self._path, "w") as file:
            json.dump({**self._part, "models": [list(self._steps)]}, file)


recorder: StepRecorder | None = None


def start(world: Communicator) -> None:
    """Records steps from now on if the environment asks for a trace. Collective over the world, the first time."""
    global recorder
    folder = os.environ.get(TRACE)
    if folder and recorder is None:
        recorder = StepRecorder(world, folder)
