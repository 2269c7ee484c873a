"""Reductions of a formula over axes, by kernels that know their shapes as the elementwise ones do.

One launch, or where few results take many elements each two: all are cut into chunks, and the chunks are joined. The
order depends on sizes alone, so that every run gives the same digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp._device import capturing
from ddp.ops._op import Array
from ddp.ops.cuda import pointwise_plan, pointwise_source
from ddp.ops.cuda._source import BLOCKS, THREADS, loaded, loaded_here, passes, plan
from ddp.ops.cuda.pointwise import BLOCK, KERNELS, MOST, NUMBERS, OPTIONS, Ready, joint_of, key_of, steps_of
from ddp.ops.cuda.pointwise_source import DIMS, Input, Output

WARP = (32,)


class Join(NamedTuple):
    """expression: of A a and A b; start: the result of nothing."""

    expression: str
    start: str


SUM = Join("a + b", "A(0)")
PRODUCT = Join("a * b", "A(1)")
LARGEST = Join("a > b || a != a ? a : b", "LOWEST")
SMALLEST = Join("a < b || a != a ? a : b", "-(LOWEST)")


class Reducing:
    """A reduction of a formula `v` of `ins` over axes.

    end: what becomes of the joined `v`, with `numbers` at hand, as `body` has them, too.
    """

    def __init__(
        self, name: str, ins: Sequence[str], body: str, join: Join = SUM, end: str = "v", numbers: Sequence[str] = ()
    ) -> None:
        assert name not in KERNELS, name
        self.name, self.ins, self.body, self.join, self.end = name, tuple(ins), body, join, end
        self.numbers = tuple(numbers)
        self._ready: dict[Any, Ready] = {}
        self._kernels: dict[Any, Any] = {}
        KERNELS[name] = self

    def text(self, dtypes: Sequence[str | None], out: str, kind: str, last: bool = True) -> str:
        """The source for inputs of these dtypes and a result of `out`, computed in `kind`; without `last`, no end."""
        ins = [Input(*each) for each in zip(self.ins, dtypes, strict=True)]
        end = self.end if last else "v"
        return pointwise_source.reduction(
            self.name, ins, Output("out", out), self.numbers, self.body, *self.join, end, kind
        )

    def __call__(
        self, xp: Any, inputs: Sequence[Any], axes: tuple[int, ...], keepdims: bool, numbers: Sequence[float] = (),
        dtype: Any = None, shape: tuple[int, ...] | None = None,
    ) -> Array:  # fmt: skip
        """The reduction over `axes` of what the inputs broadcast to. dtype: of the result; shape: the result's."""
        key = (xp, axes, keepdims, dtype, shape, *key_of(inputs))
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) >= MOST:
                self._ready.clear()
            ready = self._ready[key] = self._made(xp, inputs, axes, keepdims, dtype, shape)
        (form, kind, _), *_ = ready.outs
        out = xp.ndarray(form, kind)
        if ready.kernel is None:
            return out
        passing = ready.passing
        given: list[Any] = [x for x in inputs if type(x) not in NUMBERS]
        hosted = [passing[float](float(x)) for x in (*[x for x in inputs if type(x) in NUMBERS], *numbers)]
        if ready.then is None:
            if capturing.now is not None:
                loaded_here(ready.kernel)
            ready.kernel(ready.grid, ready.block, [*given, out, ready.plan, *hosted])
            return out
        kernel, grid, block, second, scratch = ready.then
        parts = xp.ndarray(scratch[0], scratch[1])
        if capturing.now is not None:
            loaded_here(ready.kernel, kernel)
        ready.kernel(ready.grid, ready.block, [*given, parts, ready.plan, *hosted])
        kernel(grid, block, [parts, out, second, *hosted[len(hosted) - len(numbers) :]])
        return out

    def _made(
        self, xp: Any, inputs: Sequence[Any], axes: tuple[int, ...], keepdims: bool, dtype: Any, form: Any
    ) -> Ready:
        arrays = [x for x in inputs if type(x) not in NUMBERS]
        shape = np.broadcast_shapes(*[x.shape for x in arrays])
        names = [None if type(x) in NUMBERS else x.dtype.name for x in inputs]
        out = np.dtype(dtype or joint_of(arrays))
        kind = pointwise_source.computed_in(
            [*[each for each in names if each], *(["int64"] if out.kind == "i" else [])]
        )
        if form is None:
            form = tuple(1 if d in axes else n for d, n in enumerate(shape) if keepdims or d not in axes)
        passing = passes(xp)
        rows, n = math.prod(form), math.prod(shape[d] for d in axes)
        outs = ((form, out, None),)
        if not rows:
            return Ready(None, (0,), BLOCK, None, passing, outs)
        steps = [pointwise_plan.aligned(shape, x.shape, steps_of(x)) for x in arrays]
        walks = pointwise_plan.split(shape, steps, axes)
        nearest = [min([abs(s) for s, m in zip(w.steps[0], w.shape, strict=True) if s and m > 1], default=1 << 62)
                   for w in walks]  # fmt: skip
        block, chunks = pointwise_plan.team(rows, n, nearest[1] < nearest[0])
        length = max(-(-n // chunks), 1)
        chunks = max(-(-n // length), 1)
        small = all(pointwise_plan.small(walk) for walk in walks) and rows * chunks < 2**31 and math.prod(shape) < 2**31
        if chunks == 1:
            kernel = self._kernel(xp, names, out.name, kind, True, block)
            given = _numbers(rows, n, 1, length, small, walks)
            return Ready(kernel, *_grid(rows, n, block), plan(xp, given), passing, outs)
        kernel = self._kernel(xp, names, _HELD[kind], kind, False, block)
        first = plan(xp, _numbers(rows, n, chunks, length, small, walks))
        again = pointwise_plan.split((chunks, rows), [(rows, 1)], (0,))
        second = self._second()._kernel(xp, [_HELD[kind]], out.name, kind, True, rows < 8192)
        then = (
            second,
            *_grid(rows, chunks, rows < 8192),
            plan(xp, _numbers(rows, chunks, 1, chunks, True, again)),
            ((chunks, rows), np.dtype(_HELD[kind])),
        )
        return Ready(kernel, *_grid(rows * chunks, length, block), first, passing, outs, None, then)

    def _second(self) -> Reducing:
        """What joins the chunks."""
        found = KERNELS.get(f"{self.name}_joined")
        if found is None:
            found = Reducing(f"{self.name}_joined", ("x",), "v = x;", self.join, self.end, self.numbers)
        assert isinstance(found, Reducing)
        return found

    def _kernel(self, xp: Any, names: Sequence[str | None], out: str, kind: str, last: bool, block: bool) -> Any:
        key = xp, (*names,), out, kind, last, block
        kernel = self._kernels.get(key)
        if kernel is None:
            entry = f"ddp_{self.name}_{'along' if block else 'across'}"
            kernel = self._kernels[key] = loaded(xp, self.text(names, out, kind, last), entry, OPTIONS)
        return kernel


_HELD = {"float": "float32", "double": "float64", "int": "int32", "long long": "int64"}


def _grid(rows: int, n: int, block: bool) -> tuple[tuple[int], tuple[int]]:
    if block:
        return (min(rows, BLOCKS),), WARP if n <= 128 else BLOCK
    return (min(-(-rows // THREADS), BLOCKS),), BLOCK


def _numbers(rows: int, n: int, chunks: int, length: int, small: bool, walks: pointwise_plan.Reduction) -> Any:
    arrays = len(walks.kept.steps)
    head = 7 + 2 * DIMS
    assert max(len(walk.shape) for walk in walks) <= DIMS, f"more than {DIMS} dimensions in memory"
    numbers = np.zeros(head + 2 * arrays * DIMS, np.int64)
    numbers[:6] = rows, n, chunks, length, small, len(walks.kept.shape)
    numbers[6 : 6 + len(walks.kept.shape)] = walks.kept.shape
    numbers[6 + DIMS] = len(walks.over.shape)
    numbers[7 + DIMS : 7 + DIMS + len(walks.over.shape)] = walks.over.shape
    for half, walk in enumerate(walks):
        for a, steps in enumerate(walk.steps):
            at = head + (half * arrays + a) * DIMS
            numbers[at : at + len(steps)] = steps
    return numbers
