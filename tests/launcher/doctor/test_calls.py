"""`ddp-doctor calls`: what running processes did last, seen from outside."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest

from launcher.doctor.__main__ import main
from tests.conftest import Run

DOCTOR = [sys.executable, "-m", "launcher.doctor"]

RANK = """
import sys, time
from collectives.flight.recorder import Recorder
rank = int(sys.argv[1])
recorder = Recorder(rank, 2)
for number in range(20):
    signature = recorder.intern("world", "all_reduce", "float32", (512, number), "sum", "/home/me/train.py", 88)
    index = recorder.begin(signature, number)
    if rank == 0 or number < 19:
        recorder.end(index)
recorder.record_position(("/home/me/data.py", 31, "load"))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def ranks(start_job: Any) -> list[int]:
    """The pids of two recorded processes, the second of which is stopped in its last call."""
    jobs = [start_job([sys.executable, "-c", RANK, str(rank)]) for rank in range(2)]
    assert [job.process.stdout.readline() for job in jobs] == ["ready\n"] * 2
    jobs[1].process.send_signal(signal.SIGSTOP)
    return [job.process.pid for job in jobs]


@pytest.fixture
def doctor(run_job: Any) -> Run:
    return lambda *args, **expected: run_job([*DOCTOR, *map(str, args)], timeout=30, **expected)


def test_the_calls_of_two_ranks(ranks: list[int], doctor: Any) -> None:
    lines = doctor("calls", ranks[1], ranks[0], "--last", 3, code=0, err="").stdout.splitlines()
    assert " ".join(lines[0].split()) == "rank pid call dtype shape where communicator state begun took"
    assert [line.split()[:4] for line in lines[1:7]] == [
        [str(rank), str(ranks[rank]), "all_reduce", f"#{number}"] for rank in range(2) for number in (17, 18, 19)
    ]
    assert [line.split()[10] for line in lines[1:7]] == ["done"] * 5 + ["started"]
    last = "last call all_reduce #19 (train.py:88) sum float32 (512, 19)"
    assert lines[8].startswith(f"rank 0 (pid {ranks[0]}): {last}, done ")
    assert lines[9].startswith(f"rank 1 (pid {ranks[1]}): {last}, under way for ")
    assert " s; its Python stood at data.py:31 in load (" in lines[9]


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(ranks: list[int], doctor: Any, start_job: Any) -> None:
    other = start_job(["sleep", "60"]).process.pid
    done = doctor("calls", 4_194_305, other, ranks[0], ranks[0], code=1)
    first, second = done.stderr.splitlines()
    assert first == "ddp-doctor: there is no process 4194305"
    assert second.startswith(f"ddp-doctor: process {other} keeps no flight record")
    assert done.stdout.count("rank 0 (pid") == 1, "a pid that is given twice is shown once"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--hosts", "a", "--hostfile", "b"], "not allowed with argument --hosts"),
        (["cals", "1"], "ddp-doctor: unknown command cals 1 (did you mean calls?)"),
        (["calls"], "ddp-doctor: no process named: ddp-doctor calls PID..."),
        (["sweep", "--hosts", "a"], "ddp-doctor: ddp-doctor sweep takes no --hosts"),
        (["calls", "train.py"], "ddp-doctor: PID should be a positive whole number, not 'train.py'"),
    ],
)
def test_wrong_use(args: list[str], words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(args))
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
