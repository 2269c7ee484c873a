"""What is asked in processes of their own, because the libraries that are loaded there may crash, hang or be broken.

`python -m launcher.doctor.probes NAME` prints the answer of the function of that name, for `probe.ask`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from typing import Any

from launcher.doctor.probe import answer

_COMPUTE_MODE, _MAJOR, _MINOR = 20, 75, 76  # attributes of a CUDA device
_BYTES = 1 << 20
_VALUE = 77
_NCCL_SOURCES = ("pynccl", "cupy", "path")  # in the order in which they are tried


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


def stale_segments() -> dict[str, Any]:
    """Files of killed MPI jobs: asked of the kernel by signals and leases, which need the main thread."""
    from launcher.doctor.shm_cleanup import look

    return look()._asdict()


if __name__ == "__main__":
    answer({each.__name__: each for each in (blas, cuda, cupy, mpi, nccl, shared_memory, stale_segments)}[sys.argv[1]])
