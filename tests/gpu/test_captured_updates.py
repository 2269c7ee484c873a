"""Optimizers, clipping and GradScaler in CUDA graphs: what changes on the host is brought there before each replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.amp import GradScaler
from ddp.errors import CaptureError

STEPS = 6
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.5}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    *[(name, {"lr": 0.1}) for name in ("Adagrad", "Adadelta", "Lion", "NAdam", "RAdam")],
]


class Step:
    """The gradient that a graph reads, and the parameter that it updates."""

    def __init__(self, device: str, kind: str, settings: dict[str, Any]) -> None:
        self.p = ddp.ones(5, device=device, requires_grad=True)
        self.g = ddp.zeros(5, device=device)
        self.optimizer = getattr(ddp.optim, kind)([self.p], **settings)
        self.schedule = ddp.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def run(self) -> None:
        self.p.grad = self.g
        ddp.nn.utils.clip_grad_norm_([self.p], 1.0)
        self.optimizer.step()

    def feed(self, number: int) -> None:
        g = np.random.default_rng(number).standard_normal(5).astype(np.float32)
        self.g.copy_(ddp.from_numpy(g).to(self.g.device))


def trained(kind: str, settings: dict[str, Any], device: str, captured: bool) -> tuple[Any, Any]:
    step = Step(device, kind, settings)
    graph = None
    for number in range(STEPS):
        step.feed(number)
        if captured and number == 2:
            graph = ddp.cuda.CUDAGraph()
            with ddp.cuda.graph(graph):
                step.run()
        if graph is not None:
            graph.replay()
        else:
            step.run()
        step.schedule.step()
        if number in (1, 4):  # just before the capture, and between replays
            step.optimizer.load_state_dict(step.optimizer.state_dict())
    return step.p, step.optimizer


@pytest.mark.parametrize("gpu", ["eager", ("simulated", 1)], indirect=True)
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_rates_and_steps_go_on_in_a_graph(kind: str, settings: dict[str, Any], gpu: Any) -> None:
    p, optimizer = trained(kind, settings, "cuda", True)
    q, expected = trained(kind, settings, "cpu", False)
    assert_allclose(p.detach().cpu().numpy(), q.detach().numpy(), rtol=1e-6)
    for name, value in expected.state[q].items():
        assert_allclose(optimizer.state[p][name].cpu().numpy(), value.numpy(), rtol=1e-5)


def test_a_replay_sends_what_changed_and_nothing_else(gpu: Any) -> None:
    step = Step("cuda", "AdamW", {"lr": 0.1})
    step.run()
    graph = ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(graph):
        step.run()
    graph.replay()
    for changed in (False, True):
        if changed:
            step.schedule.step()
        gpu.reset()
        graph.replay()
        assert gpu.launches["copy up"] == int(changed), gpu.launches
        assert not gpu.synchronizations
        assert (gpu.mallocs, gpu.frees) == (0, 0)


def test_what_begins_in_a_capture_is_refused(gpu: Any) -> None:
    step = Step("cuda", "AdamW", {"lr": 0.1})
    with (
        pytest.raises(CaptureError, match="make a step with these parameters before"),
        ddp.cuda.graph(ddp.cuda.CUDAGraph()),
    ):
        step.run()
    with pytest.raises(CaptureError, match="scale a loss before"), ddp.cuda.graph(ddp.cuda.CUDAGraph()):
        GradScaler().scale(step.g.sum())
