"""In place: what autograd follows, what it refuses, and what backward notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import DtypeError, InplaceError, ShapeError, VersionError


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).uniform(0.5, 2.0, shape)


def run_add(t: Any, x: Any, y: Any) -> Any:
    x.add_(y, alpha=2)
    return x


def run_iadd(t: Any, x: Any, y: Any) -> Any:
    x += y
    return x * x


def run_mul(t: Any, x: Any, y: Any) -> Any:
    x.mul_(y)
    return x


def run_div(t: Any, x: Any, y: Any) -> Any:
    x /= y
    return x


def run_twice(t: Any, x: Any, y: Any) -> Any:
    before = x * 3
    x.mul_(y)
    x.sub_(1)
    return x + before


def run_zero(t: Any, x: Any, y: Any) -> Any:
    z = x + y
    x.zero_()
    return z.sum() + x.sum()


def run_fill(t: Any, x: Any, y: Any) -> Any:
    x.fill_(3.0)
    return x * y


def run_copy(t: Any, x: Any, y: Any) -> Any:
    x.copy_(y)
    return x * x


def run_set_row(t: Any, x: Any, y: Any) -> Any:
    x[0] = y[0] * 2
    return x * x


def run_set_number(t: Any, x: Any, y: Any) -> Any:
    x[:, 1] = 5.0
    return x * y


def run_set_broadcast(t: Any, x: Any, y: Any) -> Any:
    x[:] = y[0]
    return x * x


def run_set_list(t: Any, x: Any, y: Any) -> Any:
    x[[1, 0], [2, 2]] = y[0, :2]
    return x * x


def run_set_mask(t: Any, x: Any, y: Any) -> Any:
    x[x > 1] = 0.5
    return x * y


RUNS = [each for name, each in sorted(globals().items()) if name.startswith("run_")]


@pytest.mark.parametrize("tracked", ["both", "x", "y"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_agrees_with_pytorch(run: Callable[..., Any], tracked: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    grads = []
    for t in (ddp, torch):
        a = t.tensor(numbers(2, 3).tolist(), dtype=t.float64, requires_grad=tracked != "y")
        b = t.tensor(numbers(2, 3, seed=1).tolist(), dtype=t.float64, requires_grad=tracked != "x")
        x = a * 1 if tracked != "y" else a
        out = run(t, x, b)
        if out.requires_grad:
            out.backward(t.tensor(numbers(*out.shape, seed=2).tolist(), dtype=t.float64))
        zero = t.zeros(2, 3, dtype=t.float64)
        grads.append(
            [(zero if not p.is_leaf or p.grad is None else p.grad).numpy() for p in (a, b)] + [out.detach().numpy()]
        )
    for ours, theirs in zip(*grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


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
    assert x.grad is not None
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
    assert x.grad is not None
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
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 0.0]


def test_a_constant_that_becomes_part_of_the_graph() -> None:
    total = ddp.zeros(2)
    w = leaf(3.0, 4.0)
    total += w
    total += w * w
    assert total.requires_grad
    assert not total.is_leaf
    total.sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [7.0, 9.0]


def test_on_a_leaf_only_without_grad() -> None:
    x = leaf(1.0)
    for write in (lambda: x.add_(1), lambda: x.zero_(), lambda: x.__setitem__(0, 2.0), lambda: x.copy_(ddp.ones(1))):
        with pytest.raises(InplaceError, match="no_grad"):
            write()
    with ddp.no_grad():
        x.add_(1)
    assert x.is_leaf
    assert x.tolist() == [2.0]


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
    assert y.grad is not None
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
    assert x.grad is not None
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
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 0.0, 0.0]


def test_a_checkpointed_region_computes_its_result_again() -> None:
    x = leaf(0.5, 1.0)
    y = ddp.autograd.checkpoint(lambda x: x.exp(), x)
    y += 1
    y.sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), np.exp([0.5, 1.0]), rtol=1e-6)


def test_a_sorted_number_is_no_view() -> None:
    x = ddp.tensor(2.0)
    x.sort()[0].add_(1)
    assert x.item() == 2.0
