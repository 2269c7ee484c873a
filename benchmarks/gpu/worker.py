"""One library that trains one task in a process of its own, as its users would write it: it steps when it is asked to.

    python -m benchmarks.gpu.worker small-gpt ddp-graph cuda compile
    python -m benchmarks.gpu.worker small-gpt ddp-graph cuda run < numbers_of_steps

`compile` trains a few steps and ends: what it compiles is in the caches on disk then, and several may do so at once.
`run` reads an empty line before it trains, so that it has the device to itself: cuDNN's plans are timed. Then it prints
its losses and peak memory, or what went wrong, and for each number that it reads the seconds of one step over as many,
all work on the device included.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.tasks import TASKS, Task, weights

FIRST = 8  # steps whose losses are compared; after them everything is compiled and allocated
Step = Callable[[], Any]


class Library:
    """What differs between the two. t: the module; name: as in the table of results"""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        if name.startswith("torch"):
            import torch as t
        else:
            import ddp as t  # type: ignore[no-redef]
        # What PyTorch's users set to be fast: float32 products in TF32, and the fastest plans of cuDNN.
        t.set_float32_matmul_precision("high")
        t.backends.cudnn.benchmark = True
        self.t: Any = t

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
    t, name, device = library.t, library.name, library.device
    model = task.model(t, task.size)
    model.load_state_dict({key: t.from_numpy(value) for key, value in weights(model).items()}, strict=False)
    model = model.to(device)
    order = slice(None, None, -1 if backwards else 1)
    x, y = (t.from_numpy(np.ascontiguousarray(each[order])).to(device) for each in task.batch(task.size, 0))
    if task.channels_last:
        model, x = model.to(memory_format=t.channels_last), x.to(memory_format=t.channels_last)
    if name == "ddp-parallel":
        import collectives

        model = t.DataParallel(model, collectives.init())
    elif name == "torch-parallel":
        backend, store = "nccl" if device == "cuda" else "gloo", t.distributed.HashStore()
        t.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        model = t.nn.parallel.DistributedDataParallel(model)
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


def seconds(library: Library, step: Step, repeats: int) -> float:
    """Of one step, from an idle device to an idle device."""
    library.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    library.synchronize()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    key, name, device, phase = sys.argv[1:5]
    task = TASKS[key] if device == "cuda" else TASKS[key].small()
    said: dict[str, Any] = {}
    try:
        library = Library(name, device)
        if phase == "run":
            sys.stdin.readline()
        else:
            library.t.backends.cudnn.benchmark = False  # beside others, plans are timed in vain
        if name == "torch" and phase == "run":
            said["again"] = first_losses(train(library, task, backwards=True))
        library.forget()
        step = train(library, task)
        said["losses"] = first_losses(step)
        seconds(library, step, 3)
        said["peaks"] = library.peaks()
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(said), flush=True)
        return
    if phase == "compile":
        return
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        print(seconds(library, step, int(line)), flush=True)


if __name__ == "__main__":
    main()
