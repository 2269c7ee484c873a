"""How much of the communication a training step hides: two hosts of one rank and one core each, joined by 1 Gbit/s.

    python -m benchmarks.overlap [--rate 1gbit] [--rounds 9] [--only mlp-512] [--json FILE]

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
machine with two cores without other load.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import harness, two_hosts
from benchmarks.harness import Goal, Rounds, at_least, at_most, median_ratio
from benchmarks.training_worker import TASKS
from benchmarks.worker_pool import RankPool, libraries

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


def measure(task: str, rounds: int, steps: int, ours: RankPool, torch: RankPool | None) -> dict[str, Any]:
    """All implementations' turns. Each number is the slowest rank's."""
    sizes = ours.request("build", name=BARE, task=task, options=None)[0]
    plans: dict[str, list[list[int]]] = {}
    for name, options in OURS.items():
        ours.request("build", name=name, task=task, options=options)
        plan = ours.request("plan", name=name)[0]
        if name not in ("default", "off") and plan in [plans[other] for other in plans if other != "default"]:
            ours.request("drop", name=name)
        else:
            plans[name] = plan
    turns = [(ours, BARE), *((ours, name) for name in plans)]
    if torch is not None:
        for name in (BARE, *THEIRS):
            torch.request("build", name=name, task=task, options=THEIRS.get(name))
            turns.append((torch, name))
    lengths = {}
    for name, plan in plans.items():
        lengths[name] = [sum(sizes[index] for index in bucket) for bucket in plan]
    results: dict[str, Any] = {
        "label": TASKS[task][0],
        "buckets": {name: [4 * length for length in buckets] for name, buckets in lengths.items()},
        "ours": {name: {} for name in (BARE, *plans)},
        "theirs": {name: {} for name in (BARE, *THEIRS)} if torch is not None else {},
        "gloo": {},
    }

    def note(rows: Rounds, values: dict[str, float]) -> None:
        for key, value in values.items():
            rows.setdefault(key, []).append(value)

    for number in range(rounds):
        parts: dict[str, dict[str, float]] = {name: {} for name in plans}
        for pool, name in harness.alternating(turns, number):
            answers = pool.request("train", name=name, steps=steps)
            keys = [key for key in ("step", "gradients", "forward", "update", "cpu", "sent") if key in answers[0]]
            side = results["ours" if pool is ours else "theirs"]
            note(side[name], {key: max(answer[key] for answer in answers) for key in keys})
            if pool is ours and name == BARE:
                ready = [max(times) for times in zip(*(answer["ready"] for answer in answers), strict=True)]
                for planned, plan in plans.items():
                    parts[planned]["first"] = first_bucket(ready, plan)
            elif pool is ours:
                alone = ours.slowest("reduce", lengths=lengths[name], times=steps)
                last = ours.slowest("reduce", lengths=lengths[name][-1:], times=steps)
                parts[name] |= {"alone": alone["seconds"], "alone cpu": alone["cpu"], "last": last["seconds"]}
        if torch is not None:  # our default buckets, reduced by gloo
            alone = torch.slowest("reduce", lengths=lengths["default"], times=steps)
            note(results["gloo"], {"alone": alone["seconds"], "alone cpu": alone["cpu"]})
        bare = results["ours"][BARE]
        for name, part in parts.items():
            least = limit(bare["gradients"][-1], bare["forward"][-1], part["first"], part["alone"], part["last"])
            note(results["ours"][name], {**part, "limit": least})
    for pool, name in turns:
        pool.finish(name, reduced=name != BARE)
    return results


def best(side: dict[str, Rounds], without: Sequence[str]) -> str:
    """Whose median step is the shortest."""
    return min((name for name in side if name not in without), key=lambda name: statistics.median(side[name]["step"]))


def goals(task: str, results: dict[str, Any]) -> Iterator[Goal]:
    """What is promised of this task."""
    ours = results["ours"]
    torch = results["theirs"]
    default = ours["default"]
    off = ours["off"]["step"]
    at_limit = [a + b for a, b in zip(default["limit"], default["update"], strict=True)]

    def against(what: str, wanted: float, reference: list[float] | None) -> Goal:
        if reference is None:
            return at_most(f"{task}: {what}", wanted, None)
        measured = median_ratio(default["step"], reference)
        return at_most(f"{task}: {what}", wanted, measured, median_ratio(at_limit, reference))

    wanted = TO_THE_LIMIT.get(task, 1.1)
    yield at_most(f"{task}: step / the limit", wanted, median_ratio(default["gradients"], default["limit"]), 1.0)
    name = best(torch, [BARE]) if torch else None
    yield against("step / PyTorch's at its defaults", 0.75, torch["default"]["step"] if torch else None)
    yield against(f"step / PyTorch's best ({name})", 0.98, torch[name]["step"] if name else None)
    mine_best = best(ours, [BARE, "off", "default"])
    ours_over_best = median_ratio(default["step"], ours[mine_best]["step"])
    yield at_most(f"{task}: defaults / our best ({mine_best})", 1.03, ours_over_best)

    def saved(times: list[float]) -> float:
        return statistics.median(1 - a / b for a, b in zip(times, off, strict=True))

    yield at_least(f"{task}: time that overlap saves", 0.25, saved(default["step"]), saved(at_limit))


COLUMNS = ("step", "gradients", "limit", "/ limit", "first", "alone", "last", "cpu", "alone cpu", "buckets", "MB sent")


def show(results: dict[str, Any]) -> None:
    """Prints a task's table, in ms: medians of the rounds."""
    ours = results["ours"]
    torch = results["theirs"]
    print(f"\n{results['label']}; medians in ms")
    print(harness.row("", COLUMNS, 18, 10))
    for side, rows in (("ours", ours), ("PyTorch", torch)):
        for name, row in rows.items():
            cells = {key: f"{1e3 * value:.1f}" for key, value in harness.medians(row).items()}
            if "limit" in row:
                cells["/ limit"] = f"{median_ratio(row['gradients'], row['limit']):.2f}"
                cells["buckets"] = str(len(results["buckets"][name]))
            if "sent" in row and name != BARE:
                cells["MB sent"] = f"{statistics.median(row['sent']) / 1e6:.2f}"
            print(harness.row(f"{side}, {name}", [cells.get(key, "") for key in COLUMNS], 18, 10).rstrip())
    bare = harness.medians(ours[BARE])
    print(f"forward alone {1e3 * bare['forward']:.1f}, update alone {1e3 * bare['update']:.1f}", end="; ")
    print("cpu, alone cpu: what a step and what communication alone take of the rank's core")
    mib = sum(results["buckets"]["default"]) / MIB
    for side, row in (("ours", ours["default"]), ("gloo", results["gloo"])):
        if row:
            wall, cpu = (1e3 * statistics.median(row[key]) / mib for key in ("alone", "alone cpu"))
            print(f"communication alone, {side}, per reduced MiB: {wall:.2f} ms, {cpu:.2f} ms of the rank's core")
    print(
        f"of the time of bare steps, neighbours took {1 - 1 / median_ratio(ours[BARE]['step'], ours[BARE]['cpu']):.1%}"
    )


def main() -> None:
    parser = harness.parser(__doc__, rounds=9, only=TASKS, default=("mlp-512", "mlp-1024", "gpt"))
    two_hosts.add_options(parser)
    parser.add_argument("--alone", action="store_true", help="measure without PyTorch")
    args = parser.parse_args()
    tasks: dict[str, Any] = {}
    reached: list[Goal] = []
    with contextlib.ExitStack() as stack:
        hosts = two_hosts.wanted(stack, args)
        pools = [stack.enter_context(RankPool(library, 2, hosts)) for library in libraries(args.alone)]
        for task in args.only:
            results = tasks[task] = measure(task, args.rounds, args.steps, pools[0], pools[1] if pools[1:] else None)
            show(results)
            reached += goals(task, results)
    harness.write(args.json, "overlap", reached, **two_hosts.describe_network(args), tasks=tasks)


if __name__ == "__main__":
    main()
