"""Builds the stub, and speaks to what it has beside NCCL's functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("nccl.c")


def build(directory: Path, minor: int = 32) -> Path:
    """The stub of NCCL 2.`minor`, built into a directory of its own below `directory`; skips without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        import pytest  # here, since ranks have no use for it

        pytest.skip("there is no C compiler to build the stub libnccl")
    library = directory / f"nccl-2.{minor}" / "libnccl.so.2"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(".new")
        flags = ["-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libnccl.so.2"]
        command = [compiler, *flags, f"-DSTUB_MINOR={minor}", "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, timeout=60)
        made.rename(library)
    return library


class Stub:
    """The stub's own functions. Streams are any numbers."""

    def __init__(self, library: Path | str) -> None:
        dll = ctypes.CDLL(str(library))
        dll.stubEventRecord.argtypes = (ctypes.c_void_p,)
        dll.stubEventRecord.restype = ctypes.c_uint64
        dll.stubEventDone.argtypes = (ctypes.c_uint64,)
        dll.stubLastCount.restype = ctypes.c_uint64
        self.dll = dll

    def record(self, stream: int) -> StubEvent:
        """An event at the present end of a stream."""
        return StubEvent(self, self.dll.stubEventRecord(stream))

    def last_count(self) -> int:
        """The count of the last operation of this process."""
        return int(self.dll.stubLastCount())

    def most_ctas(self) -> int:
        """The last max_ctas that a communicator was made with."""
        return int(self.dll.stubMostCtas())

    def live(self) -> int:
        """How many communicators of this process were neither destroyed nor aborted."""
        return int(self.dll.stubLive())


class StubEvent:
    """What was enqueued on a stream when it was recorded."""

    def __init__(self, stub: Stub, ticket: int) -> None:
        self._stub = stub
        self._ticket = ticket

    @property
    def done(self) -> bool:
        """True once all of it is complete."""
        return bool(self._stub.dll.stubEventDone(self._ticket))

    def wait(self, timeout: float = 20.0) -> None:
        """Returns once all of it is complete."""
        deadline = time.monotonic() + timeout
        while not self.done:
            assert time.monotonic() < deadline, "an event of the stub was not complete in time"
            time.sleep(0.0002)
