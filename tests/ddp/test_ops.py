"""Every op against finite differences, and against PyTorch, from one table.

A case is a function of a module `t` and of tensors, written so that `t` may be `ddp` or `torch`. A test proves that the
table misses no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import ddp
from ddp._engine import Node
from ddp.ops import OPS


class Case(NamedTuple):
    op: str
    label: str
    fn: Callable[..., Any]  # fn(t, *inputs)
    inputs: tuple[np.ndarray[Any, Any], ...]  # float64 ones get a gradient


def draw(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray[Any, Any]:
    """Distinct numbers, no two near each other, none near zero: differences must not step over a kink."""
    n = int(np.prod(shape))
    steps = low + (high - low) * (np.arange(n) + 0.5) / max(n, 1) + 0.003
    return np.random.default_rng(seed + n).permutation(steps).reshape(shape)


def spaced(*shape: int, seed: int = 0, **bounds: float) -> np.ndarray[Any, Any]:
    """As draw, but every second row and transposed: not contiguous."""
    return draw(*reversed(shape[:-1]), shape[-1] * 2, seed=seed, **bounds)[..., ::2].transpose(
        *reversed(range(len(shape) - 1)), len(shape) - 1
    )


def unary(op: str, low: float = -2.0, high: float = 2.0, fn: Callable[..., Any] | None = None) -> Iterator[Case]:
    run = fn or (lambda t, x: getattr(t, op)(x))
    bounds = {"low": low, "high": high}
    yield Case(op, "matrix", run, (draw(3, 4, **bounds),))
    yield Case(op, "0-d", run, (draw(**bounds),))
    yield Case(op, "empty", run, (draw(0, 3, **bounds),))
    yield Case(op, "non-contiguous", run, (spaced(3, 4, **bounds),))


def binary(op: str, fn: Callable[..., Any], low: float = -2.0, **right: float) -> Iterator[Case]:
    left = {"low": low}
    for label, a, b in [
        ("same", (3, 4), (3, 4)),
        ("rows", (3, 4), (4,)),
        ("columns", (3, 1), (2, 3, 4)),
        ("outer", (3, 1), (1, 4)),
        ("0-d", (), ()),
        ("0-d and matrix", (), (2, 3)),
        ("empty", (0, 3), (3,)),
        ("empty broadcast", (0, 3), (1, 3)),
    ]:
        yield Case(op, label, fn, (draw(*a, **left), draw(*b, seed=1, **{"low": -1.9, **right})))
    yield Case(op, "non-contiguous", fn, (spaced(3, 4, **left), spaced(3, 4, seed=1, **{"low": -1.9, **right})))


def reduction(op: str, empty: bool = True, always_dim: bool = False) -> Iterator[Case]:
    for dim in (None, 0, -1, (0, 2), (2, 1, 0)):
        for keepdim in (False, True):
            if dim is not None or not (keepdim or always_dim):
                how = (lambda t, x: getattr(t, op)(x)) if dim is None else _over(op, dim, keepdim)
                yield Case(op, f"dim={dim} keepdim={keepdim}", how, (draw(2, 3, 4),))
    zero = _over(op, 0, False)
    yield Case(op, "0-d", zero, (draw(),))
    yield Case(op, "non-contiguous", _over(op, 1, False), (spaced(2, 3, 4),))
    if empty:
        yield Case(op, "empty", _over(op, 1, False), (draw(0, 3),))


def _over(op: str, dim: Any, keepdim: bool) -> Callable[..., Any]:
    return lambda t, x: getattr(t, op)(x, dim=dim, keepdim=keepdim)


def along(op: str) -> Iterator[Case]:
    for dim in (0, -1):
        yield Case(op, f"dim={dim}", lambda t, x, dim=dim: getattr(t, op)(x, dim=dim), (draw(3, 4),))
    yield Case(op, "0-d", lambda t, x: getattr(t, op)(x, dim=0), (draw(),))
    yield Case(op, "empty", lambda t, x: getattr(t, op)(x, dim=1), (draw(0, 3),))
    yield Case(op, "no classes", lambda t, x: getattr(t, op)(x, dim=1), (draw(2, 0),))
    yield Case(op, "large", lambda t, x: getattr(t, op)(x * 400, dim=1), (draw(2, 3),))
    yield Case(op, "non-contiguous", lambda t, x: getattr(t, op)(x, dim=0), (spaced(3, 4),))


def indexing() -> Iterator[Case]:
    for label, fn in {
        "row": lambda t, x: x[1],
        "element": lambda t, x: x[1, 2, 3],
        "negative": lambda t, x: x[-1, :, -2],
        "slice": lambda t, x: x[:, 1:, ::2],
        "ellipsis": lambda t, x: x[..., 0],
        "new axis": lambda t, x: x[:, None, 1],
        "empty": lambda t, x: x[:, 2:1],
        "list": lambda t, x: x[:, [0, 2, 0]],
        "tensor": lambda t, x: x[t.tensor([1, 1, 0])],
        "two tensors": lambda t, x: x[t.tensor([1, 0, 1]), t.tensor([2, 0, 2])],
        "apart": lambda t, x: x[t.tensor([1, 0]), :, t.tensor([3, 3])],
        "mask": lambda t, x: x[x > 0],
        "row mask": lambda t, x: x[t.tensor([True, False])],
        "0-d tensor": lambda t, x: x[t.tensor(1)],
        "twice": lambda t, x: x[1][0],
    }.items():
        yield Case("getitem", label, fn, (draw(2, 3, 4),))
    yield Case("getitem", "non-contiguous", lambda t, x: x[0, 1:], (spaced(2, 3, 4),))
    yield Case("getitem", "0-d", lambda t, x: x[...], (draw(),))
    for keepdim in (False, True):
        yield Case("gather", f"max {keepdim}", lambda t, x, k=keepdim: t.max(x, 1, keepdim=k)[0], (draw(2, 3, 4),))
    yield Case("gather", "min", lambda t, x: t.min(x, -1)[0], (spaced(2, 3, 4),))
    yield Case("gather", "empty", lambda t, x: t.max(x, 1)[0], (draw(0, 3),))


def shapes() -> Iterator[Case]:
    x = (draw(2, 3, 4),)
    yield Case("reshape", "inferred", lambda t, x: x.reshape(4, -1), x)
    yield Case("reshape", "copy", lambda t, x: t.transpose(x, 0, 2).reshape(6, 4), x)
    yield Case("reshape", "flatten", lambda t, x: t.flatten(x, 1), x)
    yield Case("reshape", "squeeze", lambda t, x: t.squeeze(x[:, :1]), x)
    yield Case("reshape", "squeeze dim", lambda t, x: t.squeeze(x[:1, :1], 1), x)
    yield Case("reshape", "unsqueeze", lambda t, x: t.unsqueeze(x, -2), x)
    yield Case("reshape", "0-d", lambda t, x: x.reshape(1, 1), (draw(),))
    yield Case("reshape", "flatten 0-d", lambda t, x: x.flatten(), (draw(),))
    yield Case("reshape", "empty", lambda t, x: x.reshape(3, 0), (draw(0, 3),))
    yield Case("reshape", "non-contiguous", lambda t, x: x.reshape(-1), (spaced(2, 3, 4),))
    yield Case("permute", "three", lambda t, x: t.permute(x, (2, 0, 1)), x)
    yield Case("permute", "negative", lambda t, x: x.permute(-1, 0, 1), x)
    yield Case("permute", "transpose", lambda t, x: x.transpose(-1, 0), x)
    yield Case("permute", "T", lambda t, x: x.T, (draw(2, 3),))
    yield Case("permute", "t", lambda t, x: x.t(), (draw(3),))
    yield Case("permute", "empty", lambda t, x: x.T, (draw(0, 3),))
    yield Case("permute", "0-d", lambda t, x: x.permute(()), (draw(),))
    yield Case("permute", "non-contiguous", lambda t, x: x.permute(1, 0, 2), (spaced(2, 3, 4),))
    yield Case("expand", "ones", lambda t, x: x.expand(2, 3, 4), (draw(3, 1),))
    yield Case("expand", "kept", lambda t, x: x.expand(2, -1, 4), (draw(3, 1),))
    yield Case("expand", "0-d", lambda t, x: x.expand(2, 2), (draw(),))
    yield Case("expand", "empty", lambda t, x: x.expand(0, 3), (draw(1, 3),))
    yield Case("expand", "non-contiguous", lambda t, x: x.expand(2, 3, 2), (spaced(3, 2),))
    two = (draw(2, 3), draw(2, 3, seed=1))
    yield Case("cat", "rows", lambda t, x, y: t.cat([x, y]), two)
    yield Case("cat", "lengths", lambda t, x, y: t.cat((x, y, x), dim=-1), (draw(2, 3), draw(2, 1)))
    yield Case("cat", "empty", lambda t, x, y: t.cat((x, y)), (draw(0, 3), draw(2, 3)))
    yield Case("cat", "non-contiguous", lambda t, x, y: t.cat((x, y), 1), (spaced(2, 3), spaced(2, 3)))
    yield Case("stack", "first", lambda t, x, y: t.stack([x, y]), two)
    yield Case("stack", "last", lambda t, x, y: t.stack([x, y, x], dim=-1), two)
    yield Case("stack", "0-d", lambda t, x, y: t.stack([x, y]), (draw(), draw(seed=1)))
    yield Case("stack", "empty", lambda t, x: t.stack([x, x], 1), (draw(0, 3),))
    yield Case("stack", "non-contiguous", lambda t, x: t.stack([x, x], 1), (spaced(2, 3),))
    yield Case("pad", "last", lambda t, x: t.nn.functional.pad(x, (1, 2)), (draw(2, 3),))
    yield Case("pad", "both", lambda t, x: t.nn.functional.pad(x, (1, 0, 2, 3), value=1.5), (draw(2, 3),))
    yield Case("pad", "empty", lambda t, x: t.nn.functional.pad(x, (1, 1)), (draw(2, 0),))
    yield Case("pad", "non-contiguous", lambda t, x: t.nn.functional.pad(x, (0, 1, 1, 0)), (spaced(2, 3),))


def products() -> Iterator[Case]:
    for a, b in [
        ((2, 3), (3, 4)),
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (4, 3, 2)),
        ((3,), (5, 3, 4)),
        ((5, 2, 3), (3,)),
        ((0, 3), (3, 4)),
        ((2, 0), (0, 4)),
        ((0, 2, 3), (3, 4)),
    ]:
        label = f"{'empty ' * (0 in a)}{a} @ {b}"
        yield Case("matmul", label, lambda t, x, y: x @ y, (draw(*a), draw(*b, seed=1)))
    yield Case("matmul", "non-contiguous", lambda t, x, y: t.matmul(x, y), (spaced(2, 3), spaced(3, 4)))

    def linear(t: Any, *inputs: Any) -> Any:
        return t.nn.functional.linear(*inputs)

    yield Case("linear", "bias", linear, (draw(5, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "no bias", linear, (draw(5, 3), draw(4, 3, seed=1)))
    yield Case("linear", "vector", linear, (draw(3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "batches", linear, (draw(2, 5, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "empty", linear, (draw(0, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "no features", linear, (draw(2, 0), draw(4, 0), draw(4, seed=2)))
    yield Case("linear", "non-contiguous", linear, (spaced(5, 3), spaced(4, 3, seed=1), draw(4, seed=2)))


def images() -> Iterator[Case]:
    def conv(**how: Any) -> Callable[..., Any]:
        return lambda t, *inputs: t.nn.functional.conv2d(*inputs, **how)

    x, w, b = draw(2, 4, 6, 5), draw(6, 4, 3, 2, seed=1), draw(6, seed=2)
    yield Case("conv2d", "plain", conv(), (x, w, b))
    yield Case("conv2d", "no bias", conv(), (x, w))
    yield Case("conv2d", "stride", conv(stride=2), (x, w, b))
    yield Case("conv2d", "stride leaves a rest", conv(stride=(3, 2)), (x, w, b))
    yield Case("conv2d", "padding", conv(padding=(1, 2)), (x, w, b))
    yield Case("conv2d", "dilation", conv(dilation=(2, 3)), (x, w, b))
    yield Case("conv2d", "all", conv(stride=(2, 1), padding=1, dilation=(1, 2)), (x, w, b))
    yield Case("conv2d", "groups", conv(groups=2, padding=1), (x, draw(6, 2, 3, 2, seed=1), b))
    yield Case("conv2d", "depthwise", conv(groups=4), (x, draw(4, 1, 2, 2, seed=1), draw(4)))
    yield Case("conv2d", "1x1", conv(), (x, draw(3, 4, 1, 1, seed=1), draw(3)))
    yield Case("conv2d", "one image", conv(), (draw(4, 6, 5), w, b))
    yield Case("conv2d", "empty", conv(padding=1), (draw(0, 4, 6, 5), w, b))
    yield Case("conv2d", "non-contiguous", conv(padding=1), (spaced(2, 4, 6, 5), spaced(6, 4, 3, 2), b))

    def pool(*how: Any, **more: Any) -> Callable[..., Any]:
        return lambda t, x: t.nn.functional.max_pool2d(x, *how, **more)

    yield Case("max_pool2d", "plain", pool(2), (x,))
    yield Case("max_pool2d", "overlapping", pool(3, 1), (x,))
    yield Case("max_pool2d", "padding", pool(3, 2, 1), (x,))
    yield Case("max_pool2d", "sizes", pool((2, 3), (1, 2), (1, 0)), (x,))
    yield Case("max_pool2d", "dilation", pool(2, 1, dilation=2), (x,))
    yield Case("max_pool2d", "one image", pool(2), (draw(2, 4, 4),))
    yield Case("max_pool2d", "empty", pool(2), (draw(0, 2, 4, 4),))
    yield Case("max_pool2d", "non-contiguous", pool(2), (spaced(2, 4, 6, 5),))


def losses() -> Iterator[Case]:
    def loss(reduction: str) -> Callable[..., Any]:
        return lambda t, x, y: t.nn.functional.cross_entropy(x, y, reduction=reduction)

    for reduction in ("mean", "sum", "none"):
        yield Case("cross_entropy", reduction, loss(reduction), (draw(4, 3), np.array([0, 2, 2, 1])))
        yield Case("cross_entropy", f"{reduction} 2-d", loss(reduction), (draw(2, 3, 2, 1), np.array([[[0], [2]]] * 2)))
        yield Case("cross_entropy", f"{reduction} one", loss(reduction), (draw(3), np.array(2)))
    yield Case("cross_entropy", "empty", loss("sum"), (draw(0, 3), np.zeros(0, np.int64)))
    yield Case("cross_entropy", "non-contiguous", loss("mean"), (spaced(4, 3), np.array([0, 1, 2, 0])))
    yield Case(
        "cross_entropy",
        "large",
        lambda t, x, y: t.nn.functional.cross_entropy(x * 400, y),
        (draw(4, 3), np.array([0, 2, 2, 1])),
    )


CASES = [
    *binary("add", lambda t, x, y: x + y),
    *binary("sub", lambda t, x, y: x - y),
    *binary("mul", lambda t, x, y: x * y),
    *binary("div", lambda t, x, y: x / y, low=-1.5, high=-0.5),
    *binary("pow", lambda t, x, y: x**y, low=0.3),
    *binary("maximum", lambda t, x, y: t.maximum(x, y)),
    *binary("minimum", lambda t, x, y: t.minimum(x, y)),
    *(case for case in binary("where", lambda t, x, y: t.where(t.tensor(True), x, y * 1))),
    Case("where", "mask", lambda t, c, x, y: t.where(c, x, y), (draw(2, 1, 3) > 0, draw(4, 1), draw(3, seed=1))),
    Case("where", "number", lambda t, x: t.where(x > 0, x, 3.0), (draw(2, 3),)),
    Case("maximum", "equal", lambda t, x: t.maximum(x * 2, x + x), (draw(3),)),
    Case("minimum", "equal", lambda t, x: t.minimum(x * 2, x + x), (draw(3),)),
    *(
        Case(op, f"number {label}", fn, (draw(2, 3, low=0.5),))
        for op, label, fn in [
            ("add", "right", lambda t, x: x + 2),
            ("add", "left", lambda t, x: 2.5 + x),
            ("sub", "right", lambda t, x: x - 2),
            ("sub", "left", lambda t, x: 2 - x),
            ("mul", "right", lambda t, x: x * 3.0),
            ("mul", "left", lambda t, x: 3 * x),
            ("div", "right", lambda t, x: x / 4),
            ("div", "left", lambda t, x: 4 / x),
            ("pow", "square", lambda t, x: x**2),
            ("pow", "root", lambda t, x: x**0.5),
            ("pow", "inverse", lambda t, x: x**-1.0),
            ("pow", "zero", lambda t, x: x**0 * x),
            ("pow", "base", lambda t, x: 2.0**x),
        ]
    ),
    *unary("neg", fn=lambda t, x: -x),
    *unary("exp"),
    *unary("log", low=0.1),
    *unary("sqrt", low=0.1),
    *unary("abs"),
    *unary("relu"),
    *unary("tanh"),
    *unary("sigmoid"),
    *unary("clone", fn=lambda t, x: x.clone()),
    *unary("cast", fn=lambda t, x: x.float().double() if x.dtype == t.float32 else x.to(t.float64).half().double() * 0),
    *unary("clamp", fn=lambda t, x: t.clamp(x, -0.7, 1.1)),
    *unary("clamp", fn=lambda t, x: x.clamp(min=0.2)),
    Case("sigmoid", "large", lambda t, x: t.sigmoid(x * 300), (draw(5),)),
    *reduction("sum"),
    *reduction("mean"),
    *reduction("amax"),
    *reduction("amin"),
    *(case for case in reduction("logsumexp", always_dim=True) if case.label[:8] != "dim=None"),
    Case("amax", "ties", lambda t, x: t.amax(t.stack([x, x, x - 1]), dim=0), (draw(3),)),
    Case("sum", "all at once", lambda t, x: x.sum(), (draw(2, 3),)),
    Case("logsumexp", "large", lambda t, x: t.logsumexp(x * 400, dim=1), (draw(2, 3),)),
    *along("softmax"),
    *along("log_softmax"),
    *indexing(),
    *shapes(),
    *products(),
    *images(),
    *losses(),
]
IDS = [f"{case.op}-{case.label}" for case in CASES]
# Checked on its own below: one is random, the other needs a second device to be of use.
ELSEWHERE = {"dropout", "transfer"}


def leaves(case: Case, dtype: Any = np.float64) -> list[ddp.Tensor]:
    made = []
    for array in case.inputs:
        floating = array.dtype == np.float64
        array = array if not floating or array.dtype == dtype else array.astype(dtype)
        made.append(ddp.from_numpy(array).requires_grad_(floating))
    return made


def ops_below(y: ddp.Tensor) -> set[str]:
    found, stack = set(), [y._edge]
    while stack:
        edge = stack.pop()
        if isinstance(edge, Node):
            found.add(edge.op.name)
            stack.extend(edge.edges or ())
    return found


def test_the_table_covers_every_op() -> None:
    assert {case.op for case in CASES} | ELSEWHERE == set(OPS)


def test_every_op_has_the_awkward_cases() -> None:
    for awkward in ("empty", "non-contiguous"):
        having = {case.op for case in CASES if awkward in case.label}
        assert {case.op for case in CASES} - having == ({"gather"} if awkward == "non-contiguous" else set()), awkward


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradcheck(case: Case) -> None:
    inputs = leaves(case)
    assert case.op in ops_below(case.fn(ddp, *inputs))
    assert ddp.autograd.gradcheck(lambda *xs: case.fn(ddp, *xs), inputs)


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_agrees_with_pytorch(case: Case, dtype: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    ours = leaves(case, dtype)
    theirs = [torch.from_numpy(x.detach().numpy().copy()).requires_grad_(x.requires_grad) for x in ours]
    y, expected = case.fn(ddp, *ours), case.fn(torch, *theirs)
    assert str(y.dtype) == str(expected.dtype).removeprefix("torch.")
    assert y.shape == tuple(expected.shape)
    tolerance: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12} if dtype == np.float64 else {"rtol": 2e-5, "atol": 2e-6}
    np.testing.assert_allclose(y.detach().numpy(), expected.detach().numpy(), **tolerance)
    g = draw(*y.shape, seed=9).astype(y.dtype)
    y.backward(ddp.from_numpy(g))
    expected.backward(torch.from_numpy(g))
    for x, reference in zip(ours, theirs, strict=True):
        assert (x.grad is None) == (reference.grad is None)
        if x.grad is not None:
            assert x.grad.dtype == x.dtype
            assert x.grad.shape == x.shape
            np.testing.assert_allclose(x.grad.numpy(), reference.grad.numpy(), **tolerance)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(4, 5), (), (0, 3)])
def test_dropout(p: float, shape: tuple[int, ...]) -> None:
    def fn(x: ddp.Tensor) -> ddp.Tensor:
        ddp.manual_seed(5)
        return ddp.nn.functional.dropout(x, p) * 2

    x = ddp.from_numpy(draw(*shape)).requires_grad_()
    assert ddp.autograd.gradcheck(fn, x)


def test_dropout_keeps_the_expectation() -> None:
    ddp.manual_seed(0)
    y = ddp.nn.functional.dropout(ddp.ones(200, 200), 0.25)
    assert sorted(set(y.flatten().tolist())) == [0.0, pytest.approx(4 / 3)]
    assert y.mean().item() == pytest.approx(1.0, abs=0.02)


def test_transfer_passes_gradients() -> None:
    from ddp._tensor.core import transfer

    for array in (draw(2, 3), draw(), draw(0, 3), spaced(2, 3)):
        x = ddp.from_numpy(array).requires_grad_()
        assert ops_below(transfer(x, ddp.device("cpu"))) == {"transfer"}
        assert ddp.autograd.gradcheck(lambda x: transfer(x, ddp.device("cpu")), x)


class TestHalf:
    """float16 sums and multiplies in float32, and rounds once."""

    def test_sum(self) -> None:
        x = ddp.full((4096,), 1.0, dtype=ddp.float16)
        assert x.sum().item() == 4096.0
        assert x.sum().dtype == ddp.float16
        assert ddp.ones(100_000, dtype=ddp.float16).mean().item() == 1.0  # though the sum would overflow

    def test_matmul(self) -> None:
        a = draw(3, 50).astype(np.float16)
        b = draw(50, 2, seed=1).astype(np.float16)
        y = ddp.from_numpy(a) @ ddp.from_numpy(b)
        assert y.dtype == ddp.float16
        exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
        np.testing.assert_allclose(y.numpy(), exact, rtol=1e-3)

    def test_training_step(self) -> None:
        model = ddp.nn.Sequential(
            ddp.nn.Conv2d(1, 2, 3), ddp.nn.ReLU(), ddp.nn.MaxPool2d(2), ddp.nn.Flatten(), ddp.nn.Linear(8, 3)
        ).half()
        loss = ddp.nn.functional.cross_entropy(
            model(ddp.randn(4, 1, 6, 6, dtype=ddp.float16)), ddp.tensor([0, 1, 2, 0])
        )
        loss.backward()
        assert loss.dtype == ddp.float16
        assert all(p.grad is not None and p.grad.dtype == ddp.float16 for p in model.parameters())
