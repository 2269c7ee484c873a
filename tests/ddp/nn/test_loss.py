"""Losses beyond their gradients: arguments, modules, dtypes, corners and errors, against PyTorch."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from tests.ddp.cases.table import draw
from tests.ddp.nn.against_torch import agree, agree_as_functions, check_refusals, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")

F: Any = ddp.nn.functional
TF = torch.nn.functional
MSELoss: Any = ddp.nn.MSELoss
L1Loss: Any = ddp.nn.L1Loss
inf = float("inf")


def signs(*shape: int) -> Any:
    return np.where(draw(*shape, seed=5) > 0, 1, -1)


PAIR = draw(4, 3), draw(4, 3, seed=1)
THREE = *PAIR, draw(4, 3, seed=2)
UNIT = draw(4, 3, low=0.1, high=0.9), draw(4, 3, low=0.1, high=0.9, seed=1)
CLASSES = draw(4, 3), np.array([0, 2, 1, 1])


def test_distances() -> None:
    for second in ((4, 3), (1, 3)):
        arrays = draw(4, 3), draw(*second, seed=1)
        for options in ({}, {"p": 1.0, "keepdim": True}, {"p": inf, "eps": 0.1}):
            agree_as_functions("pairwise_distance", *arrays, **options)
        for options in ({}, {"dim": 0, "eps": 3.0}):
            agree_as_functions("cosine_similarity", *arrays, **options)
    agree(ddp.nn.CosineSimilarity(dim=0), torch.nn.CosineSimilarity(dim=0), *PAIR)
    agree(ddp.nn.PairwiseDistance(3.0), torch.nn.PairwiseDistance(3.0), *PAIR)


# Each: a module, which is made of its function's signature; options, each tried with every reduction; inputs.
MODULES: list[tuple[Any, ...]] = [
    ("CrossEntropyLoss", [{"label_smoothing": 0.1, "ignore_index": 1}], CLASSES),
    ("NLLLoss", [{"ignore_index": 0}], CLASSES),
    ("BCELoss", [{}], UNIT),
    ("BCEWithLogitsLoss", [{}], UNIT),
    ("MSELoss", [{}], PAIR),
    ("L1Loss", [{}], PAIR),
    ("SmoothL1Loss", [{"beta": 0.5}], PAIR),
    ("HuberLoss", [{"delta": 0.5}], PAIR),
    ("KLDivLoss", [{"log_target": True}], PAIR),
    ("PoissonNLLLoss", [{}, {"full": True}], (draw(4, 3, low=0.2), draw(4, 3, low=0.0, high=5.0, seed=1))),
    ("PoissonNLLLoss", [{"log_input": False}, {"log_input": False, "full": True, "eps": 0.1}], UNIT),
    ("GaussianNLLLoss", [{}, {"full": True}], (*PAIR, draw(4, 3, low=0.0, seed=2))),
    ("GaussianNLLLoss", [{}, {"eps": 0.7}], (*PAIR, draw(4, low=0.0, seed=2))),
    ("GaussianNLLLoss", [{}, {"full": True}], (*PAIR, draw(4, 1, low=0.0, seed=2))),
    ("CosineEmbeddingLoss", [{}, {"margin": 0.3}], (*PAIR, signs(4))),
    ("HingeEmbeddingLoss", [{}, {"margin": 0.3}], (draw(4, 3), signs(4, 3))),
    ("MarginRankingLoss", [{}, {"margin": 0.3}], (draw(4), draw(4, seed=1), signs(4))),
    ("SoftMarginLoss", [{}], (draw(4, 3) * 30, signs(4, 3))),
    ("TripletMarginLoss", [{}, {"p": 1, "swap": True, "margin": 3.0}], THREE),
    ("TripletMarginWithDistanceLoss", [{}, {"margin": 2.0}, {"swap": True}], THREE),
]


@pytest.mark.parametrize("case", MODULES, ids=lambda case: f"{case[0]}{case[2][-1].shape}")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_modules(case: Any) -> None:
    name, choices, arrays = case
    for options, reduction in product(choices, ({}, {"reduction": "sum"}, {"reduction": "none"})):
        ours, theirs = (getattr(t.nn, name)(**options, **reduction) for t in (ddp, torch))
        assert repr(ours) == repr(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict()) == []
        agree(ours, theirs, *arrays)


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss"])
def test_a_weight_is_a_buffer(name: str) -> None:
    weight = np.array([0.5, 1.0, 2.0])
    ours, theirs = (getattr(t.nn, name)(t.tensor(weight)) for t in (ddp, torch))
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    target = CLASSES[1] if name in ("CrossEntropyLoss", "NLLLoss") else signs(4, 3) > 0
    agree(ours, theirs, UNIT[0], target * 1.0 if target.dtype == bool else target)


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")  # PyTorch's
def test_other_shapes_are_broadcast_with_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match="broadcast"):
        agree_as_functions(name, draw(4, 1), draw(3, seed=1))


@pytest.mark.filterwarnings("ignore:.*size_average and reduce:UserWarning")
def test_the_old_flags_and_the_old_positions() -> None:
    x, t = (ddp.from_numpy(array) for array in PAIR)
    for flags, word in [
        ((True, None), "mean"),
        ((False, None), "sum"),
        ((None, False), "none"),
        ((True, False), "none"),
        ((None, None, "sum"), "sum"),
    ]:
        expected = F.mse_loss(x, t, reduction=word)
        assert F.mse_loss(x, t, *flags).tolist() == expected.tolist()
        assert MSELoss(*flags)(x, t).tolist() == expected.tolist()
    with pytest.warns(UserWarning, match="l1_loss: .* reduction='sum'"):
        F.l1_loss(x, t, size_average=False)
    with pytest.warns(UserWarning, match="^L1Loss: "):
        L1Loss(reduce=False)
    with pytest.raises(TypeError, match="at most 6 positional arguments, got 7"):
        F.mse_loss(x, t, None, None, "sum", None, 1)


class TestCrossEntropy:
    @pytest.mark.parametrize("shape", [(700, 200), (2, 70_000, 2), (1, 3, 500_000)])
    @pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
    def test_many_rows_classes_and_positions(self, shape: Any, options: Any) -> None:
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        values[0] *= 30
        target = np.random.default_rng(1).integers(0, shape[1], (shape[0], *shape[2:]))
        target.reshape(-1)[0] = -100
        # With smoothing PyTorch itself is off by 6e-5 here, from what it computes in float64.
        agree_as_functions("cross_entropy", values, target, rtol=2e-4, atol=1e-6, **options)

    def test_probabilities_of_many_classes(self) -> None:
        rng = np.random.default_rng(0)
        values = rng.standard_normal((3, 70_000))
        wanted = rng.random((3, 70_000))
        wanted /= wanted.sum(1, keepdims=True)
        agree_as_functions("cross_entropy", values.astype("f4"), wanted.astype("f4"), rtol=2e-5, atol=2e-6)

    def test_extreme_logits_and_infinite_losses(self) -> None:
        values = [[0, 40, 0], [100, 0, -100], [1e4, -1e4, 0], [-inf, 0, 1], [-500, -500, -500], [50, 20, 20]]
        arrays = np.array(values, np.float32), np.array([1, 2, 0, 1, 0, 0])
        agree_as_functions("cross_entropy", *arrays, rtol=1e-6, atol=1e-6, reduction="none")
        agree_as_functions("cross_entropy", np.array([[-inf, 0.0], [1.0, 2.0]]), np.array([0, 1]))

    def test_of_nothing_is_nan(self) -> None:
        for name in ("cross_entropy", "nll_loss"):
            agree_as_functions(name, draw(0, 3), np.zeros(0, np.int64))
            agree_as_functions(name, draw(3, 4), np.zeros(3, np.int64), ignore_index=0)
        agree_as_functions("cross_entropy", draw(3, 4), np.zeros(3, np.int64), ignore_index=0, label_smoothing=0.1)
        agree_as_functions("mse_loss", draw(0, 3), draw(0, 3))

    def test_a_write_to_targets_or_weights_does_not_reach_backward(self) -> None:
        x: Any = ddp.from_numpy(draw(4, 3)).requires_grad_()
        weight = ddp.tensor([0.5, 1.0, 2.0], dtype=ddp.float64)
        for name in ("cross_entropy", "nll_loss"):
            gradients = []
            for write in (False, True):
                x.grad = None
                target = ddp.tensor([0, 2, -100, 1])
                used = weight.clone()
                loss = getattr(F, name)(x, target, used)
                if write:
                    target.zero_()
                    used.zero_()
                loss.backward()
                gradients.append(x.grad.tolist())
            assert gradients[0] == gradients[1]


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_corners_of_probabilities(log_target: bool) -> None:
    wanted = np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    pair = [lambda x, t=t: t.nn.functional.kl_div(x, t.tensor(wanted), log_target=log_target) for t in (ddp, torch)]
    agree(*pair, draw(2, 3))
    for target in (np.array([1, 0, 0, 1, 0.5]), np.array([0.0, 1, 0, 1, 1])):
        agree_as_functions("binary_cross_entropy_with_logits", np.array([1e4, -1e4, 1e4, -1e4, 0.0]), target)
    x, t = ddp.tensor([0.0, 1.0, 0.0, 1.0]), ddp.tensor([1, 0, 0, 1])
    assert F.binary_cross_entropy(x, t).item() == 50.0  # logarithms stop at -100


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_refusals_of_classes(name: str) -> None:
    loss = getattr(F, name)
    x = ddp.zeros(2, 3)
    two = ddp.tensor([0, 1])
    check_refusals(
        {
            RangeError: {f"{name}: target 3 is not one of the 3 classes": lambda: loss(x, ddp.tensor([0, 3]))},
            ShapeError: {"weight": lambda: loss(x, two, ddp.ones(2))},
            ArgumentError: {
                f"{name}: .* not 'average'": lambda: loss(x, two, reduction="average"),
                f"{name}: .* not ''": lambda: loss(x, two, reduction=""),
            },
            DtypeError: {"bool": lambda: loss(x, ddp.tensor([True, False]))},
        }
    )


def test_refusals() -> None:
    x = ddp.zeros(2, 3)
    column = ddp.ones(2, 1)
    row = ddp.ones(2)
    huge = ddp.ones(2, 3, 4)
    check_refusals(
        {
            ArgumentError: {
                "label_smoothing": lambda: F.cross_entropy(x, x, label_smoothing=1.5),
                "between 0 and 1": lambda: F.binary_cross_entropy(row * 1.5, row),
                "negative": lambda: F.gaussian_nll_loss(x, x, -0.5),
                "margin is positive": lambda: F.triplet_margin_loss(x, x, x, margin=0),
            },
            ShapeError: {
                r"var \(2, 2\) does not fit": lambda: F.gaussian_nll_loss(x, x, x[:, :2]),
                "size": lambda: F.binary_cross_entropy_with_logits(column, row),
                r"does not .* to \(2, 3\)": lambda: F.binary_cross_entropy_with_logits(x, x, pos_weight=huge),
            },
        }
    )
    agree(lambda x: F.gaussian_nll_loss(x, x, 0.5), lambda x: TF.gaussian_nll_loss(x, x, 0.5), PAIR[0])


LABELS = np.array([[1, 2, 2, 1], [3, 3, 1, 0]])


@pytest.mark.parametrize("targets", [LABELS, np.array([1, 2, 2, 1, 3, 3])], ids=["2-d", "1-d"])
@pytest.mark.parametrize("blank", [0, 4])
@pytest.mark.parametrize("options", [{}, {"zero_infinity": True}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_with_log_probabilities_as_leaves(targets: Any, blank: int, options: Any, reduction: str) -> None:
    scores = np.log(draw(7, 2, 5, low=0.1, high=0.9))
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    layers = (t.nn.CTCLoss(blank, reduction, **options) for t in (ddp, torch))
    agree(*layers, scores, targets, np.array([4, 7]), np.array([4, 2]))  # the first is too short


def test_ctc_modules_and_empty_inputs() -> None:
    assert repr(ddp.nn.CTCLoss()) == repr(torch.nn.CTCLoss())
    scores = np.log(np.full((3, 2, 4), 0.25))
    losses = F.ctc_loss(ddp.tensor(scores), ddp.tensor([[1], [1]]), [0, 3], (0, 1), reduction="none")
    assert_allclose(losses.numpy(), [0, -np.log(6 / 64)])
    halves = F.ctc_loss(ddp.tensor(scores).half(), ddp.tensor([[1], [1]]), [3, 3], (0, 1), reduction="none")
    assert_allclose(halves.numpy(), -np.log([1 / 64, 6 / 64]), rtol=1e-3)


def test_ctc_refusals() -> None:
    x = ddp.zeros(5, 2, 4)
    y = ddp.ones(2, 3, dtype=ddp.int64)
    check_refusals(
        {
            ShapeError: {
                r"expected \(T, N, C\), and int64 \(N, L\)": lambda: F.ctc_loss(x[0, 0], y, [5, 5], [3, 3]),
                "int64": lambda: F.ctc_loss(x, y.float(), [5, 5], [3, 3]),
                r"targets \(3,\) for 2 inputs .* \[3, 3\] labels": lambda: F.ctc_loss(x, y[0], [5, 5], [3, 3]),
                r"input_lengths \[5, 6\]: expected 2 lengths of 0 to 5": lambda: F.ctc_loss(x, y, [5, 6], [3, 3]),
                r"target_lengths \[3\]: expected 2": lambda: F.ctc_loss(x, y, [5, 5], [3]),
            },
            RangeError: {
                "target 4 is not one of the 4 labels": lambda: F.ctc_loss(x, y + 3, [5, 5], [3, 3]),
                "blank 4": lambda: F.ctc_loss(x, y, [5, 5], [3, 3], blank=4),
            },
            ArgumentError: {"reduction": lambda: F.ctc_loss(x, y, [5, 5], [3, 3], reduction="all")},
        }
    )
