"""How much of the communication a training step hides: two hosts of one rank and one core each, joined by 1 Gbit/s.

    python benchmarks/overlap.py [--rate 1gbit] [--rounds 9] [--only mlp-512] [--json FILE]

The hosts are network namespaces of this machine (tests/cluster/hosts.sh, which says what may be lacking; takes Linux's
root and MPICH). Beside ours trains PyTorch's DistributedDataParallel with gloo, on the same hosts and in the same
rounds: each implementation has its turn of a few steps, while all others wait (`training_worker.py`).

What no overlap can beat follows from three measurements of the same rounds: the net trained without any communication
(forward, backward, when each gradient is ready), the buckets reduced with nothing computed, and the last bucket alone.

    limit = max(compute alone + wire time of the last bucket,
                forward + time to the first bucket + communication alone)

The limit is that of the time until all gradients are reduced: forward and backward. The update comes after them for
every implementation and is part of `step`, not of the limit. "off" is DataParallel with one bucket for everything,
which leaves when backward has ended. Our best bucket size is searched for; a size that gives the buckets of a smaller
one has no turn of its own. Goals are printed, never asserted, beside what the limit itself would reach: they are for a
machine with two cores that nobody else uses.
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
from benchmarks.harness import Goal, Rounds, at_least, at_most, over  # noqa: E402
from benchmarks.training_worker import TASKS  # noqa: E402
from benchmarks.worker_pool import WorkerPool  # noqa: E402

MIB = 1 << 20
EVERYTHING = 1 << 20  # MiB: more than there is
CAPS = (0.5, 1, 2, 4, 8, 25)  # MiB
OURS: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"{cap:g} MiB": {"bucket_cap_mb": cap} for cap in CAPS},
    "off": {"bucket_cap_mb": EVERYTHING, "first_bucket_mb": EVERYTHING},
}
THEIRS: dict[str, dict[str, Any]] = {"default": {}, **{f"{cap} MiB": {"bucket_cap_mb": cap} for cap in (1, 4, 25)}}
TO_THE_LIMIT = {"mlp-512": 1.05}  # others: 1.10
BARE = "bare"


def limit(compute: float, forward: float, first: float, communication: float, last: float) -> float:
    """Seconds that no step of these parts can beat, until its gradients are reduced."""
    return max(compute + last, forward + first + communication)


def first_bucket(ready: Sequence[float], plan: Sequence[Sequence[int]]) -> float:
    """When the last gradient of the first bucket is ready."""
    return max(ready[index] for index in plan[0])


def measure(task: str, rounds: int, steps: int, ours: WorkerPool, theirs: WorkerPool | None) -> dict[str, Any]:
    """All implementations' turns. Each number is the slowest rank's."""
    sizes = ours.ask("build", name=BARE, task=task, options=None)[0]["sizes"]
    plans: dict[str, list[list[int]]] = {}
    for name, options in OURS.items():
        ours.ask("build", name=name, task=task, options=options)
        plan = ours.ask("plan", name=name)[0]["plan"]
        if name not in ("default", "off") and plan in [plans[each] for each in plans if each != "default"]:
            ours.ask("drop", name=name)
        else:
            plans[name] = plan
    turns = [(ours, BARE), *((ours, name) for name in plans)]
    if theirs is not None:
        for name in (BARE, *THEIRS):
            theirs.ask("build", name=name, task=task, options=THEIRS.get(name))
            turns.append((theirs, name))
    lengths = {name: [sum(sizes[index] for index in bucket) for bucket in plan] for name, plan in plans.items()}
    found: dict[str, Any] = {
        "label": TASKS[task][0],
        "buckets": {name: [4 * length for length in each] for name, each in lengths.items()},
        "ours": {name: {} for name in (BARE, *plans)},
        "theirs": {name: {} for name in (BARE, *THEIRS)} if theirs is not None else {},
        "gloo": {},
    }

    def note(rows: Rounds, what: dict[str, float]) -> None:
        for key, value in what.items():
            rows.setdefault(key, []).append(value)

    for number in range(rounds):
        parts: dict[str, dict[str, float]] = {name: {} for name in plans}
        for pool, name in turns if number % 2 == 0 else reversed(turns):
            answers = pool.ask("train", name=name, steps=steps)
            keys = ("step", "gradients", "forward", "update", "cpu", *(("sent",) if answers[0]["sent"] else ()))
            note(
                found["ours" if pool is ours else "theirs"][name],
                {key: max(each[key] for each in answers) for key in keys},
            )
            if pool is ours and name == BARE:
                ready = [max(each) for each in zip(*(each["ready"] for each in answers), strict=True)]
                for each, plan in plans.items():
                    parts[each]["first"] = first_bucket(ready, plan)
            elif pool is ours:
                alone = ours.slowest("reduce", lengths=lengths[name], times=steps)
                last = ours.slowest("reduce", lengths=lengths[name][-1:], times=steps)
                parts[name] |= {"alone": alone["seconds"], "alone cpu": alone["cpu"], "last": last["seconds"]}
        if theirs is not None:  # our default buckets, reduced by gloo
            alone = theirs.slowest("reduce", lengths=lengths["default"], times=steps)
            note(found["gloo"], {"alone": alone["seconds"], "alone cpu": alone["cpu"]})
        bare = found["ours"][BARE]
        for name, part in parts.items():
            least = limit(bare["gradients"][-1], bare["forward"][-1], part["first"], part["alone"], part["last"])
            note(found["ours"][name], {**part, "limit": least})
    for pool, name in turns:
        if pool.agree(name) != (name != BARE):  # ranks have different samples
            raise SystemExit(f"{pool.library}, {name}: gradients were {'not ' if name != BARE else ''}reduced")
        pool.ask("drop", name=name)
    return found


def best(side: dict[str, Rounds], without: Sequence[str]) -> str:
    """Whose median step is the shortest."""
    return min((name for name in side if name not in without), key=lambda name: statistics.median(side[name]["step"]))


def goals(task: str, found: dict[str, Any]) -> Iterator[Goal]:
    """What is promised of this task."""
    ours, theirs = found["ours"], found["theirs"]
    mine, off = ours["default"], ours["off"]["step"]
    at_limit = [a + b for a, b in zip(mine["limit"], mine["update"], strict=True)]

    def against(what: str, wanted: float, others: list[float] | None) -> Goal:
        measured = over(mine["step"], others) if others is not None else None
        return at_most(f"{task}: {what}", wanted, measured, over(at_limit, others) if others is not None else None)

    wanted = TO_THE_LIMIT.get(task, 1.1)
    yield at_most(f"{task}: step / the limit", wanted, over(mine["gradients"], mine["limit"]), 1.0)
    name = best(theirs, [BARE]) if theirs else None
    yield against("step / PyTorch's at its defaults", 0.75, theirs["default"]["step"] if theirs else None)
    yield against(f"step / PyTorch's best ({name})", 0.98, theirs[name]["step"] if name else None)
    mine_best = best(ours, [BARE, "off", "default"])
    yield at_most(f"{task}: defaults / our best ({mine_best})", 1.03, over(mine["step"], ours[mine_best]["step"]))
    saved, most = (
        statistics.median(1 - a / b for a, b in zip(each, off, strict=True)) for each in (mine["step"], at_limit)
    )
    yield at_least(f"{task}: time that overlap saves", 0.25, saved, most)


def show(found: dict[str, Any]) -> None:
    """Prints a task's table, in ms: medians of the rounds."""

    def ms(rows: Rounds, key: str) -> str:
        return f"{1e3 * statistics.median(rows[key]):10.1f}" if key in rows else " " * 10

    ours, theirs = found["ours"], found["theirs"]
    bare = ours[BARE]
    print(f"\n{found['label']}; medians in ms")
    head = ("step", "gradients", "limit", "/ limit", "first", "alone", "last", "cpu", "alone cpu", "buckets", "MB sent")
    print(f"{'':<18}" + "".join(f"{each:>10}" for each in head))
    for side, rows in (("ours", ours), ("PyTorch", theirs)):
        for name, row in rows.items():
            share = f"{over(row['gradients'], row['limit']):10.2f}" if "limit" in row else " " * 10
            buckets = f"{len(found['buckets'][name]):10d}" if side == "ours" and name != BARE else " " * 10
            sent = f"{statistics.median(row['sent']) / 1e6:10.2f}" if "sent" in row and name != BARE else ""
            print(
                f"{side + ', ' + name:<18}" + ms(row, "step") + ms(row, "gradients") + ms(row, "limit") + share, end=""
            )
            print("".join(ms(row, key) for key in ("first", "alone", "last", "cpu", "alone cpu")) + buckets + sent)
    print(f"forward alone {ms(bare, 'forward').strip()}, update alone {ms(bare, 'update').strip()}", end="; ")
    print("cpu, alone cpu: what a step and what communication alone take of the rank's core")
    mib = sum(found["buckets"]["default"]) / MIB
    for side, row in (("ours", ours["default"]), ("gloo", found["gloo"])):
        if row:
            wall, cpu = (1e3 * statistics.median(row[key]) / mib for key in ("alone", "alone cpu"))
            print(f"communication alone, {side}, per reduced MiB: {wall:.2f} ms, {cpu:.2f} ms of the rank's core")
    print(f"of the time of bare steps, neighbours took {1 - 1 / over(bare['step'], bare['cpu']):.1%}")


def main() -> None:
    parser = harness.parser(__doc__, rounds=9, json_file="overlap.json")
    parser.add_argument("--rate", default="1gbit", help="of the cable, as tc writes it (default: 1gbit)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn (default: 3)")
    parser.add_argument("--only", choices=TASKS, action="append", help="this task; may be given several times")
    parser.add_argument("--here", action="store_true", help="ranks of this machine, without hosts or a wire")
    parser.add_argument("--alone", action="store_true", help="without PyTorch")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    tasks: dict[str, Any] = {}
    reached: list[Goal] = []
    with contextlib.ExitStack() as stack:
        hosts = None if args.here else stack.enter_context(two_hosts.hosts(args.rate))
        ours = stack.enter_context(WorkerPool("ddp", 2, hosts))
        torch = not args.alone and harness.has_torch()
        theirs = stack.enter_context(WorkerPool("torch", 2, hosts)) if torch else None
        for task in args.only or ("mlp-512", "mlp-1024", "gpt"):
            found = tasks[task] = measure(task, args.rounds, args.steps, ours, theirs)
            show(found)
            reached += goals(task, found)
        idle = {each.library: each.idle() for each in (ours, theirs) if each is not None}
    harness.show_goals(reached)
    print(f"load average before the run: {load:.2f}; share of a core that a rank took between its turns: ", end="")
    print(", ".join(f"{name} {share:.2%}" for name, share in idle.items()))
    where = {"hosts": "one" if args.here else "two network namespaces", "rate": None if args.here else args.rate}
    harness.write(
        args.json, "overlap", **where, load=load, tasks=tasks, idle=idle, goals=[vars(each) for each in reached]
    )


if __name__ == "__main__":
    main()
