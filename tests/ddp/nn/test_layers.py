"""Layers against PyTorch: the same weights give the same values and gradients; and how wrong use is answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from tests.ddp.nn.against_torch import compare


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


LAYERS = [
    ("Linear", (4, 3), {}, (5, 4)),
    ("Linear", (4, 3), {"bias": False}, (2, 5, 4)),
    ("Conv2d", (3, 4, 3), {"padding": 1}, (2, 3, 6, 5)),
    ("Conv2d", (4, 6, (2, 3)), {"stride": (2, 1), "dilation": (1, 2), "groups": 2, "bias": False}, (2, 4, 6, 7)),
    ("MaxPool2d", (2,), {}, (2, 3, 6, 5)),
    ("MaxPool2d", (3,), {"stride": 2, "padding": 1}, (2, 3, 6, 5)),
    ("ReLU", (), {}, (3, 4)),
    ("Tanh", (), {}, (3, 4)),
    ("Sigmoid", (), {}, (3, 4)),
    ("Flatten", (), {}, (2, 3, 4)),
    ("Flatten", (0, 1), {}, (2, 3, 4)),
    ("Dropout", (0.0,), {}, (2, 3)),
]


@pytest.mark.parametrize(("name", "args", "options", "shape"), LAYERS)
def test_agrees_with_pytorch(name: str, args: Any, options: Any, shape: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    ours, theirs = getattr(nn, name)(*args, **options).double(), getattr(torch.nn, name)(*args, **options).double()
    ours.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    compare(ours, theirs, numbers(*shape))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_agrees_with_pytorch(reduction: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    x, target = numbers(5, 4), np.array([3, 0, 1, 1, 2])
    ours = nn.CrossEntropyLoss(reduction=reduction)(ddp.tensor(x), ddp.tensor(target))
    theirs = torch.nn.CrossEntropyLoss(reduction=reduction)(torch.tensor(x), torch.tensor(target))
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12)


@pytest.mark.parametrize(("make", "fan_in"), [(lambda: nn.Linear(64, 500), 64), (lambda: nn.Conv2d(16, 300, 3), 144)])
def test_default_initialisation(make: Any, fan_in: int) -> None:
    ddp.manual_seed(0)
    layer = make()
    bound = 1 / np.sqrt(fan_in)
    for p in layer.parameters():
        assert -bound <= p.amin().item() < -0.9 * bound
        assert 0.9 * bound < p.amax().item() <= bound
    # A uniform distribution has the deviation bound / sqrt(3).
    assert layer.weight.array.std() == pytest.approx(bound / np.sqrt(3), rel=0.02)


def test_one_seed_gives_one_model_in_every_dtype() -> None:
    models = []
    for dtype in (ddp.float32, ddp.float64):
        ddp.manual_seed(7)
        models.append(nn.Linear(3, 2, dtype=dtype))
    np.testing.assert_allclose(models[0].weight.array, models[1].weight.array, rtol=1e-6)


def test_dropout_layer() -> None:
    layer = nn.Dropout(0.5)
    x = ddp.ones(100)
    assert layer(x).amax().item() == 2.0
    assert layer.eval()(x) is x


def test_sequential() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Tanh()).append(nn.Sigmoid())
    assert len(net) == 3
    assert isinstance(net[-1], nn.Sigmoid)
    assert [type(m).__name__ for m in net[1:]] == ["Tanh", "Sigmoid"]
    assert list(nn.Sequential({"a": nn.ReLU()})._modules) == ["a"]
    x = ddp.tensor([-1.0, 2.0])
    assert nn.Sequential()(x) is x
    np.testing.assert_array_equal(net(x).array, x.relu().tanh().sigmoid().array)
    with pytest.raises(RangeError, match="no module 3"):
        net[3]


class TestInit:
    @pytest.mark.parametrize(
        ("fill", "std"),
        [
            (lambda t: nn.init.kaiming_uniform_(t, nonlinearity="relu"), np.sqrt(2 / 100)),
            (lambda t: nn.init.kaiming_normal_(t, mode="fan_out", nonlinearity="linear"), np.sqrt(1 / 400)),
            (lambda t: nn.init.xavier_uniform_(t, gain=2.0), 2 * np.sqrt(2 / 500)),
            (lambda t: nn.init.xavier_normal_(t), np.sqrt(2 / 500)),
            (lambda t: nn.init.normal_(t, std=0.3), 0.3),
            (lambda t: nn.init.uniform_(t, -1, 1), 1 / np.sqrt(3)),
        ],
    )
    def test_deviation(self, fill: Any, std: float) -> None:
        ddp.manual_seed(0)
        weight = nn.Parameter(ddp.empty(400, 100))
        assert fill(weight) is weight
        assert weight.requires_grad
        assert weight.array.std() == pytest.approx(std, rel=0.02)
        assert weight.array.mean() == pytest.approx(0.0, abs=0.02 * std)

    def test_constants(self) -> None:
        assert nn.init.constant_(ddp.empty(2), 3).tolist() == [3.0, 3.0]
        assert nn.init.ones_(ddp.empty(1)).item() == 1.0
        assert nn.init.zeros_(ddp.empty(1)).item() == 0.0

    def test_refusals(self) -> None:
        with pytest.raises(ShapeError, match=r"\(3,\)"):
            nn.init.kaiming_uniform_(ddp.empty(3))
        with pytest.raises(ArgumentError, match="'fan_in' or 'fan_out'"):
            nn.init.kaiming_uniform_(ddp.empty(3, 3), mode="fan")
        with pytest.raises(ArgumentError, match="'mish'"):
            nn.init.kaiming_uniform_(ddp.empty(3, 3), nonlinearity="mish")


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda: nn.Linear(3, 2)(ddp.ones(4, 5)), ShapeError, r"linear: input \(4, 5\) and weight \(2, 3\)"),
        (lambda: nn.Linear(3, 2)(ddp.ones(3, dtype=ddp.float64)), DtypeError, "float64, float32, float32"),
        (lambda: nn.functional.linear(ddp.ones(3), ddp.ones(2, 3), ddp.ones(3)), ShapeError, r"expected \(2,\)"),
        (lambda: nn.Conv2d(3, 2, 3)(ddp.ones(1, 4, 5, 5)), ShapeError, "input has 4 channels, weight takes 3"),
        (lambda: nn.Conv2d(3, 2, 3)(ddp.ones(5, 5)), ShapeError, r"expected \(N, C, H, W\)"),
        (lambda: nn.Conv2d(3, 2, 7)(ddp.ones(1, 3, 5, 5)), ShapeError, "does not fit"),
        (lambda: nn.Conv2d(3, 2, 3, stride=0)(ddp.ones(1, 3, 5, 5)), ArgumentError, r"stride=\(0, 0\)"),
        (lambda: nn.Conv2d(3, 2, 3, groups=2), ArgumentError, "groups 2 does not divide 3 and 2"),
        (lambda: nn.Conv2d(3, 2, (1, 2, 3)), ArgumentError, "kernel_size: expected one number or 2"),
        (lambda: nn.functional.conv2d(ddp.ones(1, 1, 3, 3), ddp.ones(2, 1, 3, 3), ddp.ones(3)), ShapeError, "bias"),
        (lambda: nn.MaxPool2d(2, padding=2)(ddp.ones(1, 1, 4, 4)), ArgumentError, "half of kernel"),
        (lambda: nn.MaxPool2d(2)(ddp.ones(4, 4)), ShapeError, "max_pool2d"),
        (lambda: nn.Dropout(1.5), ArgumentError, "1.5"),
        (lambda: nn.functional.dropout(ddp.ones(1), -1), ArgumentError, "-1"),
        (
            lambda: nn.CrossEntropyLoss()(ddp.ones(2, 3), ddp.tensor([1, 3])),
            RangeError,
            "^cross_entropy: target 3 is not one of the 3 classes 0 to 2$",
        ),
        (lambda: nn.CrossEntropyLoss()(ddp.ones(2, 3), ddp.tensor([-1, 1])), RangeError, "target -1"),
        (
            lambda: nn.CrossEntropyLoss()(ddp.ones(2, 3), ddp.tensor([1, 1, 1])),
            ShapeError,
            r"input \(2, 3\), target \(3,\)",
        ),
        (lambda: nn.CrossEntropyLoss()(ddp.ones(2, 3), ddp.ones(2)), ShapeError, r"target \(2,\): probabilities"),
        (lambda: nn.CrossEntropyLoss(reduction="max")(ddp.ones(2, 3), ddp.tensor([1, 1])), ArgumentError, "'max'"),
        (lambda: nn.functional.pad(ddp.ones(2), (1, 1, 1)), ArgumentError, "expected pairs"),
        (lambda: nn.functional.pad(ddp.ones(2), (1, 1), mode="reflect"), ArgumentError, "'reflect'"),
    ],
)
def test_wrong_use(wrong: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        wrong()
