"""The path of GPU arrays on a machine without one: the CuPy of `emulation` in the place of NumPy, against NumPy itself.

Every op case runs through the tables, launches and kernels that CuPy arrays would take. What is left to a real GPU is
what `tests/ddp/test_gpu.py` runs there: CuPy's own functions, its devices, and hardware that runs threads at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddp
from ddp._cuda import array_table, elementwise_kernels, gradient_kernels, norm_kernels, optimizer_kernels
from ddp._cuda.raw_kernel import KERNEL_SOURCES as SOURCES
from ddp._device import CPU
from ddp.ops import indexing, special
from ddp.ops.normalization import BatchRows, batch_norm
from tests.ddp.cases.table import Case, draw
from tests.ddp.cuda import emulation, typed
from tests.ddp.test_ops import CASES, leaves

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arrays of the CPU pass for CuPy's, which warns of no infinity."""
    monkeypatch.setattr(CPU, "xp", emulation.cupy)
    with np.errstate(all="ignore"):
        yield


def results(case: Case, dtype: Any) -> list[Any]:
    """The values of a case, and the gradients of its inputs."""
    xs = leaves(case, dtype)
    y = case.fn(ddp, *xs)
    if y.requires_grad:
        y.backward(ddp.from_numpy(draw(*y.shape, seed=9).astype(y.dtype)))
    return [y.array, *[None if x.grad is None else x.grad.array for x in xs]]


BFLOAT16 = ml_dtypes.bfloat16
TOLERANCES = {np.float64: 1e-10, np.float32: 2e-5, np.float16: 1e-2, BFLOAT16: 5e-2}


def _each() -> Iterator[Any]:
    """The cases of ops with kernels, in float64 and one more dtype; all others, in every dtype, by --long."""
    for i, case in enumerate(CASES):
        for k, dtype in enumerate((BFLOAT16, np.float32, np.float16, np.float64)):
            run = KERNELS.search(case.op) and (k == 3 or i % 3 == k)
            yield pytest.param(case, dtype, marks=[] if run else [pytest.mark.long])


# What is computed without a kernel is CuPy's, of which tests/gpu and tests/ddp/test_gpu.py know more.
KERNELS = re.compile("attention|conv|entropy|embedding|erf|feed_forward|gather|index|linear|layer_norm|rms_norm")
RUNS = [*_each()]


def ids(runs: list[Any]) -> list[str]:
    pairs = [getattr(each, "values", each) for each in runs]
    return [f"{case.op}-{case.label}-{dtype.__name__}" for case, dtype in pairs]


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=ids(RUNS))
def test_agrees_with_numpy(case: Case, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(case, dtype)
    typed.prepare(np.dtype(dtype).name)
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


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout(p: float, dtype: Any, emulated: None) -> None:
    x = ddp.from_numpy(draw(7, 51).astype(dtype)).requires_grad_()
    ddp.manual_seed(3)
    y = ddp.nn.functional.dropout(x, p)
    kept = y.detach().numpy() != 0
    assert kept.all() if p == 0 else abs(kept.mean() - (1 - p)) < 0.1
    scale = kept / (1 - p) if p < 1 else kept * 0.0
    expected = (x.detach().numpy().astype("f8") * scale).astype(dtype)
    np.testing.assert_allclose(y.detach().numpy().astype("f8"), expected.astype("f8"), rtol=TOLERANCES[dtype])
    y.backward(ddp.ones(7, 51, dtype=x.dtype))
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy().astype("f8"), scale, rtol=TOLERANCES[dtype])
    ddp.manual_seed(3)
    assert (ddp.nn.functional.dropout(x, p) == y).all().item()
    if 0 < p < 1:
        assert not (ddp.nn.functional.dropout(x, p) == y).all().item()


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


IMAGES: dict[str, Any] = {
    "batch_norm": lambda f, x: f.batch_norm(x, None, None, training=True),
    "fixed batch_norm": lambda f, x: f.batch_norm(x, x.detach()[0, :, 0, 0], x.detach()[0, :, 0, 1] ** 2 + 1),
    "max_pool": lambda f, x: f.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda f, x: f.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive_avg_pool": lambda f, x: f.adaptive_avg_pool2d(x, (3, 2)),
    "conv": lambda f, x: f.conv2d(x, x.detach()[:2, :, :3, :3].contiguous(), x[0, :2, 0, 0], padding=1),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("channels", [5, 8])
@pytest.mark.parametrize("name", IMAGES)
def test_images_with_channels_last(name: str, channels: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(last: bool) -> list[Any]:
        x = ddp.from_numpy(draw(3, channels, 6, 5).astype(dtype))
        x = x.contiguous(memory_format=ddp.channels_last if last else ddp.contiguous_format).requires_grad_()
        y = IMAGES[name](ddp.nn.functional, x)
        assert y.is_contiguous(memory_format=ddp.channels_last) is last
        y.backward(ddp.from_numpy(draw(*y.shape, seed=9).astype(dtype)))
        assert x.grad is not None
        return [y.detach().numpy(), x.grad.numpy()]

    expected = run(False)
    monkeypatch.setattr(CPU, "xp", emulation.cupy)
    for one, other in zip(run(True), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_batch_on_several_ranks(dtype: Any) -> None:
    # What SyncBatchNorm asks for: sums of rows and lines over them, apart from each other.
    x, w, b, g = draw(3, 4, 5, 2), draw(4), draw(4, seed=1), draw(3, 4, 5, 2, seed=2)
    found = []
    for xp in (np, emulation.cupy):
        arrays = [each.astype(dtype) for each in (x, w, b)]
        out, residual = batch_norm.forward(xp, *arrays, eps=1e-5, tell=None, layout=BatchRows(x.shape))
        found.append([out, *batch_norm.backward(xp, g.astype(dtype), (True,) * 3, (arrays[1], arrays[0]), residual)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 10)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32])
def test_rows_looked_up_often_count_as_much(dtype: Any, emulated: None) -> None:
    w = ddp.from_numpy(draw(5, 8).astype(dtype)).requires_grad_()
    ddp.nn.functional.embedding(ddp.tensor([3, 1, 3, 3, 0]), w, scale_grad_by_freq=True).sum().backward()
    assert w.grad is not None
    assert w.grad.float().mean(dim=1).round(decimals=3).tolist() == [1, 1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64])
def test_rows_are_added_up(dtype: Any) -> None:
    where = np.array([3, 0, 3, 3, 1])
    g = (draw(5, 4) * 8).astype(dtype)
    expected = np.zeros((6, 4), dtype)
    np.add.at(expected, where, g)
    got = indexing.add_rows(emulation.cupy, 6, where, g)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, rtol=1e-2 if dtype == np.float16 else 1e-6)


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
    ("AdamW", {"maximize": True}),
    ("Lion", {"weight_decay": 0.1}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adadelta", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_updates_are_the_same_bit_for_bit(
    name: str, settings: dict[str, Any], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> list[Any]:
        params = [ddp.from_numpy(draw(7, 5 + s, seed=s).astype(dtype)).requires_grad_() for s in range(3)]
        optimizer = getattr(ddp.optim, name)(params, lr=0.01, **settings)
        missing = np.random.default_rng(0)
        for step in range(6):
            for i, p in enumerate(params):
                g = draw(*p.shape, seed=10 * step + i).astype(dtype)
                p.grad = None if missing.random() < 0.3 else ddp.from_numpy(g)
            optimizer.step()
        return [p.detach().numpy() for p in params]

    expected = trained()
    monkeypatch.setattr(CPU, "xp", emulation.cupy)
    for one, other in zip(trained(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_gradients_are_bounded_and_unscaled(threads: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "THREADS", threads)
    monkeypatch.setattr(array_table, "CHUNK", 12)
    xp, rounding = emulation.cupy, {2: 1e-2, 4: 1e-6, 8: 1e-12}[np.dtype(dtype).itemsize]
    gs = [draw(7, 5 + s, seed=s).astype(dtype) for s in range(3)]
    flat = np.concatenate([g.reshape(-1).astype("f8") for g in gs])
    for order in (1, 2, 3, np.inf):
        expected = np.linalg.norm(flat, order)
        np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, order), expected, rtol=rounding)
        power = expected if order == np.inf else expected**order
        np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, order, root=False), power, rtol=rounding)
    total = gradient_kernels.total_norm(xp, gs, 2)
    gradient_kernels.scale_to_norm(xp, gs, total, 0.5)
    np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, 2), 0.5 * total / (total + 1e-6), rtol=rounding)
    gradient_kernels.clamp_values(xp, gs, 0.01)
    np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, np.inf), 0.01, rtol=rounding)
    scale, found = np.full(1, 0.25, np.float32), np.zeros(1, np.float32)
    gradient_kernels.unscale(xp, gs, scale, found)
    np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, np.inf), 0.04, rtol=rounding)
    assert found == 0
    gs[1][2, 3] = np.nan
    gradient_kernels.unscale(xp, gs, scale, found)
    assert found == 1
    assert np.isnan(gradient_kernels.total_norm(xp, gs, np.inf))


def test_gradients_of_several_dtypes_have_one_norm() -> None:
    gs = [draw(3, 5, seed=s).astype(dtype) for s, dtype in enumerate((np.float16, BFLOAT16, np.float32))]
    gs[0][:2, :3] = np.array([[6e-8, -65504, 6.1e-5], [0, -0.0, 1e-7]], np.float16)  # subnormal ones among them
    expected = np.linalg.norm(np.concatenate([g.reshape(-1).astype("f8") for g in gs]))
    np.testing.assert_allclose(gradient_kernels.total_norm(emulation.cupy, gs, 2), expected, rtol=1e-6)
    np.testing.assert_allclose(
        gradient_kernels.total_norm(emulation.cupy, [gs[0][1:2, 2:], gs[2][:0]], 2),
        np.linalg.norm(gs[0][1, 2:].astype("f8")),
        rtol=1e-6,
    )
    gs.append(np.full(1, 1e300))
    assert gradient_kernels.total_norm(emulation.cupy, gs, 1).dtype == np.float64
    for bad in (np.inf, -np.inf, np.nan):
        gs[0][2, 2] = bad
        assert not np.isfinite(gradient_kernels.total_norm(emulation.cupy, gs, 1))


def test_a_scale_adapts() -> None:
    scale, good, founds = np.full(1, 8, np.float32), np.zeros(1, np.int32), np.zeros(2, np.float32)
    seen = []
    for found in (0, 0, 1, 0, 0):
        founds[1] = found
        gradient_kernels.update_scale(emulation.cupy, scale, good, founds, 4.0, 0.25, 2)
        assert not founds.any()
        seen.append((scale[0], good[0]))
    assert seen == [(8, 1), (32, 0), (8, 0), (8, 1), (32, 0)]
    held = np.zeros(8)
    optimizer_kernels.store_settings(emulation.cupy, held, [1, 2.5, True])
    assert held.tolist() == [1, 2.5, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7, 8, 64, 100])
def test_a_block_of_any_size_adds_up(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "THREADS", threads)
    x = draw(4, 50)
    expected = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    np.testing.assert_allclose(norm_kernels.norm(emulation.cupy, x, None, None, 0.0, True)[0], expected, rtol=1e-10)
    x[2, 7] = np.nan
    assert np.isnan(norm_kernels.norm(emulation.cupy, x, None, None, 0.0, True)[0][2]).all()


def test_threads_that_part_at_a_barrier_are_noticed() -> None:
    text = (
        'typedef float T; typedef float A; typedef long long Index;\nextern "C" __global__ void parts(Index n) { %s }'
    )
    kernel = emulation.RawKernel(text % "if (threadIdx.x) __syncthreads();", "parts")
    with pytest.raises(AssertionError, match="different barriers"):
        kernel((1,), (256,), (np.int64(1),))


def test_a_launch_that_does_not_fit_its_kernel_is_refused() -> None:
    xp, source = emulation.cupy, elementwise_kernels.ERROR_FUNCTIONS
    x = np.ones(3, np.float32)
    with pytest.raises(AssertionError, match="4 arguments for"):
        source.over(xp, "erf_of", x.dtype, 3, x, x, 3, 1.0)
    with pytest.raises(AssertionError, match=r"argument 0, T\*: float64"):
        source.over(xp, "erf_of", x.dtype, 3, x.astype("f8"), x, 3)
    with pytest.raises(AssertionError):
        source.over(xp, "erf_of", x.dtype, 3, np.ones((3, 2), np.float32)[:, 0], x, 3)


@pytest.mark.parametrize("name", ["erf", "erfc", "erfinv"])
def test_error_functions(name: str) -> None:
    x, op = draw(3, 4, low=-0.9, high=0.9), getattr(special, name)
    np.testing.assert_allclose(op.forward(emulation.cupy, x)[0], op.forward(np, x)[0], rtol=1e-12)


def test_every_kernel_is_run_by_the_tests_above(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("the tests above ran in several processes: .ci/run has them once more in one")
    mine = {item.name for item in request.session.items if item.path == request.path}
    if len(mine) < sum(not each.marks for each in RUNS) or request.config.getoption("keyword"):
        pytest.skip("only some of the tests above were asked for")
    # tests/gpu/test_bounds.py has those of "bounds": their alarm rings on a stand-in for a device.
    tested = [source for name, source in SOURCES.items() if name != "bounds"]
    known = {name for source in tested for name in emulation.signatures(source.text(source.dtypes[0]))}
    assert known <= emulation.RawKernel.launched
