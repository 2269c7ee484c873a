"""An op: a forward and a backward on arrays, and a declaration of what the backward reads.

    forward(xp, *inputs, **parameters) -> (out, residual)
    backward(xp, g, needs, saved, residual) -> one gradient per input

`out` is an array, or a tuple of them; then `g` is a list with a gradient or None for each.

Inputs are arrays, or Python scalars where a number stands in for one. `needs` says which inputs want a gradient; the
others get None. `saved` are the declared values in the order of `saves`, None where no wanted gradient reads them;
`residual` is whatever else backward needs. A backward never writes into `g`, `saved` or `residual`: the first may
belong to somebody else, and the graph may be run again. What it returns may be a view, broadcast or read-only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = Any
Needs = tuple[bool, ...]
Saved = Sequence[Any]
Gradients = Sequence[Array | None]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype("float32")

OPS: dict[str, Op] = {}  # every op by name: the gradient tests prove that they miss none


class Op:
    """One differentiable operation.

    inputs: the names of the array inputs; a single "*xs" takes any number, and saves none of them.
    saves: what backward reads, by name ("out" is the result): a tuple if every gradient reads all of it, or a mapping
        from the input whose gradient is wanted to what that one reads, so that a frozen input costs no memory.
    view: the result may share the first input's memory, and no number changes.
    into: the backward takes one more argument, `outs`: for each input None, or an array of the input's shape and dtype
        to write its gradient into, and to return: a parameter's gradient is computed where it is kept. It need not.
        "adding": or an `AccumulateInto`, whose array holds a gradient to add it to; the array is returned then.
    native: the forward knows bfloat16; others compute it in float32, and the result is rounded (`Widened`).
    whole: the backward knows it, too.
    launched: the op as CuPy arrays take it, where it has kernels of its own; else this one.
    """

    __slots__ = (
        *("_plans", "_reads", "_widened", "backward", "forward", "inputs", "into", "launched", "name", "native"),
        *("saves", "view", "whole"),
    )

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Array, Any]],
        backward: Callable[..., Gradients],
        *,
        inputs: tuple[str, ...],
        saves: tuple[str, ...] | Mapping[str, tuple[str, ...]] = (),
        view: bool = False,
        into: bool | str = False,
        native: bool = False,
    ) -> None:
        assert name not in OPS, name
        self.name = name
        self.forward = forward
        self.backward = backward
        self.inputs = inputs
        self._reads = saves if isinstance(saves, Mapping) else dict.fromkeys(inputs, saves)
        self.saves = tuple(dict.fromkeys(value for values in self._reads.values() for value in values))
        self.view = view
        self.into = into
        self.native = native or view
        self.whole = False
        self._widened: Widened | None = None
        self._plans: dict[Needs, tuple[int | None, ...]] = {}
        self.launched = self
        OPS[name] = self

    def launches(
        self,
        forward: Callable[..., tuple[Array, Any]],
        backward: Callable[..., Gradients],
        *,
        native: bool = False,
        saves: tuple[str, ...] | Mapping[str, tuple[str, ...]] | None = None,
        into: bool | str | None = None,
    ) -> None:
        """Gives CuPy arrays a pair of their own, in place of the array module's functions.

        native: both take bfloat16 as it is, in any mix with the other dtypes that the op is given, compute in float32
            and round once. Without it bfloat16 comes as float32, and what they return is rounded: `Widened`. A pair
            that cannot take some case hands it on to `op.widened.forward`, and its residual to `op.widened.backward`.
        saves: as for the op, where this backward reads something else; into: as for the op, where they differ.
        """
        mine = self.launched = copy.copy(self)
        mine.forward, mine.backward = forward, backward
        mine.native, mine.whole = native or self.native, native
        mine._widened = None
        if saves is not None:
            mine._reads = saves if isinstance(saves, Mapping) else dict.fromkeys(self.inputs, saves)
            mine.saves = tuple(dict.fromkeys(value for values in mine._reads.values() for value in values))
            mine._plans = {}
        if into is not None:
            mine.into = into

    @property
    def widened(self) -> Widened:
        """This op on bfloat16."""
        if self._widened is None:
            self._widened = Widened(self)
        return self._widened

    def plan(self, needs: Needs) -> tuple[int | None, ...]:
        """For each of `saves`: its position among the inputs (len(inputs) is the result), None if nothing reads it."""
        found = self._plans.get(needs)
        if found is None:
            names = (*self.inputs, "out")
            if self.saves:
                wanted = [name for name, need in zip(self.inputs, needs, strict=True) if need]
                read = {value for name in wanted for value in self._reads[name]}
                found = tuple(names.index(value) if value in read else None for value in self.saves)
            else:
                found = ()
            self._plans[needs] = found
        return found

    def __repr__(self) -> str:
        return f"Op({self.name!r}, inputs={self.inputs}, saves={self.saves})"


class Widened:
    """An op on bfloat16: it computes in float32, and what comes out is rounded, forward and backward.

    NumPy and CuPy know bfloat16 as storage: their loops over it are slow, and their products do not take it.
    """

    into = False

    def __init__(self, op: Op) -> None:
        self.name, self.saves = op.name, op.saves
        self._forward = op.forward
        self._backward = op.backward
        self._outs = ((None,) * len(op.inputs),) if op.into else ()

    def forward(self, xp: Any, *inputs: Any, **parameters: Any) -> tuple[Any, Any]:
        out, residual = self._forward(xp, *[widen(x) for x in inputs], **parameters)
        narrow = [getattr(x, "dtype", None) is BFLOAT16 for x in inputs]
        return (tuple([_narrow(each) for each in out]) if isinstance(out, tuple) else _narrow(out)), (residual, narrow)

    def backward(self, xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        inner, narrow = residual
        wide = [widen(each) for each in g] if isinstance(g, list) else widen(g)
        results = self._backward(xp, wide, needs, [widen(x) for x in saved], inner, *self._outs)
        if narrow is None:  # the forward moved data, and did not come by here
            return [_narrow(dx) for dx in results]
        # A float32 weight beside a bfloat16 input keeps its float32 gradient.
        return [_narrow(dx) if is_narrow else dx for dx, is_narrow in zip(results, narrow, strict=True)]


def widen(x: Any) -> Any:
    """A bfloat16 array in float32; anything else as it is."""
    return x.astype("float32") if getattr(x, "dtype", None) is BFLOAT16 else x


def _narrow(x: Any) -> Any:
    return x.astype(BFLOAT16) if getattr(x, "dtype", None) is _FLOAT32 else x


def working(x: Array) -> np.dtype[Any]:
    """The dtype to compute in: float16 is too coarse to add up, see `total`."""
    return _FLOAT32 if x.dtype.char == "e" else x.dtype


def single(*arrays: Array | None) -> list[Any]:
    """The arrays with float16 as float32, so that each sum is rounded once; None stays None."""
    return [x.astype(_FLOAT32) if x is not None and x.dtype.char == "e" else x for x in arrays]


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array, () for a Python scalar."""
    return getattr(x, "shape", ())


def as_rows(x: Array, axes: int) -> Array:
    """x as (rows, n), its last `axes` axes taken together."""
    if axes == 1 and x.ndim == 2:
        return x
    split = x.ndim - axes
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))


def total(x: Array, axis: Any = None, keepdims: bool = False, *, wide: bool = False) -> Array:
    """The sum of `x` over `axis`. float16 is added up in float32, and stays so with `wide`; integers in int64.

    A running sum in float16 stands still at 2048: from there on, adding 1 changes nothing.
    """
    if x.dtype.char != "e":
        return x.sum(axis=axis, keepdims=keepdims, dtype="int64" if x.dtype.kind in "bu" else None)
    out = x.sum(axis=axis, keepdims=keepdims, dtype="float32")
    return out if wide else out.astype(x.dtype)


def fold(g: Array, shape: tuple[int, ...]) -> Array:
    """`g` summed over the axes along which something of `shape` was broadcast."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    axes = (*range(extra), *(extra + i for i, n in enumerate(shape) if n == 1 and g.shape[extra + i] != 1))
    return total(g, axes, keepdims=True).reshape(shape)


def _by_bits(xp: Any, mask: Array, g: Array) -> Array:
    # The bits of g as integers, times 0 or 1: as fast as g * mask, where NumPy's where() is ten times slower because it
    # branches at every element of a mask without a pattern.
    return (g.view(BITS[g.dtype.itemsize]) * mask).view(g.dtype)


def _by_where(xp: Any, mask: Array, g: Array) -> Array:
    return xp.where(mask, g, g.dtype.type(0))


BITS = {2: "int16", 4: "int32", 8: "int64"}
SELECTS = {"numpy": _by_bits, "cupy": _by_where}


def select(xp: Any, mask: Array, g: Array) -> Array:
    """`g` (floating) where `mask` (bool), else 0, also for infinite `g` and nan: a product would make nan of these."""
    return SELECTS[xp.__name__](xp, mask, g)


def unreduce(g: Array, shape: tuple[int, ...], axes: tuple[int, ...], keepdim: bool) -> Array:
    """`g`, the gradient of a reduction over `axes` of something of `shape`, with the reduced axes back as ones."""
    if keepdim or not axes:
        return g
    return g.reshape([1 if i in axes else n for i, n in enumerate(shape)])
