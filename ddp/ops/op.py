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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddp.ops.arrays import BFLOAT16, Array, astype

Needs = tuple[bool, ...]
Saved = Sequence[Any]
Gradients = Sequence[Array | None]

_FLOAT32 = np.dtype("float32")

OPS: dict[str, Op] = {}  # every op by name: gradient tests check that they cover all


class Op:
    """One differentiable operation.

    inputs: the names of the array inputs; a single "*xs" takes any number, and saves none of them.
    saves: what backward reads, by name ("out" is the result): a tuple if every gradient reads all of it, or a mapping
        from the input whose gradient is wanted to what that one reads, so that a frozen input costs no memory.
    view: the result may share the first input's memory, and no number changes.
    derived: the residual has numbers that change with the inputs. Under create_graph the forward runs again, recorded.
    reference_residual: of a device form whose backward takes no recording arrays: (xp, residual) -> the reference's.
    grad_out: True if the backward takes one more argument, `grad_outs`. For each input it holds None, or an array of
        the input's shape and dtype: backward may write the gradient into it and return it, so that a parameter's
        gradient is computed where it is kept. With "accumulate" it may also hold an `AccumulateInto`: then backward
        adds the gradient to its array, and returns the array.
    supports_bfloat16: the forward takes bfloat16; other ops compute it in float32 and round (`Upcast`).
    backward_supports_bfloat16: the backward takes it, too.
    reference: the op by its array formulas; this one, unless `ddp._native.register` has attached a native form.
    device_form: the op as CuPy arrays take it; the reference, unless `ddp._cuda.register` has attached another.
    """

    __slots__ = (
        *("_plans", "_reads", "_upcast", "backward", "backward_supports_bfloat16", "device_form", "forward", "inputs"),
        *("derived", "grad_out", "name", "reference", "reference_residual", "saves", "supports_bfloat16", "view"),
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
        derived: bool = False,
        grad_out: bool | str = False,
        supports_bfloat16: bool = False,
    ) -> None:
        assert name not in OPS, name
        self.name = name
        self.forward = forward
        self.backward = backward
        self.inputs = inputs
        self._reads = saves if isinstance(saves, Mapping) else dict.fromkeys(inputs, saves)
        self.saves = tuple(dict.fromkeys(value for values in self._reads.values() for value in values))
        self.view = view
        self.derived = derived
        self.grad_out = grad_out
        self.supports_bfloat16 = supports_bfloat16 or view
        self.backward_supports_bfloat16 = False
        self._upcast: Upcast | None = None
        self._plans: dict[Needs, tuple[int | None, ...]] = {}
        self.reference = self.device_form = self
        self.reference_residual: Callable[[Any, Any], Any] | None = None
        OPS[name] = self

    def attach_native_form(
        self, forward: Callable[..., tuple[Array, Any]], backward: Callable[..., Gradients] | None = None
    ) -> None:
        """Gives NumPy arrays a pair of their own; called by `ddp._native.register` alone.

        A pair that cannot take some case hands it on to `reference`. None: the backward stays the reference's.
        """
        self.reference = copy.copy(self)
        self.reference.reference = self.reference.device_form = self.reference
        if self.device_form is self:
            self.device_form = self.reference
        self.forward = forward
        self.backward = backward or self.backward
        self._upcast = None

    def attach_device_form(
        self,
        forward: Callable[..., tuple[Array, Any]],
        backward: Callable[..., Gradients],
        *,
        grad_out: bool | str | None = None,
        residual: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Gives CuPy arrays a pair of their own; called by `ddp._cuda.register` alone.

        Both take bfloat16 as it is, in any mix with the other dtypes that the op is given, compute in float32 and round
        once. A pair that cannot take some case hands it on to `op.upcast.forward`, and its residual to
        `op.upcast.backward`.
        grad_out: as for the op, where they differ. residual: `reference_residual`; None for a backward of array
        formulas.
        """
        form = self.device_form = copy.copy(self)
        form.forward = forward
        form.backward = backward
        form.supports_bfloat16 = form.backward_supports_bfloat16 = True
        form._upcast = None
        form.reference_residual = residual
        form.reference = form if residual is None else self.reference
        if grad_out is not None:
            form.grad_out = grad_out

    @property
    def upcast(self) -> Upcast:
        """This op on bfloat16."""
        if self._upcast is None:
            self._upcast = Upcast(self)
        return self._upcast

    def plan(self, needs: Needs) -> tuple[int | None, ...]:
        """For each of `saves`: its position among the inputs (len(inputs) is the result), None if nothing reads it."""
        positions = self._plans.get(needs)
        if positions is None:
            names = (*self.inputs, "out")
            if self.saves:
                wanted = [name for name, need in zip(self.inputs, needs, strict=True) if need]
                read = {value for name in wanted for value in self._reads[name]}
                positions = tuple(names.index(value) if value in read else None for value in self.saves)
            else:
                positions = ()
            self._plans[needs] = positions
        return positions

    def __repr__(self) -> str:
        return f"Op({self.name!r}, inputs={self.inputs}, saves={self.saves})"


class Upcast:
    """An op on bfloat16: it computes in float32, and what comes out is rounded, forward and backward.

    NumPy and CuPy know bfloat16 as storage: their loops over it are slow, and their products do not take it.
    """

    grad_out = False

    def __init__(self, op: Op) -> None:
        self.name = op.name
        self.saves = op.saves
        self.plan = op.plan
        self._forward = op.forward
        self._backward = op.backward
        self._grad_outs = ((None,) * len(op.inputs),) if op.grad_out else ()

    def forward(self, xp: Any, *inputs: Any, **parameters: Any) -> tuple[Any, Any]:
        out, residual = self._forward(xp, *[_to_float32(xp, x) for x in inputs], **parameters)
        narrow = [getattr(x, "dtype", None) is BFLOAT16 for x in inputs]
        rounded = tuple([_to_bfloat16(xp, array) for array in out]) if isinstance(out, tuple) else _to_bfloat16(xp, out)
        return rounded, (residual, narrow)

    def backward(self, xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        inner, narrow = residual
        upcast_grad = [_to_float32(xp, gradient) for gradient in g] if isinstance(g, list) else _to_float32(xp, g)
        results = self._backward(xp, upcast_grad, needs, [_to_float32(xp, x) for x in saved], inner, *self._grad_outs)
        if narrow is None:  # the forward only moves data and takes bfloat16, so `Upcast.forward` did not run
            return [_to_bfloat16(xp, dx) for dx in results]
        # A float32 weight beside a bfloat16 input keeps its float32 gradient.
        return [_to_bfloat16(xp, dx) if is_round else dx for dx, is_round in zip(results, narrow, strict=True)]


def _to_float32(xp: Any, x: Any) -> Any:
    return astype(xp, x, _FLOAT32) if getattr(x, "dtype", None) is BFLOAT16 else x


def _to_bfloat16(xp: Any, x: Any) -> Any:
    return astype(xp, x, BFLOAT16) if getattr(x, "dtype", None) is _FLOAT32 else x


def unary_op(
    name: str, value: Callable[[Any, Array], Array], gradient: Callable[[Any, Array, Array], Array], saves: str = "x"
) -> Op:
    """An op of one input: z = value(xp, x), dx = gradient(xp, g, x), or of z where `saves` is "out"."""

    def forward(xp: Any, x: Array) -> tuple[Array, Any]:
        return value(xp, x), None

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        return (gradient(xp, g, saved[0]),)

    return Op(name, forward, backward, inputs=("x",), saves=(saves,))
