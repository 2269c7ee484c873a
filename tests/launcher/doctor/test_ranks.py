"""What is made of the ranks' results, or of their failure."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.doctor import ranks
from launcher.doctor.findings import Level
from launcher.doctor.probes import Answer
from launcher.doctor.ranks import Trial
from launcher.network import Host

SEEN = {
    "wrong": [],
    "tried": 10,
    "dtypes": 7,
    "refused": [],
    "timed": [[4, 2.5e-6], [65536, 1.25e-5], [1 << 20, 1.1e-4], [25 << 20, 5.2e-3]],
    "backend": "mpi",
    "ranks": 2,
    "nodes": 1,
}
SPEED = [
    "ok all_reduce (2 ranks)     4 B     2.5 us",
    "ok all_reduce (2 ranks)  64 KiB    12.5 us  5.2 GB/s",
    "ok all_reduce (2 ranks)   1 MiB   110.0 us  9.5 GB/s",
    "ok all_reduce (2 ranks)  25 MiB  5200.0 us  5.0 GB/s",
]
RIGHT = "ok 2 ranks over MPI and shared memory: 10 collectives give the right numbers in 7 dtypes"
AGAIN = "\nto see it again: ddp-launch -n 2 -m launcher.doctor.trial mpi 90.0"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(SEEN, ""), [RIGHT, *SPEED]),
        (
            Answer({**SEEN, "wrong": [["gather", "int32", 7]]}, ""),
            [f"error gather of int32 gave 7 wrong elements between 2 ranks over MPI and shared memory{AGAIN}", *SPEED],
        ),
        (
            Answer({**SEEN, "refused": ["ours mpi has no reduce of uint8"]}, ""),
            [RIGHT, "warning ours mpi has no reduce of uint8", *SPEED],
        ),
        (
            Answer(SEEN, "", ("ddp-launch: rank 0 was killed",), 137),
            [RIGHT, "warning then ended with exit status 137: ddp-launch: rank 0 was killed", *SPEED],
        ),
        (
            Answer(
                None, "x", ("0: Traceback", "0: ValueError: no", "ddp-launch: rank 0 (pid 7) raised ValueError: no")
            ),
            [f"error rank 0 (pid 7) raised ValueError: no\n0: Traceback\n0: ValueError: no{AGAIN}"],
        ),
        (
            Answer(None, "the process that tried had not ended after 100 s"),
            [f"error could not try the collectives: the process that tried had not ended after 100 s{AGAIN}"],
        ),
    ],
)
def test_ranks(answer: Answer, expected: list[str], assert_found: Any) -> None:
    assert_found(ranks.judge(answer, Trial(2)), *expected)


def test_ranks_elsewhere_and_on_gpus() -> None:
    there = Trial(2, "hosts", (Host("a", 4), Host("fe80::1", 4)))
    assert ranks.command(there)[:4] == ["-n", "2", "--hosts", "a:1,[fe80::1]:1"]
    first, speed, *_ = ranks.judge(Answer({**SEEN, "nodes": 2}, ""), there)
    assert first.text.startswith("2 ranks on a, fe80::1 over MPI: 10 collectives")
    assert speed.text.startswith("all_reduce (2 ranks on 2 hosts)")
    assert ranks.judge(Answer(SEEN, ""), Trial(2, "slurm"))[0].text.startswith("2 ranks that Slurm starts: 10 ")
    alone = Trial(1, "nccl")
    assert ranks.command(alone)[-2] == "nccl"
    assert ranks.judge(Answer(SEEN, ""), alone)[0].text.startswith("1 rank over NCCL: ")
    (failed,) = ranks.judge(Answer(None, "died"), alone)
    assert failed.level is Level.WARNING, "NCCL is not needed"
