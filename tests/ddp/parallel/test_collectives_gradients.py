"""Gradients of the collectives that autograd sees, against the same objective computed by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from collectives import Communicator
from ddp import nn, parallel

Tensors = list[ddp.Tensor]
REST = (2, 3)  # of the shape, behind axis 0


def uneven(rank: int) -> int:
    """How many rows a rank brings: all different, none on rank 1."""
    return (3, 0, 2, 5)[rank]


def parted(x: ddp.Tensor, lengths: Sequence[int]) -> Tensors:
    ends = np.cumsum(lengths)
    return [x[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def total(xs: Tensors) -> ddp.Tensor:
    result = xs[0]
    for x in xs[1:]:
        result = result + x
    return result


def joined(xs: Tensors) -> ddp.Tensor:
    return ddp.cat([x.reshape(1) if x.ndim == 0 else x for x in xs])


def even(rows: int, size: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(rows), size)]


class Case:
    """One call: on each rank, on all ranks' tensors at once, and the shape that rank r of `size` brings."""

    def __init__(
        self,
        here: Callable[[ddp.Tensor, Communicator], ddp.Tensor],
        at_once: Callable[[Tensors], Tensors],
        shape: Callable[[int, int], tuple[int, ...]],
    ) -> None:
        self.here = here
        self.at_once = at_once
        self.shape = shape


def last(xs: Any) -> int:
    """The root of the cases: not rank 0 where there is another."""
    return (xs if isinstance(xs, int) else len(xs)) - 1


def only_last(xs: Tensors, y: ddp.Tensor, elsewhere: ddp.Tensor) -> Tensors:
    return [*[elsewhere] * last(xs), y]


def sent(rank: int, size: int) -> list[int]:
    """How many rows a rank sends to each in the uneven all_to_all."""
    return [(rank + 2 * to) % 3 for to in range(size)]


def exchanged(xs: Tensors, lengths: list[list[int]]) -> Tensors:
    parts = [parted(x, mine) for x, mine in zip(xs, lengths, strict=True)]
    return [ddp.cat([theirs[to] for theirs in parts]) for to in range(len(xs))]


def alike(rank: int, size: int) -> tuple[int, ...]:
    return (4, *REST)


def rows(rank: int, size: int) -> tuple[int, ...]:
    return (uneven(rank), *REST)


def scalar(rank: int, size: int) -> tuple[int, ...]:
    return ()


def empty(rank: int, size: int) -> tuple[int, ...]:
    return (0, 3)


def lengths_of(xs: Tensors) -> list[int]:
    """The uneven lengths of a split of 4 rows."""
    return [4 if rank == last(xs) else 0 for rank in range(len(xs))]


SUM = Case(lambda x, c: parallel.all_reduce(x, "sum", c), lambda xs: [total(xs)] * len(xs), alike)
JOIN = Case(lambda x, c: parallel.all_gather(x, c), lambda xs: [joined(xs)] * len(xs), rows)
GATHER = Case(
    lambda x, c: parallel.gather(x, c.size - 1, c), lambda xs: only_last(xs, joined(xs), joined(xs)[:0]), rows
)
REDUCE = Case(
    lambda x, c: parallel.reduce(x, "sum", c.size - 1, c), lambda xs: only_last(xs, total(xs), total(xs) * 0), alike
)
CASES = {
    "all_reduce": SUM,
    "all_reduce of 0-d": Case(SUM.here, SUM.at_once, scalar),
    "all_reduce of nothing": Case(SUM.here, SUM.at_once, empty),
    "all_reduce mean": Case(
        lambda x, c: parallel.all_reduce(x, "mean", c), lambda xs: [total(xs) / len(xs)] * len(xs), alike
    ),
    "reduce": REDUCE,
    "reduce of 0-d": Case(REDUCE.here, REDUCE.at_once, scalar),
    "reduce mean": Case(
        lambda x, c: parallel.reduce(x, "mean", c.size - 1, c),
        lambda xs: only_last(xs, total(xs) / len(xs), total(xs) * 0),
        alike,
    ),
    "reduce_scatter": Case(
        lambda x, c: parallel.reduce_scatter(x, "sum", c), lambda xs: parted(total(xs), even(4, len(xs))), alike
    ),
    "reduce_scatter mean": Case(
        lambda x, c: parallel.reduce_scatter(x, "mean", c),
        lambda xs: parted(total(xs) / len(xs), even(4, len(xs))),
        alike,
    ),
    "reduce_scatter by lengths": Case(
        lambda x, c: parallel.reduce_scatter(x, "sum", c, lengths=[0] * (c.size - 1) + [4]),
        lambda xs: parted(total(xs), lengths_of(xs)),
        alike,
    ),
    "broadcast": Case(lambda x, c: parallel.broadcast(x, c.size - 1, c), lambda xs: [xs[-1]] * len(xs), alike),
    "broadcast of 0-d": Case(lambda x, c: parallel.broadcast(x, c.size - 1, c), lambda xs: [xs[-1]] * len(xs), scalar),
    "gather": GATHER,
    "gather of 0-d": Case(GATHER.here, GATHER.at_once, scalar),
    "gather by lengths": Case(
        lambda x, c: parallel.gather(x, c.size - 1, c, lengths=[uneven(r) for r in range(c.size)]), GATHER.at_once, rows
    ),
    "all_gather": JOIN,
    "all_gather of 0-d": Case(JOIN.here, JOIN.at_once, scalar),
    "all_gather of nothing": Case(JOIN.here, JOIN.at_once, empty),
    "all_gather by lengths": Case(
        lambda x, c: parallel.all_gather(x, c, lengths=[uneven(r) for r in range(c.size)]), JOIN.at_once, rows
    ),
    "all_gather of equal": Case(lambda x, c: parallel.all_gather(x, c, lengths="equal"), JOIN.at_once, alike),
    "scatter": Case(
        lambda x, c: parallel.scatter(x, c.size - 1, c), lambda xs: parted(xs[-1], even(len(xs[-1]), len(xs))), rows
    ),
    "scatter by lengths": Case(
        lambda x, c: parallel.scatter(x, c.size - 1, c, lengths=[0] * (c.size - 1) + [4]),
        lambda xs: parted(xs[-1], lengths_of(xs)),
        alike,
    ),
    "scatter from the root alone": Case(
        lambda x, c: parallel.scatter(x if c.rank == c.size - 1 else None, c.size - 1, c),
        lambda xs: parted(xs[-1], even(len(xs[-1]), len(xs))),
        rows,
    ),
    "all_to_all": Case(
        lambda x, c: parallel.all_to_all(x, c), lambda xs: exchanged(xs, [even(len(x), len(xs)) for x in xs]), rows
    ),
    "all_to_all by lengths": Case(
        lambda x, c: parallel.all_to_all(x, c, lengths=sent(c.rank, c.size)),
        lambda xs: exchanged(xs, [sent(rank, len(xs)) for rank in range(len(xs))]),
        lambda rank, size: (sum(sent(rank, size)), *REST),
    ),
}


def normalized(layer: Any, x: ddp.Tensor) -> ddp.Tensor:
    return layer.double()(x)


CASES["SyncBatchNorm"] = Case(
    lambda x, c: normalized(parallel.SyncBatchNorm(2, comm=c), normalized(parallel.SyncBatchNorm(2, comm=c), x).sin()),
    lambda xs: parted(
        normalized(nn.BatchNorm1d(2), normalized(nn.BatchNorm1d(2), joined(xs)).sin()), [len(x) for x in xs]
    ),
    rows,
)


def values(case: Case, rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=case.shape(rank, size))


def loss_of(y: ddp.Tensor, rank: int) -> ddp.Tensor:
    """Another function on each rank, so that no mistake in who gets whose gradient can hide."""
    weights = np.random.default_rng(100 + rank).normal(size=tuple(y.shape))
    return (y.sin() * ddp.tensor(weights) + y * y * (rank + 1)).sum()


def whole(case: Case, wanting: Sequence[bool]) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """The results and the gradients of the sum of all losses, by one process."""
    size = len(wanting)
    xs = [ddp.tensor(values(case, rank, size), requires_grad=wants) for rank, wants in enumerate(wanting)]
    ys = case.at_once(xs)
    loss = total([loss_of(y, rank) for rank, y in enumerate(ys)])
    if loss.requires_grad:
        loss.backward()
    return [y.detach().numpy() for y in ys], [None if x.grad is None else x.grad.numpy() for x in xs]


def check(case: Case, wanting: Sequence[bool]) -> None:
    def rank(comm: Communicator) -> tuple[np.ndarray, bool, np.ndarray | None]:
        x = ddp.tensor(values(case, comm.rank, comm.size), requires_grad=wanting[comm.rank])
        y = case.here(x, comm)
        loss = loss_of(y, comm.rank)
        if y.requires_grad:
            loss.backward()
        return y.detach().numpy(), y.requires_grad, None if x.grad is None else x.grad.numpy()

    results, gradients = whole(case, wanting)
    ranks = collectives.run_threads(rank, len(wanting), timeout=20)
    assert len({recorded for _, recorded, _ in ranks}) == 1
    for (y, _, g), result, gradient, wants in zip(ranks, results, gradients, wanting, strict=True):
        assert y.shape == result.shape
        assert_allclose(y, result, rtol=0, atol=1e-14)
        if wants:  # None where a rank's values count for nothing
            assert_allclose(0.0 if g is None else g, 0.0 if gradient is None else gradient, rtol=0, atol=1e-13)
        else:
            assert g is None


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(name: str) -> None:
    for size in (1, 2, 3, 4):
        check(CASES[name], [True] * size)


@pytest.mark.parametrize("name", CASES)
def test_ranks_without_a_gradient_take_part_in_those_of_others(name: str) -> None:
    for wanting in ([True, False], [False, True], [False, False, True], [True, False, True, False], [False] * 3):
        check(CASES[name], wanting)


@pytest.mark.parametrize("name", CASES)
def test_under_no_grad_the_values_are_the_same_and_nothing_is_recorded(name: str) -> None:
    case = CASES[name]

    def rank(comm: Communicator) -> tuple[np.ndarray, bool]:
        x = ddp.tensor(values(case, comm.rank, comm.size), requires_grad=True)
        with ddp.no_grad():
            y = case.here(x, comm)
        return y.numpy(), y.requires_grad

    results, _ = whole(case, [False] * 3)
    for (y, recorded), result in zip(collectives.run_threads(rank, 3, timeout=20), results, strict=True):
        assert not recorded
        assert_allclose(y, result, rtol=0, atol=1e-14)


def derivatives(losses: Sequence[ddp.Tensor], inputs: Sequence[Tensors], ranks: Sequence[int]) -> list[Any]:
    """The third derivatives of losses with respect to the inputs of these ranks, by way of a number for each rank."""
    flat = [x for tensors in inputs for x in tensors]
    results: Any = []
    for order in range(3):
        results = iter(ddp.autograd.grad(total([*losses]), flat, create_graph=True, allow_unused=True))
        per_rank = [[next(results) for _ in tensors] for tensors in inputs]
        pairs = zip(per_rank, ranks, strict=True)
        # An unused input counts for 0, as does the second derivative of what is linear.
        losses = [total([loss_of(g, rank + order) for g in gs if g is not None]) for gs, rank in pairs]
    return [[0.0 if g is None else g.detach().numpy() for g in gs] for gs in per_rank]


@pytest.mark.parametrize("name", CASES)
def test_third_derivatives_are_those_of_one_process(name: str) -> None:
    """Each rank's loss has a factor that requires grad, so that ranks whose x does not have something to differ."""
    case = CASES[name]

    def inputs_of(rank: int, wanting: Sequence[bool]) -> Tensors:
        x = ddp.tensor(values(case, rank, len(wanting)), requires_grad=wanting[rank])
        factor = ddp.tensor(1.0 + rank, dtype=ddp.float64, requires_grad=True)
        return [factor, x]

    def loss(y: ddp.Tensor, factor: ddp.Tensor, rank: int) -> ddp.Tensor:
        if rank == 1:  # linear
            return y.sum() + factor**4
        return loss_of(y, rank) * factor.exp() + factor**4

    for wanting in ([True] * 3, [False, True], [True, False, True]):

        def rank(comm: Communicator, wanting: Sequence[bool] = wanting) -> Any:
            factor, x = inputs_of(comm.rank, wanting)
            y = loss(case.here(x, comm), factor, comm.rank)
            (actual,) = derivatives([y], [[each for each in (factor, x) if each.requires_grad]], [comm.rank])
            return actual

        whole = [inputs_of(i, wanting) for i in range(len(wanting))]
        ys = case.at_once([x for _, x in whole])
        losses = [loss(y, factor, i) for i, (y, (factor, _)) in enumerate(zip(ys, whole, strict=True))]
        wanted = [[x for x in tensors if x.requires_grad] for tensors in whole]
        expected = derivatives(losses, wanted, range(len(wanting)))
        for ours, theirs in zip(collectives.run_threads(rank, len(wanting), timeout=20), expected, strict=True):
            for g, reference in zip(ours, theirs, strict=True):
                assert_allclose(g, reference, rtol=1e-11, atol=1e-11)
