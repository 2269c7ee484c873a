"""In place: PyTorch's values and gradients in the same memory; what autograd follows, refuses, and backward notices."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import ArgumentError, DtypeError, InplaceError, ShapeError, VersionError
from ddp.nn import functional as F
from tests.ddp.cases.table import draw

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

NAMES = """
    neg negative abs absolute square exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan arcsin
    arctan sinh cosh tanh asinh atanh erf erfc erfinv floor ceil trunc fix round sign frac reciprocal sigmoid relu logit
    nan_to_num logical_not
"""
WITH_TENSOR = """
    add sub subtract mul multiply div divide true_divide pow fmod atan2 hypot xlogy clamp_min clamp_max floor_divide
    eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor
"""
# A method that ends with _, and its arguments; y is the other tensor, and a list becomes one.
Y = "y"
CALLS: list[tuple[Any, ...]] = [
    *((name,) for name in NAMES.split()),
    *((name, Y) for name in WITH_TENSOR.split()),
    ("remainder", Y),
    ("pow", 3),
    ("clamp", 0.3, 0.6),
    ("lerp", Y, 0.3),
    ("lerp", Y, Y),
    ("copy", Y),
    ("fill", 3.0),
    ("zero",),
    ("cumsum", 1),
    ("cumprod", 1),
    ("squeeze",),
    ("unsqueeze", -1),
    ("transpose", 0, 1),
    ("t",),
    ("tril", -1),
    ("triu",),
    ("fill_diagonal", 7),
    ("scatter", 0, [[1, 0]], 5.0),
    ("index_fill", 0, [0, 2], 5.0),
]
FORMS: dict[str, Any] = {
    **{
        f"{name}_ {how}": lambda x, y, name=name, how=how: getattr(x, f"{name}_")(*(argument(x, y, a) for a in how))
        for name, *how in CALLS
    },
    "clamp_ tensors": lambda x, y: x.clamp_(y, y + 0.1),
    "acosh_": lambda x, y: x.add_(1).acosh_(),
    "add_ alpha": lambda x, y: x.add_(y, alpha=2),
    "div_ floor": lambda x, y: x.div_(y, rounding_mode="floor"),
    "round_ decimals": lambda x, y: x.round_(decimals=1),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y + 1, value=-2),
    "a use before": lambda x, y: (x * 3, x.mul_(y).sub_(1))[0] + x,
    "row": lambda x, y: assigned(x, 0, y * 2),
    "lists": lambda x, y: assigned(x, ([1, 0], [2, 2]), y[:2]),
    "mask": lambda x, y: assigned(x, x > 0.5, 0.25),
    "scatter_add_": lambda x, y: x.scatter_add_(0, x.new_tensor([[1, 0]]).long(), y[None, :2]),
    "index_add_": lambda x, y: x.index_add_(0, x.new_tensor([0, 2]).long(), y.expand(2, 4)),
    "index_copy_": lambda x, y: x.index_copy_(0, x.new_tensor([0, 2]).long(), y.expand(2, 4)),
    "index_put_": lambda x, y: x.index_put_((x.new_tensor([0, 2]).long(),), y[0]),
    "masked_fill_": lambda x, y: x.masked_fill_(x > 0.5, 5.0),
    "masked_scatter_": lambda x, y: x.masked_scatter_(x > 0.5, y.expand(3, 4)),
    "addmm_": lambda x, y: x.addmm_(x.new_ones(3, 2), x.new_ones(2, 4)),
    "addr_": lambda x, y: x.addr_(y[:3], y),
    "addmv_": lambda x, y: x.copy_(x.select(1, 0).clone().addmv_(x.new_ones(3, 2), y[:2])[:, None]),
    "baddbmm_": lambda x, y: x.unsqueeze_(0).baddbmm_(x.new_ones(1, 3, 2), x.new_ones(1, 2, 4)),
}


def argument(x: Any, y: Any, given: Any) -> Any:
    if given == Y:
        return y
    return x.new_tensor(given).long() if isinstance(given, list) else given


def assigned(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


# PyTorch has no gradients of these in place, or wrong ones.
UNTRACKED = re.compile("a(sin|tan|cos)h_|floor_divide_|logical_")
VIEWS = re.compile("(un)?squeeze_|transpose_|t_|baddbmm_")


@pytest.mark.parametrize("name", FORMS)
def test_agrees_with_pytorch(name: str) -> None:
    a = draw(3, 4, low=0.05, high=0.95)
    b = draw(4, seed=1, low=0.1, high=0.9)
    for tracked in ("", "x", "y", "x y")[: 1 if UNTRACKED.match(name) else 4]:
        results = []
        for t in (ddp, torch):
            x = t.tensor(a, requires_grad="x" in tracked)
            y = t.tensor(b, requires_grad="y" in tracked)
            written = x * 1
            if t is ddp:
                memory = written.array
                version = written.version.count
            result = FORMS[name](written, y)
            if t is ddp:
                assert name == "a use before" or result is written
                assert VIEWS.match(name) or (written.array is memory and written.version.count > version)
            if result.requires_grad:
                (result * result).sum().backward()
            results.append([result.detach(), *[p.detach() * 0 if p.grad is None else p.grad for p in (x, y)]])
        for ours, theirs in zip(*results, strict=True):
            assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-12, err_msg=tracked)


@pytest.mark.parametrize(
    ("values", "calls"),
    [
        ([7, -7, 9], {"add": 2, "sub": 1, "mul": 3, "floordiv": 2, "mod": 7, "pow": 2, "or": 8, "and": 29, "xor": 3}),
        ([7, 9], {"lshift": 3, "rshift": 1}),
        ([1.0, 2.0], {"truediv": 4, "mod": 0.4, "pow": 2}),
        ([True, False], {"and": True, "or": True, "xor": False}),
    ],
    ids=["integers", "bits", "floats", "bools"],
)
def test_operators(values: Any, calls: Any) -> None:
    ours = ddp.tensor(values)
    theirs = torch.tensor(values)
    for name, number in calls.items():
        before = ours
        ours, theirs = (getattr(operator, f"i{name}")(x, number) for x in (ours, theirs))
        assert ours is before
        assert ours.tolist() == pytest.approx(theirs.tolist()), name


def test_leaves_keep_their_shape() -> None:
    x = ddp.zeros(2, requires_grad=True)
    for mode in (ddp.enable_grad, ddp.no_grad):
        with mode(), pytest.raises(InplaceError, match=r"unsqueeze_: a tensor of shape \(2,\) that requires grad"):
            x.unsqueeze_(0)


def leaf(*values: float) -> ddp.Tensor:
    return ddp.tensor(values, requires_grad=True)


def test_a_saved_value_that_changed_names_op_shape_and_versions() -> None:
    x = leaf(1.0, 2.0)
    y = x * 1
    z = y * y
    y.add_(1)
    with pytest.raises(VersionError, match=r"mul.*\(2,\).*version 0.*version 1"):
        z.sum().backward()


RESULTS = {
    "division": lambda t, x: x / x.sum(),
    "erfinv": lambda t, x: t.erfinv(x),
    "max_pool2d": lambda t, x: t.nn.functional.max_pool2d(x, 2),
    "scaled_dot_product_attention": lambda t, x: t.nn.functional.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("way", ["no_grad", "detach", "detached view", "view of what is gone"])
def test_a_write_past_autograd_into_a_result_leaves_backward_as_it_was(name: str, way: str) -> None:
    grads = []
    for write in (False, True):
        x = ddp.tensor(np.linspace(0.1, 0.9, 16).reshape(1, 1, 4, 4), requires_grad=True)
        y = RESULTS[name](ddp, x)
        loss = y.sum() * 2 if name != "max_pool2d" else (y * ddp.arange(4.0).reshape(1, 1, 2, 2)).sum()
        if write and way == "no_grad":
            with ddp.no_grad():
                y.add_(1)
        elif write and way == "view of what is gone":
            y = y.reshape(-1).detach()
            y.mul_(3)
        elif write:
            (y.detach() if way == "detach" else y.detach()[0]).mul_(3)
        loss.backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


def test_a_change_that_no_backward_reads_is_fine() -> None:
    x = leaf(1.0, 2.0)
    y = x * 3
    z = y + 1
    y.add_(1)
    (z.sum() + y.sum()).backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_through_a_view_in_the_graph_raises() -> None:
    y = leaf(1.0, 2.0) * 2
    row = y[0]
    for write in (lambda: row.zero_(), lambda: row.__iadd__(1), lambda: row.mul_(2)):
        with pytest.raises(InplaceError, match="out-of-place"):
            write()
    base = ddp.zeros(2)
    with pytest.raises(InplaceError, match="view"):
        base[:1].add_(leaf(1.0))
    assert y.tolist() == [2.0, 4.0]


def test_a_view_whose_base_is_gone_can_be_written() -> None:
    x = leaf(1.0, 2.0)
    y = (x * 2).reshape(2, 1)
    y += 1
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_a_view_made_before_the_change_is_left_behind() -> None:
    x = leaf(1.0, 2.0)
    y = x * 1
    row = y[0]
    y.mul_(3)
    with pytest.raises(InplaceError, match="shares memory"):
        row * 2
    with ddp.no_grad():
        assert (row * 2).item() == 6.0  # the values are true
    y[0].backward()
    assert x.grad.tolist() == [3.0, 0.0]


def test_nothing_is_written_where_it_does_not_fit() -> None:
    x = leaf(1.0, 2.0) * 1
    with pytest.raises(ShapeError, match=r"\(3, 2\)"):
        x.add_(ddp.ones(3, 2))
    with pytest.raises(DtypeError):
        ddp.tensor([1, 2]).add_(leaf(0.5, 0.5))
    assert x.tolist() == [1.0, 2.0]


def test_retained_gradient_moves_along() -> None:
    x = leaf(1.0, 2.0)
    y = x * 2
    y.retain_grad()
    y.mul_(3)
    y.sum().backward()
    assert y.grad.tolist() == [1.0, 1.0]


def test_a_view_left_behind_starts_no_backward_and_enters_no_function() -> None:
    class Twice(ddp.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: ddp.Tensor) -> ddp.Tensor:
            return x * 2

    y = leaf(1.0, 2.0) * 1
    row = y[0]
    y.mul_(3)
    for use in (row.backward, lambda: ddp.autograd.grad(y.sum(), row), lambda: Twice.apply(row)):
        with pytest.raises(InplaceError, match="shares memory"):
            use()


def test_what_is_detached_is_not_left_behind() -> None:
    x = leaf(1.0, 2.0)
    loss = (x * x).sum()
    logged = loss.detach()
    loss /= 5
    assert (logged * 2).item() == 2.0  # the same memory, as in PyTorch
    loss.backward()
    assert x.grad.tolist() == pytest.approx([0.4, 0.8])


def test_a_view_of_what_is_detached_is_left_behind() -> None:
    kept = (leaf(1.0, 2.0) * 1).detach()
    row = kept[0]
    kept += leaf(3.0, 4.0)
    assert kept.requires_grad
    with pytest.raises(InplaceError, match="shares memory"):
        row * 2


def test_elements_that_lie_on_one_another_are_not_written_in_the_graph() -> None:
    y = (leaf(1.0, 2.0) * 1).expand(3, 2)
    with pytest.raises(InplaceError, match="clone"):
        y.add_(1)


def test_a_result_without_gradient_takes_the_tensor_out_of_the_graph() -> None:
    y = leaf(1.0, 0.0) * 1
    y.logical_not_()
    assert y.tolist() == [0.0, 1.0]
    assert not y.requires_grad


def test_a_view_older_than_its_leaf_is_left_behind() -> None:
    x = ddp.ones(4)
    halves = x[:2], x[2:]
    x.requires_grad_()
    with pytest.raises(InplaceError, match="shares memory"):
        halves[0] * 2
    (x[:2] * 2).sum().backward()
    first = x[:2]
    x.requires_grad_(False).requires_grad_()  # it was a leaf before: the view leads there
    (first * 2).sum().backward()
    assert x.grad.tolist() == [4.0, 4.0, 0.0, 0.0]


def test_a_checkpointed_region_computes_its_result_again() -> None:
    x = leaf(0.5, 1.0)
    y = ddp.autograd.checkpoint(lambda x: x.exp(), x)
    y += 1
    y.sum().backward()
    assert_allclose(x.grad.numpy(), np.exp([0.5, 1.0]), rtol=1e-6)


# --- what backward reads stays what forward saw ---


LATER: dict[str, Any] = {
    "classes": lambda x: (F.cross_entropy(x, y := ddp.tensor([0, 1, 0])), y),
    "tensor": lambda x: (x[i := ddp.tensor([0, 1, 1])].sum(), i),
    "array": lambda x: (x[0, (i := np.array([0, 1, 1]))].sum(), i),
    "mask": lambda x: (x[m := x > 4].sum(), m),
    "indices of max": lambda x: ((found := x.max(1, keepdim=True)).values.sum(), found.indices),
    "operand": lambda x: ((x * (factor := np.full((3, 3), 3, np.float32))).sum(), factor),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_write_does_not_reach_backward(name: str) -> None:
    grads = []
    for write in (False, True):
        x = ddp.arange(9, dtype=ddp.float32).reshape(3, 3).clone().requires_grad_()
        loss, read = LATER[name](x)
        if write:
            read[...] = 0
        loss.backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


WRITES: list[tuple[Any, ...]] = [
    ("__setitem__", 0, 5.0),
    ("fill_", 3.0),
    ("copy_", ddp.ones(3)),
    ("masked_fill_", ddp.tensor([True, False, True]), 7.0),
    ("index_add_", 0, ddp.tensor([1]), ddp.ones(1)),
    ("uniform_",),
]


@pytest.mark.parametrize("write", WRITES, ids=[name for name, *_ in WRITES])
@pytest.mark.parametrize("op", ["softmax", "exp", "sigmoid"])
def test_a_write_leaves_what_an_op_saved_of_its_result(op: str, write: Any) -> None:
    results = []
    for copied in (False, True):
        x = ddp.tensor([0.5, 1.5, 2.5], requires_grad=True)
        y = x.softmax(0) if op == "softmax" else getattr(x, op)()
        z = y * 1
        y = y.clone() if copied else y
        getattr(y, write[0])(*write[1:])
        ((y + z) * ddp.tensor([1.0, 2.0, 3.0])).sum().backward()
        results.append(x.grad.tolist())
    assert results[0] == pytest.approx(results[1], rel=1e-6)


NUMBERS = [[1.0, 2.0, 5.0], [3.0, 0.5, 4.0]]
OUT: dict[str, Any] = {
    "add": lambda t, x, out: t.add(x, 2, alpha=3, out=out),
    "exp": lambda t, x, out: t.exp(x, out=out),
    "matmul": lambda t, x, out: t.matmul(x, x.T, out=out),
    "cat": lambda t, x, out: t.cat([x, x], 1, out=out),
    "sum": lambda t, x, out: t.sum(x, 0, out=out),
    "gather": lambda t, x, out: t.gather(x, 1, t.tensor([[0, 2]]), out=out),
}


@pytest.mark.parametrize("name", OUT)
def test_values(name: str) -> None:
    expected = OUT[name](torch, torch.tensor(NUMBERS), torch.empty(0))
    for dtype in (ddp.float32, ddp.float64):
        for shape in (expected.shape, (0,)):
            out = ddp.zeros(*shape, dtype=dtype)
            assert OUT[name](ddp, ddp.tensor(NUMBERS), out) is out
            assert out.dtype == dtype
            assert out.shape == expected.shape
            assert_allclose(out.numpy(), expected.numpy(), 1e-6)


def test_several_results() -> None:
    x = ddp.tensor(NUMBERS)
    y = torch.tensor(NUMBERS)
    memory = ddp.empty(2), ddp.empty(0, dtype=ddp.int64)
    actual = ddp.max(x, 1, out=memory)
    expected = torch.max(y, 1)
    assert (actual.values, actual.indices) == memory
    assert actual.values.tolist() == expected.values.tolist()
    assert actual.indices.tolist() == expected.indices.tolist()
    with pytest.raises(ArgumentError, match="max: out is 2 tensors"):
        ddp.max(x, 1, out=memory[:1])


def test_the_memory_may_be_an_argument_and_its_change_counts() -> None:
    x = ddp.tensor(NUMBERS)
    w = ddp.ones(2, 3, requires_grad=True)
    z = x * w
    ddp.add(x, x, out=x)
    assert x.tolist() == [[2 * number for number in row] for row in NUMBERS]
    with pytest.raises(ddp.errors.VersionError):
        z.sum().backward()


def test_what_does_not_fit() -> None:
    x = ddp.tensor(NUMBERS)
    with pytest.raises(ShapeError, match=r"exp: a result of shape \(2, 3\) does not fit a tensor of shape \(3,\)"):
        ddp.exp(x, out=ddp.zeros(3))
    with pytest.raises(DtypeError, match="exp: a result of float32 does not fit a tensor of int64"):
        ddp.exp(x, out=ddp.zeros(2, 3, dtype=ddp.int64))
    with pytest.raises(DtypeError, match="exp: out is a Tensor, not ndarray"):
        ddp.exp(x, out=np.zeros((2, 3)))


@pytest.mark.parametrize("name", ["exp", "sum", "round", "tril", "topk", "nan_to_num"])
def test_arguments_that_are_no_tensors(name: str) -> None:
    for wrong in ([1.0], np.ones(3), 2.0, "a"):
        with pytest.raises(DtypeError, match=f"{name}: input is a Tensor, not"):
            getattr(ddp, name)(wrong)
