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
    x = ddp.ones(shapes[0])
    assert getattr(x, name)(ddp.ones(shapes[1]), ddp.ones(shapes[2])) is x
    with pytest.raises(errors.ShapeError, match=name):
        getattr(ddp.ones(1), name)(ddp.ones(shapes[1]), ddp.ones(shapes[2]))


class TestLayers:
    def test_bilinear(self) -> None:
        layer = ddp.nn.Bilinear(2, 3, 4)
        assert repr(layer) == repr(torch.nn.Bilinear(2, 3, 4))
        assert layer(ddp.ones(5, 2), ddp.ones(5, 3)).shape == (5, 4)
        assert layer.weight.abs().max().item() <= 2**-0.5

    def test_reprs_and_identity(self) -> None:
        assert repr(ddp.nn.Linear(2, 3)) == repr(torch.nn.Linear(2, 3))
        assert repr(ddp.nn.Identity(54, unused=0)) == "Identity()"
        x = ddp.ones(2)
        assert ddp.nn.Identity()(x) is x
