"""What one call costs the host, against PyTorch: an op, its backward, a small step, and `optimizer.step()`.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.calls [--device cuda|cpu] [--only ops,optimizer] [--json FILE]

ops        tensors so small that a GPU is done before the host has launched the next op: many are launched without
           waiting, so that the host's part is timed. On the CPU both times include the op's own work.
optimizer  `step()` on the CPU with gradients in arrays of their own, and in flat buckets; against PyTorch's default
           settings (for loops on the CPU), and with fused=True; `copy` moves as many bytes as an update reads and
           writes: 28 a parameter for AdamW, 20 for SGD with momentum, 12 for SGD

Goals: an op and a step at most 1.5 times PyTorch's, the other rows at most 1.0. Without PyTorch, ours alone is timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import ddp
from benchmarks import harness
from benchmarks.train_step import STEPS
from ddp._layout import FlatBuckets, lay_out

ROWS = 8
WIDTH = 32
TURN = 5e-3  # s
MOST = 500  # calls a turn: a stream takes about a thousand launches before it makes the host wait

Call = Callable[[], Any]
Shapes = list[tuple[int, ...]]


def tensor(lib: Any, device: str, *shape: int, grad: bool = False) -> Any:
    """The same numbers in both libraries."""
    values = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    return lib.tensor(values, device=device, requires_grad=grad)


def op(lib: Any, device: str, name: str, grad: bool) -> Call:
    """One op on small tensors. grad: with its backward, into gradients that are there"""
    x, y = (tensor(lib, device, ROWS, WIDTH, grad=grad) for _ in range(2))
    bias, gain = (tensor(lib, device, WIDTH, grad=grad) for _ in range(2))
    weight = tensor(lib, device, WIDTH, WIDTH, grad=grad)
    grad_out = tensor(lib, device, ROWS, WIDTH)
    forward: Call = {
        "add": lambda: x + y,
        "linear": lambda: lib.nn.functional.linear(x, weight, bias),
        "layer_norm": lambda: lib.nn.functional.layer_norm(x, (WIDTH,), gain, bias),
    }[name]
    return (lambda: forward().backward(grad_out)) if grad else forward


def mlp(lib: Any, device: str) -> Call:
    """A training step of a small network: three layers, mean squared error, AdamW."""
    nn = lib.nn
    lib.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).to(device)
    optimizer = lib.optim.AdamW(model.parameters(), lr=1e-3)
    x = tensor(lib, device, ROWS, WIDTH)
    y = tensor(lib, device, ROWS, WIDTH)

    def step() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def shapes_of(key: str) -> Shapes:
    """The parameters of a model of `train_step`."""
    return [tuple(p.shape) for p in STEPS[key][2](ddp).model.parameters()]


PARAMETERS: dict[str, Shapes] = {
    "MLP 64-64-10": shapes_of("small"),
    "MLP 784-1024-1024-10": shapes_of("mlp-sgd"),
    "GPT, 4 layers, d=128": shapes_of("gpt"),
    "200 tensors of 1000": [(1000,)] * 200,
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], int]] = {  # and the bytes that an update moves, a parameter
    "SGD": ("SGD", {"lr": 1e-3}, 12),
    "SGD, momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}, 20),
    "AdamW": ("AdamW", {"lr": 1e-3}, 28),
}


def update(lib: Any, name: str, options: dict[str, Any], shapes: Shapes, buckets: bool = False) -> Call:
    """`optimizer.step` of one library. buckets: gradients lie in flat buckets, as under DataParallel"""
    random = np.random.default_rng(0)
    values = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    params = [lib.tensor(value, requires_grad=True) for value in values]
    if buckets:
        layout = lay_out([list(range(len(values)))[::-1]], shapes, [value.dtype for value in values])
        for p, view in zip(params, FlatBuckets(layout, np.zeros).views, strict=True):
            p.leaf.grad_buffer.bind(view)
    for p, value in zip(params, values, strict=True):
        p.grad = lib.tensor(0.1 * value)
    step: Call = getattr(lib.optim, name)(params, **options).step
    return step


def copy(nbytes: int) -> Call:
    """Reads and writes so many bytes, half of them each."""
    source = np.ones(nbytes // 2, np.uint8)
    target = np.ones_like(source)
    return lambda: np.copyto(target, source)


def rows(group: str, libraries: dict[str, Any], device: str) -> Iterator[tuple[str, float, dict[str, Call]]]:
    """Name, goal, and implementation -> call. The goal is about ours over theirs, pair by pair."""
    if group == "ops":
        for name, grad in itertools.product(("add", "linear", "layer_norm"), (False, True)):
            row = f"{name}, forward{' and backward' if grad else ''}"
            yield row, 1.5, {who: op(lib, device, name, grad) for who, lib in libraries.items()}
        yield "MLP step", 1.5, {who: mlp(lib, device) for who, lib in libraries.items()}
        return
    for (model, shapes), (label, (name, options, nbytes)) in itertools.product(PARAMETERS.items(), OPTIMIZERS.items()):
        calls = {"ours": update(ddp, name, options, shapes), "ours, buckets": update(ddp, name, options, shapes, True)}
        if torch := libraries.get("torch"):
            calls |= {"torch": update(torch, name, options, shapes)}
            calls |= {"torch, fused": update(torch, name, {**options, "fused": True}, shapes)}
        calls["copy"] = copy(nbytes * sum(map(math.prod, shapes)))
        yield f"{model}, {label}", 1.0, calls


def measure(calls: dict[str, Call], wait: Call, rounds: int) -> harness.Rounds:
    """Microseconds of the host for one call, by implementation. wait: until the device is idle"""

    def turn(call: Call, repeats: int) -> float:
        call()
        wait()
        spent = harness.seconds(call, repeats)
        wait()
        return 1e6 * spent

    for call in calls.values():  # kernels are compiled, graphs are captured
        turn(call, 5)
    repeats = max(3, min(MOST, int(1e6 * TURN / max(turn(call, 3) for call in calls.values()))))
    return harness.take_turns({who: lambda call=call: turn(call, repeats) for who, call in calls.items()}, rounds)


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, rounds=40, only=("ops", "optimizer"))
    default = "cuda" if ddp.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default, help="default: cuda if there is a GPU")
    args = parser.parse_args(arguments)
    libraries: dict[str, Any] = {"ours": ddp}
    if harness.has_torch():
        import torch

        torch.set_num_threads(1)
        libraries |= {"torch": torch} if args.device == "cpu" or torch.cuda.is_available() else {}

    def wait() -> None:
        for lib in libraries.values() if args.device != "cpu" else ():
            lib.cuda.synchronize()

    medians: dict[str, dict[str, float]] = {}
    goals = []
    for group in args.only:
        for name, goal, calls in rows(group, libraries, args.device):
            times = measure(calls, wait, args.rounds)
            medians[name] = harness.medians(times)
            cells = [f"{who} {us:.2f}" for who, us in medians[name].items()]
            print(harness.row(name, cells, 38, 25), "us", flush=True)
            for a, b in itertools.permutations(times, 2):
                if a.startswith("ours") and b.startswith("torch"):
                    ratio = harness.median_ratio(times[a], times[b])
                    goals.append(harness.at_most(f"{name}: {a} / {b}", goal, ratio))
    harness.write(args.json, "calls", goals, device=args.device, medians=medians)


if __name__ == "__main__":
    main()
