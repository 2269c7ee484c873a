"""Losses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draw, function

REDUCTIONS = ("mean", "sum", "none")


def of_classes() -> Iterator[Case]:
    for name in ("cross_entropy", "nll_loss"):
        for reduction in REDUCTIONS:
            loss = function(name, reduction=reduction)
            yield Case(name, reduction, loss, (draw(4, 3), np.array([0, 2, 2, 1])))
            yield Case(name, f"{reduction} 2-d", loss, (draw(2, 3, 2, 1), np.array([[[0], [2]]] * 2)))
            yield Case(name, f"{reduction} one", loss, (draw(3), np.array(2)))
            yield Case(name, f"{reduction} ignoring", loss, (draw(4, 3), np.array([0, -100, 2, 1])))
            inside = function(name, reduction=reduction, ignore_index=2)
            yield Case(name, f"{reduction} ignoring a class", inside, (draw(2, 3, 2), np.array([[0, 2], [1, 1]])))

            def weighted(t: Any, x: Any, y: Any, name: str = name, reduction: str = reduction, **options: Any) -> Any:
                weight = t.tensor([0.5, 1.5, 2.0], dtype=x.dtype)
                return getattr(t.nn.functional, name)(x, y, weight, reduction=reduction, **options)

            yield Case(name, f"{reduction} weighted", weighted, (draw(2, 3, 2), np.array([[0, -100], [1, 2]])))
            if name == "cross_entropy":
                for inputs in (
                    (draw(4, 3), np.array([0, -100, 2, 1])),
                    (draw(2, 3, 2), np.array([[0, -100], [1, 2]])),
                    (draw(3), np.array(1)),
                ):
                    smooth = function(name, reduction=reduction, label_smoothing=0.3)
                    yield Case(name, f"{reduction} smooth {inputs[0].ndim}", smooth, inputs)
                    both = lambda t, x, y, f=weighted: f(t, x, y, label_smoothing=0.2)  # noqa: E731  # one line a case
                    yield Case(name, f"{reduction} smooth and weighted {inputs[0].ndim}", both, inputs)
        yield Case(name, "empty", function(name, reduction="sum"), (draw(0, 3), np.zeros(0, np.int64)))
    yield Case(
        "cross_entropy",
        "large",
        lambda t, x, y: t.nn.functional.cross_entropy(x * 400, y),
        (draw(4, 3), np.array([0, 2, 2, 1])),
    )


def of_probabilities() -> Iterator[Case]:
    def soft(t: Any, x: Any, y: Any, weighted: bool = False, **options: Any) -> Any:
        weight = t.tensor([0.5, 1.5, 2.0], dtype=x.dtype) if weighted else None
        return t.nn.functional.cross_entropy(x, t.softmax(y, -1), weight, **options)

    for reduction in REDUCTIONS:
        for weighted in (False, True):
            for smoothing in (0.0, 0.3):
                options = {"reduction": reduction, "weighted": weighted, "label_smoothing": smoothing}
                run = lambda t, x, y, options=options: soft(t, x, y, **options)  # noqa: E731  # one line a case
                for shape in ((4, 3), (2, 3, 2), (3,)):
                    label = f"{reduction} {weighted} {smoothing} {shape}"
                    yield Case("soft_cross_entropy", label, run, (draw(*shape), draw(*shape, seed=1)))
    yield Case("soft_cross_entropy", "empty", lambda t, x, y: soft(t, x, y, reduction="sum"), (draw(0, 3), draw(0, 3)))


def unit(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return draw(*shape, low=0.05, high=0.95, seed=seed)


PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("mse_loss", {}),
    ("l1_loss", {}),
    ("smooth_l1_loss", {}),
    ("smooth_l1_loss", {"beta": 0.3}),
    ("huber_loss", {}),
    ("huber_loss", {"delta": 0.3}),
    ("binary_cross_entropy", {}),
    ("binary_cross_entropy_with_logits", {}),
    ("kl_div", {"log_target": False}),
    ("kl_div", {"log_target": True}),
]


def of_pairs() -> Iterator[Case]:
    for name, options in PAIRS:
        first = unit if name == "binary_cross_entropy" else draw
        second = draw if name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") else unit
        # PyTorch warns of what its "mean" is in kl_div.
        for reduction in ("batchmean", "sum", "none") if name == "kl_div" else REDUCTIONS:
            run = function(name, reduction=reduction, **options)
            yield Case(name, f"{reduction} {options}", run, (first(3, 4), second(3, 4, seed=1)))
            yield Case(name, f"{reduction} {options} 0-d", run, (first(), second(seed=1)))
        run = function(name, reduction="sum", **options)
        yield Case(name, f"empty {options}", run, (first(0, 3), second(0, 3)))


def with_weights() -> Iterator[Case]:
    for reduction in REDUCTIONS:
        for name in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy"):

            def run(t: Any, x: Any, y: Any, name: str = name, reduction: str = reduction) -> Any:
                weight = t.tensor([[0.5, 1.5, 2.0]] * 2, dtype=x.dtype)
                return getattr(t.nn.functional, name)(x, y, weight=weight, reduction=reduction)

            yield Case(name, f"{reduction} weighted", run, (unit(2, 3), unit(2, 3, seed=1)))

        def logits(t: Any, x: Any, y: Any, reduction: str = reduction, weigh: bool = False) -> Any:
            weight = t.tensor([[0.5, 1.5, 2.0]] * 2, dtype=x.dtype) if weigh else None
            positive = t.tensor([0.7, 1.2, 3.0], dtype=x.dtype)
            return t.nn.functional.binary_cross_entropy_with_logits(
                x, y, weight=weight, pos_weight=positive, reduction=reduction
            )

        op = "binary_cross_entropy_with_logits"
        yield Case(op, f"{reduction} positive", logits, (draw(2, 3), unit(2, 3)))
        yield Case(op, f"{reduction} both", lambda t, x, y, f=logits: f(t, x, y, weigh=True), (draw(2, 3), unit(2, 3)))


def far_logits() -> Iterator[Case]:
    run = lambda t, x, y: t.nn.functional.binary_cross_entropy_with_logits(x * 300, y)  # noqa: E731
    yield Case("binary_cross_entropy_with_logits", "far", run, (draw(3, 4), unit(3, 4)))


def temporal() -> Iterator[Case]:
    times, sizes = np.array([6, 4]), np.array([3, 2])

    def loss(t: Any, x: Any, target: Any, times: Any, sizes: Any, **options: Any) -> Any:
        return t.nn.functional.ctc_loss(x.log_softmax(-1).to(x.dtype), target, times, sizes, **options)

    for reduction in REDUCTIONS:
        for zero_infinity in (False, True):
            label = f"{reduction} zero_infinity={zero_infinity}"
            run = functools.partial(loss, reduction=reduction, zero_infinity=zero_infinity)
            yield Case("ctc_loss", label, run, (draw(6, 2, 4), np.array([[1, 1, 2], [3, 2, -1]]), times, sizes))
    yield Case("ctc_loss", "targets in one", loss, (draw(6, 2, 4), np.array([1, 2, 1, 3, 3]), times, sizes))
    last = functools.partial(loss, blank=3)
    yield Case("ctc_loss", "blank is the last", last, (draw(6, 2, 4), np.array([[0, 1, 2], [2, 2, 0]]), times, sizes))
    nothing = np.zeros((2, 0), np.int64), times, np.array([0, 0])
    yield Case("ctc_loss", "empty", loss, (draw(6, 2, 4), *nothing))
    one = draw(5, 4), np.array([1, 2]), np.array(5), np.array(2)
    yield Case("ctc_loss", "one", functools.partial(loss, reduction="none"), one)


CASES = [*of_classes(), *of_probabilities(), *of_pairs(), *with_weights(), *far_logits(), *temporal()]
