"""Matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp._tensor.base import apply
from ddp.ops import products as ops
from tests.ddp.cases.table import Case, draw, function


def products() -> Iterator[Case]:
    for a, b in [
        ((2, 3), (3, 4)),
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((5, 2, 3), (3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (4, 3, 2)),
        ((0, 3), (3, 4)),
        ((2, 0), (0, 4)),
        ((0, 2, 3), (3, 4)),
    ]:
        label = f"{'empty ' * (0 in a)}{a} @ {b}"
        yield Case("matmul", label, lambda t, x, y: x @ y, (draw(*a), draw(*b, seed=1)))

    linear = function("linear")
    yield Case("linear", "bias", linear, (draw(5, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "no bias", linear, (draw(5, 3), draw(4, 3, seed=1)))
    yield Case("linear", "batches", linear, (draw(2, 5, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "empty", linear, (draw(0, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "no features", linear, (draw(2, 0), draw(4, 0), draw(4, seed=2)))

    def fused(name: str, activation: str) -> Any:
        def run(t: Any, x: Any, *parameters: Any) -> Any:
            if t.__name__ != "torch":
                return apply(getattr(ops, name), (x, *parameters), activation=activation, keep=True)
            y = t.nn.functional.linear(x, *parameters[:2])
            y = y.relu() if activation == "relu" else t.nn.functional.gelu(y, approximate="tanh")
            return y if name == "linear_act" else t.nn.functional.linear(y, *parameters[2:])

        return run

    for activation in ops.ACTIVATIONS:
        run = fused("linear_act", activation)
        w = draw(4, 3, seed=1)
        b = draw(4, seed=2)
        yield Case("linear_act", f"{activation} bias", run, (draw(5, 3), w, b))
        yield Case("linear_act", f"{activation} empty", run, (draw(0, 3), w, b))
        run = fused("feed_forward", activation)
        last = draw(2, 4, seed=3), draw(2, seed=4)
        yield Case("feed_forward", f"{activation} biases", run, (draw(5, 3), w, b, *last))
        yield Case("feed_forward", f"{activation} empty", run, (draw(0, 3), w, b, *last))
        yield Case(
            "feed_forward",
            f"{activation} no biases",
            lambda t, x, v, w, run=run: run(t, x, v, None, w, None),
            (draw(5, 3), w, last[0]),
        )


# Equations, and shapes of their operands.
SUMS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("i,j->ij", (2,), (3,)),
    ("i,i", (3,), (3,)),
    ("ij,ij->", (2, 3), (2, 3)),
    ("...ij,...jk->...ik", (5, 2, 3), (3, 4)),
    ("...ij,...jk", (5, 1, 2, 3), (4, 3, 2)),
    ("i...,i->...", (3, 2, 4), (3,)),
    ("ii,ij->j", (3, 3), (3, 2)),
]


def sums() -> Iterator[Case]:
    for i, (equation, a, b) in enumerate(SUMS):
        run = lambda t, x, y, equation=equation: t.einsum(equation, x, y)  # noqa: E731  # one line a case
        op = "mul" if equation == "i,j->ij" else "einsum"  # which sums nothing
        yield Case(op, f"{equation} {i}", run, (draw(*a), draw(*b, seed=1)))
    for equation, shape in [("ii->i", (3, 3)), ("ii", (3, 3)), ("iji->ji", (3, 2, 3)), ("...ii->...i", (2, 3, 3))]:
        run_one = lambda t, x, equation=equation: t.einsum(equation, x)  # noqa: E731
        yield Case("diagonals", equation, run_one, (draw(*shape),))
    yield Case("diagonals", "empty", lambda t, x: t.einsum("ii->i", x), (draw(0, 0),))
    yield Case("einsum", "empty", lambda t, x, y: t.einsum("ij,jk->ik", x, y), (draw(0, 3), draw(3, 4)))
    yield Case("einsum", "empty inside", lambda t, x, y: t.einsum("ij,jk->ik", x, y), (draw(2, 0), draw(0, 4)))
    three = (draw(2, 3), draw(3, 4, seed=1), draw(4, 2, seed=2))
    yield Case("einsum", "three", lambda t, x, y, z: t.einsum("ij,jk,kl->il", x, y, z), three)
    yield Case(
        "einsum", "lists", lambda t, x, y: t.einsum(x, [..., 0, 1], y, [1, 30], [30, 0]), (draw(2, 3), draw(3, 4))
    )
    yield Case("einsum", "three to nothing", lambda t, x, y, z: t.einsum("ij,jk,ki->", x, y, z), three)
    yield Case("einsum", "dims", lambda t, x, y: t.tensordot(x, y, 1), three[:2])
    yield Case(
        "einsum", "pairs", lambda t, x, y: t.tensordot(x, y, ([0, 2], [1, 0])), (draw(2, 5, 3), draw(3, 2, 4, seed=1))
    )


# A function's name, an op below it, and shapes of its arguments.
FUNCTIONS: list[tuple[Any, ...]] = [
    ("mm", "matmul", (2, 3), (3, 4)),
    ("bmm", "matmul", (5, 2, 3), (5, 3, 4)),
    ("mv", "matmul", (2, 3), (3,)),
    ("dot", "matmul", (3,), (3,)),
    ("outer", "mul", (2,), (3,)),
    ("inner", "matmul", (2, 3), (4, 3)),
    ("inner", "mul", (), (2, 3)),
    ("kron", "mul", (2, 3), (4, 5)),
    ("addmm", "matmul", (2, 4), (2, 3), (3, 4)),
    ("addmv", "matmul", (2,), (2, 3), (3,)),
    ("addr", "mul", (2, 3), (2,), (3,)),
    ("baddbmm", "matmul", (5, 2, 4), (5, 2, 3), (5, 3, 4)),
    ("baddbmm", "matmul", (1, 4), (5, 2, 3), (5, 3, 4)),
    ("trace", "diagonal", (2, 4)),
    ("cdist", "vector_norm", (4, 3), (5, 3)),
    ("cdist", "vector_norm", (2, 1, 4, 3), (3, 5, 3)),
]


def functions() -> Iterator[Case]:
    def several(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple([draw(*shape, seed=i) for i, shape in enumerate(shapes)])

    for name, op, *shapes in FUNCTIONS:
        yield Case(op, f"{name} {shapes}", lambda t, *xs, name=name: getattr(t, name)(*xs), several(*shapes))
        if name.startswith("add") or name == "baddbmm":
            scaled = lambda t, x, *xs, name=name: getattr(x, name)(*xs, beta=0.5, alpha=2)  # noqa: E731  # one line a case
            yield Case(op, f"{name} {shapes} scaled", scaled, several(*shapes))
    for name, op, *shapes in FUNCTIONS[8:12]:
        within = lambda t, x, *xs, name=name: getattr(x * 1, f"{name}_")(*xs, beta=0.5, alpha=2)  # noqa: E731
        yield Case(op, f"{name}_", within, several(*shapes))
    for op, equation, *shapes in [
        ("einsum", "ij,jk,kl,lm->im", (2, 3), (3, 4), (4, 5), (5, 2)),
        ("einsum", "abc,cd,db->ad", (2, 3, 4), (4, 5), (5, 3)),
        ("mul", "i,j,k->ijk", (2,), (3,), (4,)),
        ("mul", "ij,ij->ij", (2, 3), (1, 3)),
        ("mul", "ij,kj->kij", (2, 3), (4, 3)),
    ]:
        yield Case(op, equation, lambda t, *xs, equation=equation: t.einsum(equation, list(xs)), several(*shapes))
    bilinear = function("bilinear")
    yield Case("matmul", "bilinear", bilinear, several((5, 2), (5, 3), (4, 2, 3), (4,)))
    yield Case("matmul", "bilinear of vectors", bilinear, several((2,), (3,), (4, 2, 3), (4,)))


def factors() -> Iterator[Case]:
    def run(op: str, name: str) -> Any:
        def call(t: Any, x: Any) -> Any:
            definite = x @ x.mT + 3 * t.eye(x.shape[-1], dtype=x.dtype)
            if t.__name__ != "torch":
                return apply(getattr(ops, op), (definite,))
            wide = definite.float() if definite.dtype is t.float16 else definite  # PyTorch has no float16 of these
            return getattr(t.linalg, name)(wide).to(definite.dtype)

        return call

    for op, name in (("inverse", "inv"), ("cholesky", "cholesky")):
        for shape in ((3, 3), (2, 3, 3), (1, 1), (0, 3, 3)):
            yield Case(op, f"{'empty ' * (0 in shape)}{shape}", run(op, name), (draw(*shape),))


CASES = [*products(), *sums(), *functions(), *factors()]
