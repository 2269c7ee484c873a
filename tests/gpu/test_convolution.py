"""Convolutions on a GPU and on the stand-in for one, by cuDNN and by the array formulas, against the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from tests.ddp.cases.table import draw
from tests.ddp.on_devices import assert_agree
from tests.gpu import cudnn_fake

TOLERANCES: dict[Any, float] = {ddp.float32: 3e-5, ddp.float16: 1e-2, ddp.bfloat16: 5e-2}


def close(got: list[Any], expected: list[Any], dtype: Any) -> None:
    assert_agree(got, expected, TOLERANCES[dtype], TOLERANCES[dtype] / 3)


def run(device: str, dtype: Any, last: bool, groups: int = 1, stride: int = 1) -> list[Any]:
    x = ddp.from_numpy(draw(3, 8, 7, 6, seed=1)).to(dtype).to(device)
    if last:
        x = x.to(memory_format=ddp.channels_last)
    x = x.detach().requires_grad_()
    w, b = (
        ddp.from_numpy(draw(*shape, seed=2)).to(dtype).to(device).requires_grad_()
        for shape in ((4, 8 // groups, 3, 3), (4,))
    )
    y = ddp.nn.functional.conv2d(x, w, b, stride=stride, padding=1, groups=groups)
    (y * y).sum().backward()
    if device == "cuda":
        assert y.is_contiguous(memory_format=ddp.channels_last) is last
        assert y.is_contiguous() is not last
    grads = [each.grad for each in (x, w, b)]
    assert all(grad is not None for grad in grads)
    return [each.detach().cpu().float().numpy() for each in (y, *grads)]


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.float16, ddp.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (4, 1), (4, 2), (1, 2)])
def test_results_lie_as_images_do(dtype: Any, last: bool, groups: int, stride: int, path: Any) -> None:
    close(run("cuda", dtype, last, groups, stride), run("cpu", dtype, False, groups, stride), dtype)


def sliced(device: str, op: Any, last: bool) -> list[Any]:
    """Of views that begin at odd addresses; op: takes an image, filters and a bias, and returns an image of one size"""
    big = [
        ddp.from_numpy(draw(*shape, seed=3)).to(ddp.float16).to(device) for shape in ((3, 3, 5, 7), (4, 3, 3, 3), (4,))
    ]
    if last:
        big[:2] = [x.to(memory_format=ddp.channels_last) for x in big[:2]]
    x, w, b = (each.detach()[1:].requires_grad_() for each in big)
    y = op(x, w, b)
    # The gradient of y is such a view as well.
    ddp.cat([y.flatten()[:1], y.flatten()])[1:].reshape(y.shape).mul(0.5).sum().backward()
    return [each.detach().cpu().float().numpy() for each in (y, x.grad, w.grad, b.grad)]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_views_that_begin_at_odd_addresses(last: bool, transposed: bool, path: Any) -> None:
    f = ddp.nn.functional

    def op(x: Any, w: Any, b: Any) -> Any:
        if transposed:
            return f.conv_transpose2d(x, w.transpose(0, 1), b, padding=1)
        return f.conv2d(x, w, b, padding=1)

    close(sliced("cuda", op, last), sliced("cpu", op, False), ddp.float16)
    assert not isinstance(path, cudnn_fake.Fake) or len(path.ran) == 3
