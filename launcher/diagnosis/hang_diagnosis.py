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
from launcher.diagnosis.liveness import INIT, RankState
from launcher.errors import LARGE_PACKETS

_SHOWN = 3  # ranks in a sentence
_ROWS = 40
_FRESH = 3.0  # s; a younger sample of the Python position is as good as now

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel (D)",
    "T": "stopped",
    "Z": "ended",
}
# "all_reduce #416 (train.py:88) sum float32 (512, 10)": what must agree is all but the line and the shape.
_CALL = re.compile(r"(?P<call>\S+ #\d+) \(.*?:\d+\) ?(?P<how>.*?)(?: ?\([^()]*\))?$")


class HangDiagnosis(NamedTuple):
    """The diagnosis of a hang.

    ranks: the culprits, none if no rank stands out
    text: a clause that may follow "nothing has moved for 600 s: "
    samples: ranks whose stacks say most, at most three: culprits, or one of each group
    """

    ranks: tuple[int, ...]
    text: str
    samples: tuple[int, ...]


def diagnose_hang(ranks: Sequence[RankState], engine: str = "") -> HangDiagnosis:
    """Who holds the others up.

    ranks: of all ranks that run, at least one
    engine: name and pid of a process of the MPI that is stopped, without which no rank can leave `collectives.init`
    """
    hosts = len({each.host for each in ranks}) > 1
    halted = [each for each in ranks if each.stopped or each.silent]
    waiting = [each for each in ranks if each.waits and not (each.stopped or each.silent)]
    free = [each for each in ranks if not (each.waits or each.stopped or each.silent)]
    if engine and any(each.call == INIT for each in waiting):
        return HangDiagnosis((), f"{engine} is stopped, while {_who_waits_where(waiting)}", (waiting[0].rank,))
    if len(waiting) == len(ranks):
        return _all_wait(waiting, hosts)
    if waiting:
        most = max(each.calls for each in waiting)
        # A root may be through with the call in which the others wait for another rank.
        behind = [each for each in free if each.calls < most] or ([] if halted else free)
        culprits = [*halted, *behind]
        return _accuse(culprits, f", while {_who_waits_where(waiting)}", hosts)
    if halted:
        return _accuse(halted, "", hosts)
    stuck = [each for each in free if each.state == "D"]
    least = min(each.calls for each in free)
    fewest = [each for each in free if each.calls == least]
    culprits = stuck or (fewest if len(fewest) < len(free) else [])
    if culprits:
        return _accuse(culprits, ", and no rank computes", hosts)
    shown = _accuse(free, "", hosts)
    return HangDiagnosis((), f"no rank computes, and none waits in a collective: {shown.text}", shown.samples)


def _accuse(culprits: Sequence[RankState], rest: str, hosts: bool) -> HangDiagnosis:
    shown = culprits[:_SHOWN]
    left = len(culprits) - _SHOWN
    more = f"; and {left} more rank{'s' if left > 1 else ''}" if left > 0 else ""
    ranks = tuple(each.rank for each in culprits)
    return HangDiagnosis(ranks, "; ".join(_account(each, hosts) for each in shown) + more + rest, ranks[:_SHOWN])


def _all_wait(waiting: Sequence[RankState], hosts: bool) -> HangDiagnosis:
    groups: dict[tuple[str | None, str], list[RankState]] = {}
    for each in waiting:
        groups.setdefault(_identity(each), []).append(each)
    several = len({each.on for each in waiting}) > 1
    samples = tuple(group[0].rank for group in groups.values())[:_SHOWN]
    if len(waiting) == 1:
        return _accuse(waiting, "", hosts)
    if len(groups) == 1:
        large = f" ({LARGE_PACKETS})" if hosts else ""
        text = f"all ranks wait in {waiting[0].call}: none is behind, which points to the network or the MPI{large}"
        return HangDiagnosis((), text, samples)
    parts = []
    for group in groups.values():
        on = f" of {group[0].on}" if several else ""
        parts.append(f"{name_ranks([each.rank for each in group])} in {group[0].call}{on}")
    more = f", {len(parts) - _SHOWN} more calls" if len(parts) > _SHOWN else ""
    text = f"the ranks wait in different calls: {', '.join(parts[:_SHOWN])}{more}"
    fewest = min(each.calls for each in waiting)
    behind = tuple(each.rank for each in waiting if each.calls == fewest)
    if len(behind) < len(waiting):
        is_ = "is" if len(behind) == 1 else "are"
        text += f"; {name_ranks(behind)} {is_} behind ({fewest} calls so far)"
    else:
        behind = ()
    return HangDiagnosis(behind, f"{text}; every rank must make the same calls in the same order", samples)


def _identity(each: RankState) -> tuple[str | None, str]:
    """What must agree on all ranks: communicator, name, number, op or root, dtype; not the line, nor the shape."""
    call = each.call or ""
    found = _CALL.fullmatch(call)
    return each.on, f"{found['call']} {found['how']}" if found else call


def _who_waits_where(waiting: Sequence[RankState]) -> str:
    calls = {_identity(each) for each in waiting}
    verb = "waits" if len(waiting) == 1 else "wait"
    more = {1: "", 2: " and another call"}.get(len(calls), f" and {len(calls) - 1} other calls")
    return f"{name_ranks([each.rank for each in waiting])} {verb} in {waiting[0].call}{more}"


def _account(each: RankState, hosts: bool) -> str:
    """`rank 1 (pid 4712) sleeps at data.py:31 in load`"""
    who = name_rank(each.rank, each.pid, each.host if hosts else "")
    if each.silent:
        return f"{who} is not heard of: its agent (pid {each.agent}) has said nothing for {duration(each.silence)}"
    return f"{who} {_does(each)}{_at(each)}"


def _does(each: RankState) -> str:
    if each.stopped:
        return "is stopped"
    if each.state == "D":
        return "is stuck in the kernel (a disk, a network file system, a driver)"
    if each.waits:
        return f"waits in {each.call}"
    return "computes" if _computes(each) else "sleeps"


def _computes(each: RankState) -> bool:
    return each.state == "R" or (each.cpu is not None and each.cpu > 0.3)


def _at(each: RankState) -> str:
    if each.where is None or each.waits:
        return ""
    if each.where_age <= _FRESH and not each.stopped:
        return f" at {each.where}"
    reason = ", in C code that keeps the GIL" if _computes(each) and not each.stopped else ""
    return f"; its Python was last seen at {each.where}, {duration(each.where_age)} ago{reason}"


_HEADINGS = ("rank", "host", "pid", "last collective", "", "Python", "seen", "CPU", "state")


def table(ranks: Sequence[RankState], first: Sequence[int] = (), rows: int = _ROWS) -> str:
    """One row a rank; of more than `rows` ranks the culprits, named in `first`, and as many others as there is room."""
    chosen = sorted(ranks, key=lambda each: (each.rank not in first, each.rank))[:rows]
    shown = sorted(chosen, key=lambda each: each.rank)
    cells = [_HEADINGS, *map(_row, shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join(lines + ([f"and {len(ranks) - len(shown)} more ranks"] if len(shown) < len(ranks) else []))


def _row(each: RankState) -> tuple[str, ...]:
    call = each.call or "none yet"
    age = duration(each.call_age)
    since = {"queued": f"queued {age} ago", "started": f"for {age}", None: ""}
    how = since.get(each.call_state, f"{each.call_state} {age} ago")
    seen = f"{duration(each.where_age)} ago" if each.where is not None else ""
    cpu = f"{100 * each.cpu:.0f} %" if each.cpu is not None else "?"
    state = f"no news for {duration(each.silence)}" if each.silent else _STATES.get(each.state, each.state)
    return (str(each.rank), each.host, str(each.pid), call, how, each.where or "?", seen, cpu, state)
