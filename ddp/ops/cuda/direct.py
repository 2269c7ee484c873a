"""What tensors ask of the array module outside the graph, by kernels of our own: comparisons, and writes in place.

Each stands for a function of the array module, and hands on to it what it has no kernel for.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda import pointwise_pairs as _pairs  # noqa: F401  # it makes the kernels of the ops
from ddp.ops.cuda.formulas import COMPARISONS, CURVES
from ddp.ops.cuda.pointwise import KERNELS, Elementwise

for _name, _truth in COMPARISONS.items():
    Elementwise(_name, ("x", "y"), ("out",), f"out = {_truth};", dtype="bool", integers=True, truths=True, exact=True)


def compared(xp: Any, name: str, x: Any, y: Any) -> Array:
    """What the array module's function of this name gives: bool of a comparison, or whatever else it is."""
    kernel = KERNELS.get(name) if name in COMPARISONS else None
    results = kernel(xp, (x, y)) if isinstance(kernel, Elementwise) else None
    return getattr(xp, name)(x, y) if results is None else results[0]


_WRITERS = {"add": "add", "subtract": "sub", "multiply": "mul", "true_divide": "div", "power": "pow"}


def write(xp: Any, name: str, x: Array, y: Any) -> bool:
    """x = x + y and its like, in the memory of `x`; whether it was done: else it is for the array module to do.

    name: the array module's. y: a number, or an array that broadcasts to `x`.
    """
    kernel = KERNELS[_WRITERS[name]] if name in _WRITERS else None
    if not isinstance(kernel, Elementwise):
        return False
    if hasattr(y, "dtype"):
        if x.dtype.kind not in "fV" and (x.dtype != y.dtype or name in ("true_divide", "power")):
            return False
        if y is not x and (x.base is not None or y.base is not None) and xp.may_share_memory(x, y):
            return False  # it may be read after it was written
    elif x.dtype.kind not in "fV" and (x.dtype.kind == "b" or isinstance(y, float) or name in ("true_divide", "power")):
        return False
    try:
        return kernel(xp, (x, y), (1,) if kernel.numbers else (), (x,)) is not None
    except OverflowError:
        return False  # the array module says it in its own way


def write_curve(xp: Any, name: str, x: Array) -> bool:
    """x = name(x) in the memory of `x`; whether it was done."""
    kernel = KERNELS.get(name) if name in CURVES and not CURVES[name].numbers else None
    return isinstance(kernel, Elementwise) and kernel(xp, (x,), (), (x,)) is not None
