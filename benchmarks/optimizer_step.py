"""How long `optimizer.step()` takes against PyTorch's, on one core and the same tensors.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.optimizer_step [--rounds 40] [--json FILE]

Rounds alternate between ours with gradients in arrays of their own, ours with gradients in flat buckets, and PyTorch's
with its default settings (for loops on the CPU) and with fused=True; ratios are medians over rounds. Goal: at most 1.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ddp
from benchmarks import harness
from ddp._layout import FlatBuckets, lay_out

Shapes = list[tuple[int, ...]]


def mlp(*widths: int) -> Shapes:
    return [shape for n, m in itertools.pairwise(widths) for shape in ((m, n), (m,))]


def gpt(layers: int = 4, d: int = 128, vocabulary: int = 96, context: int = 128) -> Shapes:
    block: Shapes = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(vocabulary, d), (context, d), *block * layers, (d,), (d,)]


MODELS: dict[str, Shapes] = {
    "MLP 64-64-10": mlp(64, 64, 10),
    "MLP 784-1024-1024-10": mlp(784, 1024, 1024, 10),
    "GPT, 4 layers, d=128": gpt(),
    "200 tensors of 1000": [(1000,)] * 200,
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 1e-3}),
    "SGD, momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "AdamW": ("AdamW", {"lr": 1e-3}),
}


def ours(name: str, options: dict[str, Any], values: list[Any], bucketed: bool) -> Callable[[], Any]:
    params = [ddp.tensor(value, requires_grad=True) for value in values]
    if bucketed:
        dtypes = [value.dtype for value in values]
        layout = lay_out([list(range(len(values)))[::-1]], [value.shape for value in values], dtypes)
        for p, view in zip(params, FlatBuckets(layout, np.zeros).views, strict=True):
            p.leaf.grad_buffer.bind(view)
    for p, value in zip(params, values, strict=True):
        p.grad = ddp.tensor(0.1 * value)
    return getattr(ddp.optim, name)(params, **options).step


def theirs(name: str, options: dict[str, Any], values: list[Any], fused: bool) -> Callable[[], Any]:
    params = [torch.tensor(value, requires_grad=True) for value in values]
    for p, value in zip(params, values, strict=True):
        p.grad = torch.tensor(0.1 * value)
    return getattr(torch.optim, name)(params, **options, **({"fused": True} if fused else {})).step


def main() -> None:
    args = harness.parser(__doc__, rounds=40).parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    for model, shapes in MODELS.items():
        random = np.random.default_rng(0)
        values = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        for label, (name, options) in OPTIMIZERS.items():
            steps = {
                "own": ours(name, options, values, False),
                "bucket": ours(name, options, values, True),
                "torch": theirs(name, options, values, False),
                "fused": theirs(name, options, values, True),
            }
            repeats = max(1, int(5e-3 / harness.seconds(steps["torch"], 3)))
            calls = {who: lambda step=step, n=repeats: harness.seconds(step, n) for who, step in steps.items()}
            rounds = harness.take_turns(calls, args.rounds)
            median = harness.medians(rounds)
            pairs = [(mine, other) for mine in ("own", "bucket") for other in ("torch", "fused")]
            ratio = {f"{mine}/{other}": harness.over(rounds[mine], rounds[other]) for mine, other in pairs}
            rows[f"{model}, {label}"] = median | ratio
            times = ", ".join(f"{who} {1e3 * each:.3f}" for who, each in median.items())
            ratios = ", ".join(f"{pair} {each:.2f}" for pair, each in ratio.items())
            print(f"{model:<21} {label:<14} ms: {times}   {ratios}", flush=True)
    harness.write(args.json, "optimizer_step", rounds=args.rounds, medians=rows)


if __name__ == "__main__":
    main()
