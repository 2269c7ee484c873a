"""What an op costs the host: ours against PyTorch's eager mode on the same device, and a step as a graph beside theirs.

    python -m benchmarks.launch [--device cuda|cpu] [--rounds 40] [--json FILE]

Sizes are so small that a GPU is done before the host has launched the next op: what is timed is the host's part, by
launching many without waiting. In each round every implementation has its turn on the same numbers, and ratios are
medians over rounds. On the CPU an op's own work is in the time of both. Goals: eager at most 1.5 times PyTorch's, and a
graphed step at most 1.0 times theirs (`torch.cuda.graph` over the whole step). Without PyTorch, ours alone is timed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np

import ddp
from benchmarks import harness

ROWS, WIDTH = 8, 32
TURN = 5e-3  # s
MOST = 500  # calls a turn: a stream takes about a thousand launches before it makes the host wait
EAGER, GRAPHED = 1.5, 1.0  # goals, times PyTorch's

Call = Callable[[], Any]
Calls = dict[str, Call]


class Library:
    """One of the two libraries, which have the same names. lib: `ddp` or `torch`"""

    def __init__(self, lib: Any, device: str) -> None:
        self.lib, self.device = lib, device
        self.F = lib.nn.functional

    def tensor(self, *shape: int, grad: bool = False) -> Any:
        """The same numbers in both."""
        values = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
        x = self.lib.tensor(values, device=self.device)
        return x.requires_grad_() if grad else x

    def wait(self) -> None:
        """Until the device is done."""
        if self.device != "cpu":
            self.lib.cuda.synchronize()


def op(of: Library, name: str, grad: bool) -> Call:
    """One op on small tensors. grad: with its backward, into gradients that are there"""
    x, y = of.tensor(ROWS, WIDTH, grad=grad), of.tensor(ROWS, WIDTH, grad=grad)
    weight, bias, gain = of.tensor(WIDTH, WIDTH, grad=grad), of.tensor(WIDTH, grad=grad), of.tensor(WIDTH, grad=grad)
    calls: dict[str, Call] = {
        "add": lambda: x + y,
        "linear": lambda: of.F.linear(x, weight, bias),
        "layer_norm": lambda: of.F.layer_norm(x, (WIDTH,), gain, bias),
    }
    forward = calls[name]
    if not grad:
        return forward
    slope = of.tensor(ROWS, WIDTH)
    return lambda: forward().backward(slope)


def mlp(of: Library) -> Call:
    """A training step of a small network: three layers, mean squared error, AdamW."""
    nn = of.lib.nn
    of.lib.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).to(of.device)
    more = {"capturable": True} if of.lib is not ddp and of.device != "cpu" else {}
    optimizer = of.lib.optim.AdamW(model.parameters(), lr=1e-3, **more)
    x, y = of.tensor(ROWS, WIDTH), of.tensor(ROWS, WIDTH)

    def step() -> Any:
        optimizer.zero_grad()
        loss = of.F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def graphed(of: Library) -> Call:
    """The same step as a CUDA graph."""
    step = mlp(of)
    if of.lib is ddp:
        return ddp.cuda.graphed_step(step)
    side = of.lib.cuda.Stream()
    side.wait_stream(of.lib.cuda.current_stream())
    with of.lib.cuda.stream(side):
        for _ in range(3):
            step()
    of.lib.cuda.current_stream().wait_stream(side)
    graph = of.lib.cuda.CUDAGraph()
    with of.lib.cuda.graph(graph):
        step()
    return graph.replay


def rows(libraries: dict[str, Library], device: str) -> dict[str, Calls]:
    """What is timed: name -> library -> call."""
    found: dict[str, Calls] = {}
    for name in ("add", "linear", "layer_norm"):
        found[f"{name}, forward"] = {who: op(of, name, False) for who, of in libraries.items()}
        found[f"{name}, forward and backward"] = {who: op(of, name, True) for who, of in libraries.items()}
    found["MLP step"] = {who: mlp(of) for who, of in libraries.items()}
    if device != "cpu":
        found["MLP step, graphed"] = {who: graphed(of) for who, of in libraries.items()}
    return found


def turn(call: Call, calls: int, wait: Call) -> float:
    """Microseconds of the host for one of so many calls. The device is idle when it begins."""
    call()
    wait()
    spent = harness.seconds(call, calls)
    wait()
    return 1e6 * spent


def measure(row: Calls, waits: dict[str, Call], rounds: int) -> dict[str, float]:
    """Medians in microseconds, and the median of the ratios where there are two."""
    for who, call in row.items():  # kernels are compiled, graphs are captured
        for _ in range(6):
            call()
        waits[who]()
    slowest = max(turn(call, 3, waits[who]) for who, call in row.items())
    calls = max(3, min(MOST, int(1e6 * TURN / slowest)))
    turns = {who: lambda who=who, call=call: turn(call, calls, waits[who]) for who, call in row.items()}
    times = harness.take_turns(turns, rounds)
    found = harness.medians(times)
    if len(row) == 2:
        found["ours/torch"] = harness.over(times["ours"], times["torch"])
    return found


def found_libraries(device: str) -> dict[str, Library]:
    """The libraries that can be measured on this device."""
    found = {"ours": Library(ddp, device)}
    if harness.has_torch():
        import torch

        if device == "cpu":
            torch.set_num_threads(1)
        if device == "cpu" or torch.cuda.is_available():
            found["torch"] = Library(torch, device)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, rounds=40)
    default = "cuda" if ddp.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default, help="default: cuda where there is one")
    args = parser.parse_args(arguments)
    libraries = found_libraries(args.device)
    waits = {who: of.wait for who, of in libraries.items()}
    medians: dict[str, dict[str, float]] = {}
    goals = []
    print(f"{'us of the host':<34}" + "".join(f"{who:>10}" for who in libraries), flush=True)
    for name, row in rows(libraries, args.device).items():
        found = medians[name] = measure(row, waits, args.rounds)
        print(f"{name:<34}" + "".join(f"{found[who]:>10.2f}" for who in libraries), flush=True)
        goals.append(harness.at_most(name, GRAPHED if name.endswith("graphed") else EAGER, found.get("ours/torch")))
    name = ddp.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    harness.write(args.json, "launch", goals, device=args.device, name=name, medians=medians)


if __name__ == "__main__":
    main()
