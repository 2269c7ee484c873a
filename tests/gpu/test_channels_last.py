"""Images with channels last through a residual network: every result and gradient lies so, uncopied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import nn
from tests.ddp.cases.table import draw


class Net(nn.Module):
    """A residual network of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.second = nn.Conv2d(8, 16, 3, 2, 1, bias=False)
        self.down = nn.Conv2d(8, 16, 1, 2, bias=False)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        x = self.pool(nn.functional.relu(self.norm(self.first(x))))
        return self.out(self.mean(nn.functional.relu(self.second(x) + self.down(x))).flatten(1))


def trained(device: str, dtype: Any, last: bool) -> list[Any]:
    ddp.manual_seed(0)
    net = Net().to(dtype).to(device)
    x = ddp.from_numpy(draw(4, 3, 9, 8, seed=1)).to(dtype).to(device)
    if last:
        x = x.to(memory_format=ddp.channels_last)
        net = net.to(memory_format=ddp.channels_last)
    loss = nn.functional.cross_entropy(net(x), ddp.tensor([0, 1, 2, 3]).to(device))
    loss.backward()
    results = [loss, *[p.grad for p in net.parameters()], *net.buffers()]
    return [each.detach().cpu().double().numpy() for each in results]


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16], ids=str)
def test_every_image_and_its_gradient_lies_with_channels_last(
    dtype: Any, cudnn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp.ops import OPS, memory_formats

    wrong: list[str] = []

    def spied(name: str, run: Any) -> Any:
        def backward(xp: Any, g: Any, *rest: Any) -> Any:
            result = run(xp, g, *rest)
            for each in (g, *result):
                image = getattr(each, "ndim", 0) == 4 and each.shape[2:] not in ((3, 3), (1, 1))
                if image and not memory_formats.is_channels_last(each):
                    wrong.append(f"{name} {each.shape} {each.strides}")
            return result

        return backward

    for name in ("conv2d", "batch_norm", "relu", "add", "max_pool2d", "adaptive_avg_pool2d"):
        op = OPS[name].device_kernel
        monkeypatch.setattr(op, "backward", spied(name, op.backward))
    rounding = 2e-3 if dtype is ddp.float32 else 0.3
    for one, other in zip(trained("cuda", dtype, True), trained("cpu", dtype, False), strict=True):
        assert_allclose(one, other, rtol=rounding, atol=rounding * max(np.abs(other).max(), 1e-2))
    assert wrong == []
    for graph in cudnn.graphs:
        for tensor in graph.tensors:
            assert tensor.order == "last" or tensor.dim[1] == 1 or tensor.dim[2:] == [1, 1], tensor.dim
