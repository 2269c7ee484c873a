"""`autograd.Function`, as PyTorch has it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.autograd import Function, gradcheck
from ddp.errors import ArgumentError, DtypeError, GraphError, ShapeError, VersionError


def leaf(*shape: int, seed: int = 0) -> ddp.Tensor:
    return ddp.from_numpy(np.random.default_rng(seed).standard_normal(shape)).requires_grad_()


class LinearFunction(Function):
    """The example of PyTorch's notes on extending autograd, in the same two methods."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any = None) -> Any:
        ctx.save_for_backward(input, weight, bias)
        output = input.mm(weight.t())
        if bias is not None:
            output += bias.unsqueeze(0).expand_as(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        input, weight, bias = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_output.mm(weight)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_output.t().mm(input)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0)
        return grad_input, grad_weight, grad_bias


class Split(Function):
    """Two outputs, an integer beside them, and a number among the arguments."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        return x * factor, index, x.exp()

    @staticmethod
    def backward(ctx: Any, g: Any, no: Any, h: Any) -> Any:
        assert no is None or not no.any()
        return g * ctx.factor, None


class Exp(Function):
    """The separate form: forward without ctx, and an output that is saved."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (y,) = ctx.saved_tensors
        return g * y


def test_the_linear_example() -> None:
    x = leaf(5, 3)
    w = leaf(4, 3, seed=1)
    b = leaf(4, seed=2)
    assert gradcheck(LinearFunction.apply, (x, w, b))
    assert gradcheck(lambda x, w: LinearFunction.apply(x, w), (x, w))
    assert gradcheck(lambda w: LinearFunction.apply(x.detach(), w), w)


def test_several_outputs() -> None:
    x = leaf(2, 3)
    y, index, _ = Split.apply(x, 3.0)
    assert y.requires_grad
    assert not index.requires_grad
    y.sum().backward()
    assert x.grad.tolist() == [[3.0] * 3] * 2


def test_setup_context_and_a_saved_output() -> None:
    assert gradcheck(Exp.apply, leaf(2, 3))
    assert Exp.apply(leaf(2)).edge.op.name == "Exp"


def test_needs_and_materialized_gradients() -> None:
    seen: list[Any] = []

    class Two(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            seen.append(ctx.needs_input_grad)
            ctx.set_materialize_grads(False)
            return x * 1, y * 1

        @staticmethod
        def backward(ctx: Any, gx: Any, gy: Any) -> Any:
            seen.append((gx is None, gy is None))
            return gx, gy

    a, _ = Two.apply(leaf(2), ddp.ones(2, dtype=ddp.float64))
    a.sum().backward()
    assert seen == [(True, False), (False, True)]


def test_mark_dirty() -> None:
    class Double(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            x.mul_(2)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * 2

    x = leaf(3)
    y = x * 1
    assert Double.apply(y) is y
    y.sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    with pytest.raises(GraphError, match="leaf"):
        Double.apply(x)


def test_an_input_returned_as_it_is() -> None:
    class Reverse(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return -g

    x = leaf(2)
    y = Reverse.apply(x)
    assert y is not x
    assert np.shares_memory(y.detach().numpy(), x.detach().numpy())
    y.sum().backward()
    assert x.grad.tolist() == [-1.0, -1.0]
    assert x.is_leaf


def wrong(backward: Any) -> Any:
    class Wrong(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            return x * y

    Wrong.backward = staticmethod(backward)
    return Wrong


def test_what_backward_returns_is_checked() -> None:
    for backward, error in (
        (lambda ctx, g: g, ArgumentError),
        (lambda ctx, g: (g.sum(), g), ShapeError),
        (lambda ctx, g: (1.0, g), DtypeError),
    ):
        with pytest.raises(error, match="Wrong"):
            wrong(backward).apply(leaf(2), leaf(2)).sum().backward()


def test_a_saved_tensor_that_changed() -> None:
    x, w = leaf(2, 3), leaf(4, 3)
    held = x * 1
    y = LinearFunction.apply(held, w)
    held.add_(1)
    with pytest.raises(VersionError, match=r"LinearFunction.*\(2, 3\)"):
        y.sum().backward()


def test_no_cycles() -> None:
    gc.disable()
    try:
        for make in (Exp.apply, lambda x: ddp.autograd.checkpoint(Exp.apply, x)):
            node = weakref.ref(make(leaf(2)).edge)
            assert node() is None
    finally:
        gc.enable()
