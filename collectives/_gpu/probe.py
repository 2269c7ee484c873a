"""Whether this process's MPI can be handed GPU memory: asked of the MPI, then tried in a process that may die of it.

An MPI that cannot dies of SIGSEGV, hangs, or moves something else, and says nothing beforehand. So `trial` runs in a
process of its own, a world of one, under a time limit; only if the right bytes have arrived there is it done here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LIMIT = 60.0  # s; importing CuPy and starting MPI takes seconds on a busy file system
#: What the trial prints when it has succeeded.
PROVEN = "GPU memory arrived over MPI"

# What an engine tells its ranks: with it the trial would take itself for a rank of the job.
_ENGINES = (
    *("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "ORTE_", "SLURM_", "HYDRA_", "HYDI_", "MPI_LOCAL"),
    *("PALS_", "FLUX_", "MPIEXEC_", "MV2_COMM_", "LSB_", "PBS_"),
)
# Among it, what says how Open MPI moves data, which is to be tried as it is.
_KEPT = tuple(f"OMPI_MCA_{what}" for what in ("pml", "btl", "mtl", "accelerator", "opal_cuda", "smcuda"))

_lock = threading.Lock()
_known: dict[int, str] = {}


def verdict(device: int, limit: float = LIMIT) -> str:
    """Why this process's MPI is not handed memory of that GPU; "" if it has been seen to move it. Asked once a process.

    limit: s; how long the trial may take
    """
    with _lock:
        if device not in _known:
            _known[device] = _ask(device, limit)
        return _known[device]


def _ask(device: int, limit: float) -> str:
    if any(says(library) is False for library in _loaded()):
        return "its MPI says that it cannot read GPU memory"
    return prove([sys.executable, "-m", "collectives._gpu.trial", str(device), str(limit)], limit)


def says(library: ctypes.CDLL) -> bool | None:
    """What an MPI says of itself and CUDA; None if it says nothing."""
    supported = ctypes.c_int(0)
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH and its kin, where CUDA is 0
        failed = library.MPIX_GPU_query_support(0, ctypes.byref(supported))
        return None if failed else bool(supported.value)
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        return bool(library.MPIX_Query_cuda_support())
    return None


def _loaded() -> Iterator[ctypes.CDLL]:
    """The MPI libraries that this process has loaded."""
    with contextlib.suppress(OSError):  # no /proc: none is known to be loaded
        paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        for path in sorted(paths):
            if Path(path).name.startswith("libmpi"):
                with contextlib.suppress(OSError):  # unloaded meanwhile
                    yield ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW)


def prove(command: Sequence[str], limit: float) -> str:
    """Why a trial has not succeeded, "" if it has. It and what it started are gone when this returns."""
    with tempfile.TemporaryFile() as said:  # no pipe: what the trial leaves behind could keep one open
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=alone(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            return f"a trial of its MPI on GPU memory could not be started: {error}"
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            return f"a trial of its MPI on GPU memory had not ended after {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and its children with it
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    if status < 0:
        return f"a trial of its MPI on GPU memory died of {_name(-status)}"
    if status == 0 and PROVEN in lines:
        return ""
    return f"a trial of its MPI on GPU memory failed: {lines[-1] if lines else f'exit status {status}'}"


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is a world of one, and finds the modules that this one finds."""
    kept = {name: value for name, value in environ.items() if name.startswith(_KEPT) or not name.startswith(_ENGINES)}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
