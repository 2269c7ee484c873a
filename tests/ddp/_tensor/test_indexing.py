"""Indexing against PyTorch: a table of indices and random ones, each read, written and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import DtypeError, RangeError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

# Each takes the module, so that its tensors may be ddp's or torch's.
INDICES = {
    "list of lists": lambda t: [[0, 1], [2, 0]],
    "list of tensors": lambda t: [t.tensor([0, 1]), t.tensor(2)],
    "range": lambda t: range(2),
    "NumPy array": lambda t: np.array([2, 0]),
    "0-d mask": lambda t: t.tensor(True),
    "int32": lambda t: t.tensor([1, 1], dtype=t.int32),
    "two masks": lambda t: (t.tensor([True, True, False]), slice(None), t.tensor([False, True, True])),
}


def cube(t: Any, **options: Any) -> Any:
    return t.arange(27, dtype=t.float64).reshape(3, 3, 3).clone().requires_grad_(options.get("grad", False))


# PyTorch reads a list of lists as a tuple, and says that it will not for ever.
AS_TUPLE = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")


@AS_TUPLE
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
class TestAgainstPyTorch:
    def test_read(self, index: Any) -> None:
        ours, theirs = cube(ddp, grad=True), cube(torch, grad=True)
        y = ours[index(ddp)]
        expected = theirs[index(torch)]
        assert y.shape == tuple(expected.shape)
        assert y.tolist() == expected.tolist()
        weight = np.arange(1.0, 1 + np.prod(y.shape)).reshape(y.shape)
        y.backward(ddp.tensor(weight))
        expected.backward(torch.tensor(weight))
        assert ours.grad.tolist() == theirs.grad.tolist()

    def test_write(self, index: Any) -> None:
        ours, theirs = cube(ddp), cube(torch)
        values = -1.0 - np.arange(np.prod(theirs[index(torch)].shape)).reshape(theirs[index(torch)].shape)
        ours[index(ddp)] = ddp.tensor(values)
        theirs[index(torch)] = torch.tensor(values)
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("where", [(3, slice(None), [0]), (0, slice(None), [3]), (0, 0, 0, [0])])
def test_out_of_range(where: Any) -> None:
    with pytest.raises(RangeError, match=r"indexing a tensor of shape \(3, 3, 3\)"):
        cube(ddp)[where]
    with pytest.raises(RangeError, match=r"on a tensor of shape \(3, 3, 3\)"):
        cube(ddp)[where] = 1


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ((0, 0, 0, 0), "too many indices"),
        (lambda: ddp.tensor([True, False]), r"mask of shape \(2,\)"),
        (lambda: ddp.tensor([0.0, 1.0]), "float32"),
        (lambda: ddp.tensor([0, 1], dtype=ddp.uint8), "uint8"),
        (([0, 1], [0, 1, 2]), "broadcast"),
        ("a", "str"),
        (1.5, "float"),
    ],
)
def test_what_is_no_index(where: Any, error: str) -> None:
    index = where() if callable(where) else where
    with pytest.raises(RangeError, match=error):
        cube(ddp)[index]
    with pytest.raises(RangeError, match=error):
        cube(ddp)[index] = 0


def test_values_must_fit() -> None:
    for where in (0, [0, 1], cube(ddp) > 5):
        with pytest.raises(ShapeError, match=r"x\[index\] = value on a tensor of shape \(3, 3, 3\)"):
            cube(ddp)[where] = ddp.zeros(5, 2)
    x = cube(ddp, grad=True) * 2
    before = x.tolist()
    with pytest.raises(ShapeError):
        x[0] = ddp.zeros(5, 2)
    assert x.tolist() == before


def draw(rng: np.random.Generator) -> tuple[tuple[int, ...], Callable[[Any], Any]]:
    """A shape, and an index of it that may not be valid."""
    shape = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, 5, rng.integers(0, 5)))
    common = tuple(int(n) for n in rng.integers(1, 4, rng.integers(1, 3)))
    parts: list[Callable[[Any], Any]] = []
    axis = 0
    dots = False
    while axis < len(shape) and rng.random() < 0.9:
        n = shape[axis]
        kind = rng.choice(["int", "slice", "list", "tensor", "mask", "None", "...", "0-d", "bool"], p=P)
        low = -n - (rng.random() < 0.02)
        high = n + (rng.random() < 0.02)
        if kind in ("int", "0-d"):
            number = int(rng.integers(low, high)) if low < high else 0
            parts.append(lambda t, i=number, zero=kind == "0-d": t.tensor(i) if zero else i)
        elif kind == "slice":
            start, stop = (None if rng.random() < 0.4 else int(rng.integers(-n - 1, n + 2)) for _ in range(2))
            step = int(rng.integers(1, 4)) if rng.random() < 0.3 else None
            parts.append(lambda t, s=slice(start, stop, step): s)
        elif kind in ("list", "tensor"):
            size = [m if rng.random() < 0.8 else 1 for m in common[rng.integers(0, len(common)) :]]
            numbers = (rng.integers(low, high, size) if low < high else np.zeros(0, np.int64)).tolist()
            plain = kind == "list"
            parts.append(lambda t, i=numbers, plain=plain: i if plain else t.tensor(i, dtype=t.int64))
        elif kind == "mask":
            over = shape[axis : axis + int(rng.integers(1, 3))]
            mask = (rng.random(over) < 0.5).tolist()
            parts.append(lambda t, m=mask, over=over: t.tensor(m, dtype=t.bool).reshape(over))
            axis += len(over) - 1
        elif kind == "bool":
            held = rng.random() < 0.5
            parts.append(lambda t, held=held: held)
        elif kind == "None" or not dots:
            if kind == "...":
                axis += int(rng.integers(0, len(shape) - axis + 1))
                dots = True
            parts.append(lambda t, part=None if kind == "None" else ...: part)
        axis += kind not in ("None", "...", "bool")
    if len(parts) == 1 and rng.random() < 0.5:
        return shape, parts[0]
    return shape, lambda t: tuple(part(t) for part in parts)


P = [0.15, 0.2, 0.12, 0.15, 0.1, 0.08, 0.08, 0.08, 0.04]


def both(run: Callable[[Any], Any], empty: bool = False) -> tuple[Any, Any] | None:
    """What `run` gives with ddp and with torch; None if both raise. empty: the index is known to name nothing."""
    try:
        expected = run(torch)
    except (IndexError, RuntimeError):
        with pytest.raises((RangeError, ShapeError, DtypeError)):
            run(ddp)
        return None
    try:
        return run(ddp), expected
    except RangeError:
        assert empty or not expected[0].numel()  # PyTorch does not look at an index where the result is empty
        return None


@AS_TUPLE
def test_random_indices(count: Callable[[int, int], int]) -> None:
    rng = np.random.default_rng(18)
    valid = 0
    for _ in range(count(200, 2000)):
        shape, index = draw(rng)
        numbers = rng.permutation(np.arange(np.prod(shape))).reshape(shape)

        def leaf(t: Any, array: Any) -> Any:
            return t.tensor(array, dtype=t.float64, requires_grad=True)

        def read(t: Any) -> Any:
            x = leaf(t, numbers)  # noqa: B023  # called at once
            y = x[index(t)]  # noqa: B023
            (y * y).sum().backward()
            return y.detach(), x.grad

        result = both(read)
        if result is None:
            continue
        valid += 1
        check(result, (shape, index(ddp)))
        # Where a place is named twice, only one value can be right.
        places = result[0][0].numpy()
        once = len(np.unique(places)) == places.size
        value = rng.standard_normal(places.shape if once else ())
        if once and value.ndim and rng.random() < 0.5:
            value = value[tuple(slice(0, 1) if rng.random() < 0.5 else slice(None) for _ in value.shape)]

        def write(t: Any) -> Any:
            x, v = leaf(t, numbers), leaf(t, value)  # noqa: B023
            y = x * 2
            y[index(t)] = v  # noqa: B023
            (y * y * y).sum().backward()
            # PyTorch leaves out a value that goes nowhere, as in y[False] = v.
            return y.detach(), x.grad, v.grad if v.grad is not None else v.detach() * 0

        written = both(write, not places.size)
        if written is not None:
            check(written, (shape, index(ddp), value.shape))
    assert valid > 100


def check(result: tuple[Any, Any], what: Any) -> None:
    for ours, theirs in zip(*result, strict=True):
        assert ours.shape == tuple(theirs.shape), what
        assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12, err_msg=str(what))
