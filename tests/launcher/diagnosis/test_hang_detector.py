"""The detector of hangs: what it says when, on a clock of the test's own, and what it makes of real ranks that hang."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.diagnosis.failures import Hung, Raised, RankFailed, root_cause
from launcher.diagnosis.hang_detector import HangDetector, innermost
from tests.launcher.conftest import HEAD, LAUNCH

GATHER = "gather #417 (train.py:91) root=0 float32 (64, 10)"
WAITS = {"state": "S", "cpu": 0.0, "calls": 417, "call": GATHER, "call_state": "started", "call_age": 0.0}
SLEEPS = {**WAITS, "calls": 416, "call": "all_reduce #416 (train.py:88)", "call_state": "done", "where_age": 0.2}
SLEEPS["where"] = "data.py:31 in load"
STACKS = """\
Thread 0x00007f01 [sampler] (most recent call first):
  File "/lib/threading.py", line 359 in wait

Current thread 0x00007f00 (most recent call first):
  File "/home/me/data.py", line 31 in load
  File "/home/me/train.py", line 12 in <module>
"""


class FakeConsole:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.backlogged = False

    def say(self, text: str, quoted: str = "") -> None:
        sentence = f"ddp-launch: {text}\n" if text else ""
        self.said.append((sentence + quoted).rstrip("\n"))


class Harness:
    """A detector of two ranks, of which rank 0 waits for rank 1, with everything around it, and a clock."""

    def __init__(self, folder: Path | None = None, limit: float = 600.0, heartbeat: float = 1e9) -> None:
        self.console = FakeConsole()
        self.asked = 0
        self.failures: list[Any] = []
        self.now = 1_000.0
        self.beats: dict[int, dict[str, Any]] = {0: dict(WAITS), 1: dict(SLEEPS)}
        self.detector = HangDetector(2, limit, heartbeat, self.console, lambda: folder, lambda: self, lambda: self.now)
        self.start()

    def fail(self, failure: Any) -> None:
        self.failures.append(failure)

    def stopped_engine(self) -> str:
        return ""

    def request_stacks(self) -> None:
        self.asked += 1

    def start(self) -> None:
        for rank in (0, 1):
            self.rank_started(rank, "here")
        self.detector.tick(self.now)

    def rank_started(self, rank: int, host: str) -> None:
        self.detector.rank_started(rank, {"rank": rank, "pid": 100 + rank, "agent": 200 + rank, "host": host})

    def run(self, seconds: float, *silent: int) -> None:
        """Lets time pass; every rank but the silent ones sends its beat each second."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for rank, beat in self.beats.items():
                if rank not in silent:
                    self.detector.heartbeat(rank, dict(beat), self.now)
            assert self.detector.tick(self.now) > self.now or self.asked

    @property
    def output(self) -> str:
        return "\n".join(self.console.said)


def test_a_hang_is_announced_at_half_time_and_ends_the_job() -> None:
    harness = Harness()
    harness.run(300.0)
    assert harness.output == ""
    harness.run(1.0)  # the first beats were the last thing that moved
    assert harness.output == (
        "ddp-launch: nothing has moved for 300 s: rank 1 (pid 101) sleeps at data.py:31 in load, while rank 0 waits in "
        f"{GATHER}; ending the job in 300 s (--hang-timeout)"
    )
    harness.run(299.0)
    assert (len(harness.console.said), harness.asked) == (1, 0)
    harness.run(1.0)
    assert (harness.console.said[1:], harness.asked) == (["ddp-launch: nothing has moved for 600 s"], 1)
    harness.detector.stacks(1, STACKS)
    harness.detector.tick(harness.now + 0.1)
    assert harness.failures == []  # rank 0 has not answered yet
    harness.detector.stacks(0, STACKS)
    assert harness.detector.tick(harness.now + 0.2) == float("inf")
    text = f"nothing has moved for 600 s: rank 1 (pid 101) sleeps at data.py:31 in load, while rank 0 waits in {GATHER}"
    assert harness.failures == [Hung(noticed_at=harness.now + 0.2, ranks=(1,), message=text)]
    head, *rows = harness.console.said[2].splitlines()
    assert head.startswith("rank  host  pid  last collective")
    assert [row.split()[:3] for row in rows] == [["0", "here", "100"], ["1", "here", "101"]]
    innermost_first = '  File "/home/me/data.py", line 31 in load\n  File "/home/me/train.py", line 12 in <module>'
    assert harness.console.said[3:] == [f"ddp-launch: rank 1 stands here, innermost first:\n{innermost_first}"]
    harness.run(700.0)
    assert (len(harness.failures), len(harness.console.said)) == (1, 4)  # it has spoken


def test_stacks_go_to_the_log_folder(tmp_path: Path) -> None:
    harness = Harness(tmp_path, limit=10.0)
    harness.run(11.0)
    harness.detector.stacks(1, STACKS + "\udcff\ud800")  # the second is no byte
    harness.detector.tick(harness.now + 2.0)  # rank 0 does not answer
    assert [path.name for path in tmp_path.iterdir()] == ["stacks-rank-1.txt"]
    assert (tmp_path / "stacks-rank-1.txt").read_bytes() == STACKS.encode() + b"\\udcff\\ud800"
    assert harness.console.said[-1] == f"ddp-launch: the stacks of rank 1 are in {tmp_path}/stacks-rank-*.txt"
    assert len(harness.failures) == 1


def test_nobody_waits_for_the_stacks_of_a_stopped_rank() -> None:
    harness = Harness(limit=10.0)
    harness.beats[1]["state"] = "T"
    harness.run(11.0)
    harness.detector.stacks(0, STACKS)
    harness.detector.tick(harness.now)
    assert harness.failures[0].message.startswith("nothing has moved for 10 s: rank 1 (pid 101) is stopped")


def test_clocks_stand_still_in_a_debugger_while_the_launcher_is_stopped_and_while_nobody_reads() -> None:
    harness = Harness()
    harness.run(200.0)
    harness.detector.debugging(frozenset({1}))
    harness.run(1_000.0)
    harness.detector.debugging(frozenset())
    harness.beats[1]["step"] = 7
    harness.run(50.0)
    harness.now += 1_000.0
    harness.detector.resumed(1_000.0)
    harness.run(40.0)
    harness.console.backlogged = True
    harness.detector.tick(harness.now)
    harness.now += 1_000.0  # no beats are read meanwhile
    harness.detector.tick(harness.now)
    harness.console.backlogged = False
    assert harness.output == ""
    harness.run(212.0)
    assert "nothing has moved for 300 s" in harness.output
    harness.beats[1]["step"] = 8
    harness.run(1.0)
    assert re.fullmatch(r"ddp-launch: it moves again, after 3\d\d s", harness.console.said[1])


def test_a_rank_without_a_heartbeat_is_lost_after_its_own_limit() -> None:
    harness = Harness(heartbeat=30.0)
    harness.run(29.0, 1)
    assert harness.failures == []
    harness.console.backlogged = True
    harness.run(60.0, 1)  # nobody reads, and so nothing is heard
    harness.console.backlogged = False
    harness.run(2.0, 1)
    text = "lost rank 1: no heartbeat for 30 s, so its agent is stopped or its network is down"
    assert [*map(str, harness.failures)] == [f"{text} (more time: --heartbeat-timeout)"]
    assert harness.asked == 0
    harness = Harness(heartbeat=5.0)
    harness.run(6.0, 1)
    assert [*map(str, harness.failures)] == [f"{text} (more time: --heartbeat-timeout)".replace("30 s", "6.0 s")]


def test_a_host_of_which_nothing_is_heard_is_named() -> None:
    harness = Harness(heartbeat=30.0)
    harness.detector.attempt_started(1, 4)
    for rank in range(4):
        harness.rank_started(rank, f"node{rank // 2}")
        harness.beats[rank] = dict(WAITS)
    harness.run(3.0, 0)  # one of node0, a little late
    harness.run(31.0, 2, 3)
    text = "lost host node1 with ranks 2-3: no heartbeat for 30 s, so it or its network is down"
    assert [*map(str, harness.failures)] == [f"{text} (more time: --heartbeat-timeout)"]


def test_the_silence_of_a_lost_host_is_its_own() -> None:
    harness = Harness(heartbeat=30.0)
    harness.detector.attempt_started(1, 4)
    for rank in range(4):
        harness.rank_started(rank, f"node{rank // 2}")
        harness.beats[rank] = dict(WAITS)
    harness.run(3.0)
    harness.run(18.0, 1)
    harness.run(7.0, 1, 2, 3)
    raised = Raised(type="collectives.errors.CollectiveTimeout", message="", traceback="")
    harness.detector.failed(RankFailed(noticed_at=0.0, rank=0, pid=100, raised=raised))
    text = "lost host node1 with ranks 2-3: no heartbeat for 7.0 s, so it or its network is down"
    assert [*map(str, harness.failures)] == [text]


@pytest.mark.parametrize(
    ("error", "silence", "lost"),
    [("CollectiveTimeout", 15.0, 1), ("CollectiveTimeout", 4.0, 0), ("ArgumentError", 15.0, 0)],
)
def test_a_time_limit_that_ran_out_because_a_rank_is_lost_is_not_blamed(error: str, silence: float, lost: int) -> None:
    raised = Raised(type=f"collectives.errors.{error}", message="", traceback="")
    failure = RankFailed(noticed_at=0.0, rank=0, pid=100, raised=raised)
    harness = Harness(heartbeat=30.0)
    harness.run(3.0)
    harness.run(silence, 1)
    harness.detector.failed(failure)
    assert len(harness.failures) == lost
    assert root_cause([failure, *harness.failures]) is (harness.failures[0] if lost else failure)


def test_a_job_that_has_failed_or_ended_is_not_judged() -> None:
    for end in (
        lambda detector: detector.failed(RankFailed(noticed_at=0.0, rank=1, pid=101, status=3)),
        lambda detector: detector.ending(),
        lambda detector: detector.job_ended(0, ""),
    ):
        harness = Harness(limit=10.0)
        harness.run(2.0)
        end(harness.detector)
        harness.run(20.0)
        assert (harness.output, harness.asked) == ("", 0)


@pytest.mark.parametrize(
    ("stacks", "lines", "text"),
    [
        (STACKS, 1, '  File "/home/me/data.py", line 31 in load\n  and 1 more'),
        ("Current thread 0x1 (most recent call first):\n  <no Python frame>\n", 15, "  <no Python frame>"),
    ],
)
def test_innermost(stacks: str, lines: int, text: str) -> None:
    assert innermost(stacks, lines) == text


# -- real ranks. One job takes seconds and hardly a core, so all of them run at the same time.

WORLD = """
import ctypes
import numpy as np
import collectives
comm = collectives.init()
def step():
    comm.all_reduce(np.ones(3))
def load():
    {}
step()
if rank == 1:
    load()
step()
"""
TOGETHER = """
import collectives
comm = collectives.init()
comm.barrier()
until = time.monotonic() + 5
while time.monotonic() < until:
    {}
comm.barrier()
"""
CROSSED = """
import collectives
comm = collectives.init()
pair = comm.split(0, 0)
comm.recv(1) if rank == 0 else pair.barrier()
"""
WAIT = r"while rank 0 waits in all_reduce #1 \(job.py:10\) sum float64 \(3,\)$"
SEEN = r"its Python was last seen at job.py:\d+ in \S+, \d\.\d s ago"


class Case(NamedTuple):
    """A job; how it ends: what it says last, and what the table has of rank 1, as regular expressions."""

    body: str
    last: str
    row: str = ""
    code: int = 1
    options: tuple[str, ...] = ()


LONGER = ("--hang-timeout", "4")
CASES = {
    "sleeps, once": Case(
        WORLD.format("if os.environ['DDP_ATTEMPT'] == '0': time.sleep(60)"),
        f"sleeps at job.py:12 in load, {WAIT}",
        "(sleeping|running)",
        code=0,
        options=("--max-restarts", "1"),
    ),
    "another call": Case(
        CROSSED,
        r"the ranks wait in different calls: rank 0 in recv #\d .*, rank 1 in barrier #\d .*; every rank must make the "
        "same calls in the same order$",
        r"barrier .* (running|sleeping)",
    ),
    "computes in C, with the GIL": Case(
        WORLD.format("sum(range(10**12))"),
        f"computes; {SEEN}, in C code that keeps the GIL, {WAIT}",
        "running",
        options=("--hang-timeout", "6"),
    ),
    "together in time.sleep": Case(
        TOGETHER.format("time.sleep(60)"),
        "no rank computes, and none waits in a collective: rank 0 .* sleeps at ",
        "(sleeping|running)",
    ),
    "talks": Case(TOGETHER.format("print('here'); time.sleep(0.2)"), "", code=0, options=LONGER),
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize("names", [[*CASES][:2], pytest.param([*CASES][2:], marks=pytest.mark.long)], ids=[0, 1])
def test_real_ranks(start_job: Any, tmp_path: Path, names: list[str]) -> None:
    # Few at a time: on a loaded machine a rank that is not given a core for so long is taken for one that hangs.
    jobs = {}
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "job.py").write_text(HEAD + CASES[name].body)
        options = ["-n", "2", "--hang-timeout", "3", "--log-dir", str(folder / "logs"), *CASES[name].options]
        jobs[name] = start_job([*LAUNCH, *options, str(folder / "job.py")])
    for name, job in jobs.items():
        case = CASES[name]
        done = job.wait(60, code=case.code)
        message = f"{name}:\n{done.stderr}"
        lines = [line for line in done.stderr.splitlines() if line != "ddp-launch: restart 1 of 1"]
        if not case.last:
            # A machine with more to do than it can may still have kept a rank from its core for half the limit.
            assert all(line.endswith("(--hang-timeout)") or "it moves again" in line for line in lines), message
            continue
        assert re.search(case.last, lines[-1]), message
        at = next(number for number, line in enumerate(lines) if line.startswith("rank  host"))
        assert re.match("ddp-launch: nothing has moved for .*; ending the job in", lines[at - 2]), message
        assert re.match(r"ddp-launch: nothing has moved for [\d.]+ s$", lines[at - 1]), message
        assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["0", "1"], message
        assert re.search(f" {case.row}$", lines[at + 2]), message
        if "load" in lines[-1]:
            for rank, place in enumerate(("line 10 in step", "in load")):
                assert place in (tmp_path / name / f"logs/latest/stacks-rank-{rank}.txt").read_text()
