"""An op: a forward and a backward on arrays, and a declaration of what the backward reads.

    forward(xp, *inputs, **parameters) -> (out, residual)
    backward(xp, g, needs, saved, residual) -> one gradient per input

`out` is an array, or a tuple of arrays. For a tuple, `g` is a list: for each array its gradient, or None.

Inputs are arrays, Python scalars, or None for an optional input that is left out. `needs` says which inputs want a
gradient; other inputs get None. `saved` has the declared values in the order of `saves`; a value that no wanted
gradient reads is None. `residual` is whatever else backward needs. A backward never writes into `g`, which other code
may use, nor into `saved` and `residual`: the graph may run again. Its results may be views, broadcast or read-only.

A kernel is an implementation of an op for one array module: array formulas, or functions that call C or CUDA code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddp.ops.arrays import BFLOAT16, Array, astype, from_bfloat16

Needs = tuple[bool, ...]
Saved = Sequence[Any]
Gradients = Sequence[Array | None]

_FLOAT32 = np.dtype("float32")

OPS: dict[str, Op] = {}  # every op by name: gradient tests check that they cover all ops


class Op:
    """One differentiable operation.

    inputs: the names of the array inputs; a single "*xs" stands for any number of inputs, which
        are not saved.
    saves: the names of the values that backward reads ("out" is the result). A tuple: every gradient reads all of them.
        A mapping: from each input to the values that its gradient reads, so that a frozen input costs no memory.
    view: the op changes no number, and the result may share the memory of the first input.
    derived: the residual has numbers that change with the inputs. Under create_graph the forward runs again, on
        recording arrays, or other ops with the same result run (`ddp._tensor.create_graph`).
    reference_residual: set for a device kernel whose backward takes no recording arrays. This function takes xp and the
        kernel's residual, and returns the residual of the reference.
    grad_out: True if the backward takes one more argument, `grad_outs`. For each input it holds None, or an array of
        the input's shape and dtype: backward may write the gradient into it and return it, so that a parameter's
        gradient is computed where it is kept. With "accumulate" it may also hold an `AccumulateInto`: then backward
        adds the gradient to its array, and returns the array.
    supports_bfloat16: the forward takes bfloat16. An op without it computes in float32, and rounds (`Upcast`).
    backward_supports_bfloat16: the backward takes bfloat16, too.
    reference: the op with its array formulas, whose backward takes recording arrays. It is the op itself, unless
        `ddp._native.register` attached a kernel. A device kernel without `reference_residual` is its own reference.
    device_kernel: the op with its kernel for CuPy arrays; the reference, unless `ddp._cuda.register` attached another.
    """

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
        self.reference = self.device_kernel = self
        self.reference_residual: Callable[[Any, Any], Any] | None = None
        OPS[name] = self

    def attach_native_kernel(
        self, forward: Callable[..., tuple[Array, Any]], backward: Callable[..., Gradients] | None = None
    ) -> None:
        """Attaches a forward and a backward for NumPy arrays. Only `ddp._native.register` calls it.

        For a case that they cannot take, they call `reference`. backward: None keeps the backward of the reference.
        """
        self.reference = copy.copy(self)
        self.reference.reference = self.reference.device_kernel = self.reference
        if self.device_kernel is self:
            self.device_kernel = self.reference
        self.forward = forward
        self.backward = backward or self.backward
        self._upcast = None

    def attach_device_kernel(
        self,
        forward: Callable[..., tuple[Array, Any]],
        backward: Callable[..., Gradients],
        *,
        grad_out: bool | str | None = None,
        residual: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Attaches a forward and a backward for CuPy arrays. Only `ddp._cuda.register` calls it.

        Both take bfloat16 inputs, in any mix with the other dtypes of the op, compute in float32 and round once. In a
        case that they cannot take, they run the reference, or its `upcast` if an input is bfloat16.
        grad_out: the kernel's own value; None keeps the op's. residual: `reference_residual`; None if the backward
        consists of array formulas, which take recording arrays.
        """
        kernel = self.device_kernel = copy.copy(self)
        kernel.forward = forward
        kernel.backward = backward
        kernel.supports_bfloat16 = kernel.backward_supports_bfloat16 = True
        kernel._upcast = None
        kernel.reference_residual = residual
        kernel.reference = kernel if residual is None else self.reference
        if grad_out is not None:
            kernel.grad_out = grad_out

    @property
    def upcast(self) -> Upcast:
        """This op for bfloat16 arrays: computed in float32, and rounded."""
        if self._upcast is None:
            self._upcast = Upcast(self)
        return self._upcast

    def plan(self, needs: Needs) -> tuple[int | None, ...]:
        """The position of each of `saves` in (*inputs, out); None for a value that no wanted gradient reads."""
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
    """An op for bfloat16 arrays: forward and backward compute in float32, and round their results.

    NumPy stores bfloat16, but its loops over it are slow, `matmul` returns float32, and `einsum` raises TypeError.
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
        out, residual = self._forward(xp, *[from_bfloat16(xp, x) for x in inputs], **parameters)
        narrow = [getattr(x, "dtype", None) is BFLOAT16 for x in inputs]
        rounded = tuple([_to_bfloat16(xp, array) for array in out]) if isinstance(out, tuple) else _to_bfloat16(xp, out)
        return rounded, (residual, narrow)

    def backward(self, xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        inner, narrow = residual
        upcast_grad = [from_bfloat16(xp, gradient) for gradient in g] if isinstance(g, list) else from_bfloat16(xp, g)
        results = self._backward(xp, upcast_grad, needs, [from_bfloat16(xp, x) for x in saved], inner, *self._grad_outs)
        if narrow is None:  # the forward itself took bfloat16, so `Upcast.forward` did not run
            return [_to_bfloat16(xp, dx) for dx in results]
        # With a bfloat16 input, a float32 weight keeps its float32 gradient.
        return [_to_bfloat16(xp, dx) if is_round else dx for dx, is_round in zip(results, narrow, strict=True)]


def _to_bfloat16(xp: Any, x: Any) -> Any:
    return astype(xp, x, BFLOAT16) if getattr(x, "dtype", None) is _FLOAT32 else x


def unary_op(
    name: str, value: Callable[[Any, Array], Array], gradient: Callable[[Any, Array, Array], Array], saves: str = "x"
) -> Op:
    """An op of one input: z = value(xp, x), dx = gradient(xp, g, x), or gradient(xp, g, z) if `saves` is "out"."""

    def forward(xp: Any, x: Array) -> tuple[Array, Any]:
        return value(xp, x), None

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        return (gradient(xp, g, saved[0]),)

    return Op(name, forward, backward, inputs=("x",), saves=(saves,))
