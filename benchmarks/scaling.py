"""Twice the ranks, twice the samples, the same time? One rank and two on this machine, a core each.

    python -m benchmarks.scaling [--rounds 15] [--only gpt] [--json FILE]

Weak scaling: every rank has a batch of the same size, so that a step on two ranks should take as long as one on one.
Efficiency is the time of a bare net's step in one process, over that of a step under data parallelism on two ranks.
Two ranks share caches and memory, so bare nets on both cores at once, without communication, are shown too. PyTorch's
DistributedDataParallel with gloo trains in the same rounds (`training_worker.py`); without PyTorch it is left out. And
what DataParallel costs where there is nothing to reduce: one rank, beside the bare net in the same process.

Goals are for a machine with two cores without other load.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import harness
from benchmarks.harness import Goal, Rounds, at_least, at_most, over
from benchmarks.training_worker import TASKS
from benchmarks.worker_pool import RankPool, libraries

TURN = 0.3  # s, if three steps do not take longer
OPTIONS: dict[str, dict[str, Any] | None] = {"bare": None, "wrapped": {}}


def measure(task: str, rounds: int, steps: int | None, pools: list[RankPool]) -> dict[str, Any]:
    """All implementations' turns: library → "bare 1", "wrapped 2", … → seconds of the slowest rank's step."""
    turns = [(pool, name) for pool in pools for name in OPTIONS]
    for pool, name in turns:
        pool.ask("build", name=name, task=task, options=OPTIONS[name])
    longest = max(pool.slowest("train", name=name, steps=1)["step"] for pool, name in turns)
    steps = max(3, int(TURN / longest)) if steps is None else steps
    found: dict[str, Rounds] = {pool.library: {} for pool in pools}
    for number in range(rounds):
        for pool, name in harness.alternating(turns, number):
            taken = pool.slowest("train", name=name, steps=steps)
            found[pool.library].setdefault(f"{name} {pool.size}", []).append(taken["step"])
            found[pool.library].setdefault(f"{name} {pool.size} cpu", []).append(taken["cpu"])
    for pool, name in turns:
        pool.finish(name, reduced=name != "bare")
    return {"label": TASKS[task][0], "steps": steps, "seconds": found}


def efficiency(rows: Rounds) -> list[float]:
    """Of each round."""
    return [one / two for one, two in zip(rows["bare 1"], rows["wrapped 2"], strict=True)]


def goals(task: str, found: dict[str, Any]) -> Iterator[Goal]:
    """What is promised of this task."""
    seconds = found["seconds"]
    measured = over(efficiency(seconds["ddp"]), efficiency(seconds["torch"])) if "torch" in seconds else None
    yield at_least(f"{task}: our efficiency / PyTorch's", 1, measured)
    cost = over(seconds["ddp"]["wrapped 1"], seconds["ddp"]["bare 1"])
    yield at_most(f"{task}: DataParallel on one rank / bare", 1.02, cost)


def show(found: dict[str, Any]) -> None:
    """Prints a task's table: medians of the rounds."""
    print(f"\n{found['label']}; medians in ms")
    head = ("1 rank", "wrapped", "/ bare", "2 ranks", "bare", "efficiency", "of bare")
    print(f"{'':<10}" + "".join(f"{each:>12}" for each in head))
    for library, rows in found["seconds"].items():
        ms = {key: f"{1e3 * each:>12.2f}" for key, each in harness.medians(rows).items()}
        kept = f"{statistics.median(efficiency(rows)):>12.1%}{over(rows['bare 1'], rows['bare 2']):>12.1%}"
        cost = f"{over(rows['wrapped 1'], rows['bare 1']):>12.3f}"
        print(f"{library:<10}{ms['bare 1']}{ms['wrapped 1']}{cost}{ms['wrapped 2']}{ms['bare 2']}{kept}")
    rows = found["seconds"]["ddp"]
    print(f"of the time of bare steps, neighbours took {1 - 1 / over(rows['bare 1'], rows['bare 1 cpu']):.1%}")


def main() -> None:
    parser = harness.parser(__doc__, rounds=15, only=TASKS, default=("gpt", "cnn"))
    parser.add_argument("--steps", type=int, help=f"timed steps of a turn (default: as many as fit in {TURN} s)")
    parser.add_argument("--alone", action="store_true", help="without PyTorch")
    args = parser.parse_args()
    tasks: dict[str, Any] = {}
    reached: list[Goal] = []
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(RankPool(name, size)) for name in libraries(args.alone) for size in (1, 2)]
        for task in args.only:
            found = tasks[task] = measure(task, args.rounds, args.steps, pools)
            show(found)
            reached += goals(task, found)
    harness.write(args.json, "scaling", reached, tasks=tasks)


if __name__ == "__main__":
    main()
