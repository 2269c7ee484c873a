"""Which MPI starts the ranks, and with what command.

Ranks are started by an engine that exists (MPICH's or Intel's hydra, Open MPI's prterun), never by a home-made one.
A wrong mpiexec is worse than none (each of its ranks would believe that it is alone): the one beside this Python wins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from launcher.job import UsageError

MPICH = "mpich"
INTEL = "intel"
OPENMPI = "openmpi"

# What Open MPI needs to start as fast as MPICH on one machine; by default it probes every network first.
_OPENMPI_FAST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_mtl": "^ofi", "OMPI_MCA_btl": "self,sm,tcp"}
# Open MPI keeps its files in /tmp/ompi.PID; what a killed one leaves there makes a later one with that pid fail.
_OPENMPI_SCRATCH = "PRTE_MCA_prte_tmpdir_base"
# The job is on this machine, also inside an allocation: no ssh, no srun.
_HYDRA_LOCAL = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
# An outer engine's word about its own rank must not be taken for the inner one's.
_FOREIGN = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")


def find_mpiexec(executable: str = sys.executable, environ: Mapping[str, str] = os.environ) -> str:
    """The path of `mpiexec`: beside this Python (the environment need not be activated), else on PATH.

    Raises: UsageError if there is none.
    """
    for folder in (os.path.dirname(executable), *environ.get("PATH", os.defpath).split(os.pathsep)):
        path = os.path.join(folder, "mpiexec")
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise UsageError("no MPI found (no mpiexec beside this Python, none on PATH): pip install mpich")


def flavour(mpiexec: str, version: Callable[[str], str] | None = None) -> str:
    """Which family `mpiexec` belongs to: "mpich", "intel" or "openmpi".

    version: runs `mpiexec --version` and returns what it prints; asked only where file names do not tell.
    Raises: UsageError if it is neither.
    """
    real = os.path.realpath(mpiexec)
    name = os.path.basename(real)
    if _any(os.path.dirname(real), "hydra_bstrap_proxy"):
        return INTEL
    if "hydra" in name or "mpich" in name:
        return MPICH
    if "prte" in name or "orte" in name or "openmpi" in name:
        return OPENMPI
    for folder in dict.fromkeys((os.path.dirname(mpiexec), os.path.dirname(real))):
        hydra = _any(folder, "mpiexec.hydra", "hydra_pmi_proxy")
        openmpi = _any(folder, "prterun", "orterun", "ompi_info")
        if hydra != openmpi:
            return MPICH if hydra else OPENMPI
    said = (version or _version)(mpiexec)
    if "Open MPI" in said or "OpenRTE" in said or "PRRTE" in said:
        return OPENMPI
    if "Intel(R) MPI" in said:
        return INTEL
    if "HYDRA" in said or "MPICH" in said:
        return MPICH
    raise UsageError(f"{mpiexec} is neither MPICH's nor Open MPI's; for one that is: pip install mpich")


def engine_command(family: str, mpiexec: str, n: int, rank: Sequence[str]) -> list[str]:
    """The command that starts `n` times the command `rank`.

    >>> engine_command("mpich", "mpiexec", 2, ["python", "train.py"])
    ['mpiexec', '-disable-auto-cleanup', '-n', '2', 'python', 'train.py']
    """
    # Binding to one core, Open MPI's default for two ranks, makes BLAS and our helper threads share it.
    openmpi = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    # Who died first, and what the others get to do about it, is for the launcher to judge.
    options = {OPENMPI: openmpi, MPICH: ["-disable-auto-cleanup"], INTEL: []}[family]
    return [mpiexec, *options, "-n", str(n), *rank]


def engine_environment(family: str | None, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
    """The environment of the engine: what makes it start fast on one machine, unless the user chose otherwise.

    family: None where a world of one is started without any engine
    scratch: a folder of this job alone, for the engine's own files
    """
    # Without HOME it does not start at all.
    openmpi = {"HOME": os.path.expanduser("~"), **_OPENMPI_FAST, _OPENMPI_SCRATCH: scratch}
    fast = {OPENMPI: openmpi, MPICH: _HYDRA_LOCAL, INTEL: _HYDRA_LOCAL, None: {}}[family]
    clean = {name: value for name, value in environ.items() if family is not None or not name.startswith(_FOREIGN)}
    return {**fast, **clean}


def _any(folder: str, *names: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def _version(mpiexec: str) -> str:
    import subprocess

    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, timeout=20, text=True, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpiexec} --version does not work: {error}") from None
    return done.stdout + done.stderr
