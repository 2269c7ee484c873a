"""Initialisation of parameters, in place and outside the graph.

Functions that use the fan in or the fan out read a tensor as (out, in, ...). generator: a `ddp.Generator` to draw from;
None: this thread's generator. A generator of another device raises DeviceError.
"""

from __future__ import annotations

import math

from ddp._device import BaseGenerator, on, to_device
from ddp._device import generator as source
from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp._tensor.functions import erfinv
from ddp._tensor.sampling import rand, randn
from ddp.errors import ArgumentError, ShapeError

__all__ = ["calculate_gain", "constant_", "dirac_", "eye_", "kaiming_normal_", "kaiming_uniform_", "normal_"]
__all__ += ["ones_", "orthogonal_", "sparse_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_"]
__all__ += ["zeros_"]


@no_grad()
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: BaseGenerator | None = None) -> Tensor:
    """Draws uniformly from [a, b).

    Raises: ArgumentError if a > b; DtypeError unless floating.
    """
    return tensor.uniform_(a, b, generator=generator)


@no_grad()
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: BaseGenerator | None = None) -> Tensor:
    """Draws from a normal distribution. Raises: ArgumentError if std < 0; DtypeError unless floating."""
    return tensor.normal_(mean, std, generator=generator)


@no_grad()
def trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: BaseGenerator | None = None,
) -> Tensor:
    """Draws from a normal distribution truncated to [a, b]. Raises: ArgumentError if a > b or std is 0."""
    if a > b or std == 0:
        raise ArgumentError(f"trunc_normal_: expected a <= b and std != 0, got a={a}, b={b}, std={std}")
    low, high = (math.erf((edge - mean) / (std * math.sqrt(2.0))) for edge in (a, b))
    drawn = rand(tensor.shape, generator=generator, dtype="float64", device=tensor.device)
    return tensor.copy_((erfinv(drawn * (high - low) + low) * (std * math.sqrt(2.0)) + mean).clamp(a, b))


@no_grad()
def constant_(tensor: Tensor, val: float) -> Tensor:
    """Sets all elements to `val`."""
    return tensor.fill_(val)


def zeros_(tensor: Tensor) -> Tensor:
    """Sets all elements to 0."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Sets all elements to 1."""
    return constant_(tensor, 1.0)


@no_grad()
def eye_(tensor: Tensor) -> Tensor:
    """Sets a matrix to the identity: 1 on the diagonal, else 0. Raises: ShapeError unless two-dimensional."""
    if tensor.ndim != 2:
        raise ShapeError(f"eye_: expected a matrix, got shape {tensor.shape}")
    return tensor.copy_(tensor.device.xp.eye(*tensor.shape, dtype=tensor.dtype))


@no_grad()
def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """Makes a convolution copy its channels: in each group, filter i has 1 at the centre of its channel i, else 0.

    tensor: (out, in, ...), of three to five dimensions. Raises: ShapeError; ArgumentError unless groups divides `out`.
    """
    if tensor.ndim not in (3, 4, 5):
        raise ShapeError(f"dirac_: expected three to five dimensions, got shape {tensor.shape}")
    filters, channels = tensor.shape[:2]
    if groups < 1 or filters % groups:
        raise ArgumentError(f"dirac_: {groups} groups do not divide {filters} filters")
    tensor.zero_()
    centre = tuple(n // 2 for n in tensor.shape[2:])
    group_filters = filters // groups
    for group in range(groups):
        for i in range(min(group_filters, channels)):
            index = (group * group_filters + i, i, *centre)
            tensor[index] = 1
    return tensor


def fan_in_and_out(tensor: Tensor) -> tuple[int, int]:
    """Counts the inputs of each output, and the outputs of each input, of a weight (out, in, ...).

    Raises: ShapeError below two dimensions.
    """
    if tensor.ndim < 2:
        raise ShapeError(f"fan in and out of shape {tensor.shape}: expected a weight of at least two dimensions")
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


_GAINS = {
    "linear": 1.0,
    **{f"conv{kind}{n}d": 1.0 for kind in ("", "_transpose") for n in (1, 2, 3)},
    "sigmoid": 1.0,
    "tanh": 5.0 / 3,
    "relu": math.sqrt(2.0),
    "selu": 3.0 / 4,
}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Returns the factor for weights that makes up for how much a nonlinearity shrinks a signal.

    nonlinearity: "linear", "conv2d", ..., "sigmoid", "tanh", "relu", "selu" or "leaky_relu"; param: the slope of
    leaky_relu, 0.01 unless given

    Raises: ArgumentError for another nonlinearity.
    """
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else param
        return math.sqrt(2.0 / (1 + slope * slope))
    if nonlinearity not in _GAINS:
        raise ArgumentError(f"nonlinearity {nonlinearity!r}: expected one of {', '.join(_GAINS)}, leaky_relu")
    return _GAINS[nonlinearity]


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    mode = mode.lower()
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentError(f"mode {mode!r}: expected 'fan_in' or 'fan_out'")
    fan = fan_in_and_out(tensor)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(max(fan, 1))


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: BaseGenerator | None = None,
) -> Tensor:
    """Draws uniformly. A signal keeps its variance in a layer with these weights and the activation `nonlinearity`.

    a: slope of leaky_relu; mode: "fan_in" keeps the variance in forward, "fan_out" in backward.

    Raises: ShapeError, ArgumentError. Source: He et al. 2015, arXiv:1502.01852.
    """
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: BaseGenerator | None = None,
) -> Tensor:
    """Draws from a normal distribution. Its variance and the arguments are as in kaiming_uniform_."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity), generator)


def _xavier_std(tensor: Tensor, gain: float) -> float:
    return gain * math.sqrt(2.0 / max(sum(fan_in_and_out(tensor)), 1))


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: BaseGenerator | None = None) -> Tensor:
    """Draws uniformly, with variance 2*gain^2 / (fan in + fan out). Raises: ShapeError.

    Source: Glorot and Bengio 2010.
    """
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: BaseGenerator | None = None) -> Tensor:
    """Draws from a normal distribution of variance 2*gain^2 / (fan in + fan out). Raises: ShapeError.

    Source: Glorot and Bengio 2010.
    """
    return normal_(tensor, 0.0, _xavier_std(tensor, gain), generator)


@no_grad()
def orthogonal_(tensor: Tensor, gain: float = 1.0, generator: BaseGenerator | None = None) -> Tensor:
    """Sets a tensor to `gain` times a random matrix with orthonormal rows (columns, if it has more rows than columns).

    tensor: (out, ...), as a matrix of `out` rows.

    Raises: ShapeError below two dimensions. Source: Saxe et al. 2013, arXiv:1312.6120.
    """
    if tensor.ndim < 2:
        raise ShapeError(f"orthogonal_: expected at least two dimensions, got shape {tensor.shape}")
    if not tensor.numel():
        return tensor
    rows = tensor.shape[0]
    xp = tensor.device.xp
    columns = tensor.numel() // rows
    flat = randn(rows, columns, generator=generator, dtype="float64", device=tensor.device)
    with on(flat.device):
        q, r = xp.linalg.qr(flat.array.T if rows < columns else flat.array)
        q *= xp.sign(xp.diagonal(r))  # these signs make the distribution uniform over all orthogonal matrices
        return tensor.copy_((q.T if rows < columns else q).reshape(tensor.shape) * gain)


@no_grad()
def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01, generator: BaseGenerator | None = None) -> Tensor:
    """Draws from a normal distribution, then sets a random fraction `sparsity` of each column to 0.

    Raises: ShapeError unless two-dimensional. Source: Martens 2010, Deep learning via Hessian-free optimization.
    """
    if tensor.ndim != 2:
        raise ShapeError(f"sparse_: expected a matrix, got shape {tensor.shape}")
    rows, columns = tensor.shape
    xp = tensor.device.xp
    tensor.normal_(0.0, std, generator=generator)
    order = source(tensor.device, generator).random((rows, columns)).argsort(axis=0)
    kept = xp.ones((rows, columns), dtype="float32")
    kept[order[: math.ceil(sparsity * rows)], xp.arange(columns)] = 0
    return tensor.mul_(to_device(kept.astype(tensor.dtype), tensor.device))


def reset_affine(weight: Tensor, bias: Tensor | None) -> None:
    """Draws weight and bias as PyTorch does for linear and convolution layers: uniformly, up to +-1/sqrt(fan in)."""
    if weight.numel():
        kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(max(fan_in_and_out(weight)[0], 1))
        uniform_(bias, -bound, bound)
