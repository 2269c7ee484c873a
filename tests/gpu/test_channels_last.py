"""Images with channels last through a residual network: every result and gradient lies so, uncopied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from tests.ddp.cases.table import draw
from tests.ddp.cuda import emulation

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
def test_trains_as_on_the_cpu(dtype: Any, path: Any) -> None:
    rounding = 2e-3 if dtype is ddp.float32 else 0.3
    for one, other in zip(trained("cuda", dtype, True), trained("cpu", dtype, False), strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * max(np.abs(other).max(), 1e-2))


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16], ids=str)
def test_every_image_and_its_gradient_lies_with_channels_last(
    dtype: Any, cudnn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp.ops import OPS, memory_formats

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
    for graph in cudnn.graphs:
        for each in graph.tensors:
            assert each.order == "last" or each.dim[1] == 1 or each.dim[2:] == [1, 1], each.dim
