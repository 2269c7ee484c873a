"""What can be known to go wrong before a rank has started: told now, in one sentence, not after minutes."""

from __future__ import annotations

import ctypes
import importlib.util
import os

from launcher.bench.settings import Settings
from launcher.job import UsageError

_EXTRA = "pip install 'ddp-runtime[bench]'"
_MODULES = {"mpi4py": ("mpi4py", "pip install mpi4py"), "torch-gloo": ("torch", _EXTRA)}
# Of each contestant of ours, or of a rival, on each rank: what is read and what is written.
_BUFFERS = 2


def check(settings: Settings, memory: int | None) -> None:
    """Checks that rivals, matplotlib and a GPU are there if they are needed, and that files can be written.

    memory: bytes available for all ranks together; None: unknown
    Raises: UsageError, in one sentence.
    """
    for rival in settings.vs:
        module, remedy = _MODULES[rival]
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"rival {rival} needs {module}, which is not installed: {remedy}")
    if settings.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--plot needs matplotlib, which is not installed: {_EXTRA}")
        if not settings.plot.lower().endswith(".png"):
            raise UsageError(f"the plot is a PNG, so its name should end in .png: {settings.plot}")
    for path in (settings.json, settings.plot):
        if path is not None:
            _check_writable(path)
    if "nccl" in settings.backend:
        if importlib.util.find_spec("cupy") is None:
            extras = "pip install 'ddp-runtime[cuda12]', or [cuda13]"
            raise UsageError(f"backend nccl needs CuPy, which is not installed: {extras}")
        if not gpus():
            raise UsageError("backend nccl needs a GPU, and no CUDA device can be used here")
    for backend in settings.backend:
        need = footprint(settings, settings.world(backend))
        if memory is not None and need > memory:
            asked, there = f"{need / 1e9:.1f} GB", f"{memory / 1e9:.1f} GB"
            raise UsageError(f"sizes up to {settings.maxbytes} bytes need {asked} in all, {there} are available")


def footprint(settings: Settings, ranks: int) -> int:
    """Bytes of all buffers of a job."""
    return ranks * (1 + settings.empty + len(settings.vs)) * _BUFFERS * settings.maxbytes


def available_memory() -> int | None:
    """Bytes that can be had without swapping, as the kernel estimates it."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:  # not on this system
        pass
    return None


def gpus() -> int:
    """The number of CUDA devices that the driver would give us."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    usable = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if usable else 0


def _check_writable(path: str) -> None:
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory, not a file to be written")
    if not os.path.isdir(folder):
        raise UsageError(f"there is no folder {folder} for {os.path.basename(path)}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written")
