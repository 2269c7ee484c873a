"""Asks questions in processes of their own: what is loaded there may crash, hang, be broken, or print anything.

`ask("launcher.doctor.probes", "mpi", limit=20)` runs `python -m launcher.doctor.probes mpi`, which prints the answer of
the function of that name below.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: Begins the line with the answer among all that a process prints.
MARK = "ddp-doctor-answer "


_ENDING = 3.0  # s; a launcher that is asked to end takes its ranks with it

_ENGINES = (
    *("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "ORTE_", "SLURM_", "HYDRA_", "HYDI_", "MPI_LOCAL"),
    *("PALS_", "FLUX_", "MPIEXEC_", "MV2_COMM_", "LSB_", "PBS_"),
)
# Settings of the library, not of a job.
_KEPT = tuple(f"OMPI_MCA_{name}" for name in ("pml", "btl", "mtl", "accelerator", "opal_cuda", "smcuda"))

_running: set[subprocess.Popen[bytes]] = set()


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


def ask(module: str, *args: str, limit: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Runs `python -m MODULE ARGS...` for at most `limit` seconds; it and its children are gone when this returns.

    environ: its environment, to which is added where this process finds its modules
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**(os.environ if environ is None else environ), "PYTHONPATH": paths}
    try:
        status, lines = run([sys.executable, "-m", module, *args], limit, environ)
    except OSError as failure:
        return Answer(None, f"no process could be started: {failure.strerror}", (), None)
    return understand(lines, status, limit)


def outside_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of launchers and engines: in it an MPI is a world of one."""
    return {name: value for name, value in environ.items() if name.startswith(_KEPT) or not name.startswith(_ENGINES)}


def run(command: Sequence[str], limit: float, environ: Mapping[str, str]) -> tuple[int | None, list[str]]:
    """The exit status of a command, None if it had not ended after `limit` seconds, and the lines that it printed.

    Raises: OSError if it cannot be started.
    """
    with tempfile.TemporaryFile() as output:  # no pipe: what it leaves behind could keep one open
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        _running.add(child)
        status: int | None = None
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            pass  # no status: the caller says so
        finally:
            _end(child)
            _running.discard(child)
        output.seek(0)
        return status, output.read().decode(errors="replace").splitlines()


def end_all() -> None:
    """Ends what other threads have started, which then return."""
    for child in list(_running):
        child.terminate()


def answer(look: Callable[[], object]) -> None:
    """In the process that was asked: prints what `look` returns, as JSON."""
    print(f"\n{MARK}{json.dumps(look())}", flush=True)


def understand(lines: Sequence[str], status: int | None, limit: float) -> Answer:
    """The answer in what was printed by a process that ended with that exit status (None: it had not ended in time)."""
    printed = tuple(line for line in lines if line.strip() and MARK not in line)
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):  # cut off in the middle: as if there were none
                return Answer(json.loads(text), "", printed, status)
    if status is None:
        reason = f"the process that tried had not ended after {limit:g} s"
    elif status < 0:
        reason = f"the process that tried died of {_name(-status)}"
    else:
        reason = printed[-1].strip() if printed else f"the process that tried said nothing, exit status {status}"
    return Answer(None, reason, printed, status)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
            child.wait(_ENDING)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and its children with it
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- the probes

_COMPUTE_MODE, _MAJOR, _MINOR = 20, 75, 76  # attributes of a CUDA device
_BYTES = 1 << 20
_VALUE = 77
_NCCL_SOURCES = ("pynccl", "cupy", "path")  # in the order in which they are tried


def kernels() -> str:
    """Why ddp has no fused kernels for the CPU, "" if it has."""
    found: str = importlib.import_module("ddp.backends.native").why_not()
    return found


def blas() -> dict[str, Any]:
    """NumPy's BLAS, and bfloat16.

    name, version: of the BLAS; threads: that it would use, None if unknown; right: products and bfloat16 are
    """
    import numpy as np

    try:
        config: Any = np.show_config(mode="dicts")
        build = config["Build Dependencies"]["blas"]
    except (KeyError, TypeError):  # an old NumPy, or one built by other means
        build = {}
    threads = None
    if importlib.util.find_spec("threadpoolctl"):
        info = importlib.import_module("threadpoolctl").threadpool_info()
        counts = [each["num_threads"] for each in info if each["user_api"] == "blas"]
        threads = max(counts, default=None)
    import ml_dtypes

    one = np.ones(2, ml_dtypes.bfloat16)
    product = np.ones((64, 64), np.float32) @ np.ones((64, 64), np.float32)
    return {
        "name": str(build.get("name", "")),
        "version": str(build.get("version", "")),
        "threads": threads,
        "right": bool((product == 64).all() and float((one + one).sum()) == 4.0),
    }


def cuda() -> dict[str, Any]:
    """CUDA's driver, without CuPy.

    version: of CUDA that the driver serves, 12080 for 12.8; refusal: why it gives no device; devices: one each
    """
    driver = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    status = driver.cuInit(0)
    seen: dict[str, Any] = {"version": version.value, "refusal": "", "devices": []}
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        seen["refusal"] = f"{(name.value or b'CUDA error').decode()} ({status})"
        return seen
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    seen["devices"] = [_device(driver, index) for index in range(count.value)]
    return seen


def cupy() -> dict[str, Any]:
    """CuPy, by a kernel that it compiles and runs.

    version: CuPy's; runtime: its CUDA, 12080 for 12.8; trouble: why a kernel gave no right number, "" if it did
    """
    from collectives.backends.device import cuda as device_cuda

    cupy = device_cuda.load().xp
    seen = {"version": cupy.__version__, "runtime": cupy.cuda.runtime.runtimeGetVersion(), "trouble": ""}
    total = float((cupy.arange(1000, dtype=cupy.float32) * 2).sum())
    if total != 999000.0:
        seen["trouble"] = f"a sum on the GPU is {total:g} instead of 999000"
    return seen


def _device(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(100), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetName(name, len(name), handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    numbers = []
    for attribute in (_MAJOR, _MINOR, _COMPUTE_MODE):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        numbers.append(value.value)
    major, minor, mode = numbers
    return {"name": name.value.decode(), "memory": memory.value, "capability": f"{major}.{minor}", "mode": mode}


def mpi() -> dict[str, Any]:
    """mpi4py and the MPI that it loads.

    library: what the MPI calls itself; path: its file; threads: all threads may call it at the same time
    """
    from mpi4py import MPI  # and starts it

    seen = {
        "library": MPI.Get_library_version().strip("\0 \n"),
        "path": _libmpi(),
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    }
    MPI.Finalize()  # or it leaves its files behind
    return seen


def _libmpi() -> str:
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libmpi" in line.rpartition("/")[2]}
    return min(paths, key=len, default="")


def nccl() -> dict[str, Any]:
    """NCCL, loaded in each of the ways in which `collectives` would.

    found: source → [version, file]; failed: source → why
    """
    from collectives.backends.nccl import library
    from collectives.errors import CollectivesError

    found, failed = {}, {}
    for source in _NCCL_SOURCES:
        try:
            nccl = library.load(source)
        except CollectivesError as failure:
            failed[source] = str(failure).partition(f"{source}: ")[2]
        else:
            found[source] = [".".join(map(str, nccl.version)), nccl.path]
    return {"found": found, "failed": failed}


def shared_memory() -> dict[str, Any]:
    """Memory that two processes share as ranks do: one makes it, the other maps it through /proc, and writes to it.

    unsupported: why ranks do not share memory on such a machine; trouble: why it failed here; "" for neither
    """
    from collectives.backends.shm import segment

    unsupported = segment.supported()
    if unsupported:
        return {"unsupported": unsupported, "trouble": ""}
    try:
        made = segment.create(_BYTES)
    except (OSError, OverflowError) as failure:
        return {"unsupported": "", "trouble": f"a segment of 1 MiB cannot be made: {failure}"}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        error = b""
        try:
            segment.attach(made.address, _BYTES).memory[-1] = _VALUE
        except (OSError, ValueError) as failure:
            error = str(failure).encode()
        os.write(writing, error)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        trouble = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if not trouble and made.memory[-1] != _VALUE:
        trouble = "what one process writes does not reach the other"
    return {"unsupported": "", "trouble": trouble}


if __name__ == "__main__":
    answer({each.__name__: each for each in (blas, cuda, cupy, kernels, mpi, nccl, shared_memory)}[sys.argv[1]])
