"""Gradients of gradients: every op against differences and PyTorch, and models that train by them."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._engine import Node
from ddp._tensor import create_graph
from ddp._tensor.recording import RecordingArray
from ddp.errors import GraphFreedError, VersionError
from ddp.ops import OPS
from tests.ddp.cases.table import Case, draw
from tests.ddp.test_ops import OF_OP, cases_of, leaves

F = ddp.nn.functional
# Their derivatives are 0 or jump at the numbers of the table, where differences say nothing.
STEPS = {"ceil", "div_rounded", "flat", "floor", "l1_loss", "round", "sign", "trunc"}
ALONE = {"abs", "ctc_loss"}
DERIVED = [op for op in OF_OP if OPS[op].derived]


def leaf(*values: float) -> ddp.Tensor:
    return ddp.tensor(values, dtype=ddp.float64, requires_grad=True)


def weighted(gradients: Any, t: Any) -> Any:
    """A number that changes with every element of some gradients."""
    return sum((g * t.from_numpy(draw(*g.shape, seed=i))).sum() for i, g in enumerate(gradients) if g is not None)


def derivatives(t: Any, fn: Callable[..., Any], inputs: list[Any], order: int) -> list[list[Any]]:
    """The gradients of fn with respect to its inputs and the gradient of its result, order by order, as arrays."""
    y = fn(t, *inputs)
    g = t.from_numpy(draw(*y.shape, seed=9)).requires_grad_()
    wanted = [x for x in inputs if x.requires_grad]
    found = [t.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True)]
    wanted.append(g)
    for _ in range(order - 1):
        value = weighted(found[-1], t)
        if not getattr(value, "requires_grad", False):
            break
        found.append(t.autograd.grad(value, wanted, create_graph=True, allow_unused=True))
    return [[None if x is None else (x.detach() * 1).numpy() for x in gradients] for gradients in found]


def assert_alike(found: list[list[Any]], expected: list[list[Any]], label: str, rtol: float, atol: float) -> None:
    """None counts as 0: PyTorch gives either, by what an op happened to save."""
    for order, (ours, theirs) in enumerate(itertools.zip_longest(found, expected, fillvalue=[]), 1):
        for dx, reference in itertools.zip_longest(ours, theirs):
            whole = dx if reference is None else reference
            one, other = (np.zeros(np.shape(whole)) if each is None else each for each in (dx, reference))
            np.testing.assert_allclose(one, other, rtol, atol, err_msg=f"{label}, order {order}")


@pytest.mark.parametrize(
    "op",
    # PyTorch differentiates the others twice, and they are compared with it below.
    [pytest.param(op, marks=[pytest.mark.long] * (op not in ALONE)) for op in OF_OP if op not in STEPS],
)
def test_second_derivatives_agree_with_differences(op: str) -> None:
    case = next(case for case in cases_of(op) if all(x.size for x in case.inputs))
    assert ddp.autograd.gradgradcheck(functools.partial(case.fn, ddp), leaves(case))


@pytest.mark.parametrize("op", OF_OP)
def test_second_derivatives_agree_with_pytorch(op: str, torch: Any) -> None:
    for case in cases_of(op):
        ours = leaves(case)
        theirs = [torch.from_numpy(x.detach().numpy().copy()).requires_grad_(x.requires_grad) for x in ours]
        found = derivatives(ddp, case.fn, ours, 2)
        try:
            expected = derivatives(torch, case.fn, theirs, 2)
        except RuntimeError:  # it has no second derivative of every op, nor of all that are empty
            continue
        # PyTorch's binary cross entropy adds up what cancels here.
        assert_alike(found, expected, case.label, 1e-8, 1e-8 if op == "binary_cross_entropy" else 1e-10)


def first_gradients(case: Case, dtype: str, graph: bool) -> list[bytes | None]:
    """The bytes of the gradients of a case's inputs."""
    inputs = [
        ddp.from_numpy(x).to(getattr(ddp, dtype) if x.dtype == "float64" else None).requires_grad_(x.dtype == "float64")
        for x in case.inputs
    ]
    y = case.fn(ddp, *inputs)
    g = ddp.from_numpy(draw(*y.shape, seed=9)).to(y.dtype)
    wanted = [x for x in inputs if x.requires_grad]
    found = ddp.autograd.grad(y, wanted, g, create_graph=graph, allow_unused=True)
    return [None if x is None else x.detach().numpy().tobytes() for x in found]


def differ(case: Case, dtype: str) -> bool:
    """Whether first gradients have other bits with a graph than without."""
    return first_gradients(case, dtype, True) != first_gradients(case, dtype, False)


@pytest.mark.parametrize("op", OF_OP)
def test_first_gradients_have_the_same_bits_with_a_graph(op: str, count: Callable[[int, int], int]) -> None:
    for dtype in ("float32", "bfloat16", "float64", "float16")[: count(2, 3 if op == "fft" else 4)]:
        assert [case.label for case in OF_OP[op] if differ(case, dtype)] == [], dtype


@pytest.mark.skipif(ddp._native.library is None, reason="the ops have no kernels")
@pytest.mark.parametrize("op", sorted(create_graph.ROUNDED_APART & OPS.keys()))
def test_no_backward_runs_beside_the_recorded_one_without_need(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create_graph, "ROUNDED_APART", create_graph.ROUNDED_APART - {op})
    assert any(differ(case, dtype) for case in OF_OP[op] for dtype in ("float64", "float32"))


def array(x: Any) -> Any:
    return None if x is None else x.detach().numpy()


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (lambda: ddp.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu"), (7, 5, 32)),
        (lambda: ddp.nn.LSTM(32, 24, num_layers=2, bidirectional=True), (9, 5, 32)),
    ],
)
def test_backward_of_models_gives_the_same_bits_with_a_graph(make: Any, sizes: Any) -> None:
    net = make()
    x = ddp.from_numpy(draw(*sizes)).float()
    found = []
    for graph in (True, False):
        net.zero_grad()
        y = net(x)
        (y if isinstance(y, ddp.Tensor) else y[0]).square().mean().backward(create_graph=graph)
        found.append([p.grad.detach().numpy().tobytes() for p in net.parameters()])
    assert found[0] == found[1]


@pytest.mark.parametrize("op", DERIVED)
def test_what_depends_on_the_inputs_is_differentiated(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mark `derived` second derivatives are wrong, or do not come."""

    def of(case: Case) -> list[list[Any]]:
        return derivatives(ddp, case.fn, leaves(case), 2)

    right = [of(case) for case in OF_OP[op]]
    monkeypatch.setattr(OPS[op], "derived", False)

    def compare() -> None:
        for case, expected in zip(OF_OP[op], right, strict=True):
            assert_alike(of(case), expected, case.label, 1e-8, 1e-10)

    with pytest.raises((AssertionError, ValueError)):
        compare()


def test_a_bias_alone_is_differentiated_twice() -> None:
    x, w, b = (ddp.from_numpy(draw(*shape)) for shape in ((3, 4), (5, 4), (5,)))
    act = functools.partial(F.linear_act, x, w, activation="gelu", approximate="tanh")
    assert ddp.autograd.gradgradcheck(lambda b: act(bias=b), b.requires_grad_())


def standardized(x: Any, dims: Any) -> Any:
    centered = x - x.mean(dims, keepdim=True)
    return centered / ((centered * centered).mean(dims, keepdim=True) + 1e-5).sqrt()


THIRD: dict[str, Any] = {
    "layer_norm": (lambda t, x: F.layer_norm(x, (4,)), lambda t, x: standardized(x, -1)),
    "rms_norm": (lambda t, x: F.rms_norm(x, (4,), eps=1e-5), lambda t, x: x / ((x * x).mean(-1, True) + 1e-5).sqrt()),
    "batch_norm": (lambda t, x: F.batch_norm(x, None, None, training=True), lambda t, x: standardized(x, 0)),
    "group_norm": (
        lambda t, x: F.group_norm(x, 2),
        lambda t, x: standardized(x.reshape(3, 2, 2), -1).reshape(3, 4),
    ),
    "normalize": (lambda t, x: F.normalize(x), lambda t, x: x / (x * x).sum(1, True).sqrt()),
    "std": (lambda t, x: x.std(1), lambda t, x: (x - x.mean(1, True)).square().sum(1).div(3).sqrt()),
}


@pytest.mark.parametrize("name", THIRD)
def test_third_derivatives_of_norms_agree_with_their_formulas(name: str) -> None:
    """PyTorch's own of layer_norm and batch_norm are wrong in third order."""
    fused, formula = (derivatives(ddp, fn, [ddp.from_numpy(draw(3, 4)).requires_grad_()], 3) for fn in THIRD[name])
    assert_alike(fused, formula, name, 1e-9, 1e-10)


ACTIVATIONS = ["celu", "elu", "gelu", "hardswish", "logsigmoid", "mish", "selu", "sigmoid", "silu", "softmax"]


@pytest.mark.parametrize("name", [*ACTIVATIONS, "softplus", "softsign", "tanh"])
def test_third_derivatives_of_activations_agree_with_pytorch(name: str, torch: Any) -> None:
    def fn(t: Any, x: Any) -> Any:
        return getattr(t.nn.functional, name)(x, **({"dim": 1} if name == "softmax" else {}))

    found, expected = (derivatives(t, fn, [t.from_numpy(draw(3, 4)).requires_grad_()], 3) for t in (ddp, torch))
    assert_alike(found, expected, name, 1e-9, 1e-10)


# Models that differentiate gradients, as functions of a module that is ddp or torch, in float64.


def numbers(t: Any, *shape: int, seed: int) -> Any:
    return t.from_numpy(np.random.default_rng(seed).standard_normal(shape) * 0.5)


def filled(t: Any, model: Any) -> Any:
    model = model.double()
    with t.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(numbers(t, *p.shape, seed=i))
    return model


def gradients(t: Any, loss: Any, model: Any) -> list[Any]:
    return list(t.autograd.grad(loss, list(model.parameters())))


def wgan_gp(t: Any) -> list[Any]:
    """Gulrajani et al. 2017, arXiv:1704.00028: five steps of Adam."""
    nn = t.nn
    layers = nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
    critic = filled(t, nn.Sequential(*layers))
    adam = t.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    for step in range(5):
        real, fake, part = (numbers(t, 8, n, seed=10 * step + i) for i, n in enumerate((6, 6, 1)))
        mixed = (part * real + (1 - part) * fake).requires_grad_()
        (slope,) = t.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        adam.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        adam.step()
    return list(critic.parameters())


def maml(t: Any) -> list[Any]:
    """Finn et al. 2017, arXiv:1703.03400: gradients through two inner steps."""
    weights = [numbers(t, *shape, seed=i).requires_grad_() for i, shape in enumerate([(8, 3), (8,), (2, 8), (2,)])]

    def loss(w: list[Any], seed: int) -> Any:
        hidden = t.nn.functional.linear(numbers(t, 6, 3, seed=seed), w[0], w[1]).relu()
        outputs = t.nn.functional.linear(hidden, w[2], w[3])
        return t.nn.functional.cross_entropy(outputs, t.tensor([0, 1, 1, 0, 1, 0]))

    fast = weights
    for step in range(2):
        slopes = t.autograd.grad(loss(fast, 20 + step), fast, create_graph=True)
        fast = [w - 0.3 * g for w, g in zip(fast, slopes, strict=True)]
    return list(t.autograd.grad(loss(fast, 30), weights))


def pinn(t: Any) -> list[Any]:
    """Raissi et al. 2019, J. Comput. Phys. 378: the equation of Korteweg and de Vries, u_t + u*u_x + u_xxx = 0."""
    nn = t.nn
    net = filled(t, nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)))
    x, time = (numbers(t, 20, 1, seed=i).requires_grad_() for i in (70, 71))
    u = net(t.cat([x, time], 1))

    def along(y: Any, by: Any) -> Any:
        return t.autograd.grad(y, by, t.ones_like(y), create_graph=True)[0]

    u_x = along(u, x)
    residual = along(u, time) + u * u_x + along(along(u_x, x), x)
    return gradients(t, residual.square().mean(), net)


@pytest.mark.parametrize("run", [wgan_gp, maml, pinn])
def test_models_agree_with_pytorch(run: Any, torch: Any) -> None:
    for ours, theirs in zip(run(ddp), run(torch), strict=True):
        expected = theirs.detach().numpy()
        assert np.abs(ours.detach().numpy() - expected).max() <= 1e-11 * max(1, np.abs(expected).max())


# What may go wrong.


def test_gradients_that_are_not_wanted_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OPS["conv_filters"], "forward")
    image, filters = (ddp.from_numpy(draw(1, 1, 3, 3, seed=i)).requires_grad_() for i in range(2))
    (g,) = ddp.autograd.grad(F.conv2d(image, filters).sum(), image, create_graph=True)
    assert g.requires_grad


def test_numpy_takes_no_recording_array() -> None:
    with pytest.raises(TypeError, match="gradient would be lost"):
        np.asarray(RecordingArray(leaf(1.0)))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, b: x * (x + b).relu(), [[2.0, 0.0], [1.0, 0.0]]),
        (lambda x, b: F.relu(x) + b * 0, [[0.0, 0.0], [0.0, 0.0]]),
        (lambda x, b: F.relu(x) * b, [[0.0, 0.0], [1.0, 0.0]]),
    ],
    ids=["a sum", "alone", "beside a factor"],
)
def test_what_only_a_mask_was_made_of_gets_zeros(fn: Any, expected: Any) -> None:
    x, b = leaf(1.0, -2.0), leaf(0.5, 0.5)
    (g,) = ddp.autograd.grad(fn(x, b).sum(), x, create_graph=True)
    assert [each.tolist() for each in ddp.autograd.grad(g.sum(), (x, b), materialize_grads=True)] == expected


class SquareOfNumbers(ddp.autograd.Function):
    """Its gradient has no derivative with respect to x, which it should have."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2 * ctx.saved_tensors[0].detach()


def test_a_function_with_the_name_of_an_op_runs_once() -> None:
    calls = []

    def backward(ctx: Any, g: Any) -> Any:
        calls.append(g)
        return g * 2

    methods = {"forward": staticmethod(lambda ctx, x: x * 2), "backward": staticmethod(backward)}
    x = leaf(1.0)
    ddp.autograd.grad(type("softmax", (ddp.autograd.Function,), methods).apply(x), x, create_graph=True)
    assert len(calls) == 1


def test_gradgradcheck_finds_a_gradient_without_its_derivative() -> None:
    assert ddp.autograd.gradcheck(SquareOfNumbers.apply, leaf(1.0, 2.0))
    with pytest.raises(ddp.errors.GradcheckError):
        ddp.autograd.gradgradcheck(SquareOfNumbers.apply, leaf(1.0, 2.0))


class EmptiesGradient(ddp.autograd.Function):
    """The identity, whose backward writes into the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g.zero_()


def test_gradients_that_users_get_are_their_own() -> None:
    x, y, z = leaf(1.0), leaf(2.0), leaf(3.0)
    x.register_hook(lambda g: g.zero_())
    result = x + y + z + EmptiesGradient.apply(z)
    found = ddp.autograd.grad(result, (x, y, z), create_graph=True)
    assert [g.tolist() for g in found] == [[0.0], [1.0], [1.0]]
    one, other = ddp.autograd.grad(y + z, (y, z), create_graph=True)
    with ddp.no_grad():
        one.zero_()
    assert other.tolist() == [1.0]
    (y + z).sum().backward(create_graph=True)
    with ddp.no_grad():
        y.grad.zero_()
    assert z.grad.tolist() == [1.0]


def test_gradients_are_recorded_without_autocast() -> None:
    x, w = (ddp.from_numpy(draw(4, 4, seed=i)).float().requires_grad_() for i in range(2))
    y = (x @ w).sin().sum()
    (expected,) = ddp.autograd.grad(y, x, create_graph=True)
    with ddp.autocast("cpu", dtype=ddp.bfloat16):
        (g,) = ddp.autograd.grad(y, x, create_graph=True)
    assert g.equal(expected)


def test_grad_has_a_graph_and_is_not_written_to() -> None:
    x = leaf(3.0)
    (x**3).sum().backward(create_graph=True)
    penalty = (x.grad**2).sum()  # saves x.grad: 27
    (x * 2).sum().backward()
    assert x.grad.tolist() == [29.0]
    x.grad = None
    penalty.backward()
    assert x.grad.tolist() == [2 * 27 * 6 * 3.0]


def test_grad_with_a_graph_is_added_to_replaced_and_emptied() -> None:
    x = leaf(3.0)
    for _ in range(2):
        (x**3).sum().backward(create_graph=True)
    assert x.grad.tolist() == [54.0]
    assert ddp.autograd.grad(x.grad.sum(), x)[0].tolist() == [36.0]
    held = x.grad
    x.grad = ddp.ones(1, dtype=ddp.float64)
    assert (held.tolist(), x.grad.requires_grad) == ([54.0], False)
    (x**3).sum().backward(create_graph=True)
    ddp.optim.SGD([x], lr=1.0).zero_grad(set_to_none=False)
    assert (x.grad.tolist(), x.grad.requires_grad) == ([0.0], False)


def test_backward_into_chosen_inputs_has_a_graph() -> None:
    x, w = leaf(2.0), leaf(3.0)
    y = x * w * w
    y.backward(create_graph=True, inputs=[w])
    assert (x.grad, w.grad.tolist()) == (None, [12.0])
    assert ddp.autograd.grad(w.grad, (x, w))[0].tolist() == [6.0]


def test_graphs_go_by_reference_counting() -> None:
    gc.collect()
    gc.disable()
    try:
        x = leaf(1.0, 2.0)
        w = ddp.from_numpy(draw(3, 2)).requires_grad_()
        (g,) = ddp.autograd.grad(F.layer_norm(F.gelu(w @ x), (3,)).square().sum(), x, create_graph=True)
        alive = [weakref.ref(g.edge), weakref.ref(g)]
        g.square().sum().backward()
        del g
        assert [each() for each in alive] == [None, None]
        (x**3).sum().backward(create_graph=True)
        alive = [weakref.ref(x.grad.edge)]
        assert isinstance(alive[0](), Node)
        ddp.optim.SGD([x], lr=0.1).zero_grad()
        assert alive[0]() is None
        (x**3).sum().backward(create_graph=True)
        alive = [weakref.ref(x.grad.edge), weakref.ref(x)]
        del x
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_a_freed_graph() -> None:
    x = leaf(2.0)
    y = x**3
    (g,) = ddp.autograd.grad(y, x, create_graph=True)
    g.backward()  # frees what is under it, also the graph of y
    with pytest.raises(GraphFreedError, match="retain_graph=True"):
        ddp.autograd.grad(g, x)
    y = x**3
    (g,) = ddp.autograd.grad(y, x, create_graph=True, retain_graph=False)
    with pytest.raises(GraphFreedError):
        ddp.autograd.grad(y, x)


def test_a_write_in_place_is_noticed() -> None:
    for change, message in ((0, "'x'"), (1, "'w'"), (2, "input 2")):
        inputs = [ddp.from_numpy(draw(*shape)).requires_grad_() for shape in ((3, 4), (4,), (4,))]
        y = F.layer_norm(inputs[0], (4,), inputs[1], inputs[2])
        with ddp.no_grad():
            inputs[change].add_(1)
        with pytest.raises(VersionError, match=message):
            ddp.autograd.grad(y.sum(), inputs, create_graph=True)
    x = leaf(2.0)
    (g,) = ddp.autograd.grad(x**3, x, create_graph=True)
    with ddp.no_grad():
        x.add_(1)
    with pytest.raises(VersionError):
        ddp.autograd.grad(g, x)


def test_views_are_known_after_a_graph_of_gradients() -> None:
    """What create_graph makes of saved memory is no base of views."""
    x = leaf(1.0, 2.0)
    y = x * 2
    ddp.autograd.grad((y.reshape(2, 1) ** 2).sum(), x, create_graph=True)
    (y**2).sum().backward(create_graph=True)
    view = y.reshape(1, 2)
    with pytest.raises(ddp.errors.InplaceError):
        view.mul_(2)


def test_targets_may_be_written_to_afterwards() -> None:
    x = ddp.from_numpy(draw(2, 3)).requires_grad_()
    target = ddp.tensor([0, 2])
    loss = F.cross_entropy(x, target)
    expected = ddp.autograd.grad(F.cross_entropy(x, target.clone()), x)[0]
    target.zero_()
    assert ddp.autograd.grad(loss, x, retain_graph=True)[0].equal(expected)
    np.testing.assert_allclose(array(ddp.autograd.grad(loss, x, create_graph=True)[0]), array(expected), 1e-12)


@pytest.mark.parametrize("dtype", [ddp.float16, ddp.bfloat16, ddp.float32])
def test_other_dtypes_stay_what_they_are(dtype: Any) -> None:
    def second(x: Any, w: Any) -> tuple[Any, Any]:
        y = F.gelu(F.layer_norm(F.linear(x, w), (5,))).softmax(-1).square().sum()
        (g,) = ddp.autograd.grad(y, x, create_graph=True)
        return g.dtype, ddp.autograd.grad(g.double().square().sum(), w)[0]

    narrow = [ddp.from_numpy(draw(*shape)).to(dtype).requires_grad_() for shape in ((4, 8), (5, 8))]
    first, dw = second(*narrow)
    _, expected = second(*[x.detach().double().requires_grad_() for x in narrow])
    assert (first, dw.dtype) == (dtype, dtype)
    close = {ddp.float16: 0.02, ddp.bfloat16: 0.1, ddp.float32: 1e-4}[dtype]
    assert float((dw.double() - expected).abs().max()) <= close * float(expected.abs().max())


class Cube(ddp.autograd.Function):
    """Saves its input and its results; the second is x itself times a number."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        cube = x**3
        scaled = x * factor
        ctx.save_for_backward(x, scaled)
        ctx.factor = factor
        return cube, scaled

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        x, scaled = ctx.saved_tensors
        return g * 3 * x * scaled / ctx.factor + h * ctx.factor, None


def test_a_result_and_the_graph_of_a_gradient_give_one_output_two_gradients() -> None:
    x = leaf(1.0, 2.0)
    cube, scaled = Cube.apply(x, 2.0)
    (g,) = ddp.autograd.grad(cube.sum(), x, create_graph=True)  # 3*x*scaled/2
    (g + scaled**2).sum().backward()
    assert x.grad.tolist() == [14.0, 28.0]


def test_functions_hooks_checkpoints_and_anomaly_mode() -> None:
    x = leaf(1.0, 2.0)
    assert ddp.autograd.gradgradcheck(lambda x: Cube.apply(x, 2.0), x)
    y = x**3
    seen = []
    y.register_hook(lambda g: seen.append(g.requires_grad) or g * x)
    y.retain_grad()
    with ddp.autograd.detect_anomaly():
        (g,) = ddp.autograd.grad((y**2).sum(), x, create_graph=True)
    assert seen == [True]
    assert y.grad.requires_grad
    assert g.tolist() == [6.0, 6 * 2.0**6]  # 2*x^3 * x * 3*x^2
    # The hook is called for the gradient that g leads to y, too.
    assert ddp.autograd.grad(g.sum(), x)[0].tolist() == [36.0, 18 * 2.0**6 + 18 * 2.0**5]

    def layer(x: Any) -> Any:
        return F.layer_norm(F.gelu(x * x), (2,), x) * x.std()

    weights = ddp.from_numpy(draw(2))
    plain, kept = (
        derivatives(ddp, fn, [leaf(1.0, 2.0)], 3)
        for fn in (lambda t, x: layer(x) * weights, lambda t, x: ddp.autograd.checkpoint(layer, x) * weights)
    )
    assert_alike(kept, plain, "checkpoint", 1e-12, 1e-13)
    z = leaf(0.0)
    with ddp.autograd.detect_anomaly(), pytest.raises(ddp.errors.AnomalyError, match="sqrt"):
        ddp.autograd.grad((z.sqrt() * 0).sum(), z, create_graph=True)


def test_what_is_refused() -> None:
    x = leaf(1.0)
    with pytest.raises(ddp.errors.ArgumentError, match="is_grads_batched"):
        ddp.autograd.grad(x * 2, x, is_grads_batched=True)
    with pytest.raises(ddp.errors.GraphError, match="allow_unused=True"):
        ddp.autograd.grad(x * 2, (x, leaf(1.0)), create_graph=True)
