"""Which array module computes: a tensor picks its device once, and everything below it is handed `xp`.

NumPy is the only array module known at import; CuPy is imported when a CUDA device is first computed on.
Random numbers live here too, because each array module has its own generators: one per thread and device.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ddp.errors import ArgumentError, DeviceError

_known: dict[tuple[str, int | None], device] = {}


class device:
    """Where a tensor lives: `device("cpu")`, `device("cuda")`, `device("cuda:1")`, `device("cuda", 1)`.

    Equal devices are one object, so `is` compares them. Naming a CUDA device neither imports CuPy nor needs a GPU;
    computing on it does.

    Raises: ArgumentError for an unknown type or a malformed index; DeviceError when `xp` is first asked for and
    CuPy or the GPU is missing.
    """

    __slots__ = ("index", "type", "xp")
    type: str
    index: int | None
    xp: Any  # the array module; resolved by __getattr__ on CUDA devices

    def __new__(cls, type: str | device, index: int | None = None) -> device:
        if isinstance(type, device):
            return type
        key = _parse(type, index)
        if key not in _known:
            self = super().__new__(cls)
            self.type, self.index = key
            if self.type == "cpu":
                self.xp = np
            _known.setdefault(key, self)
        return _known[key]

    def __getattr__(self, name: str) -> Any:
        # Only an unset slot arrives here: the array module of a CUDA device, asked for the first time.
        if name != "xp":
            raise AttributeError(f"device has no attribute {name!r}")
        self.xp = _cupy(self)
        return self.xp

    def __repr__(self) -> str:
        index = "" if self.index is None else f", index={self.index}"
        return f"device(type={self.type!r}{index})"

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __reduce__(self) -> tuple[Any, ...]:
        return device, (self.type, self.index)


def _parse(text: str, index: int | None) -> tuple[str, int | None]:
    kind, colon, digits = text.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ArgumentError(f"device({text!r}): the type is 'cpu' or 'cuda', not {kind!r}")
    if colon:
        if index is not None or not digits.isdecimal():
            raise ArgumentError(f"device({text!r}, index={index}): expected 'cuda', 'cuda:1' or ('cuda', 1)")
        index = int(digits)
    if index is not None and (index < 0 or (kind == "cpu" and index > 0)):
        raise ArgumentError(f"device({text!r}, index={index}): there is no such {kind} device")
    return kind, index


def _cupy(asked: device) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"device {asked}: CuPy is not installed; pip install 'ddp-runtime[cuda12]'") from error
    if not cupy.cuda.is_available():
        raise DeviceError(f"device {asked}: CuPy finds no CUDA device on this machine")
    return cupy


CPU = device("cpu")


def device_of(array: Any) -> device:
    """The device that holds `array` (NumPy or CuPy)."""
    return CPU if isinstance(array, np.ndarray) else device("cuda", array.device.id)


def place(array: Any, target: device) -> Any:
    """`array` (NumPy or CuPy) on `target`; the same array where it is there already."""
    source = device_of(array)
    if source is target or (target.index is None and source.type == target.type):
        return array
    if target is CPU or target.type == "cpu":
        return array.get()
    with target.xp.cuda.Device(target.index):
        return target.xp.asarray(array)


class _Random(threading.local):
    """This thread's seed, and its generators by device, made on first use."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.generators: dict[device, Any] = {}


_random = _Random()


def manual_seed(seed: int) -> None:
    """Seeds the random numbers of this thread on every device. A thread that was never seeded draws its own entropy.

    seed: a non-negative integer. Raises: ArgumentError for a negative one.
    """
    if seed < 0:
        raise ArgumentError(f"manual_seed({seed}): a seed is a non-negative integer")
    _random.seed = seed
    _random.generators.clear()


def generator(where: device) -> Any:
    """This thread's generator on `where`: a `numpy.random.Generator`, or CuPy's of the same interface."""
    found = _random.generators.get(where)
    if found is None:
        found = _random.generators[where] = where.xp.random.default_rng(_random.seed)
    return found
