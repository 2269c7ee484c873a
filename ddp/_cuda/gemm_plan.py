"""A product that cuBLASLt has been asked about once: its description, layouts and algorithm, ready to be launched.

The library is asked for its best algorithm when a combination of shapes, strides, dtypes and alignments first comes;
from then on such a product is one call with prepared arguments. The library counts columns first, and so a row-major
`D = A @ B` is told to it as `D^T = B^T @ A^T`: nothing moves, and "rows" below are the columns of our matrices.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double, c_float
from math import prod
from typing import Any, NamedTuple

from ddp._cuda.cublaslt import (
    COMPUTE_32F,
    COMPUTE_32F_FAST_TF32,
    COMPUTE_64F,
    DESC,
    EPILOGUES,
    LAYOUT,
    OP_N,
    OP_T,
    PREFERENCE,
    REDUCTION_COMPUTE_TYPE,
    REDUCTION_MASK,
    SUCCESS,
    TYPES,
    Algorithm,
    LtLibrary,
)
from ddp.errors import DeviceError

Launch = Callable[[int, int, int, int, int, int, int], None]  # A, B, D, bias, aux, workspace, stream: addresses

# alpha and beta are read when the call is made, from memory that lives as long as the process.
_FACTORS: dict[int, Any] = {
    0: (c_float * 2)(0.0, 1.0),
    1: (c_double * 2)(0.0, 1.0),
}


class MatrixSpec(NamedTuple):
    """One matrix of a product, as the library sees it.

    turned: whether it lies the other way round than it is multiplied; lead, step: elements to the next column, matrix.
    aligned: bytes; of the first matrix
    """

    dtype: str
    turned: bool
    lead: int
    step: int
    aligned: int


class MatmulSpec(NamedTuple):
    """A product (m, k) @ (k, n) in the library's order. epilogue: a name of lt.EPILOGUES

    added: D is added to what is there; bias_aligned: bytes; aux_lead: of the epilogue's second matrix, 0 for none
    tf32: float32 factors may be rounded to 10 bits of mantissa; room: bytes of workspace that may be used
    """

    m: int
    n: int
    k: int
    many: int
    a: MatrixSpec
    b: MatrixSpec
    d: MatrixSpec
    tf32: bool = False
    added: bool = False
    epilogue: str = "DEFAULT"
    bias_aligned: int = 0
    aux_lead: int = 0
    room: int = 0


class UnsupportedMatmul(Exception):
    """The library has no algorithm for this. status: its own, SUCCESS if it only found none"""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LtMatmul:
    """A product ready to be launched, and the library's objects, which it frees.

    launch: does it; room: whether it needs the workspace. Raises: Unsupported, DeviceError.
    """

    __slots__ = ("_library", "_objects", "launch", "room")

    def __init__(self, library: LtLibrary, handle: int, spec: MatmulSpec) -> None:
        self._library = library
        self._objects: list[tuple[str, int]] = []  # by the function that frees them
        compute = {"float64": COMPUTE_64F, "float32": COMPUTE_32F_FAST_TF32 if spec.tf32 else COMPUTE_32F}
        scale = TYPES["float64" if spec.a.dtype == "float64" else "float32"]
        desc = self._made("cublasLtMatmulDesc", compute.get(spec.a.dtype, COMPUTE_32F), scale)
        setting = "cublasLtMatmulDescSetAttribute"
        library.set(setting, desc, DESC["TRANSA"], OP_T if spec.a.turned else OP_N)
        library.set(setting, desc, DESC["TRANSB"], OP_T if spec.b.turned else OP_N)
        library.set(setting, desc, DESC["EPILOGUE"], EPILOGUES[spec.epilogue])
        if spec.bias_aligned:  # only its alignment is looked at until something is launched
            library.set(setting, desc, DESC["BIAS_POINTER"], spec.bias_aligned)
        if spec.aux_lead:
            library.set(setting, desc, DESC["EPILOGUE_AUX_POINTER"], 256)
            library.set(setting, desc, DESC["EPILOGUE_AUX_LD"], spec.aux_lead)
        a = self._layout(spec.a, spec.m, spec.k, spec.many)
        b = self._layout(spec.b, spec.k, spec.n, spec.many)
        d = self._layout(spec.d, spec.m, spec.n, spec.many)
        found = self._algorithm(handle, spec, desc, a, b, d)
        self.room = found.workspace > 0
        self.launch = self._prepared(handle, spec, desc, (a, b, d), found)

    def __del__(self, _over: Callable[[], bool] = sys.is_finalizing) -> None:
        for name, target in () if _over() else self._objects:
            self._library.call(name, target)

    def _made(self, kind: str, *arguments: Any) -> int:
        made = self._library.create(f"{kind}Create", *arguments)
        self._objects.append((f"{kind}Destroy", made))
        return made

    def _layout(self, side: MatrixSpec, rows: int, columns: int, count: int) -> int:
        if side.turned:
            rows, columns = columns, rows
        made = self._made("cublasLtMatrixLayout", TYPES[side.dtype], rows, columns, side.lead)
        if count > 1:
            setting = "cublasLtMatrixLayoutSetAttribute"
            self._library.set(setting, made, LAYOUT["BATCH_COUNT"], count)
            self._library.set(setting, made, LAYOUT["STRIDED_BATCH_OFFSET"], side.step)
        return made

    def _algorithm(self, handle: int, spec: MatmulSpec, desc: int, a: int, b: int, d: int) -> Algorithm:
        library = self._library
        preference = library.create("cublasLtMatmulPreferenceCreate")
        try:
            # Sums of parts of a 16-bit product are added up in float32.
            narrow = spec.d.dtype in ("float16", "bfloat16")
            wanted = {
                "MAX_WORKSPACE_BYTES": spec.room,
                "REDUCTION_SCHEME_MASK": REDUCTION_COMPUTE_TYPE if narrow else REDUCTION_MASK,
                "MIN_ALIGNMENT_A_BYTES": spec.a.aligned,
                "MIN_ALIGNMENT_B_BYTES": spec.b.aligned,
                "MIN_ALIGNMENT_C_BYTES": spec.d.aligned,
                "MIN_ALIGNMENT_D_BYTES": spec.d.aligned,
            }
            for name, value in wanted.items():
                library.set("cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE[name], value)
            found, count = Algorithm(), ctypes.c_int()
            at, many = ctypes.addressof(found), ctypes.addressof(count)
            status = library.call("cublasLtMatmulAlgoGetHeuristic", handle, desc, a, b, d, d, preference, 1, at, many)
        finally:
            library.call("cublasLtMatmulPreferenceDestroy", preference)
        if status != SUCCESS or not count.value or found.state != SUCCESS:
            told = status or found.state
            words = library.explain(told) if told else "it found none"
            raise UnsupportedMatmul(told, f"{library!r} has no algorithm for {spec}: {words}")
        return found

    def _prepared(
        self, handle: int, spec: MatmulSpec, desc: int, layouts: tuple[int, int, int], found: Algorithm
    ) -> Launch:
        library, matmul = self._library, self._library.matmul
        a_layout, b_layout, d_layout = layouts
        factors = _FACTORS[TYPES["float64" if spec.a.dtype == "float64" else "float32"]]
        one = ctypes.addressof(factors) + ctypes.sizeof(factors) // 2
        beta = one if spec.added else ctypes.addressof(factors)
        algorithm = ctypes.addressof(found)
        size = found.workspace

        def launch(a: int, b: int, d: int, bias: int, aux: int, room: int, stream: int, found: Any = found) -> None:
            status = matmul(
                handle,
                desc,
                one,
                a,
                a_layout,
                b,
                b_layout,
                beta,
                d,
                d_layout,
                d,
                d_layout,
                algorithm,
                room,
                size,
                stream,
            )
            if status:
                raise DeviceError(f"cublasLtMatmul: {library.explain(status)}; the product is {spec}")

        if not spec.bias_aligned and not spec.aux_lead:
            return launch
        # The library takes these two addresses from the description, which threads share.
        lock, last = threading.Lock(), [0, 0]

        def launch_with(a: int, b: int, d: int, bias: int, aux: int, room: int, stream: int) -> None:
            with lock:
                if bias != last[0]:
                    library.set("cublasLtMatmulDescSetAttribute", desc, DESC["BIAS_POINTER"], bias)
                    last[0] = bias
                if aux != last[1]:
                    library.set("cublasLtMatmulDescSetAttribute", desc, DESC["EPILOGUE_AUX_POINTER"], aux)
                    last[1] = aux
                launch(a, b, d, bias, aux, room, stream)

        return launch_with


# How matrices lie in memory, as cuBLASLt wants to hear it: pure, so that the test is the table.
#
# A matrix is taken as it is if its elements lie side by side along one axis and forward along the other: so a transpose
# costs nothing. Leading axes are one batch if one stride leads from each matrix to the next; 0 is a stride, too.

LOOPS = 16  # products that are rather launched one by one than having a factor copied
MOST = (1 << 31) - 1  # rows, columns or matrices of one product

#: What a pointer's last byte says of its alignment in bytes, as far as the library cares.
ALIGNMENTS = tuple(next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if byte % size == 0) for byte in range(256))


class MatrixLayout(NamedTuple):
    """across: elements of a column, not of a row, are neighbours; lead: elements from one row or column to the next."""

    across: bool
    lead: int


def elements(strides: Sequence[int], itemsize: int) -> tuple[int, ...] | None:
    """Strides in elements; None if one is not a whole number of them."""
    return None if any(each % itemsize for each in strides) else tuple([each // itemsize for each in strides])


def matrix_layout(shape: Sequence[int], strides: Sequence[int]) -> MatrixLayout | None:
    """How a matrix lies, None if it must be copied. strides: in elements."""
    (rows, columns), (down, right) = shape, strides
    if (right == 1 or columns == 1) and (down >= max(columns, 1) or rows == 1):
        return MatrixLayout(False, down if rows > 1 else max(columns, 1))
    if (down == 1 or rows == 1) and (right >= max(rows, 1) or columns == 1):
        return MatrixLayout(True, right if columns > 1 else max(rows, 1))
    return None


def one_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride from each matrix of leading axes to the next, None if there is no single one."""
    merged = _merged(shape, [strides])
    if not merged:
        return 0
    return merged[0][1][0] if len(merged) == 1 else None


class StridedBatch(NamedTuple):
    """One product of `many` matrices for each of `starts`, where each operand begins; steps: from each to the next."""

    many: int
    steps: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


def strided_batch(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> StridedBatch | None:
    """Leading axes as batches; strides: of each operand, in elements. None if that takes more than LOOPS products."""
    axes = _merged(shape, strides)
    if not axes:
        return StridedBatch(1, (0,) * len(strides), ((0,) * len(strides),))
    widest = max(range(len(axes)), key=lambda i: axes[i][0])
    count, steps = axes.pop(widest)
    if prod([size for size, _ in axes]) > LOOPS or count > MOST or any(step < 0 for step in steps):
        return None
    return StridedBatch(count, steps, tuple(_starts(axes, len(strides))))


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """The axes, outermost first, without those of one element; two are one where no operand can tell them apart."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in reversed(list(zip(shape, *strides, strict=True))):
        if size == 1:
            continue
        if found:
            inner, inner_steps = found[-1]
            if all(step == below * inner for step, below in zip(steps, inner_steps, strict=True)):
                found[-1] = (inner * size, inner_steps)
                continue
        found.append((size, tuple(steps)))
    return found[::-1]


def _starts(axes: Sequence[tuple[int, tuple[int, ...]]], operands: int) -> Iterator[tuple[int, ...]]:
    if not axes:
        yield (0,) * operands
        return
    (size, steps), *rest = axes
    for i in range(size):
        for inner in _starts(rest, operands):
            yield tuple([i * step + start for step, start in zip(steps, inner, strict=True)])
