"""Elementwise kernels of a formula: launched with what was found out about these shapes the first time.

One launch is the whole of an op, whatever its operands are: arrays of any strides that broadcast, 0-d ones, numbers.
What does not change from call to call is kept by the shapes, strides and dtypes of the operands: which kernel, how many
blocks, its `Plan`. So a call costs the host a look-up, the memory of the result and a launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp._device import capturing
from ddp.ops._op import Array, shape_of
from ddp.ops.cuda import pointwise_plan, pointwise_source
from ddp.ops.cuda._source import BLOCKS, THREADS, Passing, loaded, loaded_here, passes, plan
from ddp.ops.cuda.pointwise_source import DIMS, Input, Output

OPTIONS = ("-std=c++17",)
BLOCK = (THREADS,)
MOST = 4096  # sets of shapes that are remembered for each kernel
NUMBERS = frozenset({bool, int, float})  # by type: isinstance asks an array of CuPy for its class, ten times as slow

KERNELS: dict[str, Any] = {}  # by name, those of `folding`, too: a test compiles and runs them all


class Ready(NamedTuple):
    """What one launch needs that its shapes decide."""

    kernel: Any
    grid: tuple[int]
    block: tuple[int]
    plan: Any
    passing: Passing
    outs: tuple[tuple[tuple[int, ...], Any, tuple[int, ...] | None], ...]  # shape, dtype, order of dimensions
    limits: tuple[int, int] | None = None  # of integers, where it computes with such
    then: Any = None  # of a reduction in two steps: the second; else what a backward needs to know of the inputs
    numbered: bool = False  # whether an input is a number


def key_of(inputs: Sequence[Any]) -> list[Any]:
    """What tells shapes, strides and dtypes apart; a number is a number."""
    key: list[Any] = []
    for x in inputs:
        key += (None,) if type(x) in NUMBERS else (x.dtype, x.shape, x.strides)
    return key


def steps_of(x: Array) -> tuple[int, ...]:
    size = x.dtype.itemsize
    return tuple([step // size for step in x.strides])


def kept_of(inputs: Sequence[Any]) -> tuple[Any, Any]:
    """Shapes, and the dtypes if floating ones differ."""
    kinds = [x.dtype for x in inputs if type(x) not in NUMBERS and x.dtype.kind in "fV"]
    shapes = tuple([shape_of(x) for x in inputs])
    if all(kind == kinds[0] for kind in kinds):
        return shapes, None
    return shapes, [None if type(x) in NUMBERS else x.dtype for x in inputs]


def written(body: str, target: str) -> str:
    """A formula as statements."""
    return body if ";" in body else f"{target} = {body};"


class Elementwise:
    """One formula: `outs` of `ins`.

    body: C++ statements; numbers: parameters after the inputs; dtype: of the results, or None for that of the operands.
    integers: whether it holds for them; truths: for bool; exact: numbers count in the dtype of the arrays beside them,
    and integers in 64 bits, as they do in a comparison.
    """

    def __init__(
        self,
        name: str,
        ins: Sequence[str],
        outs: Sequence[str],
        body: str,
        numbers: Sequence[str] = (),
        *,
        dtype: Any = None,
        integers: bool = False,
        truths: bool = False,
        exact: bool = False,
    ) -> None:
        assert name not in KERNELS, name
        self.name, self.ins, self.outs, self.body, self.numbers = name, tuple(ins), tuple(outs), body, tuple(numbers)
        self.dtype, self.integers, self.truths, self.exact = dtype, integers, truths, exact
        self._ready: dict[Any, Ready] = {}
        self._kernels: dict[Any, Any] = {}
        KERNELS[name] = self

    def text(self, dtypes: Sequence[str | None], outs: Sequence[str]) -> str:
        """The source for inputs of these dtypes (None: a number of the host's), and for these of the results."""
        ins = [Input(*each) for each in zip(self.ins, dtypes, strict=True)]
        results = [Output(*each) for each in zip(self.outs, outs, strict=True)]
        kind = self._kind(dtypes)
        exact = next((each for each in dtypes if each and "float" in each), None) if self.exact else None
        return pointwise_source.elementwise(self.name, ins, results, self.numbers, self.body, kind, exact)

    def _kind(self, dtypes: Sequence[str | None]) -> str:
        kind = pointwise_source.computed_in([each for each in dtypes if each is not None])
        return "long long" if self.exact and kind == "int" else kind

    def __call__(
        self,
        xp: Any,
        inputs: Sequence[Any],
        numbers: Sequence[float] = (),
        into: Sequence[Array] | None = None,
        dtype: Any = None,
    ) -> list[Array] | None:
        """The results, of the shape that the inputs broadcast to; None if there is no such kernel.

        into: where to write them instead; dtype: of the results, where it is not that of the operands. Raises:
        OverflowError for a number that the integers beside it do not hold.
        """
        return self.run(xp, inputs, numbers, into, dtype)[0]

    def run(
        self,
        xp: Any,
        inputs: Sequence[Any],
        numbers: Sequence[float] = (),
        into: Sequence[Array] | None = None,
        dtype: Any = None,
    ) -> tuple[list[Array] | None, tuple[Any, Any]]:
        """The same, and what a backward needs to know of the inputs: their shapes, and their dtypes if these differ."""
        key = (xp, dtype, *key_of(inputs))
        if into is not None:
            key = (*key, *key_of(into))
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) >= MOST:
                self._ready.clear()
            ready = self._ready[key] = self._made(xp, inputs, into, dtype)
        kernel, grid, _, walk, passing, outs, limits, kept, numbered = ready
        if kernel is False:
            return None, kept
        arguments: Sequence[Any] = inputs
        hosted: Sequence[Any] = numbers
        if numbered:
            arguments = [x for x in inputs if type(x) not in NUMBERS]
            hosted = [*[x for x in inputs if type(x) in NUMBERS], *numbers]
        if not hosted:
            pass
        elif limits is None:
            real = passing[float]
            hosted = [real(float(x)) for x in hosted]
        else:
            whole = passing[int]
            for i, x in enumerate(hosted):
                if isinstance(x, float):
                    return None, kept  # the result is none of integers
                if not limits[0] <= x <= limits[1]:
                    if self.exact or i >= len(hosted) - len(numbers):
                        return None, kept
                    raise OverflowError(
                        f"Python integer {x} out of bounds for integers from {limits[0]} to {limits[1]}"
                    )
            hosted = [whole(int(x)) for x in hosted]
        results: list[Array]
        if into is not None:
            results = [*into]
        elif outs[0][2] is None:
            results = [xp.ndarray(shape, kind) for shape, kind, _ in outs]
        else:
            results = [_ordered(xp, shape, kind, order) for shape, kind, order in outs]
        if kernel is not None:
            if capturing.now is not None:
                loaded_here(kernel)
            kernel(grid, BLOCK, [*arguments, *results, walk, *hosted])
        return results, kept

    def _made(self, xp: Any, inputs: Sequence[Any], into: Sequence[Array] | None, dtype: Any) -> Ready:
        arrays = [x for x in inputs if type(x) not in NUMBERS]
        numbered = len(arrays) < len(inputs)
        assert not any(isinstance(x, np.generic) for x in arrays), f"{self.name}: {[*map(type, arrays)]}"
        passing, names = passes(xp), [None if type(x) in NUMBERS else x.dtype.name for x in inputs]
        kind = self._kind(names)
        real = kind in ("float", "double")
        truth = all(x.dtype.kind == "b" for x in arrays)
        unfit = not (real or (self.truths if truth else self.integers))
        unfit |= any(x.dtype.name not in pointwise_source.KINDS for x in arrays)
        shape = np.broadcast_shapes(*[x.shape for x in arrays]) if into is None else into[0].shape
        kinds = [dtype or self.dtype or joint_of(arrays)] * len(self.outs)
        if into is not None:
            kinds = [each.dtype for each in into]
        order, steps = (None, pointwise_plan.row_major(shape)) if into is not None else _like(arrays, shape)
        of_outs = [steps] * len(self.outs) if into is None else [steps_of(each) for each in into]
        outs = tuple((shape, each, order) for each in kinds)
        limits = None if real else _limits(joint_of(arrays) if not self.exact else np.dtype("int64"))
        n = math.prod(shape)
        walk = pointwise_plan.collapsed(
            shape, [*[pointwise_plan.aligned(shape, x.shape, steps_of(x)) for x in arrays], *of_outs]
        )
        # What shows an element of its memory several times is no place to write to.
        unfit |= any(step == 0 for each in walk.steps[len(arrays) :] for step in each) and n > 1
        if unfit or len(walk.shape) > DIMS:
            return Ready(False, (0,), BLOCK, None, passing, outs, limits, kept_of(inputs), numbered)
        if not n:
            return Ready(None, (0,), BLOCK, None, passing, outs, limits, kept_of(inputs), numbered)
        results = [np.dtype(each).name for each in kinds]
        lanes = pointwise_source.lanes_of([*[x.dtype.name for x in arrays], *results])
        small = pointwise_plan.small(walk)
        wide = small and pointwise_plan.vectors(walk, len(self.outs), lanes)
        key = xp, (*names,), (*results,)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = loaded(xp, self.text(names, results), f"ddp_{self.name}", OPTIONS)
        numbers = np.zeros(4 + DIMS * (1 + len(walk.steps)), np.int64)
        numbers[:4] = n, len(walk.shape), wide, small
        for a, each in enumerate((walk.shape, *walk.steps)):
            numbers[4 + DIMS * a : 4 + DIMS * a + len(each)] = each
        grid = (min(-(-n // (lanes * THREADS if wide else THREADS)), BLOCKS),)
        return Ready(kernel, grid, BLOCK, plan(xp, numbers), passing, outs, limits, kept_of(inputs), numbered)


def _like(arrays: Sequence[Array], shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """In which order of dimensions the results lie, None for the usual one, and their steps: as the operands lie."""
    usual = pointwise_plan.row_major(shape)
    like = next((x for x in arrays if x.shape == shape), None)
    if like is None or not math.prod(shape) or steps_of(like) == usual:
        return None, usual
    order = pointwise_plan.dense(shape, steps_of(like))
    if order is None or order == tuple(range(len(shape))):
        return None, usual
    moved = pointwise_plan.row_major(tuple(shape[d] for d in order))
    return order, tuple(moved[order.index(d)] for d in range(len(shape)))


def _ordered(xp: Any, shape: tuple[int, ...], kind: Any, order: Any) -> Array:
    """A new array whose memory has its dimensions in `order`: channels last stay last."""
    whole = xp.ndarray(tuple([shape[d] for d in order]), kind)
    return whole.transpose([order.index(d) for d in range(len(order))])


def _limits(dtype: Any) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def joint_of(arrays: Sequence[Array]) -> Any:
    """The dtype of the results: of operands beside each other, that of the first that is no bool."""
    return next((x.dtype for x in arrays if x.dtype.kind != "b"), arrays[0].dtype)
