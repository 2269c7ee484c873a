"""The cost of micro_batches=V, which makes results independent of the number of ranks, beside plain accumulation.

    python -m benchmarks.micro_batches [--here] [--rate 1gbit] [--rounds 9] [--only gpt] [--json FILE]

Two ranks of one core each, on two hosts as in overlap.py, or with --here on this one, in shared memory. Both forms
compute the same micro-batches, V / 2 a rank, with one reduction a step: plain DataParallel adds their gradients up in
place (`no_sync`), the other keeps partial sums and adds in the order of a binary tree (docs/data-parallel.md).
"""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks import harness, two_hosts
from benchmarks.harness import Goal, Rounds, at_most, median_ratio
from benchmarks.training_worker import TASKS
from benchmarks.worker_pool import RankPool

# V: how many times longer a step may be.
GOALS = {2: 1.05, 4: 1.15, 8: 1.3}
RANKS = 2


def measure(task: str, rounds: int, steps: int, pool: RankPool) -> dict[int, Rounds]:
    """By V, the seconds of a step of both forms: the slowest rank's."""
    times: dict[int, Rounds] = {}
    for count in GOALS:
        forms: dict[str, dict[str, Any]] = {"accumulated": {}, "tree": {"micro_batches": count}}
        for name, options in forms.items():
            pool.request("build", name=name, task=task, options=options, parts=count // RANKS)
        turns = {name: lambda name=name: pool.slowest("train", name=name, steps=steps)["step"] for name in forms}
        times[count] = harness.take_turns(turns, rounds)
        for name in forms:
            pool.finish(name, reduced=True)
    return times


def main() -> None:
    parser = harness.parser(__doc__, rounds=9, only=TASKS, default=("mlp-512", "gpt"))
    two_hosts.add_options(parser)
    args = parser.parse_args()
    tasks: dict[str, dict[int, Rounds]] = {}
    reached: list[Goal] = []
    with contextlib.ExitStack() as stack:
        hosts = two_hosts.wanted(stack, args)
        pool = stack.enter_context(RankPool("ddp", RANKS, hosts))
        for task in args.only:
            tasks[task] = measure(task, args.rounds, args.steps, pool)
            for count, row in tasks[task].items():
                harness.show(f"{TASKS[task][0]}, V = {count}, ms", row, 1e3, 1)
                what = f"{task}, V = {count}: step / that of accumulation"
                reached.append(at_most(what, GOALS[count], median_ratio(row["tree"], row["accumulated"])))
    harness.write(args.json, "micro_batches", reached, **two_hosts.describe_network(args), tasks=tasks)


if __name__ == "__main__":
    main()
