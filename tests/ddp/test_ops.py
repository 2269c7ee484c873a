"""Every op against finite differences, and against PyTorch, from the tables in `cases`.

A case is a function of a module `t` and of tensors, written so that `t` may be `ddp` or `torch`. A test proves that the
tables miss no op.
"""

from __future__ import annotations

import functools
import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
import ddp.fft  # its ops are known from then on
from ddp._engine import Node
from ddp.ops import OPS
from tests.ddp.cases.table import Case, draw, strided, with_strides

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py") if path.stem != "table")
TABLES = [importlib.import_module(f"tests.ddp.cases.{family}") for family in FAMILIES]
CASES = with_strides([case for table in TABLES for case in table.CASES])
OF_OP = {case.op: [each for each in CASES if each.op == case.op] for case in CASES}
# Checked on its own below: one is random, the other needs a second device to be of use. A table may name more.
ELSEWHERE = {"dropout", "transfer"}.union(*(getattr(table, "ELSEWHERE", ()) for table in TABLES))


def leaves(case: Case, dtype: Any = np.float64) -> list[ddp.Tensor]:
    made = []
    for array in case.inputs:
        floating = array.dtype == np.float64
        array = array if not floating or array.dtype == dtype else array.astype(dtype)
        made.append(ddp.from_numpy(array).requires_grad_(floating))
    return made


def cases_of(op: str) -> Iterator[Case]:
    """Prints which case it is, so that a failure names it."""
    for case in OF_OP[op]:
        print(case.label)
        yield case


def ops_below(y: ddp.Tensor) -> set[str]:
    result = set()
    stack = [y.edge]
    while stack:
        edge = stack.pop()
        if isinstance(edge, Node):
            result.add(edge.op.name)
            stack.extend(edge.edges or ())
    return result


def test_the_table_covers_every_op() -> None:
    assert {case.op for case in CASES} | ELSEWHERE == set(OPS)


def test_every_op_has_the_awkward_cases() -> None:
    for awkward in ("empty", "non-contiguous"):
        having = {case.op for case in CASES if awkward in case.label}
        assert {case.op for case in CASES} - having == set(), awkward


@pytest.mark.parametrize("op", OF_OP)
def test_gradcheck(op: str, count: Callable[[int, int], int]) -> None:
    checked = count(1, len(OF_OP[op]))  # the gradients of every case are compared with PyTorch's below
    for i, case in enumerate(cases_of(op)):
        inputs = leaves(case)
        assert op in ops_below(case.fn(ddp, *inputs))
        assert i >= checked or ddp.autograd.gradcheck(functools.partial(case.fn, ddp), inputs)


@pytest.mark.parametrize("op", OF_OP)
def test_agrees_with_pytorch(op: str, torch: Any) -> None:
    kinds = ((np.float64, 1e-10, 1e-12), (np.float32, 2e-5, 2e-6), (np.float16, 2e-2, 2e-2))
    for case, dtype, rtol, atol in ((case, *kind) for case in cases_of(op) for kind in kinds):
        ours = leaves(case, dtype)
        theirs = [torch.from_numpy(x.detach().numpy().copy()).requires_grad_(x.requires_grad) for x in ours]
        try:
            y, expected = case.fn(ddp, *ours), case.fn(torch, *theirs)
        except NotImplementedError:  # PyTorch has no float16 form of every op on the CPU
            assert dtype is np.float16
            continue
        assert str(y.dtype) == str(expected.dtype).removeprefix("torch.")
        assert y.shape == tuple(expected.shape)
        assert_allclose(y.detach().numpy(), expected.detach().numpy(), rtol, atol, err_msg=f"{dtype}")
        g = draw(*y.shape, seed=9).astype(y.dtype)
        y.backward(ddp.from_numpy(g))
        expected.backward(torch.from_numpy(g))
        for x, reference in zip(ours, theirs, strict=True):
            assert (x.grad is None) == (reference.grad is None)
            if x.grad is not None:
                assert x.grad.dtype == x.dtype
                assert x.grad.shape == x.shape
                assert_allclose(x.grad.numpy(), reference.grad.numpy(), rtol, atol, err_msg=f"{dtype}")


@pytest.mark.parametrize("op", OF_OP)
def test_a_result_may_be_changed_in_place_where_pytorch_allows_it(op: str, torch: Any) -> None:
    def gradients(t: Any, case: Case, inputs: list[Any]) -> list[Any]:
        y = case.fn(t, *inputs)
        y.mul_(0.5)
        y += 1
        y.backward(t.from_numpy(draw(*y.shape, seed=9)))
        return [x.grad for x in inputs]

    for case in cases_of(op):
        ours = leaves(case)
        theirs = [torch.from_numpy(x.detach().numpy().copy()).requires_grad_(x.requires_grad) for x in ours]
        try:
            expected = gradients(torch, case, theirs)
        except RuntimeError:
            continue
        for dx, reference in zip(gradients(ddp, case, ours), expected, strict=True):
            assert (dx is None) == (reference is None)
            if dx is not None:
                assert_allclose(dx.numpy(), reference.numpy(), 1e-9, 1e-10)


@pytest.mark.parametrize("op", OF_OP)
def test_a_gradient_is_computed_without_the_others(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = OPS[op].backward
    plan = OPS[op].plan

    def watched(xp: Any, g: Any, needs: Any, saved: Any, residual: Any, *outs: Any) -> Any:
        assert all(x is None for x, position in zip(saved, plan(needs), strict=True) if position is None)
        actual = backward(xp, g, needs, saved, residual, *outs)
        assert all(need or dx is None for dx, need in zip(actual, needs, strict=True))
        return actual

    monkeypatch.setattr(OPS[op], "backward", watched)
    for case in cases_of(op):
        inputs = leaves(case)
        y = case.fn(ddp, *inputs)
        how = {"grad_outputs": ddp.ones_like(y), "retain_graph": True, "allow_unused": True}
        wanted = [x for x in inputs if x.requires_grad]
        for x, expected in zip(wanted, ddp.autograd.grad(y, wanted, **how), strict=True):
            (dx,) = ddp.autograd.grad(y, x, **how)
            assert (dx is None) == (expected is None)
            if dx is not None:
                assert_allclose(dx.numpy(), expected.numpy(), 1e-12, 1e-12)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(4, 5), (), (0, 3)])
def test_dropout(p: float, shape: Any) -> None:
    def fn(x: ddp.Tensor) -> ddp.Tensor:
        ddp.manual_seed(5)
        return ddp.nn.functional.dropout(x, p) * 2

    x = ddp.from_numpy(draw(*shape)).requires_grad_()
    assert ddp.autograd.gradcheck(fn, x)


def test_transfer_passes_gradients() -> None:
    from ddp._tensor.storage import transfer

    for array in (draw(2, 3), draw(), draw(0, 3), strided(draw(2, 3))):
        x = ddp.from_numpy(array).requires_grad_()
        assert ops_below(transfer(x, ddp.device("cpu"))) == {"transfer"}
        assert ddp.autograd.gradcheck(lambda x: transfer(x, ddp.device("cpu")), x)


def test_nodes_go_by_reference_counting() -> None:
    gc.collect()
    gc.disable()
    try:
        for case in CASES:
            for backward in (False, True):
                y = case.fn(ddp, *leaves(case))
                alive = weakref.ref(y.edge)
                if backward:
                    y.backward(ddp.ones_like(y.detach()))
                del y
                assert alive() is None, f"{case.op}-{case.label}"
    finally:
        gc.enable()


def arrays(held: Any) -> list[Any]:
    if isinstance(held, np.ndarray):
        return [held] if held.size else []
    if isinstance(held, tuple | list):
        return [array for each in held for array in arrays(each)]
    if isinstance(held, dict):
        return arrays(list(held.values()))
    return []


def test_only_declared_values_are_kept_of_inputs_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a residual has no version that would tell of a write."""
    shared: set[str] = set()

    def watched(op: Any) -> Any:
        forward = op.forward

        def run(xp: Any, *inputs: Any, **parameters: Any) -> Any:
            out, residual = forward(xp, *inputs, **parameters)
            given = arrays(inputs)
            made = arrays(out if isinstance(out, tuple) else (out,))
            within = parameters.get("within", False)
            pairs = [(kept, array) for kept in arrays(residual) for array in given + made]
            pairs += [(result, array) for result in made for array in given if not (op.view or within)]
            if any(np.shares_memory(*pair) for pair in pairs):
                shared.add(op.name)
            return out, residual

        return run

    for op in OPS.values():
        monkeypatch.setattr(op, "forward", watched(op))
    for case in CASES:
        case.fn(ddp, *leaves(case))
    assert not shared
