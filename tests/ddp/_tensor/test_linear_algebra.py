"""Products beyond their gradients: shapes, dtypes, errors, and PyTorch's other forms."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from ddp import errors

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")


def test_a_beta_of_zero_lets_no_nan_through() -> None:
    nothing = ddp.full((2, 2), float("nan"))
    assert ddp.addmm(nothing, ddp.ones(2, 2), ddp.ones(2, 2), beta=0).tolist() == [[2.0, 2.0]] * 2


def test_einsum_says_what_does_not_fit() -> None:
    x, y = ddp.zeros(2, 3), ddp.zeros(4, 5)
    with pytest.raises(errors.ShapeError, match="sizes 3 and 4"):
        ddp.einsum("ij,jk->ik", x, y)
    for equation in ("ij->ijk", "ijk->i", "ij->ii", "i1->i", "ij,jk->ik", "i->i", "i.j->ij"):
        with pytest.raises(errors.ArgumentError):
            ddp.einsum(equation, x)
    with pytest.raises(errors.ArgumentError, match="from 0 to 51"):
        ddp.einsum(x, [0, 52])


def test_a_matrix_and_its_adjoint() -> None:
    x = ddp.tensor([[1.0, 2.0]])
    assert x.H.tolist() == x.mH.tolist() == x.adjoint().tolist() == [[1.0], [2.0]]


def test_identity_takes_anything() -> None:
    assert repr(ddp.nn.Identity(54, unused=0)) == "Identity()"
    x = ddp.ones(2)
    assert ddp.nn.Identity()(x) is x


DTYPES = [("float32", "float64"), ("int64", "float32"), ("int64", "bfloat16"), ("bool", "float32"), ("int32", "int64")]


SUMS = ["ij,jk->ik", "i,i->"]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("equation", ["i,j->ij", "i,i->i", "ij,jk->kji", "i,->i", "i,j,j->ji", *SUMS])
def test_einsum_of_two_dtypes(equation: str, dtypes: Any, autocast: bool) -> None:
    results: list[Any] = []
    for t in (ddp, torch):
        x, *others = [t.ones([2] * len(term)) for term in equation.partition("->")[0].split(",")]
        factors = [x.to(getattr(t, dtypes[0])), *(y.to(getattr(t, dtypes[1])) for y in others)]
        try:
            with t.autocast("cpu", dtype=t.bfloat16, enabled=autocast and equation not in SUMS):
                y = t.einsum(equation, *factors)
            results.append((str(y.dtype).removeprefix("torch."), tuple(y.shape)))
        except RuntimeError:  # DtypeError is one
            results.append("refused")
    assert results[0] == results[1]


def test_einsum_without_a_sum_has_gradients_and_needs_no_autocast() -> None:
    x = ddp.arange(3)
    y = ddp.rand(2, dtype=ddp.float64, requires_grad=True)
    with ddp.autocast("cpu", dtype=ddp.bfloat16):
        z = ddp.einsum("i,j->ji", x, y)
    z.sum().backward()
    assert z.dtype == y.dtype
    assert y.grad is not None
    assert y.grad.tolist() == [3.0, 3.0]
    with pytest.raises(errors.DtypeError, match="tensordot"):
        ddp.tensordot(ddp.ones(2), ddp.ones(2).double(), 0)
