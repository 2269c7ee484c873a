"""Each way to the library is shown to load it: the real one where its packages are installed, and the stub."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.backends.nccl import library
from collectives.backends.nccl.library import load, wheel
from collectives.errors import ArgumentError, BackendError

Run = Callable[..., subprocess.CompletedProcess[str]]

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
    done = run_job([sys.executable, "-c", TRIES, source])
    assert done.returncode == 0, done.stderr
    path, minor = done.stdout.split()
    assert source == "cupy" or Path(path).samefile(real)  # CuPy's extension is linked to it
    assert int(minor) >= 18


@pytest.mark.parametrize("source", NEEDS)
def test_the_stub_is_loaded(run_job: Run, stub: Callable[..., Path], source: str) -> None:
    needs(NEEDS[source])
    mine = stub()
    env = {
        "pynccl": {"NUMBA_NCCLLIB": str(mine.parent)},
        "cupy": {"LD_PRELOAD": str(mine)},
        "path": {"LD_LIBRARY_PATH": str(mine.parent)},
    }[source]
    if source == "path" and wheel() is not None:
        pytest.skip("the package nvidia-nccl goes before the system's library")
    done = run_job([sys.executable, "-c", TRIES, source], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "32"
    assert source != "pynccl" or Path(done.stdout.split()[0]).samefile(mine)


def test_a_named_file_is_loaded_and_nothing_else(stub: Callable[..., Path], tmp_path: Path) -> None:
    for source in ("auto", "path"):
        nccl = load(source, stub(19))
        assert nccl.version == (2, 19, 3)
        assert Path(nccl.path).samefile(stub(19))
    with pytest.raises(BackendError, match=rf"{tmp_path}/none.so could not be loaded. Tried path: OSError: "):
        load(path=tmp_path / "none.so")
    with pytest.raises(BackendError, match=r"Tried path: BackendError: libm.so.6 is not NCCL"):
        load(path="libm.so.6")
    with pytest.raises(ArgumentError, match='goes with source="path"'):
        load("pynccl", stub())
    with pytest.raises(ArgumentError, match="pynccl, cupy, path, is 'conda'"):
        load("conda")


def test_auto_tries_them_in_order_and_says_why_each_failed(
    monkeypatch: pytest.MonkeyPatch, stub: Callable[..., Path]
) -> None:
    def fails(why: str) -> Callable[[], ctypes.CDLL]:
        def way() -> ctypes.CDLL:
            raise ImportError(why)

        return way

    monkeypatch.setattr(
        library, "_WAYS", {"pynccl": fails("no numba"), "cupy": fails("no\n cupy"), "path": fails("no file")}
    )
    tried = r"Tried pynccl: ImportError: no numba; cupy: ImportError: no cupy; path: ImportError: no file$"
    with pytest.raises(BackendError, match=tried):
        load()
    with pytest.raises(BackendError, match=r"Tried cupy: ImportError: no cupy$"):
        load("cupy")
    ways = {"pynccl": fails("no numba"), "cupy": lambda: ctypes.CDLL(str(stub(19))), "path": fails("never asked")}
    monkeypatch.setattr(library, "_WAYS", ways)
    assert load().version == (2, 19, 3)


def test_pynccl_is_shown_the_package_and_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path("/somewhere/nvidia/nccl/lib/libnccl.so.2")
    monkeypatch.delenv("NUMBA_NCCLLIB", raising=False)
    seen = {}
    with pytest.raises(KeyError), library._shown_to_pynccl(file):
        raise KeyError(seen.setdefault("while", os.environ["NUMBA_NCCLLIB"]))
    assert seen == {"while": "/somewhere/nvidia/nccl/lib"}
    assert "NUMBA_NCCLLIB" not in os.environ
    monkeypatch.setenv("NUMBA_NCCLLIB", "/my/own")
    with library._shown_to_pynccl(file):
        assert os.environ["NUMBA_NCCLLIB"] == "/my/own"
    assert os.environ["NUMBA_NCCLLIB"] == "/my/own"
