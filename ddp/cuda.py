"""The CUDA devices of this process, as far as CuPy finds any: every question can be asked without one."""

from __future__ import annotations

from typing import Any

from ddp import _device
from ddp._device import Stream, device, entropy, found_cupy
from ddp.errors import DeviceError

Where = device | str | int | None

__all__ = [
    "current_device",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "is_available",
    "manual_seed",
    "manual_seed_all",
    "memory_allocated",
    "seed_all",
    "set_device",
    "synchronize",
]


def is_available() -> bool:
    """Whether CuPy is installed and finds a CUDA device. Never raises."""
    return found_cupy() is not None


def device_count() -> int:
    """The number of CUDA devices; 0 without CuPy."""
    xp = found_cupy()
    return 0 if xp is None else xp.cuda.runtime.getDeviceCount()


def _index(where: Where) -> int:
    """A device as its number. Raises: DeviceError without a GPU, or for a device that is none."""
    xp = _needed()
    if where is None:
        return xp.cuda.Device().id
    if isinstance(where, int):
        return where
    found = device(where)
    if found.type != "cuda":
        raise DeviceError(f"expected a CUDA device, got {found}")
    return xp.cuda.Device().id if found.index is None else found.index


def _needed() -> Any:
    return device("cuda").xp


def current_device() -> int:
    """The number of the device that `device("cuda")` means in this thread. Raises: DeviceError without a GPU."""
    return _index(None)


def set_device(device: Where) -> None:
    """From now on `device("cuda")` means this one in this thread. Raises: DeviceError without a GPU."""
    _needed().cuda.Device(_index(device)).use()


def get_device_name(device: Where = None) -> str:
    """What the device calls itself. Raises: DeviceError without a GPU."""
    name = _needed().cuda.runtime.getDeviceProperties(_index(device))["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def synchronize(device: Where = None) -> None:
    """Waits for all that was launched on the device. Raises: DeviceError without a GPU."""
    _needed().cuda.Device(_index(device)).synchronize()


def empty_cache() -> None:
    """Gives memory that CuPy keeps for later back to the devices; nothing without a GPU."""
    xp = found_cupy()
    if xp is not None:
        xp.get_default_memory_pool().free_all_blocks()


def memory_allocated(device: Where = None) -> int:
    """Bytes that arrays hold on the device; 0 without a GPU."""
    xp = found_cupy()
    if xp is None:
        return 0
    with xp.cuda.Device(_index(device)):
        return int(xp.get_default_memory_pool().used_bytes())


def manual_seed(seed: int) -> None:
    """Seeds the current device's random numbers in this thread; nothing without a GPU."""
    if is_available():
        _device.stream(device("cuda")).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds every device's random numbers in this thread; nothing without a GPU."""
    for each in _streams():
        each.manual_seed(seed)


def seed_all() -> None:
    """Seeds every device's random numbers in this thread with one number of the system's; nothing without a GPU."""
    manual_seed_all(entropy())


def _streams() -> list[Stream]:
    return [_device.stream(device("cuda", i)) for i in range(device_count())]
