"""The recipes of docs/architecture.md: each part is added from outside, at the places that the page names."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives.backends.single import SingleTransport
from ddp import nn
from ddp._tensor.base import apply
from ddp.ops.op import OPS, Op
from launcher.engines.engine import REGISTRY, Engine, StartRequest, register
from launcher.job import Job


@pytest.fixture
def cubed() -> Iterator[Op]:
    # y = x**3;  dx = 3 * x**2 * g
    def forward(xp: Any, x: Any) -> Any:
        return x**3, None

    def backward(xp: Any, g: Any, needs: Any, saved: Any, residual: Any) -> Any:
        return (3 * saved[0] ** 2 * g,)

    yield Op("cubed", forward, backward, inputs=("x",), saves=("x",))
    del OPS["cubed"]


def test_an_op_is_a_pair_of_formulas(cubed: Op) -> None:
    x = ddp.tensor([1.0, -2.0], dtype=ddp.float64, requires_grad=True)
    y = apply(cubed, (x,))
    assert y.tolist() == [1.0, -8.0]
    assert ddp.autograd.gradcheck(lambda x: apply(cubed, (x,)), (x,))


class Scale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(ddp.ones(features))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return x * self.weight


def test_a_layer_is_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2), Scale(2))
    model(ddp.ones(4, 3)).sum().backward()
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight"]
    assert model[1].weight.grad.shape == (2,)


class SignSGD(ddp.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        with ddp.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad.sign()
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1


def median(bucket: Any) -> Iterator[Any]:
    mine = bucket.buffer * (bucket.scale * bucket.comm.size)
    gathered = yield bucket.comm.all_gather(mine[None], lengths="equal", async_op=True)
    bucket.buffer[...] = np.median(gathered, axis=0)


def test_an_optimizer_and_a_hook_train_a_wrapped_model() -> None:
    def train(comm: collectives.Communicator) -> list[float]:
        net = nn.Linear(2, 1, bias=False)
        with ddp.no_grad():
            net.weight[...] = 0.0
        model = ddp.DataParallel(net, comm, comm_hook=median)
        optimizer = SignSGD(model.parameters(), lr=0.5)
        model(ddp.full((1, 2), float(comm.rank - 1))).sum().backward()  # gradients -1, 0 and 1
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 1
        weights: list[float] = net.weight.flatten().tolist()
        model.close()
        return weights

    assert collectives.run_threads(train, size=3) == [[0.0, 0.0]] * 3


class CountingTransport(SingleTransport):
    name = "counting"
    calls = 0

    def all_reduce(self, x: Any, out: Any, op: Any, finish: Any = None) -> Any:
        self.calls += 1
        return super().all_reduce(x, out, op, finish)


def test_a_backend_is_a_transport_and_how_to_join(monkeypatch: Any) -> None:
    transport = CountingTransport()
    module = types.ModuleType("collectives.backends.counting")
    module.join = lambda promised, timeout, checks: (transport, None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("collectives.start._world", None)
    comm = collectives.init("counting", timeout=10.0)
    assert comm.backend == "counting"
    assert comm.all_reduce(np.arange(3.0), async_op=True).wait().tolist() == [0.0, 1.0, 2.0]
    assert transport.calls == 1
    comm.close()


class DirectEngine(Engine):
    """Starts its one rank without any MPI."""

    name = "direct"
    remote_hosts = ()

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        return cls() if request.job.size == 1 else None

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return list(rank)

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        return {**environ, "STARTED_BY": self.name}


@pytest.mark.mpi
def test_an_engine_is_a_registered_class(tmp_path: Path) -> None:
    from launcher.supervisor.supervisor import launch

    script = tmp_path / "train.py"
    script.write_text(f"import os; open({str(tmp_path / 'by')!r}, 'w').write(os.environ['STARTED_BY'])")
    register("direct")(DirectEngine)
    try:
        assert launch(Job(script=str(script), n=1, engine="direct")) == 0
    finally:
        del REGISTRY["direct"]
    assert (tmp_path / "by").read_text() == "direct"
