"""A product that cuBLASLt has been asked about once: its description, layouts and algorithm, ready to be launched.

The library is asked for its best algorithm when a combination of shapes, strides, dtypes and alignments first comes;
from then on such a product is one call with prepared arguments. The library counts columns first, and so a row-major
`D = A @ B` is told to it as `D^T = B^T @ A^T`: nothing moves, and "rows" below are the columns of our matrices.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from ctypes import c_double, c_float
from typing import Any, NamedTuple

from ddp._gpu.lt import (
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
    Library,
)
from ddp.errors import DeviceError

Launch = Callable[[int, int, int, int, int, int, int], None]  # A, B, D, bias, aux, workspace, stream: addresses

# alpha and beta are read when the call is made, from memory that lives as long as the process.
_FACTORS: dict[int, Any] = {
    0: (c_float * 2)(0.0, 1.0),
    1: (c_double * 2)(0.0, 1.0),
}


class Side(NamedTuple):
    """One matrix of a product, as the library sees it.

    turned: whether it lies the other way round than it is multiplied; lead, step: elements to the next column, matrix.
    aligned: bytes; of the first matrix
    """

    dtype: str
    turned: bool
    lead: int
    step: int
    aligned: int


class Spec(NamedTuple):
    """A product (m, k) @ (k, n) in the library's order. epilogue: a name of lt.EPILOGUES

    added: D is added to what is there; bias_aligned: bytes; aux_lead: of the epilogue's second matrix, 0 for none
    tf32: float32 factors may be rounded to 10 bits of mantissa; room: bytes of workspace that may be used
    """

    m: int
    n: int
    k: int
    many: int
    a: Side
    b: Side
    d: Side
    tf32: bool = False
    added: bool = False
    epilogue: str = "DEFAULT"
    bias_aligned: int = 0
    aux_lead: int = 0
    room: int = 0


class Unsupported(Exception):
    """The library has no algorithm for this. status: its own, SUCCESS if it only found none"""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Plan:
    """A product ready to be launched, and the library's objects, which it frees.

    launch: does it; room: whether it needs the workspace. Raises: Unsupported, DeviceError.
    """

    __slots__ = ("_library", "_objects", "launch", "room")

    def __init__(self, library: Library, handle: int, spec: Spec) -> None:
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

    def _layout(self, side: Side, rows: int, columns: int, count: int) -> int:
        if side.turned:
            rows, columns = columns, rows
        made = self._made("cublasLtMatrixLayout", TYPES[side.dtype], rows, columns, side.lead)
        if count > 1:
            setting = "cublasLtMatrixLayoutSetAttribute"
            self._library.set(setting, made, LAYOUT["BATCH_COUNT"], count)
            self._library.set(setting, made, LAYOUT["STRIDED_BATCH_OFFSET"], side.step)
        return made

    def _algorithm(self, handle: int, spec: Spec, desc: int, a: int, b: int, d: int) -> Algorithm:
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
            raise Unsupported(told, f"{library!r} has no algorithm for {spec}: {words}")
        return found

    def _prepared(self, handle: int, spec: Spec, desc: int, layouts: tuple[int, int, int], found: Algorithm) -> Launch:
        library, matmul = self._library, self._library.matmul
        a_layout, b_layout, d_layout = layouts
        factors = _FACTORS[TYPES["float64" if spec.a.dtype == "float64" else "float32"]]
        one = ctypes.addressof(factors) + ctypes.sizeof(factors) // 2
        beta = one if spec.added else ctypes.addressof(factors)
        algorithm = ctypes.addressof(found)
        size = found.workspace

        def launch(a: int, b: int, d: int, bias: int, aux: int, room: int, stream: int, found: Any = found) -> None:
            # fmt: off
            status = matmul(
                handle, desc, one, a, a_layout, b, b_layout, beta, d, d_layout, d, d_layout, algorithm, room, size,
                stream,
            )
            # fmt: on
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
