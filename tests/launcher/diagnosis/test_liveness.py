"""What counts as motion, and whose fault it is that there is none, as tables: beats in, seconds and sentences out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.diagnosis.hang_diagnosis import diagnose_hang, table
from launcher.diagnosis.liveness import INIT, Liveness, RankState
from launcher.errors import LARGE_PACKETS

GATHER = "gather #417 (t.py:91)"
REDUCE = "all_reduce #416 (t.py:88)"


def hello(rank: int) -> dict[str, Any]:
    return {"rank": rank, "pid": 100 + rank, "agent": 200 + rank, "host": "here"}


def heartbeat(**fields: Any) -> dict[str, Any]:
    idle = {"state": "S", "cpu": 0.0, "calls": 0, "call": None, "call_state": None, "call_age": 0.0}
    return {**idle, "step": None, "where": None, "where_age": 0.0, "debugging": False, **fields}


WAITS = heartbeat(calls=5, call=REDUCE, call_state="started")
DONE = heartbeat(calls=4, call=REDUCE, call_state="done")
NEVER = heartbeat()


def follow(first: dict[int, dict[str, Any]], period: float = 1.0, until: int = 100, **rates: float) -> Liveness:
    """Ranks that repeat their first beat each second. rates: r0=1.0 has rank 0 use a whole core"""
    motion = Liveness(len(first))
    for rank in first:
        motion.rank_started(rank, hello(rank), 0.0)
    for second in range(1, until + 1):
        for rank, each in first.items():
            motion.heartbeat(rank, {**each, "cpu": second * rates.get(f"r{rank}", 0.0)}, float(second))
    return motion


# The first beats come at 1 s, and are the last thing that moves.
@pytest.mark.parametrize(
    ("beats", "rates", "quiet"),
    [
        ({0: WAITS, 1: DONE}, {"r1": 1.0}, 99.0),  # one waits, one spins outside
        ({0: WAITS, 1: NEVER}, {"r1": 1.0}, 99.0),  # ... and has never come to a collective
        ({0: WAITS, 1: WAITS}, {"r0": 1.0, "r1": 1.0}, 99.0),  # a wait may use a core
        ({0: DONE, 1: DONE}, {"r0": 1.0}, 0.0),  # one computes, and nobody waits for it yet
        ({0: DONE, 1: DONE}, {"r0": 0.03}, 0.0),  # it reads from a disk, which takes little
        ({0: DONE, 1: DONE}, {"r0": 0.003, "r1": 0.003}, 99.0),  # the threads of a rank that sleeps
        ({0: NEVER, 1: NEVER}, {}, 0.0),  # no world
        ({0: WAITS}, {}, 99.0),  # alone, but waiting
        ({0: heartbeat(state="T", calls=4, call=REDUCE, call_state="done"), 1: WAITS}, {}, 99.0),
        ({0: heartbeat(calls=4, call=REDUCE, call_state="failed"), 1: DONE}, {"r0": 1.0}, 0.0),
    ],
)
def test_quiet(beats: dict[int, dict[str, Any]], rates: dict[str, float], quiet: float) -> None:
    # CPU time that just exceeds what an idle rank takes shows after some beats only.
    assert follow(beats, **rates).quiet(100.0) == pytest.approx(quiet, abs=3.0 if rates and not quiet else 0.0)


@pytest.mark.parametrize(
    ("event", "args", "quiet"),
    [
        ("heartbeat", (1, {**DONE, "step": 7}), 0.0),
        ("heartbeat", (1, {**DONE, "calls": 5}), 0.0),
        ("heartbeat", (0, {**WAITS, "call_state": "done"}), 0.0),
        ("heartbeat", (1, {**DONE, "cpu": 50.0, "rss": 7, "where": "x.py:1 in f"}), 99.0),
        ("output", (1,), 0.0),
        ("output", (0,), 99.0),  # a thread of the rank that waits
        ("rank_ended", (1,), 0.0),
    ],
)
def test_what_moves_while_a_rank_waits(event: str, args: tuple[Any, ...], quiet: float) -> None:
    motion = follow({0: WAITS, 1: DONE})
    getattr(motion, event)(*args, 100.0)
    assert motion.quiet(100.0) == quiet


def test_nothing_is_judged_before_all_have_started_and_after_all_have_ended() -> None:
    motion = Liveness(2)
    motion.rank_started(0, hello(0), 0.0)
    motion.heartbeat(0, WAITS, 1.0)
    assert motion.quiet(50.0) == 0.0
    motion.rank_started(1, hello(1), 50.0)
    assert motion.quiet(60.0) == 10.0
    motion.rank_ended(0, 61.0)
    motion.rank_ended(1, 62.0)
    motion.heartbeat(1, WAITS, 62.0)  # as it may lie in a buffer
    assert motion.quiet(90.0) == 0.0
    assert motion.ranks(90.0) == []


def test_without_a_world_only_silence_counts() -> None:
    motion = follow({0: NEVER, 1: NEVER}, until=10)
    assert (motion.quiet(14.0), motion.quiet(16.0)) == (0.0, 6.0)
    motion.heartbeat(1, NEVER, 16.0)
    assert motion.quiet(17.0) == 0.0


def test_in_init_a_rank_waits_and_the_others_may_compute() -> None:
    motion = follow({0: NEVER, 1: NEVER}, until=10)
    motion.joining(0, True, 10.0)
    for second in range(11, 31):
        # Waiting takes a core, which counts for nothing.
        motion.heartbeat(0, {**NEVER, "cpu": float(second)}, float(second))
        motion.heartbeat(1, NEVER, float(second))
    assert motion.quiet(30.0) == 20.0
    waits, sleeps = motion.ranks(30.0)
    assert (waits.call, waits.waits, waits.call_age, sleeps.waits) == ("collectives.init()", True, 20.0, False)
    motion.heartbeat(1, {**NEVER, "cpu": 5.0}, 31.0)
    assert motion.quiet(31.0) == 0.0
    motion.joining(0, False, 40.0)
    assert motion.quiet(40.0) == pytest.approx(9.0)  # nobody waits any more: only silence counts
    assert motion.ranks(40.0)[0].call is None


def test_a_stopped_engine_is_blamed_for_ranks_in_init_alone() -> None:
    in_init = [waits(rank, calls=0, call="collectives.init()", where=None) for rank in (0, 1)]
    text = "mpiexec (pid 9) is stopped, while ranks 0-1 wait in collectives.init()"
    assert diagnose_hang(in_init, "mpiexec (pid 9)") == ((), text, (0,))
    assert diagnose_hang([waits(0), snapshot(1)], "mpiexec (pid 9)").ranks == (1,)


def test_what_a_rank_has_started_moves_for_it() -> None:
    motion = follow({0: DONE, 1: DONE}, until=10)
    for second in range(11, 31):
        motion.heartbeat(0, DONE, float(second))
        motion.heartbeat(1, {**DONE, "below": float(second - 10)}, float(second))
    assert motion.quiet(30.0) == 0.0
    motion.heartbeat(1, {**DONE, "below": 0.0}, 31.0)  # it has ended
    assert motion.quiet(31.0) == 1.0
    motion.heartbeat(1, {**DONE, "below": 0.5}, 32.0)  # another one
    assert motion.quiet(32.0) == 0.0


def snapshot(rank: int, call_age: float = 31.4, where_age: float = 0.4, silence: float = 0.5, **more: Any) -> RankState:
    """A rank at time 0, outside of collectives; ages in s."""
    known = {"host": "here", "state": "S", "calls": 416, "call": REDUCE, "on": "world", "call_state": "done"}
    times = {"call_at": -call_age, "where_at": -where_age, "heard_at": -silence, "now": 0.0, "cpu": 0.0}
    ids = {"rank": rank, "pid": 100 + rank, "agent": 200 + rank, "where": "d.py:31 in load"}
    return RankState(**{**ids, **known, **times, **more})


def waits(rank: int, **fields: Any) -> RankState:
    return snapshot(rank, **{"calls": 417, "call": GATHER, "call_state": "started", **fields})


BEHIND = snapshot(1)


@pytest.mark.parametrize(
    ("states", "ranks", "text"),
    [
        # behind
        ([BEHIND], (1,), "rank 1 (pid 101) sleeps at d.py:31 in load, {}"),
        (
            [snapshot(1, cpu=0.04, state="R", where_age=12.0)],
            (1,),
            "rank 1 (pid 101) computes; {seen} 12 s ago, in C code that keeps the GIL, {}",
        ),
        # the root is through with the call in which rank 1 is missed
        ([BEHIND, snapshot(2, calls=417, call=GATHER)], (1,), "rank 1 (pid 101) sleeps at d.py:31 in load, {}"),
        # stopped, silent, in the kernel
        ([snapshot(1, state="T", where_age=600.0, cpu=1.0)], (1,), "rank 1 (pid 101) is stopped; {seen} 600 s ago, {}"),
        (
            [waits(1, silence=33.0)],
            (1,),
            "rank 1 (pid 101) is not heard of: its agent (pid 201) has said nothing for 33 s, {}",
        ),
        (
            [snapshot(1, state="D")],
            (1,),
            "rank 1 (pid 101) is stuck in the kernel (a disk, a network file system, a driver) at d.py:31 in load, {}",
        ),
        # stopped outside, and another that is behind: both
        (
            [BEHIND, snapshot(2, state="T", where=None)],
            (2, 1),
            "rank 2 (pid 102) is stopped; rank 1 (pid 101) sleeps at d.py:31 in load, {}",
        ),
        # several hosts
        ([snapshot(1, host="node7")], (1,), "rank 1 on node7 (pid 101) sleeps at d.py:31 in load, {}"),
        # all wait
        (
            [waits(1, call="gather #417 (t.py:95)")],
            (),
            "all ranks wait in gather #417 (t.py:91): none is behind, which points to the network or the MPI",
        ),
        (
            [waits(1, call="all_gather #417 (t.py:95)"), waits(2)],
            (),
            "{other} ranks 0, 2 in gather #417 (t.py:91), rank 1 in all_gather #417 (t.py:95); {order}",
        ),
        (
            [waits(1, call=REDUCE, calls=416)],
            (1,),
            "{other} rank 0 in gather #417 (t.py:91), rank 1 in all_reduce #416 (t.py:88); {behind}; {order}",
        ),
    ],
)
def test_culprits(states: list[RankState], ranks: tuple[int, ...], text: str) -> None:
    words = {
        "seen": "its Python was last seen at d.py:31 in load,",
        "other": "the ranks wait in different calls:",
        "behind": "rank 1 is behind (416 calls so far)",
        "order": "every rank must make the same calls in the same order",
    }
    sentence = text.format("while rank 0 waits in gather #417 (t.py:91)", **words)
    assert diagnose_hang([waits(0), *states])[:2] == (ranks, sentence)


def test_large_packets_may_be_the_reason_that_ranks_of_several_hosts_wait_in_init() -> None:
    text = f"all ranks wait in {INIT}: none is behind, which points to the network or the MPI ({LARGE_PACKETS})"
    assert diagnose_hang([waits(0, call=INIT), waits(1, call=INIT, host="node7")])[:2] == ((), text)


@pytest.mark.parametrize(
    ("calls", "ranks", "text"),
    [
        (416, (), "no rank computes, and none waits in a collective: rank 0 (pid 100) sleeps at d.py:31 in load; {}"),
        (415, (1,), "{}, and no rank computes"),
    ],
)
def test_culprits_where_nobody_waits(calls: int, ranks: tuple[int, ...], text: str) -> None:
    sentence = text.format("rank 1 (pid 101) sleeps at d.py:31 in load")
    assert diagnose_hang([snapshot(0), snapshot(1, calls=calls)])[:2] == (ranks, sentence)


def test_table() -> None:
    rows = [
        waits(0, call_age=31.2, where="t.py:91 in evaluate", cpu=0.031),
        snapshot(1, host="node12"),
        snapshot(2, state="T", where_age=600.4, cpu=None),
        snapshot(3, calls=0, call=None, call_state=None, where=None, silence=12.0),
    ]
    lines = table(rows).splitlines()
    assert [re.split(r"  +", line) for line in lines] == [
        ["rank", "host", "pid", "last collective", "Python", "seen", "CPU", "state"],
        ["0", "here", "100", GATHER, "for 31 s", "t.py:91 in evaluate", "0.4 s ago", "3 %", "sleeping"],
        ["1", "node12", "101", REDUCE, "done 31 s ago", "d.py:31 in load", "0.4 s ago", "0 %", "sleeping"],
        ["2", "here", "102", REDUCE, "done 31 s ago", "d.py:31 in load", "600 s ago", "?", "stopped"],
        ["3", "here", "103", "none yet", "?", "0 %", "no news for 12 s"],
    ]
    words = ["state", "sleeping", "sleeping", "stopped", "no news"]
    assert len({line.index(word) for line, word in zip(lines, words, strict=True)}) == 1


def test_a_large_table_shows_the_culprits() -> None:
    rows = [waits(rank) for rank in range(100)]
    rows[77] = snapshot(77)
    lines = table(rows, diagnose_hang(rows).ranks, rows=10).splitlines()
    assert [line.split()[0] for line in lines] == ["rank", *"012345678", "77", "and"]
    assert lines[-1] == "and 90 more ranks"
