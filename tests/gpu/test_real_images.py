"""Attention, convolutions and channels last on a real GPU, by cuDNN and by our own kernels, against the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ddp
from tests.ddp.cases.table import draw
from tests.gpu import test_attention, test_channels_last, test_convolution

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

HALVES = [ddp.float16, ddp.bfloat16]


@pytest.fixture(params=[True, False], ids=["cudnn", "own"])
def cudnn(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[bool]:
    """Whether cuDNN computes; what it refuses is in the log of a test that fails."""
    switches = ddp.backends.cudnn
    if request.param and not switches.is_available():
        pytest.skip("cuDNN is not installed")
    caplog.set_level(logging.INFO, logger="ddp.backends.cudnn")
    before = switches.enabled, switches.allow_tf32
    switches.enabled, switches.allow_tf32 = request.param, False
    yield request.param
    switches.enabled, switches.allow_tf32 = before


@pytest.mark.parametrize("dtype", [ddp.float32, *HALVES], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (4, 1), (4, 2), (1, 2)])
def test_convolutions(dtype: Any, last: bool, groups: int, stride: int, cudnn: bool) -> None:
    expected = test_convolution.run("cpu", dtype, False, groups, stride)
    for one, other in zip(test_convolution.run("cuda", dtype, last, groups, stride), expected, strict=True):
        test_convolution.close(one, other, dtype)


def test_transposed_convolutions(cudnn: bool) -> None:
    def run(device: str) -> list[Any]:
        x = ddp.from_numpy(draw(2, 6, 5, 4, seed=1)).float().to(device).requires_grad_()
        w = ddp.from_numpy(draw(6, 4, 3, 3, seed=2)).float().to(device).requires_grad_()
        y = ddp.nn.functional.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)
        (y * y).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [each.detach().cpu().numpy() for each in (y, x.grad, w.grad)]

    for one, other in zip(run("cuda"), run("cpu"), strict=True):
        test_convolution.close(one, other, ddp.float32)


@pytest.mark.parametrize("dtype", [ddp.float32, *HALVES], ids=str)
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scale"])
@pytest.mark.parametrize("size", [(4, 8, 6), (3, 64, 200), (2, 128, 65)], ids=str)
def test_attention_of_a_projection(dtype: Any, how: dict[str, Any], size: tuple[int, ...], cudnn: bool) -> None:
    got, expected = (test_attention.projected(device, dtype, *size, **how) for device in ("cuda", "cpu"))
    for one, other in zip(got, expected, strict=True):
        test_attention.close(one, other, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_cudnn_takes_what_the_benchmarks_train(dtype: Any, cudnn: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Else they are slow, and nothing but this says why."""
    if not cudnn:
        pytest.skip("is about cuDNN")
    from ddp._cuda import cudnn_graph

    cudnn_graph._said.clear()
    for p in (0.0, 0.1):
        test_attention.projected("cuda", dtype, 12, 64, 128, is_causal=True, dropout_p=p)
    test_convolution.run("cuda", dtype, True)
    assert [record.message for record in caplog.records if record.name == "ddp.backends.cudnn"] == []


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16], ids=str)
def test_a_residual_network_trains_as_on_the_cpu(dtype: Any, cudnn: bool) -> None:
    rounding = 2e-3 if dtype is ddp.float32 else 0.3
    got, expected = test_channels_last.trained("cuda", dtype, True), test_channels_last.trained("cpu", dtype, False)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * max(np.abs(other).max(), 1e-2))


def test_plans_that_are_timed(cudnn: bool) -> None:
    if not cudnn:
        pytest.skip("is about cuDNN")
    ddp.backends.cudnn.benchmark = True
    try:
        got, expected = (test_convolution.run(device, ddp.float16, device == "cuda") for device in ("cuda", "cpu"))
    finally:
        ddp.backends.cudnn.benchmark = False
    for one, other in zip(got, expected, strict=True):
        test_convolution.close(one, other, ddp.float16)
