"""A case, and the cases that every op of a kind needs: broadcast, empty, 0-d and non-contiguous among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Run = Callable[..., Any]


class Case(NamedTuple):
    op: str
    label: str
    fn: Run  # fn(t, *inputs)
    inputs: tuple[Array, ...]  # float64 ones get a gradient


def draw(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> Array:
    """Distinct numbers, no two near each other, none near zero: differences must not step over a kink."""
    n = int(np.prod(shape))
    steps = low + (high - low) * (np.arange(n) + 0.5) / max(n, 1) + 0.003
    return np.random.default_rng(seed + n).permutation(steps).reshape(shape)


def draws(*shapes: tuple[int, ...], **bounds: float) -> tuple[Array, ...]:
    """An array of each shape, each with numbers of its own."""
    return tuple([draw(*shape, seed=i, **bounds) for i, shape in enumerate(shapes)])


def strided(array: Array) -> Array:
    """The same values in memory that is not contiguous: every second element, dimensions in another order."""
    if not array.ndim:
        return array
    wide = np.empty((*array.shape[-2::-1], array.shape[-1] * 2), array.dtype)[..., ::2]
    view = wide.transpose(*reversed(range(array.ndim - 1)), array.ndim - 1)
    view[...] = array
    return view


def with_strides(cases: list[Case]) -> list[Case]:
    """The cases, and the first of each op that has elements once more with inputs that are not contiguous."""
    done = {case.op for case in cases if "non-contiguous" in case.label}
    result = list(cases)
    for case in cases:
        if case.op not in done and all(x.size for x in case.inputs) and any(x.ndim > 1 for x in case.inputs):
            done.add(case.op)
            result.append(Case(case.op, f"{case.label}, non-contiguous", case.fn, tuple(map(strided, case.inputs))))
    return result


def function(name: str, *how: Any, **more: Any) -> Run:
    """`fn` of a case: `nn.functional.name` of the inputs, then these arguments."""
    return lambda t, *inputs: getattr(t.nn.functional, name)(*inputs, *how, **more)


def method(name: str, *how: Any, **options: Any) -> Run:
    """`fn` of a case: a method of the first input, which takes these arguments and then the other inputs.

    Lists and arrays become tensors; what changes its tensor gets a copy. Of several results it gives all but the first.
    """

    def run(t: Any, x: Any, *others: Any) -> Any:
        given = [t.tensor(each) if isinstance(each, list | np.ndarray) else each for each in how]
        result = getattr(x * 1 if name.endswith("_") else x, name)(*given, *others, **options)
        return result if hasattr(result, "shape") else t.cat([each.reshape(-1) for each in result[1:]])

    return run


def methods(op: str, inputs: tuple[Array, ...], *calls: tuple[Any, ...]) -> Iterator[Case]:
    """A case of each call: a method of the first input, and its arguments."""
    kind = "empty " if not inputs[0].size else "0-d " * (not inputs[0].ndim)
    for call in calls:
        yield Case(op, kind + " ".join(map(str, call)), method(*call), inputs)


def function_of(op: str) -> Run:
    return lambda t, *inputs: getattr(t, op)(*inputs)


def unary(op: str, low: float = -2.0, high: float = 2.0, fn: Run | None = None) -> Iterator[Case]:
    run = fn or function_of(op)
    bounds = {"low": low, "high": high}
    yield Case(op, "matrix", run, (draw(3, 4, **bounds),))
    yield Case(op, "0-d", run, (draw(**bounds),))
    yield Case(op, "empty", run, (draw(0, 3, **bounds),))


def binary(op: str, fn: Run | None = None, low: float = -2.0, **right: float) -> Iterator[Case]:
    left = {"low": low}
    run = fn or function_of(op)
    for label, a, b in [
        ("same", (3, 4), (3, 4)),
        ("rows", (3, 4), (4,)),
        ("columns", (3, 1), (2, 3, 4)),
        ("outer", (3, 1), (1, 4)),
        ("0-d", (), ()),
        ("0-d and matrix", (), (2, 3)),
        ("empty", (0, 3), (3,)),
        ("empty broadcast", (0, 3), (1, 3)),
    ]:
        yield Case(op, label, run, (draw(*a, **left), draw(*b, seed=1, **{"low": -1.9, **right})))


def reduction(op: str, empty: bool = True, always_dim: bool = False) -> Iterator[Case]:
    for dim in (None, 0, -1, (0, 2), (2, 1, 0)):
        for keepdim in (False, True):
            if dim is not None or not (keepdim or always_dim):
                how = over(op) if dim is None else over(op, dim=dim, keepdim=keepdim)
                yield Case(op, f"dim={dim} keepdim={keepdim}", how, (draw(2, 3, 4),))
    zero = over(op, dim=0)
    yield Case(op, "0-d", zero, (draw(),))
    if empty:
        yield Case(op, "empty", over(op, dim=1), (draw(0, 3),))


def over(op: str, **options: Any) -> Run:
    return lambda t, x: getattr(t, op)(x, **options)


def along(op: str) -> Iterator[Case]:
    for label, dim, shape in [
        ("first", 0, (3, 4)),
        ("last", -1, (3, 4)),
        ("middle", 1, (2, 3, 4)),
        ("0-d", 0, ()),
        ("empty", 1, (0, 3)),
        ("no classes", 1, (2, 0)),
    ]:
        yield Case(op, label, over(op, dim=dim), draws(shape))
    yield Case(op, "large", lambda t, x: getattr(t, op)(x * 400, dim=1), (draw(2, 3),))
