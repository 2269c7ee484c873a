"""How near the loader comes to the bandwidth of a bare copy from pinned memory: images on their way to a GPU.

The samples are decoded already, as those of a memory-mapped file are: what is measured is the way from a worker to the
GPU. A batch counts once a kernel on the computing stream has read it. A pass is long beside its beginning, where no
batch is ready yet.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness

SHAPE = (3, 224, 224)  # float16: 294 KiB an image
BATCH = 256  # 73.5 MiB
BATCHES = 300  # 0.4 s at 55 GB/s
WORKERS = min(12, max(1, (os.cpu_count() or 1) - 2))
ROUNDS = 5
GOAL = 0.9


class Pictures:
    """Images that lie in memory: a worker copies each into its batch."""

    def __init__(self, batch: int, batches: int) -> None:
        self.length = batch * batches
        self.images = np.random.default_rng(0).standard_normal((64, *SHAPE)).astype(np.float16)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.images[index % len(self.images)]


def measure(device: str) -> harness.Rounds:
    """Bytes a second of the loader and of bare copies, in turns."""
    from ddp.data import DataLoader

    batch, batches, workers = (BATCH, BATCHES, WORKERS) if device == "cuda" else (8, 6, 1)
    nbytes = batch * int(np.prod(SHAPE)) * 2
    loader = DataLoader(
        Pictures(batch, batches), batch, num_workers=workers, pin_memory=device == "cuda", persistent_workers=True
    )
    bare = _bare_copies(nbytes, batches, device)
    calls = {
        "loader": partial(harness.seconds, partial(_pass, loader, device)),
        "copy": partial(harness.seconds, bare),
    }
    times = harness.take_turns(calls, ROUNDS, warmup=1)  # the first starts workers
    return {name: [nbytes * batches / seconds for seconds in rounds] for name, rounds in times.items()}


def _pass(loader: Any, device: str) -> None:
    import ddp

    for x in loader:
        x[0, 0, 0, 0] + 1  # on the computing stream: it waits for the copy
    if device == "cuda":
        ddp.cuda.synchronize()


def _bare_copies(nbytes: int, count: int, device: str) -> Any:
    """Copies from one pinned buffer into one on the device, as fast as they go; on a CPU between two arrays."""
    if device != "cuda":
        source = np.zeros(nbytes, np.uint8)
        target = np.zeros(nbytes, np.uint8)
        return lambda: [np.copyto(target, source) for _ in range(count)]
    import cupy

    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
    on_device = cupy.empty(nbytes, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)

    def run() -> None:
        for _ in range(count):
            on_device.set(pinned, stream=stream)
        stream.synchronize()

    return run
