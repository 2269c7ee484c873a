"""One training run that meets whatever DataParallel has to order: the same program on a GPU and on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.testing import assert_allclose

import ddp
from ddp import nn
from ddp.parallel import DataParallel, comm_hooks
from ddp.parallel.sync_batch_norm import convert_sync_batchnorm
from ddp.parallel.zero.zero_optimizer import ZeroOptimizer
from tests.ddp.parallel.ranks import on_ranks

WIDTH, ROWS = 5, 3
Between = Callable[[], None]
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"hook": lambda: comm_hooks.bf16},
    "low rank": {"hook": lambda: comm_hooks.PowerSGD(1, 1, min_compression_rate=0)},
    "top k": {"hook": lambda: comm_hooks.TopK(0.2)},
    "zero": {"zero": True},
}


class Net(nn.Module):
    """Layers of products alone, of which a forward may leave some out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        rng = np.random.default_rng(layers)
        for layer in range(layers):
            self.register_parameter(f"w{layer}", nn.Parameter(ddp.from_numpy(rng.normal(size=(WIDTH, WIDTH)) / WIDTH)))
            self.register_parameter(f"b{layer}", nn.Parameter(ddp.from_numpy(rng.normal(size=WIDTH))))
        self.register_buffer("seen", ddp.zeros(WIDTH, dtype=ddp.float64))
        self.register_buffer("rows", ddp.zeros(3, dtype=ddp.int64))
        self.register_buffer("calls", ddp.zeros(1))

    def forward(self, x: ddp.Tensor, layers: list[int]) -> ddp.Tensor:
        with ddp.no_grad():
            self.seen += x.sum(0)
            self.rows += x.shape[0]
            self.calls += x.shape[0] / 2
        for layer in layers:
            x = x + (x @ getattr(self, f"w{layer}")) * getattr(self, f"b{layer}")
        return x


def batch(step: int, rank: int, device: str) -> ddp.Tensor:
    return ddp.from_numpy(np.random.default_rng([step, rank]).normal(size=(ROWS + rank, WIDTH))).to(device)


def loss_of(out: ddp.Tensor) -> ddp.Tensor:
    return (out * out).sum() * 0.01


def train(
    comm: Any,
    device: str,
    seed: int,
    between: Between = lambda: None,
    hook: Callable[[], Any] = lambda: None,
    zero: bool = False,
) -> dict[str, Any]:
    """Ten steps of kinds that the seed draws; returns parameters and gradients, some of them as they were on the way.

    between: what else the program does on its stream; hook: makes a communication hook; zero: a sharded optimizer
    """
    dice = random.Random(seed)
    layers = 4
    net = Net(layers).to(device)
    net.calls = net.calls.to("cpu")  # a count that a host keeps
    net.b1.requires_grad_(False)
    cap: Any = dice.choice([0.0002, 0.0005, 1.0, "auto"])
    model = DataParallel(
        net,
        comm,
        bucket_cap_mb=cap,
        first_bucket_mb=0.0002,
        check_every=3,
        check_finite=dice.random() < 0.3,
        broadcast_buffers=dice.random() < 0.5,
        comm_hook=hook(),
    )
    if zero:
        optimizer: ddp.optim.Optimizer = ZeroOptimizer(model, ddp.optim.SGD, lr=0.05)
    else:
        optimizer = ddp.optim.SGD(model.parameters(), lr=0.05)
    seen: dict[str, Any] = {}
    for step in range(10):
        kind = dice.choice(["plain", "accumulate", "weighted", "unused here", "unused", "twice"])
        if step == 4:
            net.b1.requires_grad_(True)  # it gets a place after this backward: buckets move
        used = list(range(layers))
        if kind == "unused" or (kind == "unused here" and comm.rank == 1):
            used.remove(2)
        x = batch(step, comm.rank, device)
        if kind == "accumulate":
            with model.no_sync():
                loss_of(model(x * 2, used)).backward()
            between()
        if kind == "weighted":
            optimizer.zero_grad()  # a weight has no place beside gradients that are means already
            model.backward(loss_of(model(x, used)), weight=1.0 + comm.rank)
        else:
            loss_of(model(x, used)).backward()
        between()
        if kind == "twice":
            loss_of(model(x, used)).backward()
        if dice.random() < 0.3 and not zero:  # gradients are read, not only by the optimizer
            seen.update(
                {f"{name} at {step}": (p.grad * 1.0) for name, p in net.named_parameters() if p.grad is not None}
            )
        optimizer.step()
        if dice.random() < 0.8:
            optimizer.zero_grad(set_to_none=dice.random() < 0.5)
        between()
        del x
    seen.update(net.named_parameters())
    seen.update(net.named_buffers())
    return {name: tensor.detach().cpu().numpy() for name, tensor in seen.items()}


def train_layers(comm: Any, device: str, seed: int, between: Between = lambda: None) -> dict[str, Any]:
    """Layers and an optimizer that have kernels of their own on a GPU, and statistics over all ranks' batches."""
    ddp.manual_seed(seed)
    # No bias before the norm: its gradient would be nothing but rounding errors, which Adam makes steps of.
    layers = [nn.Linear(WIDTH, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)]
    net = convert_sync_batchnorm(nn.Sequential(*layers).double(), comm).to(device)
    model = DataParallel(net, comm, bucket_cap_mb=0.0001, first_bucket_mb=0.0001, check_every=2)
    optimizer = ddp.optim.Adam(model.parameters(), lr=0.01)
    for step in range(6):
        loss = loss_of(model(batch(step, comm.rank, device)))
        between()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
    results = [*net.named_parameters(), *net.named_buffers()]
    return {name: tensor.detach().cpu().numpy() for name, tensor in results}


def train_penalized(comm: Any, device: str, seed: int, between: Between = lambda: None) -> dict[str, Any]:
    """A loss with gradients in it: those of a loss that DataParallel reduced, and that of the input."""
    ddp.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 1)]
    net = convert_sync_batchnorm(nn.Sequential(*layers).double(), comm).to(device)
    model = DataParallel(net, comm)
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = batch(step, comm.rank, device).requires_grad_()
        model(x).sin().mean().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        scores = model(x)
        (slope,) = ddp.autograd.grad(scores.sum(), x, create_graph=True)
        (scores.sin().mean() + 0.1 * penalty + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu().numpy() for name, p in net.named_parameters()}


def assert_numbers_of_the_cpu(
    rig: Any,
    nccl: Any,
    size: int,
    seed: int,
    program: Callable[[Any, str, Between], dict[str, Any]],
    rtol: float = 1e-9,
) -> None:
    """The program gives on simulated GPUs what it gives on the CPU.

    It runs among work that takes memory which became free, and writes to it.
    """

    def rank(comm: Any, cupy: Any) -> Any:
        def between() -> None:
            for length in (WIDTH, WIDTH * WIDTH, 64):
                cupy.empty(length, np.float64)[...] = 1e6

        return program(comm, f"cuda:{comm.rank}", between)

    on_gpu = rig(size, nccl, seed).run(rank)
    on_cpu = on_ranks(lambda comm: program(comm, "cpu", lambda: None), size, timeout=60)
    for got, expected in zip(on_gpu, on_cpu, strict=True):
        assert got.keys() == expected.keys()
        for name in expected:
            assert_allclose(got[name], expected[name], rtol, 1e-3 * rtol, err_msg=f"{name}, seed {seed}")
