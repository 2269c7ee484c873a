"""Reductions beyond their gradients: result types, dtypes, ties, nan, empty tensors and errors, against PyTorch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import errors
from tests.ddp._tensor.oracle import agree, both
from tests.ddp.cases.table import draw

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

inf, nan = float("inf"), float("nan")
DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


# A function, and its arguments after the tensor.
FUNCTIONS: list[tuple[Any, ...]] = [
    ("sum", 1),
    ("nansum",),
    ("prod", 0),
    ("amax", (0, 1)),
    ("max",),
    ("max", 1),
    ("min", 0, True),
    ("argmax",),
    ("argmin", 1, True),
    ("median",),
    ("cumsum", 1),
    ("cumprod", 0),
    ("cummax", 1),
    ("cummin", 1),
    ("any",),
    ("all", 1),
    ("count_nonzero",),
]
NOT_OF_BOOL = {"median", "argmax", "argmin"}  # in PyTorch


@pytest.mark.parametrize("call", FUNCTIONS, ids=str)
def test_dtypes(call: Any) -> None:
    name, *how = call
    for dtype in DTYPES[name in NOT_OF_BOOL :]:
        x, y = both([[3, 1, 2, 3], [0, 5, 5, 1]], dtype)
        ours = getattr(ddp, name)(x, *how)
        theirs = getattr(torch, name)(y, *how)
        agree(ours, theirs, 1e-2 if dtype in ("float16", "bfloat16") else 1e-6)
        agree(x.aminmax(dim=1), y.aminmax(dim=1))


@pytest.mark.parametrize("name", ["mean", "var", "std", "norm", "logsumexp", "softmax", "log_softmax", "var_mean"])
def test_floating_dtypes(name: str) -> None:
    for dtype, tolerance in {"float16": 5e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 2e-6}.items():
        x, y = both(draw(3, 4).tolist(), dtype)
        agree(getattr(ddp, name)(x, dim=1), getattr(torch, name)(y, dim=1), tolerance)


FLOATING = ("sum", "nansum", "mean", "nanmean", "amax", "amin", "var", "logsumexp", "norm")
WITH_NAN = [[1.0, nan, 3.0, nan], [4.0, 2.0, -inf, 2.0], [nan, inf, 1.0, 0.0]]


@pytest.mark.parametrize(
    "name", [*FLOATING, "max", "min", "argmax", "argmin", "median", "cummax", "cummin", "cumsum", "prod"]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_nan(name: str, dim: int) -> None:
    x, y = both(WITH_NAN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = getattr(ddp, name)(x, dim=dim)
        theirs = getattr(torch, name)(y, dim=dim)
    if name == "median":  # of equal elements any place will do
        ours = ours[0]
        theirs = theirs[0]
    agree(ours, theirs)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_backward_pass_extremes_name_the_last_place_and_add_up_gradients(name: str) -> None:
    values = [[1.0, 1.0, 3.0, 2.0, 3.0, 0.0, 0.0]]
    x, y = both(values)
    x.requires_grad_()
    y.requires_grad_()
    ours = getattr(ddp, name)(x, 1)
    theirs = getattr(torch, name)(y, 1)
    agree(ours, theirs)
    ours.values.sum().backward()
    theirs.values.sum().backward()
    agree(x.grad, y.grad)


def test_results_are_named() -> None:
    x = ddp.tensor([[1.0, 3.0], [4.0, 2.0]])
    result = x.max(1)
    values, indices = result
    assert result.values is values
    assert result.indices is indices
    assert isinstance(result, ddp.return_types.max)
    assert repr(result) == "ddp.return_types.max(\nvalues=tensor([3., 4.]),\nindices=tensor([1, 0]))"
    assert repr(x.aminmax()) == "ddp.return_types.aminmax(\nmin=tensor(1.),\nmax=tensor(4.))"
    assert [type(each).__name__ for each in (x.min(0), x.median(0), x.cummax(0), x.cummin(0))] == [
        "min",
        "median",
        "cummax",
        "cummin",
    ]


@pytest.mark.parametrize("p", [0, 0.5, 1, 2, 3.5, inf, -inf, -2, "fro"])
def test_norm(p: Any) -> None:
    for dim in (None, 0, (0, 1)) if p != "fro" else (None, (0, 1)):  # which is a matrix norm
        x, y = both([[3.0, 0.0, -4.0], [1.0, 2.0, 5.0]], "float64")
        x.requires_grad_()
        y.requires_grad_()
        ours = ddp.norm(x, p, dim)
        theirs = torch.norm(y, p, dim)
        agree(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
        assert (x.grad is None) == (y.grad is None) == (p == 0)
        if p != 0:
            agree(x.grad, y.grad)


def test_norm_of_small_halves_has_a_gradient() -> None:
    x, y = both([1e-6, 2e-6, -1e-6], "float16")
    x.requires_grad_().norm().backward()
    y.requires_grad_().norm().backward()
    agree(x.grad, y.grad, 1e-3)


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("name", ["var", "std"])
def test_var_of_what_float32_cannot_square(name: str, dim: int | None) -> None:
    numbers = draw(5, 7)
    for scale in (1e-30, 1e-18, 1e18, 1e30, 1e38 / abs(numbers).max()):
        x, y = both((numbers * scale).tolist(), "float32")
        ours, theirs = (getattr(t.requires_grad_(), name)(dim) for t in (x, y))
        agree(ours, theirs, 1e-5)
        ours.sum().backward()
        theirs.sum().backward()
        agree(x.grad / x.grad.abs().max(), y.grad / y.grad.abs().max(), 1e-5)
    assert getattr(ddp.full((5, 7), 0.1), name)(dim).eq(0).all()


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, inf])
def test_norm_of_zeros_has_a_gradient(p: float) -> None:
    x, y = both([[0.0, 0.0], [3.0, 0.0]], "float64")
    x.requires_grad_()
    y.requires_grad_()
    x.norm(p, 1).sum().backward()
    y.norm(p, 1).sum().backward()
    agree(x.grad, y.grad)


@pytest.mark.parametrize("ord", [None, "fro", 1, -1, inf, -inf])
@pytest.mark.parametrize("keepdim", [False, True])
def test_linalg_norm_of_matrices(ord: Any, keepdim: bool) -> None:
    x, y = both(draw(2, 3).tolist())
    agree(ddp.linalg.norm(x, ord, keepdim=keepdim), torch.linalg.norm(y, ord, keepdim=keepdim))
    if ord is not None:
        x, y = both(draw(2, 3, 4).tolist())
        ours = ddp.linalg.matrix_norm(x, ord, (2, 0), keepdim)
        agree(ours, torch.linalg.matrix_norm(y, ord, (2, 0), keepdim))


def test_linalg_norm_of_vectors() -> None:
    x, y = both(draw(2, 3, 4).tolist())
    agree(ddp.linalg.vector_norm(x, 3, (0, 2)), torch.linalg.vector_norm(y, 3, (0, 2)))
    agree(ddp.linalg.vector_norm(x), torch.linalg.vector_norm(y))
    agree(ddp.linalg.norm(x, 1, 1), torch.linalg.norm(y, 1, 1))
    with pytest.raises(errors.ArgumentError, match="nuc"):
        ddp.linalg.norm(x, "nuc", (0, 1))
    with pytest.raises(errors.ArgumentError):
        ddp.linalg.norm(x, 2, (0, 1))


@pytest.mark.parametrize("name", ["var", "std"])
def test_var_takes_its_arguments_every_way(name: str) -> None:
    x, y = both(draw(3, 4).tolist())
    for args, options in [
        ((), {}),
        ((False,), {}),
        ((1,), {}),
        ((1, False), {}),
        ((1, True, True), {}),
        (((0, 1),), {"correction": 0}),
        ((), {"dim": 0, "correction": 2, "keepdim": True}),
        ((), {"unbiased": False}),
    ]:
        agree(getattr(x, name)(*args, **options), getattr(y, name)(*args, **options), 1e-5)
        ours, theirs = getattr(ddp, f"{name}_mean"), getattr(torch, f"{name}_mean")
        agree(ours(x, *args, **options), theirs(y, *args, **options), 1e-5)


@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (1, 2, 0)])
def test_a_product_over_several_dimensions(dims: tuple[int, ...]) -> None:
    x = ddp.linspace(-1, 1, 11, dtype=ddp.float64)[:8].reshape(2, 2, 2).requires_grad_()  # one of them is 0
    assert ddp.autograd.gradcheck(lambda x: x.prod(dims), (x,))
    assert_allclose(x.prod(dims, keepdim=True).detach().numpy(), x.detach().numpy().prod(dims, keepdims=True))


def test_of_nothing() -> None:
    empty = ddp.zeros(0, 3)
    theirs = torch.zeros(0, 3)
    for name in ("sum", "mean", "prod", "norm", "any", "all", "nansum", "count_nonzero"):
        agree(getattr(ddp, name)(empty), getattr(torch, name)(theirs))
    for name in ("sum", "logsumexp", "all", "any", "prod"):
        agree(getattr(ddp, name)(empty, 0), getattr(torch, name)(theirs, 0))
    for name in ("max", "amin", "argmax", "median"):
        with pytest.raises(errors.ArgumentError, match=r"\(0, 3\)"):
            getattr(ddp, name)(empty)


def test_softmax_of_nothing_but_minus_infinity_and_of_masked_rows() -> None:
    values = [[-inf, -inf, -inf], [1.0, -inf, 2.0], [500.0, 0.0, -500.0], [inf, 1.0, 2.0]]
    x, y = both(values)
    for name in ("softmax", "log_softmax", "logsumexp"):
        agree(getattr(ddp, name)(x, 1), getattr(torch, name)(y, 1))


@pytest.mark.parametrize("shape", [(3, 70_000), (700, 200), (2, 300, 300), (2, 70_000, 2), (1, 3, 70_000)])
def test_blocks_cover_everything(shape: Any) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    values[0] *= 100  # one block must subtract its maxima, the others need not
    for name in ("softmax", "log_softmax"):
        x = ddp.from_numpy(values).requires_grad_()
        y = torch.from_numpy(values.copy()).requires_grad_()
        ours = getattr(x, name)(1)
        theirs = getattr(y, name)(1)
        assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), 2e-5, 1e-5)
        g = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        ours.backward(ddp.from_numpy(g))
        theirs.backward(torch.from_numpy(g))
        assert_allclose(x.grad.numpy(), y.grad.numpy(), 2e-4, 2e-5)


NAN = float("nan")
ROWS = [[3.0, NAN, 1.0, 3.0, -1.0], [0.0, 2.0, NAN, -5.0, 2.0]]
WORDS = [3, 1, 1, 2, 3, 3]

ALL = {"return_inverse": True, "return_counts": True}
# A function and its arguments, by name in a dict; lists become tensors.
CALLS: list[tuple[Any, ...]] = [
    *(
        (name, ROWS, {"dim": dim, "descending": descending, "stable": True})
        for name, dim, descending in itertools.product(("sort", "argsort"), (0, -1), (False, True))
    ),
    ("msort", [[2, 1], [1, 3]]),
    ("topk", [row[:3] for row in ROWS], 2),
    ("topk", [row[1:4] for row in ROWS], 2, {"largest": False}),
    ("kthvalue", [[4, 2, 9], [1, 7, 3]], 2),
    ("unique", [[3, 1], [1, 2]]),
    ("unique", [[3, 1], [1, 2]], ALL),
    ("unique", [[3, 1, 3], [1, 2, 1]], {"dim": 1, **ALL}),
    ("unique_consecutive", WORDS, ALL),
    ("unique_consecutive", [[1, 1, 2], [3, 3, 3]], {"dim": 1, "return_counts": True}),
    ("searchsorted", [1.0, 3.0, 3.0, 5.0], [[0.0, 3.0], [NAN, 4.0]]),
    ("searchsorted", [1, 3, 3], [3], {"right": True, "out_int32": True}),
    ("searchsorted", [1, 3, 3], 3, {"side": "right"}),
    ("searchsorted", [[1, 3], [2, 9]], [[2, 4, 1], [2, 10, 5]]),
    ("searchsorted", [3, 1], [2], {"sorter": [1, 0]}),
    ("bucketize", [[1.0, 2.5], [4.0, 0.0]], [1.0, 2.0, 4.0]),
    ("bincount", WORDS, {"minlength": 6}),
    ("bincount", WORDS, [0.5] * 6),
    ("histc", [1.0, 2.0, 1.0, 4.0], 4),
    ("histc", [2.0, 2.0], 3),  # of one value
    ("isin", [[1, 2], [3, 4]], [2, 3]),
    ("nonzero", [[0, 1], [2, 0]]),
    ("argwhere", [True, False, True]),
    ("masked_scatter", [[0.0, 0.0], [0.0, 0.0]], [True, False], [0.0, 1.0, 2.0, 3.0]),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_sorting_and_searching_agree_with_pytorch(call: Any) -> None:
    def run(t: Any) -> Any:
        name, *how = call
        options = how.pop() if isinstance(how[-1], dict) else {}
        given = [t.tensor(each) if isinstance(each, list) else each for each in how]
        named = {key: t.tensor(each) if isinstance(each, list) else each for key, each in options.items()}
        return getattr(t, name)(*given, **named)

    agree(run(ddp), run(torch), rtol=0)


ALIKE: dict[str, Any] = {
    "sort bfloat16": lambda t: t.tensor(ROWS[0][2:], dtype=t.bfloat16).sort().values.float(),
    "sort of nothing": lambda t: t.zeros(2, 0).sort(),
    "nonzero 0-d": lambda t: (t.tensor(1.0).nonzero(), t.tensor(0.0).nonzero(), *t.tensor(1).nonzero(as_tuple=True)),
    "gather 0-d": lambda t: t.tensor(2.0).gather(0, t.tensor(0)),
    "gather nothing": lambda t: t.ones(2, 3).gather(0, t.zeros(0, dtype=t.int64)),
    "gather int32": lambda t: t.arange(3).gather(0, t.tensor([2, 2], dtype=t.int32)),
    "index_select 0-d": lambda t: t.tensor(2.0).index_select(0, t.tensor([0])),
    "scatter number": lambda t: t.ones(3).scatter_(0, t.tensor([1, 2]), 2.5, reduce="add"),
    "scatter bfloat16": lambda t: t.ones(3, dtype=t.bfloat16).scatter_add_(0, *bf16(t)).float(),
    "index_put": lambda t: t.zeros(2, 3).index_put_((t.tensor([0, 1]), t.tensor([2, 2])), t.tensor(1.0)),
    "masked_fill infinite": lambda t: t.zeros(2, dtype=t.bfloat16).masked_fill_(t.tensor([True, False]), -1e9).float(),
}


def bf16(t: Any) -> Any:
    return t.tensor([1, 1]), t.tensor([2.0, 3.0], dtype=t.bfloat16)


@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
def test_agrees_with_pytorch(call: Any) -> None:
    agree(call(ddp), call(torch), rtol=0)


def test_every_nan_is_unlike_the_others() -> None:
    assert ddp.tensor([NAN, 1.0, NAN]).unique().shape == (3,)
    assert ddp.tensor([NAN, NAN]).unique_consecutive().shape == (2,)


def test_topk_agrees_with_sort(count: Callable[[int, int], int]) -> None:
    rng = np.random.default_rng(4)
    for _ in range(count(30, 300)):
        shape = tuple(rng.integers(1, 9, 2))
        x = ddp.from_numpy(rng.permutation(np.arange(float(np.prod(shape)))).reshape(shape))
        dim = int(rng.integers(2))
        largest = bool(rng.integers(2))
        k = int(rng.integers(shape[dim] + 1))
        values, indices = x.topk(k, dim, largest)
        expected = x.sort(dim, descending=largest)
        assert values.tolist() == expected.values.narrow(dim, 0, k).tolist()
        assert indices.tolist() == expected.indices.narrow(dim, 0, k).tolist()
        loose = x.topk(k, dim, largest, sorted=False).values
        assert loose.sort(dim, descending=largest).values.tolist() == values.tolist()


def test_a_scatter_of_part_of_the_source() -> None:
    # PyTorch has no gradient here.
    x = ddp.zeros(3, 4, requires_grad=True)
    v = ddp.ones(2, 4, requires_grad=True)
    y = x.scatter(1, ddp.tensor([[3], [0]]), v * 2)
    (y * ddp.arange(12.0).reshape(3, 4)).sum().backward()
    assert v.grad.tolist() == [[6, 0, 0, 0], [8, 0, 0, 0]]
