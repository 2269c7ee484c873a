"""CUDA's driver, asked without CuPy; and CuPy, by a kernel that it compiles and runs."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from launcher.doctor.aside import answer

_COMPUTE_MODE, _MAJOR, _MINOR = 20, 75, 76  # attributes of a device


def look() -> dict[str, Any]:
    """version: of CUDA that the driver serves, 12080 for 12.8; refusal: why it gives no device; devices: one each."""
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


def trial() -> dict[str, Any]:
    """version: CuPy's; runtime: its CUDA, 12080 for 12.8; trouble: why a kernel gave no right number, "" if it did."""
    from collectives._gpu import cuda

    cupy = cuda.load().xp
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


if __name__ == "__main__":
    answer(trial if sys.argv[1:] == ["cupy"] else look)
