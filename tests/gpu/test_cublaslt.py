"""Our table of cuBLASLt against NVIDIA's headers and library, where they are installed: neither needs a GPU."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp._cuda import cublaslt
from ddp.errors import DeviceError


@pytest.fixture(scope="module")
def headers() -> str:
    """cublasLt.h and cublas_api.h of the installed package, without comments."""
    result = cublaslt.wheels()
    if not result:
        pytest.skip("nvidia-cublas-cu12 or -cu13 is not installed")
    folder = result[0].parent.parent / "include"
    text = "\n".join((folder / name).read_text() for name in ("cublas_api.h", "cublasLt.h"))
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def enum(headers: str, name: str) -> dict[str, int]:
    """Values by name; one may be given by those before it."""
    body = re.search(rf"typedef\s+enum\s*\{{([^}}]*)\}}\s*{name}\s*;", headers)
    assert body, name
    result: dict[str, int] = {}
    for each in body[1].split(","):
        if each.strip():
            key, _, value = each.partition("=")
            result[key.strip()] = eval(value, {}, result)
    return result


C_TYPES: dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "void": None,
    "int": ctypes.c_int,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    **dict.fromkeys(("cublasStatus_t", "cublasComputeType_t", "cudaDataType_t", "cudaDataType"), ctypes.c_int),
    **{f"cublasLt{name}_t": ctypes.c_int for name in ("MatmulDescAttributes", "MatrixLayoutAttribute")},
    "cublasLtMatmulPreferenceAttributes_t": ctypes.c_int,
}
OPAQUE = ("Handle_t", "MatmulDesc_t", "MatrixLayout_t", "MatmulPreference_t", "cudaStream_t")


def c_type(declared: str) -> Any:
    """Of a parameter, or of a function's result with a name put behind it."""
    words = re.sub(r"\bconst\b", "", declared.replace("*", " * ")).split()
    if "*" in words or declared.endswith("[]"):
        return ctypes.c_char_p if words[0] == "char" else ctypes.c_void_p
    return ctypes.c_void_p if words[0].endswith(OPAQUE) else C_TYPES[words[0]]


@pytest.mark.parametrize("name", cublaslt.FUNCTIONS)
def test_every_function_is_declared_as_in_the_header(headers: str, name: str) -> None:
    match = re.search(rf"^((?:const\s+)?\w+\s*\*?)\s*CUBLASWINAPI\s+{name}\(([^)]*)\)\s*;", headers, re.MULTILINE)
    assert match, f"cublasLt.h has no {name}"
    result, parameters = match.groups()
    declared = tuple(c_type(each) for each in parameters.split(",") if each.strip() not in ("", "void"))
    assert cublaslt.FUNCTIONS[name] == (declared, c_type(result))


def test_the_numbers_are_those_of_the_headers(headers: str) -> None:
    statuses = enum(headers, "cublasStatus_t")
    for name in ("SUCCESS", "INVALID_VALUE", "NOT_SUPPORTED"):
        assert statuses[f"CUBLAS_STATUS_{name}"] == getattr(cublaslt, name)
    computes = enum(headers, "cublasComputeType_t")
    for name in ("COMPUTE_32F", "COMPUTE_64F", "COMPUTE_32F_FAST_TF32"):
        assert computes[f"CUBLAS_{name}"] == getattr(cublaslt, name)
    operations = enum(headers, "cublasOperation_t")
    assert (operations["CUBLAS_OP_N"], operations["CUBLAS_OP_T"]) == (False, True)
    for table, kind, prefix in (
        (cublaslt.DESC, "cublasLtMatmulDescAttributes_t", "MATMUL_DESC"),
        (cublaslt.LAYOUT, "cublasLtMatrixLayoutAttribute_t", "MATRIX_LAYOUT"),
        (cublaslt.PREFERENCE, "cublasLtMatmulPreferenceAttributes_t", "MATMUL_PREF"),
    ):
        values = enum(headers, kind)
        assert {name: number for name, (number, _) in table.items()} == {
            name: values[f"CUBLASLT_{prefix}_{name}"] for name in table
        }
    epilogues = enum(headers, "cublasLtEpilogue_t")
    assert {name: epilogues[f"CUBLASLT_EPILOGUE_{name}"] for name in cublaslt.EPILOGUES} == cublaslt.EPILOGUES
    schemes = enum(headers, "cublasLtReductionScheme_t")
    assert schemes["CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"] == cublaslt.REDUCTION_COMPUTE_TYPE
    assert schemes["CUBLASLT_REDUCTION_SCHEME_MASK"] == cublaslt.REDUCTION_MASK


def test_an_algorithm_is_as_large_as_in_the_header(headers: str) -> None:
    body = re.search(r"typedef\s+struct\s*\{([^}]*)\}\s*cublasLtMatmulHeuristicResult_t", headers)
    assert body
    fields = [each.split() for each in body[1].split(";") if each.strip()]
    assert [words[0] for words in fields] == ["cublasLtMatmulAlgo_t", "size_t", "cublasStatus_t", "float", "int"]
    assert re.search(r"typedef\s+struct\s*\{\s*uint64_t\s+data\[8\];\s*\}\s*cublasLtMatmulAlgo_t", headers)
    assert fields[-1][-1] == "reserved[4]"
    assert ctypes.sizeof(cublaslt.Algorithm) == 96


@pytest.fixture(scope="module")
def real() -> cublaslt.LtLibrary:
    """NVIDIA's library: what makes descriptions needs no GPU."""
    result = cublaslt.wheels()
    if not result:
        pytest.skip("nvidia-cublas-cu12 or -cu13 is not installed")
    return cublaslt.LtLibrary(ctypes.CDLL(str(result[0])), str(result[0]))


OBJECTS = {
    "cublasLtMatmulDesc": (cublaslt.DESC, (cublaslt.COMPUTE_32F, cublaslt.TYPES["float32"])),
    "cublasLtMatrixLayout": (cublaslt.LAYOUT, (cublaslt.TYPES["bfloat16"], 4, 8, 4)),
    "cublasLtMatmulPreference": (cublaslt.PREFERENCE, ()),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_library_takes_every_attribute_in_the_size_of_our_table(real: cublaslt.LtLibrary, kind: str) -> None:
    table, arguments = OBJECTS[kind]
    descriptor = real.create(f"{kind}Create", *arguments)
    for number, of in table.values():
        real.set(f"{kind}SetAttribute", descriptor, (number, of), 2)
        wrong = ctypes.c_int16(2)
        status = real.call(f"{kind}SetAttribute", descriptor, number, ctypes.addressof(wrong), 2)
        assert status == cublaslt.INVALID_VALUE
    real.check(f"{kind}Destroy", descriptor)


def test_a_missing_library_is_named_with_all_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "wheels", lambda: [Path(f"/w/{n}/lib/libcublasLt.so.{n}") for n in (76, 77)])
    result = SimpleNamespace(abs_path="/p/libcublasLt.so.77.1")
    pathfinder = SimpleNamespace(load_nvidia_dynamic_lib={"cublasLt": result}.__getitem__)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=pathfinder))
    xp = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: 77000)))
    where = ["libcublasLt.so.77", "/w/77/lib/libcublasLt.so.77"]
    assert list(cublaslt.candidates(xp)) == [result.abs_path, *where]
    result.abs_path = "/p/libcublasLt.so.76"  # of another CUDA than CuPy's
    assert list(cublaslt.candidates(xp)) == where
    with pytest.raises(DeviceError, match=r"need cuBLASLt: pip install .*\[cuda77\]'. Tried .*/w/77/lib"):
        cublaslt.load(xp)


def test_a_failed_call_is_named(gpu: Any) -> None:
    library = cublaslt.LtLibrary(gpu.cublaslt, "here")
    with pytest.raises(
        DeviceError, match=r"LayoutCreate: CUBLAS_STATUS_INVALID_VALUE \(7\) of <cuBLASLt 120903 of here>"
    ):
        library.create("cublasLtMatrixLayoutCreate", cublaslt.TYPES["float32"], 4, 4, 3)
