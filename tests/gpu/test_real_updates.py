"""Updates, clipping and GradScaler on a real GPU: against the CPU, and against PyTorch's fused ones where it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.amp import GradScaler
from ddp.nn import utils
from ddp.ops.op import BFLOAT16

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

# Above a chunk, no multiple of four, one element, none.
SHAPES = [(300, 257), (7,), (), (0, 3), (20000,), (2, 2, 3), (1023,)]
ROUNDING: dict[Any, float] = {np.float16: 1e-2, BFLOAT16: 5e-2, np.float32: 1e-5, np.float64: 1e-12}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {}),
    ("Lion", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {}),
]


def parameters(device: str, dtype: Any) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        ddp.from_numpy(np.asarray(random.standard_normal(shape)).astype(dtype)).to(device).requires_grad_()
        for shape in SHAPES
    ]


def give(params: list[Any], step: int) -> None:
    random = np.random.default_rng(step)
    for p in params:
        g = np.asarray(random.standard_normal(p.shape))
        p.grad = None if random.random() < 0.3 else ddp.from_numpy(g).to(p.device, p.dtype)


def assert_close(found: list[Any], expected: list[Any], rounding: float) -> None:
    for p, q in zip(found, expected, strict=True):
        one, other = p.detach().cpu().numpy().astype("f8"), q.detach().cpu().numpy().astype("f8")
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_clipping(order: float, dtype: Any) -> None:
    both = [parameters(device, dtype) for device in ("cuda", "cpu")]
    norms = []
    for params in both:
        give(params, 1)
        norms.append(utils.clip_grad_norm_(params, 0.5, order).item())
    assert norms[0] == pytest.approx(norms[1], rel=max(1e-4, ROUNDING[dtype]) if dtype != np.float64 else 1e-9)
    grads = [[p.grad for p in params if p.grad is not None] for params in both]
    assert_close(grads[0], grads[1], ROUNDING[dtype])


def test_scaler() -> None:
    def run(device: str) -> list[Any]:
        scaler = GradScaler(device, init_scale=8.0, growth_interval=2)
        p = ddp.tensor([1.0, 2.0], device=device, requires_grad=True)
        optimizer = ddp.optim.AdamW([p], lr=0.5)
        seen = []
        for factor in (1.0, 1.0, math.inf, 1.0, math.nan, 1.0, 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale((p * ddp.tensor([1.0, factor], device=device)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen += [scaler.get_scale(), *p.tolist()]
        return seen

    assert run("cuda") == pytest.approx(run("cpu"), rel=1e-6)


@pytest.mark.parametrize(("name", "settings"), [k for k in KINDS if k[0] in ("SGD", "Adam", "AdamW")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_against_pytorch_fused(name: str, settings: dict[str, Any], dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    ours, theirs = parameters("cuda", np.float32), []
    for i, p in enumerate(ours):
        theirs.append(torch.tensor(p.tolist(), device="cuda", dtype=getattr(torch, dtype)).reshape(p.shape))
        ours[i] = p.detach().to(dtype=getattr(ddp, dtype)).requires_grad_()
    optimizers = [
        getattr(ddp.optim, name)(ours, lr=0.01, **settings),
        getattr(torch.optim, name)(theirs, lr=0.01, fused=True, **settings),
    ]
    for step in range(5):
        random = np.random.default_rng(step)
        for p, q in zip(ours, theirs, strict=True):
            g = np.asarray(random.standard_normal(p.shape), np.float32)
            p.grad = ddp.from_numpy(g).to("cuda", p.dtype)
            q.grad = torch.from_numpy(g).to("cuda", q.dtype).reshape(q.shape)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        rounding = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(
            p.detach().cpu().float().numpy(), q.float().cpu().numpy(), rtol=rounding, atol=rounding
        )
