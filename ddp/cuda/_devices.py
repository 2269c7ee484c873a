"""The CUDA devices of this process, and this thread's random generators on them.

Without CuPy or a GPU, some functions still work: for example, `is_available`, `device_count`, `is_bf16_supported` and
those that seed generators. The others raise DeviceError. For an invalid `device` argument, functions raise the errors
of `set_device`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from ddp import _device
from ddp._device import BaseGenerator, entropy, found_cupy
from ddp.errors import DeviceError, DtypeError

DeviceLike = _device.device | str | int | None


def is_available() -> bool:
    """Whether CuPy is installed and finds a CUDA device. False in a fork of a process that has used CUDA."""
    return found_cupy() is not None


def device_count() -> int:
    """The number of CUDA devices; 0 without CuPy or a GPU."""
    xp = found_cupy()
    return 0 if xp is None else xp.cuda.runtime.getDeviceCount()


def is_initialized() -> bool:
    """The same as `is_available`, which initializes CUDA if there is a GPU."""
    return is_available()


def init() -> None:
    """Initializes CUDA now instead of at the first use. Raises: DeviceError without a GPU."""
    _cupy()


def _index(device: DeviceLike) -> int:
    """The number of a device. None, or a negative number: the current device.

    Raises: DeviceError without a GPU, or for a device that does not exist or is not a CUDA device; ArgumentError for an
    invalid name; DtypeError for an argument of another type.
    """
    xp = _cupy()
    if isinstance(device, bool) or not isinstance(device, int | str | _device.device | None):
        raise DtypeError(f"device: expected a number, a name or a ddp.device, got {type(device).__name__}")
    if device is None or (isinstance(device, int) and device < 0):
        return int(xp.cuda.runtime.getDevice())
    if isinstance(device, int):
        index: int | None = device
    else:
        parsed = _device.device(device)
        if parsed.type != "cuda":
            raise DeviceError(f"expected a CUDA device, got {parsed}")
        index = parsed.index
    if index is None:
        return int(xp.cuda.runtime.getDevice())
    if index >= (count := xp.cuda.runtime.getDeviceCount()):
        raise DeviceError(f"device cuda:{index}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return index


def _cupy() -> Any:
    """Returns the module `cupy`. Raises: DeviceError without a GPU."""
    return _device.device("cuda").xp


def current_device() -> int:
    """The number of this thread's current device, for which "cuda" stands. Raises: DeviceError without a GPU."""
    return _index(None)


def set_device(device: DeviceLike) -> None:
    """Makes a device the current one of this thread, for which "cuda" stands. A negative number changes nothing.

    Raises: DeviceError without a GPU, or for a device that does not exist or is not a CUDA device; ArgumentError for an
    invalid name; DtypeError for an argument of another type.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device < 0:
        return
    _cupy().cuda.Device(_index(device)).use()


class device:
    """A context in which `device` is the current device. (`ddp.device` is another class: the device of a tensor.)

    device: a number, a name or a `ddp.device`; None or a negative number changes nothing
    Raises: as `set_device`.
    """

    def __init__(self, device: DeviceLike) -> None:
        self.idx = -1 if device is None or (isinstance(device, int) and device < 0) else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            runtime = _cupy().cuda.runtime
            self.prev_idx = runtime.getDevice()
            runtime.setDevice(self.idx)

    def __exit__(self, *exc: object) -> None:
        if self.idx >= 0:
            _cupy().cuda.runtime.setDevice(self.prev_idx)


class device_of(device):
    """A context in which the device of a tensor is the current one; a tensor on the CPU changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else None)


def get_device_name(device: DeviceLike = None) -> str:
    """The device's name. Raises: DeviceError without a GPU."""
    return str(get_device_properties(device).name)


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """The compute capability: (9, 0) for an H100. Raises: DeviceError without a GPU."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    """The properties of a device: name, and its compute capability as major and minor.

    If CuPy reports them, also total_memory, shared_memory_per_block and L2_cache_size (bytes), multi_processor_count
    and warp_size. Raises: DeviceError without a GPU.
    """
    return _properties(_cupy(), _index(device))


@functools.lru_cache(maxsize=64)
def _properties(xp: Any, index: int) -> SimpleNamespace:
    properties = xp.cuda.runtime.getDeviceProperties(index)
    name = properties["name"]
    cuda_names = {
        "total_memory": "totalGlobalMem",
        "multi_processor_count": "multiProcessorCount",
        "warp_size": "warpSize",
        "shared_memory_per_block": "sharedMemPerBlock",
        "L2_cache_size": "l2CacheSize",
    }
    return SimpleNamespace(
        name=name.decode() if isinstance(name, bytes) else str(name),
        major=int(properties["major"]),
        minor=int(properties["minor"]),
        **{key: int(properties[cuda_name]) for key, cuda_name in cuda_names.items() if cuda_name in properties},
    )


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Whether `device` can read the memory of `peer_device`.

    Raises: DeviceError without a GPU, or if both are the same device.
    """
    index = _index(device)
    peer = _index(peer_device)
    if index == peer:
        raise DeviceError(f"can_device_access_peer: cuda:{index} and cuda:{peer} are one device")
    return bool(_cupy().cuda.runtime.deviceCanAccessPeer(index, peer))


def manual_seed(seed: int) -> None:
    """Seeds this thread's generator of the current device; does nothing without a GPU.

    Raises: ArgumentError for a negative seed.
    """
    if is_available():
        _device.thread_generator(_device.device("cuda")).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds this thread's generators of all devices; does nothing without a GPU.

    Raises: ArgumentError for a negative seed.
    """
    for generator in _generators():
        generator.manual_seed(seed)


def seed() -> None:
    """Seeds this thread's generator of the current device with random bits of the system. No effect without a GPU."""
    manual_seed(entropy())


def seed_all() -> None:
    """Seeds this thread's generators of all devices with one random seed of the system. No effect without a GPU."""
    manual_seed_all(entropy())


def initial_seed() -> int:
    """The seed of this thread's generator of the current device. Raises: DeviceError without a GPU."""
    return _generator(None).initial_seed()


def get_rng_state(device: DeviceLike = "cuda") -> Any:
    """The state of this thread's generator of a device, a uint8 tensor on the CPU. Waits for the current stream.

    Raises: DeviceError without a GPU.
    """
    return _generator(device).get_state()


def set_rng_state(new_state: Any, device: DeviceLike = "cuda") -> None:
    """Sets the state of this thread's generator of a device. new_state: from `get_rng_state`

    Raises: ArgumentError for an invalid state; DtypeError if it is not a tensor; DeviceError without a GPU.
    """
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[Any]:
    """The results of `get_rng_state` for all devices."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: Iterable[Any]) -> None:
    """Calls `set_rng_state` for each device: the i-th state is for device i. Raises: see `set_rng_state`."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the current GPU computes in bfloat16.

    including_emulation: also True below compute capability 8.0, where GPUs emulate it in float32
    """
    return is_available() and (including_emulation or get_device_capability()[0] >= 8)


def _generator(device: DeviceLike) -> Any:  # a ddp.Generator
    return _device.thread_generator(_device.device("cuda", _index(device)))


def _generators() -> list[BaseGenerator]:
    return [_device.thread_generator(_device.device("cuda", i)) for i in range(device_count())]
