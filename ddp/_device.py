"""Devices, and the array module of each. A tensor picks its device once; ops get the device's module as `xp`.

NumPy is the only array module that is imported at once. CuPy is imported when the `xp` of a CUDA device is first used.
Random generators are here, too, because they wrap those of the array modules. Each thread has one for each device.
Copies, streams and errors of CUDA are in modules of `ddp._cuda`, which are loaded when a CUDA device is first used.
"""

from __future__ import annotations

import contextlib
import operator
import os
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ddp.errors import ArgumentError, DeviceError, DtypeError, how_to_install

_known: dict[tuple[str, int | None], device] = {}


class device:
    """Where a tensor is: `device("cpu")`, `device("cuda")`, `device("cuda:1")`, `device("cuda", 1)`, `device(1)`.

    Equal devices are one object, so `is` compares them. Naming a CUDA device neither imports CuPy nor needs a GPU;
    computing on it does both. In a `with` block, it is the default device of this thread's new tensors.

    Raises: ArgumentError for an unknown type, or an index that is malformed or negative; DtypeError if `type` is not a
    str, an int or a device, or `index` not an integer; DeviceError when `xp` is first used, if CuPy or the GPU is
    missing, or in a fork of a process that has used CUDA.
    """

    __slots__ = ("index", "type", "watched", "xp")
    type: str
    index: int | None
    xp: Any  # the array module; resolved by __getattr__ on CUDA devices
    # Which extra steps ops take on this device: 2 with CUDA_LAUNCH_BLOCKING=1, else 1 with several GPUs, else 0.
    watched: int

    def __new__(cls, type: str | int | device, index: int | None = None) -> device:
        if isinstance(type, device):
            return type
        if isinstance(type, int | np.integer) and not isinstance(type, bool):
            type = f"cuda:{type}"
        key = _parse(type, index)
        if key not in _known:
            self = super().__new__(cls)
            self.type, self.index = key
            if self.type == "cpu":
                self.xp = np
                self.watched = 0
            _known.setdefault(key, self)
        return _known[key]

    def __getattr__(self, name: str) -> Any:
        # Called for slots that are not set: those that need CuPy are set at their first use.
        if name == "xp":
            self.xp = _cupy(self)
        elif name == "watched":
            self.watched = _watched(self.xp)
        else:
            raise AttributeError(f"device has no attribute {name!r}")
        return getattr(self, name)

    def __enter__(self) -> device:
        default.before.append(default.device)
        default.device = self
        return self

    def __exit__(self, *exc: object) -> None:
        default.device = default.before.pop()

    def __repr__(self) -> str:
        index = "" if self.index is None else f", index={self.index}"
        return f"device(type={self.type!r}{index})"

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __reduce__(self) -> tuple[Any, ...]:
        return device, (self.type, self.index)


def _parse(text: Any, index: int | None) -> tuple[str, int | None]:
    if not isinstance(text, str):
        raise DtypeError(f"device: expected a number, a name or a ddp.device, got {type(text).__name__}")
    device_type, colon, digits = text.partition(":")
    if device_type not in ("cpu", "cuda"):
        raise ArgumentError(f"device({text!r}): the type is 'cpu' or 'cuda', not {device_type!r}")
    if colon:
        if index is not None or not digits.isdecimal():
            raise ArgumentError(f"device({text!r}, index={index}): expected 'cuda', 'cuda:1' or ('cuda', 1)")
        index = int(digits)
    if index is None:
        return device_type, None
    try:
        index = operator.index(index)
    except TypeError:
        raise DtypeError(f"device({text!r}, index={index!r}): expected an integer") from None
    if index < 0 or (device_type == "cpu" and index > 0):
        raise ArgumentError(f"device({text!r}, index={index}): there is no such {device_type} device")
    return device_type, index if device_type == "cuda" else None  # cpu:0 is cpu


def _cupy(asked: device) -> Any:
    if _lost:
        raise DeviceError(
            f"device {asked}: this process was forked from one that had met CUDA, which does not survive that: start "
            "processes by 'spawn' or 'forkserver', as ddp.multiprocessing and DataLoader do"
        )
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"device {asked}: CuPy is not installed; {how_to_install('cuda12')}, or [cuda13]") from error
    if not cupy.cuda.is_available():
        raise DeviceError(f"device {asked}: CuPy finds no CUDA device on this machine")
    if (asked.index or 0) >= (count := cupy.cuda.runtime.getDeviceCount()):
        raise DeviceError(f"device {asked}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    runtime().memory_pool.allocator(cupy)  # before CuPy makes its first array
    _cuda_processes.append(os.getpid())
    for prepare in on_first_use:
        prepare()
    return cupy


# Functions of modules that import this one. All are called whenever the `xp` of another CUDA device is first used.
on_first_use: list[Callable[[], None]] = []
# Set by `ddp._cuda`: loads the GPU implementations of all ops, and returns that package.
load_runtime: list[Callable[[], Any]] = []


def runtime() -> Any:
    """The package `ddp._cuda`, whose modules are loaded at the first call."""
    return load_runtime[0]()


_cuda_processes: list[int] = []  # the processes that have used CUDA: this one, or one that it was forked from
_lost: list[bool] = []


def _forked() -> None:
    """Called in a forked child. If the parent used CUDA, disables it here: its CUDA context cannot be used."""
    if _cuda_processes:
        _lost.append(True)
        for known in _known.values():
            if known.type == "cuda":
                with contextlib.suppress(AttributeError):  # its `xp` was never used
                    del known.xp


os.register_at_fork(after_in_child=_forked)


def found_cupy() -> Any:
    """CuPy. None if it is not installed or finds no device, or in a fork of a process that has used CUDA."""
    try:
        return device("cuda").xp
    except DeviceError:
        return None


def _watched(xp: Any) -> int:
    return 2 if runtime().cuda_errors.blocking() else int(xp.cuda.runtime.getDeviceCount() > 1)


CPU = device("cpu")


class _Default(threading.local):
    """This thread's default device."""

    device = CPU

    def __init__(self) -> None:
        self.before: list[device] = []


default = _Default()


def device_of(array: Any) -> device:
    """The device that holds `array` (NumPy or CuPy)."""
    if isinstance(array, np.ndarray):
        return CPU
    index = array.data.device_id
    return _known.get(("cuda", index)) or device("cuda", index)


_HERE = contextlib.nullcontext()


def on(target: device) -> Any:
    """A context in which new arrays of `target.xp` are made on `target`."""
    return _HERE if target.index is None else target.xp.cuda.Device(target.index)


def to_device(array: Any, target: device, non_blocking: bool = False) -> Any:
    """Copies `array` (NumPy or CuPy) to `target`; returns the same array if it is there already.

    non_blocking: whether the copy may still be under way when this returns; see `ddp._cuda.copies`
    """
    source = device_of(array)
    if source is target or (target.index is None and source.type == target.type):
        return array
    if target.type == "cpu":
        return runtime().copies.d2h(array, non_blocking)
    xp = target.xp  # raises for a GPU that is not there
    if source.type == "cpu":
        return runtime().copies.h2d(xp, array, target.index, non_blocking)
    assert target.index is not None
    return runtime().copies.p2p(array, target.index)


def imported(array: Any) -> Any:
    """A CuPy array over the memory of a CUDA array of any library."""
    return runtime().array_interface.import_array_interface(device("cuda").xp, array)


def raise_cuda_error(waited_for: device, error: BaseException, call: str) -> None:
    """Raises a CudaError if CUDA raised `error` while the host waited for a device; otherwise returns."""
    if waited_for.type == "cuda" and (other := runtime().cuda_errors.translate(error, call)) is not error:
        raise other from error


def raise_pending() -> None:
    """Called after the host has waited for a GPU: raises the error that a kernel has reported, if any."""
    if _cuda_processes:
        runtime().device_checks.raise_pending()


def entropy() -> int:
    """63 random bits from the operating system. Does not use `secrets`, because that imports `hmac` and `random`."""
    return int.from_bytes(os.urandom(8), "little") >> 1


class _Capturing(threading.local):
    now: Any = None  # the `ddp._cuda.capture.Capture` of the CUDA graph that this thread is capturing, if any


capturing = _Capturing()


class BaseGenerator:
    """A generator of random numbers on one device, which begins at a seed. The base class of `ddp.Generator`.

    It wraps a `numpy.random.Generator`, or CuPy's of the same interface, which is made at the first use. On a GPU the
    state is in device memory: the CUDA stream that draws next waits for the one that drew last.
    """

    __slots__ = ("_rng", "_seed", "_stream", "device")
    DEFAULT_SEED = 67280421310721  # PyTorch's

    def __init__(self, device: Any = "cpu") -> None:
        self.device: _device = _device(device)
        self._seed = self.DEFAULT_SEED
        self._rng: Any = None
        self._stream: Any = None  # the `ddp._cuda.stream_order.DeviceStream` that used the state last

    @property
    def rng(self) -> Any:
        """The array module's generator."""
        if capturing.now is not None:
            capturing.now.drawn(self)
        if self._rng is None:
            with on(self.device):
                self._rng = self.device.xp.random.default_rng(self._seed)
        if self.device.type != "cpu" and capturing.now is None:
            current = runtime().stream_order.current(self.device.xp, self.device.index)
            self._stream = runtime().stream_order.transfer(self._stream, current, self._rng.bit_generator._state)
        return self._rng

    def manual_seed(self: S, seed: int) -> S:
        """Restarts at `seed`, a non-negative integer; returns itself. Raises: ArgumentError for a negative seed."""
        if seed < 0:
            raise ArgumentError(f"manual_seed({seed}): a seed is a non-negative integer")
        self._seed = int(seed)
        self._rng = None
        return self

    def seed(self) -> int:
        """Restarts at a seed drawn from the system's entropy, and returns it."""
        self.manual_seed(entropy())
        return self._seed

    def initial_seed(self) -> int:
        """The seed at which the generator began."""
        return self._seed

    def snapshot(self) -> Any:
        """The state: bytes; for a GPU an array on that GPU, or None before the first draw."""
        if self.device.type != "cpu":
            return None if self._rng is None else self.rng.bit_generator._state.copy()
        inner = self.rng.bit_generator.state
        numbers = inner["state"]
        words = numbers["state"].to_bytes(16, "little") + numbers["inc"].to_bytes(16, "little")
        return _PCG64.pack(words, inner["has_uint32"], inner["uinteger"], self._seed & _UINT64)

    def restore(self, state: Any) -> None:
        """Sets the state to a snapshot. Raises: ArgumentError for bytes of another length."""
        if self.device.type != "cpu":
            if state is None:
                self._rng = None
            else:
                self.rng.bit_generator._state[...] = state
            return
        if len(state) != _PCG64.size:
            raise ArgumentError(f"set_state: expected a state of {_PCG64.size} bytes, got {len(state)}")
        words, has_uint32, uinteger, self._seed = _PCG64.unpack(state)
        numbers = {"state": int.from_bytes(words[:16], "little"), "inc": int.from_bytes(words[16:], "little")}
        inner = {"bit_generator": "PCG64", "state": numbers, "has_uint32": has_uint32, "uinteger": uinteger}
        self.rng.bit_generator.state = inner

    def __repr__(self) -> str:
        return f"<ddp.Generator on {self.device}, seed {self._seed}>"


S = TypeVar("S", bound=BaseGenerator)
_device = device  # another name of the class, for code where `device` is something else
_PCG64 = struct.Struct("<32sBIQ")
_UINT64 = 2**64 - 1
_kind: list[type[BaseGenerator]] = [BaseGenerator]  # the class of generators made here: ddp.Generator, once it exists


class _Random(threading.local):
    """This thread's seed, and its generators by device, made on first use."""

    def __init__(self) -> None:
        self.seed = entropy()
        self.streams: dict[device, BaseGenerator] = {}


_random = _Random()


def manual_seed(seed: int) -> BaseGenerator:
    """Seeds the random numbers of this thread on every device. A thread that was never seeded has a random seed.

    seed: a non-negative integer. Returns this thread's CPU generator. Raises: ArgumentError if the seed is negative.
    """
    thread_generator(CPU).manual_seed(seed)
    _random.seed = int(seed)
    for generator in _random.streams.values():
        generator.manual_seed(seed)
    return thread_generator(CPU)


def initial_seed() -> int:
    """The seed of this thread's random numbers: that of the last `manual_seed`, or else a random one."""
    return _random.seed


def thread_generator(target: device) -> BaseGenerator:
    """This thread's generator on `target`."""
    if target.type == "cuda" and target.index is None:
        target = device("cuda", target.xp.cuda.Device().id)  # "cuda" and "cuda:0" have one generator
    generator = _random.streams.get(target)
    if generator is None:
        generator = _random.streams[target] = _kind[0](target).manual_seed(_random.seed)
    return generator


def thread_generators() -> list[BaseGenerator]:
    """The generators of CUDA devices that this thread has used."""
    return [generator for target, generator in _random.streams.items() if target.type == "cuda"]


def generator(target: device, given: BaseGenerator | None = None) -> Any:
    """The generator to draw from on `target`: that of `given`, or this thread's if `given` is None.

    It is a `numpy.random.Generator`, or CuPy's of the same interface. Raises: DeviceError if `given` is on another
    device; DtypeError if it is not a generator.
    """
    if given is None:
        return thread_generator(target).rng
    if not isinstance(given, BaseGenerator):
        raise DtypeError(f"generator: expected a ddp.Generator, got {type(given).__name__}")
    if given.device.type != target.type or (
        target.index is not None and given.device.index not in (None, target.index)
    ):
        raise DeviceError(f"generator: random numbers on {target} cannot come from a generator on {given.device}")
    return given.rng


def exchange_generators(other: tuple[int, dict[device, BaseGenerator]]) -> tuple[int, dict[device, BaseGenerator]]:
    """Replaces this thread's seed and its generators by device with `other`. Returns the previous ones."""
    own = _random.seed, _random.streams
    _random.seed, _random.streams = other
    return own


def random_state() -> Any:
    """The state of all generators of this thread, for `set_random_state`: recomputing a forward needs it."""
    return _random.seed, {
        target: (generator._seed, generator.snapshot()) for target, generator in _random.streams.items()
    }


def set_random_state(state: Any) -> None:
    """Sets all generators of this thread to a state that `random_state` returned."""
    _random.seed, known = state
    for target, generator in _random.streams.items():
        seed, snapshot = known.get(target, (_random.seed, None))
        generator.manual_seed(seed)
        if snapshot is not None:
            generator.restore(snapshot)
