"""Random tensors. Each thread and device has a stream of its own, and `generator=` takes another.

The numbers are NumPy's and CuPy's, not PyTorch's: only their distributions agree. They are drawn in float32 or float64;
float16 and bfloat16 are rounded from that, except that `rand` keeps below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp import _device
from ddp._device import CPU, Stream, generator, on, stream
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.creation import Size, Where, alike, made, pinned, sizes, target
from ddp._tensor.dtypes import HALVES, bfloat16, float16, float32, get_default_dtype, int64, is_float, parse
from ddp._tensor.shaping import spread
from ddp.errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Generator(Stream):
    """A stream of random numbers beside the thread's own: `ddp.randn(3, generator=ddp.Generator().manual_seed(0))`.

    device: where it draws. A new one begins at one fixed seed, as in PyTorch.
    """

    __slots__ = ()

    def get_state(self) -> Tensor:
        """Where the stream is, as a uint8 tensor."""
        with on(self.device):
            _ = self.rng  # a stream of a GPU that was never drawn from has no state yet
            return wrap(_bytes_of(self.snapshot()), CPU)

    def set_state(self, new_state: TensorBase) -> None:
        """Goes back to where `get_state` was called. Raises: ArgumentError for what is no state."""
        array = new_state.array
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ArgumentError(f"set_state: expected a 1-d uint8 tensor, got {array.dtype} of shape {array.shape}")
        if self.device.type == "cpu":
            self.restore(array.tobytes())
            return
        with on(self.device):
            own = self.rng.bit_generator._state
            if array.nbytes != own.nbytes:
                raise ArgumentError(f"set_state: expected a state of {own.nbytes} bytes, got {array.nbytes}")
            self.restore(self.device.xp.asarray(np.ascontiguousarray(array).view(own.dtype)))


_device._kind[0] = Generator


def _bytes_of(state: Any) -> Any:
    """The snapshot of a stream as a NumPy array of uint8."""
    return np.frombuffer(state, np.uint8).copy() if isinstance(state, bytes) else state.get().view(np.uint8)


def get_rng_state() -> Tensor:
    """Where this thread's random numbers of the CPU are, as a uint8 tensor."""
    return wrap(_bytes_of(stream(CPU).snapshot()), CPU)


def set_rng_state(new_state: TensorBase) -> None:
    """Puts this thread's random numbers of the CPU back to where `get_rng_state` was called. Raises: ArgumentError."""
    own: Any = stream(CPU)
    own.set_state(new_state)


def seed() -> int:
    """Seeds this thread's random numbers from the system's entropy, and returns the seed."""
    return _device.manual_seed(Stream().seed()).initial_seed()


_BITS = {float16: 11, bfloat16: 8}  # of precision


def draw(source: Any, method: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> Any:
    """An array of `shape` by the generator's `method` ("random" or "standard_normal"), which knows no half precision.

    Raises: DtypeError unless floating.
    """
    if not is_float(kind):
        raise DtypeError(f"random numbers are floating, not {kind}")
    drawn = getattr(source, method)(shape, dtype=float32 if kind in HALVES else kind)
    if kind not in HALVES:
        return drawn
    if method == "random":
        scale = 2.0 ** _BITS[kind]  # multiples of 1 / scale are exact, where rounding would reach 1
        drawn = np.floor(drawn * float32.type(scale)) / float32.type(scale)
    return drawn.astype(kind)


def origin(device: Where, source: Stream | None) -> _device.device:
    """Where numbers are drawn: the device that was asked for, else the generator's."""
    return target(device) if source is None or device is not None else source.device


def _drawn(
    method: str, shape: tuple[int, ...], source: Stream | None, dtype: Any, device: Where, requires_grad: bool
) -> Tensor:
    kind = get_default_dtype() if dtype is None else parse(dtype)
    where = origin(device, source)
    with on(where):
        array = where.xp.asarray(draw(generator(where, source), method, shape, kind))
    return made(array, where, requires_grad)


def rand(
    *sizes_: Size,
    size: Size | None = None,
    generator: Stream | None = None,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> Tensor:
    """Uniform random numbers in [0, 1): rand(2, 3) or rand((2, 3))."""
    x = _drawn("random", sizes(sizes_, size, "rand"), generator, dtype, device, requires_grad)
    return pinned(x) if pin_memory else x


def randn(
    *sizes_: Size,
    size: Size | None = None,
    generator: Stream | None = None,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> Tensor:
    """Normally distributed random numbers of mean 0 and deviation 1: randn(2, 3) or randn((2, 3))."""
    x = _drawn("standard_normal", sizes(sizes_, size, "randn"), generator, dtype, device, requires_grad)
    return pinned(x) if pin_memory else x


def randint(
    *bounds: Any,
    low: int = 0,
    high: int | None = None,
    size: Size | None = None,
    generator: Stream | None = None,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
) -> Tensor:
    """Random integers in [low, high): randint(high, size) or randint(low, high, size).

    int64 unless `dtype` says otherwise. Raises: ArgumentError for an empty range, or arguments that are not these.
    """
    given = list(bounds)
    if size is None and given and not isinstance(given[-1], int):
        size = given.pop()
    if len(given) == 2 and high is None:
        low, high = given
    elif len(given) == 1:
        low, high = (0, given[0]) if high is None else (given[0], high)
    elif given or high is None:
        raise ArgumentError(f"randint{bounds}: expected (high, size) or (low, high, size)")
    if size is None or high is None:
        raise ArgumentError(f"randint{bounds}: expected (high, size) or (low, high, size)")
    return _integers(int(low), int(high), spread((size,)), generator, dtype, device, requires_grad)


def _integers(
    low: int, high: int, shape: tuple[int, ...], source: Stream | None, dtype: Any, device: Where, requires_grad: bool
) -> Tensor:
    if high <= low:
        raise ArgumentError(f"randint: no integer is in [{low}, {high})")
    kind = parse(int64 if dtype is None else dtype)
    where = origin(device, source)
    with on(where):
        array = where.xp.asarray(generator(where, source).integers(low, high, shape)).astype(kind, copy=False)
    return made(array, where, requires_grad)


_PERMUTATIONS: dict[str, Any] = {
    "numpy": lambda source, n: source.permutation(n),
    "cupy": lambda source, n: source.random(n).argsort(),  # its generators have no permutation
}


def randperm(
    n: int,
    *,
    generator: Stream | None = None,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
) -> Tensor:
    """0 to n - 1 in random order, int64 unless `dtype` says otherwise. Raises: ArgumentError for a negative n."""
    if n < 0:
        raise ArgumentError(f"randperm({n}): expected a count")
    kind = parse(int64 if dtype is None else dtype)
    where = origin(device, generator)
    with on(where):
        drawn = _PERMUTATIONS[where.xp.__name__](_device.generator(where, generator), n)
        array = where.xp.asarray(drawn).astype(kind, copy=False)
    return made(array, where, requires_grad)


def _like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make` with the shape, dtype and device of another tensor."""

    def like(
        input: TensorBase,
        *,
        generator: Stream | None = None,
        dtype: Any = None,
        device: Where = None,
        requires_grad: bool = False,
    ) -> Tensor:
        options = alike(input, dtype, device)
        return make(input.array.shape, generator=generator, **options, requires_grad=requires_grad)

    like.__name__ = like.__qualname__ = f"{make.__name__}_like"
    like.__doc__ = f"{make.__name__}() in the shape, dtype and device of `input`, unless given."
    return like


rand_like = _like(rand)
randn_like = _like(randn)


def randint_like(
    input: TensorBase,
    low: int = 0,
    high: int | None = None,
    *,
    generator: Stream | None = None,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
) -> Tensor:
    """Random integers in [low, high) in the shape, dtype and device of `input`: randint_like(x, high) from 0 on."""
    low, high = (0, low) if high is None else (low, high)
    options = alike(input, dtype, device)
    return _integers(int(low), int(high), input.array.shape, generator, **options, requires_grad=requires_grad)
