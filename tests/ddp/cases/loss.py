"""Losses."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draw, draws, function

REDUCTIONS = ("mean", "sum", "none")


def weights(t: Any, x: Any) -> Any:
    """Of three classes."""
    return t.tensor([0.5, 1.5, 2.0], dtype=x.dtype)


# Where the classes are.
ROWS = draw(4, 3), np.array([0, 2, 2, 1])
IGNORING = draw(4, 3), np.array([0, -100, 2, 1])
ONE = draw(3), np.array(2)
SERIES = draw(2, 3, 2), np.array([[0, -100], [1, 2]])


def of_classes() -> Iterator[Case]:
    def loss(name: str, weighted: bool, **options: Any) -> Callable[..., Any]:
        def run(t: Any, x: Any, y: Any) -> Any:
            weight = weights(t, x) if weighted else None
            return getattr(t.nn.functional, name)(x, y, weight, **options)

        return run

    for name, reduction in itertools.product(("cross_entropy", "nll_loss"), REDUCTIONS):
        plain = loss(name, False, reduction=reduction)
        for label, inputs in {"rows": ROWS, "2-d": (draw(2, 3, 2, 1), np.array([[[0], [2]]] * 2))}.items():
            yield Case(name, f"{reduction} {label}", plain, inputs)
        yield Case(name, f"{reduction} one", plain, ONE)
        yield Case(name, f"{reduction} ignoring", plain, IGNORING)
        inside = loss(name, False, reduction=reduction, ignore_index=2)
        yield Case(name, f"{reduction} ignoring a class", inside, (SERIES[0], np.array([[0, 2], [1, 1]])))
        yield Case(name, f"{reduction} weighted", loss(name, True, reduction=reduction), SERIES)
        yield Case(name, f"{reduction} empty", loss(name, False, reduction="sum"), (draw(0, 3), np.zeros(0, np.int64)))
    targets = itertools.cycle([IGNORING, SERIES, ONE, SERIES])  # each with each reduction, and with and without weights
    for weighted, _, reduction in itertools.product((False, True), range(2), REDUCTIONS):
        inputs = next(targets)
        smooth = loss("cross_entropy", weighted, reduction=reduction, label_smoothing=0.3)
        yield Case("cross_entropy", f"{reduction} smooth {weighted} {inputs[0].shape}", smooth, inputs)
    large = lambda t, x, y: t.nn.functional.cross_entropy(x * 400, y)  # noqa: E731
    yield Case("cross_entropy", "large", large, ROWS)


def of_probabilities() -> Iterator[Case]:
    def soft(t: Any, x: Any, y: Any, weighted: bool = False, **options: Any) -> Any:
        return t.nn.functional.cross_entropy(x, t.softmax(y, -1), weights(t, x) if weighted else None, **options)

    for reduction, weighted, smoothing in itertools.product(REDUCTIONS, (False, True), (0.0, 0.3)):
        run = functools.partial(soft, reduction=reduction, weighted=weighted, label_smoothing=smoothing)
        for shape in ((4, 3), (2, 3, 2), (3,)):
            yield Case("soft_cross_entropy", f"{reduction} {weighted} {smoothing} {shape}", run, draws(shape, shape))
    yield Case("soft_cross_entropy", "empty", functools.partial(soft, reduction="sum"), draws((0, 3), (0, 3)))


def unit(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return draw(*shape, low=0.05, high=0.95, seed=seed)


PAIRS: list[tuple[Any, ...]] = [
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
    logits = "binary_cross_entropy_with_logits"

    def loss(name: str, weigh: bool = True, positive: bool = False, **options: Any) -> Callable[..., Any]:
        def run(t: Any, x: Any, y: Any) -> Any:
            more = {"pos_weight": weights(t, x) + 0.2} if positive else {}
            weight = weights(t, x).expand(2, 3) if weigh else None
            return getattr(t.nn.functional, name)(x, y, weight=weight, **more, **options)

        return run

    for reduction in REDUCTIONS:
        for name in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy"):
            yield Case(name, f"{reduction} weighted", loss(name, reduction=reduction), (unit(2, 3), unit(2, 3, seed=1)))
        for weigh in (False, True):
            run = loss(logits, weigh, positive=True, reduction=reduction)
            yield Case(logits, f"{reduction} positive {weigh}", run, (draw(2, 3), unit(2, 3)))
    far = lambda t, x, y: getattr(t.nn.functional, logits)(x * 300, y)  # noqa: E731
    yield Case(logits, "far", far, (draw(3, 4), unit(3, 4)))


def temporal() -> Iterator[Case]:
    lengths = np.array([6, 4]), np.array([3, 2])
    x = draw(6, 2, 4)

    def loss(t: Any, x: Any, target: Any, times: Any, sizes: Any, **options: Any) -> Any:
        return t.nn.functional.ctc_loss(x.log_softmax(-1).to(x.dtype), target, times, sizes, **options)

    padded = x, np.array([[1, 1, 2], [3, 2, -1]]), *lengths
    for reduction, zero_infinity in itertools.product(REDUCTIONS, (False, True)):
        run = functools.partial(loss, reduction=reduction, zero_infinity=zero_infinity)
        yield Case("ctc_loss", f"{reduction} zero_infinity={zero_infinity}", run, padded)
    yield Case("ctc_loss", "targets in one", loss, (x, np.array([1, 2, 1, 3, 3]), *lengths))
    last = functools.partial(loss, blank=3)
    yield Case("ctc_loss", "blank is the last", last, (x, np.array([[0, 1, 2], [2, 2, 0]]), *lengths))
    yield Case("ctc_loss", "empty", loss, (x, np.zeros((2, 0), np.int64), lengths[0], np.array([0, 0])))
    one = draw(5, 4), np.array([1, 2]), np.array(5), np.array(2)
    yield Case("ctc_loss", "one", functools.partial(loss, reduction="none"), one)


CASES = [*of_classes(), *of_probabilities(), *of_pairs(), *with_weights(), *temporal()]
