"""Convolutions on the stand-in for a GPU: through cuDNN's, and through our own fallback, against the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import ddp
from ddp._cuda import cudnn_graph
from tests.ddp.cases.table import Case, draw
from tests.ddp.cuda import emulation
from tests.ddp.on_devices import assert_agree, assert_near, results
from tests.ddp.test_ops import CASES
from tests.gpu import dnn_fake

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")

TOLERANCES: dict[Any, float] = {ddp.float64: 1e-9, ddp.float32: 3e-5, ddp.float16: 1e-2, ddp.bfloat16: 5e-2}
CONV = [case for case in CASES if case.op.startswith("conv")]


def close(one: Any, other: Any, dtype: Any) -> None:
    assert_near(one, other, TOLERANCES[dtype], TOLERANCES[dtype] / 3)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CONV, ids=lambda case: f"{case.op}-{case.label}")
def test_agrees_with_the_cpu(case: Case, dtype: Any, path: Any) -> None:
    expected, got = results(case, dtype, "cpu"), results(case, dtype, "cuda")
    assert_agree(got, expected, TOLERANCES[dtype], TOLERANCES[dtype] / 3)
    usual = "below dilation" not in case.label and all(0 not in each.shape for each in case.inputs)
    if path is not None and dtype is not ddp.float64 and usual:
        assert any("conv" in name for name in path.ran)


def run(device: str, dtype: Any, last: bool, groups: int = 1, stride: int = 1) -> list[Any]:
    x = ddp.from_numpy(draw(3, 8, 7, 6, seed=1)).to(dtype).to(device)
    if last:
        x = x.to(memory_format=ddp.channels_last)
    x = x.detach().requires_grad_()
    w, b = (
        ddp.from_numpy(draw(*shape, seed=2)).to(dtype).to(device).requires_grad_()
        for shape in ((4, 8 // groups, 3, 3), (4,))
    )
    y = ddp.nn.functional.conv2d(x, w, b, stride=stride, padding=1, groups=groups)
    (y * y).sum().backward()
    if device == "cuda":
        assert y.is_contiguous(memory_format=ddp.channels_last) is last
        assert y.is_contiguous() is not last
    grads = [each.grad for each in (x, w, b)]
    assert all(each is not None for each in grads)
    return [each.detach().cpu().float().numpy() for each in (y, *grads)]


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.float16, ddp.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (4, 1), (1, 2)])
def test_results_lie_as_images_do(dtype: Any, last: bool, groups: int, stride: int, path: Any) -> None:
    expected = run("cpu", dtype, False, groups, stride)
    for one, other in zip(run("cuda", dtype, last, groups, stride), expected, strict=True):
        close(one, other, dtype)


def sliced(device: str, op: Any, last: bool) -> list[Any]:
    """Of views that begin at odd addresses; op: takes an image, filters and a bias, and returns an image of one size"""
    big = [
        ddp.from_numpy(draw(*shape, seed=3)).to(ddp.float16).to(device) for shape in ((3, 3, 5, 7), (4, 3, 3, 3), (4,))
    ]
    if last:
        big[:2] = [x.to(memory_format=ddp.channels_last) for x in big[:2]]
    x, w, b = (each.detach()[1:].requires_grad_() for each in big)
    y = op(x, w, b)
    # The gradient of y is such a view as well.
    ddp.cat([y.flatten()[:1], y.flatten()])[1:].reshape(y.shape).mul(0.5).sum().backward()
    return [each.detach().cpu().float().numpy() for each in (y, x.grad, w.grad, b.grad)]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_views_that_begin_at_odd_addresses(
    last: bool, transposed: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = dnn_fake.install(gpu, monkeypatch)
    f = ddp.nn.functional

    def op(x: Any, w: Any, b: Any) -> Any:
        if transposed:
            return f.conv_transpose2d(x, w.transpose(0, 1), b, padding=1)
        return f.conv2d(x, w, b, padding=1)

    for one, other in zip(sliced("cuda", op, last), sliced("cpu", op, False), strict=True):
        close(one, other, ddp.float16)
    assert len(fake.ran) == 3


def test_what_cudnn_lacks_is_remembered_and_falls_back(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = dnn_fake.install(gpu, monkeypatch)
    fake.lacks = lambda operation: operation.startswith("conv")
    with caplog.at_level("INFO", logger="ddp.backends.cudnn"):
        first = run("cuda", ddp.float32, True)
        built = len(fake.graphs)
        run("cuda", ddp.float32, True)
    assert len(fake.graphs) == built
    assert fake.ran == []
    assert sum("no conv_dgrad" in record.message for record in caplog.records) == 1
    for one, other in zip(first, run("cpu", ddp.float32, False), strict=True):
        close(one, other, ddp.float32)


def test_a_gpu_without_cudnn_is_warned_of_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_graph, "_loaded", [])
    monkeypatch.setattr(cudnn_graph, "_said", set())
    monkeypatch.setitem(sys.modules, "cudnn", None)  # import cudnn: ImportError
    assert not ddp.backends.cudnn.is_available()  # a question, and no reason to warn
    with pytest.warns(RuntimeWarning, match=r"cuDNN is not used: .* pip install 'ddp-runtime\[cuda12\]'") as caught:
        run("cuda", ddp.float32, True)
    run("cuda", ddp.float16, True)  # another warning would be an error
    assert len(caught) == 1


def test_the_fastest_plan_is_kept_where_that_is_asked_for(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = dnn_fake.install(gpu, monkeypatch)
    ddp.backends.cudnn.benchmark = True
    run("cuda", ddp.float16, True)
    assert set(fake.indices) <= {0, 2}  # plan 1 cannot be built
    done = len(fake.indices)
    for one, other in zip(run("cuda", ddp.float16, True), run("cpu", ddp.float16, False), strict=True):
        close(one, other, ddp.float16)
    assert len(fake.indices) == done + 3


def test_settings_choose_plans(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = dnn_fake.install(gpu, monkeypatch)
    notes = dnn_fake.numerical_note
    run("cuda", ddp.float32, True)
    assert fake.graphs[-1].unwanted == {notes.DOWN_CONVERT_INPUTS}
    ddp.backends.cudnn.allow_tf32 = False
    run("cuda", ddp.float32, True)
    assert fake.graphs[-1].unwanted == {notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE}
    ddp.backends.cudnn.deterministic = True
    run("cuda", ddp.float16, True)
    assert fake.graphs[-1].unwanted == {notes.DOWN_CONVERT_INPUTS, notes.NONDETERMINISTIC}
    ddp.backends.cudnn.enabled = False
    before = len(fake.ran)
    run("cuda", ddp.float16, True)
    assert len(fake.ran) == before
    assert not ddp.backends.cudnn.enabled
