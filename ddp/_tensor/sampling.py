"""Random tensors. Each thread has a generator for each device; `generator=` takes another one.

The numbers are NumPy's and CuPy's, not PyTorch's: only their distributions agree. Functions draw floats in float32 or
float64, and in-place methods draw in float64. If the tensor's dtype has fewer bits, the numbers are rounded. `rand`
rounds down, so that they stay below 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ddp import _device
from ddp._device import CPU, BaseGenerator, on, thread_generator
from ddp._tensor import dtypes
from ddp._tensor.base import Tensor, TensorBase, TensorFunction, guarded_function, to_common_device, wrap
from ddp._tensor.creation import (
    Options,
    Size,
    Where,
    like_form,
    new,
    options_like,
    parse_count,
    parse_shape,
    rename,
    resolve_device,
)
from ddp._tensor.dtypes import Dtype
from ddp._tensor.indexing import broadcast_shape
from ddp._tensor.inplace import must_record, operand_array
from ddp._tensor.operands import as_method, check_tensor, parse_int, parse_sizes
from ddp._tensor.reductions import required_float
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops.arrays import Ints
from ddp.ops.indexing import check_all

__all__ = ["Generator", "bernoulli", "get_rng_state", "multinomial", "normal", "seed", "set_rng_state"]
__all__ += ["rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"]

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Generator(BaseGenerator):
    """A separate generator of random numbers: `ddp.randn(3, generator=ddp.Generator().manual_seed(0))`.

    device: where the numbers are drawn. A new generator has a fixed seed, as in PyTorch.
    """

    __slots__ = ()

    def get_state(self) -> Tensor:
        """The state of the generator, as a uint8 tensor."""
        with on(self.device):
            _ = self.rng  # creates the state of a GPU's generator that was never used
            state: Any = self.snapshot()
            array = np.frombuffer(state, np.uint8).copy() if isinstance(state, bytes) else state.get().view(np.uint8)
        return wrap(array, CPU)

    def set_state(self, new_state: TensorBase) -> None:
        """Sets the state to what `get_state` returned.

        Raises: ArgumentError for a tensor of another dtype, number of dimensions or length; DtypeError for anything
        that is not a tensor.
        """
        if not isinstance(new_state, TensorBase):
            raise DtypeError(f"set_state: expected a 1-d uint8 tensor, got {type(new_state).__name__}")
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


def get_rng_state() -> Tensor:
    """The state of this thread's CPU generator, as a uint8 tensor."""
    own: Any = thread_generator(CPU)
    return own.get_state()


def set_rng_state(new_state: TensorBase) -> None:
    """Sets the state of this thread's CPU generator to what `get_rng_state` returned.

    Raises: ArgumentError for a tensor of another dtype, number of dimensions or length; DtypeError for anything that
    is not a tensor.
    """
    own: Any = thread_generator(CPU)
    own.set_state(new_state)


def seed() -> int:
    """Seeds this thread's random numbers from the system's entropy, and returns the seed."""
    return _device.manual_seed(BaseGenerator().seed()).initial_seed()


_BITS = {dtypes.float16: 11, dtypes.bfloat16: 8}  # bits of precision


def draw(source: Any, method: str, shape: Ints, dtype: Dtype) -> Any:
    """Draws an array by `method` ("random" or "standard_normal") of the generator `source`.

    Half precision is drawn in float32 and rounded.

    Raises: DtypeError unless `dtype` is floating.
    """
    if not dtypes.is_float(dtype):
        raise DtypeError(f"random numbers are floating, not {dtype}")
    drawn = getattr(source, method)(shape, dtype=dtypes.float32 if dtype in dtypes.HALVES else dtype)
    if dtype not in dtypes.HALVES:
        return drawn
    if method == "random":
        scale = 2.0 ** _BITS[dtype]  # rounded down to a multiple of 1/scale: rounding to the nearest could give 1
        drawn = np.floor(drawn * dtypes.float32.type(scale)) / dtypes.float32.type(scale)
    return drawn.astype(dtype)


def _largest_below(number: float, dtype: Dtype) -> float:
    """The largest number of a floating dtype that is below `number`."""
    rounded = dtype.type(number)
    return float(rounded if rounded < number else np.nextafter(rounded, dtype.type(-math.inf)))


class RandomOptions(Options, total=False):
    """Keyword options of functions that make random tensors."""

    generator: BaseGenerator | None


def _sampled(
    sample: Callable[[Any, Dtype], Any],
    usual: Dtype | None = None,
    *,
    generator: BaseGenerator | None = None,
    device: Where = None,
    **options: Any,
) -> Tensor:
    """Makes a tensor of what `sample(rng, dtype)` draws. generator: by default, this thread's generator for the device

    usual: see `creation.new`
    """
    if device is None and isinstance(generator, BaseGenerator):
        device = generator.device
    target = resolve_device(device)

    @np.errstate(all="ignore")  # numbers too large for the dtype become infinite
    def make(xp: Any, dtype: Dtype) -> Any:
        return target.xp.asarray(sample(_device.generator(target, generator), dtype)).astype(dtype, copy=False)

    return new(make, usual, device=target, **options)


def _floats(name: str, method: str, doc: str) -> TensorFunction:
    """Makes the function `name`, which draws a tensor of random floats by the generator's `method`."""

    def make(*sizes_: Size, size: Size | None = None, **options: Unpack[RandomOptions]) -> Tensor:
        shape = parse_shape(sizes_, size, name)
        return _sampled(lambda rng, dtype: draw(rng, method, shape, dtype), **options)

    return rename(make, name, f"{doc} generator, dtype, device, requires_grad, pin_memory: by name.")


rand = _floats("rand", "random", "Uniform random numbers in [0, 1): rand(2, 3) or rand((2, 3)).")
randn = _floats(
    "randn", "standard_normal", "Normal random numbers of mean 0 and deviation 1: randn(2, 3) or randn((2, 3))."
)
rand_like = like_form(rand)
randn_like = like_form(randn)


def _check_limits(name: str, low: int, high: int, dtype: Dtype) -> None:
    """Checks that the integers in [low, high) are in the range of `dtype`. Raises: ArgumentError if they are not."""
    if dtype == dtypes.bool_:
        least = 0
        most = 1
    else:
        limits: Any = dtypes.finfo(dtype) if dtypes.is_float(dtype) else dtypes.iinfo(dtype)
        least = limits.min
        most = limits.max
    if low < least or high - 1 > most:
        raise ArgumentError(f"{name}: expected numbers that {dtype} holds, {least} to {most}, got [{low}, {high})")


def randint(
    *bounds: Any, low: int = 0, high: int | None = None, size: Size | None = None, **options: Unpack[RandomOptions]
) -> Tensor:
    """Random integers in [low, high): randint(high, size) or randint(low, high, size).

    int64 unless `dtype` says otherwise; rounding to a floating dtype may give `high`.

    Raises: ArgumentError if the range is empty or exceeds that of the dtype, or for other arguments; DtypeError if the
    bounds or the sizes are not integers, or for an unknown dtype.
    """
    arguments = list(bounds)
    if size is None and arguments and not isinstance(arguments[-1], int):
        size = arguments.pop()
    if len(arguments) == 2 and high is None:
        low, high = arguments
    elif len(arguments) == 1:
        low, high = (0, arguments[0]) if high is None else (arguments[0], high)
    if len(arguments) > 2 or size is None or high is None:
        raise ArgumentError(f"randint{bounds}: expected (high, size) or (low, high, size)")
    first, last = parse_sizes((low, high))
    if last <= first:
        raise ArgumentError(f"randint: no integer is in [{first}, {last})")
    shape = parse_shape((), size, "randint")

    def sample(rng: Any, dtype: Dtype) -> Any:
        _check_limits("randint", first, last, dtype)
        return rng.integers(first, last, shape)

    return _sampled(sample, dtypes.int64, **options)


def randperm(n: int, **options: Unpack[RandomOptions]) -> Tensor:
    """0 to n - 1 in random order, int64 unless `dtype` says otherwise.

    Raises: ArgumentError for a negative n, or for numbers that the dtype does not represent; DtypeError if n is not
    an integer, or for an unknown dtype.
    """
    n = parse_count(n, "randperm")

    def sample(rng: Any, dtype: Dtype) -> Any:
        most = _COUNTS.get(dtype.name) or dtypes.iinfo(dtype).max + 1
        if n > most:
            raise ArgumentError(f"randperm({n}): {dtype} holds all integers below {most} only")
        # CuPy's generators have no permutation.
        return rng.permutation(n) if hasattr(rng, "permutation") else rng.random(n).argsort()

    return _sampled(sample, dtypes.int64, **options)


def randint_like(input: TensorBase, low: int = 0, high: int | None = None, **options: Unpack[RandomOptions]) -> Tensor:
    """Random integers in [low, high), or [0, low) without `high`, in the shape, dtype and device of `input`.

    Raises: as randint; DtypeError if `input` is not a tensor.
    """
    check_tensor("randint_like", input)
    low, high = (0, low) if high is None else (low, high)
    return randint(low, high, input.array.shape, **options_like(input, options))


Self = TypeVar("Self", bound="Sampling")


@guarded_function
def normal(mean: Any = 0.0, std: Any = 1.0, size: Size | None = None, **options: Unpack[RandomOptions]) -> Tensor:
    """Normally distributed random numbers of shape `size`, or of the shape of mean and std if they are tensors.

    Tensors of means and deviations broadcast; the result is outside the graph.

    Raises: ArgumentError for a negative deviation (on a GPU, at the next call that waits for the GPU), or if mean and
    std are numbers and there is no size; ShapeError if they do not broadcast; DtypeError for tensors of integers;
    DeviceError for tensors on different devices, or a generator on another device.
    """
    tensors = [x for x in (mean, std) if isinstance(x, TensorBase)]
    if len({x._device for x in tensors}) > 1:
        return normal(*to_common_device("normal", (mean, std)), **options)
    centre, width = (x.array if isinstance(x, TensorBase) else x for x in (mean, std))
    xp = std._device.xp if isinstance(std, TensorBase) else np
    check_all(xp, ~(xp.asarray(width) < 0), ArgumentError, "normal: std is negative")
    if tensors:
        options |= {"device": tensors[0]._device, "dtype": tensors[0].array.dtype}
        shape = broadcast_shape("normal", *[x.array.shape for x in tensors])
    elif size is None:
        raise ArgumentError("normal: a size is needed where mean and std are numbers")
    else:
        shape = parse_shape((), size, "normal")
    return _sampled(lambda rng, dtype: draw(rng, "standard_normal", shape, dtype) * width + centre, **options)


@guarded_function
def bernoulli(input: TensorBase, p: float | None = None, *, generator: BaseGenerator | None = None) -> Tensor:
    """Draws 1 or 0 for each element of `input`, which is the probability of 1, unless `p` is given instead.

    The result is outside the graph, and has the dtype of `input`.

    Raises: ArgumentError for probabilities outside [0, 1] (on a GPU, at the next call that waits for the GPU);
    DtypeError for integers without `p`, or if `input` is not a tensor; DeviceError for a generator on another device.
    """
    check_tensor("bernoulli", input)
    x = input.array
    xp = input._device.xp
    chance = _probability(required_float(input, "bernoulli") if p is None else p, "bernoulli")
    with on(input._device):
        drawn = _device.generator(input._device, generator).random(x.shape, dtype=dtypes.float64)
    return wrap(xp.asarray(drawn < chance).astype(x.dtype), input._device)


def _probability(p: Any, name: str) -> Any:
    """Returns `p` as a float or an array. Raises: ArgumentError if a probability is outside [0, 1]."""
    message = f"{name}: a probability is outside [0, 1]"
    if not isinstance(p, TensorBase):
        if not 0 <= p <= 1:
            raise ArgumentError(message)
        return float(p)
    check_all(p._device.xp, (p.array >= 0) & (p.array <= 1), ArgumentError, message)
    return p.array


@guarded_function
def multinomial(
    input: TensorBase, num_samples: int, replacement: bool = False, *, generator: BaseGenerator | None = None
) -> Tensor:
    """`num_samples` categories drawn by the weights of `input`: (C,) or (N, C) to (num_samples,) or (N, num_samples).

    int64. Weights are non-negative and need not sum to 1.

    Raises: ShapeError for other dimensions, or C = 0; DtypeError unless floating, or if num_samples is not an integer;
    ArgumentError for weights that are negative, not finite or all 0, for num_samples < 1, or if fewer weights are
    positive than are drawn without replacement.
    """
    check_tensor("multinomial", input)
    num_samples = parse_int(num_samples, "multinomial", "num_samples")
    x = input.array
    xp = input._device.xp
    required_float(input, "multinomial")
    if x.ndim not in (1, 2) or not x.shape[-1]:
        raise ShapeError(f"multinomial: expected weights of shape (C,) or (N, C), got {x.shape}")
    weights = x.reshape(-1, x.shape[-1]).astype(dtypes.float64)
    possible = int((weights > 0).sum(axis=1).min()) if len(weights) else num_samples
    if num_samples <= 0 or not bool(((weights >= 0) & (weights < math.inf)).all()):
        raise ArgumentError(f"multinomial: {num_samples} samples, or a weight that is negative, infinite or nan")
    if possible < (1 if replacement else num_samples):
        raise ArgumentError(f"multinomial: {num_samples} samples of a row with {possible} positive weights")
    source = _device.generator(input._device, generator)
    with on(input._device):
        if replacement:
            out = _inverse(xp, weights, xp.asarray(source.random((len(weights), num_samples), dtype=dtypes.float64)))
        else:
            # Sorting exponential waiting times, whose rates are the weights, gives draws without replacement, in order.
            with np.errstate(all="ignore"):
                waits = _exponential(xp, source, weights.shape) / weights
            out = xp.argsort(waits, axis=1)[:, :num_samples]
    return wrap(out.astype(dtypes.int64, copy=False).reshape(*x.shape[:-1], num_samples), input._device)


def _exponential(xp: Any, source: Any, shape: Ints) -> Any:
    """Exponentially distributed float64 numbers of rate 1."""
    return -xp.log1p(-xp.asarray(source.random(shape)))


def _inverse(xp: Any, weights: Any, drawn: Any) -> Any:
    """For each number u in `drawn` (N, S), the first category at which the row's running sum exceeds u * its total."""
    sums = weights.cumsum(axis=1)
    row = xp.arange(len(sums))[:, None]
    # One search for all rows: the edges of row i are between i and i + 1.
    edges = (sums / sums[:, -1:] + row).reshape(-1)
    out = xp.searchsorted(edges, (drawn + row).reshape(-1), side="right").reshape(drawn.shape) - row * sums.shape[1]
    # Rounding may give the total itself, which is past the last category of positive weight.
    return xp.minimum(out, sums.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)[:, None])


def _overwrite(x: Self, name: str, generator: BaseGenerator | None, sample: Callable[[Any, Ints], Any]) -> Self:
    """Writes what `sample(rng, shape)` draws into `x`."""
    values = x._device.xp.asarray(sample(_device.generator(x._device, generator), x.array.shape))
    if must_record(x, name):
        x.copy_(wrap(values, x._device))  # type: ignore[attr-defined]  # every tensor has the mixins
    else:
        x.array[...] = values
        x.version.count += 1
    return x


class Sampling(TensorBase):
    """Methods that draw random numbers, with this tensor as the parameters or as the destination."""

    __slots__ = ()

    bernoulli = as_method(guarded_function(bernoulli), "bernoulli", bernoulli.__doc__)
    multinomial = as_method(guarded_function(multinomial), "multinomial", multinomial.__doc__)

    def bernoulli_(self: Self, p: Any = 0.5, *, generator: BaseGenerator | None = None) -> Self:
        """Every element becomes 1 with probability `p`, a number or a tensor that broadcasts, else 0.

        Raises: ArgumentError for a probability outside [0, 1] (on a GPU, at the next call that waits for the GPU);
        ShapeError if `p` does not broadcast; InplaceError if autograd must record the write and cannot.
        """
        chance = operand_array(self, _probability(p, "bernoulli_"), "bernoulli_")
        return _overwrite(self, "bernoulli_", generator, lambda rng, shape: rng.random(shape) < chance)

    def uniform_(self: Self, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Self:
        """Fills the tensor with random numbers, uniform in [low, high).

        Raises: ArgumentError if low > high; DtypeError unless floating; InplaceError if autograd must record the write
        and cannot.
        """
        if low > high:
            raise ArgumentError(f"uniform_: low {low} is above high {high}")
        required_float(self, "uniform_")
        most = max(low, _largest_below(high, self.array.dtype))

        def sample(rng: Any, shape: Ints) -> Any:
            # In float64, so that one seed gives the same weights, rounded, in every dtype.
            return (rng.random(shape) * (high - low) + low).clip(None, most)

        return _overwrite(self, "uniform_", generator, sample)

    def normal_(self: Self, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Self:
        """Fills the tensor with normally distributed random numbers.

        Raises: ArgumentError if std < 0; DtypeError unless floating; InplaceError if autograd must record the write and
        cannot.
        """
        if std < 0:
            raise ArgumentError(f"normal_: std is at least 0, not {std}")
        required_float(self, "normal_")
        return _overwrite(self, "normal_", generator, lambda rng, shape: rng.standard_normal(shape) * std + mean)

    def exponential_(self: Self, lambd: float = 1.0, *, generator: BaseGenerator | None = None) -> Self:
        """Fills the tensor with exponentially distributed random numbers of rate `lambd`.

        Raises: ArgumentError unless lambd is positive; DtypeError unless floating; InplaceError if autograd must record
        the write and cannot.
        """
        if not lambd > 0:
            raise ArgumentError(f"exponential_: lambd={lambd} is not positive")
        required_float(self, "exponential_")
        xp = self._device.xp
        return _overwrite(self, "exponential_", generator, lambda rng, shape: _exponential(xp, rng, shape) / lambd)

    def random_(
        self: Self, low: int | None = None, high: int | None = None, *, generator: BaseGenerator | None = None
    ) -> Self:
        """Fills the tensor with random integers in [low, high), or in [0, low) if only low is given.

        Rounding to a floating dtype may give the upper bound.
        Without arguments: in [0, n], where the dtype represents all integers up to n, but not n + 1. For int64, n is
        one less.
        Raises: ArgumentError if the range is empty or exceeds that of the dtype; InplaceError if autograd must
        record the write and cannot.
        """
        dtype = self.array.dtype
        if high is None:
            low, high = 0, low
        if high is None:
            high = _COUNTS.get(dtype.name) or dtypes.iinfo(dtype).max + 1
        bounds = low or 0, high
        if high <= bounds[0]:
            raise ArgumentError(f"random_: no integer is in [{bounds[0]}, {high})")
        _check_limits("random_", *bounds, dtype)
        return _overwrite(self, "random_", generator, lambda rng, shape: rng.integers(*bounds, shape, dtype="int64"))


# Upper bounds (exclusive) of `random_` without arguments, and of `randperm`. A floating dtype represents every integer
# below its bound.
_COUNTS = {"bool": 2, "bfloat16": 2**8 + 1, "float16": 2**11 + 1, "float32": 2**24 + 1, "float64": 2**53 + 1}
_COUNTS["int64"] = 2**63 - 1
