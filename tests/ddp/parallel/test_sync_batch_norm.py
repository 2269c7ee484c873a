"""SyncBatchNorm on n ranks equals BatchNorm on the whole batch: values, every gradient, running statistics."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import collectives
import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import DtypeError, GraphError, ShapeError
from ddp.parallel import all_reduce
from ddp.parallel.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from tests.ddp.parallel.ranks import Mute, assert_same, on_ranks
from tests.ddp.parallel.recorder import Recorder

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


def loss_of(y: ddp.Tensor, rank: int, factors: np.ndarray) -> ddp.Tensor:
    """Another function on each rank, so that no mistake in whose gradient counts where can hide."""
    return (y.sin() * ddp.tensor(factors) + y * y * (rank + 1)).sum()


def synchronized(comm: Communicator, **options: Any) -> Any:
    return started(SyncBatchNorm(C, comm=comm, **options))


def alone(layer: Any, x: np.ndarray, shards: Sequence[int], steps: int = 1) -> dict[str, np.ndarray]:
    """BatchNorm of the whole batch, and the gradients of the sum of all ranks' losses, by one process."""
    for _ in range(steps):
        whole = ddp.tensor(x, requires_grad=True)
        y = layer(whole.reshape(*x.shape[:2], -1) if x.ndim > 2 else whole).reshape(*x.shape)
        factors = numbers(*x.shape, seed=1)
        losses = [
            loss_of(y[part(shards, rank)], rank, factors[part(shards, rank)]) for rank, n in enumerate(shards) if n
        ]
        ddp.stack(losses).sum().backward()
    assert whole.grad is not None
    return {"y": y.detach().numpy(), "x": whole.grad.numpy(), **state(layer)}


def state(layer: Any) -> dict[str, np.ndarray]:
    gradients = {name: p.grad.numpy() for name, p in layer.named_parameters() if p.grad is not None}
    return {**gradients, **{name: buffer.numpy() for name, buffer in layer.named_buffers()}}


def together(make: Callable[[Communicator], Any], x: np.ndarray, shards: Sequence[int], steps: int = 1) -> Any:
    """The same by the ranks, their parts joined: gradients of weight and bias are added up as DataParallel does."""

    def rank(comm: Communicator) -> dict[str, np.ndarray]:
        layer = make(comm)
        rows = part(shards, comm.rank)
        for _ in range(steps):
            mine = ddp.tensor(x[rows], requires_grad=True)
            y = layer(mine)
            loss_of(y, comm.rank, numbers(*x.shape, seed=1)[rows]).backward()
        assert mine.grad is not None
        return {"y": y.detach().numpy(), "x": mine.grad.numpy(), **state(layer)}

    ranks = on_ranks(rank, len(shards))
    joined = {}
    for name in ranks[0]:
        values = [each[name] for each in ranks]
        if name in ("y", "x"):
            joined[name] = np.concatenate(values)
        elif name in ("weight", "bias"):
            joined[name] = np.sum(values, axis=0)
        else:
            for value in values:
                assert_array_equal(value, values[0], err_msg=f"{name} is not the same on all ranks")
            joined[name] = values[0]
    return joined


# Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_any_split_of_the_batch_gives_what_one_process_does(shards: list[int]) -> None:
    for rest in RESTS if len(shards) > 2 else RESTS[:2]:
        x = numbers(sum(shards), C, *rest) * np.array([2.0, 1.0, 0.1]).reshape(C, *[1] * len(rest)) + 0.3
        expected = alone(started(nn.BatchNorm1d(C)), x, shards)
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
    x = numbers(5, C, 4)
    expected = alone(started(nn.BatchNorm1d(C, **options)), x, shards, steps=3)
    assert_same(together(functools.partial(synchronized, **options), x, shards, steps=3), expected)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_statistics_far_from_zero_and_ranks_far_from_each_other_lose_no_digits(offset: float) -> None:
    shards = [3, 5, 1]
    x = numbers(9, C, 4) + offset
    x[part(shards, 0)] += 1000
    layer = lambda comm: SyncBatchNorm(C, momentum=1.0, affine=False, comm=comm).double()  # noqa: E731
    got = together(layer, x, shards)
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


@pytest.mark.parametrize(("dtype", "kind"), [("float16", ddp.float32), ("bfloat16", ddp.bfloat16)])
def test_half_types_are_normalised_in_float32(dtype: str, kind: Any) -> None:
    shards = [3, 1]
    x = numbers(4, C, 8)

    def run(layer: Any, rows: slice) -> list[np.ndarray]:
        mine = ddp.tensor(x[rows]).to(dtype=dtype).requires_grad_()
        y = layer(mine)
        assert y.dtype == dtype
        (y.float() * ddp.tensor(numbers(*x.shape, seed=1)[rows].astype(np.float32))).sum().backward()
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        assert layer.weight.grad.dtype == kind
        return [np.array(v.detach().float().tolist()) for v in (y, mine.grad, layer.weight.grad, layer.running_var)]

    whole = run(nn.BatchNorm1d(C).to(dtype=kind), slice(None))
    ranks = on_ranks(lambda comm: run(SyncBatchNorm(C, comm=comm).to(dtype=kind), part(shards, comm.rank)))
    step = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    y, dx, dw, var = zip(*ranks, strict=True)
    for got, expected in zip((np.concatenate(y), np.concatenate(dx), sum(dw), var[1]), whole, strict=True):
        assert_allclose(got, expected, rtol=2 * step, atol=8 * step)


# Whose gradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanting", [[True, False], [False, True], [True, False, False, True]], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_a_rank_whose_input_is_frozen_takes_part_in_the_gradient_of_others(wanting: list[bool], affine: bool) -> None:
    shards = [2, 1, 0, 3][: len(wanting)]
    x = numbers(sum(shards), C, 4)

    def rank(comm: Communicator) -> tuple[bool, np.ndarray | None, np.ndarray | None]:
        rows = part(shards, comm.rank)
        layer = started(SyncBatchNorm(C, affine=affine, comm=comm))
        mine = ddp.tensor(x[rows], requires_grad=wanting[comm.rank])
        if affine and comm.rank == 0:
            layer.requires_grad_(False)
        y = layer(mine)
        loss_of(y, comm.rank, numbers(*x.shape, seed=1)[rows]).backward()
        gradients = [None if each is None or each.grad is None else each.grad.numpy() for each in (mine, layer.weight)]
        return y.requires_grad, gradients[0], gradients[1]

    expected = alone(started(nn.BatchNorm1d(C, affine=affine)), x, shards)["x"]
    for rank_number, (requires_grad, gradient, weight) in enumerate(on_ranks(rank, len(shards))):
        assert requires_grad
        assert (weight is not None) == (affine and rank_number != 0)
        if wanting[rank_number]:
            assert_allclose(gradient, expected[part(shards, rank_number)], rtol=1e-12, atol=1e-12)
        else:
            assert gradient is None


def test_a_rank_that_no_gradient_comes_to_meets_the_others() -> None:
    shards = [3, 2]
    x = numbers(5, C)

    def rank(comm: Communicator) -> np.ndarray:
        mine = ddp.tensor(x[part(shards, comm.rank)], requires_grad=True)
        y = SyncBatchNorm(C, comm=comm).double()(mine)
        (Mute.apply(y, True) if comm.rank else y**3).sum().backward()
        assert mine.grad is not None
        return mine.grad.numpy()

    whole = ddp.tensor(x, requires_grad=True)
    (nn.BatchNorm1d(C).double()(whole)[:3] ** 3).sum().backward()
    assert whole.grad is not None
    assert_allclose(np.concatenate(on_ranks(rank)), whole.grad.numpy(), rtol=1e-12, atol=1e-12)


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


def calls_of(fn: Callable[[Any], None], size: int = 3) -> list[str]:
    """The calls that `fn(comm)` makes, the same on every rank, after the duplicate is there."""

    def rank(comm: Communicator) -> list[str]:
        calls: list[str] = []
        seen: Any = Recorder(comm, calls)
        all_reduce(ddp.ones(1), comm=seen)  # makes the duplicate
        del calls[:]
        fn(seen)
        return calls

    ranks = on_ranks(rank, size)
    assert ranks == [ranks[0]] * size
    return ranks[0]


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

    assert calls_of(train) == ["all_gather", "all_reduce"]
    assert calls_of(lambda comm: train(comm, layers=2)) == ["all_gather"] * 2 + ["all_reduce"] * 2
    assert calls_of(lambda comm: train(comm, requires_grad=False)) == ["all_gather"]  # weight and bias: a local sum
    assert calls_of(without_gradient) == ["all_gather"]
    assert calls_of(evaluate) == []
    assert calls_of(train, size=1) == []


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
    before = {name: (id(p), p.leaf) for name, p in net.named_parameters()}
    buffers = {name: id(b) for name, b in net.named_buffers()}
    comm = collectives.init("single")
    assert convert_sync_batchnorm(net, comm) is net
    assert {name: (id(p), p.leaf) for name, p in net.named_parameters()} == before
    assert {name: id(b) for name, b in net.named_buffers()} == buffers
    new = [net[1], net[2]["a"], net[2]["b"][0]]
    assert [(type(each), each.comm) for each in new] == [(SyncBatchNorm, comm)] * 3
    assert [(each.eps, each.momentum, each.affine, each.training) for each in new[:2]] == [
        (0.1, None, True, False),
        (1e-5, 0.1, False, True),
    ]
    net[1](ddp.ones(1, 2, 1, 1))
    assert seen == [net[1]]
    assert type(net[3]) is nn.InstanceNorm2d
    assert convert_sync_batchnorm(net)[1].comm is comm  # once converted, it stays


def test_a_copy_speaks_to_the_same_ranks() -> None:
    def rank(comm: Communicator) -> None:
        net = nn.Sequential(nn.Linear(2, C), SyncBatchNorm(C, comm=comm))
        twin = copy.deepcopy(net)
        assert twin[1].comm is comm
        assert twin[1].weight is not net[1].weight
        twin(ddp.ones(1, 2))
        assert twin[1].num_batches_tracked.item() == 1
        assert net[1].num_batches_tracked.item() == 0

    on_ranks(rank)


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


def test_a_rank_under_no_grad_among_others_is_an_error_on_every_rank() -> None:
    def rank(comm: Communicator) -> None:
        layer = SyncBatchNorm(C, comm=comm)
        x = ddp.ones(2, C, requires_grad=True)
        with ddp.set_grad_enabled(comm.rank != 1), pytest.raises(GraphError, match="rank 1 is under no_grad"):
            layer(x)
        with ddp.set_grad_enabled(comm.rank != 1):
            layer(x.detach())  # where nobody goes back through the input, nobody misses it

    on_ranks(rank, 3)


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
