"""Normalisation layers against PyTorch: values, gradients, running statistics, state dicts, texts; and wrong use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn import functional as F
from ddp.ops.reduction import moments
from tests.ddp.nn.against_torch import agree, agree_as_functions, check_refusals, numbers, torch, twins

pytest.importorskip("torch", reason="PyTorch is the oracle here")

LAYERS = [
    ("BatchNorm1d", (3,), {}, (6, 3)),
    ("BatchNorm1d", (3,), {"affine": False, "momentum": 0.3}, (4, 3, 5)),
    ("BatchNorm1d", (600,), {}, (5, 600)),
    ("BatchNorm2d", (3,), {}, (2, 3, 4, 5)),
    ("BatchNorm2d", (3,), {"momentum": None, "eps": 0.1}, (2, 3, 4, 5)),
    ("BatchNorm2d", (3,), {"track_running_stats": False}, (2, 3, 4, 5)),
    ("BatchNorm2d", (2,), {}, (2, 2, 25, 25)),
    ("BatchNorm3d", (3,), {"affine": False}, (2, 3, 2, 4, 5)),
    ("LayerNorm", ((3, 4),), {"eps": 0.1}, (2, 3, 4)),
    ("LayerNorm", (4,), {"bias": False}, (2, 4)),
    ("LayerNorm", (600,), {}, (3, 600)),
    ("GroupNorm", (2, 4), {}, (3, 4)),
    ("GroupNorm", (4, 4), {"bias": False}, (3, 4, 5, 2)),
    ("InstanceNorm1d", (3,), {"affine": True}, (3, 5)),
    ("InstanceNorm2d", (3,), {}, (2, 3, 4, 5)),
    ("InstanceNorm2d", (3,), {"affine": True, "track_running_stats": True}, (2, 3, 4, 5)),
    ("RMSNorm", ((3, 4),), {"eps": 0.1}, (2, 3, 4)),
    ("RMSNorm", (600,), {}, (3, 600)),
]


@pytest.mark.parametrize(("name", "args", "options", "shape"), LAYERS)
def test_agrees_with_pytorch(name: str, args: Any, options: Any, shape: Any) -> None:
    ours, theirs = twins(name, *args, **options)
    for step in range(4):
        if step == 3:
            ours.eval()
            theirs.eval()
        agree(ours, theirs, numbers(*shape, seed=step))
        for (n, v), w in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            assert_allclose(v.numpy(), w.numpy(), rtol=1e-10, err_msg=n)


@pytest.mark.parametrize(("name", "shape"), [("1d", (0, 3)), ("1d", (2, 3, 0)), ("2d", (0, 3, 2, 2))])
def test_a_batch_of_nothing_moves_no_running_statistics(name: str, shape: Any) -> None:
    results = []
    for t in (ddp, torch):
        layer = getattr(t.nn, f"BatchNorm{name}")(shape[1], momentum=None)
        x = t.zeros(*shape).requires_grad_()
        y = layer(x)
        y.sum().backward()
        state = {key: value.tolist() for key, value in layer.state_dict().items()}
        results.append((tuple(y.shape), tuple(x.grad.shape), layer.weight.grad.tolist(), state))
    assert results[0] == results[1]


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("p", [0, -1.0, -np.inf])
def test_normalize_by_what_is_no_norm(p: float, dim: int) -> None:
    array = numbers(3, 4)
    array[0, 1] = 0
    agree_as_functions("normalize", array, p=p, dim=dim)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("weights", ["float32", "half"])
@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "batch_norm"])
def test_half_types_are_normalised_in_float32(name: str, weights: str, dtype: str) -> None:
    def run(t: Any) -> list[Any]:
        kind = getattr(t, "float32" if weights == "float32" else dtype)
        x = t.tensor(numbers(6, 64), dtype=t.float32).to(getattr(t, dtype)).requires_grad_()
        w = t.tensor(numbers(64, seed=1), dtype=t.float32).to(kind).requires_grad_()
        b = t.tensor(numbers(64, seed=2), dtype=t.float32).to(kind).requires_grad_()
        f = t.nn.functional
        y = {
            "layer_norm": lambda: f.layer_norm(x, (64,), w, b),
            "group_norm": lambda: f.group_norm(x, 4, w, b),
            "batch_norm": lambda: f.batch_norm(x, t.zeros(64, dtype=kind), t.ones(64, dtype=kind), w, b, True),
        }[name]()
        assert y.dtype == x.dtype
        y.backward(t.tensor(numbers(6, 64, seed=3), dtype=t.float32).to(x.dtype))
        assert w.grad.dtype == w.dtype
        return [np.array(v.detach().float().tolist()) for v in (y, x.grad, w.grad, b.grad)]

    for ours, theirs in zip(run(ddp), run(torch), strict=True):
        step = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
        assert_allclose(ours, theirs, rtol=2 * step, atol=8 * step)


NORMS: dict[str, Any] = {
    "layer_norm": ((7, 45), lambda t, x, eps: t.nn.functional.layer_norm(x, (45,), eps=eps)),
    "batch_norm": ((30, 3), lambda t, x, eps: t.nn.functional.batch_norm(x, None, None, training=True, eps=eps)),
    "batch_norm 2d": (
        (7, 3, 5, 9),
        lambda t, x, eps: t.nn.functional.batch_norm(x, None, None, None, None, True, 0.1, eps),
    ),
    "group_norm": ((7, 6, 5, 9), lambda t, x, eps: t.nn.functional.group_norm(x, 2, eps=eps)),
    "instance_norm": ((7, 3, 70, 90), lambda t, x, eps: t.nn.functional.instance_norm(x, eps=eps)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NORMS)
def test_constant_channels_become_exact_zeros(name: str, dtype: str) -> None:
    shape, norm = NORMS[name]
    for value in (0.1, 10.1, 1234.0, 60000.0):
        y = norm(ddp, ddp.full(shape, value, dtype=getattr(ddp, dtype)), 1e-5)
        assert not y.float().numpy().any(), value
    if not name.startswith("layer"):
        mean = ddp.full((shape[1],), 1234.5, dtype=ddp.float32)
        y = F.batch_norm(ddp.full(shape, 1234.5), mean, mean * 0)
        assert not y.numpy().any()


@pytest.mark.parametrize("scale", [1e-30, 1e19, 1e20, 1e30, 1e36])
@pytest.mark.parametrize("name", [*NORMS, "rms_norm"])
def test_squares_that_float32_cannot_hold(name: str, scale: float) -> None:
    rms: Any = lambda t, x, eps: t.nn.functional.rms_norm(x, (45,), eps=eps)  # noqa: E731
    shape, norm = NORMS.get(name, ((7, 45), rms))
    x = torch.tensor(numbers(*shape)).requires_grad_()
    g = numbers(*shape, seed=1)
    expected = norm(torch, x, 1e-10)
    expected.backward(torch.tensor(g))
    own = ddp.tensor(x.detach().numpy() * scale, dtype=ddp.float32).requires_grad_()
    y = norm(ddp, own, 1e-10 * scale**2)
    y.backward(ddp.tensor(g, dtype=ddp.float32))
    assert_allclose(y.detach().numpy(), expected.detach().numpy(), atol=1e-5)
    assert_allclose(own.grad.numpy() * np.float32(scale), x.grad.numpy(), atol=2e-5)


def test_a_mean_far_above_the_deviation_costs_no_digits() -> None:
    for name, (shape, norm) in NORMS.items():
        x = (numbers(*shape) + 1e4).astype(np.float32)
        expected = norm(torch, torch.tensor(x.astype("float64")), 1e-5)
        y = norm(ddp, ddp.tensor(x), 1e-5).numpy()
        assert_allclose(y, expected.numpy(), atol=2e-6, err_msg=name)


def test_a_variance_that_overflows_leaves_infinity_in_running_statistics() -> None:
    results = []
    for t in (ddp, torch):
        layer = t.nn.BatchNorm1d(2)
        for _ in range(2):
            layer(t.tensor([[1e30, 1.0], [-1e30, 2.0]]))
        results.append((layer.running_var.tolist(), layer.running_mean.tolist()))
    assert results[0][0] == pytest.approx(results[1][0])
    assert results[0][1] == pytest.approx(results[1][1])


def test_normalize_of_the_largest_numbers_has_a_gradient() -> None:
    grads = []
    for t in (ddp, torch):
        x = t.full((1, 16), 1e38, dtype=t.float32).requires_grad_()
        t.nn.functional.normalize(x).sum().backward()
        grads.append(x.grad.tolist())
    assert np.isfinite(grads[0]).all()
    assert_allclose(*grads, atol=1e-38)


def test_statistics_follow_the_dtype_and_the_state() -> None:
    layer = nn.BatchNorm1d(2).half()
    assert layer.running_mean.dtype == ddp.float16
    assert layer.num_batches_tracked.dtype == ddp.int64
    layer(ddp.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=ddp.float16))
    assert layer.running_mean.dtype == ddp.float16
    assert layer.num_batches_tracked.item() == 1
    layer.reset_parameters()
    assert (layer.running_mean.tolist(), layer.running_var.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert layer.num_batches_tracked.item() == 0


REFUSED: dict[type[Exception], Any] = {
    ShapeError: {
        r"BatchNorm2d: expected 4-d input, got shape \(2, 3\)": lambda: nn.BatchNorm2d(3)(ddp.ones(2, 3)),
        r"has 4 channels, got one of shape \(3,\)": lambda: nn.BatchNorm1d(3)(ddp.ones(2, 4)),
        "one value a channel": lambda: nn.BatchNorm1d(3)(ddp.ones(1, 3)),
        r"input \(2, 3\) does not end in normalized_shape \(4,\)": lambda: F.layer_norm(ddp.ones(2, 3), (4,)),
        "one value a group": lambda: F.group_norm(ddp.ones(1, 3), 3),
        "one position": lambda: F.instance_norm(ddp.ones(2, 3, 1)),
    },
    ArgumentError: {
        "running_mean and running_var are needed": lambda: F.batch_norm(ddp.ones(2, 3), None, None),
        "2 groups do not divide the 3 channels": lambda: F.group_norm(ddp.ones(2, 3), 2),
    },
    DtypeError: {"they need one dtype": lambda: F.layer_norm(ddp.ones(2, 3).double(), (3,), ddp.ones(3))},
}


def test_refusals() -> None:
    check_refusals(REFUSED)


@pytest.mark.parametrize("rows", [1, 3, 5, 9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mean_of_equal_numbers_is_that_number_without_kernels_too(dtype: str, rows: int) -> None:
    x = np.full((rows, 2, 7), 60000.7, dtype)
    mean, variance = moments.__wrapped__(np, x)
    assert (mean == x[0, 0, 0]).all()
    assert not variance.any()
    x[0, 1, 0] = np.inf
    with np.errstate(invalid="ignore"):
        mean, variance = moments.__wrapped__(np, x)
    assert mean[1] == np.inf
    assert np.isnan(variance[1])
