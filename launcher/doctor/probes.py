"""Probes run in a process of their own: a library that is loaded there may crash, hang or print anything.

`run_probe("mpi", limit=20)` runs `python -m launcher.doctor.probes mpi`, which prints what `mpi` below returns.
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

#: Precedes the answer in its line.
MARK = "ddp-doctor-answer "
# Seconds from SIGTERM to SIGKILL: a launcher needs time to end its ranks.
_GRACE = 3.0

# Prefixes of the variables that launchers and schedulers set.
_JOB_PREFIXES = (
    "PMI_",
    "PMIX_",
    "PMI2_",
    "OMPI_",
    "PRTE_",
    "ORTE_",
    "SLURM_",
    "HYDRA_",
    "HYDI_",
    "MPI_LOCAL",
    "PALS_",
    "FLUX_",
    "MPIEXEC_",
    "MV2_COMM_",
    "LSB_",
    "PBS_",
)
# Exceptions to _JOB_PREFIXES: prefixes of variables that configure the MPI library, and do not describe a job.
_LIBRARY_PREFIXES = tuple(f"OMPI_MCA_{name}" for name in ("pml", "btl", "mtl", "accelerator", "opal_cuda", "smcuda"))


class Answer(NamedTuple):
    """What a probe's process printed.

    value: its answer, None if there was none; reason: why there was none, else ""
    lines: the other lines that it printed, except blank ones
    status: its exit status, -N if signal N killed it, None if it did not end in time or could not be started
    """

    value: Any
    reason: str
    lines: tuple[str, ...] = ()
    status: int | None = 0

    @property
    def missing(self) -> bool:
        """Whether a package that the probe imports is not installed."""
        return self.reason.startswith("ModuleNotFoundError: ")


@contextlib.contextmanager
def started(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> Iterator[Callable[[float], Answer]]:
    """Runs a command in a session of its own, and ends it and its children when the context ends.

    Yields: a function that takes a number of seconds, waits at most that long for the command, and returns the Answer.
    Raises: OSError if it cannot be started.
    """
    with tempfile.TemporaryFile() as output:  # a pipe could be kept open by a child of the command
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )

        def answer(limit: float) -> Answer:
            # After a timeout, `parse_answer` gets the status None. If no answer was printed, it gives the timeout as
            # the reason.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(limit)
            output.seek(0)
            return parse_answer(output.read().decode(errors="replace").splitlines(), child.poll(), limit)

        try:
            yield answer
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
                    child.wait(_GRACE)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # no process of the group is left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def run_probe(*command: str, module: str = __name__, limit: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Runs `python -m MODULE COMMAND...` for at most `limit` seconds, and returns its answer.

    environ: its environment; PYTHONPATH in it is replaced by the module path of this process
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**(os.environ if environ is None else environ), "PYTHONPATH": paths}
    try:
        with started([sys.executable, "-m", module, *command], environ) as answer:
            return answer(limit)
    except OSError as failure:
        return Answer(None, f"no process could be started: {failure.strerror}", (), None)


def outside_a_job(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without variables of MPI launchers and schedulers. With it, MPI starts a world of one rank."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_LIBRARY_PREFIXES) or not name.startswith(_JOB_PREFIXES)
    }


def print_answer(value: object) -> None:
    """Prints a probe's answer; called in the probe's process."""
    print(f"\n{MARK}{json.dumps(value)}", flush=True)


def parse_answer(lines: Sequence[str], status: int | None, limit: float) -> Answer:
    """Finds the answer in a process's output. status: its exit status, None if it did not end within `limit` seconds"""
    printed = tuple(line for line in lines if line.strip() and MARK not in line)
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):  # the line was cut off
                return Answer(json.loads(text), "", printed, status)
    if status is None:
        reason = f"the process had not ended after {limit:g} s"
    elif status < 0:
        reason = f"the process died of {signal.Signals(-status).name}"
    else:
        reason = printed[-1].strip() if printed else f"the process printed nothing, exit status {status}"
    return Answer(None, reason, printed, status)


# -- the probes

# `shared_memory` makes a segment of _BYTES bytes. Another process writes _VALUE to the last byte.
_BYTES = 1 << 20
_VALUE = 77


def kernels() -> str:
    """Why there are no fused kernels for the CPU, "" if there are."""
    return importlib.import_module("ddp.backends.native").why_not()


def blas() -> dict[str, Any]:
    """NumPy's BLAS and the dtype bfloat16, with a short test of both.

    name, version: of the BLAS; threads: how many it uses; right: whether a float32 product and bfloat16 sums are right
    """
    import numpy as np
    import threadpoolctl

    try:
        config: Any = np.show_config(mode="dicts")
        build = config["Build Dependencies"]["blas"]
    except (KeyError, TypeError):  # NumPy was not built by Meson
        build = {}
    import ml_dtypes  # after NumPy: if NumPy cannot be loaded, its own message is clearer

    ones = np.ones(2, ml_dtypes.bfloat16)
    product = np.ones((64, 64), np.float32) @ np.ones((64, 64), np.float32)
    threads = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return {
        "name": str(build.get("name", "")),
        "version": str(build.get("version", "")),
        "threads": max(threads, default=1),
        "right": bool((product == 64).all() and float((ones + ones).sum()) == 4.0),
    }


def cupy() -> dict[str, Any]:
    """CuPy, tested by a kernel that it compiles and runs.

    version: of CuPy; driver, runtime: CUDA versions, 12080 for 12.8; devices: the number of GPUs
    failure: what is wrong with the kernel's result, "" if it is right
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
    """The MPI that mpi4py loads.

    vendor, version: of the MPI; path: its file; threads: whether it gives MPI_THREAD_MULTIPLE
    """
    from mpi4py import MPI  # which calls MPI_Init

    vendor, version = MPI.get_vendor()
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libmpi" in line.rpartition("/")[2]}
    MPI.Finalize()  # else MPI leaves files behind
    version_text = ".".join(map(str, version))
    return {"vendor": vendor, "version": version_text, "path": min(paths, key=len, default=""), "threads": threads}


def nccl() -> dict[str, str]:
    """NCCL, loaded as `collectives` loads it. version: such as "2.18.3"; path: its file"""
    from collectives.backends.nccl import library

    nccl = library.load()
    return {"version": ".".join(map(str, nccl.version)), "path": nccl.path}


def shared_memory() -> dict[str, Any]:
    """Shares memory with a child process as ranks do: the child maps it through /proc and writes to it.

    unsupported: why ranks never share memory on such a machine, else ""; failure: why it failed here, else ""
    """
    from collectives.backends.shm import segment

    if unsupported := segment.supported():
        return {"unsupported": unsupported, "failure": ""}
    try:
        shared = segment.create(_BYTES)
    except (OSError, OverflowError) as error:
        return {"unsupported": "", "failure": f"a segment of 1 MiB cannot be made: {error}"}
    attach = f"segment.attach(segment.Address{tuple(shared.address)}, {_BYTES}).memory[-1] = {_VALUE}"
    code = f"from collectives.backends.shm import segment; {attach}"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    failure = (child.stderr.strip().splitlines() or [""])[-1]
    if not failure and shared.memory[-1] != _VALUE:
        failure = "what one process writes does not reach the other"
    return {"unsupported": "", "failure": failure}


if __name__ == "__main__":
    probe = {function.__name__: function for function in (blas, cupy, kernels, mpi, nccl, shared_memory)}[sys.argv[1]]
    print_answer(probe())
