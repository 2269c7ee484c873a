"""autograd.backward, grad and gradcheck; gradcheck must find what is wrong, not only pass what is right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, GradcheckError, GraphError, GraphFreedError
from ddp.ops import OPS, Op


def leaf(*values: float) -> ddp.Tensor:
    return ddp.tensor(values, dtype=ddp.float64, requires_grad=True)


@pytest.fixture
def wrong_op() -> Iterator[Op]:
    """x*x with a factor forgotten."""

    def forward(xp: Any, x: Any) -> Any:
        return x * x, None

    def backward(xp: Any, g: Any, needs: Any, saved: Any, residual: Any) -> Any:
        return (g * saved[0],)

    yield Op("wrong", forward, backward, inputs=("x",), saves=("x",))
    del OPS["wrong"]


class TestGradcheck:
    def test_names_input_element_and_values(self, wrong_op: Op) -> None:
        from ddp._tensor.base import apply

        with pytest.raises(GradcheckError, match=r"input 1 of shape \(2,\), element \[0\]: backward gives .*, differ"):
            ddp.autograd.gradcheck(lambda a, x: a + apply(wrong_op, (x,)), (leaf(1.0, 2.0), leaf(1.5, 2.5)))

    def test_false_in_place_of_an_error(self, wrong_op: Op) -> None:
        from ddp._tensor.base import apply

        assert not ddp.autograd.gradcheck(lambda x: apply(wrong_op, (x,)), leaf(1.0), raise_exception=False)
        assert ddp.autograd.gradcheck(
            lambda x: x * x, leaf(1.0), raise_exception=False, nondet_tol=1e-3, fast_mode=True
        )

    def test_refusals(self) -> None:
        with pytest.raises(DtypeError, match="float32"):
            ddp.autograd.gradcheck(lambda x: x * 2, ddp.ones(2, requires_grad=True))
        with pytest.raises(ArgumentError, match="no input requires grad"):
            ddp.autograd.gradcheck(lambda x: x * 2, ddp.ones(2))
        with pytest.raises(ArgumentError, match="repeats"):
            ddp.autograd.gradcheck(lambda x: x * 2, leaf(1.0).detach().expand(3).requires_grad_())
        with pytest.raises(GradcheckError, match="no output depends"):
            ddp.autograd.gradcheck(lambda x: x.detach(), leaf(1.0))


class TestGradRunsOnlyWhatLeadsToTheInputs:
    def test_beside_an_input_nothing_is_freed(self) -> None:
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        h = x.exp()
        assert ddp.autograd.grad((h * y).sum(), y)[0].tolist() == h.tolist()
        h.sum().backward()
        assert x.grad.tolist() == h.tolist()

    def test_what_does_not_lead_there_is_not_asked(self) -> None:
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        h = x.detach().requires_grad_() * 1
        k = h.exp()
        with ddp.no_grad():
            k.mul_(2)  # exp's backward would raise VersionError
        assert ddp.autograd.grad(k.sum() + (y * 3).sum(), y)[0].tolist() == [3.0, 3.0]

    def test_an_input_above_another(self) -> None:
        x = leaf(1.0, 2.0)
        h = x * 3
        dx, dh, again = ddp.autograd.grad((h * h).sum() + x.sum(), (x, h, h))
        assert dh.tolist() == again.tolist() == [6.0, 12.0]
        assert dx.tolist() == [19.0, 37.0]

    def test_freed_beside_and_freed_in_between(self) -> None:
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        h = x.exp()
        h.sum().backward()
        assert ddp.autograd.grad((h + y).sum(), y)[0].tolist() == [1.0, 1.0]
        with pytest.raises(GraphFreedError, match="exp"):
            ddp.autograd.grad((h + y).sum(), x)


class TestGrad:
    def test_results_are_arrays_of_their_own(self) -> None:
        x, y = leaf(1.0, 2.0), leaf(1.0, 2.0)
        gx, gy = ddp.autograd.grad((x + y).sum(), (x, y))
        gx.add_(1)
        assert gy.tolist() == [1.0, 1.0]

    def test_unused(self) -> None:
        x, y = leaf(1.0), leaf(1.0)
        with pytest.raises(GraphError, match="input 1"):
            ddp.autograd.grad(x * 2, [x, y])
        assert ddp.autograd.grad(x * 2, [x, y], allow_unused=True)[1] is None
        assert ddp.autograd.grad(x * 2, [x, y], None, True, False, True, True)[1] is None  # PyTorch's order
        zeros = ddp.autograd.grad(x * 2, [x, y], materialize_grads=True)[1]
        assert zeros is not None
        assert zeros.tolist() == ddp.zeros_like(y).tolist()


class TestBackward:
    def test_numbers_must_match(self) -> None:
        x = leaf(2.0)
        with pytest.raises(ArgumentError, match="2 gradients were given for 1"):
            ddp.autograd.backward([x * 2], [leaf(1.0), leaf(1.0)])


@pytest.mark.parametrize("scope", [ddp.no_grad, ddp.inference_mode, ddp.no_grad(), ddp.inference_mode()])
def test_a_decorated_generator_runs_its_steps_without_grad(scope: Any) -> None:
    @scope
    def steps() -> Any:
        try:
            got = yield ddp.is_grad_enabled()
        except ValueError:
            got = "caught"
        yield got, ddp.is_grad_enabled()
        return 3

    generator = steps()
    assert next(generator) is False
    assert ddp.is_grad_enabled()
    assert generator.send("sent") == ("sent", False)
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == 3
    generator = steps()
    next(generator)
    assert generator.throw(ValueError) == ("caught", False)
    generator.close()
    assert ddp.is_grad_enabled()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_decorated_generator_cleans_up_without_grad(error: Any) -> None:
    p = leaf(1.0)

    @ddp.no_grad()
    def swapped() -> Any:
        saved = p.clone()
        p.zero_()
        try:
            yield
        finally:
            p.copy_(saved)

    with pytest.raises(error), contextlib.contextmanager(swapped)():
        raise error
    assert p.tolist() == [1.0]
    for _ in swapped():
        break
    assert p.tolist() == [1.0]
    assert ddp.is_grad_enabled()


@pytest.mark.parametrize("scope", [ddp.no_grad, ddp.inference_mode, ddp.enable_grad])
def test_decorators_need_no_parentheses(scope: Any) -> None:
    with ddp.no_grad():
        assert scope(ddp.is_grad_enabled)() is (scope is ddp.enable_grad)
