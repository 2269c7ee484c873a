"""One rank's file: written in large pieces while its checksums are computed, and believed block by block when read.

The data is written from where it is. SHA-256 is computed meanwhile, by another thread unless training wants the cores:
it lets go of the GIL, takes less time than writing does, and refuses whatever else could have come of a block of bytes.

An fsync that has failed is not repeated: the system may have dropped what was to be written, and the next would succeed
over a hole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from ddp._files import open_regular
from ddp.checkpoint.agreement import reason
from ddp.checkpoint.manifest import DamagedCheckpoint, ShardInfo
from ddp.serialization.safetensors import FileLayout

Array = np.ndarray[Any, Any]

BLOCK = 1 << 24  # bytes of which there is a checksum: what must be read to believe a byte
_CHUNK = 1 << 21  # bytes of a system call: one that is written is still in the cache when its checksum is computed
_AHEAD = 16  # chunks that may be written before their checksums are computed
_SMALL = 1 << 20  # arrays are gathered up to so many bytes, so that a thousand of them are not a thousand calls


def write_shard(
    path: str,
    arrays: Mapping[str, Array],
    layout: FileLayout,
    progress: Callable[[], None],
    in_background: bool = False,
) -> ShardInfo:
    """Writes a new safetensors file, to the disk.

    progress: called now and then; in_background: in this thread alone, which takes longer and leaves a core to others

    Raises: OSError; a part of the file may exist then.
    """
    sums = _Checksums()
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "checksums") as helper:  # starts its thread when it is given work

        def chunks() -> Iterator[memoryview]:
            for chunk in _chunks(arrays, layout):
                if in_background:
                    sums.add(chunk)
                else:
                    pending.append(helper.submit(sums.add, chunk))
                    if len(pending) > _AHEAD:
                        pending.popleft().result()
                yield chunk
                progress()

        write_file(path, chunks())
    return sums.shard()


def write_file(path: str, chunks: Iterator[memoryview]) -> None:
    """Writes a new file, to the disk. Raises: FileExistsError if there is something of that name."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        written = started = 0
        for chunk in chunks:
            written += len(chunk)
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
            if written - started >= BLOCK:
                # The disk begins during what comes next, so that less is left for the fsync; then the data leaves the
                # page cache, as it is not read again.
                with contextlib.suppress(OSError):  # not every file system takes such advice
                    os.posix_fadvise(fd, started, written - started, os.POSIX_FADV_DONTNEED)
                started = written
        os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that came first says more
            os.close(fd)
        raise
    os.close(fd)  # a network file system may report here that it was full


def sync_folder(path: str) -> None:
    """Returns once the names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def remove_folder(path: str) -> None:
    """Removes a folder of files, or as much of it as exists; in order: a manifest goes before what it describes."""
    with contextlib.suppress(FileNotFoundError):  # another process removes it too
        for name in sorted(os.listdir(path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)


def _chunks(arrays: Mapping[str, Array], layout: FileLayout) -> Iterator[memoryview]:
    """The bytes of the file, in order."""
    gathered = bytearray(layout.begin)
    for name in layout.starts:
        array = arrays[name]
        if len(gathered) + array.nbytes > _SMALL:
            yield memoryview(gathered)
            gathered = bytearray()
        if array.nbytes <= _SMALL:
            gathered += array.tobytes()
            continue
        # In C order; an array that has its elements in another order is copied piece by piece.
        flat, count = array.reshape(-1) if array.flags.c_contiguous else array.flat, _CHUNK // array.itemsize
        for at in range(0, array.size, count):
            yield flat[at : at + count].view(np.uint8).data
    if gathered:
        yield memoryview(gathered)


class _Checksums:
    """The checksums of a file that comes in chunks of any length."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._sum = hashlib.sha256()
        self._length = 0

    def add(self, data: memoryview) -> None:
        while data:
            left = BLOCK - self._length % BLOCK
            self._sum.update(data[:left])
            self._length += len(data[:left])
            data = data[left:]
            if self._length % BLOCK == 0:
                self._done.append(self._sum.hexdigest())
                self._sum = hashlib.sha256()

    def shard(self) -> ShardInfo:
        rest = [self._sum.hexdigest()] if self._length % BLOCK else []
        return ShardInfo(self._length, [*self._done, *rest])


class VerifiedFile:
    """A file, open for reading, whose bytes are handed out only if they are those that were written.

    Raises: DamagedCheckpoint, also if the file is of another length than it was, or cannot be read.
    """

    def __init__(self, path: str, shard: ShardInfo, block: int) -> None:
        self._name = os.path.basename(path)
        self._shard, self._block = shard, block
        self._held = -1  # the block that is in the buffer
        self._buffer = memoryview(b"")
        try:
            self._file = open(open_regular(path), "rb", buffering=0)  # noqa: SIM115  # closed by `close`
        except OSError as error:
            self._fail(error)
        size = os.fstat(self._file.fileno()).st_size
        if size != shard.bytes:
            self.close()
            self._fail(f"it has {size:,} bytes, and {shard.bytes:,} were written")

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _fail(self, what: str | OSError) -> NoReturn:
        if isinstance(what, OSError):
            raise DamagedCheckpoint(f"{self._name}: {reason(what)}") from what
        raise DamagedCheckpoint(f"{self._name}: {what}")

    def read_into(self, at: int, view: memoryview) -> None:
        """Fills `view` from byte `at` on. What is in it after an error means nothing."""
        while view:
            index, offset = divmod(at, self._block)
            count = min(len(view), self._length(index) - offset)
            if count == self._length(index):  # a whole block goes where it is wanted
                self._load(index, view[:count])
            else:
                if index != self._held:
                    self.verify(index)
                    self._held = index
                view[:count] = self._buffer[offset : offset + count]
            at += count
            view = view[count:]

    def verify(self, index: int) -> None:
        """Reads one block."""
        length = self._length(index)
        if len(self._buffer) != length:
            self._buffer = memoryview(bytearray(length))
        self._held = -1
        self._load(index, self._buffer)

    def _length(self, index: int) -> int:
        return min(self._block, self._shard.bytes - index * self._block)

    def _load(self, index: int, view: memoryview) -> None:
        start = index * self._block
        at, rest = start, view
        try:
            while rest:
                got = os.preadv(self._file.fileno(), [rest], at)
                if got == 0:
                    self._fail("it became shorter while it was read")
                at, rest = at + got, rest[got:]
        except OSError as error:
            self._fail(error)
        if hashlib.sha256(view).hexdigest() != self._shard.sums[index]:
            self._fail(f"bytes {start:,} to {start + len(view):,} are not those that were written")
