"""How products of arrays that lie alike are made, and what is to be known of arrays for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp._gpu import lt
from ddp._gpu.gemm_layout import ALIGNMENTS, Lying, elements, lying
from ddp._gpu.gemm_plan import Plan

Array = Any
Made = Callable[[Any, Array, Array, "Array | None", bool], "Array | None"]


class Recipe:
    """How to make products of arrays that lie alike. launch: None where `made` has to do it in another way

    starts: where the operands of each product begin, in bytes; empty if there is but one, at the beginning
    """

    __slots__ = ("dtype", "launch", "made", "plan", "room", "shape", "starts")

    def __init__(self, shape: tuple[int, ...], dtype: Any, plan: Plan | None, made: Made | None = None) -> None:
        self.shape, self.dtype, self.plan, self.made = shape, dtype, plan, made
        self.launch = None if plan is None else plan.launch
        self.room = plan is not None and plan.room
        self.starts: tuple[tuple[int, ...], ...] = ()


def takes(a: Any, b: Any, out: Any) -> bool:
    """Whether the library multiplies these dtypes; what is of 16 bits may also be added up in a float32 result."""
    return bool(a == b and a.name in lt.TYPES and (out == a or (out.name == "float32" and a.itemsize == 2)))


def how_it_lies(x: Array, size: int) -> Lying | None:
    """How the matrices of x lie, None if they must be copied. size: bytes of an element"""
    strides = elements(x.strides[-2:], size)
    return None if strides is None else lying(x.shape[-2:], strides)


def broadcast_strides(x: Array, lead: int) -> tuple[int, ...]:
    """Strides in bytes of x with `lead` leading axes, 0 where it is broadcast."""
    own = [0 if size == 1 else stride for size, stride in zip(x.shape[:-2], x.strides[:-2], strict=True)]
    return (*(0,) * (lead - len(own)), *own)


def contiguous_strides(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in bytes of a new array."""
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return tuple(reversed(strides))


def in_bytes(start: tuple[int, ...], *sizes: int) -> tuple[int, ...]:
    """Where operands begin, by the sizes of their elements."""
    return tuple([each * size for each, size in zip(start, sizes, strict=True)])


def alignment(x: Array | None, starts: list[int] | None = None) -> int:
    """The alignment in bytes that all of `starts` have; fresh memory has the best."""
    at = 0 if x is None else x.data.ptr
    return min(ALIGNMENTS[(at + start) & 255] for start in starts or [0])
