"""Which ranks are started, and what is made of their results, or of their failure."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.doctor import ranks
from launcher.doctor.machine import versions
from launcher.doctor.probes import Answer
from launcher.doctor.ranks import Trial, trials
from launcher.network import Host

TIMED = [[16, 2.5e-6], [16384, 1.25e-5], [16 << 20, 5.2e-3]]
SEEN = {"wrong": [], "tried": 10, "dtypes": 7, "refused": [], "timed": TIMED, "nodes": 1, "versions": {}}
SPEED = [
    "ok all_reduce (2 ranks)     16 B       2.5 us",
    "ok all_reduce (2 ranks)   16 KiB      12.5 us     1.3 GB/s",
    "ok all_reduce (2 ranks)   16 MiB    5200.0 us     3.2 GB/s",
]
RIGHT = "ok 2 ranks over MPI and shared memory: 10 collectives give the right numbers in 7 dtypes"
AGAIN = "\nto see it again: ddp-launch -n 2 -m launcher.doctor.trial mpi 90.0"
HOSTS = (Host("a", 4), Host("b", 4), Host("c", 1))
ALL = {"mpiexec": True, "tasks": 0, "gpus": 0, "hosts": ()}
OLD = {"numpy": "1.26.4", "mpi4py": ""}
OLDER = f"b has numpy 1.26.4 (here: {versions()['numpy']}), mpi4py (none) (here: "
RAISED = ("0: Traceback", "0: ValueError: no", "ddp-launch: rank 0 (pid 7) raised ValueError: no")


def seen(**change: Any) -> Answer:
    return Answer({**SEEN, **change}, "")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (seen(), [RIGHT, *SPEED]),
        (seen(wrong=[["gather", "int32", 7]]), ["error gather of int32 gave 7 wrong elements between 2 ", *SPEED]),
        (seen(refused=["ours mpi has no reduce of uint8"]), [RIGHT, "warning ours mpi has no reduce of uint8", *SPEED]),
        (seen(versions={"a": versions()}), [RIGHT, *SPEED]),
        (seen(versions={"a": versions(), "b": versions() | OLD}), [RIGHT, f"warning {OLDER} -> rsync -a", *SPEED]),
        (Answer(SEEN, "", ("ddp-launch: killed",), 137), [RIGHT, "warning with exit status 137: ddp-l", *SPEED]),
        (
            Answer(None, "x", RAISED),
            [f"error rank 0 (pid 7) raised ValueError: no\n0: Traceback\n0: ValueError: no{AGAIN}"],
        ),
        (Answer(None, "not ended after 100 s"), [f"error try the collectives: not ended after 100 s{AGAIN}"]),
    ],
)
def test_ranks(answer: Answer, expected: list[str], assert_found: Any) -> None:
    assert_found(ranks.evaluate(answer, Trial(2)), *expected)


def test_ranks_elsewhere_and_on_gpus() -> None:
    trial = Trial(3, "hosts", HOSTS)
    assert ranks.command(trial)[:4] == ["-n", "3", "--hosts", "a:1,b:1,c:1"]
    first, speed, *_ = ranks.evaluate(seen(nodes=3), trial)
    assert first.text.startswith("3 ranks on a, b, c over MPI: 10 collectives")
    assert (speed.check, speed.text[:32]) == ("speed", "all_reduce (3 ranks on 3 hosts) ")
    alone = Trial(1, "nccl")
    assert ranks.command(alone)[-2] == "nccl"
    assert next(ranks.evaluate(seen(), alone)).text.startswith("1 rank over NCCL: ")
    (failed,) = ranks.evaluate(Answer(None, "died"), alone)
    assert failed.level == "warning", "NCCL is not needed"


@pytest.mark.parametrize(
    ("broken", "change", "expected"),
    [
        ((), {}, [Trial(2)]),
        (("memory", "gpu"), {"gpus": 8}, [Trial(2)]),
        (("mpi",), {"gpus": 8, "hosts": HOSTS, "tasks": 4}, []),
        ((), {"tasks": 4}, [Trial(2), Trial(2, "slurm")]),
        ((), {"gpus": 8}, [Trial(2), Trial(2, "nccl")]),
        ((), {"gpus": 1, "mpiexec": False}, [Trial(1, "nccl")]),
        ((), {"hosts": HOSTS}, [Trial(2), Trial(3, "hosts", HOSTS)]),
    ],
)
def test_what_is_tried(broken: tuple[str, ...], change: dict[str, Any], expected: list[Trial]) -> None:
    assert trials({*broken}, **{**ALL, **change}) == expected
