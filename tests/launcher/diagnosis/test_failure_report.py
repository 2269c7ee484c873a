"""What is said of a job that failed, and when a rank's last lines are worth repeating."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.diagnosis.failure_report import Tail, explain
from launcher.diagnosis.failures import (
    AgentLost,
    EngineEnded,
    Failure,
    Hung,
    NotStarted,
    Raised,
    RankFailed,
    root_cause,
)

TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: no\n"
RAISED = RankFailed(
    noticed_at=0.0, rank=1, pid=101, host="node7", raised=Raised(type="ValueError", message="no", traceback=TRACEBACK)
)
KILLED = RankFailed(noticed_at=0.0, rank=3, pid=103, host="node7", status=-9, memory="it had 2 GiB")
DIED = "ddp-launch: rank 3{} (pid 103) was killed by SIGKILL (signal 9); often the kernel, out of memory (it had 2 GiB)"
EXITED = RankFailed(noticed_at=0.1, rank=0, pid=100, host="node6", status=3)
AGENT = AgentLost(noticed_at=0.0, rank=3, pid=203, host="node7")
HUNG = Hung(noticed_at=0.0, ranks=(3,), message="nothing has moved for 600 s: rank 3 ...")
UNBORN = EngineEnded(noticed_at=2.0, pid=7, status=9, missing=(1,))
LINES = "ddp-launch: the last 2 lines of rank 3:\none\ntwo"
NUMBERS = [b"%d\n" % number for number in range(50)]


class Buried:
    """Rank 3's last lines cannot be seen; everybody else's can."""

    def lines(self, rank: int) -> list[bytes]:
        return [b"one", b"two"] if rank == 3 else []


@pytest.mark.parametrize(
    ("failures", "engine_output", "hosts", "blocks", "code"),
    [
        ([RAISED], b"", False, [TRACEBACK, "ddp-launch: rank 1 (pid 101) raised ValueError: no"], 1),
        ([RAISED], b"", True, [TRACEBACK, "ddp-launch: rank 1 on node7 (pid 101) raised ValueError: no"], 1),
        (
            [RAISED, EXITED, KILLED],
            b"some words",
            False,
            [
                "ddp-launch: failed too: rank 0 (pid 100) exited with code 3; " + DIED.format("")[12:],
                TRACEBACK,
                "ddp-launch: rank 1 (pid 101) raised ValueError: no",
            ],
            1,
        ),
        (
            [KILLED, EXITED],
            b"",
            True,
            ["ddp-launch: failed too: rank 0 on node6 (pid 100) exited with code 3", LINES, DIED.format(" on node7")],
            137,
        ),
        ([AGENT], b"", False, [LINES, "ddp-launch: the agent of rank 3 (pid 203) died, and its rank with it"], 1),
        ([HUNG], b"", False, [LINES, "ddp-launch: nothing has moved for 600 s: rank 3 ..."], 1),
        ([Hung(noticed_at=0.0, ranks=(2, 3), message="hung")], b"", False, ["ddp-launch: hung"], 1),
        ([UNBORN], b" \n", False, [f"ddp-launch: {UNBORN}"], 9),
        ([UNBORN], b"no such host\n", False, ["no such host\n", f"ddp-launch: {UNBORN}"], 9),
        ([NotStarted(noticed_at=0.0, message="late")], b"no\xff", False, ["no\udcff", "ddp-launch: late"], 1),
        # an agent's own last words come through the engine
        ([EXITED], b"Traceback\n", False, ["Traceback\n", "ddp-launch: rank 0 (pid 100) exited with code 3"], 3),
    ],
)
def test_report(failures: list[Failure], engine_output: bytes, hosts: bool, blocks: list[str], code: int) -> None:
    report = explain(failures, engine_output, Buried(), hosts)
    printed = ["\n".join(filter(None, (text and f"ddp-launch: {text}", quoted))) for text, quoted in report.blocks]
    assert (printed, report.code) == (blocks, code)
    assert report.blocks[-1] == (report.sentence, "")


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a", b"b\nc", b"d\n"], [b"ab", b"cd"]),
        (NUMBERS, [b"%d" % number for number in range(30, 50)]),
        ([b"10%\r", b"20%\r", b"30%\nnext\r\n"], [b"30%", b"next"]),
        ([b"\r10%", b"\r20%", b"\r   \r\nnext\n"], [b"20%", b"next"]),
        ([b"done\n10%\r", b"20%\r"], [b"done", b"20%"]),
        ([b"x" * 3_000, b"y\n"], [b"[...] " + b"x" * 1_999 + b"y"]),
    ],
)
def test_last_lines(chunks: list[bytes], lines: list[bytes]) -> None:
    tail = Tail(frozenset({0}))
    for chunk in chunks:
        tail.output(0, "out", chunk)
    assert tail.lines(0) == lines


def test_last_lines_of_hidden_ranks_alone() -> None:
    tail = Tail(frozenset({3}))
    tail.output(0, "out", b"here\n")
    tail.output(3, "out", b"a")
    tail.output(3, "err", b"b\n")
    tail.output(3, "out", b"c\n")
    assert (tail.lines(3), tail.lines(0)) == ([b"b", b"ac"], [])
    assert explain([KILLED], b"", tail, False).blocks[0] == ("the last 2 lines of rank 3:", "b\nac")
    tail.attempt_started(1, 1)
    assert tail.lines(3) == []


def test_an_engine_that_wrote_to_what_had_gone_is_not_the_cause() -> None:
    broken = EngineEnded(noticed_at=0.0, pid=7, status=-13, missing=())
    assert root_cause([broken, EXITED]) is EXITED
    assert root_cause([broken, replace(EXITED, asked=True)]) is broken
    assert root_cause([replace(broken, status=-9), EXITED]).status == -9  # type: ignore[union-attr]
