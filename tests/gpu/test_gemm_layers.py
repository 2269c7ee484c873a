"""Layers over cuBLASLt: how many launches they take, and what happens where an epilogue is missing.

The numbers in every dtype are compared in `test_cases.py`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import nn
from ddp.nn import functional
from tests.ddp.cases.table import draw
from tests.ddp.on_devices import results
from tests.ddp.test_ops import CASES


def made(*shape: int, dtype: Any = ddp.float32, seed: int = 0, device: str = "cuda") -> ddp.Tensor:
    return ddp.from_numpy(draw(*shape, seed=seed)).to(device, dtype).requires_grad_()


def close(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    one, other = (each.detach().cpu().to(ddp.float64).numpy() for each in (got, expected))
    assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max(initial=1))


def epilogues(gpu: Any) -> list[str]:
    return [each[3] for each in gpu.cublaslt.launched]


def test_a_linear_layer_is_one_launch_forward_and_two_backward(gpu: Any) -> None:
    layer = nn.Linear(6, 8).to("cuda")
    x = made(2, 5, 6)
    for _ in range(2):
        gpu.reset()
        gpu.cublaslt.launched.clear()
        y = layer(x)
        assert epilogues(gpu) == ["BIAS"]
        y.backward(ddp.ones_like(y))
        assert epilogues(gpu) == ["BIAS", "DEFAULT", "BGRADB"]
        assert gpu.synchronizations.total() == 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_later_gradients_are_added_where_they_are_kept(gpu: Any, bias: bool, fused: bool) -> None:
    gpu.cublaslt.lacks = lambda epilogue, dtype: not fused
    layer = nn.Linear(6, 8, bias).to("cuda")
    here = nn.Linear(6, 8, bias)
    x = made(5, 6).detach()
    here.load_state_dict(layer.state_dict())
    up = made(8, 6)
    down = made(6, 8, seed=1)
    up2 = made(8, 6, device="cpu")
    down2 = made(6, 8, seed=1, device="cpu")
    for step in range(3):
        y = layer(x)
        g = ddp.from_numpy(draw(5, 8, seed=9).astype("f4"))
        z = functional.feed_forward(x, up, None, down, None) + functional.linear_act(x, up)[:, :6]
        above = g.to("cuda")
        there = g[:, :6].contiguous().to("cuda")
        gpu.reset()
        y.backward(above)
        if step and fused and not bias:
            assert gpu.launches == {"cublasLtMatmul": 1}
        z.backward(there)
        cpu = x.cpu()
        here(cpu).backward(g)
        z = functional.feed_forward(cpu, up2, None, down2, None) + functional.linear_act(cpu, up2)[:, :6]
        z.backward(g[:, :6].contiguous())
    for one, other in zip([*layer.parameters(), up, down], [*here.parameters(), up2, down2], strict=True):
        close(one.grad, other.grad)


@pytest.mark.parametrize("lacks", ["AUX", "D", "BIAS", "BGRAD", ""])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_what_has_no_epilogue_is_made_of_its_parts(gpu: Any, activation: str, lacks: str) -> None:
    gpu.cublaslt.lacks = lambda epilogue, dtype: (
        epilogue.startswith(("DR", "DG")) if lacks == "D" else lacks in epilogue
    )
    results = []
    for device in ("cpu", "cuda"):
        shapes = (5, 6), (8, 6), (8,), (3, 8), (3,)
        xs = [made(*shape, seed=i, device=device) for i, shape in enumerate(shapes)]
        y = functional.feed_forward(*xs, activation, "tanh")
        z = functional.linear_act(*xs[:3], activation, "tanh")
        (y.sum() + (z * z).sum()).backward()
        results.append([y, z, *[x.grad for x in xs]])
    assert not any(gpu.cublaslt.lacks(each, "") for each in epilogues(gpu) if each != "DEFAULT")
    for expected, got in zip(*results, strict=True):
        close(got, expected)


def test_a_feed_forward_part_is_six_launches(gpu: Any) -> None:
    shapes = (5, 8), (16, 8), (16,), (8, 16), (8,)
    xs = [made(*shape, dtype=ddp.bfloat16, seed=i) for i, shape in enumerate(shapes)]
    for _ in range(2):
        gpu.cublaslt.launched.clear()
        gpu.reset()
        y = functional.feed_forward(*xs, "gelu", "tanh")
        assert epilogues(gpu) == ["GELU_AUX_BIAS", "BIAS"]
        assert gpu.launches.total() == 2
        g = ddp.ones_like(y)
        y.backward(g)
    assert epilogues(gpu)[2:] == ["BGRADB", "DGELU_BGRAD", "DEFAULT", "DEFAULT"]
    with ddp.no_grad():
        gpu.cublaslt.launched.clear()
        functional.feed_forward(*xs, "gelu", "tanh")
        assert epilogues(gpu) == ["GELU_BIAS", "BIAS"]


def test_the_gradient_before_relu_stays_in_16_bits(gpu: Any) -> None:
    x = made(5, 6, dtype=ddp.bfloat16)
    functional.linear_act(x, x).sum().backward()
    assert epilogues(gpu) == ["RELU", "DEFAULT", "DEFAULT"]  # the library takes no float32 beside 16 bits


# What could be made of products; each elementwise op would be compiled.
MULTIPLYING = re.compile("matmul|linear|feed|einsum|vector_norm|entropy|conv|attention|lstm|gru|rnn|_norm|interpolate")


def test_no_op_calls_cupys_products(gpu: Any) -> None:
    """They refuse to be captured in a graph."""
    result = set()
    for case in CASES:
        if not MULTIPLYING.search(case.op):
            continue
        gpu.reset()
        results(case, ddp.float32, "cuda")
        result |= {
            (case.op, launch) for launch in gpu.launches if launch in ("matmul", "dot", "vdot", "inner", "tensordot")
        }
    assert result == set()


def test_integers_go_to_our_own_kernel(gpu: Any) -> None:
    for dtype in (ddp.int64, ddp.int32, ddp.uint8):
        x = ddp.arange(12, device="cuda", dtype=dtype).reshape(3, 4)
        y = x @ x.T
        assert y.dtype is dtype
        assert y.tolist() == (np.arange(12).reshape(3, 4) @ np.arange(12).reshape(3, 4).T).astype(dtype).tolist()
    assert gpu.cublaslt.launched == []
