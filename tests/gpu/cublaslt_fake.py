"""cuBLASLt without a GPU: the functions of `ddp._cuda.cublaslt`'s table, which refuse what it refuses.

A description, layout or preference is what its attributes made of it, found again by its address. A product is checked
when it is launched (shapes, leading dimensions, alignments, the algorithm that was found for it, the epilogue's
pointers), and computed on its stream, on nothing but the memory that it names.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from ddp._cuda import cublaslt, gemm
from ddp._cuda.cublaslt import INVALID_VALUE, NOT_SUPPORTED, SUCCESS, Algorithm

DTYPES = {cublaslt.TYPES[name]: np.dtype(getattr(ml_dtypes, name, name)) for name in cublaslt.TYPES}
COMPUTES = {cublaslt.COMPUTE_32F: (0, 2, 14), cublaslt.COMPUTE_32F_FAST_TF32: (0,), cublaslt.COMPUTE_64F: (1,)}
NAMES = {number: name for name, number in cublaslt.EPILOGUES.items()}
# The attributes that the real library knows, by number: bytes of the value.
_DESC = {number: ctypes.sizeof(kind) for number, kind in cublaslt.DESC.values()}
_LAYOUT = {number: ctypes.sizeof(kind) for number, kind in cublaslt.LAYOUT.values()}
_PREFERENCE = {number: ctypes.sizeof(kind) for number, kind in cublaslt.PREFERENCE.values()}
WORKSPACE = 4096  # of the algorithms for long sums
Put = Callable[[int, str, Callable[[], None]], None]


def _number(address: int, size: int, signed: bool = False) -> int:
    return int.from_bytes(ctypes.string_at(address, size), "little", signed=signed)


class Fake:
    """A loaded library. put: (stream, kind, work) puts work on a stream; device: the number of the current one

    calls: how often each function was called; launched: (m, n, k, epilogue) of each product, in the library's order
    lacks: says of (epilogue, dtype) whether no algorithm exists for it
    """

    def __init__(self, put: Put, device: Callable[[], int] = lambda: 0) -> None:
        self.put = put
        self.device = device
        self.calls: dict[str, int] = {}
        self.launched: list[tuple[int, int, int, str]] = []
        self.objects: dict[int, Any] = {}
        self.lacks: Callable[[str, str], bool] = lambda epilogue, dtype: False
        self._next = 1 << 20

    def __getitem__(self, name: str) -> Any:  # as ctypes.CDLL gives its functions
        function = getattr(self, name.removeprefix("cublasLt"))

        def counted(*arguments: Any) -> Any:
            arity = len(cublaslt.FUNCTIONS[name][0])
            assert len(arguments) == arity, f"{name}: {len(arguments)} arguments, not {arity}"
            assert all(type(argument) is int for argument in arguments), f"{name}: {arguments}"
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*arguments)

        return counted

    def _make(self, address: int, kind: str, **what: Any) -> int:
        self._next += 64
        self.objects[self._next] = SimpleNamespace(kind=kind, **what)
        ctypes.c_void_p.from_address(address).value = self._next
        return SUCCESS

    def _destroy(self, target: int) -> int:
        return SUCCESS if self.objects.pop(target, None) is not None else INVALID_VALUE

    def Create(self, address: int) -> int:
        return self._make(address, "handle", device=self.device())

    def GetVersion(self) -> int:
        return 120903

    def GetStatusString(self, status: int) -> bytes:
        return {7: b"CUBLAS_STATUS_INVALID_VALUE", 15: b"CUBLAS_STATUS_NOT_SUPPORTED"}.get(status, b"a status")

    def MatmulDescCreate(self, address: int, compute: int, scale: int) -> int:
        if compute not in COMPUTES or scale != (1 if compute == cublaslt.COMPUTE_64F else 0):
            return INVALID_VALUE
        return self._make(address, "desc", compute=compute, values={3: 0, 4: 0, 7: 1, 8: 0, 11: 0, 12: 0})

    def MatrixLayoutCreate(self, address: int, dtype: int, rows: int, columns: int, lead: int) -> int:
        if dtype not in DTYPES or not rows or not columns or lead < rows:
            return INVALID_VALUE
        return self._make(address, "layout", dtype=dtype, shape=(rows, columns), lead=lead, values={5: 1, 6: 0})

    def MatmulPreferenceCreate(self, address: int) -> int:
        return self._make(address, "preference", values={1: 0, 3: 7, 5: 256, 6: 256, 7: 256, 8: 256})

    def _set(self, kind: str, sizes: dict[int, int], target: int, attribute: int, address: int, size: int) -> int:
        result = self.objects.get(target)
        if result is None or result.kind != kind or sizes.get(attribute) != size or not address:
            return INVALID_VALUE
        result.values[attribute] = _number(address, size)
        return SUCCESS

    MatmulDescSetAttribute = functools.partialmethod(_set, "desc", _DESC)
    MatrixLayoutSetAttribute = functools.partialmethod(_set, "layout", _LAYOUT)
    MatmulPreferenceSetAttribute = functools.partialmethod(_set, "preference", _PREFERENCE)
    Destroy = MatmulDescDestroy = MatrixLayoutDestroy = MatmulPreferenceDestroy = _destroy

    def _problem(self, desc: int, a: int, b: int, d: int) -> Any:
        """What a product is, or the status that refuses it."""
        what, of_a, of_b, of_d = (self.objects[each] for each in (desc, a, b, d))
        assert [each.kind for each in (what, of_a, of_b, of_d)] == ["desc", "layout", "layout", "layout"]
        m, k = of_a.shape[:: -1 if what.values[3] else 1]
        inner, n = of_b.shape[:: -1 if what.values[4] else 1]
        if inner != k or of_d.shape != (m, n) or len({each.values[5] for each in (of_a, of_b, of_d)}) > 1:
            return INVALID_VALUE
        narrow = DTYPES[of_a.dtype].itemsize == 2
        if of_a.dtype != of_b.dtype or (of_d.dtype != of_a.dtype and not (narrow and of_d.dtype == 0)):
            return NOT_SUPPORTED
        if of_a.dtype not in COMPUTES[what.compute]:
            return NOT_SUPPORTED
        epilogue = NAMES.get(what.values[7])
        if epilogue is None:
            return INVALID_VALUE
        if epilogue != "DEFAULT" and (of_d.values[5] > 1 or self.lacks(epilogue, DTYPES[of_d.dtype].name)):
            return NOT_SUPPORTED
        if ("BIAS" in epilogue or "BGRAD" in epilogue) and not what.values[8]:
            return INVALID_VALUE
        if "AUX" in epilogue or (epilogue.startswith("D") and epilogue != "DEFAULT"):
            unit = 128 if "RELU" in epilogue else 8
            if not what.values[11] or what.values[12] % unit or what.values[12] < m:
                return INVALID_VALUE
        count = of_d.values[5]
        mark = hash((m, n, k, epilogue, count)) & 0xFFFFFFFF  # an algorithm is of one product
        return SimpleNamespace(
            a=of_a, b=of_b, d=of_d, what=what, epilogue=epilogue, count=count, size=(m, n, k), mark=mark
        )

    def MatmulAlgoGetHeuristic(
        self,
        handle: int,
        desc: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        wanted: int,
        address: int,
        many: int,
    ) -> int:
        assert self.objects[handle].kind == "handle"
        assert wanted == 1
        assert c == d
        problem = self._problem(desc, a, b, d)
        if isinstance(problem, int):
            return problem
        values = self.objects[preference].values
        result = Algorithm.from_address(address)
        # Which alignments it counts on, and a mark of the product it was found for.
        result.algo[0] = problem.mark
        for i in range(4):
            result.algo[1 + i] = values[5 + i]
        result.algo[5] = _aligned(problem.what.values[8])
        result.workspace = WORKSPACE if problem.size[2] > 64 and values[1] >= WORKSPACE else 0
        result.state = SUCCESS
        ctypes.c_int.from_address(many).value = 1
        return SUCCESS

    def Matmul(
        self, handle: int, desc: int, alpha: int, at_a: int, a: int, at_b: int, b: int, beta: int, at_c: int, c: int,
        at_d: int, d: int, algorithm: int, room: int, room_size: int, stream: int,
    ) -> int:  # fmt: skip
        assert self.objects[handle].device == self.device(), "a handle of another device"
        problem = self._problem(desc, a, b, d)
        if isinstance(problem, int):
            return problem
        assert (c, at_c) == (d, at_d), "only in place"
        values = problem.what.values
        result = Algorithm.from_address(algorithm)
        assert result.algo[0] == problem.mark, "an algorithm of another product"
        for i, pointer in enumerate((at_a, at_b, at_c, at_d)):
            assert pointer, "a null pointer"
            assert pointer % result.algo[1 + i] == 0, f"misaligned address: {i}, {pointer:x}, {result.algo[1 + i]}"
        assert values[8] % max(result.algo[5], 1) == 0, "misaligned bias"
        if room_size < result.workspace or (result.workspace and (not room or room % 256)):
            return INVALID_VALUE
        wide: Any = np.float64 if problem.what.compute == cublaslt.COMPUTE_64F else np.float32
        scale = (ctypes.c_double if wide is np.float64 else ctypes.c_float).from_address
        assert scale(alpha).value == 1
        work = functools.partial(
            _multiply, problem, dict(values), at_a, at_b, at_d, scale(beta).value, result.workspace, room, wide
        )
        self.launched.append((*problem.size, problem.epilogue))
        self.put(stream, "cublasLtMatmul", work)
        return SUCCESS


def _aligned(pointer: int) -> int:
    return min(pointer & -pointer, 256)


def _matrix(layout: Any, address: int, which: int, turned: bool = False) -> Any:
    """One matrix of a layout, over the memory itself: (rows, columns)."""
    dtype = DTYPES[layout.dtype]
    (rows, columns) = layout.shape
    step = layout.values[6] if layout.values[6] < 1 << 63 else layout.values[6] - (1 << 64)
    return _over(address + which * step * dtype.itemsize, dtype, rows, columns, layout.lead, turned)


def _over(address: int, dtype: Any, rows: int, columns: int, lead: int, turned: bool = False) -> Any:
    extent = ((columns - 1) * lead + rows) * dtype.itemsize
    raw = np.frombuffer((ctypes.c_char * extent).from_address(address), np.uint8)
    result = np.ndarray((rows, columns), dtype, raw, 0, (dtype.itemsize, lead * dtype.itemsize))
    return result.T if turned else result


def _tf32(x: Any) -> Any:
    """float32 rounded to 10 bits of mantissa."""
    return ((x.astype(np.float32).view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x: Any) -> Any:
    k = np.sqrt(2 / np.pi)
    t = np.tanh(k * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)


def _multiply(
    problem: Any, values: dict[int, int], at_a: int, at_b: int, at_d: int, beta: float, space: int, room: int, wide: Any
) -> None:
    if space:
        ctypes.memset(room, 0x5A, space)
    for which in range(problem.count):
        a = _matrix(problem.a, at_a, which, bool(values[3])).astype(wide)
        b = _matrix(problem.b, at_b, which, bool(values[4])).astype(wide)
        d = _matrix(problem.d, at_d, which)
        if problem.what.compute == cublaslt.COMPUTE_32F_FAST_TF32:
            a, b = _tf32(a), _tf32(b)
        out = (a.astype(np.float64) @ b.astype(np.float64)).astype(wide)
        if beta:
            out += beta * d.astype(wide)
        d[...] = _finished(problem, values, out, a, b).astype(d.dtype)


def _finished(problem: Any, values: dict[int, int], out: Any, a: Any, b: Any) -> Any:
    epilogue = problem.epilogue
    (m, n, _) = problem.size
    dtype = DTYPES[problem.d.dtype]

    def vector(size: int) -> Any:
        return _over(values[8], dtype, size, 1, size)[:, 0]

    if epilogue == "BGRADB":
        vector(n)[...] = b.sum(0)
        return out
    if "BIAS" in epilogue:
        out = out + vector(m).astype(out.dtype)[:, None]
    if epilogue.startswith(("DRELU", "DGELU")):
        if "RELU" in epilogue:
            bits = _over(values[11], np.dtype("uint8"), values[12] // 8, n, values[12] // 8)
            out = out * np.unpackbits(bits, axis=0, bitorder="little")[:m]
        else:
            out = out * gelu_slope(_over(values[11], dtype, m, n, values[12]).astype(out.dtype))
        if "BGRAD" in epilogue:
            vector(m)[...] = out.sum(1)
        return out
    if "AUX" in epilogue:
        if "RELU" in epilogue:
            bits = _over(values[11], np.dtype("uint8"), values[12] // 8, n, values[12] // 8)
            padded = np.zeros((values[12], n), bool)
            padded[:m] = out > 0
            bits[...] = np.packbits(padded, axis=0, bitorder="little")
        else:
            _over(values[11], dtype, m, n, values[12])[...] = out
    if "RELU" in epilogue:
        return np.maximum(out, 0)
    return gelu(out) if "GELU" in epilogue else out


def install(gpu: Any, monkeypatch: Any) -> None:
    """Gives the stand-in of CuPy a cuBLASLt: `gpu.cublaslt`."""
    gpu.cublaslt = Fake(gpu.launch, lambda: gpu.cupy.local.device)
    monkeypatch.setattr(cublaslt, "_loaded", [cublaslt.LtLibrary(gpu.cublaslt, "the stand-in")])
    forget()


def forget() -> None:
    """Drops plans and scratch memory of another library."""
    gemm._plans.clear()
    gemm._workspaces.clear()
