"""How long forward and backward of a normalisation take beside PyTorch's, on one core and the same arrays.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/normalisation.py [--rounds 60]

Rounds alternate between the two; ratios are medians over rounds. A round is six layers in a row, so that gradients are
handed on from layer to layer, and the times are for one of them. Goal: at most 1.0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ddp

LAYERS = 6
CASES: list[tuple[str, tuple[Any, ...], tuple[int, ...]]] = [
    ("LayerNorm", (128,), (2048, 128)),
    ("LayerNorm", (1024,), (2048, 1024)),
    ("RMSNorm", (128,), (2048, 128)),
    ("BatchNorm1d", (1024,), (128, 1024)),
    ("BatchNorm2d", (32,), (64, 32, 26, 26)),
    ("GroupNorm", (8, 32), (64, 32, 14, 14)),
]


def step(t: Any, name: str, args: tuple[Any, ...], x: Any, g: Any) -> Callable[[], None]:
    net = t.nn.Sequential(*(getattr(t.nn, name)(*args) for _ in range(LAYERS)))
    x, g = t.tensor(x), t.tensor(g)

    def run() -> None:
        net(x).backward(g)
        net.zero_grad()

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}, medians of {rounds} rounds")
    for name, args, shape in CASES:
        draw = np.random.default_rng(0)
        x, g = (draw.standard_normal(shape, dtype=np.float32) for _ in range(2))
        ours, theirs = step(ddp, name, args, x, g), step(torch, name, args, x, g)
        for run in (ours, theirs) * 3:
            run()
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
        mine, others = (statistics.median(side) / LAYERS * 1e6 for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:12} {shape!s:18} ours {mine:8.0f} us  PyTorch {others:8.0f} us  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
