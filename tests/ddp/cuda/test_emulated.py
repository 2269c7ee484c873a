"""The path of GPU arrays on a machine without one: the CuPy of `emulation` in the place of NumPy, against NumPy itself.

Every op case runs through the tables, launches and kernels that CuPy arrays would take. What is left to a real GPU is
what `tests/ddp/test_gpu.py` runs there: CuPy's own functions, its devices, and hardware that runs threads at once.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._device import CPU
from ddp.ops import index
from ddp.ops.cuda import SOURCES, choosing, curves
from tests.ddp.cases.table import Case, draw
from tests.ddp.cuda import emulation
from tests.ddp.test_ops import CASES, leaves

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of the CPU pass for CuPy's."""
    monkeypatch.setattr(CPU, "xp", emulation.cupy)


def results(case: Case, dtype: Any) -> list[Any]:
    """The values of a case, and the gradients of its inputs."""
    xs = leaves(case, dtype)
    y = case.fn(ddp, *xs)
    if y.requires_grad:
        y.backward(ddp.from_numpy(draw(*y.shape, seed=9).astype(y.dtype)))
    return [y.detach().numpy(), *[None if x.grad is None else x.grad.numpy() for x in xs]]


TOLERANCES = {np.float64: 1e-10, np.float32: 2e-5, np.float16: 1e-2}


# What is computed without a kernel is the same code in every dtype.
KERNELS = re.compile("attention|conv|entropy|elu|embedding|erf|gather|hardswish|im$|im2|index|mish|norm|pool|si|soft")
RUNS = [(case, np.float64) for case in CASES]
RUNS += [(case, dtype) for case in CASES if KERNELS.search(case.op) for dtype in (np.float32, np.float16)]


def ids(runs: list[tuple[Case, Any]]) -> list[str]:
    return [f"{case.op}-{case.label}-{dtype.__name__}" for case, dtype in runs]


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=ids(RUNS))
def test_agrees_with_numpy(case: Case, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(case, dtype)
    monkeypatch.setattr(CPU, "xp", emulation.cupy)
    got = results(case, dtype)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            # What adds up a few rounded products is off by their size, however small the sum is.
            size = np.abs(other.astype("f8")).max(initial=1, where=np.isfinite(other))
            rounding = TOLERANCES[dtype]
            np.testing.assert_allclose(one.astype("f8"), other.astype("f8"), rtol=rounding, atol=rounding / 10 * size)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout(p: float, dtype: Any, emulated: None) -> None:
    x = ddp.from_numpy(draw(4, 50).astype(dtype)).requires_grad_()
    ddp.manual_seed(3)
    y = ddp.nn.functional.dropout(x, p)
    ddp.manual_seed(3)
    keep = np.ones((4, 50), bool) if p == 0 else ddp._device.generator(CPU).random((4, 50), dtype=np.float32) >= p
    scale = keep / (1 - p) if p < 1 else keep * 0.0
    np.testing.assert_allclose(y.detach().numpy(), x.detach().numpy() * scale, rtol=1e-3)
    y.backward(ddp.ones(4, 50, dtype=x.dtype))
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), scale, rtol=1e-3)


def test_dropout_of_channels(emulated: None) -> None:
    y = ddp.nn.functional.dropout2d(ddp.ones(5, 6, 2, 2), 0.5)
    assert set(y.mean(dim=(2, 3)).flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_attention_drops_the_same_forward_and_backward(p: float, emulated: None) -> None:
    def fn(q: ddp.Tensor, k: ddp.Tensor, v: ddp.Tensor) -> ddp.Tensor:
        ddp.manual_seed(7)
        return ddp.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    shapes = ((2, 4, 3), (2, 5, 3), (2, 5, 2))
    assert ddp.autograd.gradcheck(fn, [ddp.from_numpy(draw(*shape)).requires_grad_() for shape in shapes])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64])
def test_rows_are_added_up(dtype: Any) -> None:
    where = np.array([3, 0, 3, 3, 1])
    g = (draw(5, 4) * 8).astype(dtype)
    expected = np.zeros((6, 4), dtype)
    np.add.at(expected, where, g)
    got = index.add_rows(emulation.cupy, 6, where, g)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, rtol=1e-2 if dtype == np.float16 else 1e-6)


def test_integers_pool_without_a_kernel(emulated: None) -> None:
    x = ddp.arange(16).reshape(1, 1, 4, 4)
    assert ddp.nn.functional.max_pool2d(x, 2).flatten().tolist() == [5, 7, 13, 15]


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "gelu", "cross_entropy", "attention"])
def test_bfloat16_is_computed_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = ddp.nn.functional

    def run() -> list[Any]:
        x = ddp.from_numpy(draw(2, 6, 4).astype(np.float32)).bfloat16().requires_grad_()
        y = {
            "softmax": lambda: x.softmax(1),
            "layer_norm": lambda: functional.layer_norm(x, (4,)),
            "gelu": lambda: functional.gelu(x),
            "cross_entropy": lambda: functional.cross_entropy(x, ddp.tensor([[0, 1, 2, 3], [5, 5, 4, 0]])),
            "attention": lambda: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        }[name]()
        (y * y).sum().backward()
        assert x.grad is not None
        assert y.dtype == x.grad.dtype == ddp.bfloat16
        return [y.detach().float().numpy(), x.grad.float().numpy()]

    expected = run()
    monkeypatch.setattr(CPU, "xp", emulation.cupy)
    for one, other in zip(run(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)


OPTIMIZERS = [
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Lion", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_updates_are_the_same_bit_for_bit(
    name: str, settings: dict[str, Any], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> list[Any]:
        params = [ddp.from_numpy(draw(7, 5, seed=s).astype(dtype)).requires_grad_() for s in range(3)]
        optimizer = getattr(ddp.optim, name)(params, lr=0.01, **settings)
        for step in range(4):
            for i, p in enumerate(params):
                p.grad = ddp.from_numpy(draw(7, 5, seed=10 * step + i).astype(dtype))
            optimizer.step()
        return [p.detach().numpy() for p in params]

    expected = trained()
    monkeypatch.setattr(CPU, "xp", emulation.cupy)
    for one, other in zip(trained(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7, 8, 64, 100])
def test_a_block_of_any_size_adds_up(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "THREADS", threads)
    x = draw(4, 50)
    np.testing.assert_allclose(choosing.softmax(emulation.cupy, x, 1), results_of_softmax(x), rtol=1e-12)
    x[2, 7] = np.nan  # which the maximum must not lose
    assert np.isnan(choosing.softmax(emulation.cupy, x, 1)[2]).all()


def results_of_softmax(x: Any) -> Any:
    e = np.exp(x)
    return e / e.sum(1, keepdims=True)


def test_threads_that_part_at_a_barrier_are_noticed() -> None:
    text = (
        'typedef float T; typedef float A; typedef long long Index;\nextern "C" __global__ void parts(Index n) { %s }'
    )
    kernel = emulation.RawKernel(text % "if (threadIdx.x) __syncthreads();", "parts")
    with pytest.raises(AssertionError, match="different barriers"):
        kernel((1,), (256,), (np.int64(1),))


def test_a_launch_that_does_not_fit_its_kernel_is_refused() -> None:
    xp, source = emulation.cupy, curves.SOURCE
    x = np.ones(3, np.float32)
    with pytest.raises(AssertionError, match="5 arguments for"):
        source.over(xp, "silu", x.dtype, 3, x, x, None, 3, 1.0)
    with pytest.raises(AssertionError, match=r"argument 0, T\*: float64"):
        source.over(xp, "silu", x.dtype, 3, x.astype("f8"), x, None, 3)
    with pytest.raises(AssertionError):
        source.over(xp, "silu", x.dtype, 3, np.ones((3, 2), np.float32)[:, 0], x, None, 3)


def test_every_kernel_is_run_by_the_tests_above(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("the tests above ran in several processes: .ci/run has them once more in one")
    mine = {item.name for item in request.session.items if item.path == request.path}
    if len(mine) < len(RUNS) or request.config.getoption("keyword"):
        pytest.skip("only some of the tests above were asked for")
    known = {name for source in SOURCES.values() for name in emulation.signatures(source.text(source.dtypes[0]))}
    assert known == emulation.RawKernel.launched
