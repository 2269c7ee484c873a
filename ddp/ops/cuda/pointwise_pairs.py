"""Elementwise ops as CuPy arrays take them: the forward in one launch, all gradients of one shape in another.

A gradient of an operand that was broadcast is summed in the launch that computes it. What no kernel takes, such as
bool for most, goes to the functions of the array module.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from ddp.ops import activation, choice, elementwise, joins, moments, piecewise, rounding, shape, transcendental
from ddp.ops._op import Array, Gradients, Needs, Op, Saved
from ddp.ops.cuda.folding import Reducing
from ddp.ops.cuda.formulas import ARITHMETIC, CURVES, Formula
from ddp.ops.cuda.pointwise import Elementwise, written

_TRUTHS = {"add", "mul", "maximum", "minimum", "where", "fmax", "fmin", "square", "relu"}
FORMULAS = {**ARITHMETIC, **CURVES}

Inputs = tuple[str, ...]
Forwards = tuple[tuple[Inputs, ...], Any]  # of what an operand has: its shape, and its dtype where they differ


def forward_of(name: str, formula: Formula, inputs: Inputs) -> Elementwise:
    """The kernel of the value."""
    body = written(formula.value, "out")
    truths = name in _TRUTHS
    return Elementwise(name, inputs, ("out",), body, formula.numbers, integers=formula.integers, truths=truths)


BACKWARDS: list[Backward] = []  # every one: a test makes all their kernels


class Backward:
    """The kernels of an op's gradients.

    Of the gradients that are wanted, those of the result's shape are made together, each other one by a sum of its own.
    """

    def __init__(self, name: str, formula: Formula, inputs: Inputs, saves: tuple[str, ...]) -> None:
        self.name, self.formula, self.inputs, self.saves = name, formula, inputs, saves
        self._together: dict[tuple[int, ...], tuple[Elementwise, tuple[int, ...]]] = {}
        self._sums: dict[int, tuple[Reducing, tuple[int, ...]]] = {}
        self._passes = [formula.gradients.get(each) == "g" for each in inputs]
        self._scales = [formula.gradients.get(each) == "alpha * g" for each in inputs]
        BACKWARDS.append(self)

    def _reads(self, *wanted: int) -> tuple[int, ...]:
        """Which of (g, *saved) the gradients of these inputs are made of."""
        text = " ".join(self.formula.gradients[self.inputs[i]] for i in wanted)
        names = ("g", *self.saves)
        return tuple(i for i, name in enumerate(names) if re.search(rf"\b{name}\b", text))

    def together(self, wanted: tuple[int, ...]) -> tuple[Elementwise, tuple[int, ...]]:
        """The kernel of the gradients of these inputs, and what it reads."""
        found = self._together.get(wanted)
        if found is None:
            reads, names = self._reads(*wanted), ("g", *self.saves)
            outs = [f"d{self.inputs[i]}" for i in wanted]
            bodies = [written(self.formula.gradients[self.inputs[i]], f"d{self.inputs[i]}") for i in wanted]
            body = " ".join(f"{{ {each} }}" for each in bodies)
            name = "_".join([self.name, *outs])
            kernel = Elementwise(name, [names[i] for i in reads], outs, body, self.formula.numbers)
            found = self._together[wanted] = kernel, reads
        return found

    def summed(self, i: int) -> tuple[Reducing, tuple[int, ...]]:
        """The kernel of the gradient of one input, summed over axes, and what it reads."""
        found = self._sums.get(i)
        if found is None:
            reads, names = self._reads(i), ("g", *self.saves)
            text = self.formula.gradients[self.inputs[i]]
            body = written(text, "v") if ";" not in text else f"A d{self.inputs[i]}; {text} v = d{self.inputs[i]};"
            name = f"{self.name}_sum_d{self.inputs[i]}"
            kernel = Reducing(name, [names[r] for r in reads], body, numbers=self.formula.numbers)
            found = self._sums[i] = kernel, reads
        return found

    def every(self) -> None:
        """Makes all kernels that may be asked for."""
        having = [i for i, name in enumerate(self.inputs) if name in self.formula.gradients]
        computed = [i for i in having if not self._passes[i]]
        for count in range(1, len(computed) + 1):
            for wanted in itertools.combinations(computed, count):
                self.together(wanted)
        if len(self.inputs) > 1 and self.name != "glu":
            for i in having:
                self.summed(i)

    def __call__(self, xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        shapes, dtypes, numbers = residual
        found: list[Array | None] = [None] * len(needs)
        given = (g, *saved)
        whole = g.shape
        joint: list[int] = []
        for i, need in enumerate(needs):
            if not need:
                continue
            if shapes[i] != whole:
                kernel, reads = self.summed(i)
                own = shapes[i]
                found[i] = kernel(xp, [given[r] for r in reads], _folded(whole, own), False, numbers, None, own)
            elif self._passes[i] or (self._scales[i] and numbers[0] == 1):
                found[i] = g
            else:
                joint.append(i)
        if joint:
            both, reads = self.together(tuple(joint))
            results = both(xp, [given[r] for r in reads], numbers)
            assert results is not None, self.name
            for i, dx in zip(joint, results, strict=True):
                found[i] = dx
        if dtypes is not None:
            return [None if dx is None else dx.astype(kind, copy=False) for dx, kind in zip(found, dtypes, strict=True)]
        return found


def _folded(whole: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which something of shape `own` was broadcast."""
    extra = len(whole) - len(own)
    return (*range(extra), *[extra + i for i, n in enumerate(own) if n == 1 and whole[extra + i] != 1])


def pair(op: Op, formula: Formula, name: str | None = None) -> tuple[Any, Any]:
    """Forward and backward of an op, as `Op.launches` takes them."""
    name = name or op.name
    kernel = forward_of(name, formula, op.inputs)
    names, plain = formula.numbers, op.forward
    back = Backward(name, formula, op.inputs, op.saves if formula.saves is None else formula.saves)

    def forward(xp: Any, *inputs: Any, **parameters: Any) -> tuple[Array, Any]:
        numbers = [parameters.get(each, 1) for each in names] if names else ()
        results, kept = kernel.run(xp, inputs, numbers)
        if results is None:  # of integers: nothing flows back
            return plain(xp, *inputs, **parameters)
        return results[0], (*kept, numbers)

    return forward, back if formula.gradients else op.backward


def _flat(op: Op, formula: Formula, name: str | None = None) -> Any:
    """The forward of an op that nothing flows back through, by whose own backward the residual is read."""
    kernel, plain, names = forward_of(name or op.name, formula, op.inputs), op.forward, formula.numbers

    def forward(xp: Any, *inputs: Any, **parameters: Any) -> tuple[Array, Any]:
        results, (shapes, _) = kernel.run(xp, inputs, [parameters.get(each, 1) for each in names])
        return plain(xp, *inputs, **parameters) if results is None else (results[0], shapes)

    return forward


_PLAIN = [
    *(getattr(elementwise, name) for name in ("add", "sub", "mul", "div", "remainder", "fmod", "neg", "abs")),
    *(getattr(elementwise, name) for name in ("reciprocal", "square", "addcmul", "addcdiv", "lerp")),
    *(getattr(choice, name) for name in ("maximum", "minimum", "fmax", "fmin", "where", "nan_to_num")),
    *(getattr(transcendental, name) for name in ("hypot", "atan2", "logaddexp", "xlogy")),
    *(getattr(transcendental, name) for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt")),
    *(getattr(transcendental, name) for name in ("rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh")),
    *(getattr(transcendental, name) for name in ("cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv")),
    *(getattr(piecewise, name) for name in ("relu", "leaky_relu", "prelu", "hardtanh", "hardsigmoid", "hardswish")),
    *(getattr(activation, name) for name in ("sigmoid", "tanh", "silu", "mish", "softplus", "logsigmoid", "elu")),
    *(activation.softsign, rounding.frac, moments.deviation),
]
for _op in _PLAIN:
    _op.launches(*pair(_op, FORMULAS[_op.name]), native=True, saves=FORMULAS[_op.name].saves)
for _op in (rounding.floor, rounding.ceil, rounding.trunc, rounding.sign):
    _op.launches(_flat(_op, FORMULAS[_op.name]), _op.backward, native=True)


def _power() -> None:
    op = elementwise.pow
    forward, backward = pair(op, FORMULAS["pow"])

    def powers(xp: Any, x: Any, y: Any) -> tuple[Array, Any]:
        kinds = {each.dtype.kind for each in (x, y) if hasattr(each, "dtype")}
        if kinds & set("iu") and isinstance(y, int) and y < 0:
            return op.forward(xp, x, y)  # which refuses it
        return forward(xp, x, y)

    op.launches(powers, backward, native=True)


def _rounded() -> None:
    op = elementwise.div_rounded
    forwards = {how: _flat(op, FORMULAS[f"div_{how}"], f"div_{how}") for how in ("floor", "trunc")}

    def forward(xp: Any, x: Any, y: Any, rounding: str) -> tuple[Array, Any]:
        return (
            forwards[rounding](xp, x, y, rounding=rounding)
            if rounding in forwards
            else op.forward(xp, x, y, rounding=rounding)
        )

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
        return [xp.zeros(each, g.dtype) if need else None for need, each in zip(needs, shapes, strict=True)]

    op.launches(forward, backward, native=True)

    whole = rounding.round
    kernel = forward_of("round", FORMULAS["round"], ("x",))

    def digits(xp: Any, x: Array, decimals: int) -> tuple[Array, Any]:
        results = kernel(xp, (x,), (10.0**decimals,))
        return whole.forward(xp, x, decimals=decimals) if results is None else (results[0], None)

    whole.launches(digits, whole.backward, native=True)


def _held() -> None:
    for op in (choice.clamp, piecewise.threshold):
        forward, backward = pair(op, FORMULAS[op.name])

        def held(
            xp: Any, x: Array, forward: Any = forward, plain: Any = op.forward, **bounds: Any
        ) -> tuple[Array, Any]:
            if x.dtype.kind in "fV":
                least = {"low": float("-inf"), "high": float("inf")}
                bounds = {name: least[name] if bound is None else bound for name, bound in bounds.items()}
                return forward(xp, x, **bounds)
            return plain(xp, x, **bounds)

        op.launches(held, backward, native=True)

    between = choice.clamp_between
    middle, back = pair(between, FORMULAS["clamp_between"])

    def forward_between(xp: Any, x: Array, low: Any, high: Any) -> tuple[Array, Any]:
        if x.dtype.kind not in "fV":
            return between.forward(xp, x, low, high)
        return middle(xp, x, float("-inf") if low is None else low, float("inf") if high is None else high)

    def backward_between(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        x, low, high = saved
        low = float("-inf") if low is None else low
        return back(xp, g, needs, (x, low, float("inf") if high is None else high), residual)

    between.launches(forward_between, backward_between, native=True)


def _logit() -> None:
    op = transcendental.logit
    free, free_back = pair(op, FORMULAS["logit"])
    within, within_back = pair(op, FORMULAS["logit_within"], "logit_within")

    def forward(xp: Any, x: Array, eps: float | None) -> tuple[Array, Any]:
        if eps is None:
            out, residual = free(xp, x)
            return out, (free_back, residual)
        out, residual = within(xp, x, low=eps, high=1 - eps)
        return out, (within_back, residual)

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        return residual[0](xp, g, needs, saved, residual[1])

    op.launches(forward, backward, native=True)


def _gelu() -> None:
    op = activation.gelu
    exact, exact_back = pair(op, FORMULAS["gelu"])
    quick, quick_back = pair(op, FORMULAS["gelu_tanh"], "gelu_tanh")

    def forward(xp: Any, x: Array, tanh: bool, slope: bool) -> tuple[Array, Any]:
        out, residual = (quick if tanh else exact)(xp, x)
        return out, (quick_back if tanh else exact_back, residual)

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        return residual[0](xp, g, needs, saved, residual[1])

    op.launches(forward, backward, native=True, saves=("x",))


def _glu() -> None:
    op = activation.glu
    kernel = forward_of("glu", FORMULAS["glu"], ("x", "y"))
    together, reads = Backward("glu", FORMULAS["glu"], ("x", "y"), ("x", "y")).together((0, 1))

    def halves(x: Array, dim: int) -> tuple[Array, Array]:
        lead: tuple[slice, ...] = (slice(None),) * (dim % x.ndim)
        n = x.shape[dim] // 2
        return x[lead + (slice(None, n),)], x[lead + (slice(n, None),)]

    def forward(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
        results = kernel(xp, halves(x, dim))
        assert results is not None
        return results[0], dim

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
        x = saved[0]
        dx = xp.empty(x.shape, x.dtype)
        a, b = halves(x, dim)
        together(xp, [(g, a, b)[i] for i in reads], (), halves(dx, dim))
        return (dx,)

    op.launches(forward, backward, native=True)


def _cast() -> None:
    op = elementwise.cast
    kernel = Elementwise("cast", ("x",), ("out",), "out = x;", integers=True, truths=True)

    def forward(xp: Any, x: Array, dtype: Any) -> tuple[Array, Any]:
        results = kernel(xp, (x,), (), None, dtype)
        return (x.astype(dtype) if results is None else results[0]), x.dtype

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, dtype: Any) -> Gradients:
        return (forward(xp, g, dtype)[0],)

    op.launches(forward, backward, native=True)


FOLD = Reducing("fold", ("g",), "v = g;")  # what `_op.fold` is, of any floating dtype


def _moved() -> None:
    """What moves numbers does not compute with them: they need not be widened on the way back."""
    for op in (
        *(elementwise.clone, elementwise.transfer, shape.reshape, shape.permute, shape.split, shape.unbind),
        *(joins.cat, joins.stack, joins.flip, joins.roll, joins.tril, joins.triu),
    ):
        op.launches(op.forward, op.backward, native=True, into=op.into)

    def expand_backward(xp: Any, g: Array, needs: Needs, saved: Saved, own: Any) -> Gradients:
        return (g if g.shape == own else FOLD(xp, (g,), _folded(g.shape, own), False, (), None, own),)

    shape.expand.launches(shape.expand.forward, expand_backward, native=True)


for _more in (_power, _rounded, _held, _logit, _gelu, _glu, _cast, _moved):
    _more()
