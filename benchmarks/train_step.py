"""One training step (forward, backward, update) against PyTorch's, on one core or several: time and peak memory.

    python -m benchmarks.train_step [--rounds 40] [--only gpt] [--cores 0,1] [--json FILE]

The models are written once, for `ddp` and `torch` alike. Each library has a process of its own, as it has for its
users; rounds alternate between the two on the same cores, so that both see the same machine, and the ratio is the
median over rounds. Peak memory is that of a fresh process over what it had after its imports. Needs PyTorch
(`pip install '.[bench]'`).

The floor is what a step would take if it were nothing but its products, at the speed of a large product of these
cores, and its update, which reads and writes 28 bytes a parameter (Adam) or 12 (SGD), at the bandwidth of a copy;
"/ floor" is how far our step is from it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, models
from benchmarks.worker_pool import WorkerPool

Step = Callable[[], float]  # one step; returns the loss


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained. optimizer: makes one for a library and a model; x, y: a batch and what it should give."""

    model: Any
    optimizer: Callable[[Any, Any], Any]
    x: Any
    y: Any


def loss_of(t: Any, model: Any, task: Task) -> Any:
    out = model(task.x)
    return t.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), task.y)


def step_of(optimizer: Any, loss_of: Callable[[], Any]) -> Step:
    """A step of training. loss_of: runs the forward"""

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def train(t: Any, task: Task) -> Step:
    return step_of(task.optimizer(t, task.model), lambda: loss_of(t, task.model, task))


def floats(t: Any, *shape: int, seed: int = 0) -> Any:
    return t.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def integers(t: Any, high: int, *shape: int, seed: int = 0) -> Any:
    return t.from_numpy(np.random.default_rng(seed + 1).integers(0, high, shape))


def mlp(t: Any, widths: tuple[int, ...], batch: int, optimizer: Callable[[Any, Any], Any], seed: int = 0) -> Task:
    layers: list[Any] = []
    for n, m in itertools.pairwise(widths):
        layers += [t.nn.Linear(n, m), t.nn.ReLU()]
    model = t.nn.Sequential(*layers[:-1])
    x = floats(t, batch, widths[0], seed=seed)
    y = integers(t, widths[-1], batch, seed=seed)
    return Task(model=model, optimizer=optimizer, x=x, y=y)


def sgd(t: Any, model: Any) -> Any:
    return t.optim.SGD(model.parameters(), lr=0.01)


def adamw(t: Any, model: Any) -> Any:
    return t.optim.AdamW(model.parameters(), lr=3e-4)


def cnn(t: Any) -> Task:
    nn = t.nn
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    x = floats(t, 64, 1, 28, 28)
    y = integers(t, 10, 64)
    return Task(model=model, optimizer=sgd, x=x, y=y)


GPT = {"vocabulary": 96, "layers": 4, "width": 128, "heads": 4, "length": 128}
GPT2 = {"vocabulary": 50257, "layers": 12, "width": 768, "heads": 12, "length": 256}


def gpt(t: Any, sizes: dict[str, int] = GPT, batch: int = 16, seed: int = 0) -> Task:
    vocabulary = sizes["vocabulary"]
    length = sizes["length"]
    x = integers(t, vocabulary, batch, length, seed=seed)
    y = integers(t, vocabulary, batch * length, seed=seed)
    return Task(model=models.gpt(t, **sizes), optimizer=adamw, x=x, y=y)


STEPS: dict[str, tuple[str, float, Callable[[Any], Task]]] = {
    "small": ("MLP 64-64-10, batch 32, SGD", 0.7, lambda t: mlp(t, (64, 64, 10), 32, sgd)),
    "mlp-sgd": ("MLP 784-1024-1024-10, batch 128, SGD", 0.95, lambda t: mlp(t, (784, 1024, 1024, 10), 128, sgd)),
    "mlp-adamw": ("MLP 784-1024-1024-10, batch 128, AdamW", 0.7, lambda t: mlp(t, (784, 1024, 1024, 10), 128, adamw)),
    "gpt": ("GPT 4 layers, d=128, 4 heads, T=128, batch 16, AdamW", 0.85, gpt),
    "gpt2": ("GPT-2 124M, T=256, batch 1, AdamW", 0.7, lambda t: gpt(t, GPT2, 1)),
    "cnn": ("CNN 1-32-64, 2 linear, batch 64, 28x28, SGD", 0.7, cnn),
    "deep": ("MLP of 100 layers of 64, batch 512, SGD", 0.9, lambda t: mlp(t, (64,) * 101, 512, sgd)),
}
LIBRARIES = ("ddp", "torch")
UPDATE_BYTES = {"Adam": 28, "AdamW": 28, "SGD": 12}  # that an update reads and writes, a float32 parameter


def resident(field: str) -> int:
    """KiB that /proc/self/status names."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0])


class Worker:
    """Trains with one library, on request."""

    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.t = importlib.import_module(name)
        self._losses: list[float] = []

    def make_step(self) -> Step:
        return train(self.t, STEPS[self.key][2](self.t))

    def first(self) -> int:
        """Makes five steps; the KiB that they took at most over what the process had after its imports."""
        t = self.t
        t.nn.Linear, t.optim.SGD  # noqa: B018  # ddp imports these when they are first used
        x = t.ones(2, 2)
        float((x @ x).sum())  # the first product sets up the library's threads and buffers
        before = resident("VmRSS")
        self._step = self.make_step()
        self._losses = [self._step() for _ in range(5)]
        return resident("VmHWM") - before

    def losses(self) -> list[float]:
        """Those of the first steps."""
        return self._losses

    def steps(self, repeats: int) -> float:
        """Seconds of one of so many steps."""
        time.sleep(0.05)  # for so long the other library's idle threads may keep a core busy
        return harness.seconds(self._step, repeats)

    def work(self) -> dict[str, float]:
        """The FLOP of a step's products and the bytes of its updates. For the worker of PyTorch, which counts."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.flop_counter import FlopCounterMode

        update_bytes = 0

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            nonlocal update_bytes
            parameters = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            update_bytes += UPDATE_BYTES[type(optimizer).__name__] * parameters

        counter = FlopCounterMode(display=False)
        register_optimizer_step_post_hook(count)  # for good: this is the last that the worker is asked for
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the flags, which say something of Intel's GPUs
            # Without oneDNN an LSTM is made of products that are counted, too.
            with self.t.backends.mkldnn.flags(enabled=False), counter:
                self._step()
        flop = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
        # The backward of a convolution has two of the forward; what is counted there ignores groups.
        flop["aten.convolution_backward"] = 2 * flop.get("aten.convolution", 0)
        return {"flop": float(sum(flop.values())), "update_bytes": float(update_bytes)}

    def speeds(self) -> dict[str, float]:
        """FLOP/s of a product of 1024x1024 float32 and bytes/s of a copy, read and written: the best of several."""
        x = np.ones((1024, 1024), np.float32)
        out = np.empty_like(x)
        source = np.ones(1 << 24, np.float32)
        target = np.ones_like(source)
        product = min(harness.seconds(lambda: np.matmul(x, x, out=out)) for _ in range(10))
        copy = min(harness.seconds(lambda: np.copyto(target, source)) for _ in range(5))
        return {"flop": 2 * 1024**3 / product, "bytes": 2 * source.nbytes / copy}


def start(key: str, library: str, module: str = "train_step") -> WorkerPool:
    """A process of its own for one library. module: whose `Worker` runs in it"""
    code = f"import sys; from benchmarks import {module}, worker_pool as pool; "
    code += f"pool.serve(sys.argv[1], {module}.Worker({key!r}, {library!r}))"
    count = str(len(os.sched_getaffinity(0)))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), count)
    return WorkerPool(lambda path: [[sys.executable, "-c", code, path]], name=library, **threads)


def take_turns(pools: dict[str, WorkerPool], rounds: int) -> dict[str, Any]:
    """The times of both in seconds, a round each in turn, and the median of the rounds' ratios."""
    taken = max(pool.request("steps", repeats=3)[0] for pool in pools.values())
    repeats = max(1, int(0.05 / taken))  # a round takes long enough for the clock
    calls = {name: lambda pool=pool: pool.request("steps", repeats=repeats)[0] for name, pool in pools.items()}
    times = harness.take_turns(calls, rounds, warmup=0)
    return {"seconds": times, "ratio": harness.median_ratio(times["ddp"], times["torch"])}


def measure_floor(pools: dict[str, WorkerPool]) -> dict[str, Any]:
    """The seconds below which no step of these products and this update goes, and what they come from."""
    speeds = pools["ddp"].request("speeds")[0]
    work = pools["torch"].request("work")[0]
    seconds = work["flop"] / speeds["flop"] + work["update_bytes"] / speeds["bytes"]
    return {"speeds": speeds, "work": work, "floor_seconds": seconds}


def compare(key: str, rounds: int) -> dict[str, Any]:
    """The times of both in turns, their peaks in KiB, and the floor."""
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(start(key, name)) for name in LIBRARIES}
        peaks = {name: pool.request("first")[0] for name, pool in pools.items()}
        return {**take_turns(pools, rounds), "peak_kib": peaks, **measure_floor(pools)}


HEAD = harness.row("step", ("ours", "torch", "ratio", "goal", "peak", "torch", "ratio"), 58)
FLOOR_HEAD = harness.row("", ("floor", "/ floor"), 0)


def describe(label: str, goal: float, result: dict[str, Any]) -> str:
    """The line of the table for a result of `compare`."""
    ours, torch = (1000 * value for value in harness.medians(result["seconds"]).values())
    our_peak, torch_peak = (value / 1024 for value in result["peak_kib"].values())
    cells = [f"{ours:.2f} ms", f"{torch:.2f} ms", f"{result['ratio']:.2f}", f"{goal:.2f}"]
    cells += [f"{our_peak:.1f} MiB", f"{torch_peak:.1f} MiB", f"{our_peak / torch_peak:.2f}"]
    if "floor_seconds" in result:
        floor = 1000 * result["floor_seconds"]
        cells += [f"{floor:.2f} ms", f"{ours / floor:.2f}"]
    return harness.row(label, cells, 58)


def main() -> None:
    parser = harness.parser(__doc__, rounds=40, only=STEPS)
    parser.add_argument("--cores", default="0", help="cores to run on, one thread per core: 0,1 (default: 0)")
    args = parser.parse_args()
    os.sched_setaffinity(0, map(int, args.cores.split(",")))
    print(HEAD + FLOOR_HEAD)
    rows = {}
    for key in args.only:
        label, goal, _ = STEPS[key]
        result = compare(key, args.rounds)
        rows[key] = {"label": label, "goal": goal, **result}
        print(describe(label, goal, result), flush=True)
    harness.write(args.json, "train_step", rows=rows)


if __name__ == "__main__":
    main()
