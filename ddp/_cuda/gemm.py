"""Matrix products on a GPU by cuBLASLt. `gemm` reads most memory layouts without a copy, and can add an epilogue.

For each new combination of shapes, strides, dtypes and alignments, cuBLASLt chooses an algorithm, and a plan with
prepared arguments is cached. After that such a product is a look-up, an allocation and one call. cuBLASLt expects
column-major matrices, so a row-major `D = A @ B` is passed as `D^T = B^T @ A^T`, which needs no copy. All work goes to
the current stream, and can be captured in a CUDA graph.
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

# Maximum number of cached plans. If a new one does not fit, the older half is dropped.
MAX_PLANS = 4096

# Maximum number of rows, columns or matrices of one product.
MAX_EXTENT = (1 << 31) - 1

# The alignment of an address, 1 to 256 bytes, by the lowest byte of the address.
ALIGNMENT_BY_LOW_BYTE = tuple(byte & -byte or 256 for byte in range(256))

# Plans. The key, made in `gemm`, holds everything that the choice of an algorithm depends on.
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
    aux_ld: int = 0,
) -> Array | None:
    """Computes a @ b by the rules of NumPy's matmul, in `out` if given; with `accumulate`, adds it to `out`.

    epilogue: a name in `cublaslt.EPILOGUES`; all except "DEFAULT" need two matrices, and `out`
    vector: a bias, or memory for a bias gradient: out.shape[1] elements, for "BGRADB" out.shape[0]
    aux: a matrix with rows of `aux_ld` elements (bits for ReLU), written by an epilogue in forward, read in backward

    Returns: the product. None, with nothing computed, if a length is 0 or above MAX_EXTENT, if cuBLASLt does not
    support these dtypes and layouts with this epilogue, or if a test has switched cuBLASLt off.
    Raises: DeviceError if there is no cuBLASLt, or if one of its calls fails.
    """
    key = (
        a.shape,
        a.strides,
        a.dtype,
        ALIGNMENT_BY_LOW_BYTE[a.data.ptr & 255],
        b.shape,
        b.strides,
        b.dtype,
        ALIGNMENT_BY_LOW_BYTE[b.data.ptr & 255],
        a.data.device_id,
        precision.tf32,
        None if out is None else (out.shape, out.strides, out.dtype, _alignment(out), accumulate),
        epilogue,
        0 if vector is None else _alignment(vector),
        aux_ld,
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            for old in list(_plans)[: MAX_PLANS // 2]:
                _plans.pop(old, None)
        plan = _plan(xp, a, b, out, accumulate, epilogue, vector, aux_ld)
        _plans[key] = plan
    return plan(xp, a, b, out, accumulate, vector, aux)


def _alignment(x: Array) -> int:
    """The alignment of x's address, 1 to 256 bytes."""
    return ALIGNMENT_BY_LOW_BYTE[x.data.ptr & 255]


def _plan(
    xp: Any,
    a: Array,
    b: Array,
    out: Array | None,
    accumulate: bool,
    epilogue: str,
    vector: Array | None,
    aux_ld: int,
) -> Callable[..., Array | None]:
    """Chooses how to multiply arrays of this layout. Returns: a `MatmulPlan`, or a function called the same way."""
    if a.ndim == 1 or b.ndim == 1:
        return _multiply_vectors
    library = cublaslt.library(xp)
    dtype = a.dtype if out is None else out.dtype
    if library is None or not _supports(a.dtype, b.dtype, dtype):
        return _unsupported
    m, k = a.shape[-2:]
    inner, n = b.shape[-2:]
    assert k == inner, (a.shape, b.shape)
    batch_shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    batch = prod(batch_shape)
    shape = (*batch_shape, m, n)
    fused = epilogue != "DEFAULT"
    assert out is None or out.shape == shape, (out.shape, shape)
    if 0 in (*shape, k) or max(m, n, k, batch) > MAX_EXTENT:
        return _unsupported
    layout_a = matrix_layout(a)
    layout_b = matrix_layout(b)
    layout_out = MatrixLayout(False, n) if out is None else matrix_layout(out)
    stride_a = batch_stride(batch_shape, a)
    stride_b = batch_stride(batch_shape, b)
    stride_out = m * n if out is None else batch_stride(batch_shape, out)
    if layout_out is None or layout_out.transposed or stride_out is None:
        return _unsupported if fused else _multiply_and_assign
    if layout_a is None or layout_b is None or stride_a is None or stride_b is None:
        return _unsupported if fused else _copy_and_multiply(batch_shape, (layout_a, stride_a), (layout_b, stride_b))
    spec = MatmulSpec(
        m=n,
        n=m,
        k=k,
        batch=batch,
        a=MatrixSpec(b.dtype.name, *layout_b, stride_b, _alignment(b)),
        b=MatrixSpec(a.dtype.name, *layout_a, stride_a, _alignment(a)),
        d=MatrixSpec(dtype.name, *layout_out, stride_out, 256 if out is None else _alignment(out)),
        tf32=precision.tf32,
        accumulate=accumulate,
        epilogue=epilogue,
        bias_alignment=0 if vector is None else _alignment(vector),
        aux_ld=aux_ld,
        workspace=workspace_size(xp, a.data.device_id),
    )
    try:
        return MatmulPlan(library, library.handle(a.data.device_id), spec, shape, dtype)
    except UnsupportedMatmul as error:
        if not fused:  # without an epilogue, the caller launches the parts one by one, and needs no warning
            warnings.warn(f"a slow kernel multiplies instead: {error}", RuntimeWarning, stacklevel=3)
        return _unsupported


def _supports(a: Any, b: Any, out: Any) -> bool:
    """Whether cuBLASLt multiplies these dtypes. Products of 16-bit matrices may also have a float32 result."""
    return bool(a == b and a.name in TYPES and (out == a or (out.name == "float32" and a.itemsize == 2)))


# Plans that are not one call of cuBLASLt. They take the arguments of `MatmulPlan.__call__`, and ignore vector and aux.


def _unsupported(*_: Any) -> None:
    return None


def _multiply_vectors(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool, *_: Any) -> Array | None:
    """Multiplies vectors, or a vector and matrices: a left vector is used as a row, a right one as a column."""
    left = a[None] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    result = gemm(xp, left, right)
    if result is None:
        return None
    *batch_shape, m, n = result.shape
    shape = (*batch_shape, *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ()))
    return _assign(result.reshape(shape), out, accumulate)


def _multiply_and_assign(xp: Any, a: Array, b: Array, out: Array, accumulate: bool, *_: Any) -> Array | None:
    """Multiplies into a new array, and assigns or adds it to `out`, whose layout cuBLASLt cannot write."""
    result = gemm(xp, a, b)
    return None if result is None else _assign(result, out, accumulate)


def _copy_and_multiply(
    batch_shape: tuple[int, ...], *operands: tuple[MatrixLayout | None, int | None]
) -> Callable[..., Array | None]:
    """Returns a function that copies each operand whose layout cuBLASLt cannot read, then multiplies.

    operands: for a and for b, the layout and the batch stride, each None if cuBLASLt cannot read it
    """

    def run(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool, *_: Any) -> Array | None:
        factors = []
        for x, (layout, stride) in zip((a, b), operands, strict=True):
            if stride is None:  # for example, broadcast along some batch axes only
                x = xp.broadcast_to(x, (*batch_shape, *x.shape[-2:]))
            factors.append(xp.array(x, order="C") if layout is None or stride is None else x)
        return gemm(xp, factors[0], factors[1], out, accumulate)

    return run


def _assign(result: Array, out: Array | None, accumulate: bool) -> Array:
    if out is None:
        return result
    if accumulate:
        out += result
    else:
        out[...] = result
    return out


class MatrixLayout(NamedTuple):
    """The layout of a matrix in memory.

    transposed: whether it is column-major; ld: elements from one row to the next, or if transposed, from one column to
    the next
    """

    transposed: bool
    ld: int


def matrix_layout(x: Array) -> MatrixLayout | None:
    """The layout of the matrices of x, (..., rows, columns).

    None if cuBLASLt cannot read them: neither rows nor columns are contiguous, they overlap or are in reverse order, or
    a stride is not a whole number of elements.
    """
    rows, columns = x.shape[-2:]
    size = x.dtype.itemsize
    if any(stride % size for stride in x.strides):
        return None
    row_stride, column_stride = (stride // size for stride in x.strides[-2:])
    if (column_stride == 1 or columns == 1) and (row_stride >= max(columns, 1) or rows == 1):
        return MatrixLayout(False, row_stride if rows > 1 else max(columns, 1))
    if (row_stride == 1 or rows == 1) and (column_stride >= max(rows, 1) or columns == 1):
        return MatrixLayout(True, column_stride if columns > 1 else max(rows, 1))
    return None


def batch_stride(batch_shape: Sequence[int], x: Array) -> int | None:
    """Elements from one matrix of x to the next: 0 if one matrix serves the whole batch.

    None if this distance varies, is negative, or is not a whole number of elements.

    batch_shape: of the product; x may lack some of these axes, or be broadcast along them
    """
    missing = len(batch_shape) - (x.ndim - 2)
    sizes = (1,) * missing + x.shape[:-2]
    strides = (0,) * missing + x.strides[:-2]
    single = None
    count = 1
    for length, size, stride in reversed(list(zip(batch_shape, sizes, strides, strict=True))):
        if length == 1:
            continue
        stride = 0 if size == 1 else stride
        if single is None:
            single = stride
        elif stride != single * count:
            return None
        count *= length
    single = single or 0
    return None if single < 0 or single % x.dtype.itemsize else single // x.dtype.itemsize


class MatrixSpec(NamedTuple):
    """A matrix as cuBLASLt sees it, column-major.

    transposed: the product uses its transpose; ld: elements from one column to the next
    stride: elements from one matrix of a batch to the next; alignment: of its address, in bytes
    """

    dtype: str
    transposed: bool
    ld: int
    stride: int
    alignment: int


class MatmulSpec(NamedTuple):
    """A product of (m, k) and (k, n) as cuBLASLt sees it, column-major.

    d: the result; accumulate: the product is added to the values of D
    tf32: float32 factors may be rounded to 10 bits of mantissa; epilogue: a name of `cublaslt.EPILOGUES`
    bias_alignment: bytes, 0 without a bias; aux_ld: elements of a row of `aux`, 0 without `aux`
    workspace: maximum size of the scratch memory, in bytes
    """

    m: int
    n: int
    k: int
    batch: int
    a: MatrixSpec
    b: MatrixSpec
    d: MatrixSpec
    tf32: bool = False
    accumulate: bool = False
    epilogue: str = "DEFAULT"
    bias_alignment: int = 0
    aux_ld: int = 0
    workspace: int = 0


class UnsupportedMatmul(Exception):
    """cuBLASLt has no algorithm for a product."""


# By dtype: the values 0 and 1 of alpha and beta. The library gets their addresses, so they must never be freed.
_FACTORS: dict[str, Any] = {"float32": (c_float * 2)(0.0, 1.0), "float64": (c_double * 2)(0.0, 1.0)}


class MatmulPlan:
    """The descriptors and the algorithm of a product, ready to be launched.

    Raises: UnsupportedMatmul if cuBLASLt has no algorithm; DeviceError if another call of the library fails.
    """

    def __init__(self, library: LtLibrary, handle: int, spec: MatmulSpec, shape: tuple[int, ...], dtype: Any) -> None:
        self._library = library
        self._spec = spec
        self._shape = shape
        self._dtype = dtype
        self._objects: list[tuple[str, int]] = []  # the function that frees an object, and the object's address
        # A thread holds the lock from setting the descriptor's pointer attributes until the launch has read them.
        # `_pointers` stores the values of these attributes.
        self._lock = threading.Lock()
        self._pointers = [0, 0]
        self._compute_dtype = "float64" if spec.a.dtype == "float64" else "float32"
        self._desc = self._create_description()
        a = self._create_layout(spec.a, spec.m, spec.k)
        b = self._create_layout(spec.b, spec.k, spec.n)
        self._layouts = (a, b, self._create_layout(spec.d, spec.m, spec.n))
        self._algorithm = self._find_algorithm(handle)
        factors = _FACTORS[self._compute_dtype]
        self._handle = handle
        self._alpha = ctypes.addressof(factors) + ctypes.sizeof(factors) // 2
        self._beta = self._alpha if spec.accumulate else ctypes.addressof(factors)

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
        pointers = [0 if array is None else array.data.ptr for array in (vector, aux)]
        with self._lock:
            for i, name in enumerate(("BIAS_POINTER", "EPILOGUE_AUX_POINTER")):
                if pointers[i] != self._pointers[i]:
                    self._library.set("cublasLtMatmulDescSetAttribute", self._desc, DESC[name], pointers[i])
            self._pointers = pointers
            self._launch(xp, a, b, out)
        return out

    def _launch(self, xp: Any, a: Array, b: Array, out: Array) -> None:
        stream = xp.cuda.get_current_stream().ptr
        algorithm = self._algorithm
        scratch = workspace(xp, a.data.device_id, stream) if algorithm.workspace else 0
        layout_a, layout_b, layout_d = self._layouts
        address_out = out.data.ptr
        status = self._library.matmul(
            self._handle,
            self._desc,
            self._alpha,
            b.data.ptr,
            layout_a,
            a.data.ptr,
            layout_b,
            self._beta,
            address_out,
            layout_d,
            address_out,
            layout_d,
            ctypes.addressof(algorithm),
            scratch,
            algorithm.workspace,
            stream,
        )
        if status:
            raise DeviceError(f"cublasLtMatmul: {self._library.explain(status)}; the product is {self._spec}")

    def _create(self, name: str, *arguments: Any) -> int:
        address = self._library.create(f"{name}Create", *arguments)
        self._objects.append((f"{name}Destroy", address))
        return address

    def _create_description(self) -> int:
        spec = self._spec
        compute = cublaslt.COMPUTE_64F if self._compute_dtype == "float64" else cublaslt.COMPUTE_32F
        if spec.tf32 and spec.a.dtype == "float32":
            compute = cublaslt.COMPUTE_32F_FAST_TF32
        desc = self._create("cublasLtMatmulDesc", compute, TYPES[self._compute_dtype])
        values = {
            "TRANSA": int(spec.a.transposed),
            "TRANSB": int(spec.b.transposed),
            "EPILOGUE": EPILOGUES[spec.epilogue],
        }
        if spec.bias_alignment:  # any address of this alignment: the algorithm depends on the alignment alone
            values["BIAS_POINTER"] = spec.bias_alignment
        if spec.aux_ld:
            values |= {"EPILOGUE_AUX_POINTER": 256, "EPILOGUE_AUX_LD": spec.aux_ld}
        for name, value in values.items():
            self._library.set("cublasLtMatmulDescSetAttribute", desc, DESC[name], value)
        return desc

    def _create_layout(self, matrix: MatrixSpec, rows: int, columns: int) -> int:
        if matrix.transposed:
            rows, columns = columns, rows
        layout = self._create("cublasLtMatrixLayout", TYPES[matrix.dtype], rows, columns, matrix.ld)
        if self._spec.batch > 1:
            for name, value in (("BATCH_COUNT", self._spec.batch), ("STRIDED_BATCH_OFFSET", matrix.stride)):
                self._library.set("cublasLtMatrixLayoutSetAttribute", layout, LAYOUT[name], value)
        return layout

    def _find_algorithm(self, handle: int) -> Algorithm:
        library = self._library
        spec = self._spec
        a, b, d = self._layouts
        # For a 16-bit result, algorithms that split k must add the parts in float32.
        narrow = spec.d.dtype in ("float16", "bfloat16")
        values = {
            "MAX_WORKSPACE_BYTES": spec.workspace,
            "REDUCTION_SCHEME_MASK": cublaslt.REDUCTION_COMPUTE_TYPE if narrow else cublaslt.REDUCTION_MASK,
            "MIN_ALIGNMENT_A_BYTES": spec.a.alignment,
            "MIN_ALIGNMENT_B_BYTES": spec.b.alignment,
            "MIN_ALIGNMENT_C_BYTES": spec.d.alignment,
            "MIN_ALIGNMENT_D_BYTES": spec.d.alignment,
        }
        preference = library.create("cublasLtMatmulPreferenceCreate")
        try:
            for name, value in values.items():
                library.set("cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE[name], value)
            algorithm = Algorithm()
            count = ctypes.c_int()
            results = (ctypes.addressof(algorithm), ctypes.addressof(count))
            status = library.call(
                "cublasLtMatmulAlgoGetHeuristic", handle, self._desc, a, b, d, d, preference, 1, *results
            )
        finally:
            library.call("cublasLtMatmulPreferenceDestroy", preference)
        status = status or algorithm.state
        if status != SUCCESS or not count.value:
            reason = library.explain(status) if status else "it found none"
            raise UnsupportedMatmul(f"{library!r} has no algorithm for {spec}: {reason}")
        return algorithm


# Workspaces: scratch memory that some algorithms need. Each stream has its own, because products on two streams may run
# at the same time. Each CUDA graph has its own, too, because a graph may be launched on any stream.

# The handle of CUDA's per-thread default stream, which is a different stream in each thread.
PER_THREAD = 2

# Maximum number of workspaces outside of graphs, and of each graph. If a new stream needs one more, the oldest is
# dropped. The memory of a graph's workspace lives as long as the graph.
WORKSPACES = 16

# Workspaces by (device, handle of the stream, thread). The thread is 0, except for the per-thread default stream.
_workspaces: dict[tuple[int, int, int], Any] = {}

# The workspaces of each graph under capture, by the same keys.
_graph_workspaces: weakref.WeakKeyDictionary[capture.Capture, dict[tuple[int, int, int], Any]]
_graph_workspaces = weakref.WeakKeyDictionary()


def workspace_size(xp: Any, device: int) -> int:
    """Bytes of a workspace, about as for cuBLAS in PyTorch: 32 MiB from Hopper on, 8 MiB before."""
    return (32 if int(xp.cuda.Device(device).compute_capability) >= 90 else 8) << 20


def workspace(xp: Any, device: int, stream: int) -> int:
    """The address of a stream's workspace. Allocated at the first call; dropped if WORKSPACES others are newer."""
    graph = capture.now()
    workspaces = _workspaces if graph is None else _graph_workspaces.setdefault(graph, {})
    key = (device, stream, threading.get_ident() if stream == PER_THREAD else 0)
    memory = workspaces.get(key)
    if memory is None:
        if len(workspaces) >= WORKSPACES:
            # Safe even if work still uses this memory: only later work of the same stream gets it from the pool.
            workspaces.pop(next(iter(workspaces)), None)
        memory = xp.empty(workspace_size(xp, device), "uint8")
        workspaces[key] = memory
        if graph is not None:
            graph.keep_alive(memory)
    return int(memory.data.ptr)
