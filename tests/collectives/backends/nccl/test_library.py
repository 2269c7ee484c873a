"""Each way to the library loads it, the real one where its packages are installed and the stub; and its functions."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.backends.nccl import library
from collectives.backends.nccl.library import (
    DTYPES,
    FUNCTIONS,
    OPS,
    RESULTS,
    Config,
    Nccl,
    NcclConfig,
    UniqueId,
    configuration,
    load,
    wheel,
)
from collectives.errors import ArgumentError, BackendError, DtypeError
from collectives.reduction import ReduceOp
from tests.conftest import Run

# Ids and groups need no GPU; a communicator without one is an error in NCCL's own words.
TRIES = """
import sys
from collectives import NcclError
from collectives.backends.nccl.nccl_communicator import NcclCommunicator, unique_id
from collectives.backends.nccl.library import load
nccl = load(sys.argv[1])
assert len(unique_id(nccl)) == 128 and unique_id(nccl) != unique_id(nccl)
assert nccl.call("ncclGroupStart") == 0 and nccl.call("ncclGroupEnd") == 0
try:
    NcclCommunicator.connect(nccl, unique_id(nccl), 0, 1, timeout=30).close()
except NcclError as error:
    assert "NCCL says: " in str(error), error
print(nccl.path, nccl.version[1])
"""
NEEDS = {"pynccl": "pynccl", "cupy": "cupy", "path": "numpy"}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("source", NEEDS)
def test_the_real_library_is_loaded(run_job: Run, source: str) -> None:
    needs(NEEDS[source])
    real = wheel()
    if real is None:
        pytest.skip("nvidia-nccl-cu12 or -cu13 is not installed")
    done = run_job([sys.executable, "-c", TRIES, source], code=0)
    path, minor = done.stdout.split()
    assert source == "cupy" or Path(path).samefile(real)  # CuPy's extension is linked to it
    assert int(minor) >= 18


def test_auto_tries_them_in_order_and_says_why_each_failed(
    monkeypatch: pytest.MonkeyPatch, stub: Callable[..., Path]
) -> None:
    def fails(why: str) -> Callable[[], ctypes.CDLL]:
        def way() -> ctypes.CDLL:
            raise ImportError(why)

        return way

    monkeypatch.setattr(
        library, "_LOADERS", {"pynccl": fails("no numba"), "cupy": fails("no\n cupy"), "path": fails("no file")}
    )
    tried = r"Tried pynccl: ImportError: no numba; cupy: ImportError: no cupy; path: ImportError: no file$"
    with pytest.raises(BackendError, match=tried):
        load()
    with pytest.raises(BackendError, match=r"Tried cupy: ImportError: no cupy$"):
        load("cupy")
    with pytest.raises(ArgumentError, match="pynccl, cupy, path, is 'conda'"):
        load("conda")
    ways = {"pynccl": fails("no numba"), "cupy": lambda: ctypes.CDLL(str(stub(18))), "path": fails("never asked")}
    monkeypatch.setattr(library, "_LOADERS", ways)
    assert load().version == (2, 18, 3)


# The functions, against NVIDIA's own header and against libraries that lack some of them ------------------------------

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
    "ncclComm_t": c_void_p,
    "ncclComm_t*": POINTER(c_void_p),
    "cudaStream_t": c_void_p,
    "ncclUniqueId": UniqueId,
    "ncclUniqueId*": POINTER(UniqueId),
    "ncclConfig_t*": POINTER(Config),
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
    for name, arguments in FUNCTIONS.items():
        match = re.search(rf"^\s*((?:const\s+)?\w+\s*\*?)\s*\b{name}\s*\(([^)]*)\)\s*;", header, re.MULTILINE)
        assert match, f"nccl.h has no {name}"
        result, parameters = match.groups()
        declared = tuple(C_TYPES[c_type(each)] for each in parameters.split(",") if each.strip() not in ("", "void"))
        assert arguments == declared, name
        assert (C_TYPES[c_type(result + " x")] == c_char_p) == (name in library._TEXTS)


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
    for dtype, code in DTYPES.items():
        name = {"int": "Int", "uint": "Uint", "float": "Float", "bfloat": "Bfloat"}[dtype.name.rstrip("0123456789")]
        assert types[f"nccl{name}{dtype.itemsize * 8}"] == code
    ops = enum(header, "ncclRedOp_t")
    names = {ReduceOp.SUM: "Sum", ReduceOp.PROD: "Prod", ReduceOp.MAX: "Max", ReduceOp.MIN: "Min", ReduceOp.MEAN: "Avg"}
    assert {op: ops[f"nccl{name}"] for op, name in names.items()} == OPS
    assert f"#define NCCL_UNIQUE_ID_BYTES {library.UNIQUE_ID_BYTES}" in header


def test_the_configuration_begins_as_the_headers_does(header: str) -> None:
    body = re.search(r"typedef\s+struct\s+ncclConfig_v\d+\s*\{([^}]*)\}\s*ncclConfig_t\s*;", header)
    assert body
    declared = [line.strip() for line in body[1].split(";") if line.strip()]
    for (name, kind), line in zip(Config._fields_, declared, strict=False):
        assert re.split(r"[\s*]+", line)[-1] == name
        assert {**C_TYPES, "char*": c_char_p}[c_type(line)] == kind
    config = configuration(NcclConfig(min_ctas=2, max_ctas=8, net_name="IB"))
    assert (config.size, config.version) == (48, 21800)
    assert (config.blocking, config.minCTAs, config.maxCTAs, config.netName) == (0, 2, 8, b"IB")
    assert config.cgaClusterSize == config.splitShare == -(2**31)
    assert int(re.search(r"#define NCCL_API_MAGIC (0x\w+)", header)[1], 16) == config.magic  # type: ignore[index]
    assert "#define NCCL_CONFIG_UNDEF_INT INT_MIN" in header


@pytest.mark.parametrize(
    "wrong",
    [{"min_ctas": 0}, {"max_ctas": -1}, {"min_ctas": 9, "max_ctas": 8}, {"net_name": ""}, {"cga_cluster_size": 9}],
)
def test_what_nccl_would_refuse_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="NcclConfig"):
        NcclConfig(**wrong)


def test_what_a_library_lacks_is_named(stub: Callable[..., Path]) -> None:
    nccl = Nccl(ctypes.CDLL(str(stub(18))), "the stub")
    with pytest.raises(BackendError, match=r"<NCCL 2\.18\.3 of the stub> has no ncclNew: it is too old"):
        nccl.call("ncclNew")
    with pytest.raises(DtypeError, match="NCCL has no int16; it has int8"):
        nccl.dtype_code(np.dtype(np.int16))
    with pytest.raises(BackendError, match=r"<NCCL 2\.12\.3 of the stub> is too old: NCCL 2\.18 or newer is needed"):
        Nccl(ctypes.CDLL(str(stub(12))), "the stub")
    with pytest.raises(BackendError, match="libm is not NCCL, and not linked to it: it has no ncclGetVersion"):
        Nccl(ctypes.CDLL("libm.so.6"), "libm")
