"""Sorting, searching and writing by index beside PyTorch: order of nan and of equals, dtypes, shapes, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, InplaceError, RangeError, ShapeError
from tests.ddp._tensor.test_shapes import same

NAN = float("nan")
ROWS = [[3.0, NAN, 1.0, 3.0, -1.0], [0.0, 2.0, NAN, -5.0, 2.0]]
WORDS = [3, 1, 1, 2, 3, 3]

ALIKE: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name} dim={dim} descending={descending}": (
            lambda t, name=name, dim=dim, descending=descending: as_tuple(
                getattr(t, name)(t.tensor(ROWS), dim=dim, descending=descending, stable=True)
            )
        )
        for name in ("sort", "argsort")
        for dim in (0, -1)
        for descending in (False, True)
    },
    "sort integers": lambda t: as_tuple(t.tensor(WORDS).sort(descending=True, stable=True)),
    "sort bfloat16": lambda t: t.tensor(ROWS[0][2:], dtype=t.bfloat16).sort().values.float(),
    "sort 0-d": lambda t: as_tuple(t.tensor(3.0).sort()),
    "sort of nothing": lambda t: as_tuple(t.zeros(2, 0).sort()),
    "msort": lambda t: t.msort(t.tensor([[2, 1], [1, 3]])),
    "topk": lambda t: as_tuple(t.topk(t.tensor(ROWS)[:, :3], 2)),
    "topk smallest": lambda t: as_tuple(t.tensor(ROWS)[:, 1:4].topk(2, largest=False)),
    "topk none": lambda t: as_tuple(t.tensor([4, 2, 9]).topk(0)),
    "topk 0-d": lambda t: as_tuple(t.tensor(3.0).topk(1)),
    "kthvalue": lambda t: as_tuple(t.kthvalue(t.tensor([[4, 2, 9], [1, 7, 3]]), 2)),
    "kthvalue nan": lambda t: as_tuple(t.tensor([NAN, 2.0, 9.0]).kthvalue(2)),
    "kthvalue 0-d": lambda t: as_tuple(t.tensor(3.0).kthvalue(1)),
    "unique": lambda t: t.unique(t.tensor([[3, 1], [1, 2]])),
    "unique all": lambda t: t.tensor([[3, 1], [1, 2]]).unique(return_inverse=True, return_counts=True),
    "unique dim": lambda t: t.tensor([[3, 1, 3], [1, 2, 1]]).unique(dim=1, return_inverse=True, return_counts=True),
    "unique 0-d": lambda t: t.tensor(3).unique(return_inverse=True, return_counts=True),
    "unique of nothing": lambda t: t.zeros(0).unique(return_counts=True),
    "unique_consecutive": lambda t: t.unique_consecutive(t.tensor(WORDS), return_inverse=True, return_counts=True),
    "unique_consecutive dim": lambda t: t.tensor([[1, 1, 2], [3, 3, 3]]).unique_consecutive(dim=1, return_counts=True),
    "searchsorted": lambda t: t.searchsorted(t.tensor([1.0, 3.0, 3.0, 5.0]), t.tensor([[0.0, 3.0], [NAN, 4.0]])),
    "searchsorted right": lambda t: t.searchsorted(t.tensor([1, 3, 3]), t.tensor([3]), right=True, out_int32=True),
    "searchsorted side": lambda t: t.searchsorted(t.tensor([1, 3, 3]), 3, side="right"),
    "searchsorted rows": lambda t: t.searchsorted(t.tensor([[1, 3], [2, 9]]), t.tensor([[2, 4, 1], [2, 10, 5]])),
    "searchsorted sorter": lambda t: t.searchsorted(t.tensor([3, 1]), t.tensor([2]), sorter=t.tensor([1, 0])),
    "searchsorted of nothing": lambda t: t.searchsorted(t.zeros(2, 0), t.ones(2, 3)),
    "bucketize": lambda t: t.bucketize(t.tensor([[1.0, 2.5], [4.0, 0.0]]), t.tensor([1.0, 2.0, 4.0])),
    "bucketize right": lambda t: t.bucketize(2, t.tensor([1, 2, 4]), right=True),
    "bincount": lambda t: t.bincount(t.tensor(WORDS), minlength=6),
    "bincount weights": lambda t: t.bincount(t.tensor(WORDS), t.tensor([0.5] * 6)),
    "bincount of nothing": lambda t: t.bincount(t.zeros(0, dtype=t.int64), minlength=2),
    "histc": lambda t: t.histc(t.tensor([1.0, 2.0, 1.0, 4.0]), 4),
    "histc range": lambda t: t.tensor([1.0, 2.0, 1.0, 9.0]).histc(4, 0, 3),
    "histc of one value": lambda t: t.histc(t.tensor([2.0, 2.0]), 3),
    "isin": lambda t: t.isin(t.tensor([[1, 2], [3, 4]]), t.tensor([2, 3])),
    "isin of a number": lambda t: t.isin(2, t.tensor([1, 2])),
    "nonzero": lambda t: t.nonzero(t.tensor([[0, 1], [2, 0]])),
    "nonzero tuple": lambda t: t.tensor([[0, 1], [2, 0]]).nonzero(as_tuple=True),
    "nonzero 0-d": lambda t: (t.tensor(1.0).nonzero(), t.tensor(0.0).nonzero(), *t.tensor(1).nonzero(as_tuple=True)),
    "argwhere": lambda t: t.argwhere(t.tensor([True, False, True])),
    "gather 0-d": lambda t: t.tensor(2.0).gather(0, t.tensor(0)),
    "gather nothing": lambda t: t.ones(2, 3).gather(0, t.zeros(0, dtype=t.int64)),
    "gather int32": lambda t: t.arange(3).gather(0, t.tensor([2, 2], dtype=t.int32)),
    "take 0-d": lambda t: t.arange(6).reshape(2, 3).take(t.tensor(-1)),
    "index_select 0-d": lambda t: t.tensor(2.0).index_select(0, t.tensor([0])),
    "scatter number": lambda t: t.ones(3).scatter_(0, t.tensor([1, 2]), 2.5, reduce="add"),
    "scatter nothing": lambda t: t.ones(2, 3).scatter(0, t.zeros(0, dtype=t.int64), t.ones(1)),
    "scatter bfloat16": lambda t: t.ones(3, dtype=t.bfloat16).scatter_add_(0, *bf16(t)).float(),
    "index_add integers": lambda t: t.zeros(3, dtype=t.int32).index_add_(0, t.tensor([1, 1]), t.tensor([2, 3]).int()),
    "index_put": lambda t: t.zeros(2, 3).index_put_((t.tensor([0, 1]), t.tensor([2, 2])), t.tensor(1.0)),
    "index_put mask": lambda t: t.zeros(2, 3).index_put((t.tensor([True, False]),), t.arange(3.0)),
    "masked_fill infinite": lambda t: t.zeros(2, dtype=t.bfloat16).masked_fill_(t.tensor([True, False]), -1e9).float(),
    "masked_scatter": lambda t: t.zeros(2, 2).masked_scatter(t.tensor([True, False]), t.arange(4.0)),
}


def as_tuple(result: Any) -> Any:
    """Named results of either package as plain tuples, nan as text so that it compares."""
    if isinstance(result, tuple):
        assert result[0] is result.values
        assert result[1] is result.indices
        values, indices = result
        return str(values.tolist()), str(values.dtype).split(".")[-1], indices
    return result


def bf16(t: Any) -> Any:
    return t.tensor([1, 1]), t.tensor([2.0, 3.0], dtype=t.bfloat16)


@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
def test_agrees_with_pytorch(call: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    same(call(ddp), call(torch))


def test_every_nan_is_unlike_the_others() -> None:
    assert ddp.tensor([NAN, 1.0, NAN]).unique().shape == (3,)
    assert ddp.tensor([NAN, NAN]).unique_consecutive().shape == (2,)


def test_equal_elements_keep_their_order() -> None:
    x = ddp.tensor([1, 0] * 40)
    assert x.argsort().tolist() == [*range(1, 80, 2), *range(0, 80, 2)]
    assert x.argsort(descending=True).tolist() == [*range(0, 80, 2), *range(1, 80, 2)]


def test_topk_agrees_with_sort(count: Callable[[int, int], int]) -> None:
    rng = np.random.default_rng(4)
    for _ in range(count(30, 300)):
        shape = tuple(rng.integers(1, 9, 2))
        x = ddp.from_numpy(rng.permutation(np.arange(float(np.prod(shape)))).reshape(shape))
        dim, largest = int(rng.integers(2)), bool(rng.integers(2))
        k = int(rng.integers(shape[dim] + 1))
        values, indices = x.topk(k, dim, largest)
        expected = x.sort(dim, descending=largest)
        assert values.tolist() == expected.values.narrow(dim, 0, k).tolist()
        assert indices.tolist() == expected.indices.narrow(dim, 0, k).tolist()
        loose = x.topk(k, dim, largest, sorted=False).values
        assert loose.sort(dim, descending=largest).values.tolist() == values.tolist()


def test_a_scatter_of_part_of_the_source() -> None:
    # PyTorch has no gradient here.
    x, v = ddp.zeros(3, 4, requires_grad=True), ddp.ones(2, 4, requires_grad=True)
    y = x.scatter(1, ddp.tensor([[3], [0]]), v * 2)
    (y * ddp.arange(12.0).reshape(3, 4)).sum().backward()
    assert v.grad.tolist() == [[6, 0, 0, 0], [8, 0, 0, 0]]


X = ddp.arange(12.0).reshape(3, 4)
I = ddp.tensor([0, 2])  # noqa: E741  # an index
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "topk": (lambda: X.topk(5), RangeError, r"k=5 of dimension 1 of shape \(3, 4\)"),
    "kthvalue": (lambda: X.kthvalue(0), RangeError, "k=0"),
    "sort": (lambda: X.sort(2), RangeError, "dimension 2"),
    "searchsorted": (lambda: ddp.searchsorted(X, I), ShapeError, r"\(2,\) in rows of shape \(3, 4\)"),
    "searchsorted side": (lambda: ddp.searchsorted(X[0], X, side="left", right=True), ArgumentError, "side"),
    "bincount": (lambda: X[0].bincount(), DtypeError, "float32"),
    "bincount shape": (lambda: X.long().bincount(), ShapeError, r"\(3, 4\)"),
    "bincount negative": (lambda: ddp.tensor([-1]).bincount(), RangeError, "-1 is below 0"),
    "isin": (lambda: ddp.isin(1, 2), DtypeError, "expected a tensor"),
    "gather": (lambda: X.gather(0, ddp.tensor([[3]])), RangeError, r"index 3 is out of range for 3 .*\(3, 4\)"),
    "gather negative": (lambda: X.gather(0, ddp.tensor([[-1]])), RangeError, "index -1"),
    "gather dims": (lambda: X.gather(0, I), ShapeError, "dimensions differ"),
    "gather size": (lambda: X.gather(0, ddp.zeros(1, 5, dtype=ddp.int64)), ShapeError, "larger"),
    "gather dtype": (lambda: X.gather(0, X), DtypeError, "int64 tensor, not float32"),
    "take": (lambda: X.take(ddp.tensor([12])), RangeError, "index 12"),
    "take_along_dim": (lambda: X.take_along_dim(I, 0), ShapeError, "dimensions differ"),
    "index_select": (lambda: X.index_select(0, ddp.tensor([[0]])), ShapeError, "vector"),
    "index_select range": (lambda: X.index_select(1, ddp.tensor([0, 4])), RangeError, "index 4"),
    "masked_select": (lambda: X.masked_select(X), DtypeError, "bool"),
    "masked_fill": (lambda: X.masked_fill(X, 0), DtypeError, "bool"),
    "masked_fill value": (lambda: X.masked_fill(X > 1, X), ShapeError, "0-d"),
    "masked_fill shape": (lambda: X.masked_fill(X[:2] > 1, 0), ShapeError, "do not broadcast"),
    "masked_fill_": (lambda: X.clone().masked_fill_(ddp.ones(2, 3, 4) > 0, 0), ShapeError, "does not broadcast"),
    "masked_scatter": (lambda: X.masked_scatter(X > 1, X[0]), ShapeError, "10 places"),
    "scatter": (lambda: X.scatter(0, ddp.tensor([[0]]), X.double()), DtypeError, "expected float32"),
    "scatter size": (lambda: X.scatter(0, ddp.tensor([[0, 1]]), X[:1, :1]), ShapeError, "larger than the source"),
    "scatter reduce": (lambda: X.scatter(0, ddp.tensor([[0]]), X, reduce="max"), ArgumentError, "'max'"),
    "scatter nothing": (lambda: X.scatter(0, ddp.tensor([[0]])), ArgumentError, "src or value"),
    "index_add": (lambda: X.index_add(0, I, X), ShapeError, "2 places along dimension 0"),
    "index_copy": (lambda: X.index_copy(0, ddp.tensor([0, 3]), X[:2]), RangeError, "index 3"),
    "index_put": (lambda: X.index_put((I,), ddp.zeros(3)), ShapeError, "index_put"),
    "index_put dtype": (lambda: X.index_put((I,), I), DtypeError, "int64"),
    "index_fill": (lambda: X.index_fill(0, I, X), ShapeError, "0-d"),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_shapes(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "scatter_": lambda x: x.scatter_(0, ddp.tensor([[1, 0]]), 5.0),
    "scatter_add_": lambda x: x.scatter_add_(0, ddp.tensor([[1, 0]]), ddp.ones(1, 2)),
    "index_add_": lambda x: x.index_add_(0, I, ddp.ones(2, 4)),
    "index_copy_": lambda x: x.index_copy_(0, I, ddp.ones(2, 4)),
    "index_fill_": lambda x: x.index_fill_(0, I, 5.0),
    "index_put_": lambda x: x.index_put_((I,), ddp.tensor(5.0)),
    "masked_fill_": lambda x: x.masked_fill_(x > 3, 5.0),
    "masked_scatter_": lambda x: x.masked_scatter_(x > 3, ddp.ones(12)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    write = IN_PLACE[name]
    x = X.clone()
    memory, count = x.array, x.version.count
    assert write(x) is x
    assert x.array is memory
    assert x.version.count == count + 1
    assert not np.array_equal(x.numpy(), X.numpy())
    leaf = X.clone().requires_grad_()
    with pytest.raises(InplaceError, match=name):
        write(leaf)
    assert leaf.detach().tolist() == X.tolist()
    with ddp.no_grad():
        write(leaf)
    assert leaf.detach().tolist() == x.tolist()
    y = X.clone().requires_grad_() * 1
    saved = (y * y).sum()
    memory = y.array
    write(y)
    assert y.array is memory
    with pytest.raises(ddp.errors.VersionError):
        saved.backward()
