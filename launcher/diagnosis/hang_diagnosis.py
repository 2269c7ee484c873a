"""Which ranks make a job hang, as one sentence and one table. Pure: the last state of each rank in, text out.

A rank is blamed if it is stopped, or if its agent is silent. If some ranks wait in a collective, ranks outside of it
that have made fewer calls are blamed, too; if that leaves no rank to blame, all ranks outside are blamed. If all ranks
wait, their calls are compared. The same call points to the network. Different calls mean that the program does not make
the same calls on every rank. If no rank waits, and none is stopped or silent, ranks that are stuck in the kernel are
blamed, else those with the fewest calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from collectives.errors import align_columns, name_ranks, ranks_with_verb
from launcher.diagnosis.failures import duration, name_rank
from launcher.diagnosis.liveness import INIT, RankState
from launcher.errors import LARGE_PACKETS, plural

# Maximum number of ranks, or of groups of ranks, that the sentence describes.
_SHOWN = 3
# Maximum number of ranks in the table.
_ROWS = 40
# Age (s) up to which the last known position of the Python code is reported as the present one.
_FRESH = 3.0
# A rank computes if its process is running ("R"), or if it uses more than this fraction of a core.
_BUSY = 0.3

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel (D)",
    "T": "stopped",
    "Z": "ended",
}
# A call as text, like "all_reduce #416 (train.py:88) sum float32 (512, 10)". The groups are the parts that must be the
# same on all ranks: all except the position and the shape.
_CALL = re.compile(r"(?P<call>\S+ #\d+) \(.*?:\d+\) ?(?P<how>.*?)(?: ?\([^()]*\))?$")


class HangDiagnosis(NamedTuple):
    """The diagnosis of a hang.

    ranks: those that are blamed; empty if no rank stands out
    text: a clause that may follow "nothing has moved for 600 s: "
    samples: at most three ranks whose stacks are shown. If all ranks wait: one rank of each group of equal calls. Else:
    blamed ranks, or any ranks if none is blamed
    """

    ranks: tuple[int, ...]
    text: str
    samples: tuple[int, ...]


def diagnose_hang(states: Sequence[RankState], engine: str = "") -> HangDiagnosis:
    """Finds the ranks that hold the others up.

    states: of all ranks that run, at least one
    engine: name and pid of a stopped process of the engine, or of the stopped reaper; "" if none is stopped. While it
    is stopped, no rank can leave `collectives.init`
    """
    if len({state.host for state in states}) == 1:
        states = [replace(state, host="") for state in states]  # The sentence names hosts only if there are several.
    unresponsive = [state for state in states if state.unresponsive]
    waiting = [state for state in states if state.waits and not state.unresponsive]
    outside = [state for state in states if not (state.waits or state.unresponsive)]
    if engine and any(state.call == INIT for state in waiting):
        return HangDiagnosis((), f"{engine} is stopped, while {_describe_waiting(waiting)}", (waiting[0].rank,))
    if len(waiting) == len(states):
        return _compare_calls(waiting)
    if waiting:
        most = max(state.calls for state in waiting)
        # A rank outside of collectives is not behind if it has made as many calls as those that wait. For example, the
        # root may have finished a collective in which others still wait for another rank.
        behind = [state for state in outside if state.calls < most]
        if not (unresponsive or behind):
            behind = outside
        return _blame([*unresponsive, *behind], f", while {_describe_waiting(waiting)}")
    if unresponsive:
        return _blame(unresponsive)
    stuck = [state for state in outside if state.state == "D"]
    if culprits := stuck or _with_fewest_calls(outside):
        return _blame(culprits, ", and no rank computes")
    all_ranks = _blame(outside)
    text = f"no rank computes, and none waits in a collective: {all_ranks.text}"
    return HangDiagnosis((), text, all_ranks.samples)


def _with_fewest_calls(states: Sequence[RankState]) -> list[RankState]:
    """The ranks that have made the fewest calls; [] if all have made equally many."""
    fewest = min(state.calls for state in states)
    behind = [state for state in states if state.calls == fewest]
    return behind if len(behind) < len(states) else []


def _blame(states: Sequence[RankState], ending: str = "") -> HangDiagnosis:
    """The diagnosis that these ranks are to blame. ending: the end of its text"""
    text = "; ".join(_describe(state) for state in states[:_SHOWN])
    if (hidden := len(states) - _SHOWN) > 0:
        text += f"; and {plural(hidden, 'more rank')}"
    ranks = _ranks(states)
    return HangDiagnosis(ranks, text + ending, ranks[:_SHOWN])


def _compare_calls(waiting: Sequence[RankState]) -> HangDiagnosis:
    """The diagnosis if all ranks wait."""
    if len(waiting) == 1:
        return _blame(waiting)
    groups: dict[tuple[str | None, str], list[RankState]] = {}
    for state in waiting:
        groups.setdefault(_call_key(state), []).append(state)
    samples = tuple(group[0].rank for group in groups.values())[:_SHOWN]
    if len(groups) == 1:
        hint = f" ({LARGE_PACKETS})" if waiting[0].host else ""
        text = f"all ranks wait in {waiting[0].call}: none is behind, which points to the network or the MPI{hint}"
        return HangDiagnosis((), text, samples)
    several_communicators = len({state.on for state in waiting}) > 1
    parts = []
    for group in groups.values():
        on = f" of {group[0].on}" if several_communicators else ""
        parts.append(f"{name_ranks(_ranks(group))} in {group[0].call}{on}")
    text = f"the ranks wait in different calls: {', '.join(parts[:_SHOWN])}"
    if len(parts) > _SHOWN:
        text += f", {plural(len(parts) - _SHOWN, 'more call')}"
    if behind := _with_fewest_calls(waiting):
        text += f"; {_with_verb(behind, 'is', 'are')} behind ({plural(behind[0].calls, 'call')} so far)"
    return HangDiagnosis(_ranks(behind), f"{text}; every rank must make the same calls in the same order", samples)


def _ranks(states: Sequence[RankState]) -> tuple[int, ...]:
    return tuple(state.rank for state in states)


def _with_verb(states: Sequence[RankState], of_one: str, of_several: str) -> str:
    return ranks_with_verb(_ranks(states), of_one, of_several)


def _call_key(state: RankState) -> tuple[str | None, str]:
    """The parts of a rank's call that must be the same on all ranks: communicator, name, number, op or root, dtype."""
    call = state.call or ""
    match = _CALL.fullmatch(call)
    return state.on, f"{match['call']} {match['how']}" if match else call


def _describe_waiting(waiting: Sequence[RankState]) -> str:
    """A clause that names the ranks that wait and the call of the first, and counts other calls."""
    calls = {_call_key(state) for state in waiting}
    others = {1: "", 2: " and another call"}.get(len(calls), f" and {len(calls) - 1} other calls")
    return f"{_with_verb(waiting, 'waits', 'wait')} in {waiting[0].call}{others}"


def _describe(state: RankState) -> str:
    """A clause about one rank: `rank 1 (pid 4712) sleeps at data.py:31 in load`."""
    who = name_rank(state.rank, state.pid, state.host)
    if state.silent:
        return f"{who} is not heard of: its agent (pid {state.agent}) has said nothing for {duration(state.silence)}"
    return f"{who} {_activity(state)}{_position(state)}"


def _activity(state: RankState) -> str:
    if state.stopped:
        return "is stopped"
    if state.state == "D":
        return "is stuck in the kernel (a disk, a network file system, a driver)"
    if state.waits:
        return f"waits in {state.call}"
    return "computes" if _computes(state) else "sleeps"


def _computes(state: RankState) -> bool:
    return state.state == "R" or (state.cpu or 0.0) > _BUSY


def _position(state: RankState) -> str:
    if state.where is None or state.waits:
        return ""
    if state.where_age <= _FRESH and not state.stopped:
        return f" at {state.where}"
    reason = ", in C code that keeps the GIL" if _computes(state) and not state.stopped else ""
    return f"; its Python was last seen at {state.where}, {duration(state.where_age)} ago{reason}"


_HEADINGS = ("rank", "host", "pid", "last collective", "", "Python", "seen", "CPU", "state")


def table(states: Sequence[RankState], first: Sequence[int] = (), rows: int = _ROWS) -> str:
    """A table with one row per rank. If there are more than `rows` ranks, ranks in `first` take precedence."""
    chosen = sorted(states, key=lambda state: (state.rank not in first, state.rank))[:rows]
    chosen.sort(key=lambda state: state.rank)
    lines = align_columns([_HEADINGS, *map(_row, chosen)])
    if len(chosen) < len(states):
        lines.append(f"and {plural(len(states) - len(chosen), 'more rank')}")
    return "\n".join(lines)


def _row(state: RankState) -> tuple[str, ...]:
    age = duration(state.call_age)
    progress = {"queued": f"queued {age} ago", "started": f"for {age}", None: ""}
    return (
        str(state.rank),
        state.host,
        str(state.pid),
        state.call or "none yet",
        progress.get(state.call_state, f"{state.call_state} {age} ago"),
        state.where or "?",
        f"{duration(state.where_age)} ago" if state.where is not None else "",
        f"{100 * state.cpu:.0f} %" if state.cpu is not None else "?",
        f"no news for {duration(state.silence)}" if state.silent else _STATES.get(state.state, state.state),
    )
