"""One library that trains one task in a process of its own, as its users would write it: it steps when it is asked to.

    python -m benchmarks.gpu.contestant small-gpt ddp-graph cuda < numbers_of_steps

The first line that it prints says that it is ready: its losses, its peak memory, or what went wrong. From then on it
prints, for each number it reads, the seconds of one step over as many, all work on the device included.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.tasks import TASKS, Task, weights

FIRST = 8  # steps whose losses are compared; after them everything is compiled and allocated
Step = Callable[[], Any]


class Library:
    """What differs between the two. t: the module; name: as in the table of results"""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        if name.startswith("torch"):
            import torch as t

            # What PyTorch's users set to be fast: float32 products in TF32, as ours in the next branch.
            t.set_float32_matmul_precision("high")
            t.backends.cudnn.benchmark = True
        else:
            import ddp as t  # type: ignore[no-redef]

            t.set_float32_matmul_precision("high")
        self.t: Any = t

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            self.t.cuda.synchronize()

    def peak(self) -> int | None:
        """The most bytes that tensors held at once."""
        return int(self.t.cuda.max_memory_allocated()) if self.device == "cuda" else None


def train(library: Library, task: Task) -> Step:
    """A training step of a task, compiled, graphed or wrapped as the contestant's name says; it returns the loss."""
    t, name, device = library.t, library.name, library.device
    model = task.model(t, task.size)
    model.load_state_dict({key: t.from_numpy(value) for key, value in weights(model).items()}, strict=False)
    model = model.to(device)
    x, y = (t.from_numpy(each).to(device) for each in task.batch(task.size, 0))
    if task.channels_last:
        model, x = model.to(memory_format=t.channels_last), x.to(memory_format=t.channels_last)
    if name == "ddp-parallel":
        import collectives

        model = t.DataParallel(model, collectives.init("nccl" if device == "cuda" else "single"))
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


def seconds(library: Library, step: Step, repeats: int) -> float:
    """Of one step, from an idle device to an idle device."""
    library.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    library.synchronize()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    key, name, device = sys.argv[1:4]
    task = TASKS[key] if device == "cuda" else TASKS[key].small()
    try:
        library = Library(name, device)
        step = train(library, task)
        losses = [float(step()) for _ in range(FIRST)]
        seconds(library, step, 3)
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(said), flush=True)
        return
    print(json.dumps({"losses": losses, "peak": library.peak()}), flush=True)
    for line in sys.stdin:
        print(seconds(library, step, int(line)), flush=True)


if __name__ == "__main__":
    main()
