"""SyncBatchNorm on n ranks equals BatchNorm on the whole batch: values, every gradient, running statistics."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import DtypeError, GraphError, ShapeError
from ddp.parallel.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from tests.ddp.parallel.ranks import Tensors, assert_same, on_each_of, on_ranks
from tests.ddp.parallel.recorder import calls_of

C = 3
SHARDS = [[6], [3, 3], [5, 1], [1, 1], [1, 1, 1], [4, 0, 2], [0, 2], [2, 0, 0, 3], [0, 1, 1, 0], [3, 2, 4, 1]]
RESTS = [(), (3, 4), (20, 30)]  # of the shape, behind (N, C); long rows take another way


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def part(shards: Sequence[int], rank: int) -> slice:
    first = sum(shards[:rank])
    return slice(first, first + shards[rank])


def started(layer: Any) -> Any:
    """`layer` in float64, its weight and bias neither 1 nor 0."""
    layer = layer.double()
    with ddp.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(ddp.tensor(numbers(*p.shape, seed=10 + i)))
    return layer


def synchronized(comm: Communicator, **options: Any) -> Any:
    return started(SyncBatchNorm(C, comm=comm, **options))


def results(layer: Any, x: ddp.Tensor, shards: Sequence[int], rows: slice, steps: int = 1) -> Tensors:
    """Of a layer that has these rows. The loss is another function of each rank's, so that no mistake can hide."""
    factors = numbers(*x.shape, seed=1)[rows]
    ranks = np.repeat(np.arange(1.0, len(shards) + 1), shards).reshape(-1, *[1] * (x.ndim - 1))[rows]
    for _ in range(steps):
        mine = x[rows].clone().requires_grad_()
        y = layer(mine)
        wide = y.double()
        (wide.sin() * ddp.tensor(factors) + wide * wide * ddp.tensor(ranks)).sum().backward()
    assert mine.grad is not None
    weights = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": mine.grad, **weights, **dict(layer.named_buffers())}


def alone(layer: Any, x: ddp.Tensor, shards: Sequence[int], steps: int = 1) -> Tensors:
    """BatchNorm of the whole batch, and the gradients of the sum of all ranks' losses, by one process."""
    return results(layer, x, shards, slice(None), steps)


def together(make: Callable[[Communicator], Any], x: ddp.Tensor, shards: Sequence[int], steps: int = 1) -> Tensors:
    """The same by the ranks, their parts joined: gradients of weight and bias are added up as DataParallel does."""
    size = len(shards)
    by_rank = on_ranks(lambda comm: results(make(comm), x, shards, part(shards, comm.rank), steps), size)
    joined = {}
    for name, value in by_rank[0].items():
        values = [each[name] for each in by_rank]
        if name in ("y", "x"):
            joined[name] = ddp.cat(values)
        elif name in ("weight", "bias"):
            joined[name] = sum(values)
        else:
            assert_same(values, [value] * size, 0)
            joined[name] = value
    return joined


# Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_any_split_of_the_batch_gives_what_one_process_does(shards: list[int]) -> None:
    for rest in RESTS if len(shards) > 2 else RESTS[:2]:
        scale = np.array([2.0, 1.0, 0.1]).reshape(C, *[1] * len(rest))
        x = ddp.tensor(numbers(sum(shards), C, *rest) * scale + 0.3)
        expected = alone(started((nn.BatchNorm2d if rest else nn.BatchNorm1d)(C)), x, shards)
        assert_same(together(synchronized, x, shards), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"bias": False},
        {"momentum": None},
        {"momentum": 0.4, "eps": 0.1},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_every_option_over_several_steps(options: dict[str, Any]) -> None:
    shards = [2, 0, 3]
    x = ddp.tensor(numbers(5, C, 4))
    expected = alone(started(nn.BatchNorm1d(C, **options)), x, shards, steps=3)
    assert_same(together(functools.partial(synchronized, **options), x, shards, steps=3), expected)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_statistics_far_from_zero_and_ranks_far_from_each_other_lose_no_digits(offset: float) -> None:
    shards = [3, 5, 1]
    x = numbers(9, C, 4) + offset
    x[part(shards, 0)] += 1000
    layer = lambda comm: SyncBatchNorm(C, momentum=1.0, affine=False, comm=comm).double()  # noqa: E731
    got = {name: value.numpy() for name, value in together(layer, ddp.tensor(x), shards).items()}
    mean = x.mean((0, 2), keepdims=True)
    assert_allclose(got["running_var"], ((x - mean) ** 2).mean((0, 2)) * 36 / 35, rtol=1e-11)
    assert_allclose(got["y"], (x - mean) / np.sqrt(((x - mean) ** 2).mean((0, 2), keepdims=True) + 1e-5), atol=1e-8)
    # In float32 E[x^2] - E[x]^2 would leave nothing of this variance.
    rows = ddp.tensor((numbers(9, C, 4) + 3000.0).astype(np.float32))
    small = on_ranks(lambda comm: SyncBatchNorm(C, comm=comm)(rows[part(shards, comm.rank)]).detach().numpy(), 3)
    assert_allclose(np.concatenate(small).var((0, 2)), np.ones(C), rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_constant_channel_becomes_exact_zeros_and_a_huge_one_keeps_its_digits(dtype: str) -> None:
    shards = [3, 5, 1]
    x = np.full((9, C, 7), 60000.7)
    if dtype == "float32":
        x[:, 1] = numbers(9, 7) * 1e25
    rows = ddp.tensor(x.astype(dtype))
    by_rank = on_ranks(
        lambda comm: SyncBatchNorm(C, affine=False, comm=comm, dtype=dtype)(rows[part(shards, comm.rank)]).numpy(), 3
    )
    y = np.concatenate(by_rank)
    if dtype == "float32":
        assert_allclose(y[:, 1], (x[:, 1] - x[:, 1].mean()) / x[:, 1].std(), atol=1e-5)
        y[:, 1] = 0
    assert not y.any()


@pytest.mark.parametrize(
    ("dtype", "kind", "tolerance"), [(ddp.float16, ddp.float32, 2.0**-7), (ddp.bfloat16, ddp.bfloat16, 6e-5)]
)
def test_half_types_are_normalised_in_float32(dtype: Any, kind: Any, tolerance: float) -> None:
    shards = [3, 1]
    x = ddp.tensor(numbers(4, C, 8)).to(dtype=dtype)
    expected = alone(nn.BatchNorm1d(C).to(dtype=kind), x, shards)
    assert_same(together(lambda comm: SyncBatchNorm(C, comm=comm).to(dtype=kind), x, shards), expected, tolerance)


# Whose gradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanting", [[True, True], [True, False], [False, True]], ids=str)
def test_first_gradients_have_the_same_bits_with_a_graph(dtype: str, wanting: list[bool]) -> None:
    shards = [3, 2]
    x = numbers(5, C, 4)

    def rank(comm: Communicator) -> None:
        layer = synchronized(comm).to(getattr(ddp, dtype))
        mine = ddp.tensor(x[part(shards, comm.rank)], dtype=layer.weight.dtype, requires_grad=wanting[comm.rank])
        wanted = [t for t in (mine, layer.weight, layer.bias) if t.requires_grad]
        weights = ddp.tensor(numbers(*mine.shape, seed=1), dtype=mine.dtype)
        gradients = [
            ddp.autograd.grad((layer(mine) * weights).sum(), wanted, create_graph=graph) for graph in (False, True)
        ]
        for plain, recorded in zip(*gradients, strict=True):
            assert recorded.grad_fn is not None
            assert plain.numpy().tobytes() == recorded.detach().numpy().tobytes()

    on_ranks(rank)


# What is called ---------------------------------------------------------------------------------------------------


def test_one_call_forward_and_one_backward_and_none_that_nobody_needs() -> None:
    def train(comm: Any, requires_grad: bool = True, layers: int = 1) -> None:
        net = nn.Sequential(*(SyncBatchNorm(C, comm=comm) for _ in range(layers)))
        net(ddp.ones(2, C, requires_grad=requires_grad)).sum().backward()

    def without_gradient(comm: Any) -> None:
        with ddp.no_grad():
            SyncBatchNorm(C, comm=comm)(ddp.ones(2, C, requires_grad=True))

    def evaluate(comm: Any) -> None:
        for kept in (True, False):
            layer = SyncBatchNorm(C, comm=comm, track_running_stats=kept).eval()
            layer(ddp.ones(comm.rank + 2, C, requires_grad=True)).sum().backward()

    assert calls_of(train, 3) == ["all_gather", "all_reduce"]
    assert calls_of(lambda comm: train(comm, layers=2)) == ["all_gather"] * 2 + ["all_reduce"] * 2
    assert calls_of(lambda comm: train(comm, requires_grad=False)) == ["all_gather"]  # weight and bias: a local sum
    assert calls_of(without_gradient) == ["all_gather"]
    assert calls_of(evaluate) == []
    assert calls_of(train, 1) == []


# Conversion -------------------------------------------------------------------------------------------------------


def test_conversion_replaces_every_batch_norm_and_keeps_what_it_holds() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2, eps=0.1, momentum=None),
        nn.ModuleDict({"a": nn.BatchNorm1d(3, affine=False), "b": nn.Sequential(nn.BatchNorm1d(4))}),
        nn.InstanceNorm2d(2),
    )
    net[1].eval()
    seen: list[Any] = []
    net[1].register_forward_hook(lambda module, inputs, output: seen.append(module))
    before = [*net.parameters(), *net.buffers()]
    comm = collectives.init("single")
    assert convert_sync_batchnorm(net, comm) is net
    assert all(new is old for new, old in zip([*net.parameters(), *net.buffers()], before, strict=True))
    new = [net[1], net[2]["a"], net[2]["b"][0]]
    assert [(type(each), each.comm) for each in new] == [(SyncBatchNorm, comm)] * 3
    assert (new[0].eps, new[0].momentum, new[0].training, new[1].affine) == (0.1, None, False, False)
    net[1](ddp.ones(1, 2, 1, 1))
    assert seen == [net[1]]
    assert type(net[3]) is nn.InstanceNorm2d
    assert convert_sync_batchnorm(net)[1].comm is comm  # once converted, it stays


@on_each_of(2)
def test_a_copy_speaks_to_the_same_ranks(comm: Communicator) -> None:
    net = nn.Sequential(nn.Linear(2, C), SyncBatchNorm(C, comm=comm))
    twin = copy.deepcopy(net)
    assert twin[1].comm is comm
    assert twin[1].weight is not net[1].weight
    twin(ddp.ones(1, 2))
    assert twin[1].num_batches_tracked.item() == 1
    assert net[1].num_batches_tracked.item() == 0


# Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [[1, 0], [0, 0, 1]], ids=str)
def test_one_value_a_channel_in_all_is_an_error_on_every_rank(shards: list[int]) -> None:
    def rank(comm: Communicator) -> None:
        layer = SyncBatchNorm(C, comm=comm)
        with pytest.raises(ShapeError, match="all ranks together have one value a channel"):
            layer(ddp.ones(shards[comm.rank], C, 1))
        assert layer.num_batches_tracked.item() == 0
        layer(ddp.ones(1, C))  # and everybody goes on

    on_ranks(rank, len(shards))


@on_each_of(3)
def test_a_rank_under_no_grad_among_others_is_an_error_on_every_rank(comm: Communicator) -> None:
    layer = SyncBatchNorm(C, comm=comm)
    x = ddp.ones(2, C, requires_grad=True)
    with ddp.set_grad_enabled(comm.rank != 1), pytest.raises(GraphError, match="rank 1 is under no_grad"):
        layer(x)
    with ddp.set_grad_enabled(comm.rank != 1):
        layer(x.detach())  # where nobody goes back through the input, nobody misses it


def test_what_does_not_fit_is_named_before_anything_is_called() -> None:
    def run(comm: Any) -> None:
        layer = SyncBatchNorm(C, comm=comm)
        with pytest.raises(ShapeError, match=r"SyncBatchNorm: expected \(N, 3, ...\), got shape \(2, 4\)"):
            layer(ddp.ones(2, 4))
        with pytest.raises(ShapeError, match=r"got shape \(3,\)"):
            layer(ddp.ones(3))
        with pytest.raises(DtypeError, match="SyncBatchNorm: expected a tensor, got ndarray"):
            layer(np.ones((2, C)))
        with pytest.raises(DtypeError, match="weight or bias float32"):
            layer(ddp.ones(2, C, dtype=ddp.float64))
        with pytest.raises(DtypeError, match="expected a floating input"):
            layer(ddp.ones(2, C, dtype=ddp.int64))

    assert calls_of(run) == []
    with pytest.raises(DtypeError, match="convert_sync_batchnorm: expected a Module, got list"):
        convert_sync_batchnorm([])  # type: ignore[arg-type]
