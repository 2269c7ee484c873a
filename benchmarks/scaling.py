"""Twice the ranks, twice the samples, the same time? One rank and two on this machine, a core each.

    python benchmarks/scaling.py [--rounds 15] [--only gpt] [--json FILE]

Weak scaling: every rank has a batch of the same size, so that a step on two ranks should take as long as one on one.
Efficiency is the time of a bare net's step in one process, over that of a step under data parallelism on two ranks.
Part of what is missing is no library's fault: two ranks share caches and memory. So bare nets on both cores at once,
without any communication, are shown too, and PyTorch's DistributedDataParallel with gloo trains in the same rounds:
each contestant has its turn, while all others wait (`trainee.py`). And what DataParallel costs where there is nothing
to reduce: one rank, beside the bare net in the same process.

Goals are printed, never asserted: they are for a machine with two cores that nobody else uses. Needs PyTorch for its
rival (`pip install '.[bench]'`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

from benchmarks.overlap import Goal, show_goals  # noqa: E402
from benchmarks.trainee import TASKS  # noqa: E402
from benchmarks.troupe import Troupe, over  # noqa: E402

TURN = 0.3  # s, if three steps do not take longer
OPTIONS: dict[str, dict[str, Any] | None] = {"bare": None, "wrapped": {}}
NAMES = {"ddp": "ours", "torch": "PyTorch"}
Rounds = dict[str, list[float]]  # "bare 1" → seconds of a step, one number a round


def measure(task: str, rounds: int, steps: int | None, troupes: list[Troupe]) -> dict[str, Any]:
    """All contestants' turns: library → "bare 1", "wrapped 2", … → seconds of the slowest rank's step."""
    longest = 0.0
    turns = [(troupe, name) for troupe in troupes for name in OPTIONS]
    for troupe, name in turns:
        troupe.ask("build", name=name, task=task, options=OPTIONS[name])
        longest = max(longest, troupe.slowest("train", name=name, steps=1)["step"])
    steps = max(3, int(TURN / longest)) if steps is None else steps
    found: dict[str, Rounds] = {troupe.library: {} for troupe in troupes}
    for number in range(rounds):
        for troupe, name in turns if number % 2 == 0 else reversed(turns):
            taken = troupe.slowest("train", name=name, steps=steps)
            found[troupe.library].setdefault(f"{name} {troupe.size}", []).append(taken["step"])
            found[troupe.library].setdefault(f"{name} {troupe.size} cpu", []).append(taken["cpu"])
    for troupe, name in turns:
        if troupe.agree(name) != (name != "bare" or troupe.size == 1):  # ranks have different samples
            raise SystemExit(f"{troupe.library}, {name}: gradients were {'not ' if name != 'bare' else ''}reduced")
        troupe.ask("drop", name=name)
    return {"label": TASKS[task][0], "steps": steps, "seconds": found}


def efficiency(rows: Rounds) -> list[float]:
    """Of each round."""
    return [one / two for one, two in zip(rows["bare 1"], rows["wrapped 2"], strict=True)]


def goals(task: str, found: dict[str, Any]) -> Iterator[Goal]:
    """What is promised of this task."""
    seconds = found["seconds"]
    measured = over(efficiency(seconds["ddp"]), efficiency(seconds["torch"])) if "torch" in seconds else None
    what, met = f"{task}: our efficiency / PyTorch's", None if measured is None else measured >= 1
    yield Goal(what=what, wanted=">= 1", measured=measured, possible=None, met=met)
    cost = over(seconds["ddp"]["wrapped 1"], seconds["ddp"]["bare 1"])
    what, met = f"{task}: DataParallel on one rank / bare", cost <= 1.02
    yield Goal(what=what, wanted="<= 1.02", measured=cost, possible=None, met=met)


def show(found: dict[str, Any]) -> None:
    """Prints a task's table: medians of the rounds."""
    print(f"\n{found['label']}; medians in ms")
    head = ("1 rank", "wrapped", "/ bare", "2 ranks", "bare", "efficiency", "of bare")
    print(f"{'':<10}" + "".join(f"{each:>12}" for each in head))
    for library, rows in found["seconds"].items():
        ms = {key: f"{1e3 * statistics.median(value):>12.2f}" for key, value in rows.items()}
        kept = f"{statistics.median(efficiency(rows)):>12.1%}{over(rows['bare 1'], rows['bare 2']):>12.1%}"
        cost = f"{over(rows['wrapped 1'], rows['bare 1']):>12.3f}"
        print(f"{NAMES[library]:<10}{ms['bare 1']}{ms['wrapped 1']}{cost}{ms['wrapped 2']}{ms['bare 2']}{kept}")
    rows = found["seconds"]["ddp"]
    print(f"of the time of bare steps, neighbours took {1 - 1 / over(rows['bare 1'], rows['bare 1 cpu']):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each task (default: 15)")
    parser.add_argument("--steps", type=int, help=f"timed steps of a turn (default: as many as fit in {TURN} s)")
    parser.add_argument("--only", choices=TASKS, action="append", help="this task; may be given several times")
    parser.add_argument("--alone", action="store_true", help="without PyTorch")
    parser.add_argument("--json", type=Path, default=Path("scaling.json"), help="where the results go")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    results: dict[str, Any] = {
        "benchmark": "scaling",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores",
        "load": load,
        "tasks": {},
    }
    reached: list[Goal] = []
    rival = not args.alone and importlib.util.find_spec("torch") is not None
    libraries = ("ddp", "torch") if rival else ("ddp",)
    with contextlib.ExitStack() as stack:
        troupes = [stack.enter_context(Troupe(library, size)) for library in libraries for size in (1, 2)]
        for task in args.only or ("gpt", "cnn"):
            found = results["tasks"][task] = measure(task, args.rounds, args.steps, troupes)
            show(found)
            reached += goals(task, found)
        results["versions"] = {key: value for each in troupes for key, value in each.versions.items()}
    show_goals(reached)
    print(f"load average before the run: {load:.2f}")
    results["goals"] = [vars(goal) for goal in reached]
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
