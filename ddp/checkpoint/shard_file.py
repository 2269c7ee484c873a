"""One rank's file: written in large pieces while its checksums are computed, and believed block by block when read.

The data is written from where it is. SHA-256 is computed meanwhile, by another thread unless training wants the cores:
it lets go of the GIL, takes less time than writing does, and refuses whatever else could have come of a block of bytes.
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
from ddp.checkpoint import disk
from ddp.checkpoint.agreement import reason
from ddp.checkpoint.manifest import DamagedCheckpoint, ShardInfo
from ddp.serialization.safetensors import lay_out

Array = np.ndarray[Any, Any]

BLOCK = 1 << 24  # bytes of which there is a checksum: what must be read to believe a byte
_CHUNK = 1 << 21  # bytes of a system call: one that is written is still in the cache when its checksum is computed
_AHEAD = 16  # chunks
_SMALL = 1 << 20  # arrays are gathered up to so many bytes, so that a thousand of them are not a thousand calls


def write_shard(
    path: str, arrays: Mapping[str, Array], progress: Callable[[], None], in_background: bool = False
) -> ShardInfo:
    """Writes a new safetensors file, to the disk.

    progress: called now and then; in_background: in this thread alone, which takes longer and leaves a core to others

    Raises: OSError; a part of the file may be there then.
    """
    fd = disk.create(path)
    try:
        sums = _Checksums()
        with contextlib.nullcontext(sums) if in_background else _ChecksumThread(sums) as adding:
            written = started = 0
            for chunk in _chunks(arrays):
                adding.add(chunk)
                disk.write(fd, chunk)
                written += len(chunk)
                if written - started >= BLOCK:
                    disk.start_writing(fd, started, written - started)
                    started = written
                progress()
    except BaseException:
        disk.close(fd)
        raise
    disk.finish(fd)
    return sums.shard()


def _chunks(arrays: Mapping[str, Array]) -> Iterator[memoryview]:
    """The bytes of the file, in order."""
    begin, order = lay_out(arrays, {})
    gathered = bytearray(begin)
    for name in order:
        array = arrays[name]
        if len(gathered) + array.nbytes > _SMALL:
            yield memoryview(gathered)
            gathered = bytearray()
        if array.nbytes <= _SMALL:
            gathered += array.tobytes()
        else:
            yield from _large_chunks(array)
    if gathered:
        yield memoryview(gathered)


def _large_chunks(array: Array) -> Iterator[memoryview]:
    """The bytes of a large array in C order, of one that has them in another order copied piece by piece."""
    count = _CHUNK // array.itemsize
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    for at in range(0, array.size, count):
        yield flat[at : at + count].view(np.uint8).data


class _Checksums:
    """The checksums of a file that comes in chunks of any length."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._sum = hashlib.sha256()
        self._length = 0

    def add(self, data: memoryview) -> None:
        while data:
            room = BLOCK - self._length % BLOCK
            self._sum.update(data[:room])
            self._length += len(data[:room])
            data = data[room:]
            if self._length % BLOCK == 0:
                self._done.append(self._sum.hexdigest())
                self._sum = hashlib.sha256()

    def shard(self) -> ShardInfo:
        rest = [self._sum.hexdigest()] if self._length % BLOCK else []
        return ShardInfo(self._length, (*self._done, *rest))


class _ChecksumThread:
    """Adds chunks to checksums in a thread of its own, until the end of the block; in this one where there can be none.

    From Python 3.12 on no thread starts any more once the script has ended, while a save may still be under way.
    """

    def __init__(self, sums: _Checksums) -> None:
        self._sums = sums
        self._helper = ThreadPoolExecutor(1, "checksums")  # starts its thread when it is given work
        self._alone = False
        self._added: deque[Future[None]] = deque()

    def __enter__(self) -> _ChecksumThread:
        return self

    def add(self, data: memoryview) -> None:
        if not self._alone:
            try:
                self._added.append(self._helper.submit(self._sums.add, data))
            except RuntimeError:  # its thread cannot start, or is not to be given any more
                self._alone = True
                while self._added:  # chunks have an order
                    self._added.popleft().result()
        if self._alone:
            self._sums.add(data)
            return
        # Neither waits for the other at every step, nor is more than a little kept alive.
        if len(self._added) == _AHEAD:
            self._added.popleft().result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._helper.shutdown()
        if kind is None:
            for each in self._added:
                each.result()


class VerifiedFile:
    """A file, open for reading, whose bytes are handed out only if they are those that were written.

    Raises: DamagedCheckpoint, also if the file is of another length than it was, or cannot be read.
    """

    def __init__(self, path: str, shard: ShardInfo, block: int) -> None:
        self._name = os.path.basename(path)
        self._shard = shard
        self._block = block
        self._at = 0
        self._held = -1  # the block that is in the buffer
        self._buffer = memoryview(b"")
        self._fd = -1
        try:
            self._fd = open_regular(path)
            size = os.fstat(self._fd).st_size
        except OSError as error:
            self.close()
            self._fail(reason(error))
        if size != shard.bytes:
            self.close()
            self._fail(f"it has {size:,} bytes, and {shard.bytes:,} were written")

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fail(self, what: str) -> NoReturn:
        raise DamagedCheckpoint(f"{self._name}: {what}") from None

    def tell(self) -> int:
        return self._at

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at if whence == os.SEEK_SET else self._shard.bytes + at
        return self._at

    def read(self, count: int) -> bytes:
        found = bytearray(max(0, min(count, self._shard.bytes - self._at)))
        self.readinto(memoryview(found))
        return bytes(found)

    def readinto(self, view: memoryview) -> int:
        """Fills it up to the end of the file; the number of bytes. What is in it after an error means nothing."""
        view = view[: max(0, self._shard.bytes - self._at)]
        total = len(view)
        while view:
            index, offset = divmod(self._at, self._block)
            length = self._length(index)
            if offset == 0 and len(view) >= length:
                self._load(index, view[:length])
                taken = length
            else:
                if index != self._held:
                    self._held, self._buffer = -1, memoryview(bytearray(length))
                    self._load(index, self._buffer)
                    self._held = index
                taken = min(len(view), length - offset)
                view[:taken] = self._buffer[offset : offset + taken]
            self._at += taken
            view = view[taken:]
        return total

    def verify(self, index: int) -> None:
        """Reads one block, and forgets it."""
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
                got = os.preadv(self._fd, [rest], at)
                if got == 0:
                    self._fail("it became shorter while it was read")
                at, rest = at + got, rest[got:]
        except OSError as error:
            self._fail(reason(error))
        if hashlib.sha256(view).hexdigest() != self._shard.sums[index]:
            self._fail(f"bytes {start:,} to {start + len(view):,} are not those that were written")
