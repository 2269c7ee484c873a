"""Who makes a job hang, in one sentence and one table. Pure: what was last seen of each rank in, words out.

A rank is suspected if it is stopped, if its keeper has fallen silent, or if it is not in a collective while others wait
in one. Where all of them wait the calls tell: the same call speaks for the network, different calls for a program
that does not make the same calls on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from launcher.judging.motion import INIT, Sight
from launcher.judging.verdict import duration, name_rank, name_ranks

_SHOWN = 3  # ranks in a sentence
_ROWS = 40
_FRESH = 3.0  # s; a younger sample of the Python position is as good as now

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel (D)",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "I": "idle",
}
# "all_reduce #416 (train.py:88) sum float32 (512, 10)": what must agree is all but the line and the shape.
_CALL = re.compile(r"(?P<call>\S+ #\d+) \(.*?:\d+\) ?(?P<how>.*?)(?: ?\([^()]*\))?$")
_PAIRS = ("send", "recv")


class Finding(NamedTuple):
    """What is to be said of a hang.

    ranks: the culprits, none if nobody stands out
    text: a clause that may follow "nothing has moved for 600 s: "
    samples: ranks whose stacks say most, at most three: culprits, or one of each group
    """

    ranks: tuple[int, ...]
    text: str
    samples: tuple[int, ...]


def find(sights: Sequence[Sight], engine: str = "") -> Finding:
    """Who holds the others up.

    sights: of all ranks that run, at least one
    engine: name and pid of a process of the MPI that is stopped, without which no rank can leave `collectives.init`
    """
    hosts = len({sight.host for sight in sights}) > 1
    waiting = [sight for sight in sights if sight.waits and not sight.stopped and not sight.silent]
    out = [sight for sight in sights if sight not in waiting]
    if engine and any(sight.call == INIT for sight in waiting):
        return Finding((), f"{engine} is stopped, while {_who_waits_where(waiting)}", (waiting[0].rank,))
    if not out:
        return _all_wait(waiting, hosts)
    halted = [sight for sight in out if sight.stopped or sight.silent]
    free = [sight for sight in out if sight not in halted]
    if waiting:
        most = max(sight.calls for sight in waiting)
        # A root may be through with the call in which the others wait for somebody else.
        behind = [sight for sight in free if sight.calls < most] or ([] if halted else free)
        culprits = [*halted, *behind]
        return _accuse(culprits, f", while {_who_waits_where(waiting)}", hosts)
    if halted:
        return _accuse(halted, "", hosts)
    stuck = [sight for sight in free if sight.state == "D"]
    fewest = [sight for sight in free if sight.calls == min(each.calls for each in free)]
    culprits = stuck or (fewest if len(fewest) < len(free) else [])
    if culprits:
        return _accuse(culprits, ", and no rank computes", hosts)
    shown = _accuse(free, "", hosts)
    return Finding((), f"no rank computes, and none waits in a collective: {shown.text}", shown.samples)


def _accuse(culprits: Sequence[Sight], rest: str, hosts: bool) -> Finding:
    shown = culprits[:_SHOWN]
    left = len(culprits) - _SHOWN
    more = f"; and {left} more rank{'s' if left > 1 else ''}" if left > 0 else ""
    ranks = tuple(sight.rank for sight in culprits)
    return Finding(ranks, "; ".join(_account(sight, hosts) for sight in shown) + more + rest, ranks[:_SHOWN])


def _all_wait(waiting: Sequence[Sight], hosts: bool) -> Finding:
    groups: dict[tuple[str | None, str], list[Sight]] = {}
    for sight in waiting:
        groups.setdefault(_identity(sight), []).append(sight)
    several = len({sight.on for sight in waiting}) > 1
    samples = tuple(group[0].rank for group in groups.values())[:_SHOWN]
    if len(waiting) == 1:
        return _accuse(waiting, "", hosts)
    if len(groups) == 1:
        text = f"all ranks wait in {waiting[0].call}: none is behind, which speaks for the network or the MPI"
        return Finding((), text, samples)
    parts = [
        f"{name_ranks([sight.rank for sight in group])} in {group[0].call}{f' of {group[0].on}' if several else ''}"
        for group in groups.values()
    ]
    more = f", {len(parts) - _SHOWN} more calls" if len(parts) > _SHOWN else ""
    text = f"the ranks wait in different calls: {', '.join(parts[:_SHOWN])}{more}"
    fewest = min(sight.calls for sight in waiting)
    behind = tuple(sight.rank for sight in waiting if sight.calls == fewest)
    if len(behind) < len(waiting):
        is_ = "is" if len(behind) == 1 else "are"
        text += f"; {name_ranks(behind)} {is_} behind ({fewest} calls so far)"
    else:
        behind = ()
    if all((sight.call or "").startswith(_PAIRS) for sight in waiting):
        return Finding(behind, f"{text}; a recv ends only when the other rank sends", samples)
    return Finding(behind, f"{text}; every rank must make the same calls in the same order", samples)


def _identity(sight: Sight) -> tuple[str | None, str]:
    """What must agree on all ranks: communicator, name, number, op or root, dtype; not the line, nor the shape."""
    call = sight.call or ""
    found = _CALL.fullmatch(call)
    return sight.on, f"{found['call']} {found['how']}" if found else call


def _who_waits_where(waiting: Sequence[Sight]) -> str:
    calls = {_identity(sight) for sight in waiting}
    verb = "waits" if len(waiting) == 1 else "wait"
    more = {1: "", 2: " and another call"}.get(len(calls), f" and {len(calls) - 1} other calls")
    return f"{name_ranks([sight.rank for sight in waiting])} {verb} in {waiting[0].call}{more}"


def _account(sight: Sight, hosts: bool) -> str:
    """`rank 1 (pid 4712) sleeps at data.py:31 in load`"""
    who = name_rank(sight.rank, sight.pid, sight.host if hosts else "")
    if sight.silent:
        return f"{who} is out of sight: its keeper (pid {sight.keeper}) has said nothing for {duration(sight.silence)}"
    return f"{who} {_does(sight)}{_at(sight)}"


def _does(sight: Sight) -> str:
    if sight.stopped:
        return "is stopped"
    if sight.state == "D":
        return "is stuck in the kernel (a disk, a network file system, a driver)"
    if sight.waits:
        return f"waits in {sight.call}"
    return "computes" if _computes(sight) else "sleeps"


def _computes(sight: Sight) -> bool:
    # Who wants to run does so in most of its beats even where others leave it little of a core; who is woken now and
    # then, in few. Or its main thread waits for others of its own.
    return sight.ran > 0.5 or (sight.cpu is not None and sight.cpu > 0.3)


def _at(sight: Sight) -> str:
    if sight.where is None or sight.waits:
        return ""
    if sight.where_age <= _FRESH and not sight.stopped:
        return f" at {sight.where}"
    reason = ", in C code that keeps the GIL" if _computes(sight) and not sight.stopped else ""
    return f"; its Python was last seen at {sight.where}, {duration(sight.where_age)} ago{reason}"


_HEADINGS = ("rank", "host", "pid", "last collective", "", "Python", "seen", "CPU", "state")


def table(sights: Sequence[Sight], first: Sequence[int] = (), rows: int = _ROWS) -> str:
    """One row a rank; of more than `rows` ranks the culprits, named in `first`, and as many others as there is room."""
    shown = list(sights)
    if len(shown) > rows:
        kept = {*list(first)[:rows]}
        for sight in sights:
            if len(kept) == rows:
                break
            kept.add(sight.rank)
        shown = [sight for sight in sights if sight.rank in kept]
    cells = [_HEADINGS, *map(_row, shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join(lines + ([f"and {len(sights) - len(shown)} more ranks"] if len(shown) < len(sights) else []))


def _row(sight: Sight) -> tuple[str, ...]:
    call = sight.call or "none yet"
    age = duration(sight.call_age)
    since = {"queued": f"queued {age} ago", "started": f"for {age}", None: ""}
    how = since.get(sight.call_state, f"{sight.call_state} {age} ago")
    seen = f"{duration(sight.where_age)} ago" if sight.where is not None else ""
    cpu = f"{100 * sight.cpu:.0f} %" if sight.cpu is not None else "?"
    state = f"no news for {duration(sight.silence)}" if sight.silent else _STATES.get(sight.state, sight.state)
    return (str(sight.rank), sight.host, str(sight.pid), call, how, sight.where or "?", seen, cpu, state)
