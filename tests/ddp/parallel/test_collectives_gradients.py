"""Gradients of the collectives that autograd sees, against the same objective computed by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from collectives import Communicator
from ddp import nn, parallel
from tests.ddp.parallel.ranks import Mute, on_ranks

Tensors = list[ddp.Tensor]
REST = (2, 3)  # of the shape, behind axis 0
#: Which ranks' tensors require grad, and a rank that no gradient comes to.
WANTING: list[tuple[list[bool], int | None]] = [
    *(([True] * size, None) for size in (1, 2, 3, 4)),
    ([True] * 3, 1),
    ([True, False], None),
    ([False, True], None),
    ([False, False, True], None),
    ([True, False, True, False], None),
    ([False] * 3, None),
]


def uneven(rank: int) -> int:
    """How many rows a rank brings: all different, none on rank 1."""
    return (3, 0, 2, 5)[rank]


def parted(x: ddp.Tensor, lengths: Sequence[int]) -> Tensors:
    ends = np.cumsum(lengths)
    return [x[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def mean(xs: Tensors) -> ddp.Tensor:
    return sum(xs) / len(xs)


def joined(xs: Tensors) -> ddp.Tensor:
    return ddp.cat([x.reshape(1) if x.ndim == 0 else x for x in xs])


def last(xs: Tensors) -> ddp.Tensor:
    """That of the root of the cases: not rank 0 where there is another."""
    return xs[-1]


def even(rows: int, size: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(rows), size)]


def all_to_last(rows: int, size: int) -> list[int]:
    return [0] * (size - 1) + [rows]


class Case(NamedTuple):
    """One call: on each rank, on all ranks' tensors at once, and the shape that rank r of `size` brings."""

    here: Callable[[ddp.Tensor, Communicator], ddp.Tensor]
    at_once: Callable[[Tensors], Tensors]
    shape: Callable[[int, int], tuple[int, ...]]


def call(name: str, **options: Any) -> Callable[[ddp.Tensor, Communicator], ddp.Tensor]:
    """A call of `ddp.parallel`; an option may be a function of the communicator."""

    def here(x: ddp.Tensor, comm: Communicator) -> ddp.Tensor:
        given = {key: value(comm) if callable(value) else value for key, value in options.items()}
        return getattr(parallel, name)(x, comm=comm, **given)

    return here


def root(comm: Communicator) -> int:
    return comm.size - 1


def on_all(make: Callable[[Tensors], Any]) -> Callable[[Tensors], Tensors]:
    return lambda xs: [make(xs)] * len(xs)


def on_last(make: Callable[[Tensors], Any], elsewhere: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    """elsewhere: what the others have, from what the last rank has"""
    return lambda xs: [*[elsewhere(make(xs))] * (len(xs) - 1), make(xs)]


def split(make: Callable[[Tensors], Any], lengths: Callable[[int, int], list[int]] = even) -> Any:
    return lambda xs: parted(make(xs), lengths(len(make(xs)), len(xs)))


def no_rows(x: ddp.Tensor) -> ddp.Tensor:
    return x[:0]


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


def lengths_of_rows(comm: Communicator) -> list[int]:
    return [uneven(rank) for rank in range(comm.size)]


def lengths_to_last(comm: Communicator) -> list[int]:
    return all_to_last(4, comm.size)


def batch_norm(affine: bool) -> Case:
    """Two layers over all ranks' rows."""

    def normalized(make: Callable[..., Any], x: ddp.Tensor, **options: Any) -> ddp.Tensor:
        first, second = (make(2, affine=affine, **options).double() for _ in range(2))
        return second(first(x).sin())

    return Case(
        lambda x, c: normalized(parallel.SyncBatchNorm, x, comm=c),
        lambda xs: parted(normalized(nn.BatchNorm1d, joined(xs)), [len(x) for x in xs]),
        rows,
    )


SUM = Case(call("all_reduce"), on_all(sum), alike)
JOIN = Case(call("all_gather"), on_all(joined), rows)
GATHER = Case(call("gather", root=root), on_last(joined, no_rows), rows)
REDUCE = Case(call("reduce", root=root), on_last(sum, ddp.zeros_like), alike)
BROADCAST = Case(call("broadcast", root=root), on_all(last), alike)
SCATTER = Case(call("scatter", root=root), split(last), rows)
CASES = {
    "all_reduce": SUM,
    "all_reduce of 0-d": SUM._replace(shape=scalar),
    "all_reduce of nothing": SUM._replace(shape=empty),
    "all_reduce mean": Case(call("all_reduce", op="mean"), on_all(mean), alike),
    "reduce": REDUCE,
    "reduce of 0-d": REDUCE._replace(shape=scalar),
    "reduce mean": Case(call("reduce", op="mean", root=root), on_last(mean, ddp.zeros_like), alike),
    "reduce_scatter": Case(call("reduce_scatter"), split(sum), alike),
    "reduce_scatter mean": Case(call("reduce_scatter", op="mean"), split(mean), alike),
    "reduce_scatter by lengths": Case(call("reduce_scatter", lengths=lengths_to_last), split(sum, all_to_last), alike),
    "broadcast": BROADCAST,
    "broadcast of 0-d": BROADCAST._replace(shape=scalar),
    "gather": GATHER,
    "gather of 0-d": GATHER._replace(shape=scalar),
    "gather by lengths": GATHER._replace(here=call("gather", root=root, lengths=lengths_of_rows)),
    "all_gather": JOIN,
    "all_gather of 0-d": JOIN._replace(shape=scalar),
    "all_gather of nothing": JOIN._replace(shape=empty),
    "all_gather by lengths": JOIN._replace(here=call("all_gather", lengths=lengths_of_rows)),
    "all_gather of equal": Case(call("all_gather", lengths="equal"), JOIN.at_once, alike),
    "scatter": SCATTER,
    "scatter by lengths": Case(call("scatter", root=root, lengths=lengths_to_last), split(last, all_to_last), alike),
    "scatter from the root alone": SCATTER._replace(
        here=lambda x, c: SCATTER.here(x if c.rank == root(c) else None, c)
    ),
    "all_to_all": Case(call("all_to_all"), lambda xs: exchanged(xs, [even(len(x), len(xs)) for x in xs]), rows),
    "all_to_all by lengths": Case(
        call("all_to_all", lengths=lambda c: sent(c.rank, c.size)),
        lambda xs: exchanged(xs, [sent(rank, len(xs)) for rank in range(len(xs))]),
        lambda rank, size: (sum(sent(rank, size)), *REST),
    ),
    "SyncBatchNorm": batch_norm(True),
    "SyncBatchNorm without weights": batch_norm(False),
}


def values(case: Case, rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=case.shape(rank, size))


def loss_of(y: ddp.Tensor, rank: int) -> ddp.Tensor:
    """Another function on each rank, so that no mistake in who gets whose gradient can hide."""
    weights = np.random.default_rng(100 + rank).normal(size=tuple(y.shape))
    return (y.sin() * ddp.tensor(weights) + y * y * (rank + 1)).sum()


def whole(case: Case, wanting: Sequence[bool], mute: int | None) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """The results and the gradients of the sum of all losses, by one process."""
    size = len(wanting)
    xs = [ddp.tensor(values(case, rank, size), requires_grad=wants) for rank, wants in enumerate(wanting)]
    ys = case.at_once(xs)
    loss = sum(loss_of(y, rank) for rank, y in enumerate(ys) if rank != mute)
    if loss.requires_grad:
        loss.backward()
    return [y.detach().numpy() for y in ys], [None if x.grad is None else x.grad.numpy() for x in xs]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("wanting", "mute"), WANTING, ids=str)
def test_values_and_gradients_are_those_of_one_process(name: str, wanting: list[bool], mute: int | None) -> None:
    """Ranks without a gradient take part in those of others; under no_grad nothing is recorded."""
    case = CASES[name]

    def rank(comm: Communicator) -> Any:
        x = ddp.tensor(values(case, comm.rank, comm.size), requires_grad=wanting[comm.rank])
        y = case.here(x, comm)
        if y.requires_grad:
            loss_of(Mute.apply(y, comm.rank == mute), comm.rank).backward()
        with ddp.no_grad():
            alone = case.here(x, comm)
        assert not alone.requires_grad
        assert alone.equal(y)
        return y.detach().numpy(), y.requires_grad, None if x.grad is None else x.grad.numpy()

    results, gradients = whole(case, wanting, mute)
    ranks = on_ranks(rank, len(wanting))
    assert len({recorded for _, recorded, _ in ranks}) == 1
    for (y, _, g), result, gradient, wants in zip(ranks, results, gradients, wanting, strict=True):
        assert y.shape == result.shape
        assert_allclose(y, result, rtol=0, atol=1e-14)
        if wants:  # None where a rank's values count for nothing
            assert_allclose(0.0 if g is None else g, 0.0 if gradient is None else gradient, rtol=0, atol=1e-13)
        else:
            assert g is None


def derivatives(losses: Sequence[ddp.Tensor], inputs: Sequence[Tensors], ranks: Sequence[int]) -> list[Any]:
    """The third derivatives of losses with respect to the inputs of these ranks, by way of a number for each rank."""
    flat = [x for tensors in inputs for x in tensors]
    results: Any = []
    for order in range(3):
        results = iter(ddp.autograd.grad(sum(losses), flat, create_graph=True, allow_unused=True))
        per_rank = [[next(results) for _ in tensors] for tensors in inputs]
        pairs = zip(per_rank, ranks, strict=True)
        # An unused input counts for 0, as does the second derivative of what is linear.
        losses = [sum([loss_of(g, rank + order) for g in gs if g is not None]) for gs, rank in pairs]
    return [[0.0 if g is None else g.detach().numpy() for g in gs] for gs in per_rank]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if " of " in name else []) for name in CASES]
)
@pytest.mark.parametrize("wanting", [[False, True], [True, False, True]], ids=str)
def test_third_derivatives_are_those_of_one_process(name: str, wanting: list[bool]) -> None:
    """Each rank's loss has a factor that requires grad, so that ranks whose x does not have something to differ."""
    case = CASES[name]

    def inputs_of(rank: int) -> Tensors:
        x = ddp.tensor(values(case, rank, len(wanting)), requires_grad=wanting[rank])
        factor = ddp.tensor(1.0 + rank, dtype=ddp.float64, requires_grad=True)
        return [factor, x]

    def loss(y: ddp.Tensor, factor: ddp.Tensor, rank: int) -> ddp.Tensor:
        if rank == 1:  # linear
            return y.sum() + factor**4
        return loss_of(y, rank) * factor.exp() + factor**4

    def rank(comm: Communicator) -> Any:
        factor, x = inputs_of(comm.rank)
        y = loss(case.here(x, comm), factor, comm.rank)
        (actual,) = derivatives([y], [[each for each in (factor, x) if each.requires_grad]], [comm.rank])
        return actual

    whole = [inputs_of(i) for i in range(len(wanting))]
    ys = case.at_once([x for _, x in whole])
    losses = [loss(y, factor, i) for i, (y, (factor, _)) in enumerate(zip(ys, whole, strict=True))]
    wanted = [[x for x in tensors if x.requires_grad] for tensors in whole]
    expected = derivatives(losses, wanted, range(len(wanting)))
    for ours, theirs in zip(on_ranks(rank, len(wanting)), expected, strict=True):
        for g, reference in zip(ours, theirs, strict=True):
            assert_allclose(g, reference, rtol=1e-11, atol=1e-11)
