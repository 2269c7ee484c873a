"""How ranks come together in collectives that autograd sees: who takes part, in what order, and what goes wrong."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives import Communicator, CommunicatorClosed, MismatchError
from ddp import parallel
from ddp.errors import DtypeError, GraphError
from ddp.parallel import collectives as differentiable
from tests.ddp.parallel.ranks import on_each_of, on_ranks
from tests.ddp.parallel.recorder import Recorder, calls_of

CALLS = ("all_reduce", "reduce", "broadcast", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all")


def weights() -> ddp.Tensor:
    return ddp.ones(4, 2, dtype=ddp.float64, requires_grad=True)


# What is called ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "back"),
    [
        ("all_reduce", "all_reduce"),
        ("reduce", "broadcast"),
        ("reduce_scatter", "all_gather"),
        ("all_gather", "reduce_scatter"),
        ("broadcast", "reduce"),
        ("gather", "scatter"),
        ("scatter", "gather"),
        ("all_to_all", "all_to_all"),
    ],
)
def test_forward_and_backward_are_one_collective_each_after_one_small_message(name: str, back: str) -> None:
    function = getattr(parallel, name)

    def with_gradient(comm: Any) -> None:
        function(weights(), comm=comm).sum().backward()

    def without(comm: Any) -> None:
        function(weights().detach(), comm=comm)

    def no_grad(comm: Any) -> None:
        with ddp.no_grad():
            function(weights(), comm=comm)

    assert calls_of(with_gradient) == ["all_gather", name, back]
    assert calls_of(without) == ["all_gather", name]
    assert calls_of(no_grad) == [name]


def test_backward_calls_in_the_reverse_order_of_forward_whatever_else_the_graph_holds() -> None:
    def rank(comm: Communicator) -> Any:
        calls: list[str] = []
        seen = Recorder(comm, calls)
        w = weights()
        a = parallel.all_gather(w, seen)
        for _ in range(comm.rank):  # ranks compute different things in between, of different depth
            a = a * 2
        b = parallel.all_to_all(w.exp() if comm.rank else w, seen)
        c = parallel.reduce_scatter(a + 1, comm=seen)
        d = parallel.all_reduce(w.sum() if comm.rank else w.mean(), comm=seen)
        del calls[:]
        first = (c.sum() * d, b.sum())
        sum(first if comm.rank else first[::-1]).backward()
        return calls

    for calls in on_ranks(rank, 3):
        assert calls == ["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]


# What backward may ask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ddp.float16, ddp.bfloat16, ddp.float32])
@pytest.mark.parametrize("op", ["sum", "mean"])
@on_each_of(2)
def test_gradients_have_the_dtype_of_what_they_are_of(comm: Communicator, dtype: Any, op: str) -> None:
    for function in (parallel.all_reduce, parallel.reduce, parallel.reduce_scatter):
        w = ddp.ones(4, 2, dtype=dtype, requires_grad=True)
        y = function(w, op, comm=comm)
        assert y.dtype == dtype
        y.sum().backward()
        assert w.grad is not None
        assert w.grad.dtype == dtype
        scale = comm.size if function is parallel.all_reduce else 1
        assert (w.grad.float().numpy() == scale / (comm.size if op == "mean" else 1)).all()


def test_results_have_memory_of_their_own() -> None:
    def rank(comm: Communicator) -> None:
        for name in CALLS:
            x = ddp.ones(4, 2)
            y = getattr(parallel, name)(x, comm=comm)
            y.zero_()
            assert (x.numpy() == 1).all(), name

    on_ranks(rank)
    on_ranks(rank, 1)


# Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["max", "min", "prod"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter"])
def test_a_reduction_without_a_gradient_says_so_on_every_rank(name: str, op: str) -> None:
    function = getattr(parallel, name)

    def rank(comm: Communicator) -> None:
        x = ddp.ones(4, requires_grad=comm.rank == 1)
        with pytest.raises(GraphError, match=f"{op} over ranks has no gradient"):
            function(x, op, comm=comm)
        with ddp.no_grad():
            function(x, op, comm=comm)
        function(x.detach(), op, comm=comm)  # and everybody goes on

    on_ranks(rank)


def test_what_is_no_tensor_is_named_before_anything_is_called() -> None:
    comm = collectives.init("single")
    for name in CALLS:
        with pytest.raises(DtypeError, match=f"{name}: expected a tensor, got ndarray"):
            getattr(parallel, name)(np.ones(3), comm=comm)
    with pytest.raises(DtypeError, match="on the root"):
        parallel.scatter(None, comm=comm)
    with pytest.raises(ValueError, match="0-d"):
        parallel.all_to_all(ddp.ones(()), comm)
    with pytest.raises(ValueError, match="0-d"):
        parallel.reduce_scatter(ddp.ones(()), comm=comm)
    with pytest.raises(ValueError, match=r"lengths \[2\] add up to 2, x has 3 rows"):
        parallel.scatter(ddp.ones(3), comm=comm, lengths=[2])
    with pytest.raises(ValueError, match="root should be a rank"):
        parallel.gather(ddp.ones(3), 1, comm)
    with pytest.raises(ValueError, match="one of sum"):
        parallel.all_reduce(ddp.ones(3), "median", comm)


@on_each_of(2)
def test_a_rank_in_no_grad_among_others_that_are_not_is_a_mismatch(comm: Communicator) -> None:
    with ddp.set_grad_enabled(comm.rank == 0), pytest.raises(MismatchError):
        parallel.all_reduce(weights(), comm=comm)


def test_closing_a_communicator_closes_its_twin_and_leaves_nothing() -> None:
    before = threading.active_count()
    known = list(differentiable._duplicates)  # of tests before, and the world's, which lives as long as this process

    def rank(comm: Communicator) -> None:
        for order in range(3):
            other = comm.duplicate()
            y = parallel.all_gather(weights(), other)
            twin = differentiable.private_duplicate(other)
            if order == comm.rank:  # at any time, whatever the others do
                comm.barrier()
            other.close()
            if order != comm.rank:
                comm.barrier()
            again = partial(parallel.all_reduce, ddp.ones(1), comm=other)
            for use in (again, y.sum().backward, twin.barrier):
                with pytest.raises(CommunicatorClosed):
                    use()

    on_ranks(rank, 3)
    gc.collect()
    assert not [comm for comm in differentiable._duplicates if comm not in known]
    assert threading.active_count() <= before
