"""What communication hooks save on a slow link: two hosts joined by 1 Gbit/s.

    python -m benchmarks.compression [--rate 1gbit] [--rounds 7] [--hooks bf16,powersgd:4] [--json FILE]

Hosts, ranks and turns are those of `overlap.py`. Bytes are those that the hosts' network cards have counted, headers
included, per step and rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import harness, two_hosts
from benchmarks.harness import Goal, Rounds, median_ratio
from benchmarks.training_worker import TASKS
from benchmarks.worker_pool import RankPool

HOOKS = ("fp16", "bf16", "powersgd:1", "powersgd:4", "topk:0.01")
NONE = "none"
WORTHWHILE = ("mlp-512", "mlp-1024")  # communication takes half of the step or more


def measure(task: str, hooks: Sequence[str], rounds: int, steps: int, ours: RankPool) -> dict[str, Any]:
    """All hooks' turns. Each number is the slowest rank's."""
    names = [NONE, *hooks]
    for name in names:
        ours.request("build", name=name, task=task, options={} if name == NONE else {"comm_hook": name})
        ours.request("train", name=name, steps=5)  # PowerSGD begins after ten
    results: dict[str, Rounds] = {name: {"step": [], "cpu": [], "sent": []} for name in names}
    for number in range(rounds):
        for name in harness.alternating(names, number):
            answer = ours.slowest("train", name=name, steps=steps)
            for key, values in results[name].items():
                values.append(answer.get(key, 0.0))
    for name in names:
        ours.finish(name, reduced=True)
    return {"label": TASKS[task][0], "hooks": results}


def goals(tasks: dict[str, Any]) -> Iterator[Goal]:
    """What is promised."""
    for task, results in tasks.items():
        for hook in results["hooks"] if task in WORTHWHILE else ():
            if hook != NONE and not hook.startswith("topk"):
                gain = median_ratio(results["hooks"][NONE]["step"], results["hooks"][hook]["step"])
                yield Goal(what=f"{task}: speed-up of {hook}", wanted="> 1", measured=gain, met=gain > 1)


def show(results: dict[str, Any]) -> None:
    """Prints a task's table: medians of the rounds."""
    print(f"\n{results['label']}")
    print(harness.row("hook", ("step, ms", "speed-up", "cpu, ms", "MB sent"), 12, 10))
    none = results["hooks"][NONE]["step"]
    for hook, rows in results["hooks"].items():
        median = harness.medians(rows)
        cells = (
            f"{1e3 * median['step']:.1f}",
            f"{median_ratio(none, rows['step']):.2f}",
            f"{1e3 * median['cpu']:.1f}",
            f"{median['sent'] / 1e6:.3f}",
        )
        print(harness.row(hook, cells, 12, 10))


def main() -> None:
    parser = harness.parser(__doc__, rounds=7, only=TASKS, default=("mlp-512", "gpt"))
    two_hosts.add_options(parser)
    parser.add_argument("--hooks", default=",".join(HOOKS), help=f"hooks to measure (default: {','.join(HOOKS)})")
    args = parser.parse_args()
    hooks = args.hooks.split(",")
    tasks = {}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(RankPool("ddp", 2, two_hosts.wanted(stack, args)))
        for task in args.only:
            tasks[task] = measure(task, hooks, args.rounds, args.steps, ours)
            show(tasks[task])
    harness.write(args.json, "compression", [*goals(tasks)], **two_hosts.describe_network(args), tasks=tasks)


if __name__ == "__main__":
    main()
