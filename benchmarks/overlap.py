"""How much of the communication a training step hides: two hosts of one rank and one core each, joined by 1 Gbit/s.

    python benchmarks/overlap.py [--rate 1gbit] [--rounds 9] [--only mlp-512] [--json FILE]

The hosts are network namespaces of this machine (tests/cluster/hosts.sh, which says what may be lacking; takes Linux's
root and MPICH). Beside ours trains PyTorch's DistributedDataParallel with gloo, on the same hosts and in the same
rounds: each contestant has its turn of a few steps, while all others wait (`trainee.py`).

What no overlap can beat follows from three measurements of the same rounds: the net trained without any communication
(forward, backward, when each gradient is ready), the buckets reduced with nothing computed, and the last bucket alone.

    limit = max(compute alone + wire time of the last bucket,
                forward + time to the first bucket + communication alone)

The limit is that of the time until all gradients are reduced: forward and backward. The update comes after them for
every contestant and is part of `step`, not of the limit. "off" is DataParallel with one bucket for everything, which
leaves when backward has ended. Our best bucket size is searched for; a size that gives the buckets of a smaller one has
no turn of its own. Goals are printed, never asserted, beside what the limit itself would reach: they are for a machine
with two cores that nobody else uses.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

from benchmarks import two_hosts  # noqa: E402
from benchmarks.trainee import TASKS  # noqa: E402
from benchmarks.troupe import Troupe, over  # noqa: E402

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
Rounds = dict[str, list[float]]  # what was measured → seconds, one number a round


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is promised.

    measured: None if somebody was not there; possible: what a step at the limit would measure, None where that says
    nothing
    """

    what: str
    wanted: str
    measured: float | None
    possible: float | None
    met: bool | None


def limit(compute: float, forward: float, first: float, communication: float, last: float) -> float:
    """Seconds that no step of these parts can beat, until its gradients are reduced."""
    return max(compute + last, forward + first + communication)


def first_bucket(ready: Sequence[float], plan: Sequence[Sequence[int]]) -> float:
    """When the last gradient of the first bucket is ready."""
    return max(ready[index] for index in plan[0])


def measure(task: str, rounds: int, steps: int, ours: Troupe, theirs: Troupe | None) -> dict[str, Any]:
    """All contestants' turns. Each number is the slowest rank's."""
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
        for troupe, name in turns if number % 2 == 0 else reversed(turns):
            answers = troupe.ask("train", name=name, steps=steps)
            keys = ("step", "gradients", "forward", "update", "cpu", *(("sent",) if answers[0]["sent"] else ()))
            note(
                found["ours" if troupe is ours else "theirs"][name],
                {key: max(each[key] for each in answers) for key in keys},
            )
            if troupe is ours and name == BARE:
                ready = [max(each) for each in zip(*(each["ready"] for each in answers), strict=True)]
                for each, plan in plans.items():
                    parts[each]["first"] = first_bucket(ready, plan)
            elif troupe is ours:
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
    for troupe, name in turns:
        if troupe.agree(name) != (name != BARE):  # ranks have different samples
            raise SystemExit(f"{troupe.library}, {name}: gradients were {'not ' if name != BARE else ''}reduced")
        troupe.ask("drop", name=name)
    return found


def best(side: dict[str, Rounds], without: Sequence[str]) -> str:
    """Whose median step is the shortest."""
    return min((name for name in side if name not in without), key=lambda name: statistics.median(side[name]["step"]))


def goals(task: str, found: dict[str, Any]) -> Iterator[Goal]:
    """What is promised of this task."""
    ours, theirs = found["ours"], found["theirs"]
    mine = ours["default"]
    at_limit = [a + b for a, b in zip(mine["limit"], mine["update"], strict=True)]

    def at_most(what: str, wanted: float, against: list[float] | None, to_beat: bool = True) -> Goal:
        measured = over(mine["step"], against) if against is not None else None
        possible = over(at_limit, against) if against is not None and to_beat else None
        met = None if measured is None else measured <= wanted
        return Goal(what=f"{task}: {what}", wanted=f"<= {wanted:g}", measured=measured, possible=possible, met=met)

    share, wanted = over(mine["gradients"], mine["limit"]), TO_THE_LIMIT.get(task, 1.1)
    yield Goal(
        what=f"{task}: step / the limit", wanted=f"<= {wanted:g}", measured=share, possible=1.0, met=share <= wanted
    )
    name = best(theirs, [BARE]) if theirs else None
    yield at_most("step / PyTorch's at its defaults", 0.75, theirs["default"]["step"] if theirs else None)
    yield at_most(f"step / PyTorch's best ({name})", 0.98, theirs[name]["step"] if name else None)
    mine_best = best(ours, [BARE, "off", "default"])
    yield at_most(f"defaults / our best ({mine_best})", 1.03, ours[mine_best]["step"], to_beat=False)
    saved = [1 - on / off for on, off in zip(mine["step"], ours["off"]["step"], strict=True)]
    most = [1 - on / off for on, off in zip(at_limit, ours["off"]["step"], strict=True)]
    measured = statistics.median(saved)
    yield Goal(
        what=f"{task}: time that overlap saves",
        wanted=">= 0.25",
        measured=measured,
        possible=statistics.median(most),
        met=measured >= 0.25,
    )


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


def show_goals(found: Sequence[Goal]) -> None:
    """Prints the goals, and how many are met."""
    words = {True: "met", False: "NOT MET", None: "not measured"}
    print(f"\n{'goal':<50} {'wanted':>9} {'measured':>9} {'at limit':>9}")
    for goal in found:
        numbers = "".join(f" {'' if each is None else f'{each:.3f}':>9}" for each in (goal.measured, goal.possible))
        print(f"{goal.what:<50} {goal.wanted:>9}{numbers}  {words[goal.met]}")
    print(f"{sum(goal.met is True for goal in found)} of {len(found)} goals are met")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the cable, as tc writes it (default: 1gbit)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each task (default: 9)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn (default: 3)")
    parser.add_argument("--only", choices=TASKS, action="append", help="this task; may be given several times")
    parser.add_argument("--here", action="store_true", help="ranks of this machine, without hosts or a wire")
    parser.add_argument("--alone", action="store_true", help="without PyTorch")
    parser.add_argument("--json", type=Path, default=Path("overlap.json"), help="where the results go")
    return parser.parse_args()


def main() -> None:
    args = parse()
    load = os.getloadavg()[0]
    results: dict[str, Any] = {
        "benchmark": "overlap",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, " + ("one host" if args.here else "two network namespaces"),
        "rate": None if args.here else args.rate,
        "load": load,
        "tasks": {},
    }
    reached: list[Goal] = []
    with contextlib.ExitStack() as stack:
        hosts = None if args.here else stack.enter_context(two_hosts.hosts(args.rate))
        ours = stack.enter_context(Troupe("ddp", 2, hosts))
        rival = not args.alone and importlib.util.find_spec("torch") is not None
        theirs = stack.enter_context(Troupe("torch", 2, hosts)) if rival else None
        for task in args.only or ("mlp-512", "mlp-1024", "gpt"):
            found = results["tasks"][task] = measure(task, args.rounds, args.steps, ours, theirs)
            show(found)
            reached += goals(task, found)
        troupes = [each for each in (ours, theirs) if each is not None]
        results["versions"] = {key: value for each in troupes for key, value in each.versions.items()}
        results["idle"] = {each.library: each.idle() for each in troupes}
    show_goals(reached)
    print(f"load average before the run: {load:.2f}; share of a core that a rank took between its turns: ", end="")
    print(", ".join(f"{name} {share:.2%}" for name, share in results["idle"].items()))
    results["goals"] = [vars(goal) for goal in reached]
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
