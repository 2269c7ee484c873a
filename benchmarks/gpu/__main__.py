"""Everything that is promised of GPUs, in one run: each promise beside PyTorch.

    python -m benchmarks.gpu.first                 # run this first: does all work? It ends with these tasks
    python -m benchmarks.gpu [--rounds 15] [--limit 560] [--only gpt2,loader] [--json FILE]
    python -m benchmarks.gpu --device cpu          # the same on tiny sizes, where there is no GPU: does it run?

Implementations are processes that all train the same weights on the same batch. First all compile at once. Then, task
by task, each warms up alone, and its first losses are compared with those of PyTorch's eager mode; then they take
turns, and a ratio is the median over rounds. A failure becomes a row that says so, and the others go on. Needs CuPy, a
GPU and PyTorch with CUDA; without cuDNN, what it computes is not measured.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.gpu import h2d_overlap
from benchmarks.gpu.tasks import TASKS
from benchmarks.harness import Goal, Rounds, at_least, at_most, median_ratio
from benchmarks.worker_pool import WorkerError, WorkerPool

COMPILING = 150.0  # s
WARMING = 60.0  # s that imports, warm-up and the first losses may take, of each implementation
TURN = 0.25  # s, about
PATIENCE = 60.0  # s that a turn may take
NO_CUDNN = "cuDNN is missing, without which a GPU takes much slower ways: pip install nvidia-cudnn-frontend==1.26.0"
# Task, implementations of ours (the fastest counts), baseline; at_least: of its speed, at_most: of its time; the limit.
PROMISES = (
    ("gpt2", ("ddp", "ddp-graph"), "torch", at_least, 1.0),
    ("gpt2", ("ddp", "ddp-graph"), "torch-compile", at_least, 0.9),
    ("small-gpt", ("ddp-graph",), "torch", at_least, 3.0),
    ("small-gpt", ("ddp-graph",), "torch-graphs", at_least, 1.0),
    ("resnet18", ("ddp", "ddp-graph"), "torch", at_least, 1.0),
    # A world of one communicates nothing: what is measured is what hooks and buckets cost the step.
    ("gpt2", ("ddp-parallel",), "ddp", at_most, 1.03),
)
TIGHT = 0.005  # the tolerance of the first losses, relative, and absolute below 1
STEPS = 3  # the losses of so many steps are the first
NOISE = 3.0  # later ones may differ by as many times what two runs of PyTorch differ by


def implementations(task: str) -> list[str]:
    """All that a promise about this task names, PyTorch's eager mode first: the others are compared with it."""
    names = ["torch"]
    for promised, ours, baseline, *_ in PROMISES:
        if promised == task:
            names += [*ours, baseline]
    return list(dict.fromkeys(names))


def goals(tasks: Mapping[str, Rounds]) -> Iterator[Goal]:
    """tasks: of each implementation the seconds of a step, one number a round."""
    for task, ours, baseline, promise, limit in PROMISES:
        if task in tasks:
            rounds = tasks[task]
            measured = None
            able = [name for name in ours if rounds.get(name)]
            if able and rounds.get(baseline):
                best = min(able, key=lambda name: statistics.median(rounds[name]))
                pair = rounds[best], rounds[baseline]
                measured = median_ratio(*pair) if promise is at_most else median_ratio(*reversed(pair))
            what = "time" if promise is at_most else "speed"
            yield promise(f"{task}: {what}, {' or '.join(ours)} over {baseline}", limit, measured)


def differs(losses: Sequence[float], expected: Sequence[float], again: Sequence[float]) -> str | None:
    """How the losses of the first steps differ from those of PyTorch's eager mode; None where they agree.

    again: PyTorch's own losses, the samples of each batch in another order: the same but for rounding, which training
    makes larger with every step
    """
    noise = 0.0
    for step, (ours, torch, repeated) in enumerate(zip(losses, expected, again, strict=True)):
        noise = max(noise, abs(torch - repeated))
        allowed = max(TIGHT * max(1.0, abs(torch)), NOISE * noise if step >= STEPS else 0.0)
        if not abs(ours - torch) <= allowed:
            return f"the loss of step {step} is {ours:.4f}, and PyTorch's {torch:.4f}; {allowed:.4f} may differ"
    return None


class Implementation(WorkerPool):
    """One process of `benchmarks.gpu.worker`. warm_up: its first losses and peak memory, once it has warmed up"""

    def __init__(self, task: str, library: str, device: str) -> None:
        self.library = library
        self.warm_up: dict[str, Any] = {}
        command = [sys.executable, "-m", "benchmarks.gpu.worker"]
        commands = lambda path: [[*command, path, task, library, device]]  # noqa: E731
        super().__init__(commands, name=f"{task} {library}", patience=0.1)  # it may be in the middle of a step

    def answer(self, limit: float, do: str, **arguments: Any) -> Any:
        """What it answers within so many seconds. Raises: WorkerError"""
        self.send(do, **arguments)
        return self.receive(max(limit, 0.01))[0]


def compile_all(group: Sequence[Implementation], deadline: float) -> dict[str, str]:
    """Has all compile at the same time, and ends them. Returns: why some could not; they will try once more."""
    failed = {}
    for worker in group:
        worker.send("compile")
    for worker in group:
        try:
            worker.receive(max(deadline - time.monotonic(), 0.01))
        except WorkerError as error:
            failed[worker.name] = str(error)
        finally:
            worker.close()
    return failed


def take_turns(group: Sequence[Any], rounds: int, deadline: float) -> tuple[Rounds, dict[str, str]]:
    """Times of all implementations, in fewer rounds where time runs out; and of those that failed, why."""
    repeats: dict[str, int] = {}
    times: Rounds = {worker.library: [] for worker in group}
    failed: dict[str, str] = {}
    for number in range(rounds):
        if number >= 3 and time.monotonic() > deadline:
            break
        for worker in [worker for worker in group if worker.library not in failed]:
            try:
                if worker.library not in repeats:
                    elapsed = worker.answer(PATIENCE, "steps", count=3)
                    repeats[worker.library] = max(1, int(TURN / max(elapsed, 1e-6)))
                times[worker.library].append(worker.answer(PATIENCE, "steps", count=repeats[worker.library]))
            except WorkerError as error:
                failed[worker.library] = str(error)
                del times[worker.library]
    return times, failed


def compare(task: str, group: Sequence[Implementation], rounds: int, deadline: float, device: str) -> dict[str, Any]:
    """The losses and times of a task's implementations, those whose losses are right."""
    failed: dict[str, str] = {}
    reference = group[0]
    for worker in group:
        try:
            worker.warm_up = worker.answer(WARMING, "warm_up")
            if worker is not reference and reference.warm_up:
                why = differs(worker.warm_up["losses"], reference.warm_up["losses"], reference.warm_up["again"])
                failed |= {worker.library: why} if why else {}
        except WorkerError as error:
            failed[worker.library] = str(error)
    times, failed_later = take_turns([worker for worker in group if worker.library not in failed], rounds, deadline)
    failed |= failed_later
    for name, why in failed.items():
        print(f"{task}: {name} is out: {why}", flush=True)
    harness.show(f"{task}, ms a step", times, 1e3)
    warm_ups = {worker.library: worker.warm_up for worker in group if worker.library in times}
    items = (TASKS[task] if device == "cuda" else TASKS[task].small()).items
    return {"items": items, "seconds": times, "found": warm_ups, "out": failed}


def fits(name: str, device: str) -> bool:
    """Whether the implementation runs on this device. Compiling for a CPU takes a compiler, and shows nothing."""
    return device == "cuda" or name in ("ddp", "ddp-parallel", "torch")


def about(device: str) -> dict[str, Any]:
    """The GPU, and the versions that a worker of ours measures with. Raises: SystemExit if there is no GPU."""
    gpu = None
    if device == "cuda":
        if shutil.which("nvidia-smi") is None:
            sys.exit("benchmarks.gpu: there is no nvidia-smi, and so no GPU; --device cpu runs tiny sizes")
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    with Implementation("small-gpt", "ddp", device) as worker:
        return {"gpu": gpu, **worker.answer(WARMING, "versions")}


def main() -> None:
    parser = harness.parser(__doc__, rounds=15, only=[*TASKS, "loader"])
    parser.add_argument("--limit", type=float, default=560, help="seconds for all tasks together (default: 560)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes (default: cuda)")
    parser.set_defaults(json=Path("gpu.json"))
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    results: dict[str, Any] = {**about(args.device), "tasks": {}}
    print(f"{results['gpu']}, cuDNN {results['cudnn']}, {results['versions']}", flush=True)

    def keep(promised: Sequence[Goal] = ()) -> None:  # what is found is found, whatever becomes of the rest
        harness.write(args.json, "gpu", promised, **results)

    named = {task: implementations(task) for task in TASKS if task in args.only}
    for task in [task for task in named if args.device == "cuda" and TASKS[task].cudnn and results["cudnn"] is None]:
        print(f"{task} is not measured: {NO_CUDNN}", flush=True)
        results["tasks"][task] = {"seconds": {}, "out": dict.fromkeys(named.pop(task), NO_CUDNN)}
    if args.device == "cuda":
        compiling = [Implementation(task, name, "cuda") for task in named for name in named[task]]
        results["compiling"] = compile_all(compiling, min(deadline, time.monotonic() + COMPILING))
    for number, (task, names) in enumerate(named.items()):
        with ExitStack() as stack:
            able = [name for name in names if fits(name, args.device)]
            group = [stack.enter_context(Implementation(task, name, args.device)) for name in able]
            share = (deadline - time.monotonic()) / (len(named) - number + ("loader" in args.only))
            results["tasks"][task] = compare(task, group, args.rounds, time.monotonic() + share, args.device)
        keep()
    promised = [*goals({task: row["seconds"] for task, row in results["tasks"].items()})]
    if "loader" in args.only:
        try:
            rates = results["loader"] = h2d_overlap.measure(args.device)
            harness.show("from a worker to the GPU, GB/s", rates, 1e-9)
            ratio = median_ratio(rates["loader"], rates["copy"])
        except Exception as error:
            print(f"loader: {type(error).__name__}: {error}", flush=True)
            ratio = None
        promised.append(at_least("loader: speed over a bare copy from pinned memory", h2d_overlap.GOAL, ratio))
    keep(promised)
    out = [name for task in results["tasks"].values() for name in task["out"]]
    if out or ("loader" in args.only and "loader" not in results):
        sys.exit("benchmarks.gpu: not everything could be measured, for the reasons above")


if __name__ == "__main__":
    main()
