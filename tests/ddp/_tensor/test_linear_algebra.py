"""Products beyond their gradients: shapes, dtypes, errors, and PyTorch's other forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import errors
from tests.ddp.cases.table import draw, spaced

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")


def both(*shapes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    arrays = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    return (
        [ddp.from_numpy(x).requires_grad_() for x in arrays],
        [torch.from_numpy(x.copy()).requires_grad_() for x in arrays],
    )


def check(fn: Any, *shapes: tuple[int, ...]) -> None:
    ours, theirs = both(*shapes)
    y, expected = fn(ddp, *ours), fn(torch, *theirs)
    assert tuple(y.shape) == tuple(expected.shape)
    np.testing.assert_allclose(y.detach().numpy(), expected.detach().numpy(), 1e-12, 1e-14)
    y.sum().backward()
    expected.sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), 1e-12, 1e-14)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mm", ((2, 3), (3, 4))),
        ("bmm", ((5, 2, 3), (5, 3, 4))),
        ("mv", ((2, 3), (3,))),
        ("dot", ((3,), (3,))),
        ("outer", ((2,), (3,))),
        ("inner", ((2, 3), (4, 3))),
        ("inner", ((3,), (2, 4, 3))),
        ("inner", ((), (2, 3))),
        ("kron", ((2, 3), (4, 5))),
        ("kron", ((2,), (3, 1, 2))),
        ("addmm", ((2, 4), (2, 3), (3, 4))),
        ("addmm", ((4,), (2, 3), (3, 4))),
        ("addmv", ((2,), (2, 3), (3,))),
        ("addr", ((2, 3), (2,), (3,))),
        ("baddbmm", ((5, 2, 4), (5, 2, 3), (5, 3, 4))),
        ("baddbmm", ((1, 4), (5, 2, 3), (5, 3, 4))),
    ],
)
def test_against_pytorch(name: str, shapes: Any) -> None:
    check(lambda t, *xs: getattr(t, name)(*xs), *shapes)
    if name != "kron":
        check(lambda t, x, *xs: getattr(x, name)(*xs), *shapes)


@pytest.mark.parametrize("beta", [0, 1, 0.5])
@pytest.mark.parametrize("alpha", [1, 2.0])
def test_beta_and_alpha(beta: float, alpha: float) -> None:
    check(lambda t, *xs: t.addmm(*xs, beta=beta, alpha=alpha).exp(), (2, 4), (2, 3), (3, 4)) if beta else None
    check(lambda t, c, *xs: t.baddbmm(c, *xs, beta=beta, alpha=alpha) + c, (5, 2, 4), (5, 2, 3), (5, 3, 4))


def test_a_beta_of_zero_lets_no_nan_through() -> None:
    nothing = ddp.full((2, 2), float("nan"))
    assert ddp.addmm(nothing, ddp.ones(2, 2), ddp.ones(2, 2), beta=0).tolist() == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij->ji", ((2, 3),)),
        ("ij->", ((2, 3),)),
        ("ij->j", ((2, 3),)),
        ("i", ((3,),)),
        ("ii->i", ((3, 3),)),
        ("...ij->...ji", ((2, 3, 4),)),
        ("b...->...", ((2, 3, 4),)),
        ("ij,jk,kl,lm->im", ((2, 3), (3, 4), (4, 5), (5, 2))),
        ("abc,cd,db->ad", ((2, 3, 4), (4, 5), (5, 3))),
        ("bn,anm,bm->ba", ((2, 3), (4, 3, 5), (2, 5))),
        ("i,j,k->ijk", ((2,), (3,), (4,))),
        ("iij,jkk->ik", ((2, 2, 3), (3, 4, 4))),
        ("...a,...a->...", ((4, 1, 3), (5, 3))),
        ("a...,b...->ab...", ((2, 3), (4, 3))),
        ("ij,ij->ij", ((2, 3), (1, 3))),
    ],
)
def test_einsum(equation: str, shapes: Any) -> None:
    check(lambda t, *xs: t.einsum(equation, *xs), *shapes)
    check(lambda t, *xs: t.einsum(equation, list(xs)), *shapes)


def test_einsum_with_lists_of_labels() -> None:
    check(lambda t, x, y: t.einsum(x, [..., 0, 1], y, [1, 2], [..., 2, 0]), (5, 2, 3), (3, 4))
    check(lambda t, x, y: t.einsum(x, [0, 1], y, [1, 2]), (2, 3), (3, 4))


def test_einsum_says_what_does_not_fit() -> None:
    x, y = ddp.zeros(2, 3), ddp.zeros(4, 5)
    with pytest.raises(errors.ShapeError, match=r"3 and 4.*\(2, 3\), \(4, 5\)"):
        ddp.einsum("ij,jk->ik", x, y)
    for equation in ("ij->ijk", "ijk->i", "ij->ii", "i1->i", "ij,jk->ik", "i->i", "i.j->ij"):
        with pytest.raises(errors.ArgumentError):
            ddp.einsum(equation, x)


def test_tensordot() -> None:
    check(lambda t, x, y: t.tensordot(x, y), (2, 3, 4), (3, 4, 5))
    check(lambda t, x, y: t.tensordot(x, y, dims=0), (2,), (3,))
    check(lambda t, x, y: t.tensordot(x, y, dims=([1, -1], [0, 2])), (2, 3, 4), (3, 5, 4))
    with pytest.raises(errors.ShapeError, match="differ"):
        ddp.tensordot(ddp.zeros(2, 3), ddp.zeros(2, 3), 1)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("addmm_", ((2, 4), (2, 3), (3, 4))),
        ("addmv_", ((2,), (2, 3), (3,))),
        ("addr_", ((2, 3), (2,), (3,))),
        ("baddbmm_", ((5, 2, 4), (5, 2, 3), (5, 3, 4))),
    ],
)
def test_in_place(name: str, shapes: Any) -> None:
    check(lambda t, x, *xs: getattr(x * 1, name)(*xs, beta=0.5, alpha=2), *shapes)
    x = ddp.ones(shapes[0])
    assert getattr(x, name)(ddp.ones(shapes[1]), ddp.ones(shapes[2])) is x
    with pytest.raises(errors.ShapeError, match=name):
        getattr(ddp.ones(1), name)(ddp.ones(shapes[1]), ddp.ones(shapes[2]))


def test_errors() -> None:
    with pytest.raises(errors.ShapeError, match=r"matmul: \(2, 3\) @ \(4, 5\): inner dimensions 3 and 4 differ"):
        ddp.zeros(2, 3) @ ddp.zeros(4, 5)
    with pytest.raises(errors.ShapeError, match=r"mm: \(2, 3\) @ \(4, 5\)"):
        ddp.mm(ddp.zeros(2, 3), ddp.zeros(4, 5))
    with pytest.raises(errors.ShapeError, match="mm: expected 2-d, 2-d"):
        ddp.mm(ddp.zeros(2, 3), ddp.zeros(3))
    with pytest.raises(errors.ShapeError, match="numbers of matrices differ"):
        ddp.bmm(ddp.zeros(1, 2, 3), ddp.zeros(2, 3, 4))
    with pytest.raises(errors.DtypeError, match="float32 and float64"):
        ddp.zeros(2, 3) @ ddp.zeros(3, 2, dtype=ddp.float64)
    with pytest.raises(errors.ShapeError, match="addmm"):
        ddp.addmm(ddp.zeros(3, 4), ddp.zeros(2, 3), ddp.zeros(3, 4))


class TestLayers:
    def test_bilinear(self) -> None:
        check(lambda t, *xs: t.nn.functional.bilinear(*xs), (5, 2), (5, 3), (4, 2, 3), (4,))
        check(lambda t, *xs: t.nn.functional.bilinear(*xs), (5, 1, 2), (5, 1, 3), (4, 2, 3))
        check(lambda t, *xs: t.nn.functional.bilinear(*xs), (2,), (3,), (4, 2, 3), (4,))
        layer = ddp.nn.Bilinear(2, 3, 4)
        assert repr(layer) == repr(torch.nn.Bilinear(2, 3, 4))
        assert layer(ddp.ones(5, 2), ddp.ones(5, 3)).shape == (5, 4)
        assert layer.weight.abs().max().item() <= 2**-0.5
        with pytest.raises(errors.ShapeError, match="bilinear"):
            layer(ddp.ones(5, 3), ddp.ones(5, 3))

    def test_linear_of_a_weight_vector(self) -> None:
        check(lambda t, *xs: t.nn.functional.linear(*xs), (5, 3), (3,))

    def test_linear_of_a_transposed_input(self) -> None:
        x, w = spaced(5, 3), spaced(4, 3, seed=1)
        y = ddp.nn.functional.linear(ddp.from_numpy(x), ddp.from_numpy(w))
        np.testing.assert_allclose(y.numpy(), x @ w.T)

    def test_linear_says_what_does_not_fit(self) -> None:
        F = ddp.nn.functional
        with pytest.raises(errors.ShapeError, match=r"linear: input \(2, 4\) and weight \(5, 3\)"):
            F.linear(ddp.zeros(2, 4), ddp.zeros(5, 3))
        with pytest.raises(errors.ShapeError, match=r"bias \(3,\)"):
            F.linear(ddp.zeros(2, 3), ddp.zeros(5, 3), ddp.zeros(3))
        with pytest.raises(errors.DtypeError, match="linear"):
            F.linear(ddp.zeros(2, 3), ddp.zeros(5, 3), ddp.zeros(5, dtype=ddp.float64))

    def test_reprs_and_identity(self) -> None:
        assert repr(ddp.nn.Linear(2, 3)) == repr(torch.nn.Linear(2, 3))
        assert repr(ddp.nn.Identity(54, unused=0)) == "Identity()"
        x = ddp.ones(2)
        assert ddp.nn.Identity()(x) is x


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (0, 2)])
def test_trace(shape: tuple[int, ...]) -> None:
    check(lambda t, x: t.trace(x), shape)
    check(lambda t, x: (x * x).trace(), shape)


@pytest.mark.parametrize("p", [2.0, 1.0, float("inf"), 3.0])
def test_cdist(p: float) -> None:
    check(lambda t, x, y: t.cdist(x, y, p), (4, 3), (5, 3))
    check(lambda t, x, y: t.cdist(x, y, p), (2, 1, 4, 3), (3, 5, 3))


def test_cdist_and_trace_errors() -> None:
    with pytest.raises(errors.ShapeError, match=r"cdist: shapes .*\(2, 3\).* and .*\(2, 4\)"):
        ddp.cdist(ddp.zeros(2, 3), ddp.zeros(2, 4))
    with pytest.raises(errors.ShapeError, match=r"trace: expected 2-d, got shapes \(2,\)"):
        ddp.trace(ddp.zeros(2))
