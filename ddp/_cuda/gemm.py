"""Matrix products on a GPU by cuBLASLt: `gemm`, for arrays as they lie, with an epilogue where the library has one.

The library is asked for its best algorithm when a combination of shapes, strides, dtypes and alignments first comes;
from then on such a product is a look-up, an allocation and one call with prepared arguments. The library counts columns
first, so a row-major `D = A @ B` is given to it as `D^T = B^T @ A^T`: nothing moves. Everything goes to the current
stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ddp._cuda import capture, cublaslt
from ddp._cuda.cublaslt import DESC, EPILOGUES, LAYOUT, PREFERENCE, SUCCESS, TYPES, Algorithm, LtLibrary
from ddp._precision import matmul as precision
from ddp.errors import DeviceError

Array = Any

KEPT = 4096  # plans; a network whose shapes change all the time forgets the oldest half
MOST = (1 << 31) - 1  # rows, columns or matrices of one product
#: The alignment in bytes that follows from an address's last byte, as far as the library distinguishes.
ALIGNMENTS = tuple(next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if byte % size == 0) for byte in range(256))

_plans: dict[Any, Callable[..., Array | None]] = {}


def gemm(
    xp: Any,
    a: Array,
    b: Array,
    out: Array | None = None,
    accumulate: bool = False,
    epilogue: str = "DEFAULT",
    vector: Array | None = None,
    aux: Array | None = None,
    aux_lead: int = 0,
) -> Array | None:
    """a @ b by the rules of NumPy's matmul, into `out` if given; with `accumulate`, added to what is there.

    epilogue: a name of `cublaslt.EPILOGUES`, for matrices with `out`; vector: a bias of out.shape[1] elements, or where
    the bias gradient goes; aux: what the epilogue writes for its backward, or reads there, with rows of `aux_lead`
    elements (bits for ReLU). Returns None, and nothing was done, if there are no elements, or cuBLASLt lacks the dtype
    or the epilogue.
    """
    key = (
        *(a.shape, a.strides, a.dtype, ALIGNMENTS[a.data.ptr & 255], b.shape, b.strides, b.dtype),
        *(ALIGNMENTS[b.data.ptr & 255], a.data.device_id, precision.tf32),
        None if out is None else (out.shape, out.strides, out.dtype, ALIGNMENTS[out.data.ptr & 255], accumulate),
        *(epilogue, 0 if vector is None else ALIGNMENTS[vector.data.ptr & 255], aux_lead),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= KEPT:
            for old in list(_plans)[: KEPT // 2]:
                _plans.pop(old, None)
        plan = _plans[key] = _plan(xp, a, b, out, accumulate, epilogue, vector, aux_lead)
    return plan(xp, a, b, out, accumulate, vector, aux)


def _plan(
    xp: Any,
    a: Array,
    b: Array,
    out: Array | None,
    accumulate: bool,
    epilogue: str,
    vector: Array | None,
    aux_lead: int,
) -> Callable[..., Array | None]:
    """How products of arrays that lie as these do are made."""
    if a.ndim == 1 or b.ndim == 1:
        return _of_vectors
    library = cublaslt.library(xp)
    dtype = a.dtype if out is None else out.dtype
    if library is None or not _takes(a.dtype, b.dtype, dtype):
        return _unsupported
    (m, k), (inner, n) = a.shape[-2:], b.shape[-2:]
    assert k == inner, (a.shape, b.shape)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape, fused = (*lead, m, n), epilogue != "DEFAULT"
    assert out is None or out.shape == shape, (out.shape, shape)
    if 0 in (*shape, k) or max(m, n, k, prod(lead)) > MOST:
        return _unsupported
    of_a, of_b = matrix_layout(a), matrix_layout(b)
    of_out = MatrixLayout(False, n) if out is None else matrix_layout(out)
    step_a, step_b = batch_step(lead, a), batch_step(lead, b)
    step_out = m * n if out is None else batch_step(lead, out)
    if of_out is None or of_out.turned or step_out is None:
        return _unsupported if fused else _into_copy
    if of_a is None or of_b is None or step_a is None or step_b is None:
        return _unsupported if fused else _copied(lead, (of_a, step_a), (of_b, step_b))
    spec = MatmulSpec(
        *(n, m, k, prod(lead)),
        a=MatrixSpec(b.dtype.name, of_b.turned, of_b.lead, step_b, ALIGNMENTS[b.data.ptr & 255]),
        b=MatrixSpec(a.dtype.name, of_a.turned, of_a.lead, step_a, ALIGNMENTS[a.data.ptr & 255]),
        d=MatrixSpec(dtype.name, False, of_out.lead, step_out, 256 if out is None else ALIGNMENTS[out.data.ptr & 255]),
        tf32=precision.tf32,
        added=accumulate,
        epilogue=epilogue,
        bias_aligned=0 if vector is None else ALIGNMENTS[vector.data.ptr & 255],
        aux_lead=aux_lead,
        workspace=workspace_size(xp, a.data.device_id),
    )
    try:
        return MatmulPlan(library, library.handle(a.data.device_id), spec, shape, dtype)
    except UnsupportedMatmul as error:
        if not fused:  # not every epilogue exists for every dtype and layout: the caller computes the parts
            warnings.warn(f"a slow kernel multiplies instead: {error}", RuntimeWarning, stacklevel=3)
        return _unsupported


def _takes(a: Any, b: Any, out: Any) -> bool:
    """Whether the library multiplies these dtypes; a product of 16 bits may also be added up in a float32 result."""
    return bool(a == b and a.name in TYPES and (out == a or (out.name == "float32" and a.itemsize == 2)))


# Other ways to make a product than one call of the library. vector, aux: not used; the signature is MatmulPlan's.


def _unsupported(*_: Any) -> None:
    return None


def _of_vectors(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool, *_: Any) -> Array | None:
    """A vector is a matrix of one row on the left, of one column on the right."""
    left, right = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    made = gemm(xp, left, right)
    if made is None:
        return None
    shape = (*made.shape[:-2], *(made.shape[-2:-1] if a.ndim > 1 else ()), *(made.shape[-1:] if b.ndim > 1 else ()))
    return _assign(made.reshape(shape), out, accumulate)


def _into_copy(xp: Any, a: Array, b: Array, out: Array, accumulate: bool, *_: Any) -> Array | None:
    """Into memory that the library cannot write to as it lies."""
    made = gemm(xp, a, b)
    return None if made is None else _assign(made, out, accumulate)


def _copied(lead: tuple[int, ...], *operands: tuple[MatrixLayout | None, int | None]) -> Callable[..., Array | None]:
    """The product after a copy of each operand that the library cannot read as it lies. operands: layout and step"""

    def run(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool, *_: Any) -> Array | None:
        factors = []
        for x, (layout, step) in zip((a, b), operands, strict=True):
            if step is None:  # broadcast along some of several axes, say
                x = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
            factors.append(xp.array(x, order="C") if layout is None or step is None else x)
        return gemm(xp, factors[0], factors[1], out, accumulate)

    return run


def _assign(made: Array, out: Array | None, accumulate: bool) -> Array:
    if out is None:
        return made
    if accumulate:
        out += made
    else:
        out[...] = made
    return out


# How matrices lie in memory: pure, so that the test is the table.


class MatrixLayout(NamedTuple):
    """turned: columns, not rows, lie in one piece; lead: elements from one row or column to the next."""

    turned: bool
    lead: int


def matrix_layout(x: Array) -> MatrixLayout | None:
    """How the matrices of x lie; None if they must be copied: elements have to be neighbours along one axis."""
    (rows, columns), size = x.shape[-2:], x.dtype.itemsize
    if any(stride % size for stride in x.strides):
        return None
    down, right = (stride // size for stride in x.strides[-2:])
    if (right == 1 or columns == 1) and (down >= max(columns, 1) or rows == 1):
        return MatrixLayout(False, down if rows > 1 else max(columns, 1))
    if (down == 1 or rows == 1) and (right >= max(rows, 1) or columns == 1):
        return MatrixLayout(True, right if columns > 1 else max(rows, 1))
    return None


def batch_step(lead: Sequence[int], x: Array) -> int | None:
    """Elements from each matrix of x to the next, 0 where one serves all; None if there is no single stride.

    lead: the leading axes of the product, of which x may lack some, or have 1
    """
    missing = len(lead) - (x.ndim - 2)
    sizes, strides = (1,) * missing + x.shape[:-2], (0,) * missing + x.strides[:-2]
    step, count = None, 1
    for whole, own, stride in reversed(list(zip(lead, sizes, strides, strict=True))):
        if whole == 1:
            continue
        stride = 0 if own == 1 else stride
        if step is None:
            step = stride
        elif stride != step * count:
            return None
        count *= whole
    step = step or 0
    return None if step < 0 or step % x.dtype.itemsize else step // x.dtype.itemsize


class MatrixSpec(NamedTuple):
    """One matrix in the library's order. lead, step: elements to the next column, matrix; aligned: bytes."""

    dtype: str
    turned: bool
    lead: int
    step: int
    aligned: int


class MatmulSpec(NamedTuple):
    """A product (m, k) @ (k, n) in the library's order. epilogue: a name of `cublaslt.EPILOGUES`

    added: D is added to what is there; bias_aligned: bytes; aux_lead: of the epilogue's second matrix, 0 for none
    tf32: float32 factors may be rounded to 10 bits of mantissa; workspace: bytes that may be used
    """

    m: int
    n: int
    k: int
    batch: int
    a: MatrixSpec
    b: MatrixSpec
    d: MatrixSpec
    tf32: bool = False
    added: bool = False
    epilogue: str = "DEFAULT"
    bias_aligned: int = 0
    aux_lead: int = 0
    workspace: int = 0


class UnsupportedMatmul(Exception):
    """The library has no algorithm for this."""


# alpha and beta are read when the call is made, from memory that lives as long as the process: (0, 1) of each type.
_FACTORS: dict[str, Any] = {"float32": (c_float * 2)(0.0, 1.0), "float64": (c_double * 2)(0.0, 1.0)}


class MatmulPlan:
    """A product that the library was asked about: its description, layouts and algorithm, ready to be launched.

    Raises: UnsupportedMatmul, DeviceError.
    """

    def __init__(self, library: LtLibrary, handle: int, spec: MatmulSpec, shape: tuple[int, ...], dtype: Any) -> None:
        self._library, self._spec, self._shape, self._dtype = library, spec, shape, dtype
        self._objects: list[tuple[str, int]] = []  # by the function that frees them
        self._lock, self._pointers = threading.Lock(), [0, 0]  # the description holds them, and threads share it
        self._computes_in = "float64" if spec.a.dtype == "float64" else "float32"
        self._desc = self._description()
        a = self._layout(spec.a, spec.m, spec.k)
        b = self._layout(spec.b, spec.k, spec.n)
        self._layouts = a, b, self._layout(spec.d, spec.m, spec.n)
        self._algorithm = self._find_algorithm(handle)
        factors = _FACTORS[self._computes_in]
        self._handle, self._alpha = handle, ctypes.addressof(factors) + ctypes.sizeof(factors) // 2
        self._beta = self._alpha if spec.added else ctypes.addressof(factors)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        for name, target in () if _ending() else self._objects:
            self._library.call(name, target)

    def __call__(
        self, xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool, vector: Array | None, aux: Array | None
    ) -> Array:
        """Launches the product on the current stream."""
        if out is None:
            out = xp.ndarray(self._shape, self._dtype)
        if vector is None and aux is None:
            self._launch(xp, a, b, out)
            return out
        pointers = [0 if each is None else each.data.ptr for each in (vector, aux)]
        with self._lock:
            for i, name in enumerate(("BIAS_POINTER", "EPILOGUE_AUX_POINTER")):
                if pointers[i] != self._pointers[i]:
                    self._library.set("cublasLtMatmulDescSetAttribute", self._desc, DESC[name], pointers[i])
            self._pointers = pointers
            self._launch(xp, a, b, out)
        return out

    def _launch(self, xp: Any, a: Array, b: Array, out: Array) -> None:
        stream, found = xp.cuda.get_current_stream().ptr, self._algorithm
        scratch = workspace(xp, a.data.device_id, stream) if found.workspace else 0
        (of_a, of_b, of_d), at = self._layouts, out.data.ptr
        factors = b.data.ptr, of_a, a.data.ptr, of_b
        how = ctypes.addressof(found), scratch, found.workspace, stream
        status = self._library.matmul(
            self._handle, self._desc, self._alpha, *factors, self._beta, at, of_d, at, of_d, *how
        )
        if status:
            raise DeviceError(f"cublasLtMatmul: {self._library.explain(status)}; the product is {self._spec}")

    def _make(self, kind: str, *arguments: Any) -> int:
        made = self._library.create(f"{kind}Create", *arguments)
        self._objects.append((f"{kind}Destroy", made))
        return made

    def _description(self) -> int:
        spec = self._spec
        compute = cublaslt.COMPUTE_64F if self._computes_in == "float64" else cublaslt.COMPUTE_32F
        if spec.tf32 and spec.a.dtype == "float32":
            compute = cublaslt.COMPUTE_32F_FAST_TF32
        desc = self._make("cublasLtMatmulDesc", compute, TYPES[self._computes_in])
        values = {"TRANSA": int(spec.a.turned), "TRANSB": int(spec.b.turned), "EPILOGUE": EPILOGUES[spec.epilogue]}
        if spec.bias_aligned:  # only its alignment counts until something is launched
            values["BIAS_POINTER"] = spec.bias_aligned
        if spec.aux_lead:
            values |= {"EPILOGUE_AUX_POINTER": 256, "EPILOGUE_AUX_LD": spec.aux_lead}
        for name, value in values.items():
            self._library.set("cublasLtMatmulDescSetAttribute", desc, DESC[name], value)
        return desc

    def _layout(self, side: MatrixSpec, rows: int, columns: int) -> int:
        if side.turned:
            rows, columns = columns, rows
        made = self._make("cublasLtMatrixLayout", TYPES[side.dtype], rows, columns, side.lead)
        if self._spec.batch > 1:
            for name, value in (("BATCH_COUNT", self._spec.batch), ("STRIDED_BATCH_OFFSET", side.step)):
                self._library.set("cublasLtMatrixLayoutSetAttribute", made, LAYOUT[name], value)
        return made

    def _find_algorithm(self, handle: int) -> Algorithm:
        library, spec, (a, b, d) = self._library, self._spec, self._layouts
        # Sums of parts of a 16-bit product are added up in float32.
        narrow = spec.d.dtype in ("float16", "bfloat16")
        wanted = {
            "MAX_WORKSPACE_BYTES": spec.workspace,
            "REDUCTION_SCHEME_MASK": cublaslt.REDUCTION_COMPUTE_TYPE if narrow else cublaslt.REDUCTION_MASK,
            "MIN_ALIGNMENT_A_BYTES": spec.a.aligned,
            "MIN_ALIGNMENT_B_BYTES": spec.b.aligned,
            "MIN_ALIGNMENT_C_BYTES": spec.d.aligned,
            "MIN_ALIGNMENT_D_BYTES": spec.d.aligned,
        }
        preference = library.create("cublasLtMatmulPreferenceCreate")
        try:
            for name, value in wanted.items():
                library.set("cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE[name], value)
            found, count = Algorithm(), ctypes.c_int()
            results = ctypes.addressof(found), ctypes.addressof(count)
            status = library.call(
                "cublasLtMatmulAlgoGetHeuristic", handle, self._desc, a, b, d, d, preference, 1, *results
            )
        finally:
            library.call("cublasLtMatmulPreferenceDestroy", preference)
        status = status or found.state
        if status != SUCCESS or not count.value:
            reason = library.explain(status) if status else "it found none"
            raise UnsupportedMatmul(f"{library!r} has no algorithm for {spec}: {reason}")
        return found


# Scratch memory: some algorithms add up parts. Each stream has its own, since products of two streams may run at once;
# so has a CUDA graph, which may be replayed on any stream.

PER_THREAD = 2  # the handle of CUDA's per-thread default stream: one number for as many streams as there are threads
WORKSPACES = 16  # streams that have some; a program that makes ever new streams gives back the oldest's

_shared: dict[tuple[int, int, int], Any] = {}
_captured: weakref.WeakKeyDictionary[capture.Capture, dict[tuple[int, int, int], Any]] = weakref.WeakKeyDictionary()


def workspace_size(xp: Any, device: int) -> int:
    """Bytes of scratch on a device: PyTorch's choice, 32 MiB from Hopper on, 8 MiB before."""
    return (32 if int(xp.cuda.Device(device).compute_capability) >= 90 else 8) << 20


def workspace(xp: Any, device: int, stream: int) -> int:
    """The address of the scratch memory of a stream, from the pool when it is first needed, and kept."""
    graph = capture.now()
    spaces = _shared if graph is None else _captured.setdefault(graph, {})
    key = device, stream, threading.get_ident() if stream == PER_THREAD else 0
    found = spaces.get(key)
    if found is None:
        if len(spaces) >= WORKSPACES:  # back to its stream's arena, in whose order it is used next
            spaces.pop(next(iter(spaces)), None)
        found = spaces[key] = xp.empty(workspace_size(xp, device), "uint8")
        if graph is not None:
            graph.keep(found)
    return int(found.data.ptr)
