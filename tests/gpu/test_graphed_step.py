"""`graphed_step` on the stand-in: replays are eager steps to the bit, and what cannot be captured is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.errors import ArgumentError, CaptureError
from ddp.nn import functional as F
from tests.gpu import on_both, simulated

STEPS = 8
Made = tuple[Any, Callable[..., Any]]  # a model and a step


def mlp(dropout: float = 0.3) -> Any:
    ddp.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)).to("cuda")


def batches(count: int, n: int = 5, seed: int = 1) -> Any:
    dice = np.random.default_rng(seed)
    numbers = [dice.standard_normal((n, 6)).astype(np.float32) for _ in range(count)]
    return [(ddp.tensor(x, device="cuda"), ddp.tensor(dice.integers(0, 4, n), device="cuda")) for x in numbers]


def stepping(model: Any, optimizer: Any, after: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        after()
        return loss

    return step


def trained(make: Callable[[], Made], data: Any, graphed: bool, each: Callable[[], Any] = lambda: None) -> list[Any]:
    """Losses, parameters, buffers and gradients after training. each: called after every step"""
    model, step = make()
    run = ddp.cuda.graphed_step(step) if graphed else step
    losses = []
    for batch in data:
        losses.append(run(*batch).item())
        each()
    if graphed:
        assert isinstance(run, ddp.cuda._graphed_step.GraphedStep)
        assert run.replays == len(data) - run.eager > 0
    held = [*model.parameters(), *model.buffers()]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [losses, *[x.detach().cpu().numpy() for x in (*held, *grads)]]


def same(make: Callable[[], Made], data: Any, each: Callable[[], Any] = lambda: None) -> None:
    eager, graphed = trained(make, data, False, each), trained(make, data, True, each)
    assert len(eager) == len(graphed)
    for x, y in zip(eager, graphed, strict=True):
        assert_array_equal(x, y)


@pytest.mark.parametrize("gpu", simulated(4), indirect=True)
def test_in_any_order_that_cuda_allows(gpu: Any) -> None:
    def make() -> Made:
        model = mlp()
        return model, stepping(model, ddp.optim.AdamW(model.parameters(), lr=0.01))

    same(make, batches(STEPS))


def test_a_schedule_captures_nothing_anew(gpu: Any) -> None:
    schedulers: list[Any] = []

    def make() -> Made:
        model = mlp()
        optimizer = ddp.optim.AdamW(model.parameters(), lr=0.05)
        schedulers[:] = [ddp.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)]  # betas change, too
        return model, stepping(model, optimizer)

    same(make, batches(STEPS), lambda: schedulers[0].step())
    step = ddp.cuda.graphed_step(make()[1])
    for batch in batches(STEPS):
        step(*batch)
        schedulers[0].step()
    assert step.captures == 1


def test_autocast_and_a_scaler(gpu: Any) -> None:
    def make() -> Made:
        model = mlp()
        optimizer = ddp.optim.SGD(model.parameters(), lr=0.05)
        scaler = ddp.amp.GradScaler(init_scale=2.0**14, growth_interval=3)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            with ddp.amp.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        return model, step

    same(make, batches(STEPS))


def test_accumulated_gradients_are_two_graphs(gpu: Any) -> None:
    def make() -> Made:
        model = mlp(dropout=0.0)
        optimizer = ddp.optim.SGD(model.parameters(), lr=0.05)

        def step(x: Any, y: Any, last: bool) -> Any:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return model, step

    data = [(*batch, i % 2 == 1) for i, batch in enumerate(batches(16))]
    same(make, data)


def test_other_shapes_capture_anew_and_old_graphs_are_kept(gpu: Any) -> None:
    def make() -> Made:
        model = mlp()
        return model, stepping(model, ddp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    data = [batches(1, n=(5, 3)[i % 2], seed=i)[0] for i in range(14)]
    same(make, data)
    step = ddp.cuda.graphed_step(make()[1])
    for batch in data:
        step(*batch)
    assert step.captures == 2
    step = ddp.cuda.graphed_step(make()[1], keep=1)
    for batch in data:
        step(*batch)
    assert step.captures > 2


def test_modes_of_modules_capture_anew(gpu: Any) -> None:
    model = mlp()
    step = ddp.cuda.graphed_step(lambda x: model(x).sum(), warmup=1)
    x = ddp.ones(2, 6, device="cuda")
    for _ in range(3):
        step(x)
    assert step.captures == 1
    model.eval()
    expected = model(x).sum().item()
    assert step(x).item() == expected
    assert step(x).item() == expected
    assert step.captures == 2
    model.train()
    step(x)
    assert step.captures == 2
    model[0].weight.requires_grad_(False)
    step(x)
    assert step.captures == 3
    with ddp.no_grad():
        step(x)
        step(x)
    assert step.captures == 4
    x.requires_grad_()
    step(x)
    step(x)
    assert step.captures == 5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inputs_keep_their_memory_format(gpu: Any, device: str) -> None:
    """The capture launches the kernels of the warm-up, and whatever comes later is copied into that order."""
    strides = []
    graphed = ddp.cuda.graphed_step(lambda x: strides.append(x.stride()) or x * 2, warmup=1)
    x = ddp.arange(120).float().reshape(2, 3, 4, 5)
    last = x.to(memory_format=ddp.channels_last)
    for each in (last, last + 1, x, x.pin_memory()):
        assert graphed(each.to(device)).tolist() == (each * 2).tolist()
    assert strides == [last.stride()] * 2
    assert graphed.captures == 1


@on_both
def test_many_arrays_are_joined(gpu: Any) -> None:
    x = ddp.ones(2, device="cuda")
    graphed = ddp.cuda.graphed_step(lambda x: ddp.cat([ddp.stack([x * i for i in range(70)])] * 9), warmup=1)
    expected = graphed(x).tolist()
    assert graphed(x).tolist() == expected


@on_both
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_and_the_norm_of_many_gradients(gpu: Any, kind: Any) -> None:
    layer = kind(6, 4, num_layers=2, bidirectional=True).to("cuda")

    def step(x: Any) -> Any:
        layer.zero_grad()
        layer(x)[0].sum().backward()
        return nn.utils.clip_grad_norm_(layer.parameters(), 0.5, norm_type=float("inf"))

    x = ddp.ones(3, 6, device="cuda")
    graphed = ddp.cuda.graphed_step(step, warmup=1)
    expected = graphed(x).item()
    assert graphed(x).item() == pytest.approx(expected)


def test_a_seed_between_replays_counts(gpu: Any) -> None:
    draw = ddp.cuda.graphed_step(lambda x: x * ddp.rand(4, device="cuda"), warmup=1)
    x = ddp.ones(4, device="cuda")
    for _ in range(3):
        draw(x)
    ddp.manual_seed(5)
    graphed = [draw(x).tolist() for _ in range(3)]
    ddp.manual_seed(5)
    assert graphed == [ddp.rand(4, device="cuda").tolist() for _ in range(3)]


def test_a_replay_asks_for_nothing(gpu: Any) -> None:
    """No cudaMalloc, no synchronization, one graph and the copies of the inputs."""
    model = mlp()
    step = ddp.cuda.graphed_step(stepping(model, ddp.optim.AdamW(model.parameters())))
    for batch in batches(6):
        step(*batch)
    data = batches(3)
    gpu.reset()
    for batch in data:
        step(*batch)
    assert not gpu.synchronizations
    assert gpu.mallocs == gpu.copies_up == 0
    assert gpu.launches == {"graph": 3, "copy": 6}


class Halved(ddp.autograd.Function):
    """Computes with NumPy, so that no op runs."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return ddp.from_numpy(x.detach().numpy() / 2)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g / 2


ON_CPU = ddp.ones(3, requires_grad=True)
CANNOT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "item"),
    "bool": (lambda x: x if x.sum() > 0 else -x, "__bool__"),
    "tolist": (lambda x: x.sum().tolist(), "tolist"),
    "print": (lambda x: repr(x), "__repr__"),
    "mask": (lambda x: x[x > 0], "__getitem__"),
    "to the CPU": (lambda x: x.cpu(), "cpu"),
    "from the CPU": (lambda x: x + ddp.tensor([1.0, 2.0, 3.0], device="cuda"), "tensor"),
    "moved up": (lambda x: x + ddp.ones(3).to("cuda"), "to"),
    "on the CPU": (lambda x: ddp.ones(3).add(1).sum() and x, "add"),
    "on the CPU, by either name of dim": (lambda x: ddp.ones(3).sum() and x, "sum"),
    "on the CPU, a function": (lambda x: ddp.cat([ddp.ones(3)]) is x, "cat"),
    "on the CPU, in a function of the user": (lambda x: Halved.apply(ON_CPU) is None or x, "apply"),
    "on the CPU, with casts": (ddp.autocast("cuda")(lambda x: ddp.ones(3).add(1).sum() and x), "add"),
    "on the CPU, without": (ddp.autocast("cuda", enabled=False)(lambda x: ddp.ones(3).add(1).sum() and x), "add"),
}


@on_both
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_be_captured_is_named(gpu: Any, what: str, casts: bool) -> None:
    body, op = CANNOT[what]
    x = ddp.ones(3, device="cuda")
    step = ddp.cuda.graphed_step(lambda x: body(x * 2), warmup=1)
    with ddp.autocast("cuda", enabled=casts):
        step(x)
        with pytest.raises(CaptureError) as caught:
            step(x)
    assert f"`{op}`" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert not ddp.cuda.is_current_stream_capturing()
    assert (x + 1).tolist() == [2, 2, 2]


def test_a_failed_capture_changes_nothing(gpu: Any) -> None:
    model = mlp()
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.1)
    look = False

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss * loss.item() if look else loss

    graphed = ddp.cuda.graphed_step(step)
    data = batches(6)
    for batch in data[:3]:
        graphed(*batch)
    before = [p.detach().cpu().numpy() for p in model.parameters()]
    grads = [p.grad.cpu().numpy() for p in model.parameters()]
    look = True
    with pytest.raises(CaptureError, match="item"):
        graphed(*data[3])
    for p, old, g in zip(model.parameters(), before, grads, strict=True):
        assert_array_equal(p.detach().cpu().numpy(), old)
        assert_array_equal(p.grad.cpu().numpy(), g)
    look = False
    graphed(*data[4])
    assert graphed.captures == 1


def test_a_buffer_that_is_replaced_is_named(gpu: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", ddp.zeros(3))

        def forward(self, x: Any) -> Any:
            self.seen = self.seen + 1
            return x + self.seen

    model = Counting().to("cuda")
    step = ddp.cuda.graphed_step(lambda x: model(x), warmup=1)
    x = ddp.ones(3, device="cuda")
    step(x)
    with pytest.raises(CaptureError, match=r"replaces seen.*in place"):
        step(x)


def test_a_schedule_within_the_step_is_refused(gpu: Any) -> None:
    model = mlp()
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.1)
    schedule = ddp.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = ddp.cuda.graphed_step(stepping(model, optimizer, after=schedule.step), warmup=1)
    data = batches(2)
    step(*data[0])
    with pytest.raises(CaptureError, match=r"scheduler.step\(\) after it"):
        step(*data[1])


def test_an_error_of_the_step_is_its_own(gpu: Any) -> None:
    boom = False

    def step(x: Any) -> Any:
        if boom:
            raise KeyError("mine")
        return x + 1

    graphed = ddp.cuda.graphed_step(step, warmup=1)
    x = ddp.ones(3, device="cuda")
    graphed(x)
    boom = True
    with pytest.raises(KeyError, match="mine"):
        graphed(x)
    boom = False
    assert graphed(x).tolist() == [2, 2, 2]
    with pytest.raises(ArgumentError, match="cannot be compared"):
        graphed(bytearray(3))
