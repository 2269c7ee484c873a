"""Native kernels give the numbers of the array formulas for every layout, size and value; builds agree in bits."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from threadpoolctl import threadpool_limits

import ddp
from collectives.native import builds
from ddp import _native
from ddp._native.register import _encode
from ddp.backends import native
from ddp.ops import (
    activation,
    attention,
    convolution,
    indexing,
    losses,
    normalization,
    pooling,
    recurrent,
    softmax_ops,
    update,
)
from ddp.ops.convolution import Window
from ddp.ops.op import OPS, Op
from ddp.optim.formula import compile_formula
from ddp.optim.group_update import settings as group_settings

ROOT = Path(__file__).parents[3]
needs_kernels = pytest.mark.skipif(not native.is_available(), reason=native.why_not())
TOLERANCE = {"float32": 3e-6, "float64": 1e-13}
SHAPES = ((0, 5), (1, 1), (3, 31), (5, 33), (2, 64), (7, 129), (5, 1000))


WINDOWS = [
    # image, kernel, stride, padding, dilation
    ((1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
    ((7, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((9, 40), (3, 3), (2, 2), (1, 1), (1, 1)),
    ((26, 26), (2, 2), (2, 2), (0, 0), (1, 1)),
    ((5, 37), (2, 3), (1, 3), (1, 0), (2, 1)),
    ((4, 9), (4, 5), (3, 1), (2, 4), (1, 2)),
    ((4, 4), (2, 2), (1, 1), (1, 1), (5, 5)),  # the window sees nothing of the image
]


def normal(*shape: int, dtype: str = "float64", seed: int = 0) -> Any:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def close(got: Any, expected: Any, dtype: str) -> None:
    """Equal up to rounding at the size of the largest element; None for None."""
    if expected is None:
        assert got is None
        return
    assert got.shape == expected.shape
    assert got.dtype == dtype
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
    assert_allclose(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)


def compare(op: Op, dtype: str, inputs: list[Any], saved: Any, needs: tuple[bool, ...], **parameters: Any) -> None:
    """Forward and backward in `dtype` by the kernel beside float64 by the formula. saved: of inputs and result."""
    wide = [x if x is None or x.dtype == bool else x.astype("float64") for x in inputs]
    expected, residual = op.reference.forward(np, *wide, **parameters)
    out, own_residual = op.forward(np, *inputs, **parameters)
    close(out, expected, dtype)
    g = normal(*expected.shape, seed=1)
    grads = op.reference.backward(np, g, needs, saved(wide, expected), residual)
    own = op.backward(np, g.astype(dtype), needs, saved(inputs, out), own_residual)
    for a, b in zip(own, grads, strict=True):
        close(a, b, dtype)


def unaligned(x: Any) -> Any:
    """A copy of x that kernels refuse, which is computed by the formula."""
    copied = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    assert not copied.flags.aligned or not x.size
    return copied


def layouts(x: Any) -> list[Any]:
    """x in one piece, transposed in memory, with gaps, unaligned, and not writable."""
    gaps = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    gaps[...] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return [x, np.asfortranarray(x), gaps, unaligned(x), frozen]


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
class TestNumbers:
    @pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "gelu_tanh", "leaky_relu", "hardtanh"])
    def test_activations(self, name: str, dtype: str) -> None:
        op = OPS[name.removesuffix("_tanh")]
        of_op: dict[str, dict[str, Any]] = {
            "gelu": {"tanh": name == "gelu_tanh"},
            "leaky_relu": {"slope": 0.2},
            "hardtanh": {"low": -1.0, "high": 2.0},
        }
        parameters = of_op.get(op.name, {})
        for shape in SHAPES:
            for x in layouts(normal(*shape, dtype=dtype)):
                saved = lambda inputs, out: (out if name in ("sigmoid", "hardtanh") else inputs[0],)  # noqa: E731
                compare(op, dtype, [x], saved, (True,), **parameters)

    @pytest.mark.parametrize(("low", "high"), [(-1.0, np.nan), (np.nan, 2.0), (-np.inf, np.inf)])
    def test_bounds_that_are_no_numbers(self, low: float, high: float, dtype: str) -> None:
        x = normal(40, dtype=dtype)
        compare(OPS["hardtanh"], dtype, [x], lambda _, out: (out,), (True,), low=low, high=high)

    def test_relu(self, dtype: str) -> None:
        for size in (5, 5000):
            x = normal(size, dtype=dtype)
            x[:3] = np.nan, np.inf, -np.inf
            z = np.maximum(x, 0)
            assert_array_equal(activation.relu.forward(np, x)[0], z)
            for residual in (None, ()):  # the formula's, and the kernel's
                (dx,) = activation.relu.backward(np, np.ones_like(x), (True,), (z,), residual)
                assert_array_equal(dx, z != 0)

    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("sizes", [(5, 3, 16), (1, 7, 48), (4, 13, 20)], ids=str)  # 20: no whole blocks of columns
    def test_lstm(self, sizes: Any, reverse: bool, dtype: str) -> None:
        steps, batch, n = sizes
        states = (steps, batch, n), (batch, n), (batch, n)
        shapes = (steps, batch, 7), *states[1:], (4 * n, 7), (4 * n, n), (4 * n,), (4 * n,)
        for given in ((True, True, True), (True, False, False), (False, False, True)):
            results = []
            for kind in ("float64", dtype):
                arrays = [normal(*shape, seed=i).astype(kind) / 10 for i, shape in enumerate(shapes)]
                out, residual = recurrent.lstm.forward(np, *arrays, None, reverse=reverse)
                g = [
                    normal(*shape).astype(kind) if is_given else None
                    for shape, is_given in zip(states, given, strict=True)
                ]
                saved = arrays[0], *arrays[3:5], None
                grads = recurrent.lstm.backward(np, g, (*[True] * 7, False), saved, residual)
                results.append([*out, *grads])
            for own, expected in zip(results[1], results[0], strict=True):
                close(own, expected, dtype)

    @pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])  # float32 has no squares of the first and the last
    @pytest.mark.parametrize("name", ["batch_norm", "group_norm"])
    def test_channel_norms(self, name: str, scale: float, dtype: str) -> None:
        op = OPS[name]
        w = normal(6, seed=1)
        b = normal(6, seed=2)
        parameters: dict[str, Any] = {"eps": 1e-10 * scale**2, "tell": None}
        if name == "group_norm":
            parameters["groups"] = 2
        for shape in ((4, 6, 35), (3, 6, 5000), (7, 6, 1)):
            x = (normal(*shape) + 3) * scale
            g = normal(*shape, seed=3)
            results = []
            for kind, form in (("float64", unaligned), (dtype, unaligned), (dtype, np.asarray)):
                arrays = [form(each.astype(kind)) for each in (x, w, b)]
                out, residual = op.forward(np, *arrays, **parameters)
                saved = (arrays[1], arrays[0])
                dx, dw, db = op.backward(np, form(g.astype(kind)), (True, True, True), saved, residual)
                results.append((out, dx * np.dtype(kind).type(scale), dw, db))
            for own in results[1:]:
                for each, expected in zip(own, results[0], strict=True):
                    assert each.dtype == dtype
                    close(each, expected, dtype)

    @pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True)])
    def test_layer_norm(self, needs: Any, dtype: str) -> None:
        for shape in ((3, 31), (4, 5, 64), (130, 7)):
            x = normal(*shape, dtype=dtype) + 10
            for w, b in ((normal(shape[-1], dtype=dtype), normal(shape[-1], dtype=dtype, seed=2)), (None, None)):
                wanted = needs if w is not None else (needs[0], False, False)
                if any(wanted):
                    saved = lambda inputs, out: (inputs[1], inputs[0])  # noqa: E731
                    compare(normalization.layer_norm, dtype, [x, w, b], saved, wanted, axes=1, eps=1e-5)

    def test_rms_norm(self, dtype: str) -> None:
        for shape, axes in (((3, 31), 1), ((4, 5, 64), 2)):
            x = normal(*shape, dtype=dtype)
            w = normal(*shape[len(shape) - axes :], dtype=dtype, seed=2)
            saved = lambda inputs, out: (inputs[1], inputs[0])  # noqa: E731
            compare(normalization.rms_norm, dtype, [x, w], saved, (True, True), axes=axes, eps=1e-6)

    @pytest.mark.parametrize("op", [softmax_ops.softmax, softmax_ops.log_softmax], ids=["softmax", "log_softmax"])
    def test_softmax(self, op: Op, dtype: str) -> None:
        for shape in SHAPES:
            for x in layouts(20 * normal(*shape, dtype=dtype)):
                compare(op, dtype, [x], lambda inputs, out: (out,), (True,), dim=1)
        compare(op, dtype, [normal(3, 4, 5, dtype=dtype)], lambda inputs, out: (out,), (True,), dim=1)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("shape", [(4, 10), (65, 129), (3, 5, 7)], ids=str)
    def test_cross_entropy(self, shape: Any, reduction: str, smoothing: float, dtype: str) -> None:
        x = 20 * normal(*shape, dtype=dtype)
        target = np.random.default_rng(3).integers(0, shape[1], (shape[0], *shape[2:]))
        keep = target > 0
        target[~keep] = -100  # which is no class
        saved = lambda inputs, out: inputs  # noqa: E731
        for weight in (None, np.abs(normal(shape[1], dtype=dtype))):
            settings = {"target": target, "weight": weight, "smoothing": smoothing, "reduction": reduction}
            compare(losses.cross_entropy, dtype, [x], saved, (True,), keep=keep, **settings)

    def test_cross_entropy_where_a_class_without_samples_weighs_infinity(self, dtype: str) -> None:
        settings = {"target": np.array([0, 2]), "keep": None, "smoothing": 0.0, "reduction": "mean"}
        weight = np.array([1, np.inf, 2], dtype)
        compare(
            losses.cross_entropy,
            dtype,
            [normal(2, 3, dtype=dtype)],
            lambda inputs, _: inputs,
            (True,),
            weight=weight,
            **settings,
        )

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("SGD", {"momentum": 0.9, "nesterov": True}),
            ("Adam", {"weight_decay": 0}),
            ("AdamW", {}),
            ("AdamW", {"amsgrad": True}),
            ("Adagrad", {}),
            ("RMSprop", {"centered": True}),
            ("Adadelta", {}),
            ("Lion", {}),
            ("NAdam", {}),
            ("RAdam", {}),
        ],
    )
    def test_updates_have_the_bits_of_the_passes(self, name: str, settings: Any, dtype: str) -> None:
        optimizer = getattr(ddp.optim, name)([ddp.zeros(1)], **{"weight_decay": 0.1, **settings})
        [group] = optimizer.param_groups
        formula = compile_formula(tuple(optimizer.formula(group)), optimizer.states(group), optimizer.factor)
        scalars = np.array(formula.evaluate(3.0, *group_settings(formula, group), 0.5), dtype)
        rows = [[np.abs(normal(n, dtype=dtype, seed=i)) for i in range(2 + len(formula.states))] for n in (0, 1, 5000)]
        rows[2][1][:4] = np.inf, -np.inf, np.nan, -0.0
        copies = [[each.copy() for each in row] for row in rows]
        with np.errstate(all="ignore"):
            update.run_program.__wrapped__(
                np, formula.program, scalars, update.UpdateRows([tuple(row) for row in rows])
            )
            update.run_program(np, formula.program, scalars, update.UpdateRows([tuple(row) for row in copies]))
        for a, b in zip(rows, copies, strict=True):
            for expected, got in zip(a, b, strict=True):
                assert_array_equal(got, expected)

    @pytest.mark.parametrize("window", WINDOWS, ids=str)
    def test_columns_of_images(self, window: Any, dtype: str) -> None:
        window = Window(*window)
        x = normal(3, 2, *window.image, dtype=dtype)
        x.flat[:3] = np.nan, np.inf, -np.inf
        whole = slice(0, window.out[0])
        for lines in (whole, slice(window.out[0] // 2, window.out[0])):
            expected = convolution.im2col_lines.__wrapped__(np, x, window, lines)
            for each in layouts(x):
                assert_array_equal(convolution.im2col_lines(np, each, window, lines), expected)
            columns = normal(*expected.shape, dtype=dtype, seed=1)
            for each in layouts(columns):
                one = normal(*x.shape, dtype=dtype, seed=2)
                other = normal(*x.shape, dtype=dtype, seed=2)
                convolution.col2im_lines.__wrapped__(np, columns, window, lines, one)
                convolution.col2im_lines(np, each, window, lines, other)
                assert_array_equal(other, one)  # both add in the order of the kernel's elements
        assert convolution.im2col_lines(np, x[:0], window, whole).shape == (2, window.elements, 0, *window.out)

    @pytest.mark.parametrize("window", WINDOWS, ids=str)
    def test_maxima(self, window: Any, dtype: str) -> None:
        window = Window(*window)
        ties = normal(3, 2, *window.image).round().astype(dtype)
        awkward = ties.copy()
        awkward[::2][ties[::2] > 2] = np.nan
        awkward[::2][ties[::2] < -2] = np.inf
        awkward[1] = -np.inf
        for x in (normal(*ties.shape, dtype=dtype), ties, awkward, ties[:0]):
            expected = pooling.maxima.__wrapped__(np, x, window)
            for each in layouts(x):
                for one, other in zip(pooling.maxima(np, each, window), expected, strict=True):
                    assert_array_equal(one, other)
                    assert one.dtype == other.dtype
            g = normal(*expected[0].shape, dtype=dtype, seed=1)
            dx = pooling.add_at_maxima.__wrapped__(np, g, expected[1], window)
            for each in layouts(g):
                close(pooling.add_at_maxima(np, each, expected[1], window), dx, dtype)

    def test_embedding_gradient(self, dtype: str) -> None:
        where = np.random.default_rng(0).integers(0, 9, 200)
        g = normal(200, 65, dtype=dtype)
        expected = np.zeros((9, 65))
        np.add.at(expected, where, g)
        close(indexing.add_rows(np, 9, where, g), expected, dtype)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        "shape", [(1, 1, 1, 1, 1), (2, 3, 5, 7, 4), (2, 2, 65, 33, 20), (3, 1, 130, 130, 16)], ids=str
    )
    def test_attention(self, shape: Any, causal: bool, dtype: str) -> None:
        n, heads, length, keys, depth = shape
        width = depth + 3
        apart = [
            normal(n, heads, rows, wide, dtype=dtype, seed=i)
            for i, (rows, wide) in enumerate(((length, depth), (keys, depth), (keys, width)))
        ]
        # As views of (N, L, H, D), and of one array of all three, with gaps between the rows.
        between = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in apart]
        wider = [np.concatenate((x, x), axis=-1)[..., : x.shape[-1]] for x in between]
        hidden = normal(n, 1, length, keys) > 2
        masks = None, ~hidden, normal(1, heads, 1, keys, dtype=dtype)
        for q, k, v in (apart, between, wider):
            for mask in masks[: 1 if causal else 3]:
                saved = lambda inputs, out, mask=mask: (*inputs[:3], mask, out)  # noqa: E731
                settings = {"scale": 0.3, "causal": causal, "p": 0.0, "seed": 0}
                compare(attention.attention, dtype, [q, k, v, mask], saved, (True, True, True, False), **settings)


@needs_kernels
@pytest.mark.parametrize(("name", "count"), [("Adam", 12), ("AdamW", 13)])
def test_adam_is_the_formula_that_has_a_loop(name: str, count: int) -> None:
    optimizer = getattr(ddp.optim, name)([ddp.zeros(1)])
    [group] = optimizer.param_groups
    program = compile_formula(tuple(optimizer.formula(group)), optimizer.states(group), optimizer.factor).program
    table = (ctypes.c_int32 * 4 * count).in_dll(_native.library, f"{name.lower()}_passes")
    assert_array_equal(_encode(program)[2], np.array(table))


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_infinities_and_nan_are_values(dtype: str) -> None:
    x = np.array([[np.nan, 1, 2], [np.inf, 1, 2], [-np.inf, 1, 2], [-np.inf] * 3, [1e4, -1e4, 0], [0, -0.0, 5]], dtype)
    calls: list[tuple[Op, dict[str, Any]]] = [
        (activation.sigmoid, {}),
        (activation.hardtanh, {"low": -1.0, "high": 2.0}),
        (activation.silu, {}),
        (activation.gelu, {"tanh": True}),
        (activation.gelu, {"tanh": False}),
        (softmax_ops.softmax, {"dim": 1}),
        (softmax_ops.log_softmax, {"dim": 1}),
    ]
    with np.errstate(all="ignore"):
        for op, parameters in calls:
            got = op.forward(np, x, **parameters)[0]
            expected = op.reference.forward(np, x, **parameters)[0]
            assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=op.name)


@needs_kernels
@pytest.mark.parametrize("name", ["elu", "gelu", "logsigmoid", "mish", "silu", "softplus"])
def test_a_smooth_activation_makes_no_other_array_of_its_size(name: str) -> None:
    op = OPS[name]
    x, other, columns = (normal(*shape, dtype="float32") for shape in ((512, 512), (512, 512), (512, 1)))
    given = {"gelu": {"tanh": False}, "softplus": {"beta": 1, "threshold": 20}}.get(name, {})

    def compute(function: Callable[..., Any], *args: Any, **parameters: Any) -> Any:
        tracemalloc.start()
        result = function(np, *args, **parameters)[0]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.5 * x.nbytes
        return result

    for x_given in (x, x.T):
        assert_allclose(
            compute(op.forward, x_given, **given), op.reference.forward(np, x_given, **given)[0], 1e-5, 1e-6
        )
        for g in (other, other.T, np.broadcast_to(columns, x.shape)):
            expected = op.reference.backward(np, g, (True,), (x_given,), given)[0]
            assert_allclose(compute(op.backward, g, (True,), (x_given,), given), expected, 1e-5, 1e-6)
    assert op.forward(np, x.T, **given)[0].flags.f_contiguous
    assert op.forward(np, x.T[:0, ::2], **given)[0].shape == (0, 256)


@needs_kernels
def test_all_builds_give_the_same_bits() -> None:
    libraries = [ctypes.CDLL(str(path)) for path in builds(Path(_native.__file__).parent, "kernels")]
    if len(libraries) < 2:
        pytest.skip("this CPU runs one build alone")
    rows, columns = 37, 515
    sizes = [ctypes.c_ssize_t(n) for n in (rows * columns, rows, columns)]
    curves = ("silu_f32", "silu_f64", "gelu_f32", "gelu_tanh_f32", "gelu_tanh_f64")
    for name, arguments, gradients in (
        *((name, sizes[:1], given) for name in curves for given in ([None], [1])),
        *((f"softmax_{tag}", [*sizes[1:], log], []) for tag, log in (("f32", 0), ("f32", 1), ("f64", 1))),
    ):
        x = normal(rows, columns, dtype="float32" if name.endswith("f32") else "float64")
        given = [ctypes.c_void_p(each and x.ctypes.data) for each in (1, *gradients)]
        results = []
        for build in libraries:
            out = np.empty_like(x)
            getattr(build, name)(*arguments, *given, ctypes.c_void_p(out.ctypes.data))
            results.append(out)
        for result in results[1:]:
            assert_array_equal(result, results[0], err_msg=name)


OUT = object()  # what an op saves where it saves its result


def results_of_all_kernels(dtype: str) -> list[Any]:
    """What ops make of arrays that are long enough to be shared among threads, and of no round size."""
    rows, n = 331, 515
    x = normal(rows, n, dtype=dtype)
    g = normal(rows, n, dtype=dtype, seed=1)
    w = normal(n, dtype=dtype)
    b = normal(n, dtype=dtype, seed=2)
    image = normal(5, 3, 71, 53, dtype=dtype)
    window = Window((71, 53), (3, 3), (2, 2), (1, 1), (1, 1))
    heads = [normal(2, 3, 130, 20, dtype=dtype, seed=seed) for seed in range(3)]
    results: list[Any] = []

    def both(op: Op, inputs: list[Any], saved: tuple[Any, ...], **parameters: Any) -> None:
        out, residual = op.forward(np, *inputs, **parameters)
        saved = tuple([out if each is OUT else each for each in saved])
        needs = tuple(each is not None for each in inputs)
        dz = g if out.shape == g.shape else out
        results.extend([out, *op.backward(np, dz, needs, saved, residual)])

    both(activation.sigmoid, [x], (OUT,))
    both(activation.relu, [x], (OUT,))
    both(activation.hardtanh, [x], (OUT,), low=-1.0, high=2.0)
    both(activation.leaky_relu, [x], (x,), slope=0.2)
    both(activation.silu, [x], (x,))
    both(activation.gelu, [x], (x,), tanh=True)
    both(activation.gelu, [x], (x,), tanh=False)
    both(softmax_ops.softmax, [x], (OUT,), dim=1)
    both(softmax_ops.log_softmax, [x], (OUT,), dim=1)
    both(normalization.layer_norm, [x, w, b], (w, x), axes=1, eps=1e-5)
    target = np.arange(rows) % n
    settings = {"target": target, "keep": target != 3, "weight": None, "smoothing": 0.0, "reduction": "mean"}
    both(losses.cross_entropy, [x], (x,), **settings)
    both(attention.attention, [*heads, None], (*heads, None, OUT), scale=0.3, causal=True, p=0.0, seed=0)
    both(normalization.batch_norm, [image, None, None], (None, image), eps=1e-5, tell=None)
    both(normalization.group_norm, [image, None, None], (None, image), groups=1, eps=1e-5)
    columns = convolution.im2col_lines(np, image, window, slice(0, window.out[0]))
    convolution.col2im_lines(np, columns, window, slice(0, window.out[0]), image)
    top, argmax = pooling.maxima(np, image, window)
    results.extend([columns, image, top, argmax, pooling.add_at_maxima(np, top, argmax, window)])
    if dtype == "float32":  # others go by products, which are the BLAS's
        gates = normal(3, 40, 256, dtype=dtype) / 9
        weight = normal(256, 64, dtype=dtype) / 9
        hs, cs = np.zeros((2, 4, 40, 64), dtype)
        recurrent.lstm_steps(np, weight.T, None, gates, cs, hs)
        da = np.empty_like(gates)
        dstates = np.ones((2, 40, 64), dtype)
        recurrent.lstm_steps_backward(np, weight, None, gates, cs, np.ones_like(hs[1:]), da, *dstates)
        results.extend([gates, hs, cs, da, dstates])
    parameter = ddp.from_numpy(x).requires_grad_()
    parameter.grad = ddp.from_numpy(g)
    ddp.optim.AdamW([parameter]).step()
    return [*results, x]


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_any_number_of_threads_gives_the_same_bits(dtype: str) -> None:
    results = []
    for count in (1, 2, 3):
        with threadpool_limits(count, user_api="blas"):
            if _native.library.count_threads(1 << 20) != count:
                pytest.skip("NumPy's products come from another library than OpenBLAS")
            results.append(results_of_all_kernels(dtype))
    for number, arrays in enumerate(zip(*results, strict=True)):
        for other in arrays[1:]:
            assert_array_equal(other, arrays[0], err_msg=str(number))


@needs_kernels
def test_a_loop_takes_more_threads_the_more_it_works() -> None:
    count_threads = _native.library.count_threads
    with threadpool_limits(4, user_api="blas"):
        if count_threads(1 << 30) != 4:
            pytest.skip("NumPy's products come from another library than OpenBLAS")
        assert [count_threads(work << 14) for work in (0, 1, 2, 3, 4, 1 << 30)] == [1, 1, 2, 3, 4, 4]


@needs_kernels
def test_threads_go_on_in_a_forked_child() -> None:
    code = (
        "import os; import ddp; from threadpoolctl import threadpool_limits; threadpool_limits(2)\n"
        "x = ddp.ones(300, 300); run = lambda: [ddp.nn.functional.gelu(x @ x) for _ in range(20)]\n"
        "run(); pid = os.fork(); run()\n"
        "if not pid: os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "7\n", done.stderr


def test_kernels_older_than_the_source_are_left_out_with_the_reason() -> None:
    code = (
        "import ctypes; find = ctypes.CDLL.__getattr__\n"
        "def old(self, name):\n"
        "    if name == 'cross_entropy_f32': raise AttributeError('undefined symbol: ' + name)\n"
        "    return find(self, name)\n"
        "ctypes.CDLL.__getattr__ = old\n"
        "import ddp; native = ddp.backends.native; from ddp.ops import losses, softmax_ops\n"
        "assert softmax_ops.softmax.reference is softmax_ops.softmax\n"
        "print(native.is_available(), native.why_not())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    if native.is_available():
        assert done.stdout.startswith("False they are older than this source (undefined symbol: cross_entropy_f32)")


def copy_sources(to: Path) -> None:
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    for name in ("ddp", "collectives", "tests/ddp/native"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def build(folder: Path, absent: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess[str]:
    """Runs setup.py; absent: modules that it cannot import."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({[*absent]}))\n"
        "sys.argv = ['setup.py', '-q', 'build_ext', '--inplace']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def test_a_machine_without_a_compiler_installs_all_the_same(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    copy_sources(tmp_path)
    without_wheels = ("setuptools.command.bdist_wheel", "wheel")  # setuptools 65.5, which Python 3.11 brings
    done = build(tmp_path, without_wheels, CC="/nonexistent/cc")
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.rglob("*.so")]


@needs_kernels
@pytest.mark.long
@pytest.mark.timeout(620)
def test_under_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    names = [f"lib{each}.so" for each in ("asan", "ubsan")]
    results = [subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    libraries = [each.stdout.strip() for each in results]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("gcc brings no sanitizers here")
    copy_sources(tmp_path)
    done = build(tmp_path, CC="gcc", CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all")
    assert [*tmp_path.rglob("*.so")], done.stderr
    here = "tests/ddp/native"
    # Its own copy of the package: the sanitizers abort the process at the first fault, and print where it is.
    options = ["-q", "-s", "-p", "no:cacheprovider", "-k", "not sanitizers and not installs and not builds"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, here],
        cwd=tmp_path,
        env={**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
