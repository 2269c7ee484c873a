"""The pure parts of the launcher, as tables: what goes in, what comes out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from collectives.world import STOPPED
from launcher.diagnosis.failures import (
    AgentLost,
    EngineEnded,
    EngineLost,
    Failure,
    Hung,
    NotStarted,
    NotStopped,
    Raised,
    RankFailed,
    Stop,
    TimeLimit,
    describe_others,
    root_cause,
    stop_of,
)


def raised(rank: int, kind: str, message: str) -> RankFailed:
    return RankFailed(noticed_at=0.0, rank=rank, pid=100, raised=Raised(type=kind, message=message, traceback=""))


def rank_failed(at: float, rank: int, status: int, asked: bool = False) -> RankFailed:
    return RankFailed(noticed_at=at, rank=rank, pid=100 + rank, status=status, asked=asked)


FULL = "a full /dev/shm (df /dev/shm; in a container docker run --shm-size=1g)"
SEGV = "invalid memory access in native code; while ranks start"
NO_THREAD = "RuntimeError: can't start new thread (this user may have no more processes and threads: ulimit -u)"
RELATIVE = "ImportError: attempted relative import with no known parent package"
DASH_M = f"{RELATIVE} (a module of a package is started by -m: ddp-launch -m PACKAGE.MODULE)"
TOO_LARGE = "OSError: [Errno 27] File too large (ulimit -f limits the size of files)"
_RAISED = RankFailed(noticed_at=0.0, rank=1, pid=101, raised=Raised(type="ValueError", message="no", traceback=""))
_ECHO, _ECHO_OF_DDP = (
    RankFailed(noticed_at=0.0, rank=0, pid=100, raised=Raised(type=kind, message="rank 1", traceback=""))
    for kind in ("collectives.errors.PeerLeft", "ddp.errors.PeerError")
)
_KILLED = EngineEnded(noticed_at=0.1, pid=7, status=-9)
_LOST = EngineLost(noticed_at=0.1, name="hydra_pmi_proxy", pid=8)
_REAPER = EngineLost(noticed_at=0.2, name="the launcher's reaper", pid=9, above=True)
_AGENT = AgentLost(noticed_at=0.0, rank=0, pid=200)
_OTHER = AgentLost(noticed_at=0.1, rank=1, pid=201)
_UNBORN = EngineEnded(noticed_at=2.0, pid=7, status=9, missing=(1,))


@pytest.mark.parametrize(
    ("failures", "engine_output", "expected"),
    [
        ([_RAISED, rank_failed(0.1, 0, 3)], b"", 0),
        ([rank_failed(0, 0, 3), _RAISED, _KILLED], b"", 0),  # an exit code is the rank's own
        ([rank_failed(0, 0, -15, True), _AGENT, _KILLED], b"", 2),
        ([rank_failed(0, 0, 15), rank_failed(0.1, 1, 15), _LOST], b"", 2),  # its MPI ended it, without an engine
        ([rank_failed(0, 0, -9), _LOST], b"", 0),
        ([rank_failed(0, 0, -9), _KILLED], b"", 0),  # nobody had asked its agent to end
        ([_ECHO, rank_failed(0.1, 1, 3)], b"", 1),
        ([_ECHO_OF_DDP, _RAISED], b"", 1),
        ([_ECHO, rank_failed(0.1, 1, -15, True), EngineEnded(noticed_at=0.2, pid=7, status=1)], b"", 0),
        ([_AGENT, _OTHER], b"", 0),
        ([_AGENT, _OTHER], b"=   PID 201 RUNNING AT vm", 1),
        ([rank_failed(0, 0, -15, True), _OTHER], b"", 1),
        ([_AGENT, _LOST], b"", 1),
        ([_LOST, _AGENT, _REAPER], b"", 2),  # the engine went with what stood above it
        ([rank_failed(0, 0, 15), _LOST, _REAPER], b"", 2),
        (
            [rank_failed(0, 0, -15, True), EngineEnded(noticed_at=5.0, pid=7, status=-9)],
            b"",
            0,
        ),  # much later: another story
        ([rank_failed(0, 0, -15, True), _UNBORN], b"", 1),
        ([Hung(noticed_at=0.0, ranks=(1,), message=""), rank_failed(0.1, 1, 3), _KILLED], b"", 0),
        ([TimeLimit(noticed_at=0.0, seconds=1.0), _RAISED, _KILLED], b"", 0),
    ],
)
def test_cause(failures: list[Failure], engine_output: bytes, expected: int) -> None:
    assert root_cause(failures, engine_output) is failures[expected]


@pytest.mark.parametrize(
    ("failure", "text", "code"),
    [
        (_RAISED, "rank 1 (pid 101) raised ValueError: no", 1),
        (rank_failed(0, 2, 3), "rank 2 (pid 102) exited with code 3", 3),
        (rank_failed(0, 2, -7), f"rank 2 (pid 102) was killed by SIGBUS (signal 7); often {FULL}", 135),
        (rank_failed(0, 2, -11), f"rank 2 (pid 102) was killed by SIGSEGV (signal 11); {SEGV}, often {FULL}", 139),
        (raised(1, "RuntimeError", "can't start new thread"), f"rank 1 (pid 100) raised {NO_THREAD}", 1),
        (raised(1, "OSError", "[Errno 27] File too large"), f"rank 1 (pid 100) raised {TOO_LARGE}", 1),
        (raised(1, *RELATIVE.split(": ")), f"rank 1 (pid 100) raised {DASH_M}", 1),
        (rank_failed(0, 2, -40), "rank 2 (pid 102) was killed by signal 40", 168),
        (_AGENT, "the agent of rank 0 (pid 200) died, and its rank with it", 1),
        (_LOST, "hydra_pmi_proxy (pid 8), which had started the ranks, died", 1),
        (_KILLED, "mpiexec (pid 7) was killed by SIGKILL (signal 9) while ranks were running", 137),
        (_UNBORN, "mpiexec (pid 7) exited with code 9 before rank 1 had started", 9),
        (NotStarted(noticed_at=0, message="rank 1 did not start within 1 s"), "rank 1 did not start within 1 s", 1),
        (Hung(noticed_at=0, ranks=(1,), message="rank 1 is stopped"), "rank 1 is stopped", 1),
        (TimeLimit(noticed_at=0, seconds=3600.0), "the job took longer than 3600 s", 124),
        (replace(_RAISED, host="node7"), "rank 1 on node7 (pid 101) raised ValueError: no", 1),
    ],
)
def test_sentences_and_codes(failure: Failure, text: str, code: int) -> None:
    assert (str(failure), failure.code) == (text, code)


def test_others_are_one_line() -> None:
    failures = [_RAISED, *(rank_failed(0, rank, 1) for rank in range(6))]
    line = describe_others(failures, _RAISED)
    assert line.count("exited with code 1") == 3
    assert line.endswith("and 2 more")
    assert "rank 1 " not in line
    assert describe_others([_RAISED], _RAISED) == ""


@pytest.mark.parametrize(
    ("kind", "first", "second", "line"),
    [
        ("collectives.errors.CollectiveTimeout", "rank 0: late:\n  2.0 s", "rank 1: late:\n  2.1 s", "raised the same"),
        ("collectives.errors.CollectiveTimeout", "rank 0: late", "rank 1: later", "raised collectives.errors"),
        ("ValueError", "x\ny", "x\ny", "raised the same"),
        ("ValueError", "rank 0: x", "rank 1: x", "raised ValueError: rank 1: x"),
        ("ValueError", "x\ny", "x\nz", "raised ValueError: x [...]"),
    ],
)
def test_ranks_that_raised_the_same_are_told_together(kind: str, first: str, second: str, line: str) -> None:
    failures = [raised(0, kind, first), raised(1, kind, second)]
    assert line in describe_others(failures, failures[0])


AS_ASKED = "stopped as asked{}, state saved: start the same command to go on"
LATE = "{} ended before all had saved (more time: --grace): start the same command to go on from the checkpoint before"


@pytest.mark.parametrize(
    ("ends", "steps", "stop", "text"),
    [
        ([-15, -15], [], None, ""),
        ([STOPPED, STOPPED], [120, 120], Stop(120), AS_ASKED.format(" at step 120")),
        ([STOPPED, STOPPED], [7, 8], Stop(None), AS_ASKED.format("")),  # they do not agree
        ([0, STOPPED], [5], Stop(5), AS_ASKED.format(" at step 5")),  # rank 0 had nothing left to do
        ([STOPPED, -9], [5], Stop(5, (1,)), LATE.format("rank 1 was")),
        ([STOPPED, None], [], Stop(None, (1,)), LATE.format("rank 1 was")),
    ],
)
def test_how_a_job_stopped(ends: list[int | None], steps: Collection[int], stop: Stop | None, text: str) -> None:
    result = stop_of(dict(enumerate(ends)), steps)
    assert result == stop
    assert str(result or "") == text


def test_who_went_on_is_a_failure() -> None:
    failure = NotStopped(noticed_at=0.0, ranks=(1, 2), seconds=10.0)
    assert str(failure) == "ranks 1-2 went on for 10 s after the others had stopped as asked (more time: --grace)"
    assert failure.code == 1
