"""Images with channels last through a residual network on the stand-in: every result and gradient lies so, uncopied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from tests.ddp.cases.table import draw
from tests.ddp.cuda import emulation
from tests.gpu import dnn_fake

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")


class Block(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = None
        if stride > 1:
            self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Any) -> Any:
        y = nn.functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return nn.functional.relu(y + (x if self.down is None else self.down(x)))


class Net(nn.Module):
    """A residual network of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.first, self.second = Block(8, 8, 1), Block(8, 16, 2)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        x = self.pool(nn.functional.relu(self.bn(self.conv(x))))
        return self.out(self.mean(self.second(self.first(x))).flatten(1))


def trained(device: str, dtype: Any, last: bool) -> list[Any]:
    ddp.manual_seed(0)
    net = Net().to(dtype).to(device)
    x = ddp.from_numpy(draw(4, 3, 9, 8, seed=1)).to(dtype).to(device)
    if last:
        x = x.to(memory_format=ddp.channels_last)
        net = net.to(memory_format=ddp.channels_last)
    loss = nn.functional.cross_entropy(net(x), ddp.tensor([0, 1, 2, 3]).to(device))
    loss.backward()
    found = [loss, *[p.grad for p in net.parameters()], *net.buffers()]
    return [each.detach().cpu().double().numpy() for each in found]


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16], ids=str)
def test_trains_as_on_the_cpu(dtype: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dnn_fake.install(gpu, monkeypatch)
    rounding = 2e-4 if dtype is ddp.float32 else 0.3
    for one, other in zip(trained("cuda", dtype, True), trained("cpu", dtype, False), strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * max(np.abs(other).max(), 1e-2))


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16], ids=str)
def test_every_image_and_its_gradient_lies_with_channels_last(
    dtype: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp.ops import OPS, memory_formats

    fake = dnn_fake.install(gpu, monkeypatch)
    wrong: list[str] = []

    def spied(name: str, run: Any) -> Any:
        def backward(xp: Any, g: Any, *rest: Any) -> Any:
            found = run(xp, g, *rest)
            for each in (g, *found):
                image = getattr(each, "ndim", 0) == 4 and each.shape[2:] not in ((3, 3), (1, 1))
                if image and not memory_formats.is_channels_last(each):
                    wrong.append(f"{name} {each.shape} {each.strides}")
            return found

        return backward

    for name in ("conv2d", "batch_norm", "relu", "add", "max_pool2d", "adaptive_avg_pool2d"):
        op = OPS[name].device_form
        monkeypatch.setattr(op, "backward", spied(name, op.backward))
    trained("cuda", dtype, True)
    assert wrong == []
    for graph in fake.graphs:
        for each in graph.tensors:
            assert each.virtual or each.order == "last" or each.dim[1] == 1 or each.dim[2:] == [1, 1], each.dim


def stepping() -> Any:
    ddp.manual_seed(0)
    net = Net().to("cuda").to(memory_format=ddp.channels_last)
    optimizer = ddp.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with ddp.amp.autocast("cuda", dtype=ddp.bfloat16):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def batches(count: int) -> list[Any]:
    y = ddp.tensor([0, 1, 2, 3]).to("cuda")
    images = [ddp.from_numpy(draw(4, 3, 9, 8, seed=s)).float().to("cuda") for s in range(count)]
    return [(x.to(memory_format=ddp.channels_last), y) for x in images]


def test_a_step_waits_for_nothing_and_mallocs_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dnn_fake.install(gpu, monkeypatch)
    step, data = stepping(), batches(6)
    for batch in data[:3]:
        step(*batch)
    gpu.reset()
    for batch in data[3:]:
        step(*batch)
    assert not gpu.synchronizations, gpu.waits
    assert gpu.mallocs == gpu.frees == 0


def test_a_captured_step_is_the_eager_one(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dnn_fake.install(gpu, monkeypatch)
    data = batches(7)
    eager, graphed = stepping(), ddp.cuda.graphed_step(stepping(), warmup=2)
    for batch in data:
        # Not to the bit: NumPy's products may differ by where their factors lie.
        assert graphed(*batch).item() == pytest.approx(eager(*batch).item(), rel=1e-2)
    assert graphed.replays > 0
    captures = graphed.captures
    ddp.backends.cudnn.deterministic = True
    graphed(*data[0])
    assert graphed.captures > captures  # another switch, another graph


def test_a_mean_far_from_zero_keeps_its_digits(gpu: Any) -> None:
    x = np.random.default_rng(0).standard_normal((64, 4, 6, 5)).astype(np.float32) + 10_000
    x[0, :, 0, 0] = -30_000  # a first pixel far from all others must not matter either
    layer = nn.BatchNorm2d(4).to("cuda")
    y = layer(ddp.from_numpy(x).to("cuda").to(memory_format=ddp.channels_last)).detach().cpu().double().numpy()
    wide = x.astype(np.float64)
    mean, var = (f(wide, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.var))
    np.testing.assert_allclose(y, (wide - mean) / np.sqrt(var + 1e-5), rtol=5e-4, atol=1e-4)


POOLS: list[Any] = [
    lambda x: nn.functional.max_pool2d(x, 3, 2, 1),
    lambda x: nn.functional.max_pool2d(x, 2, dilation=2, ceil_mode=True),
    lambda x: nn.functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    lambda x: nn.functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    lambda x: nn.functional.adaptive_avg_pool2d(x, (3, 4)),
    lambda x: nn.functional.adaptive_avg_pool2d(x, (9, 8)),
]


@pytest.mark.parametrize("dtype", [ddp.float64, ddp.float16, ddp.bfloat16], ids=str)
@pytest.mark.parametrize("pool", POOLS, ids=range(len(POOLS)))
def test_pools(pool: Any, dtype: Any, gpu: Any) -> None:
    def run(device: str) -> list[Any]:
        x = ddp.from_numpy(draw(2, 5, 7, 6, seed=1)).to(dtype).to(device)
        x = x.to(memory_format=ddp.channels_last).detach().requires_grad_()
        y = pool(x)
        if device == "cuda":
            assert y.is_contiguous(memory_format=ddp.channels_last)
        y.backward(ddp.from_numpy(draw(*y.shape, seed=3)).to(dtype).to(device))
        assert x.grad is not None
        return [each.detach().cpu().double().numpy() for each in (y, x.grad)]

    rounding = {ddp.float64: 1e-9, ddp.float16: 1e-2, ddp.bfloat16: 5e-2}[dtype]
    for one, other in zip(run("cuda"), run("cpu"), strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)


OTHERS: dict[str, Any] = {
    "pad": lambda x: nn.functional.pad(x, (1, 2, 0, 1)),
    "crop": lambda x: nn.functional.pad(x, (-1, 2, 0, -1)),
    "group_norm": lambda x: nn.functional.group_norm(x, 2),
    "interpolate": lambda x: nn.functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "relu": nn.functional.relu,
    "add": lambda x: x + x * 2,
    "where": lambda x: ddp.where(x > 0, x, x * 0.1),
}


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_others_keep_the_format(name: str, dtype: Any, gpu: Any) -> None:
    def run(device: str) -> list[Any]:
        x = ddp.from_numpy(draw(2, 6, 5, 4, seed=1)).to(dtype).to(device)
        x = x.to(memory_format=ddp.channels_last).detach().requires_grad_()
        y = OTHERS[name](x)
        if device == "cuda":
            assert y.is_contiguous(memory_format=ddp.channels_last)
        y.backward(ddp.from_numpy(draw(*y.shape, seed=3)).to(dtype).to(device))
        assert x.grad is not None
        return [each.detach().cpu().double().numpy() for each in (y, x.grad)]

    rounding = 1e-5 if dtype is ddp.float32 else 3e-2
    for one, other in zip(run("cuda"), run("cpu"), strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)


def test_where_a_maximum_lies(gpu: Any) -> None:
    x = ddp.from_numpy(draw(2, 3, 6, 6)).float()
    expected = nn.functional.max_pool2d(x, 2, return_indices=True)
    got = nn.functional.max_pool2d(x.to("cuda").to(memory_format=ddp.channels_last), 2, return_indices=True)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.cpu().numpy(), other.numpy())


def test_a_format_is_asked_for_by_name() -> None:
    x = ddp.ones(2, 3, 4, 5)
    y = x.to(memory_format=ddp.channels_last)
    assert y.is_contiguous(memory_format=ddp.channels_last)
    assert not y.is_contiguous()
    assert y.shape == x.shape
    assert y.contiguous().is_contiguous()
    assert x.contiguous(memory_format=ddp.channels_last).stride() == (60, 1, 15, 3)
    assert y.to(memory_format=ddp.channels_last) is y
    assert ddp.ones(2, 1, 4, 5).is_contiguous(memory_format=ddp.channels_last)
    assert repr(ddp.channels_last) == "ddp.channels_last"
    with pytest.raises(ddp.errors.ShapeError, match="N, C, H, W"):
        ddp.ones(2, 3).to(memory_format=ddp.channels_last)


def test_gradients_pass_a_change_of_format() -> None:
    x = ddp.ones(2, 3, 4, 5, requires_grad=True)
    (x.to(memory_format=ddp.channels_last) * 2).sum().backward()
    assert x.grad is not None
    assert (x.grad == 2).all()
