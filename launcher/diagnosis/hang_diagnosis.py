"""Which ranks make a job hang, in one sentence and one table. Pure: the last state of each rank in, words out.

A rank is suspected if it is stopped, if its agent is silent, or if it is not in a collective while others wait in one.
If all ranks wait, their calls are compared: the same call points to the network, different calls to a program that does
not make the same calls on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from launcher.diagnosis.failures import duration, name_rank, name_ranks
from launcher.diagnosis.liveness import INIT, RankSnapshot

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


class HangDiagnosis(NamedTuple):
    """What is to be said of a hang.

    ranks: the culprits, none if no rank stands out
    text: a clause that may follow "nothing has moved for 600 s: "
    samples: ranks whose stacks say most, at most three: culprits, or one of each group
    """

    ranks: tuple[int, ...]
    text: str
    samples: tuple[int, ...]


def diagnose_hang(snapshots: Sequence[RankSnapshot], engine: str = "") -> HangDiagnosis:
    """Who holds the others up.

    snapshots: of all ranks that run, at least one
    engine: name and pid of a process of the MPI that is stopped, without which no rank can leave `collectives.init`
    """
    hosts = len({snapshot.host for snapshot in snapshots}) > 1
    waiting = [snapshot for snapshot in snapshots if snapshot.waits and not snapshot.stopped and not snapshot.silent]
    out = [snapshot for snapshot in snapshots if snapshot not in waiting]
    if engine and any(snapshot.call == INIT for snapshot in waiting):
        return HangDiagnosis((), f"{engine} is stopped, while {_who_waits_where(waiting)}", (waiting[0].rank,))
    if not out:
        return _all_wait(waiting, hosts)
    halted = [snapshot for snapshot in out if snapshot.stopped or snapshot.silent]
    free = [snapshot for snapshot in out if snapshot not in halted]
    if waiting:
        most = max(snapshot.calls for snapshot in waiting)
        # A root may be through with the call in which the others wait for another rank.
        behind = [snapshot for snapshot in free if snapshot.calls < most] or ([] if halted else free)
        culprits = [*halted, *behind]
        return _accuse(culprits, f", while {_who_waits_where(waiting)}", hosts)
    if halted:
        return _accuse(halted, "", hosts)
    stuck = [snapshot for snapshot in free if snapshot.state == "D"]
    fewest = [snapshot for snapshot in free if snapshot.calls == min(each.calls for each in free)]
    culprits = stuck or (fewest if len(fewest) < len(free) else [])
    if culprits:
        return _accuse(culprits, ", and no rank computes", hosts)
    shown = _accuse(free, "", hosts)
    return HangDiagnosis((), f"no rank computes, and none waits in a collective: {shown.text}", shown.samples)


def _accuse(culprits: Sequence[RankSnapshot], rest: str, hosts: bool) -> HangDiagnosis:
    shown = culprits[:_SHOWN]
    left = len(culprits) - _SHOWN
    more = f"; and {left} more rank{'s' if left > 1 else ''}" if left > 0 else ""
    ranks = tuple(snapshot.rank for snapshot in culprits)
    return HangDiagnosis(
        ranks, "; ".join(_account(snapshot, hosts) for snapshot in shown) + more + rest, ranks[:_SHOWN]
    )


def _all_wait(waiting: Sequence[RankSnapshot], hosts: bool) -> HangDiagnosis:
    groups: dict[tuple[str | None, str], list[RankSnapshot]] = {}
    for snapshot in waiting:
        groups.setdefault(_identity(snapshot), []).append(snapshot)
    several = len({snapshot.on for snapshot in waiting}) > 1
    samples = tuple(group[0].rank for group in groups.values())[:_SHOWN]
    if len(waiting) == 1:
        return _accuse(waiting, "", hosts)
    if len(groups) == 1:
        text = f"all ranks wait in {waiting[0].call}: none is behind, which speaks for the network or the MPI"
        return HangDiagnosis((), text, samples)
    parts = []
    for group in groups.values():
        on = f" of {group[0].on}" if several else ""
        parts.append(f"{name_ranks([snapshot.rank for snapshot in group])} in {group[0].call}{on}")
    more = f", {len(parts) - _SHOWN} more calls" if len(parts) > _SHOWN else ""
    text = f"the ranks wait in different calls: {', '.join(parts[:_SHOWN])}{more}"
    fewest = min(snapshot.calls for snapshot in waiting)
    behind = tuple(snapshot.rank for snapshot in waiting if snapshot.calls == fewest)
    if len(behind) < len(waiting):
        is_ = "is" if len(behind) == 1 else "are"
        text += f"; {name_ranks(behind)} {is_} behind ({fewest} calls so far)"
    else:
        behind = ()
    if all((snapshot.call or "").startswith(_PAIRS) for snapshot in waiting):
        return HangDiagnosis(behind, f"{text}; a recv ends only when the other rank sends", samples)
    return HangDiagnosis(behind, f"{text}; every rank must make the same calls in the same order", samples)


def _identity(snapshot: RankSnapshot) -> tuple[str | None, str]:
    """What must agree on all ranks: communicator, name, number, op or root, dtype; not the line, nor the shape."""
    call = snapshot.call or ""
    found = _CALL.fullmatch(call)
    return snapshot.on, f"{found['call']} {found['how']}" if found else call


def _who_waits_where(waiting: Sequence[RankSnapshot]) -> str:
    calls = {_identity(snapshot) for snapshot in waiting}
    verb = "waits" if len(waiting) == 1 else "wait"
    more = {1: "", 2: " and another call"}.get(len(calls), f" and {len(calls) - 1} other calls")
    return f"{name_ranks([snapshot.rank for snapshot in waiting])} {verb} in {waiting[0].call}{more}"


def _account(snapshot: RankSnapshot, hosts: bool) -> str:
    """`rank 1 (pid 4712) sleeps at data.py:31 in load`"""
    who = name_rank(snapshot.rank, snapshot.pid, snapshot.host if hosts else "")
    if snapshot.silent:
        return (
            f"{who} is not heard of: its agent (pid {snapshot.agent}) has said nothing for {duration(snapshot.silence)}"
        )
    return f"{who} {_does(snapshot)}{_at(snapshot)}"


def _does(snapshot: RankSnapshot) -> str:
    if snapshot.stopped:
        return "is stopped"
    if snapshot.state == "D":
        return "is stuck in the kernel (a disk, a network file system, a driver)"
    if snapshot.waits:
        return f"waits in {snapshot.call}"
    return "computes" if _computes(snapshot) else "sleeps"


def _computes(snapshot: RankSnapshot) -> bool:
    # Who wants to run does so in most of its beats even where others leave it little of a core; who is woken now and
    # then, in few. Or its main thread waits for others of its own.
    return snapshot.ran > 0.5 or (snapshot.cpu is not None and snapshot.cpu > 0.3)


def _at(snapshot: RankSnapshot) -> str:
    if snapshot.where is None or snapshot.waits:
        return ""
    if snapshot.where_age <= _FRESH and not snapshot.stopped:
        return f" at {snapshot.where}"
    reason = ", in C code that keeps the GIL" if _computes(snapshot) and not snapshot.stopped else ""
    return f"; its Python was last seen at {snapshot.where}, {duration(snapshot.where_age)} ago{reason}"


_HEADINGS = ("rank", "host", "pid", "last collective", "", "Python", "seen", "CPU", "state")


def table(snapshots: Sequence[RankSnapshot], first: Sequence[int] = (), rows: int = _ROWS) -> str:
    """One row a rank; of more than `rows` ranks the culprits, named in `first`, and as many others as there is room."""
    shown = list(snapshots)
    if len(shown) > rows:
        kept = {*list(first)[:rows]}
        for snapshot in snapshots:
            if len(kept) == rows:
                break
            kept.add(snapshot.rank)
        shown = [snapshot for snapshot in snapshots if snapshot.rank in kept]
    cells = [_HEADINGS, *map(_row, shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join(lines + ([f"and {len(snapshots) - len(shown)} more ranks"] if len(shown) < len(snapshots) else []))


def _row(snapshot: RankSnapshot) -> tuple[str, ...]:
    call = snapshot.call or "none yet"
    age = duration(snapshot.call_age)
    since = {"queued": f"queued {age} ago", "started": f"for {age}", None: ""}
    how = since.get(snapshot.call_state, f"{snapshot.call_state} {age} ago")
    seen = f"{duration(snapshot.where_age)} ago" if snapshot.where is not None else ""
    cpu = f"{100 * snapshot.cpu:.0f} %" if snapshot.cpu is not None else "?"
    state = (
        f"no news for {duration(snapshot.silence)}" if snapshot.silent else _STATES.get(snapshot.state, snapshot.state)
    )
    return (str(snapshot.rank), snapshot.host, str(snapshot.pid), call, how, snapshot.where or "?", seen, cpu, state)
