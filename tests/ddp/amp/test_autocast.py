"""autocast: which dtype each op computes in, and that gradients come back in the parameters' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import amp, nn
from ddp.amp.autocast_mode import FLOAT32_OPS, LOW_PRECISION_OPS
from ddp.errors import ArgumentError, DtypeError
from ddp.nn import functional as F
from ddp.ops import OPS


def test_every_listed_op_exists() -> None:
    for table in (LOW_PRECISION_OPS, FLOAT32_OPS):
        for names in table.values():
            assert names <= set(OPS), names - set(OPS)


CASES: list[tuple[str, Any]] = [
    ("matmul", lambda t, x, w: x @ w),
    ("linear", lambda t, x, w: t.nn.functional.linear(x, w)),
    ("conv2d", lambda t, x, w: t.nn.functional.conv2d(x.reshape(1, 1, 4, 4), w.reshape(1, 1, 4, 4))),
    ("add after matmul", lambda t, x, w: x @ w + x),
    ("relu", lambda t, x, w: t.relu(x @ w)),
    ("softmax", lambda t, x, w: t.softmax(x @ w, dim=-1)),
    ("log_softmax", lambda t, x, w: t.nn.functional.log_softmax(x @ w, dim=-1)),
    ("sum", lambda t, x, w: (x @ w).sum()),
    ("prod", lambda t, x, w: (x @ w).prod()),
    ("mse_loss", lambda t, x, w: t.nn.functional.mse_loss(x @ w, x)),
    ("layer_norm", lambda t, x, w: t.nn.functional.layer_norm(x @ w, (4,), w[0], w[1])),
    ("attention", lambda t, x, w: t.nn.functional.scaled_dot_product_attention(x[None], w[None], x[None])),
    ("float64", lambda t, x, w: x.double() @ w.double()),
    # What one layer rounds, the next one takes with its own float32 weight.
    ("linear", lambda t, x, w: t.nn.functional.linear(x @ w, w, w[0])),
    ("conv1d", lambda t, x, w: t.nn.functional.conv1d((x @ w)[None], w[:, :, None], w[0])),
    ("conv2d", lambda t, x, w: t.nn.functional.conv2d((x @ w)[None, None], w[None, None], w[0, :1])),
    ("transposed", lambda t, x, w: t.nn.functional.conv_transpose2d((x @ w)[None, None], w[None, None], w[0, :1])),
    ("prelu", lambda t, x, w: t.nn.functional.prelu(x @ w, w[0, :1])),
]


@pytest.mark.parametrize(("label", "fn"), CASES, ids=[label for label, _ in CASES])
def test_agrees_with_pytorch_on_the_cpu(label: str, fn: Any, torch: Any) -> None:
    x, w = (np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i in range(2))
    results = []
    for t, scope in ((ddp, amp.autocast("cpu")), (torch, torch.autocast("cpu", torch.bfloat16))):
        a = t.tensor(x.tolist(), requires_grad=True)
        b = t.tensor(w.tolist(), requires_grad=True)
        with scope:
            y = fn(t, a, b)
        y.float().sum().backward()
        assert str(a.grad.dtype).endswith("float32")
        results.append(
            (str(y.dtype).removeprefix("torch."), y.detach().double().numpy(), a.grad.numpy(), b.grad.numpy())
        )
    (ours, *values), (theirs, *expected) = results
    assert ours == theirs
    for value, reference in zip(values, expected, strict=True):
        assert_allclose(value, reference, rtol=0.05, atol=0.05)


def test_nesting_threads_and_errors() -> None:
    x = ddp.randn(2, 2)
    assert not amp.is_autocast_enabled("cpu")
    with pytest.raises(ZeroDivisionError), amp.autocast("cpu"):  # noqa: PT012  # what holds inside is the test
        assert amp.is_autocast_enabled("cpu")
        assert (x @ x).dtype == ddp.bfloat16
        with amp.autocast("cpu", enabled=False):
            assert (x @ x).dtype == ddp.float32
        with amp.autocast("cpu", ddp.float16):
            assert (x @ x).dtype == ddp.float16
        with amp.autocast("cuda"):
            assert (x @ x).dtype == ddp.bfloat16
        assert (x @ x).dtype == ddp.bfloat16
        1 / 0  # noqa: B018
    assert (x @ x).dtype == ddp.float32
    assert amp.autocast("cpu")(lambda: (x @ x).dtype)() == ddp.bfloat16
    with pytest.raises(ArgumentError):
        amp.autocast("tpu")
    with pytest.raises(DtypeError):
        amp.autocast("cpu", ddp.float64)


def test_training_in_mixed_precision() -> None:
    ddp.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.2)
    scaler = amp.GradScaler("cpu", init_scale=1024.0)
    x = ddp.randn(32, 8)
    t = ddp.randint(0, 3, (32,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with amp.autocast("cpu"):
            loss = F.cross_entropy(model(x), t)
        assert loss.dtype == ddp.float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert all(p.dtype == ddp.float32 for p in model.parameters())
    assert losses[-1] < 0.5 * losses[0]


def test_a_parameter_on_other_memory_is_cast_again() -> None:
    layer = ddp.nn.Linear(2, 2, bias=False)
    with amp.autocast("cpu"):
        layer(ddp.ones(1, 2))
        layer.weight.data = ddp.zeros(2, 2)
        assert layer(ddp.ones(1, 2)).tolist() == [[0.0, 0.0]]
