"""Asks questions in processes of their own: a library that is loaded there may crash, hang or print anything.

`ask("mpi", limit=20)` runs `python -m launcher.doctor.probes mpi`, which prints the answer of the function `mpi` below.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

#: Begins the line with the answer among all that a process prints.
MARK = "ddp-doctor-answer "
_ENDING = 3.0  # s; a launcher that gets SIGTERM takes its ranks with it

_ENGINES = (
    *("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "ORTE_", "SLURM_", "HYDRA_", "HYDI_", "MPI_LOCAL"),
    *("PALS_", "FLUX_", "MPIEXEC_", "MV2_COMM_", "LSB_", "PBS_"),
)
# Settings of the library, not of a job.
_KEPT = tuple(f"OMPI_MCA_{name}" for name in ("pml", "btl", "mtl", "accelerator", "opal_cuda", "smcuda"))


class Answer(NamedTuple):
    """What a process answered before it ended.

    value: None if nothing; reason: why, "" if there is a value; lines: all else that it printed
    status: its exit status, minus the signal that killed it, None if it had not ended in time
    """

    value: Any
    reason: str
    lines: tuple[str, ...] = ()
    status: int | None = 0

    @property
    def missing(self) -> bool:
        """True if a package that it needs is not installed."""
        return self.reason.startswith("ModuleNotFoundError: ")


@contextlib.contextmanager
def started(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> Iterator[Callable[[float], Answer]]:
    """Runs a command in a session of its own; it and its children are gone when the context ends.

    Yields: a call that waits for at most so many seconds, and returns the command's answer
    Raises: OSError if it cannot be started.
    """
    with tempfile.TemporaryFile() as output:  # no pipe: a process that outlives the command could keep one open
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )

        def answer(limit: float) -> Answer:
            with contextlib.suppress(subprocess.TimeoutExpired):  # no status: the reason says so
                child.wait(limit)
            output.seek(0)
            return understand(output.read().decode(errors="replace").splitlines(), child.poll(), limit)

        try:
            yield answer
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                    child.wait(_ENDING)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and its children with it
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def ask(*command: str, module: str = __name__, limit: float, environ: Mapping[str, str] | None = None) -> Answer:
    """The answer of `python -m MODULE COMMAND...`, which may take `limit` seconds.

    environ: its environment, to which is added where this process finds its modules
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**(os.environ if environ is None else environ), "PYTHONPATH": paths}
    try:
        with started([sys.executable, "-m", module, *command], environ) as answer:
            return answer(limit)
    except OSError as failure:
        return Answer(None, f"no process could be started: {failure.strerror}", (), None)


def outside_a_job(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without the variables of launchers and engines: in it an MPI is a world of one."""
    return {name: value for name, value in environ.items() if name.startswith(_KEPT) or not name.startswith(_ENGINES)}


def print_answer(value: object) -> None:
    """In the process that was asked: prints the answer."""
    print(f"\n{MARK}{json.dumps(value)}", flush=True)


def understand(lines: Sequence[str], status: int | None, limit: float) -> Answer:
    """The answer in what was printed by a process that ended with that exit status (None: it had not ended in time)."""
    printed = tuple(line for line in lines if line.strip() and MARK not in line)
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):  # cut off in the middle: as if there were none
                return Answer(json.loads(text), "", printed, status)
    if status is None:
        reason = f"the process had not ended after {limit:g} s"
    elif status < 0:
        reason = f"the process died of {signal.Signals(-status).name}"
    else:
        reason = printed[-1].strip() if printed else f"the process printed nothing, exit status {status}"
    return Answer(None, reason, printed, status)


# -- the probes

_BYTES = 1 << 20
_VALUE = 77


def kernels() -> str:
    """Why ddp has no fused kernels for the CPU, "" if it has."""
    return importlib.import_module("ddp.backends.native").why_not()


def blas() -> dict[str, Any]:
    """NumPy's BLAS, and bfloat16.

    name, version: of the BLAS; threads: that it would use; right: products and bfloat16 are
    """
    import numpy as np
    import threadpoolctl

    try:
        config: Any = np.show_config(mode="dicts")
        build = config["Build Dependencies"]["blas"]
    except (KeyError, TypeError):  # a NumPy that was built by other means
        build = {}
    import ml_dtypes  # after NumPy, which says more plainly what it lacks

    one = np.ones(2, ml_dtypes.bfloat16)
    product = np.ones((64, 64), np.float32) @ np.ones((64, 64), np.float32)
    threads = [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]
    return {
        "name": str(build.get("name", "")),
        "version": str(build.get("version", "")),
        "threads": max(threads, default=1),
        "right": bool((product == 64).all() and float((one + one).sum()) == 4.0),
    }


def cupy() -> dict[str, Any]:
    """CuPy, by a kernel that it compiles and runs.

    version: CuPy's; driver, runtime: CUDA's, 12080 for 12.8; devices: how many; failure: "", or why it computes wrong
    """
    from collectives.backends.device import cuda as device_cuda

    cupy = device_cuda.load().xp
    runtime = cupy.cuda.runtime
    total = float((cupy.arange(1000, dtype=cupy.float32) * 2).sum())
    return {
        "version": cupy.__version__,
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "devices": runtime.getDeviceCount(),
        "failure": "" if total == 999000.0 else f"a sum on the GPU is {total:g} instead of 999000",
    }


def mpi() -> dict[str, Any]:
    """mpi4py and the MPI that it loads.

    vendor, version: of the MPI; path: its file; threads: all threads may call it at the same time
    """
    from mpi4py import MPI  # and starts it

    vendor, version = MPI.get_vendor()
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libmpi" in line.rpartition("/")[2]}
    MPI.Finalize()  # or it leaves its files behind
    version_text = ".".join(map(str, version))
    return {"vendor": vendor, "version": version_text, "path": min(paths, key=len, default=""), "threads": threads}


def nccl() -> dict[str, str]:
    """NCCL, loaded as `collectives` does it: its version and file."""
    from collectives.backends.nccl import library

    nccl = library.load()
    return {"version": ".".join(map(str, nccl.version)), "path": nccl.path}


def shared_memory() -> dict[str, Any]:
    """Memory that two processes share as ranks do: one makes it, the other maps it through /proc, and writes to it.

    unsupported: why ranks do not share memory on such a machine; failure: why it failed here; "" for neither
    """
    from collectives.backends.shm import segment

    if unsupported := segment.supported():
        return {"unsupported": unsupported, "failure": ""}
    try:
        made = segment.create(_BYTES)
    except (OSError, OverflowError) as error:
        return {"unsupported": "", "failure": f"a segment of 1 MiB cannot be made: {error}"}
    attach = f"segment.attach(segment.Address{tuple(made.address)}, {_BYTES}).memory[-1] = {_VALUE}"
    code = f"from collectives.backends.shm import segment; {attach}"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    failure = (child.stderr.strip().splitlines() or [""])[-1]
    if not failure and made.memory[-1] != _VALUE:
        failure = "what one process writes does not reach the other"
    return {"unsupported": "", "failure": failure}


if __name__ == "__main__":
    probe = {each.__name__: each for each in (blas, cupy, kernels, mpi, nccl, shared_memory)}[sys.argv[1]]
    print_answer(probe())
