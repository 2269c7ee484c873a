"""Losses beyond their gradients: arguments, modules, dtypes, corners and errors, against PyTorch."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import errors
from tests.ddp.cases.table import draw

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
F, TF = ddp.nn.functional, torch.nn.functional

REDUCTIONS = ("mean", "sum", "none")
inf, nan = float("inf"), float("nan")


def pair(array: Any, grad: bool = True) -> tuple[Any, Any]:
    grad = grad and array.dtype.kind == "f"
    return ddp.from_numpy(array.copy()).requires_grad_(grad), torch.from_numpy(array.copy()).requires_grad_(grad)


def agree(ours: Any, theirs: Any, inputs: Any = (), rtol: float = 1e-10, atol: float = 1e-12) -> None:
    assert tuple(ours.shape) == tuple(theirs.shape)
    assert ours.dtype.name == str(theirs.dtype).removeprefix("torch.")
    np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol, atol)
    if inputs:
        ours.sum().backward()
        theirs.sum().backward()
    for a, b in inputs:
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol, atol)


def signs(*shape: int) -> Any:
    return np.where(draw(*shape, seed=5) > 0, 1, -1)


# Each: a function's name, its inputs, options of which each is tried with every reduction.
COMPOSED: list[tuple[str, tuple[Any, ...], list[dict[str, Any]]]] = [
    ("cosine_embedding_loss", (draw(4, 3), draw(4, 3, seed=1), signs(4)), [{}, {"margin": 0.3}]),
    ("cosine_embedding_loss", (draw(3), draw(3, seed=1), np.array(-1)), [{}]),
    ("hinge_embedding_loss", (draw(4, 3), signs(4, 3)), [{}, {"margin": 0.3}]),
    ("margin_ranking_loss", (draw(4), draw(4, seed=1), signs(4)), [{}, {"margin": 0.3}]),
    ("soft_margin_loss", (draw(4, 3) * 30, signs(4, 3)), [{}]),
    ("triplet_margin_loss", tuple(draw(4, 3, seed=i) for i in range(3)), [{}, {"p": 1, "swap": True, "margin": 3.0}]),
    ("triplet_margin_loss", tuple(draw(3, seed=i) for i in range(3)), [{}]),
    ("triplet_margin_with_distance_loss", tuple(draw(4, 3, seed=i) for i in range(3)), [{}, {"swap": True}]),
    (
        "poisson_nll_loss",
        (draw(4, 3, low=0.2), draw(4, 3, low=0.0, high=5.0, seed=1)),
        [{}, {"full": True}, {"log_input": False}, {"log_input": False, "full": True, "eps": 0.1}],
    ),
    ("gaussian_nll_loss", (draw(4, 3), draw(4, 3, seed=1), draw(4, 3, low=0.0, seed=2)), [{}, {"full": True}]),
    ("gaussian_nll_loss", (draw(4, 3), draw(4, 3, seed=1), draw(4, low=0.0, seed=2)), [{}, {"eps": 0.7}]),
    ("gaussian_nll_loss", (draw(4, 3), draw(4, 3, seed=1), draw(4, 1, low=0.0, seed=2)), [{}]),
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", COMPOSED, ids=lambda case: f"{case[0]}{case[1][0].shape}")
def test_composed(case: Any, reduction: str) -> None:
    name, arrays, choices = case
    for options in choices:
        inputs = [pair(array) for array in arrays]
        ours = getattr(F, name)(*(a for a, _ in inputs), **options, reduction=reduction)
        theirs = getattr(TF, name)(*(b for _, b in inputs), **options, reduction=reduction)
        agree(ours, theirs, inputs)


def test_a_variance_of_one_number() -> None:
    inputs = [pair(draw(4, 3)), pair(draw(4, 3, seed=1))]
    (x, y), (t, u) = inputs
    agree(F.gaussian_nll_loss(x, t, 0.5), TF.gaussian_nll_loss(y, u, 0.5), inputs)
    with pytest.raises(errors.ArgumentError, match="negative"):
        F.gaussian_nll_loss(x, t, -0.5)
    with pytest.raises(errors.ShapeError, match="var"):
        F.gaussian_nll_loss(x, t, ddp.ones(5))


def test_distances() -> None:
    for name, options in [
        ("pairwise_distance", {}),
        ("pairwise_distance", {"p": 1.0, "keepdim": True}),
        ("pairwise_distance", {"p": inf, "eps": 0.1}),
        ("cosine_similarity", {}),
        ("cosine_similarity", {"dim": 0, "eps": 3.0}),
    ]:
        for second in ((4, 3), (1, 3)):
            inputs = [pair(draw(4, 3)), pair(draw(*second, seed=1))]
            (x, y), (t, u) = inputs
            agree(getattr(F, name)(x, t, **options), getattr(TF, name)(y, u, **options), inputs)


MODULES: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("CrossEntropyLoss", {"label_smoothing": 0.1, "ignore_index": 1}, (draw(4, 3), np.array([0, 2, 1, 1]))),
    ("NLLLoss", {"ignore_index": 0}, (draw(4, 3), np.array([0, 2, 1, 1]))),
    ("BCELoss", {}, (draw(4, 3, low=0.1, high=0.9), draw(4, 3, low=0.1, high=0.9, seed=1))),
    ("BCEWithLogitsLoss", {}, (draw(4, 3), draw(4, 3, low=0.1, high=0.9, seed=1))),
    ("MSELoss", {}, (draw(4, 3), draw(4, 3, seed=1))),
    ("L1Loss", {}, (draw(4, 3), draw(4, 3, seed=1))),
    ("SmoothL1Loss", {"beta": 0.5}, (draw(4, 3), draw(4, 3, seed=1))),
    ("HuberLoss", {"delta": 0.5}, (draw(4, 3), draw(4, 3, seed=1))),
    ("KLDivLoss", {"log_target": True}, (draw(4, 3), draw(4, 3, seed=1))),
    ("PoissonNLLLoss", {"full": True}, (draw(4, 3), draw(4, 3, low=0.0, seed=1))),
    ("GaussianNLLLoss", {"full": True}, (draw(4, 3), draw(4, 3, seed=1), draw(4, 3, low=0.1, seed=2))),
    ("CosineEmbeddingLoss", {"margin": 0.2}, (draw(4, 3), draw(4, 3, seed=1), signs(4))),
    ("HingeEmbeddingLoss", {"margin": 0.2}, (draw(4, 3), signs(4, 3))),
    ("MarginRankingLoss", {"margin": 0.2}, (draw(4), draw(4, seed=1), signs(4))),
    ("SoftMarginLoss", {}, (draw(4, 3), signs(4, 3))),
    ("TripletMarginLoss", {"margin": 2.0, "p": 1.0}, tuple(draw(4, 3, seed=i) for i in range(3))),
    ("TripletMarginWithDistanceLoss", {"margin": 2.0}, tuple(draw(4, 3, seed=i) for i in range(3))),
]


@pytest.mark.parametrize("reduction", [None, "sum", "none"])
@pytest.mark.parametrize("case", MODULES, ids=lambda case: case[0])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_modules(case: Any, reduction: str | None) -> None:
    name, options, arrays = case
    options = options if reduction is None else {**options, "reduction": reduction}
    ours, theirs = getattr(ddp.nn, name)(**options), getattr(torch.nn, name)(**options)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == []
    inputs = [pair(array) for array in arrays]
    agree(ours(*(a for a, _ in inputs)), theirs(*(b for _, b in inputs)), inputs)


def test_modules_of_distances() -> None:
    inputs = [pair(draw(4, 3)), pair(draw(4, 3, seed=1))]
    (x, y), (t, u) = inputs
    agree(ddp.nn.CosineSimilarity(dim=0)(x, t), torch.nn.CosineSimilarity(dim=0)(y, u), inputs)
    agree(ddp.nn.PairwiseDistance(3.0)(x, t), torch.nn.PairwiseDistance(3.0)(y, u))


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss"])
def test_a_weight_is_a_buffer(name: str) -> None:
    weight = np.array([0.5, 1.0, 2.0])
    ours, theirs = getattr(ddp.nn, name)(ddp.tensor(weight)), getattr(torch.nn, name)(torch.tensor(weight))
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    x = draw(4, 3, low=0.1, high=0.9)
    target = np.array([0, 2, 1, 1]) if name in ("CrossEntropyLoss", "NLLLoss") else draw(4, 3, low=0.1, high=0.9)
    inputs = [pair(x), pair(target, grad=False)]
    agree(ours(inputs[0][0], inputs[1][0]), theirs(inputs[0][1], inputs[1][1]), inputs)


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_other_shapes_are_broadcast_with_a_warning(name: str) -> None:
    inputs = [pair(draw(4, 1)), pair(draw(3, seed=1))]
    (x, y), (t, u) = inputs
    with pytest.warns(UserWarning, match="broadcast"):
        ours = getattr(F, name)(x, t)
    with pytest.warns(UserWarning, match="different to the input size"):
        theirs = getattr(TF, name)(y, u)
    agree(ours, theirs, inputs)


@pytest.mark.filterwarnings("ignore:.*size_average and reduce:UserWarning")
def test_the_old_flags() -> None:
    x, t = ddp.from_numpy(draw(4, 3)), ddp.from_numpy(draw(4, 3, seed=1))
    for flags, word in [
        ((True, None), "mean"),
        ((None, True), "mean"),
        ((False, None), "sum"),
        ((None, False), "none"),
        ((True, False), "none"),
    ]:
        expected = F.mse_loss(x, t, reduction=word)
        assert F.mse_loss(x, t, *flags).tolist() == expected.tolist()
        assert ddp.nn.MSELoss(*flags)(x, t).tolist() == expected.tolist()
    with pytest.warns(UserWarning, match="reduction='sum'"):
        F.l1_loss(x, t, size_average=False)


class TestCrossEntropy:
    @pytest.mark.parametrize("shape", [(700, 200), (3, 70_000), (2, 300, 300), (2, 70_000, 2), (1, 3, 500_000)])
    @pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
    def test_blocks_cover_everything(self, shape: tuple[int, ...], options: Any) -> None:
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        values[0] *= 30
        target = np.random.default_rng(1).integers(0, shape[1], (shape[0], *shape[2:]))
        target.reshape(-1)[0] = -100
        inputs = [pair(values), pair(target)]
        (x, y), (t, u) = inputs
        # With smoothing PyTorch itself is off by 6e-5 here, from what it computes in float64.
        agree(F.cross_entropy(x, t, **options), TF.cross_entropy(y, u, **options), inputs, 2e-4, 2e-7)

    @pytest.mark.parametrize("shape", [(3, 70_000), (2, 70_000, 2)])
    def test_blocks_of_probabilities(self, shape: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        values = rng.standard_normal(shape).astype(np.float32)
        wanted = rng.random(shape).astype(np.float32)
        wanted /= wanted.sum(1, keepdims=True)
        inputs = [pair(values), pair(wanted)]
        (x, y), (t, u) = inputs
        agree(F.cross_entropy(x, t), TF.cross_entropy(y, u), inputs, 2e-5, 2e-6)

    def test_confident_and_extreme_logits(self) -> None:
        values = np.array(
            [[0, 40, 0], [100, 0, -100], [1e4, -1e4, 0], [-inf, 0, 1], [-500, -500, -500], [50, 20, 20]], np.float32
        )
        inputs = [pair(values), pair(np.array([1, 2, 0, 1, 0, 0]))]
        (x, y), (t, u) = inputs
        ours, theirs = F.cross_entropy(x, t, reduction="none"), TF.cross_entropy(y, u, reduction="none")
        agree(ours, theirs, inputs, 1e-6, 1e-6)
        assert (ours.detach().numpy() >= 0).all()

    def test_an_infinite_loss(self) -> None:
        inputs = [pair(np.array([[-inf, 0.0], [1.0, 2.0]])), pair(np.array([0, 1]))]
        (x, y), (t, u) = inputs
        agree(F.cross_entropy(x, t), TF.cross_entropy(y, u), inputs)

    def test_of_nothing_is_nan(self) -> None:
        x, y = pair(draw(2, 3))
        t, u = pair(np.array([-100, -100]))
        agree(F.cross_entropy(x, t), TF.cross_entropy(y, u))
        agree(F.nll_loss(x, t), TF.nll_loss(y, u))
        agree(F.cross_entropy(x[:0], t[:0]), TF.cross_entropy(y[:0], u[:0]))
        agree(F.mse_loss(x[:0], x[:0]), TF.mse_loss(y[:0], y[:0]))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_halves_lose_only_their_own_digits(self, dtype: str) -> None:
        values, target = draw(64, 500) * 4, np.arange(64)
        kind = getattr(ddp, dtype)
        x = ddp.tensor(values, dtype=kind, requires_grad=True)
        exact = torch.from_numpy(x.detach().to(dtype=ddp.float64).numpy().copy()).requires_grad_()
        for options in ({}, {"label_smoothing": 0.2}):
            x.grad = exact.grad = None
            ours = F.cross_entropy(x, ddp.tensor(target), **options)
            theirs = TF.cross_entropy(exact, torch.tensor(target), **options)
            ours.backward()
            theirs.backward()
            assert ours.dtype == x.grad.dtype == kind
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-2)
            grad = x.grad.to(dtype=ddp.float64).numpy()
            np.testing.assert_allclose(grad, exact.grad.numpy(), 1e-2, 1e-4)

    def test_a_write_to_targets_or_weights_does_not_reach_backward(self) -> None:
        x, weight = ddp.from_numpy(draw(4, 3)).requires_grad_(), ddp.tensor([0.5, 1.0, 2.0], dtype=ddp.float64)
        for name in ("cross_entropy", "nll_loss"):
            gradients = []
            for write in (False, True):
                target = ddp.tensor([0, 2, -100, 1])
                used = weight.clone()
                x.grad = None
                loss = getattr(F, name)(x, target, used)
                if write:
                    target.zero_()
                    used.zero_()
                loss.backward()
                gradients.append(x.grad.tolist())
            assert gradients[0] == gradients[1]

    def test_a_write_to_logits_is_noticed(self) -> None:
        x = ddp.from_numpy(draw(4, 3)).requires_grad_() * 1
        loss = F.cross_entropy(x, ddp.tensor([0, 1, 2, 0]))
        x.detach().zero_()
        with pytest.raises(errors.VersionError, match="cross_entropy"):
            loss.backward()

    def test_the_graph_may_run_twice(self) -> None:
        x = ddp.from_numpy(draw(4, 3)).requires_grad_()
        loss = F.cross_entropy(x, ddp.tensor([0, 1, 2, 0]))
        loss.backward(retain_graph=True)
        first = x.grad.tolist()
        x.grad = None
        loss.backward()
        assert x.grad.tolist() == first

    @pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
    def test_errors(self, name: str) -> None:
        loss, x = getattr(F, name), ddp.zeros(2, 3)
        with pytest.raises(errors.RangeError, match=f"{name}: target 3 is not one of the 3 classes"):
            loss(x, ddp.tensor([0, 3]))
        with pytest.raises(errors.RangeError, match="target -1"):
            loss(x, ddp.tensor([-100, -1]))
        with pytest.raises(errors.ShapeError, match=r"target \(3,\)"):
            loss(x, ddp.tensor([0, 1, 2]))
        with pytest.raises(errors.ShapeError, match="weight"):
            loss(x, ddp.tensor([0, 1]), ddp.ones(2))
        with pytest.raises(errors.ArgumentError, match="'average'"):
            loss(x, ddp.tensor([0, 1]), reduction="average")
        with pytest.raises(errors.DtypeError, match="bool"):
            loss(x, ddp.tensor([True, False]))

    def test_errors_of_probabilities(self) -> None:
        with pytest.raises(errors.ShapeError, match="probabilities"):
            F.cross_entropy(ddp.zeros(2, 3), ddp.zeros(2, 4))
        with pytest.raises(errors.ArgumentError, match="label_smoothing"):
            F.cross_entropy(ddp.zeros(2, 3), ddp.zeros(2, 3), label_smoothing=1.5)


class TestBinary:
    def test_the_logarithm_stops_at_minus_100(self) -> None:
        inputs = [pair(np.array([0.0, 1.0, 0.0, 1.0])), pair(np.array([1.0, 0.0, 0.0, 1.0]), grad=False)]
        (x, y), (t, u) = inputs
        agree(F.binary_cross_entropy(x, t), TF.binary_cross_entropy(y, u), inputs, 1e-8)

    def test_extreme_logits(self) -> None:
        inputs = [pair(np.array([1e4, -1e4, 1e4, -1e4, 0.0])), pair(np.array([1.0, 0.0, 0.0, 1.0, 0.5]))]
        (x, y), (t, u) = inputs
        agree(F.binary_cross_entropy_with_logits(x, t), TF.binary_cross_entropy_with_logits(y, u), inputs)

    def test_errors(self) -> None:
        with pytest.raises(errors.ArgumentError, match="between 0 and 1"):
            F.binary_cross_entropy(ddp.tensor([0.5, 1.5]), ddp.tensor([0.0, 1.0]))
        for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
            with pytest.raises(errors.ShapeError, match="size"):
                getattr(F, name)(ddp.tensor([[0.5], [0.5]]), ddp.tensor([0.0, 1.0]))

    def test_integers_as_targets(self) -> None:
        x, y = pair(np.array([0.3, -0.2]))
        ours = F.binary_cross_entropy_with_logits(x, ddp.tensor([1, 0]))
        assert ours.item() == pytest.approx(
            TF.binary_cross_entropy_with_logits(y, torch.tensor([1.0, 0.0], dtype=torch.float64)).item()
        )


@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_of_zeros_and_its_mean(log_target: bool) -> None:
    target = np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    x, y = pair(draw(2, 3))
    t, u = pair(target, grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(F.kl_div(x, t, log_target=log_target), TF.kl_div(y, u, log_target=log_target), [(x, y)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"],
)
def test_halves(name: str, dtype: str) -> None:
    a, b = draw(40, 50, low=0.1, high=0.9), draw(40, 50, low=0.1, high=0.9, seed=1)
    x = ddp.tensor(a, dtype=getattr(ddp, dtype), requires_grad=True)
    t = ddp.tensor(b, dtype=getattr(ddp, dtype))
    y = torch.tensor(a, dtype=getattr(torch, dtype)).double().requires_grad_()
    u = torch.tensor(b, dtype=getattr(torch, dtype)).double()
    ours, theirs = getattr(F, name)(x, t), getattr(TF, name)(y, u)
    assert ours.dtype == getattr(ddp, dtype)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-2)
    ours.backward()
    theirs.backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.to(dtype=ddp.float64).numpy(), y.grad.numpy(), 2e-2, 2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_where_every_target_is_ignored_the_loss_is_nan_and_the_gradient_zero(name: str, smoothing: float) -> None:
    x, y = pair(draw(3, 4))
    t, u = pair(np.zeros(3, "int64"))
    options: dict[str, Any] = {"label_smoothing": smoothing} if name == "cross_entropy" else {}
    agree(getattr(F, name)(x, t, ignore_index=0, **options), getattr(TF, name)(y, u, ignore_index=0, **options))
    getattr(F, name)(x, t, ignore_index=0, **options).backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_a_pos_weight_that_does_not_broadcast() -> None:
    x, t = ddp.zeros(3, 4), ddp.zeros(3, 4)
    for shape in [(3,), (2, 3, 4)]:
        with pytest.raises(errors.ShapeError, match=r"pos_weight \(.*\) does not broadcast to \(3, 4\)"):
            F.binary_cross_entropy_with_logits(x, t, pos_weight=ddp.ones(*shape))
