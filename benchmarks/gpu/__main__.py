"""Everything that is promised of GPUs, in one run: each promise beside PyTorch.

    python -m benchmarks.gpu.correctness           # first, and apart: the tests that need a GPU
    python -m benchmarks.gpu [--rounds 15] [--limit 560] [--only gpt2,loader] [--json FILE]
    python -m benchmarks.gpu --device cpu          # the same on tiny sizes, where there is no GPU: does it run?

Implementations are processes that all train the same weights on the same batch. First all compile at once. Then, task
by task, each warms up alone, and its first losses are compared with those of PyTorch's eager mode; then they take
turns, and a ratio is the median over rounds. What fails is a row that says so: the others go on. Needs CuPy, a GPU and
PyTorch with CUDA; without cuDNN, what it computes is not measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.gpu import h2d_overlap, sharing
from benchmarks.gpu.rows import PROMISES, differs, implementations, ratio
from benchmarks.gpu.tasks import TASKS
from benchmarks.gpu.turns import WARMING, Implementation, compile_all, median_ms, take_turns
from benchmarks.worker_pool import WorkerError
from ddp.backends import cudnn

OTHERS: dict[str, Any] = {"loader": h2d_overlap, "two-ranks": sharing}
COMPILING = 150.0  # s
NO_CUDNN = "cuDNN is missing, without which a GPU takes much slower ways: pip install nvidia-cudnn-frontend==1.26.0"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__, rounds=15, only=[*TASKS, *OTHERS])
    parser.add_argument("--limit", type=float, default=560, help="seconds in all (default: 560)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes (default: cuda)")
    parser.set_defaults(json=Path("gpu.json"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    begun = time.monotonic()
    deadline = begun + args.limit
    wanted = args.only
    found: dict[str, Any] = {"benchmark": "gpu", "date": datetime.date.today().isoformat(), **facts(args.device)}

    def keep() -> None:  # what is found is found, whatever becomes of the rest
        found["seconds"] = round(time.monotonic() - begun, 1)
        args.json.write_text(json.dumps(found, indent=1) + "\n")

    print(f"{found['gpu']}, cuDNN {found['cudnn']}, {found['versions']}", flush=True)
    found["tasks"] = {}
    named = {
        task: [name for name in implementations(task) if fits(name, args.device)] for task in TASKS if task in wanted
    }
    for task in [task for task in named if args.device == "cuda" and TASKS[task].cudnn and found["cudnn"] is None]:
        print(f"{task} is not measured: {NO_CUDNN}", flush=True)
        found["tasks"][task] = {"seconds": {}, "out": dict.fromkeys(named.pop(task), NO_CUDNN)}
    if args.device == "cuda":
        compiling = [Implementation(task, name, "cuda") for task in named for name in named[task]]
        found["compiling"] = compile_all(compiling, min(deadline, time.monotonic() + COMPILING))
    for number, (task, names) in enumerate(named.items()):
        group = [Implementation(task, name, args.device) for name in names]
        try:
            share = (deadline - time.monotonic()) / (len(named) - number + 1)
            found["tasks"][task] = compare(task, group, args.rounds, time.monotonic() + share, args.device)
        finally:
            for each in group:
                each.close()
        keep()
    for name, other in OTHERS.items():
        if name in wanted:
            found[name] = guarded(other.measure, args.device)
            print(other.line(found[name]), flush=True)
            keep()
    found["promises"] = [*summary(found["tasks"])]
    keep()
    print(f"written to {args.json} after {found['seconds']} s")


def fits(name: str, device: str) -> bool:
    """Whether the implementation runs on this device. Compiling for a CPU takes a compiler, and shows nothing."""
    return device == "cuda" or name in ("ddp", "ddp-parallel", "torch", "torch-parallel")


def guarded(measure: Any, device: str) -> dict[str, Any]:
    """What is measured, or why it was not."""
    try:
        return dict(measure(device))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def facts(device: str) -> dict[str, Any]:
    """The machine, and the versions of what is on it."""
    gpu = f"no GPU: {platform.machine()}"
    if device == "cuda":
        asked = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
        try:
            done = subprocess.run(
                ["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True, timeout=30
            )
        except FileNotFoundError:
            sys.exit("benchmarks.gpu: there is no nvidia-smi, and so no GPU; --device cpu runs tiny sizes")
        gpu = done.stdout.strip()
    version = cudnn.version() if device == "cuda" else None
    return {"gpu": gpu, "cudnn": version, "versions": harness.versions()}


def compare(task: str, group: list[Implementation], rounds: int, deadline: float, device: str) -> dict[str, Any]:
    """The losses and times of a task's implementations, those whose losses are right."""
    items = (TASKS[task] if device == "cuda" else TASKS[task].small()).items
    failed: dict[str, str] = {}
    reference = group[0]
    for each in group:
        try:
            each.ready(time.monotonic() + WARMING)
            if each is not reference and reference.found:
                why = differs(each.found["losses"], reference.found["losses"], reference.found["again"])
                failed |= {each.name: why} if why else {}
        except WorkerError as error:
            failed[each.name] = str(error)
    times, failed_later = take_turns([each for each in group if each.name not in failed], rounds, deadline)
    failed |= failed_later
    for name, why in failed.items():
        print(f"{task}: {name} is out: {why}", flush=True)
    able = [each for each in group if each.name in times]
    print(f"\n{task:<14} {'ms a step':>10} {TASKS[task].unit + '/s':>12} {'peak MiB':>9} {'reserved':>9}")
    for each in able:
        milliseconds = median_ms(times[each.name])
        peaks = "".join(f"{nbytes / 2**20:9.0f} " for nbytes in each.found["peaks"].values())
        print(f"{each.name:<14} {milliseconds:10.3f} {1000 * items / milliseconds:12.0f} {peaks}", flush=True)
    losses = {each.name: each.found["losses"] for each in able}
    peaks = {each.name: each.found["peaks"] for each in able}
    return {"items": items, "seconds": times, "losses": losses, "peaks": peaks, "out": failed}


def summary(tasks: dict[str, Any]) -> Any:
    """Each promise with its ratio, printed as it goes."""
    print(f"\n{'promise':<80} {'ratio':>6} {'goal':>5}")
    for promise in PROMISES:
        if promise.task in tasks:
            got = ratio(promise, tasks[promise.task]["seconds"])
            kept = None if got is None else promise.met(got)
            shown = "     -" if got is None else f"{got:6.2f}"
            goal = "    -" if promise.goal is None else f"{promise.goal:5.2f}"
            word = "not measured" if got is None else {True: "met", False: "missed", None: "for comparison"}[kept]
            print(f"{promise.label:<80} {shown} {goal} {word}", flush=True)
            yield {"what": promise.label, "goal": promise.goal, "ratio": got, "met": kept}


if __name__ == "__main__":
    main()
