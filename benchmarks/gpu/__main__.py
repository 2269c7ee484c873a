"""Everything that is promised of GPUs, in one run: correctness first, then each promise beside PyTorch.

    python -m benchmarks.gpu [--rounds 15] [--limit 460] [--only gpt2] [--json FILE]
    python -m benchmarks.gpu --device cpu          # the same on tiny sizes, where there is no GPU: does it run?

Contestants are processes that all train the same weights on the same batch. Their first losses are compared with those
of PyTorch's eager mode; then they take turns, and a ratio is the median over rounds. What fails is a row that says so:
the others go on. Needs CuPy, a GPU and PyTorch with CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu import carrying, sharing
from benchmarks.gpu.rows import PROMISES, contestants, differs, ratio
from benchmarks.gpu.tasks import TASKS
from benchmarks.gpu.turns import ROOT, Contestant, median_ms, take_turns

NAMED = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "nvidia-cudnn-frontend", "mpi4py", "pynccl")
OTHERS = ("loader", "two-ranks")
GRACE = 20.0  # s that the tests have to report, when they are interrupted


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant (default: 15)")
    parser.add_argument("--limit", type=float, default=460, help="seconds in all (default: 460)")
    parser.add_argument("--tests", type=float, default=150, help="seconds for `pytest -m gpu`, 0: none (default: 150)")
    parser.add_argument("--only", action="append", choices=[*TASKS, *OTHERS], help="this alone; several times: these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes (default: cuda)")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results go (default: gpu.json)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    begun = time.monotonic()
    deadline = begun + args.limit
    wanted = args.only or [*TASKS, *OTHERS]
    found: dict[str, Any] = {"benchmark": "gpu", "date": datetime.date.today().isoformat(), **facts(args.device)}

    def keep() -> None:  # what is found is found, whatever becomes of the rest
        found["seconds"] = round(time.monotonic() - begun, 1)
        args.json.write_text(json.dumps(found, indent=1) + "\n")

    print(f"{found['gpu']}, {found['versions']}", flush=True)
    # Before any contestant is there: tests look at the time, and at how much of the GPU's memory is free.
    if args.tests and args.device == "cuda":
        found["tests"] = run_tests(args.tests)
        print(f"pytest -m gpu: {found['tests']['summary']}", *found["tests"]["failed"], sep="\n  ", flush=True)
        keep()
    # All of them compile at once, and wait until it is their turn.
    entered = {
        task: [Contestant(task, name, args.device) for name in contestants(task) if fits(name, args.device)]
        for task in TASKS
        if task in wanted
    }
    try:
        found["tasks"] = {}
        for number, (task, group) in enumerate(entered.items()):
            share = (deadline - time.monotonic()) / (len(entered) - number + 1)
            found["tasks"][task] = compare(task, group, args.rounds, time.monotonic() + share, args.device)
            keep()
    finally:
        for each in (each for group in entered.values() for each in group):
            each.close()
    if "loader" in wanted:
        found["loader"] = guarded(carrying.measure, args.device)
        print(carrying.line(found["loader"]), flush=True)
        keep()
    if "two-ranks" in wanted:
        found["two-ranks"] = guarded(sharing.measure, args.device)
        print(sharing.line(found["two-ranks"]), flush=True)
    found["promises"] = [*summary(found["tasks"])]
    keep()
    print(f"written to {args.json} after {found['seconds']} s")


def fits(name: str, device: str) -> bool:
    """Whether there is such a contestant on this device. Compiling for a CPU takes a compiler, and shows nothing."""
    return device == "cuda" or name in ("ddp", "ddp-parallel", "torch")


def guarded(measure: Any, device: str) -> dict[str, Any]:
    """What is measured, or why it was not."""
    try:
        return dict(measure(device))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def facts(device: str) -> dict[str, Any]:
    """The machine, and the versions of what is on it."""
    versions = {}
    for name in NAMED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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
    return {"gpu": gpu, "python": platform.python_version(), "versions": versions}


def run_tests(limit: float) -> dict[str, Any]:
    """`pytest -m gpu`: how many passed, and what failed with the end of its report.

    Where time runs out it is interrupted, as by Ctrl-C, and tells of the tests it has run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, said = Path(folder) / "report.xml", Path(folder) / "said"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "-p", "no:cacheprovider"]
        with said.open("w") as to:
            pytest = subprocess.Popen(command, cwd=ROOT, stdout=to, stderr=subprocess.STDOUT, start_new_session=True)
        late = ""
        try:
            pytest.wait(limit)
        except subprocess.TimeoutExpired:
            late = f", not finished after {limit:.0f} s"
            pytest.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)  # and whatever it started
        status = pytest.wait()
        if not report.exists():
            return {"summary": f"exit code {status}{late}: {said.read_text()[-500:]}", "failed": {}}
        cases = [*ElementTree.parse(report).iter("testcase")]
    failed = {}
    for case in cases:
        for trouble in (*case.iter("failure"), *case.iter("error")):
            failed[f"{case.get('classname')}::{case.get('name')}"] = (trouble.text or "")[-2000:]
    skipped = sum(case.find("skipped") is not None for case in cases)
    summary = f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped{late}"
    return {"summary": summary, "failed": failed}


def compare(task: str, group: list[Contestant], rounds: int, deadline: float, device: str) -> dict[str, Any]:
    """The losses and times of a task's contestants, those whose losses are right."""
    items = (TASKS[task] if device == "cuda" else TASKS[task].small()).items
    troubles: dict[str, str] = {}
    for each in group:
        trouble = each.ready(deadline)
        if trouble is None and each is not group[0] and "losses" in group[0].said:
            trouble = differs(each.said["losses"], group[0].said["losses"])
        if trouble is not None:
            troubles[each.name] = trouble
            print(f"{task}: {each.name} is out: {trouble}", flush=True)
    able = [each for each in group if each.name not in troubles]
    times, gone = take_turns(able, rounds, deadline)
    for name, trouble in gone.items():
        troubles[name] = trouble
        print(f"{task}: {name} is out: {trouble}", flush=True)
    able = [each for each in able if each.name in times]
    print(f"\n{task:<12} {'ms a step':>10} {TASKS[task].unit + '/s':>12} {'peak MiB':>9}")
    for each in able:
        milliseconds = median_ms(times[each.name])
        peak = f"{each.said['peak'] / 2**20:9.0f}" if each.said["peak"] else ""
        print(f"{each.name:<12} {milliseconds:10.3f} {1000 * items / milliseconds:12.0f} {peak}", flush=True)
    losses = {each.name: each.said["losses"] for each in able}
    peaks = {each.name: each.said["peak"] for each in able}
    return {"items": items, "seconds": times, "losses": losses, "peak": peaks, "out": troubles}


def summary(tasks: dict[str, Any]) -> Any:
    """Each promise with its ratio, printed as it goes."""
    print(f"\n{'promise':<56} {'ratio':>6} {'goal':>5}")
    for promise in PROMISES:
        if promise.task in tasks:
            got = ratio(promise, tasks[promise.task]["seconds"])
            kept = None if got is None else promise.met(got)
            shown = "     -" if got is None else f"{got:6.2f}"
            said = {True: "met", False: "missed", None: "not measured"}[kept]
            print(f"{promise.label:<56} {shown} {promise.goal:5.2f} {said}", flush=True)
            yield {"what": promise.label, "goal": promise.goal, "ratio": got, "met": kept}


if __name__ == "__main__":
    main()
