"""Shapes, parts and frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.ddp.cases.table import Case, draw, draws, function, methods, strided

CUBE = draws((2, 3, 4))
MATRIX = draws((5, 4))
NUMBER = draws(())
NOTHING = draws((0, 3))


def shapes() -> Iterator[Case]:
    yield from methods(
        "reshape",
        CUBE,
        ("reshape", 4, -1),
        ("view", -1, 3),
        ("flatten", 1),
        ("unflatten", 2, (2, -1)),
        ("unsqueeze", -2),
        ("repeat_interleave", 2),
        ("repeat_interleave", 3, -2),
    )
    yield from methods("reshape", draws((1, 1, 4)), ("squeeze",), ("squeeze", 1))
    yield from methods("reshape", NUMBER, ("reshape", 1, 1), ("flatten",))
    yield from methods("reshape", NOTHING, ("reshape", 3, 0))
    yield from methods(
        "permute",
        CUBE,
        ("permute", -1, 0, 1),
        ("transpose", -1, 0),
        ("swapaxes", 0, 1),
        ("movedim", 0, -1),
        ("moveaxis", (0, 1), (2, 0)),
    )
    yield from methods("permute", draws((3,)), ("t",))
    yield from methods("permute", NOTHING, ("t",))
    yield from methods("permute", NUMBER, ("permute", ()))
    column = draws((3, 1))
    yield from methods("expand", column, ("expand", 2, -1, 4), ("broadcast_to", (2, 3, 2)))
    yield from methods("expand", NUMBER, ("expand", 2, 2))
    yield from methods("expand", draws((1, 3)), ("expand", 0, 3))
    for label, fn in {
        "empty broadcast_tensors": lambda t, x: t.broadcast_tensors(x, t.zeros(4, 0, 2))[0],
        "meshgrid xy": lambda t, x: t.stack(t.meshgrid(x[:, 0], x[1:, 0], x[0], indexing="xy")),
        "cartesian_prod": lambda t, x: t.cartesian_prod(x[:, 0], x[1:, 0]),
    }.items():
        yield Case("expand", label, fn, column if label[0] != "e" else draws((1, 1)))


def parts() -> Iterator[Case]:
    yield from methods(
        "split",
        MATRIX,
        ("split", 2),
        ("split", 3, 1),
        ("split", (1, 4)),
        ("split_with_sizes", (4, 1)),
        ("chunk", 3, -1),
        ("tensor_split", 3),
    )
    yield from methods("split", NOTHING, ("split", 2, 1))
    for op, calls in {
        "unbind": [("unbind", 1)],
        "diagonal": [("diagonal",), ("diagonal", -2), ("diagonal", 3), ("diag", 1)],
        "unfold": [("unfold", 1, 2, 1), ("unfold", 0, 3, 1)],
    }.items():
        yield from methods(op, MATRIX, *calls)
        yield from methods(op, NOTHING, calls[0])
    yield from methods("diagonal", CUBE, ("diagonal", -1, 2, 0))
    yield from methods("as_strided", MATRIX, ("as_strided", (3, 4), (4, 1), 5))
    yield from methods("as_strided", NOTHING, ("as_strided", (0, 3), (3, 1)))
    yield from methods("as_strided", NUMBER, ("as_strided", (2,), (0,)))
    copied = lambda t, x: x.contiguous().as_strided((3, 2), (1, 3))  # noqa: E731
    yield Case("as_strided", "non-contiguous, copied", copied, (strided(draw(2, 3, 4)),))


# An op, a function of a sequence, what it takes beside it, and shapes of the tensors.
JOINS: list[tuple[Any, ...]] = [
    ("cat", "cat", (0,), ((2, 3), (2, 3))),
    ("cat", "concat", (-1,), ((2, 3), (2, 1))),
    ("cat", "cat", (0,), ((0, 3), (2, 3))),
    ("cat", "cat", (1,), ((0,), (2, 3))),
    ("cat", "hstack", (), ((2, 3), (2, 3))),
    ("cat", "vstack", (), ((3,), (2, 3))),
    ("cat", "column_stack", (), ((2,), (2, 3))),
    ("stack", "stack", (0,), ((2, 3), (2, 3))),
    ("stack", "stack", (-1,), ((2, 3), (2, 3))),
    ("stack", "stack", (0,), ((), ())),
    ("stack", "stack", (1,), ((0, 3), (0, 3))),
]


def rearranged() -> Iterator[Case]:
    for op, name, how, sizes in JOINS:
        run = lambda t, *xs, name=name, how=how: getattr(t, name)(xs, *how)  # noqa: E731
        yield Case(op, f"{'empty ' * (0 in sizes[0])}{'0-d ' * (not sizes[0])}{name} {sizes}", run, draws(*sizes))
    twice = lambda t, x, y: t.cat((x, y, x))  # noqa: E731
    yield Case("cat", "one of them twice", twice, draws((2, 3), (2, 3)))
    for op, calls in {
        "repeat": [("repeat", 2, 1, 3), ("tile", (2,))],
        "flip": [("flip", 0, -1), ("flip", ()), ("fliplr",), ("rot90", -1, (2, 1))],
        "roll": [("roll", 1, -1), ("roll", (-1, 5), (0, -1)), ("roll", 4)],
        "tril": [("tril",), ("tril", 1), ("tril", -2)],
        "triu": [("triu",), ("triu", 2), ("triu", -1)],
        "diag_embed": [("diag_embed",), ("diag_embed", 2), ("diag_embed", -1, 0, 2)],
    }.items():
        yield from methods(op, CUBE, *calls)
        yield from methods(op, draws((2, 0, 3)), calls[0])
    yield from methods("diag_embed", draws((4,)), ("diag", -1))


# Paddings, and a shape for each.
FRAMES = [((2, 1), (2, 3, 3)), ((1, 0, 2, 2), (2, 1, 3, 4)), ((1, 1, 0, 1, 1, 2), (1, 1, 3, 2, 3)), ((-1, 2), (2, 4))]


def frames() -> Iterator[Case]:
    yield Case("pad", "last", function("pad", (1, 2)), draws((2, 3)))
    yield Case("pad", "cropped", function("pad", (-1, 2, 1, -2), value=2.0), draws((4, 3)))
    yield Case("pad", "empty", function("pad", (1, 1)), draws((2, 0)))
    for mode in ("reflect", "replicate", "circular"):
        for sides, shape in FRAMES:
            yield Case("continued", f"{mode} {sides}", function("pad", sides, mode), draws(shape))
    yield Case("continued", "replicate far", function("pad", (5, 7), "replicate"), draws((2, 3)))
    yield Case("continued", "empty", function("pad", (1, 1), "reflect"), (draw(0, 3, 4),))


CASES = [*shapes(), *parts(), *rearranged(), *frames()]
