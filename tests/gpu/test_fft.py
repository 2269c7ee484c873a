"""Fourier transforms and volumes on the stand-in for a GPU, against the CPU."""

from __future__ import annotations

from typing import Any

from numpy.testing import assert_allclose

import ddp
from ddp import nn
from tests.ddp.cases.table import draw


def transformed(device: str) -> Any:
    x = ddp.from_numpy(draw(3, 4, 6)).to(device).requires_grad_()
    z = ddp.fft.rfft2(x)
    y = ddp.fft.irfft(z * z.conj(), n=5).sum() + ddp.fft.fftn(x, s=(5, 3)).angle().sum()
    (y + ddp.fft.fftshift(z).abs().mean() + (x * ddp.fft.fftfreq(6, device=device)).sum()).backward()
    assert x.grad is not None
    return x.grad


def convolved(device: str) -> Any:
    ddp.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1)).double()
    x = ddp.from_numpy(draw(2, 2, 4, 4, 4)).to(device).requires_grad_()
    net.to(device)(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_agree_with_the_cpu(gpu: Any) -> None:
    for run in (transformed, convolved):
        result = run("cuda")
        assert result.is_cuda
        assert_allclose(result.cpu().numpy(), run("cpu").numpy(), 1e-10, 1e-12)
