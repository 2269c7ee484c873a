"""Activations, forward and backward, beside PyTorch's: float32, one core, nanoseconds an element.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/activations.py [--runs 21] [NAME ...]

Runs alternate, and the ratio is the median of the pairs' ratios. The gradient is asked for by autograd.grad, so that
neither side copies it into a leaf.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ddp

torch.set_num_threads(1)
SIZES = {"2 MiB": 1 << 19, "16 MiB": 1 << 22}
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "gelu": lambda t, x: t.nn.functional.gelu(x),
    "gelu tanh": lambda t, x: t.nn.functional.gelu(x, approximate="tanh"),
    **{
        name: lambda t, x, name=name: getattr(t.nn.functional, name)(x)
        for name in ("silu", "softplus", "tanh", "sigmoid", "relu", "leaky_relu", "elu", "mish", "hardswish")
    },
}


def step(t: Any, form: Callable[[Any, Any], Any], x: Any, g: Any) -> tuple[float, float]:
    """CPU seconds of one forward and one backward: others on the machine do not count."""
    start = time.thread_time()
    y = form(t, x)
    middle = time.thread_time()
    t.autograd.grad(y, x, g)
    return middle - start, time.thread_time() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FORMS)} (default: all)")
    parser.add_argument("--runs", type=int, default=21, help="pairs of runs after two to warm up (default: 21)")
    args = parser.parse_args()
    for label, size in SIZES.items():
        x, g = (np.random.default_rng(seed).standard_normal(size).astype(np.float32) for seed in (0, 1))
        mine = [ddp.tensor(x, requires_grad=True), ddp.tensor(g)]
        theirs = [torch.tensor(x, requires_grad=True), torch.tensor(g)]
        for name in args.names or FORMS:
            pairs = [(step(ddp, FORMS[name], *mine), step(torch, FORMS[name], *theirs)) for _ in range(args.runs + 2)][
                2:
            ]
            forward, backward, their_forward, their_backward = (
                1e9 / size * statistics.median(pair[side][part] for pair in pairs) for side in (0, 1) for part in (0, 1)
            )
            ratio = statistics.median(sum(a) / sum(b) for a, b in pairs)
            print(
                f"{label:>6} {name:<10} {forward:5.2f} + {backward:4.2f} ns, PyTorch {their_forward:5.2f} + "
                f"{their_backward:4.2f} ns: {ratio:.2f} times PyTorch's"
            )


if __name__ == "__main__":
    main()
