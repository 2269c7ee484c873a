"""Frames around sequences and images, as layers: of zeros, of a number, of what the input itself continues with."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._module import Module
from ddp.nn.functional._check import Size, numbers


class _Pad(Module):
    """A frame of `_mode`, around the last `_dims` dimensions."""

    _dims: int
    _mode = "constant"

    def __init__(self, padding: Size) -> None:
        super().__init__()
        self.padding = numbers(padding, 2 * self._dims, "padding")

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., L) or (..., H, W), framed in its last dimensions."""
        return functional.pad(input, self.padding, self._mode)

    def extra_repr(self) -> str:
        return f"{self.padding}"


class ConstantPad1d(_Pad):
    """Sequences between numbers `value`. padding: a number, or (left, right). input: (..., L).

    Raises: ArgumentError; see functional.pad.
    """

    _dims = 1

    def __init__(self, padding: Size, value: float) -> None:
        super().__init__(padding)
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., L), or (..., H, W) in two dimensions."""
        return functional.pad(input, self.padding, value=self.value)

    def extra_repr(self) -> str:
        return f"padding={self.padding}, value={self.value}"


class ConstantPad2d(ConstantPad1d):
    """Images in a frame of `value`. padding: a number, or (left, right, top, bottom). input: (..., H, W).

    Raises: ArgumentError; see functional.pad.
    """

    _dims = 2


class ZeroPad1d(_Pad):
    """Sequences in a frame of zeros. padding: a number, or (left, right).

    input: (..., L). Raises: ArgumentError; see functional.pad.
    """

    _dims = 1


class ZeroPad2d(_Pad):
    """Images in a frame of zeros. padding: a number, or (left, right, top, bottom).

    input: (..., H, W). Raises: ArgumentError; see functional.pad.
    """

    _dims = 2


class ReflectionPad1d(_Pad):
    """Sequences in a frame of their mirror image, the edge not repeated. padding: a number, or (left, right).

    input: (C, L) or (N, C, L). Raises: ArgumentError, ShapeError; see functional.pad.
    """

    _dims = 1
    _mode = "reflect"


class ReflectionPad2d(_Pad):
    """Images in a frame of their mirror image, the edge not repeated. padding: a number, or (left, right, top, bottom).

    input: (C, H, W) or (N, C, H, W). Raises: ArgumentError, ShapeError; see functional.pad.
    """

    _dims = 2
    _mode = "reflect"


class ReplicationPad1d(_Pad):
    """Sequences in a frame of their edge. padding: a number, or (left, right).

    input: (C, L) or (N, C, L). Raises: ArgumentError, ShapeError; see functional.pad.
    """

    _dims = 1
    _mode = "replicate"


class ReplicationPad2d(_Pad):
    """Images in a frame of their edge. padding: a number, or (left, right, top, bottom).

    input: (C, H, W) or (N, C, H, W). Raises: ArgumentError, ShapeError; see functional.pad.
    """

    _dims = 2
    _mode = "replicate"


class CircularPad1d(_Pad):
    """Sequences in a frame of what is at the other end. padding: a number, or (left, right).

    input: (C, L) or (N, C, L). Raises: ArgumentError, ShapeError; see functional.pad.
    """

    _dims = 1
    _mode = "circular"


class CircularPad2d(_Pad):
    """Images in a frame of what is at the other end. padding: a number, or (left, right, top, bottom).

    input: (C, H, W) or (N, C, H, W). Raises: ArgumentError, ShapeError; see functional.pad.
    """

    _dims = 2
    _mode = "circular"
