"""The table against NVIDIA's own header, and against libraries that lack some of it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.backends.nccl import table
from collectives.backends.nccl.library import wheel
from collectives.backends.nccl.table import DTYPES, FUNCTIONS, OPS, RESULTS, Nccl, UniqueId, parse_version
from collectives.errors import ArgumentError, BackendError, DtypeError
from collectives.nccl_config import SINCE, Config, NcclConfig, configuration
from collectives.reduction import ReduceOp

C_TYPES: dict[str, Any] = {
    "void*": c_void_p,
    "char*": c_char_p,
    "void": None,
    "int": c_int,
    "int*": POINTER(c_int),
    "size_t": c_size_t,
    "unsigned int": c_uint,
    "ncclResult_t": c_int,
    "ncclResult_t*": POINTER(c_int),
    "ncclDataType_t": c_int,
    "ncclRedOp_t": c_int,
    "ncclRedOp_t*": POINTER(c_int),
    "ncclScalarResidence_t": c_int,
    "ncclComm_t": c_void_p,
    "ncclComm_t*": POINTER(c_void_p),
    "cudaStream_t": c_void_p,
    "ncclUniqueId": UniqueId,
    "ncclUniqueId*": POINTER(UniqueId),
    "ncclConfig_t*": POINTER(Config),
    "void**": POINTER(c_void_p),
    "ncclWindow_t": c_void_p,
    "ncclWindow_t*": POINTER(c_void_p),
}


@pytest.fixture(scope="module")
def header() -> str:
    """nccl.h of the installed package, without comments."""
    library = wheel()
    if library is None:
        pytest.skip("nvidia-nccl-cu12 or -cu13 is not installed")
    text = (library.parent.parent / "include" / "nccl.h").read_text()
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def c_type(declared: str) -> str:
    """A parameter's type: `const void* sendbuff` is `void*`."""
    words = re.sub(r"\bconst\b", "", declared.replace("*", " * ")).split()
    stars = words.count("*")
    names = [word for word in words if word != "*"]
    if len(names) > 1 and names[-1] not in ("int",):
        names.pop()  # the parameter's own name
    return " ".join(names) + "*" * stars


def test_every_function_is_declared_as_in_the_header(header: str) -> None:
    for name, function in FUNCTIONS.items():
        found = re.search(rf"^\s*((?:const\s+)?\w+\s*\*?)\s*\b{name}\s*\(([^)]*)\)\s*;", header, re.MULTILINE)
        assert found, f"nccl.h has no {name}"
        result, parameters = found.groups()
        declared = tuple(C_TYPES[c_type(each)] for each in parameters.split(",") if each.strip() not in ("", "void"))
        assert (function.arguments, function.result) == (declared, C_TYPES[c_type(result + " x")]), name


def enum(header: str, name: str) -> dict[str, int]:
    body = re.search(rf"typedef\s+enum\s*\{{([^}}]*)\}}\s*{name}\s*;", header)
    assert body, name
    return {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)\s*(?=,|$)", body[1].strip())}


def test_the_numbers_are_those_of_the_header(header: str) -> None:
    results = enum(header, "ncclResult_t")
    assert {code: text.split(",")[0] for code, text in RESULTS.items()} == {
        code: name for name, code in results.items() if name != "ncclNumResults"
    }
    types = enum(header, "ncclDataType_t")
    for dtype, (code, _) in DTYPES.items():
        name = {"int": "Int", "uint": "Uint", "float": "Float", "bfloat": "Bfloat"}[dtype.name.rstrip("0123456789")]
        assert types[f"nccl{name}{dtype.itemsize * 8}"] == code
    ops = enum(header, "ncclRedOp_t")
    names = {ReduceOp.SUM: "Sum", ReduceOp.PROD: "Prod", ReduceOp.MAX: "Max", ReduceOp.MIN: "Min", ReduceOp.MEAN: "Avg"}
    assert {op: code for op, (code, _) in OPS.items()} == {op: ops[f"nccl{name}"] for op, name in names.items()}
    assert enum(header, "ncclScalarResidence_t")["ncclScalarHostImmediate"] == table.HOST_IMMEDIATE
    assert f"#define NCCL_UNIQUE_ID_BYTES {table.UNIQUE_ID_BYTES}" in header
    assert f"#define NCCL_SPLIT_NOCOLOR {table.NO_COLOR}" in header


def test_the_configuration_begins_as_the_headers_does(header: str) -> None:
    body = re.search(r"typedef\s+struct\s+ncclConfig_v\d+\s*\{([^}]*)\}\s*ncclConfig_t\s*;", header)
    assert body
    declared = [line.strip() for line in body[1].split(";") if line.strip()]
    for (name, kind), line in zip(Config._fields_, declared, strict=False):
        assert re.split(r"[\s*]+", line)[-1] == name
        assert {**C_TYPES, "char*": c_char_p}[c_type(line)] == kind
    assert {name for name, _ in Config._fields_[3:]} == set(SINCE)
    config = configuration(None, (2, 14, 3))
    assert int(re.search(r"#define NCCL_API_MAGIC (0x\w+)", header)[1], 16) == config.magic  # type: ignore[index]
    assert "#define NCCL_CONFIG_UNDEF_INT INT_MIN" in header
    assert "#define NCCL_WIN_COLL_SYMMETRIC 0x01" in header
    assert table.SYMMETRIC == 1


def test_a_configuration_is_as_old_as_what_is_set_allows() -> None:
    def made(*version: int, **wanted: Any) -> tuple[int, int]:
        config = configuration(NcclConfig(**wanted), version)
        return config.size, config.version

    assert made(2, 14, 3) == (24, 21400)
    assert made(2, 32, 3) == (24, 21400)
    assert made(2, 17, 1, max_ctas=8) == (40, 21700)
    assert made(2, 26, 2, max_ctas=8, traffic_class=3) == (48, 22600)
    assert made(2, 32, 3, nvls_ctas=4) == (ctypes.sizeof(Config), 22700)
    config = configuration(NcclConfig(min_ctas=2, max_ctas=8, net_name="IB"), (2, 32, 3))
    assert (config.blocking, config.minCTAs, config.maxCTAs, config.netName) == (0, 2, 8, b"IB")
    assert (config.cgaClusterSize, config.trafficClass, config.commName) == (-(2**31), -(2**31), None)
    with pytest.raises(BackendError, match=r"max_ctas needs NCCL 2\.17 or newer, and this is 2\.16\.5"):
        configuration(NcclConfig(max_ctas=8), (2, 16, 5))


@pytest.mark.parametrize(
    "wrong",
    [{"min_ctas": 0}, {"max_ctas": -1}, {"min_ctas": 9, "max_ctas": 8}, {"net_name": ""}, {"cga_cluster_size": 9}],
)
def test_what_nccl_would_refuse_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="NcclConfig"):
        NcclConfig(**wrong)


def test_version_numbers() -> None:
    assert parse_version(2708) == (2, 7, 8)
    assert parse_version(21005) == (2, 10, 5)
    assert parse_version(23203) == (2, 32, 3)


@pytest.mark.parametrize("minor", [7, 10, 12, 14, 32])
def test_a_library_has_what_its_version_promises(stub: Callable[..., Path], minor: int) -> None:
    nccl = Nccl(ctypes.CDLL(str(stub(minor))), "the stub")
    assert nccl.version == (2, minor, 3)
    for name, function in FUNCTIONS.items():
        assert nccl.has(name) == (function.since <= (2, minor))
        if not nccl.has(name):
            needs = rf"{name} needs NCCL 2\.{function.since[1]} or newer, and this is <NCCL 2\.{minor}\.3 of the stub>"
            with pytest.raises(BackendError, match=needs):
                nccl.call(name)


def test_a_dtype_or_reduction_of_a_newer_version(stub: Callable[..., Path]) -> None:
    old = Nccl(ctypes.CDLL(str(stub(7))))
    bfloat16 = next(dtype for dtype in DTYPES if dtype.name == "bfloat16")
    assert not old.has_op(ReduceOp.MEAN)
    with pytest.raises(BackendError, match=r"bfloat16 by NCCL needs version 2\.10, and this is <NCCL 2\.7\.3"):
        old.dtype_code(bfloat16)
    with pytest.raises(BackendError, match=r"a mean by NCCL needs version 2\.10"):
        old.op_code(ReduceOp.MEAN)
    with pytest.raises(DtypeError, match="NCCL has no int16; it has int8"):
        old.dtype_code(np.dtype(np.int16))


def test_a_function_that_is_missing_though_the_version_has_it(stub: Callable[..., Path]) -> None:
    whole = ctypes.CDLL(str(stub()))

    class Partial:
        """A library that was linked without one of its functions."""

        def __getattr__(self, name: str) -> Any:
            if name == "ncclCommSplit":
                raise AttributeError(name)
            return getattr(whole, name)

        def __getitem__(self, name: str) -> Any:
            return whole[name]

    nccl = Nccl(Partial())  # type: ignore[arg-type]
    assert not nccl.has("ncclCommSplit")
    with pytest.raises(BackendError, match=r"has no ncclCommSplit, though NCCL has it since 2\.18: .* incomplete"):
        nccl.call("ncclCommSplit")


def test_a_library_that_is_not_nccl() -> None:
    with pytest.raises(BackendError, match="libm is not NCCL: it has no ncclGetVersion"):
        Nccl(ctypes.CDLL("libm.so.6"), "libm")


def test_whoever_loaded_the_library_keeps_his_declarations(stub: Callable[..., Path]) -> None:
    dll = ctypes.CDLL(str(stub()))
    dll.ncclAllReduce.argtypes = (c_int,)
    Nccl(dll)
    assert dll.ncclAllReduce.argtypes == (c_int,)
