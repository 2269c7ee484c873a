"""The text of a tensor: four decimals in aligned columns, only the corners if it is large, and attributes.

The text is PyTorch's, with `ddp.` for `torch.`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddp._device import CPU, to_device
from ddp._tensor.dtypes import HALVES, bool_, float32, get_default_dtype, int64, is_float
from ddp.errors import ArgumentError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class _Options(NamedTuple):
    precision: int = 4
    threshold: float = 1000
    edgeitems: int = 3
    linewidth: int = 80
    sci_mode: bool | None = None


_PROFILES = {
    "default": _Options(),
    "short": _Options(precision=2, edgeitems=2),
    "full": _Options(threshold=math.inf),
}
_options = _Options()


def set_printoptions(
    precision: int | None = None,
    threshold: float | None = None,
    edgeitems: int | None = None,
    linewidth: int | None = None,
    profile: str | None = None,
    sci_mode: bool | None = None,
) -> None:
    """Sets how tensors print, in the whole process.

    Options that are not passed keep their values, or take those of `profile`. The exception is `sci_mode`: None means
    that the tensor's values decide.
    precision: decimals; threshold: number of elements above which only `edgeitems` at each end of a dimension are
    shown; linewidth: characters; profile: "default", "short" or "full".
    Raises: ArgumentError for another profile.
    """
    global _options
    if profile not in (None, *_PROFILES):
        raise ArgumentError(f"set_printoptions: profile {profile!r}: expected one of {', '.join(_PROFILES)}")
    options: dict[str, Any] = {"precision": precision, "threshold": threshold, "edgeitems": edgeitems}
    asked = {name: value for name, value in {**options, "linewidth": linewidth}.items() if value is not None}
    _options = (_options if profile is None else _PROFILES[profile])._replace(sci_mode=sci_mode, **asked)


def text_of(x: Tensor) -> str:
    """The text of a tensor: `tensor(...)`."""
    dtype = x.array.dtype
    shape = x.array.shape
    notes = [] if x._device is CPU else [f"device='{x._device}'"]
    if not x.array.size:
        body = "[]"
        if len(shape) != 1:
            notes.append(f"size={shape}")
        usual = [get_default_dtype()]
    else:
        body = _body(x.array, x._device.xp, len("tensor("))
        usual = [get_default_dtype(), int64, bool_]
    if dtype not in usual:
        notes.append(f"dtype=ddp.{dtype.name}")
    if x.grad_fn is not None:
        notes.append(f"grad_fn=<{x.grad_fn.name()}>")
    elif x.requires_grad:
        notes.append("requires_grad=True")
    return _append_notes(f"tensor({body}", notes, len("tensor("))


def _append_notes(text: str, notes: list[str], indent: int) -> str:
    """Appends the notes to `text`, each on a new line if it would exceed the line width."""
    used = len(text) - text.rfind("\n") + 1
    for note in notes:
        if used + len(note) + 2 > _options.linewidth:
            text += ",\n" + " " * indent + note
            used = indent + len(note)
        else:
            text += f", {note}"
            used += len(note) + 2
    return text + ")"


def _body(array: Any, xp: Any, indent: int) -> str:
    edge = _options.edgeitems
    shape = array.shape
    gaps = [n > 2 * edge and array.size > _options.threshold for n in shape]
    for axis, n in enumerate(shape):
        if gaps[axis]:  # only the elements that are printed are copied from the device
            array = xp.take(array, xp.asarray([*range(edge), *range(n - edge, n)]), axis=axis)
    array = to_device(array, CPU)
    if array.dtype in HALVES:
        array = array.astype(float32)
    form, width = _format_floats(array) if is_float(array.dtype) else _format_integers(array)

    def lines(part: Any, depth: int, indent: int) -> str:
        if depth == len(shape):
            return form(part.item())
        parts = [lines(sub, depth + 1, indent + 1) for sub in part]
        breaks = len(shape) - 1 - depth
        if gaps[depth]:
            parts.insert(edge, "..." if breaks else " ...")
        if not breaks:
            row = max(1, (_options.linewidth - indent) // (width + 2))
            parts = [", ".join(parts[i : i + row]) for i in range(0, len(parts), row)]
        return "[" + ("," + "\n" * max(breaks, 1) + " " * (indent + 1)).join(parts) + "]"

    return lines(array, 0, indent)


def _format_integers(array: Any) -> tuple[Callable[[Any], str], int]:
    """Returns a function that formats an integer or bool, and the width of its results."""
    width = max(len(str(value)) for value in array.ravel().tolist())
    return lambda value: str(value).rjust(width), width


def _format_floats(array: Any) -> tuple[Callable[[float], str], int]:
    """Returns a function that formats a float, and the width of its results.

    All values have the same form: with an exponent if `sci_mode` or the range of the values asks for it, otherwise as
    `2.` if all are integral, otherwise with decimals.
    """
    values = array[np.isfinite(array) & (array != 0)].astype(np.float64)
    sizes = np.abs(values)
    low, high = (float(sizes.min()), float(sizes.max())) if sizes.size else (1.0, 1.0)
    whole = bool((sizes == np.ceil(sizes)).all())
    exponent = _options.sci_mode if sizes.size else False
    if exponent is None:
        exponent = high > 1000 * low or high > 1e8 or (not whole and low < 1e-4)
    decimals = 0 if whole and not exponent else _options.precision
    style = f".{decimals}{'e' if exponent else 'f'}"
    point = "." if whole and not exponent else ""
    width = max([len(format(value, style)) + len(point) for value in values.tolist()], default=1)

    def form(value: float) -> str:
        return (format(value, style) + (point if math.isfinite(value) else "")).rjust(width)

    return form, width
