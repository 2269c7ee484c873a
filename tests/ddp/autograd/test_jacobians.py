"""`autograd.functional` and `ddp.func`, against PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import func
from ddp.errors import ArgumentError, DtypeError, GraphError, RangeError, ShapeError
from tests.ddp.cases.table import draw

functional = ddp.autograd.functional
X, Y, U, V, W = (draw(*shape, seed=i) for i, shape in enumerate([(2, 3), (3,), (2,), (2, 3), (3,)]))


def two(x: Any, y: Any) -> tuple[Any, Any]:
    return (x * y).exp().sum(1), x.sin() * 2


CALLS: list[tuple[Any, ...]] = [
    ("jacobian", two, (X, Y), {}),
    ("jacobian", two, (X, Y), {"create_graph": True}),
    ("jacobian", lambda x: x * 2, X, {"vectorize": True}),
    ("hessian", lambda x, y: (x * y).exp().sum() * x.sin().prod(), (X, Y), {}),
    ("hessian", lambda x: (x**3).sum(), X, {}),
    ("vjp", two, (X, Y), {"v": (U, V)}),
    ("vjp", lambda x: x.sum(), X, {}),
    ("jvp", two, (X, Y), {"v": (V, W)}),
    ("jvp", lambda x: x * 2, X, {"v": V, "create_graph": True}),
    ("hvp", lambda x, y: (x * y).exp().sum(), (X, Y), {"v": (V, W)}),
    ("vhp", lambda x: (x**3).sum(), X, {"v": V}),
]


def as_tensors(t: Any, given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(as_tensors(t, each) for each in given)
    return t.from_numpy(given.copy()) if isinstance(given, np.ndarray) else given


def flatten(result: Any) -> Iterator[Any]:
    for each in result if isinstance(result, tuple) else ():
        yield from flatten(each)
    if not isinstance(result, tuple):
        yield result


@pytest.mark.parametrize(("name", "fn", "inputs", "options"), CALLS)
def test_agrees_with_pytorch(name: str, fn: Any, inputs: Any, options: Any, torch: Any) -> None:
    results = []
    for t in (ddp, torch):
        named = {key: as_tensors(t, value) for key, value in options.items()}
        results.append(list(flatten(getattr(t.autograd.functional, name)(fn, as_tensors(t, inputs), **named))))
    for ours, theirs in zip(*results, strict=True):
        assert tuple(ours.shape) == tuple(theirs.shape)
        assert ours.requires_grad == theirs.requires_grad
        assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), 1e-11, 1e-12)


def test_results_may_be_differentiated() -> None:
    x = ddp.from_numpy(X).requires_grad_()
    matrix = functional.hessian(lambda x: (x**4).sum(), x, create_graph=True)
    assert_allclose(ddp.autograd.grad(matrix.sum(), x)[0].numpy(), 24 * X, 1e-12)


def test_strict_and_zeros() -> None:
    x, y = ddp.from_numpy(X), ddp.from_numpy(Y)
    assert not functional.jacobian(lambda x, y: x * 1, (x, y))[1].any()
    assert not functional.jvp(lambda x: ddp.ones(2), x, x)[1].any()
    assert functional.jacobian(lambda x: x, x[:0]).shape == (0, 3, 0, 3)
    with pytest.raises(GraphError, match="does not depend"):
        functional.jacobian(lambda x, y: x * 1, (x, y), strict=True)


def test_refusals() -> None:
    x = ddp.from_numpy(X)
    for wrong in (
        lambda: functional.hessian(lambda x: x, x),
        lambda: functional.vjp(lambda x: x, x, x[0]),
        lambda: functional.jvp(lambda x: x, x),
        lambda: functional.hvp(lambda x: x.square().sum(), x, x[0]),
    ):
        with pytest.raises(ShapeError):
            wrong()
    with pytest.raises(ArgumentError, match="2 gradients were given for 1"):
        functional.vjp(lambda x: x, x, (x, x))
    with pytest.raises(DtypeError, match="float"):
        functional.jacobian(lambda x: 1.0, x)
    with pytest.raises(ArgumentError, match="batch dimension"):
        func.vmap(lambda x: x)


def test_functions_of_functions() -> None:
    x = ddp.from_numpy(X)
    v = ddp.from_numpy(V)
    w = ddp.from_numpy(W).requires_grad_()
    second = func.grad(lambda x: func.grad(lambda y: (y**4).sum())(x).sum())(x)
    assert not second.requires_grad
    assert_allclose(second.numpy(), 12 * X**2, 1e-12)
    slope = func.grad(lambda k, x: (x * w * k).sum(), 1)(3, x)
    assert slope.requires_grad
    assert func.grad(lambda k, x: (x * w * k).sum(), -1)(3, x).equal(slope)
    for argnums in (2, -3):
        with pytest.raises(RangeError, match=f"argnums={argnums}: expected the number of one of 2 positional"):
            func.hessian(lambda k, x: x.sum(), argnums)(3, x)
    product = lambda x, k, y: (x * x * y).sum() * k  # noqa: E731  # of two tensors and a number
    by_y, by_x = func.grad(product, (-1, 0))(x, 3, v)
    assert_allclose(by_y.numpy(), 3 * X**2, 1e-12)
    assert_allclose(by_x.numpy(), 6 * X * V, 1e-12)
    assert_allclose(func.grad(product, ddp.tensor(2))(x, 3, v).numpy(), 3 * X**2, 1e-12)
    (hessian,) = func.hessian(product, (0,))(x, 3, v)[0]
    assert hessian.equal(func.hessian(product)(x, 3, v))
    for twice in ((0, -3), ()):
        with pytest.raises(ArgumentError, match="expected at least one argument, and none twice"):
            func.grad(product, twice)(x, 3, v)
    with pytest.raises(DtypeError, match=r"argnums is an integer, not \[0, 2\]"):
        func.grad(product, [0, 2])(x, 3, v)  # type: ignore[arg-type]  # what is refused
    assert ddp.autograd.grad(slope.sum(), w)[0].tolist() == [6.0] * 3
    both = func.vjp(lambda x, y: (x * y).sum(), x, v)[1](ddp.ones((), dtype=ddp.float64))
    assert [each.equal(other) for each, other in zip(both, (v, x), strict=True)] == [True, True]
    y, pull_back = func.vjp(lambda x: x.sin() * 2, x)
    assert not y.requires_grad
    assert_allclose(pull_back(v).numpy(), V * 2 * np.cos(X), 1e-12)
    assert_allclose(func.jvp(lambda x, y: x * y, (x, v), (v, x))[1].numpy(), V * V + X * X, 1e-12)
    assert_allclose(func.hessian(lambda k, x: (x**3).sum() * k, 1)(2, w.detach()).numpy(), np.diag(12 * W))
