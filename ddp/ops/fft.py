"""Discrete Fourier transforms. A complex number is a pair of real ones along the last axis."""

from __future__ import annotations

from typing import Any

from ddp.ops.arrays import Array, ForwardResult, array_function
from ddp.ops.op import Gradients, Needs, Op, Saved

# The adjoint of a transform is the transform in the other direction, with the other normalization.
_ADJOINT = {"fftn": "ifftn", "ifftn": "fftn", "rfftn": "ifftn", "irfftn": "rfftn"}
_NORM = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


@array_function
def transformed(xp: Any, x: Array, function: str, sizes: Any, axes: Any, norm: str) -> Array:
    """Computes the transform `function` of numpy.fft."""
    z = x if function == "rfftn" else xp.ascontiguousarray(x).view(f"c{2 * x.itemsize}")[..., 0]
    z = getattr(xp.fft, function)(z, sizes, axes, norm)
    return z if function == "irfftn" else xp.ascontiguousarray(z)[..., None].view(x.dtype)


# z = F(x), where x is trimmed or zero-padded to the sizes;  dx = F'(g), zero-padded or trimmed; F' is the adjoint of F
def _fft(xp: Any, x: Array, transform: Any) -> ForwardResult:
    return transformed(xp, x, *transform), (x.shape, *transform)


def _fft_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, function, sizes, axes, norm = residual
    z = transformed(xp, g, _ADJOINT[function], sizes, axes, _NORM[norm])
    if function == "rfftn":
        z = z[..., 0]
    elif function == "irfftn":  # irfftn uses the inner numbers of the last axis twice: unchanged, and conjugated
        inner = slice(1, (g.shape[axes[-1]] + 1) // 2)
        index = (*(slice(None),) * (axes[-1] % g.ndim), inner)
        z[index] *= 2
    dx = xp.zeros(shape, g.dtype)
    dx[tuple(map(slice, z.shape))] = z[tuple(map(slice, shape))]
    return (dx,)


fft = Op("fft", _fft, _fft_backward, inputs=("x",))
