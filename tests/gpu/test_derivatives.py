"""Gradients of gradients on a GPU: every op in second order against the CPU, from the same table of cases."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import GraphError
from tests.ddp.cases.table import Case, draw
from tests.ddp.on_devices import assert_agree, second_results
from tests.ddp.test_ops import OF_OP
from tests.gpu import on_both
from tests.gpu.test_cases import (
    KERNELS,
    TOLERANCES,
    _compiled,  # noqa: F401  # a fixture
)

F = ddp.nn.functional
pytestmark = pytest.mark.timeout(400)  # where no kernel is compiled yet


def agree(op: str, dtype: Any) -> None:
    for case in OF_OP[op]:
        print(case.label, dtype)  # so that a failure names the case
        got, expected = (second_results(case, dtype, device) for device in ("cuda", "cpu"))
        assert_agree(got, expected, TOLERANCES[dtype], TOLERANCES[dtype])


# The others consist of ops that test_cases.py compares, and whose derivatives the tests of the CPU check.
@pytest.mark.parametrize("op", [pytest.param(op, marks=[pytest.mark.long] * (not KERNELS.search(op))) for op in OF_OP])
def test_second_derivatives_agree_with_the_cpu(op: str, gpu: Any) -> None:
    agree(op, ddp.float64)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [ddp.bfloat16, ddp.float16], ids=str)
@pytest.mark.parametrize("op", [op for op in OF_OP if KERNELS.search(op)])
def test_second_derivatives_in_16_bits(op: str, dtype: Any, gpu: Any) -> None:
    agree(op, dtype)


@pytest.mark.parametrize("op", [op for op in OF_OP if op.startswith("conv")])
def test_second_derivatives_of_convolutions_by_cudnn(op: str, cudnn: Any) -> None:
    for dtype in (ddp.bfloat16, ddp.float32):
        agree(op, dtype)
    assert cudnn.ran or op == "conv3d"


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_of_attention_by_cudnn(causal: bool, cudnn: Any) -> None:
    def attend(t: Any, *parts: Any) -> Any:
        return F.scaled_dot_product_attention(*parts, is_causal=causal)

    case = Case("attention", "8 wide", attend, tuple(draw(2, 3, 6, 8, seed=i) for i in range(3)))
    got, expected = (second_results(case, ddp.bfloat16, device) for device in ("cuda", "cpu"))
    assert cudnn.ran == ["sdpa", "sdpa_backward", "sdpa_backward"]  # with a graph and without
    assert_agree(got, expected, 5e-2, 5e-2)


@on_both
@pytest.mark.parametrize("shape", [(4, 6), (2, 5, 1, 1)], ids=["elements", "channels"])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_what_dropout_dropped_is_dropped_in_every_order(p: float, shape: Any, gpu: Any) -> None:
    """The mask is drawn again from its seed: in z = drop(x)^3 a dropped element gives nothing in any order."""
    x = ddp.from_numpy(draw(*shape)).to("cuda").expand(*shape[:2], 3, 4).transpose(0, 1) if len(shape) > 2 else None
    x = (ddp.from_numpy(draw(*shape)).to("cuda") if x is None else x).detach().requires_grad_()
    y = (F.dropout if len(shape) == 2 else F.dropout2d)(x, p)
    (first,) = ddp.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = ddp.autograd.grad(first.sum(), x)
    factor = (y / x).detach()  # 0 or 1/(1 - p)
    assert ddp.allclose(first, 3 * y**2 * factor)
    assert ddp.allclose(second, 6 * y * factor**2)


@pytest.mark.parametrize("library", ["cudnn", "gpu"])
def test_attention_with_dropout(library: str, request: pytest.FixtureRequest) -> None:
    """By the formulas it drops alike in every order; what cuDNN dropped is not known."""
    request.getfixturevalue(library)
    dtype = ddp.float16 if library == "cudnn" else ddp.float64
    q, k = (ddp.from_numpy(draw(2, 3, 8, 8, seed=i)).to("cuda", dtype).requires_grad_() for i in range(2))
    v = ddp.eye(8, dtype=dtype, device="cuda").expand(2, 3, 8, 8)  # so that the result is what was not dropped
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    if library == "cudnn":
        with pytest.raises(GraphError, match="dropout by cuDNN"):
            ddp.autograd.grad(y.sum(), (q, k), create_graph=True)
        return
    weights = ddp.from_numpy(draw(2, 3, 8, 8, seed=3)).to("cuda")
    kept = (y != 0).detach() * 2.0
    composed = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) * kept
    for one, other in zip(*(second((z * weights).sum(), q, k) for z in (y, composed)), strict=True):
        assert ddp.allclose(one, other, rtol=1e-9, atol=1e-12)


def second(value: Any, *inputs: Any) -> Any:
    gradients = ddp.autograd.grad(value, inputs, create_graph=True)
    return ddp.autograd.grad(sum(g.square().sum() for g in gradients), inputs)


@on_both
def test_across_devices(gpu: Any) -> None:
    """A tensor that is moved to the GPU in the graph gets its gradients back on the CPU, to any order."""
    x = ddp.from_numpy(draw(3)).requires_grad_()
    (g,) = ddp.autograd.grad((x.to("cuda") ** 3).sum(), x, create_graph=True)
    (h,) = ddp.autograd.grad(g.sum(), x)
    assert (g.device.type, h.device.type) == ("cpu", "cpu")
    assert ddp.allclose(h, 6 * x)


@on_both
@pytest.mark.parametrize("memory_format", [ddp.contiguous_format, ddp.channels_last], ids=str)
def test_a_penalty_trains_as_on_the_cpu(memory_format: Any, gpu: Any) -> None:
    """Four steps of a critic with a gradient penalty, of images through convolutions, norms and activations."""

    def train(device: str) -> Any:
        ddp.manual_seed(0)
        nn = ddp.nn
        layers = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        net = nn.Sequential(*layers, nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)).double().to(device)
        adam = ddp.optim.Adam(net.parameters(), lr=1e-2)
        for step in range(4):
            images = ddp.from_numpy(draw(3, 2, 8, 8, seed=step)).to(device, memory_format=memory_format)
            images.requires_grad_()
            scores = net(images)
            (slopes,) = ddp.autograd.grad(scores.sum(), images, create_graph=True)
            adam.zero_grad()
            (F.softplus(-scores).mean() + slopes.square().sum()).backward()
            adam.step()
        return [p.detach().cpu().numpy() for p in net.parameters()]

    for one, other in zip(train("cuda"), train("cpu"), strict=True):
        assert_allclose(one, other, rtol=1e-7, atol=1e-9)


@on_both
def test_grad_with_a_graph_is_kept_and_freed(gpu: Any) -> None:
    x = ddp.tensor([3.0], device="cuda", requires_grad=True)
    gc.disable()
    try:
        for _ in range(2):
            (x**3).sum().backward(create_graph=True)
        assert x.grad.tolist() == [54.0]
        assert ddp.autograd.grad(x.grad.sum(), x)[0].tolist() == [36.0]
        graph = weakref.ref(x.grad.edge)
        x.grad = None
        assert graph() is None
    finally:
        gc.enable()


@on_both
def test_hooks_on_another_stream(gpu: Any) -> None:
    def of(device: str) -> float:
        x = ddp.tensor([3.0], device=device, requires_grad=True)
        y = x.square()
        y.register_hook(lambda g: g * x)
        (g,) = ddp.autograd.grad(y.square().sum(), x, create_graph=True)
        return float(ddp.autograd.grad(g.sum(), x)[0])

    with ddp.cuda.stream(ddp.cuda.Stream()):
        assert of("cuda") == of("cpu")


def test_on_the_second_gpu(gpu: Any) -> None:
    x = ddp.from_numpy(draw(3, 4)).to("cuda:1").requires_grad_()
    (g,) = ddp.autograd.grad(F.layer_norm(x, (4,)).max(1)[0].exp().sum(), x, create_graph=True)
    (h,) = ddp.autograd.grad(g.square().sum(), x)
    assert (g.device.index, h.device.index) == (1, 1)
