"""Discrete Fourier transforms in float32 and float64, with gradients, under PyTorch's names. Integers are converted.

Complex results are a `ComplexTensor`. norm: "backward" or None divides the inverse transforms by n, the number of
elements; "forward" divides the forward transforms by n; "ortho" divides all transforms by sqrt(n).
"""

from __future__ import annotations

from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.complex_numbers import ComplexTensor
from ddp._tensor.core import Tensor
from ddp._tensor.creation import arange, parse_count, rename, zeros_like
from ddp._tensor.dtypes import HALVES
from ddp._tensor.functions import view_as_complex, view_as_real
from ddp._tensor.operands import REJECTED, as_ddp_error, as_sequence, check_tensor, floating, is_index, parse_int
from ddp._tensor.reductions import resolve_axes
from ddp.errors import ArgumentError, DtypeError
from ddp.ops import fft as ops

__all__ = ["fft", "fft2", "fftfreq", "fftn", "fftshift", "ifft", "ifft2", "ifftn", "ifftshift", "irfft", "irfft2"]
__all__ += ["irfftn", "rfft", "rfft2", "rfftfreq", "rfftn"]


def _transform(name: str, input: Any, sizes: Any, dim: Any, norm: Any) -> Any:
    is_real = not isinstance(input, ComplexTensor)
    if is_real:
        check_tensor(name, input)
    x: Any = floating(input) if is_real else input.real
    if x.dtype in HALVES or (name == "rfft" and not is_real):
        raise DtypeError(f"{name}: expected float32 or float64, real ones for rfft, got {x.dtype}")
    if is_index(sizes):
        sizes = parse_int(sizes, name, "a size")
        if sizes < 1:  # In a list, NumPy and PyTorch take -1 for the dimension's own size.
            raise ArgumentError(f"{name}: expected a size of at least 1, got n={sizes}")
        sizes = [sizes]
    along = resolve_axes(x, range(-len(sizes), 0) if dim is None and sizes else dim, name)
    if sizes is None:
        sizes = [x.shape[axis] for axis in along]
        sizes[-1] = 2 * (sizes[-1] - 1) if name == "irfft" else sizes[-1]
    if name != "rfft":
        x = view_as_real(ComplexTensor(x, zeros_like(x)) if is_real else input)
    try:
        out = apply(ops.fft, (x,), transform=(f"{name}n", sizes, along, norm or "backward"))
    except REJECTED as error:
        raise as_ddp_error(name, error) from error
    return out if name == "irfft" else view_as_complex(out)


def _named(name: str, doc: str) -> list[Any]:
    """Makes the functions of a transform along one dimension, along two, and along any number."""
    functions = []
    for end, dim, dims_text in (("", -1, "`dim`"), ("2", (-2, -1), "two dimensions"), ("n", None, "`dim`, or all")):

        def transform(input: Any, s: Any = None, dim: Any = dim, norm: Any = None, n: Any = None) -> Any:
            return _transform(name, input, n if s is None else s, dim, norm)

        text = (
            f"{doc} along {dims_text}. n, s: the sizes to which the input is cut or filled up.\n\n"
            "Raises: DtypeError for other dtypes; RangeError, ArgumentError for dimensions, sizes or a norm."
        )
        functions.append(rename(transform, name + end, text))
    return functions


fft, fft2, fftn = _named("fft", "The discrete Fourier transform")
ifft, ifft2, ifftn = _named("ifft", "The inverse of the discrete Fourier transform")
rfft, rfft2, rfftn = _named("rfft", "The first half, n//2 + 1 numbers in the last dimension, of what fft makes")
irfft, irfft2, irfftn = _named("irfft", "The inverse of rfft: a Tensor, of 2*(m - 1) numbers for m unless n is given,")


def fftfreq(n: int, d: Any = 1.0, **options: Any) -> Tensor:
    """The frequencies of fft's results in cycles per unit: (n,). d: sample distance. options: dtype, device"""
    n = parse_count(n, "fftfreq")
    return ((arange(n, **options) + n // 2) % n - n // 2) / (n * d)


def rfftfreq(n: int, d: Any = 1.0, **options: Any) -> Tensor:
    """The frequencies of rfft's results in cycles per unit: (n//2 + 1,). d: sample distance. options: dtype, device"""
    return fftfreq(n, d, **options)[: n // 2 + 1].abs()


def fftshift(input: Any, dim: Any = None, *, _sign: int = 1) -> Any:
    """Moves the frequency 0 to the middle, along `dim` or all dimensions.

    Raises: RangeError for a missing dimension; DtypeError for a dimension that is no integer, or an `input` that is no
    tensor.
    """
    if not isinstance(input, ComplexTensor):
        check_tensor("fftshift", input)
    if dim is None:
        dim = range(input.ndim)
    dims = as_sequence(dim)
    return input.roll([input.size(d) // 2 * _sign for d in dims], dims)


def ifftshift(input: Any, dim: Any = None) -> Any:
    """The inverse of fftshift."""
    return fftshift(input, dim, _sign=-1)
