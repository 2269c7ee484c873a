"""What communication hooks save on a slow link, and what they cost in accuracy: two hosts joined by 1 Gbit/s.

    python benchmarks/compression.py [--rate 1gbit] [--rounds 7] [--hook bf16 --hook powersgd:4] [--json FILE]

Hosts, ranks and turns are those of `overlap.py`. Bytes are what the hosts' network cards counted, headers included,
a step and rank. Accuracy is that of the net of examples/train_digits.py, trained on the two ranks with each hook, of
the test images of all seeds together; a loss of half a point is what another seed does as well. Goals are printed,
never asserted.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

from benchmarks import harness, two_hosts  # noqa: E402
from benchmarks.harness import Goal, Rounds, at_most, over  # noqa: E402
from benchmarks.training_worker import TASKS  # noqa: E402
from benchmarks.worker_pool import WorkerPool  # noqa: E402

HOOKS = ("fp16", "bf16", "powersgd:1", "powersgd:4", "topk:0.01")
NONE = "none"
WORTHWHILE = ("mlp-512", "mlp-1024")  # communication takes half of the step or more


def measure(task: str, hooks: Sequence[str], rounds: int, steps: int, ours: WorkerPool) -> dict[str, Any]:
    """All hooks' turns. Each number is the slowest rank's."""
    names = [NONE, *hooks]
    for name in names:
        ours.ask("build", name=name, task=task, options={} if name == NONE else {"hook": name})
        ours.ask("train", name=name, steps=5)  # PowerSGD begins after ten
    found: dict[str, Rounds] = {name: {"step": [], "cpu": [], "sent": []} for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            answers = ours.ask("train", name=name, steps=steps)
            for key, values in found[name].items():
                values.append(max(each[key] or 0 for each in answers))
    for name in names:
        if not ours.agree(name):
            raise SystemExit(f"{name}: ranks have different parameters")
        ours.ask("drop", name=name)
    return {"label": TASKS[task][0], "hooks": found}


def accuracies(hooks: Sequence[str], epochs: int, seeds: int, ours: WorkerPool) -> dict[str, float]:
    """The share of test images that are classified right, over all seeds."""
    found = {}
    for hook in (NONE, *hooks):
        told = [
            ours.ask("digits", hook=None if hook == NONE else hook, epochs=epochs, seed=seed)[0]
            for seed in range(seeds)
        ]
        found[hook] = sum(each["right"] for each in told) / sum(each["of"] for each in told)
    return found


def goals(tasks: dict[str, Any], accuracy: dict[str, float]) -> Iterator[Goal]:
    """What is promised."""
    for task, found in tasks.items():
        for hook in found["hooks"] if task in WORTHWHILE else ():
            if hook != NONE and not hook.startswith("topk"):
                gain = over(found["hooks"][NONE]["step"], found["hooks"][hook]["step"])
                what = f"{task}: speed-up of {hook}"
                yield Goal(what=what, wanted="> 1", measured=gain, met=gain > 1)
    for hook, share in accuracy.items():
        if hook != NONE:
            yield at_most(f"digits: points of accuracy lost by {hook}", 0.5, 100 * (accuracy[NONE] - share))


def show(found: dict[str, Any]) -> None:
    """Prints a task's table: medians of the rounds."""
    print(f"\n{found['label']}")
    print(f"{'hook':<12}{'step, ms':>10}{'speed-up':>10}{'cpu, ms':>10}{'MB sent':>10}{'of none':>10}")
    none = found["hooks"][NONE]
    for hook, rows in found["hooks"].items():
        step, cpu, sent = (statistics.median(rows[key]) for key in ("step", "cpu", "sent"))
        print(f"{hook:<12}{1e3 * step:>10.1f}{over(none['step'], rows['step']):>10.2f}{1e3 * cpu:>10.1f}", end="")
        # On one machine nothing is sent, but others' traffic may be counted now and then.
        print(f"{sent / 1e6:>10.3f}{over(rows['sent'], none['sent']):>10.1%}" if min(none["sent"]) > 0 else "")


def main() -> None:
    parser = harness.parser(__doc__, rounds=7, json_file="compression.json")
    parser.add_argument("--rate", default="1gbit", help="of the cable, as tc writes it (default: 1gbit)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn (default: 3)")
    parser.add_argument("--only", choices=TASKS, action="append", help="this task; may be given several times")
    parser.add_argument("--hook", action="append", help=f"this hook; may be given several times ({', '.join(HOOKS)})")
    parser.add_argument("--epochs", type=int, default=20, help="of the digits (default: 20)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of the digits with each hook (default: 3)")
    parser.add_argument("--here", action="store_true", help="ranks of this machine, without hosts or a wire")
    args = parser.parse_args()
    load, hooks = os.getloadavg()[0], args.hook or HOOKS
    tasks: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        hosts = None if args.here else stack.enter_context(two_hosts.hosts(args.rate))
        ours = stack.enter_context(WorkerPool("ddp", 2, hosts))
        for task in args.only or ("mlp-512", "gpt"):
            tasks[task] = measure(task, hooks, args.rounds, args.steps, ours)
            show(tasks[task])
        accuracy = accuracies(hooks, args.epochs, args.seeds, ours)
    print(f"\naccuracy on the digits, {args.epochs} epochs, {args.seeds} seeds:", end=" ")
    print(", ".join(f"{hook} {share:.2%}" for hook, share in accuracy.items()))
    reached = [*goals(tasks, accuracy)]
    harness.show_goals(reached)
    print(f"load average before the run: {load:.2f}")
    where = {"hosts": "one" if args.here else "two network namespaces", "rate": None if args.here else args.rate}
    results = {"load": load, "tasks": tasks, "accuracy": accuracy, "goals": [vars(goal) for goal in reached]}
    harness.write(args.json, "compression", **where, **results)


if __name__ == "__main__":
    main()
