"""GPU memory handed to MPI: who may, and what becomes of a trial that hangs, dies or lies."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives._gpu import cuda, probe, trial
from collectives._gpu.vote import Ballot, Choice, directly
from tests.collectives.gpu.conftest import AWARE, Rig
from tests.collectives.gpu.cupy_fake import FakeCupy
from tests.collectives.gpu.machine import Machine

SCRIPT = Path(__file__).with_name("on_direct.py")


def carrier_of(comm: Any, cupy: Any) -> str:
    x = cupy.asarray(np.full(3, comm.rank + 1.0))
    assert comm.all_reduce(x).get().tolist() == [sum(range(comm.size + 1))] * 3
    return comm._door._carrier.name


def test_all_ranks_hand_over_gpu_memory_or_none(rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "collectives"):
        assert rig(2, AWARE).run(carrier_of) == ["MPI"] * 2
        made = rig(2, AWARE)
        probe._known[1] = "a trial died"
        assert made.run(carrier_of) == ["host memory"] * 2
    no_nccl = "rank 0: there is no NCCL here; rank 1: there is no NCCL here"
    assert [record.message for record in caplog.records] == [
        f"arrays on GPUs go over MPI, which reads GPU memory: {no_nccl}",
        f"arrays on GPUs go over host memory: {no_nccl}; and not over MPI alone, as of rank 1: a trial died",
    ]


def test_only_an_mpi_is_tried(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(*_: object) -> str:
        pytest.fail("tried without need")

    monkeypatch.setattr(probe, "verdict", verdict)
    assert rig(2).run(carrier_of) == ["host memory"] * 2
    assert rig(1, AWARE).run(carrier_of) == ["single"]


def test_a_trial_is_made_once_by_each_rank(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    made = rig(2, AWARE)
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(probe, "_loaded", list)
    monkeypatch.setattr(probe, "prove", lambda command, limit: tried.append(int(command[3])) or "")

    def twice(comm: Any, cupy: Any) -> str:
        assert carrier_of(comm.duplicate(), cupy) == "MPI"
        return carrier_of(comm, cupy)

    assert made.run(twice) == ["MPI"] * 2
    assert sorted(tried) == [0, 1]


def test_the_vote_names_who_is_against() -> None:
    before = Choice(backend="mpi", reason="no NCCL")
    assert directly(before, [Ballot(), Ballot()]) == Choice(backend="direct", reason="no NCCL")
    assert directly(before, [Ballot(), Ballot(reason="it hung")]).reason.endswith("as of rank 1: it hung")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"print('{probe.PROVEN}')", ""),
        (f"print('a warning'); print('{probe.PROVEN}'); print('another')", ""),
        ("import os; os.kill(os.getpid(), 11)", "a trial of its MPI on GPU memory died of SIGSEGV"),
        (f"import os; print('{probe.PROVEN}', flush=True); os.abort()", "died of SIGABRT"),
        (f"print('{probe.PROVEN}'); raise SystemExit(3)", f"failed: {probe.PROVEN}"),
        ("print('other bytes arrived than were sent')", "failed: other bytes arrived than were sent"),
        ("raise RuntimeError('no device')", "failed: RuntimeError: no device"),
        ("pass", "failed: exit status 0"),
    ],
)
def test_what_is_made_of_a_trial(code: str, reason: str) -> None:
    found = probe.prove([sys.executable, "-c", code], 20)
    assert found.endswith(reason)
    assert bool(found) == bool(reason)


def test_a_trial_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "other = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
        "time.sleep(60)\n"
    )
    begun = time.monotonic()
    assert probe.prove([sys.executable, "-c", code], 2) == "a trial of its MPI on GPU memory had not ended after 2 s"
    assert time.monotonic() - begun < 10
    deadline = time.monotonic() + 5
    for pid in pids.read_text().split():
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline, "it still runs"
            time.sleep(0.01)


def test_a_trial_that_cannot_be_started_is_a_reason() -> None:
    assert "could not be started" in probe.prove(["/nowhere/python"], 5)


def test_a_trial_is_a_world_of_one_and_moves_data_as_the_job_does() -> None:
    engine = {
        "PMI_RANK": "1",
        "PMIX_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "SLURM_PROCID": "1",
        "MPI_LOCALRANKID": "1",
    }
    choices = {"OMPI_MCA_pml": "ucx", "UCX_TLS": "cuda", "MPICH_GPU_SUPPORT_ENABLED": "1", "CUDA_VISIBLE_DEVICES": "2"}
    made = probe.alone({**engine, **choices, "OMPI_MCA_ess_base_jobid": "7"})
    assert {name: value for name, value in made.items() if name != "PYTHONPATH"} == choices
    assert str(Path(probe.__file__).parents[2]) in made["PYTHONPATH"].split(os.pathsep)


class Library:
    """An MPI library; answers: what its one function says"""

    def __init__(self, name: str, answer: int, status: int = 0) -> None:
        def query(kind: int = 0, supported: Any = None) -> int:
            if supported is None:
                return answer
            supported._obj.value = answer
            return status

        setattr(self, name, query)


@pytest.mark.parametrize(
    ("library", "says"),
    [
        (Library("MPIX_GPU_query_support", 1), True),
        (Library("MPIX_GPU_query_support", 0), False),
        (Library("MPIX_GPU_query_support", 0, status=13), None),
        (Library("MPIX_Query_cuda_support", 1), True),
        (Library("MPIX_Query_cuda_support", 0), False),
        (Library("MPI_Init", 0), None),
    ],
)
def test_what_an_mpi_says_of_itself(library: Any, says: bool | None) -> None:
    assert probe.says(library) is says


def test_an_mpi_that_denies_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "prove", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(probe, "_loaded", lambda: [Library("MPIX_Query_cuda_support", 0)])
    assert probe._ask(0, 1) == "its MPI says that it cannot read GPU memory"


def fake_gpu() -> cuda.Cuda:
    return cuda.Cuda(FakeCupy(Machine(eager=True), 1), 0)


def test_an_mpi_that_moves_nothing_and_says_that_it_did_is_found_out() -> None:
    def request(*_: object) -> Any:
        return SimpleNamespace(Wait=lambda: None)

    lying = SimpleNamespace(COMM_SELF=SimpleNamespace(Irecv=request, Isend=request), BYTE=None)
    assert not trial.arrives(fake_gpu(), lying)


def test_a_device_that_is_not_there_proves_nothing(run_job: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_job([sys.executable, "-m", "collectives._gpu.trial", "99", "30"], timeout=60)
    assert done.returncode == 1
    assert probe.PROVEN not in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 3])
def test_the_contract_holds_over_a_real_mpi(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], size: int
) -> None:
    env = {"OPENBLAS_NUM_THREADS": "1"}
    done = run_job([*mpiexec, "-n", str(size), sys.executable, str(SCRIPT)], timeout=60, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("contract kept") == size


@pytest.mark.mpi
def test_a_trial_inside_a_job_is_no_rank_of_it(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str]
) -> None:
    script = SCRIPT.with_name("on_trial.py")
    done = run_job([*mpiexec, "-n", "2", sys.executable, str(script)], timeout=60, env={"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0: proven", "rank 1: proven"]
