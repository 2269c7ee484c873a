"""Matrix products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ddp._tensor.base import apply
from ddp.ops import products as ops
from tests.ddp.cases.table import Case, draw, draws, function, function_of, method


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
        yield Case("matmul", f"{'empty ' * (0 in a)}{a} @ {b}", lambda t, x, y: x @ y, draws(a, b))
    w = (4, 3)
    b = (4,)
    for label, shapes in {
        "bias": ((5, 3), w, b),
        "no bias": ((5, 3), w),
        "batches": ((2, 5, 3), w, b),
        "empty": ((0, 3), w, b),
        "no features": ((2, 0), (4, 0), b),
    }.items():
        yield Case("linear", label, function("linear"), draws(*shapes))

    def fused(name: str, activation: str) -> Any:
        def run(t: Any, x: Any, *parameters: Any) -> Any:
            if t.__name__ != "torch":
                return apply(getattr(ops, name), (x, *parameters), activation=activation, keep=True)
            y = t.nn.functional.linear(x, *parameters[:2])
            y = y.relu() if activation == "relu" else t.nn.functional.gelu(y, approximate="tanh")
            return y if name == "linear_act" else t.nn.functional.linear(y, *parameters[2:])

        return run

    last = ((2, 4), (2,))
    for activation, rows in itertools.product(ops.ACTIVATIONS, (5, 0)):
        label = activation + " empty" * (not rows)
        yield Case("linear_act", label, fused("linear_act", activation), draws((rows, 3), w, b))
        run = fused("feed_forward", activation)
        yield Case("feed_forward", label, run, draws((rows, 3), w, b, *last))
        without = lambda t, x, v, w, run=run: run(t, x, v, None, w, None)  # noqa: E731
        yield Case("feed_forward", f"{label}, no biases", without, draws((rows, 3), w, last[0]))


# An op below an equation, and shapes of its operands.
SUMS: list[tuple[Any, ...]] = [
    ("einsum", "ij,jk->ik", (2, 3), (3, 4)),
    ("einsum", "ij,jk->ik", (0, 3), (3, 4)),
    ("einsum", "ij,jk->ik", (2, 0), (0, 4)),
    ("einsum", "i,i", (3,), (3,)),
    ("einsum", "...ij,...jk", (5, 1, 2, 3), (4, 3, 2)),
    ("einsum", "i...,i->...", (3, 2, 4), (3,)),
    ("einsum", "ii,ij->j", (3, 3), (3, 2)),
    ("einsum", "ij,jk,ki->", (2, 3), (3, 4), (4, 2)),
    ("einsum", "ij,jk,kl,lm->im", (2, 3), (3, 4), (4, 5), (5, 2)),
    ("einsum", "abc,cd,db->ad", (2, 3, 4), (4, 5), (5, 3)),
    ("mul", "i,j->ij", (2,), (3,)),
    ("mul", "i,j,k->ijk", (2,), (3,), (4,)),
    ("mul", "ij,ij->ij", (2, 3), (1, 3)),
    ("mul", "ij,kj->kij", (2, 3), (4, 3)),
    ("diagonals", "ii->i", (3, 3)),
    ("diagonals", "ii->i", (0, 0)),
    ("diagonals", "ii", (3, 3)),
    ("diagonals", "iji->ji", (3, 2, 3)),
    ("diagonals", "...ii->...i", (2, 3, 3)),
]


def sums() -> Iterator[Case]:
    for op, equation, *shapes in SUMS:
        run = lambda t, *xs, equation=equation: t.einsum(equation, *xs)  # noqa: E731
        yield Case(op, f"{'empty ' * (0 in shapes[0])}{equation} {shapes}", run, draws(*shapes))
    lists = lambda t, x, y: t.einsum(x, [..., 0, 1], y, [1, 30], [30, 0])  # noqa: E731
    yield Case("einsum", "lists", lists, draws((2, 3), (3, 4)))
    for dims, *shapes in [(1, (2, 3), (3, 4)), (([0, 2], [1, 0]), (2, 5, 3), (3, 2, 4))]:
        contract = lambda t, x, y, dims=dims: t.tensordot(x, y, dims)  # noqa: E731
        yield Case("einsum", f"tensordot {dims}", contract, draws(*shapes))


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
    for name, op, *shapes in FUNCTIONS:
        yield Case(op, f"{name} {shapes}", function_of(name), draws(*shapes))
        if name.startswith("add") or name == "baddbmm":
            for form in [name] if shapes[0] == (1, 4) else [name, f"{name}_"]:
                scaled = method(form, beta=0.5, alpha=2)
                yield Case(op, f"{form} {shapes} scaled", scaled, draws(*shapes))
    for first, second in (((5, 2), (5, 3)), ((2,), (3,))):
        yield Case("matmul", f"bilinear {first}", function("bilinear"), draws(first, second, (4, 2, 3), (4,)))


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
