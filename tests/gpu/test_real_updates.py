"""Updates on a real GPU against PyTorch's fused ones, where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

# Above a chunk, no multiple of four, one element, none.
SHAPES = [(300, 257), (7,), (), (0, 3), (20000,), (2, 2, 3), (1023,)]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {}),
]


@pytest.mark.parametrize(("name", "settings"), KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_against_pytorch_fused(name: str, settings: dict[str, Any], dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    random = np.random.default_rng(0)
    ours = [ddp.tensor(random.standard_normal(shape), dtype="float32", device="cuda") for shape in SHAPES]
    theirs = []
    for i, p in enumerate(ours):
        theirs.append(torch.tensor(p.tolist(), device="cuda", dtype=getattr(torch, dtype)).reshape(p.shape))
        ours[i] = p.to(dtype=getattr(ddp, dtype)).requires_grad_()
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
