"""One library that trains one task in a process of its own, as its users would write it, on request.

    python -m benchmarks.gpu.worker SOCKET small-gpt ddp-graph cuda

Several may compile at once; each warms up and makes its steps while it has the device to itself.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.gpu.tasks import TASKS, Task, weights
from benchmarks.worker_pool import serve

FIRST = 8  # steps whose losses are compared; after them everything is compiled and allocated
Step = Callable[[], Any]


class Library:
    """What differs between the two. t: the module; name: as in the table of results"""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.device = device
        if name.startswith("torch"):
            import torch as t
        else:
            import ddp as t  # type: ignore[no-redef]
        # What PyTorch's users set to be fast: float32 products in TF32, and the fastest plans of cuDNN.
        t.set_float32_matmul_precision("high")
        t.backends.cudnn.benchmark = True
        self.t: Any = t

    def cudnn(self) -> int | None:
        """The version of the library's cuDNN, 92800 for 9.28.0; None where it has none, or on a CPU."""
        return self.t.backends.cudnn.version() if self.device == "cuda" else None

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            self.t.cuda.synchronize()

    def forget(self) -> None:
        """Frees what is no longer used, and begins the statistics of memory anew: ours follow it from here on."""
        gc.collect()
        if self.device == "cuda":
            self.t.zeros(1, device="cuda")  # PyTorch has no statistics before its first tensor
            self.t.cuda.empty_cache()
            self.t.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        """The most bytes that tensors held at once since `forget`, and that CUDA had given for them."""
        if self.device != "cuda":
            return {}
        cuda = self.t.cuda
        return {"allocated": int(cuda.max_memory_allocated()), "reserved": int(cuda.max_memory_reserved())}


def train(library: Library, task: Task, backwards: bool = False) -> Step:
    """A training step of a task, compiled, graphed or wrapped as the implementation's name says; it returns the loss.

    backwards: the last sample of the batch comes first
    """
    t = library.t
    name = library.name
    device = library.device
    model = task.model(t, task.size)
    model.load_state_dict({key: t.from_numpy(value) for key, value in weights(model).items()}, strict=False)
    model = model.to(device)
    order = slice(None, None, -1 if backwards else 1)
    x, y = (t.from_numpy(np.ascontiguousarray(array[order])).to(device) for array in task.batch(task.size, 0))
    if task.channels_last:
        model = model.to(memory_format=t.channels_last)
        x = x.to(memory_format=t.channels_last)
    if name == "ddp-parallel":
        import collectives

        model = t.DataParallel(model, collectives.init())
    fused = {"fused": True} if name.startswith("torch") and device == "cuda" else {}
    optimizer = t.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, **fused)

    def forward(x: Any, y: Any) -> Any:
        with t.amp.autocast(device, t.bfloat16, enabled=task.half):
            out = model(x)
            return t.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))

    if name == "torch-compile":
        forward = t.compile(forward)
    elif name == "torch-graphs":
        forward = t.compile(forward, mode="reduce-overhead")

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if name == "ddp-graph":
        step = t.cuda.graphed_step(step)
    return lambda: step(x, y)


def first_losses(step: Step) -> list[float]:
    """Of the steps after which everything is compiled and allocated."""
    return [float(step()) for _ in range(FIRST)]


class Worker:
    """One implementation of a task, on request."""

    def __init__(self, key: str, name: str, device: str) -> None:
        self._name = name
        self._device = device
        self._task = TASKS[key] if device == "cuda" else TASKS[key].small()

    def versions(self) -> dict[str, Any]:
        """What this process measures with."""
        return {"cudnn": Library(self._name, self._device).cudnn(), "versions": harness.versions()}

    def compile(self) -> None:
        """Trains a few steps: what they compile is in the caches on disk afterwards."""
        library = Library(self._name, self._device)
        library.t.backends.cudnn.benchmark = False  # beside other processes, timing plans is useless
        first_losses(train(library, self._task))

    def warm_up(self) -> dict[str, Any]:
        """Trains the first steps; their losses, peak memory, cuDNN. again: losses of PyTorch with the batch reversed"""
        self._library = library = Library(self._name, self._device)
        results: dict[str, Any] = {}
        if self._name == "torch":
            results["again"] = first_losses(train(library, self._task, backwards=True))
        library.forget()
        self._step = train(library, self._task)
        results["losses"] = first_losses(self._step)
        self.steps(3)
        return {**results, "peaks": library.peaks(), "cudnn": library.cudnn()}

    def steps(self, count: int) -> float:
        """Seconds of one of so many steps, from an idle device to an idle device."""

        def run() -> None:
            for _ in range(count):
                self._step()
            self._library.synchronize()

        self._library.synchronize()
        return harness.seconds(run) / count


if __name__ == "__main__":
    serve(sys.argv[1], Worker(*sys.argv[2:5]))
