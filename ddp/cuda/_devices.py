"""The CUDA devices of this process, as far as CuPy finds any: every question can be asked without one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from ddp import _device
from ddp._device import BaseGenerator, entropy, found_cupy
from ddp.errors import DeviceError, DtypeError

Where = _device.device | str | int | None


def is_available() -> bool:
    """Whether CuPy is installed and finds a CUDA device. Never raises."""
    return found_cupy() is not None


def device_count() -> int:
    """The number of CUDA devices; 0 without CuPy."""
    xp = found_cupy()
    return 0 if xp is None else xp.cuda.runtime.getDeviceCount()


def is_initialized() -> bool:
    """Whether a CUDA device can be used; the first question or use makes it so."""
    return is_available()


def init() -> None:
    """Finds the devices now instead of at the first use. Raises: DeviceError without a GPU."""
    _needed()


def _index(where: Where) -> int:
    """A device as its number. Raises: DeviceError without a GPU, or for a device that is none; DtypeError."""
    xp = _needed()
    if isinstance(where, bool) or not isinstance(where, int | str | _device.device | None):
        raise DtypeError(f"device: expected a number, a name or a ddp.device, got {type(where).__name__}")
    if where is None or (isinstance(where, int) and where < 0):
        return int(xp.cuda.runtime.getDevice())
    if isinstance(where, int):
        index: int | None = where
    else:
        found = _device.device(where)
        if found.type != "cuda":
            raise DeviceError(f"expected a CUDA device, got {found}")
        index = found.index
    if index is None:
        return int(xp.cuda.runtime.getDevice())
    if index >= (count := xp.cuda.runtime.getDeviceCount()):
        raise DeviceError(f"device cuda:{index}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return index


def _needed() -> Any:
    return _device.device("cuda").xp


def current_device() -> int:
    """The number of the device that `device("cuda")` means in this thread. Raises: DeviceError without a GPU."""
    return _index(None)


def set_device(device: Where) -> None:
    """From now on `device("cuda")` means this one in this thread; a negative number changes nothing.

    Raises: DeviceError without a GPU, or for one that is not there.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device < 0:
        return
    _needed().cuda.Device(_index(device)).use()


class device:
    """With `device(1)`, the current CUDA device is another one: by number, name or `ddp.device`; None changes nothing.

    (`ddp.device` is the value that says where a tensor lives, and this is a scope.) Raises: DeviceError.
    """

    def __init__(self, device: Where) -> None:
        self.idx = -1 if device is None or (isinstance(device, int) and device < 0) else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            runtime = _needed().cuda.runtime
            self.prev_idx = runtime.getDevice()
            runtime.setDevice(self.idx)

    def __exit__(self, *exc: object) -> None:
        if self.idx >= 0:
            _needed().cuda.runtime.setDevice(self.prev_idx)


class device_of(device):
    """With `device_of(x)`, the current CUDA device is that of tensor `x`; nothing changes for a tensor on the CPU."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else None)


def get_device_name(device: Where = None) -> str:
    """What the device calls itself. Raises: DeviceError without a GPU."""
    return str(get_device_properties(device).name)


def get_device_capability(device: Where = None) -> tuple[int, int]:
    """The compute capability: (9, 0) for an H100. Raises: DeviceError without a GPU."""
    found = get_device_properties(device)
    return found.major, found.minor


def get_device_properties(device: Where = None) -> SimpleNamespace:
    """What the device is: name, major, minor, total_memory (bytes), multi_processor_count, warp_size, two cache sizes.

    Raises: DeviceError without a GPU.
    """
    return _properties(_needed(), _index(device))


@functools.lru_cache(maxsize=64)
def _properties(xp: Any, index: int) -> SimpleNamespace:
    found = xp.cuda.runtime.getDeviceProperties(index)
    name = found["name"]
    named = {
        "total_memory": "totalGlobalMem",
        "multi_processor_count": "multiProcessorCount",
        "warp_size": "warpSize",
        "shared_memory_per_block": "sharedMemPerBlock",
        "L2_cache_size": "l2CacheSize",
    }
    return SimpleNamespace(
        name=name.decode() if isinstance(name, bytes) else str(name),
        major=int(found["major"]),
        minor=int(found["minor"]),
        **{ours: int(found[theirs]) for ours, theirs in named.items() if theirs in found},
    )


def can_device_access_peer(device: Where, peer_device: Where) -> bool:
    """Whether one device can read the other's memory. Raises: DeviceError without a GPU; for a device and itself."""
    one, other = _index(device), _index(peer_device)
    if one == other:
        raise DeviceError(f"can_device_access_peer: cuda:{one} and cuda:{other} are one device")
    return bool(_needed().cuda.runtime.deviceCanAccessPeer(one, other))


def manual_seed(seed: int) -> None:
    """Seeds the current device's random numbers in this thread; nothing without a GPU."""
    if is_available():
        _device.thread_generator(_device.device("cuda")).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds every device's random numbers in this thread; nothing without a GPU."""
    for each in _streams():
        each.manual_seed(seed)


def seed() -> None:
    """Seeds the current device's random numbers in this thread with a number of the system's; nothing without a GPU."""
    manual_seed(entropy())


def seed_all() -> None:
    """Seeds every device's random numbers in this thread with one number of the system's; nothing without a GPU."""
    manual_seed_all(entropy())


def initial_seed() -> int:
    """The seed that the current device's random numbers began at. Raises: DeviceError without a GPU."""
    return _stream(None).initial_seed()


def get_rng_state(device: Where = "cuda") -> Any:
    """Where this thread's random numbers of a device are, as a uint8 tensor on the CPU. Waits for the current stream.

    Raises: DeviceError without a GPU.
    """
    return _stream(device).get_state()


def set_rng_state(new_state: Any, device: Where = "cuda") -> None:
    """Puts this thread's random numbers of a device back to where `get_rng_state` was called.

    Raises: ArgumentError for what is no state; DeviceError without a GPU.
    """
    _stream(device).set_state(new_state)


def get_rng_state_all() -> list[Any]:
    """`get_rng_state` of every device."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: Iterable[Any]) -> None:
    """`set_rng_state` of every device, of one after the other. Raises: ArgumentError, DeviceError."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 can be computed with: every GPU here can, in float32; natively from capability 8.0 on."""
    return is_available() and (including_emulation or get_device_capability()[0] >= 8)


def _stream(where: Where) -> Any:  # a ddp.Generator
    return _device.thread_generator(_device.device("cuda", _index(where)))


def _streams() -> list[BaseGenerator]:
    return [_device.thread_generator(_device.device("cuda", i)) for i in range(device_count())]
