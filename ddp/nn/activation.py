"""Activations: functions, and layers that call them. input: any shape, unless a docstring says otherwise.

The functions raise DtypeError unless the input is floating. But relu, sigmoid, tanh, softmax, log_softmax and softmin
take integers, too. `inplace` writes the result into the input, and raises the same errors as the functions whose names
end in an underscore.
"""

from __future__ import annotations

from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty_like, full, zeros_like
from ddp._tensor.dtypes import parse
from ddp._tensor.functions import sigmoid, tanh
from ddp._tensor.inplace import assign
from ddp._tensor.operands import convert
from ddp._tensor.reductions import required_float, resolve_axis
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import init as filling
from ddp.nn.module import FunctionModule, Layer, Module
from ddp.nn.parameter import Parameter
from ddp.nn.validation import one_dtype
from ddp.ops import activation


def _apply(op: Any, input: Tensor, inplace: bool = False, **parameters: Any) -> Tensor:
    result = apply(op, (required_float(input, op.name),), **parameters)
    return assign(input, f"{op.name}_", result) if inplace else result


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(input, 0). Raises: DtypeError for bool."""
    return input.relu_() if inplace else input.relu()


def relu_(input: Tensor) -> Tensor:
    """relu, written into the input."""
    return input.relu_()


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """input clamped to [0, 6]."""
    return hardtanh(input, 0.0, 6.0, inplace)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """input clamped to [min_val, max_val]; the gradient at the bounds is 0.

    Raises: ArgumentError if min_val > max_val.
    """
    if min_val > max_val:
        raise ArgumentError(f"hardtanh: min_val {min_val} is above max_val {max_val}")
    # Rounded to the dtype of the input: backward compares the result with the bounds.
    low, high = (float(input.array.dtype.type(bound)) for bound in (min_val, max_val))
    return _apply(activation.hardtanh, input, inplace, low=low, high=high)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """input where it is positive, else negative_slope * input."""
    return _apply(activation.leaky_relu, input, inplace, slope=negative_slope)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """input where it is positive, else alpha * (exp(input) - 1). Source: Clevert et al. 2016, arXiv:1511.07289."""
    return _apply(activation.elu, input, inplace, alpha=alpha)


_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """1.0507 * elu(input, 1.67326): keeps mean 0 and variance 1. Source: Klambauer et al. 2017, arXiv:1706.02515."""
    return _apply(activation.elu, input, inplace, alpha=_SELU_ALPHA, scale=_SELU_SCALE)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """input where it is positive, else alpha * (exp(input / alpha) - 1). Source: Barron 2017, arXiv:1704.07483.

    Raises: ArgumentError if alpha is 0.
    """
    if alpha == 0:
        raise ArgumentError("celu: alpha is a divisor, and cannot be 0")
    return _apply(activation.elu, input, inplace, alpha=alpha, input_scale=1 / alpha)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """input * (1 + erf(input / sqrt(2))) / 2; approximate="tanh": with tanh in place of erf.

    In float32, erf is accurate to 4e-7. Raises: ArgumentError for another `approximate`.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"gelu: approximate is 'none' or 'tanh', not {approximate!r}")
    return _apply(activation.gelu, input, tanh=approximate == "tanh")


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """input * sigmoid(input). Source: Elfwing et al. 2017, arXiv:1702.03118."""
    return _apply(activation.silu, input, inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """input * tanh(softplus(input)). Source: Misra 2019, arXiv:1908.08681."""
    return _apply(activation.mish, input, inplace)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta * input)) / beta; the input itself where beta * input > threshold."""
    return _apply(activation.softplus, input, beta=beta, threshold=threshold)


def softsign(input: Tensor) -> Tensor:
    """input / (1 + |input|)."""
    return _apply(activation.softsign, input, False)


def logsigmoid(input: Tensor) -> Tensor:
    """log(sigmoid(input)). The result is accurate even if sigmoid(input) is small."""
    return _apply(activation.logsigmoid, input)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """input * relu6(input + 3) / 6. Source: Howard et al. 2019, arXiv:1905.02244."""
    return _apply(activation.hardswish, input, inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """relu6(input + 3) / 6."""
    return _apply(activation.hardsigmoid, input, inplace)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """input where it is above `threshold`, else `value`."""
    return _apply(activation.threshold, input, inplace, threshold=threshold, value=value)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """input where it is positive, else weight * input. weight: (), (1,), or (C,) for input (N, C, ...).

    Raises: ShapeError; DtypeError unless both have one floating dtype.
    """
    one_dtype("prelu", required_float(input, "prelu"), weight)
    if weight.ndim > 1:
        raise ShapeError(f"prelu: weight {tuple(weight.shape)}: expected () or (C,)")
    if weight.numel() != 1:
        channels = input.shape[1] if input.ndim > 1 else 1
        if weight.numel() != channels:
            raise ShapeError(
                f"prelu: weight {tuple(weight.shape)} for input {tuple(input.shape)}: expected ({channels},)"
            )
        weight = weight.reshape(-1, *(1,) * (input.ndim - 2))
    elif weight.ndim > input.ndim:
        weight = weight.reshape(())
    return apply(activation.prelu, (input, weight))


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """The first half along `dim` times the sigmoid of the second. Source: Dauphin et al. 2016, arXiv:1612.08083.

    Raises: ShapeError for an odd size or a 0-d tensor; RangeError if there is no dimension `dim`.
    """
    axis = resolve_axis(required_float(input, "glu"), dim, "glu")
    if not input.ndim or input.shape[axis] % 2:
        raise ShapeError(f"glu: shape {tuple(input.shape)}: expected an even size in dimension {dim}")
    return apply(activation.glu, (input,), dim=axis)


def _in_dtype(input: Tensor, dtype: Any) -> Tensor:
    return input if dtype is None else convert(input, parse(dtype))  # type: ignore[return-value]  # a tensor has the mixins


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """exp(input) / sum(exp(input)) along `dim`.

    dim: None means 0 for an input of 0, 1 or 3 dimensions, else 1, as in PyTorch. dtype: converts the input first.
    _stacklevel: accepted, and ignored. Raises: RangeError if there is no dimension `dim`.
    """
    return _in_dtype(input, dtype).softmax(_default_dim(input) if dim is None else dim)


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """log(softmax(input, dim)). The result is accurate even for small probabilities."""
    return _in_dtype(input, dtype).log_softmax(_default_dim(input) if dim is None else dim)


def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """softmax(-input, dim)."""
    return softmax(-input, dim, dtype=dtype)


def _default_dim(input: Tensor) -> int:
    return 0 if input.ndim in (0, 1, 3) else 1


_threshold = threshold  # for threshold_, whose argument hides the function


def elu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    """elu, written into the input."""
    return elu(input, alpha, inplace=True)


def selu_(input: Tensor) -> Tensor:
    """selu, written into the input."""
    return selu(input, inplace=True)


def celu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    """celu, written into the input."""
    return celu(input, alpha, inplace=True)


def hardtanh_(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """hardtanh, written into the input."""
    return hardtanh(input, min_val, max_val, inplace=True)


def leaky_relu_(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """leaky_relu, written into the input."""
    return leaky_relu(input, negative_slope, inplace=True)


def threshold_(input: Tensor, threshold: float, value: float) -> Tensor:
    """threshold, written into the input."""
    return _threshold(input, threshold, value, inplace=True)


def gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """softmax((logits + Gumbel noise) / tau) along `dim`: samples of the classes, nearly one-hot if tau is small.

    hard: returns one-hot samples, but backward uses the gradient of the softmax. eps: accepted, and ignored.
    Raises: DtypeError, RangeError. Source: Jang et al. 2017, arXiv:1611.01144; Maddison et al. 2017, arXiv:1611.00712.
    """
    noise = -empty_like(required_float(logits, "gumbel_softmax")).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    sample = zeros_like(logits).scatter_(dim, soft.detach().argmax(dim, keepdim=True), 1.0)
    return sample - soft.detach() + soft


class _Activation(FunctionModule):
    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in self._settings if name != "inplace"]
        return ", ".join([*shown, "inplace=True"] if getattr(self, "inplace", False) else shown)


class ReLU(_Activation, function=relu):
    """max(input, 0)."""


class ReLU6(_Activation, function=relu6):
    """input clamped to [0, 6]."""


class LeakyReLU(_Activation, function=leaky_relu):
    """input where it is positive, else negative_slope * input."""


class ELU(_Activation, function=elu):
    """input where it is positive, else alpha * (exp(input) - 1)."""


class SELU(_Activation, function=selu):
    """1.0507 * elu(input, 1.67326)."""


class CELU(_Activation, function=celu):
    """input where it is positive, else alpha * (exp(input / alpha) - 1)."""


class GELU(_Activation, function=gelu):
    """input * (1 + erf(input / sqrt(2))) / 2; approximate="tanh": with tanh in place of erf."""

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(_Activation, function=silu):
    """input * sigmoid(input)."""


class Mish(_Activation, function=mish):
    """input * tanh(softplus(input))."""


class Softplus(_Activation, function=softplus):
    """log(1 + exp(beta * input)) / beta; the input itself where beta * input > threshold."""


class Softsign(_Activation, function=softsign):
    """input / (1 + |input|)."""


class Sigmoid(_Activation, function=sigmoid):
    """1 / (1 + exp(-input))."""


class LogSigmoid(_Activation, function=logsigmoid):
    """log(sigmoid(input))."""


class Tanh(_Activation, function=tanh):
    """The hyperbolic tangent."""


class Hardtanh(_Activation, function=hardtanh):
    """input clamped to [min_val, max_val]. Raises: ArgumentError unless min_val < max_val."""

    def _init(self, **settings: Any) -> None:
        super()._init(**settings)
        if self.max_val <= self.min_val:
            raise ArgumentError(f"Hardtanh: expected min_val < max_val, got {self.min_val} and {self.max_val}")


class Hardswish(_Activation, function=hardswish):
    """input * relu6(input + 3) / 6."""

    extra_repr = Module.extra_repr


class Hardsigmoid(_Activation, function=hardsigmoid):
    """relu6(input + 3) / 6."""

    extra_repr = Module.extra_repr


class Threshold(_Activation, function=threshold):
    """input where it is above `threshold`, else `value`."""


class GLU(_Activation, function=glu):
    """The first half along `dim` times the sigmoid of the second half. Halves the size of `dim`."""


class PReLU(Layer, shown="num_parameters="):
    """input where it is positive, else weight * input. weight: (num_parameters,), all equal to `init` at first.

    num_parameters: 1, or C for an input of shape (N, C, ...).
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_parameters = num_parameters
        self.init = init
        self.weight = Parameter(full((num_parameters,), float(init), dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Resets every weight to `init`."""
        filling.constant_(self.weight, self.init)

    def forward(self, input: Tensor) -> Tensor:
        return prelu(input, self.weight)


class _Softmax(FunctionModule, omitted=("_stacklevel", "dtype")):
    """A layer whose only setting is `dim`."""


class Softmax(_Softmax, function=softmax):
    """exp(input) / sum(exp(input)) along `dim`."""


class LogSoftmax(_Softmax, function=log_softmax):
    """log(softmax(input)) along `dim`."""


class Softmin(_Softmax, function=softmin):
    """softmax(-input) along `dim`."""
