"""Our table of cuBLASLt against NVIDIA's headers and library, where they are installed: neither needs a GPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp._cuda import cublaslt
from ddp._cuda.gemm_plan import LtMatmul, MatmulSpec, MatrixSpec, UnsupportedMatmul
from ddp.errors import DeviceError
from tests.gpu.lt_fake import Fake


@pytest.fixture(scope="module")
def headers() -> str:
    """cublasLt.h and cublas_api.h of the installed package, without comments."""
    found = cublaslt.wheels()
    if not found:
        pytest.skip("nvidia-cublas-cu12 or -cu13 is not installed")
    folder = found[0].parent.parent / "include"
    text = "\n".join((folder / name).read_text() for name in ("cublas_api.h", "cublasLt.h"))
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def enum(headers: str, name: str) -> dict[str, int]:
    """Values by name; one may be given by those before it."""
    body = re.search(rf"typedef\s+enum\s*\{{([^}}]*)\}}\s*{name}\s*;", headers)
    assert body, name
    found: dict[str, int] = {}
    for each in body[1].split(","):
        if each.strip():
            key, _, value = each.partition("=")
            found[key.strip()] = eval(value, {}, found)
    return found


C_TYPES: dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "void": None,
    "int": ctypes.c_int,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "cublasStatus_t": ctypes.c_int,
    "cublasComputeType_t": ctypes.c_int,
    "cudaDataType_t": ctypes.c_int,
    "cudaDataType": ctypes.c_int,
    "cublasLtMatmulDescAttributes_t": ctypes.c_int,
    "cublasLtMatrixLayoutAttribute_t": ctypes.c_int,
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
    found = re.search(rf"^((?:const\s+)?\w+\s*\*?)\s*CUBLASWINAPI\s+{name}\(([^)]*)\)\s*;", headers, re.MULTILINE)
    assert found, f"cublasLt.h has no {name}"
    result, parameters = found.groups()
    declared = tuple(c_type(each) for each in parameters.split(",") if each.strip() not in ("", "void"))
    assert cublaslt.FUNCTIONS[name] == (declared, c_type(result))


def test_the_numbers_are_those_of_the_headers(headers: str) -> None:
    statuses = {value: key for key, value in enum(headers, "cublasStatus_t").items()}
    assert statuses == {0: "CUBLAS_STATUS_SUCCESS", **cublaslt.STATUSES}
    computes = enum(headers, "cublasComputeType_t")
    for name in ("COMPUTE_32F", "COMPUTE_64F", "COMPUTE_32F_FAST_TF32"):
        assert computes[f"CUBLAS_{name}"] == getattr(cublaslt, name)
    operations = enum(headers, "cublasOperation_t")
    assert (operations["CUBLAS_OP_N"], operations["CUBLAS_OP_T"]) == (cublaslt.OP_N, cublaslt.OP_T)
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
    assert {key.removeprefix("CUBLASLT_EPILOGUE_"): value for key, value in epilogues.items()} == cublaslt.EPILOGUES
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
    found = cublaslt.wheels()
    if not found:
        pytest.skip("nvidia-cublas-cu12 or -cu13 is not installed")
    return cublaslt.LtLibrary(ctypes.CDLL(str(found[0])), str(found[0]))


OBJECTS = {
    "cublasLtMatmulDesc": (cublaslt.DESC, (cublaslt.COMPUTE_32F, cublaslt.TYPES["float32"])),
    "cublasLtMatrixLayout": (cublaslt.LAYOUT, (cublaslt.TYPES["bfloat16"], 4, 8, 4)),
    "cublasLtMatmulPreference": (cublaslt.PREFERENCE, ()),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_library_takes_every_attribute_in_the_size_of_our_table(real: cublaslt.LtLibrary, kind: str) -> None:
    table, arguments = OBJECTS[kind]
    made = real.create(f"{kind}Create", *arguments)
    for number, of in table.values():
        real.set(f"{kind}SetAttribute", made, (number, of), 2)
        wrong = ctypes.c_int16(2)
        status = real.call(f"{kind}SetAttribute", made, number, ctypes.addressof(wrong), 2)
        assert status == cublaslt.INVALID_VALUE
    real.check(f"{kind}Destroy", made)


@pytest.mark.parametrize("dtype", cublaslt.TYPES)
def test_the_library_makes_descriptions_of_every_dtype(real: cublaslt.LtLibrary, dtype: str) -> None:
    """All but the search for an algorithm, which needs a handle, and so a GPU."""
    side = MatrixSpec(dtype, True, 64, 4096, 16)
    plan = object.__new__(LtMatmul)
    plan._library, plan._objects = real, []
    for count in (1, 3):
        plan._layout(side, 32, 64, count)
    wide = dtype == "float64"
    desc = plan._made(
        "cublasLtMatmulDesc",
        cublaslt.COMPUTE_64F if wide else cublaslt.COMPUTE_32F,
        cublaslt.TYPES["float64" if wide else "float32"],
    )
    for epilogue in cublaslt.EPILOGUES.values():
        real.set("cublasLtMatmulDescSetAttribute", desc, cublaslt.DESC["EPILOGUE"], epilogue)
    assert len(plan._objects) == 3
    assert real.version >= 120000


def test_without_a_gpu_the_library_says_so(real: cublaslt.LtLibrary) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match=r"cublasLtCreate: CUBLAS_STATUS_\w+ \(\d+\) of <cuBLASLt 1"):
        real.handle(0)


def test_the_stand_in_knows_the_same_functions() -> None:
    fake = Fake(lambda *_: None)
    assert all(callable(fake[name]) for name in cublaslt.FUNCTIONS)


def _cuda(version: int, home: str | None) -> Any:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: version)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, get_cuda_path=lambda: home))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cublaslt, "_loaded", list)
    monkeypatch.setattr(
        cublaslt, "wheels", lambda: [Path("/w/12/lib/libcublasLt.so.12"), Path("/w/13/lib/libcublasLt.so.13")]
    )
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcublasLt.so.12").touch()
    return tmp_path


def test_where_the_library_is_looked_for(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(cublaslt.candidates(_cuda(12090, str(places)))) == [
        "/w/12/lib/libcublasLt.so.12",
        str(places / "lib64" / "libcublasLt.so.12"),
        "libcublasLt.so.12",
    ]
    assert list(cublaslt.candidates(_cuda(13000, None))) == ["/w/13/lib/libcublasLt.so.13", "libcublasLt.so.13"]
    monkeypatch.setattr(cublaslt, "_loaded", lambda: ["/another/libcublasLt.so.13", "/cupy/libcublasLt.so.12"])
    assert next(iter(cublaslt.candidates(_cuda(12090, None)))) == "/cupy/libcublasLt.so.12"


def test_a_missing_library_is_named_with_all_that_was_tried(places: Path) -> None:
    (places / "lib64" / "libcublasLt.so.77").write_text("no library")
    with pytest.raises(
        DeviceError, match=r"need cuBLASLt: pip install 'ddp-runtime\[cuda77\]'. Tried /.*; libcublasLt"
    ):
        cublaslt.load(_cuda(77000, str(places)))


def test_a_library_that_is_not_cublaslt() -> None:
    with pytest.raises(DeviceError, match="libm is not the cuBLASLt of CUDA 12 or newer: it has no cublasLtCreate"):
        cublaslt.LtLibrary(ctypes.CDLL("libm.so.6"), "libm")


def test_a_status_in_words() -> None:
    library = cublaslt.LtLibrary(Fake(lambda *_: None), "here")
    assert library.explain(15) == "CUBLAS_STATUS_NOT_SUPPORTED (15) of <cuBLASLt 120903 of here>"
    assert library.explain(99) == "a status of the stand-in (99) of <cuBLASLt 120903 of here>"


def test_the_stand_in_refuses_what_the_library_refuses() -> None:
    library = cublaslt.LtLibrary(Fake(lambda *_: None))
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        library.create("cublasLtMatrixLayoutCreate", cublaslt.TYPES["float32"], 4, 4, 3)
    desc = library.create("cublasLtMatmulDescCreate", cublaslt.COMPUTE_32F, 0)
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        library.set("cublasLtMatmulDescSetAttribute", desc, (7, ctypes.c_uint64), 4)
    side = MatrixSpec("float32", False, 8, 0, 16)
    with pytest.raises(UnsupportedMatmul, match="NOT_SUPPORTED"):
        LtMatmul(library, library.handle(0), MatmulSpec(8, 4, 8, 1, side, side._replace(dtype="float64"), side))
    with pytest.raises(UnsupportedMatmul, match="INVALID_VALUE"):  # a bias without a pointer
        LtMatmul(library, library.handle(0), MatmulSpec(8, 4, 8, 1, side, side, side, epilogue="BIAS"))
