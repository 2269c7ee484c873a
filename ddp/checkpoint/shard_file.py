"""One rank's file: written in large pieces while its checksums are computed, and believed tensor by tensor when read.

The data is written from where it is. SHA-256 is computed meanwhile, by another thread unless training wants the cores:
it lets go of the GIL, takes less time than writing does, and refuses whatever else could have come of a tensor's bytes.

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
from typing import Any

import numpy as np

from ddp._files import open_regular
from ddp.checkpoint.agreement import reason
from ddp.checkpoint.manifest import DamagedCheckpoint, ShardInfo
from ddp.serialization.safetensors import METADATA, FileLayout

Array = np.ndarray[Any, Any]

_SYNCED = 1 << 24  # bytes after which the system is asked to begin with the disk
_CHUNK = 1 << 21  # bytes of a system call: they are still in the cache when their checksum is computed
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
    digests = {METADATA: hashlib.sha256(layout.begin), **{name: hashlib.sha256() for name in layout.starts}}
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "checksums") as helper:  # starts its thread when it is given work

        def chunks() -> Iterator[memoryview]:
            gathered = bytearray(layout.begin)
            for name in layout.starts:
                array, update = arrays[name], digests[name].update
                # In C order; an array that has its elements in another order is copied piece by piece.
                flat, count = array.reshape(-1) if array.flags.c_contiguous else array.flat, _CHUNK // array.itemsize
                for at in range(0, array.size, count):
                    chunk = flat[at : at + count].view(np.uint8).data
                    if in_background:
                        update(chunk)
                    else:
                        pending.append(helper.submit(update, chunk))
                        if len(pending) > _AHEAD:
                            pending.popleft().result()
                    if len(gathered) + len(chunk) > _SMALL:
                        yield memoryview(gathered)
                        gathered = bytearray()
                    if len(chunk) > _SMALL:
                        yield chunk
                        progress()
                    else:
                        gathered += chunk
            yield memoryview(gathered)

        write_file(path, chunks())
    nbytes = len(layout.begin) + sum(array.nbytes for array in arrays.values())
    return ShardInfo(nbytes, len(layout.begin), {name: digest.hexdigest() for name, digest in digests.items()})


def write_file(path: str, chunks: Iterator[memoryview]) -> None:
    """Writes a new file, to the disk. Raises: FileExistsError if there is something of that name."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        written = started = 0
        for chunk in chunks:
            written += len(chunk)
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
            if written - started >= _SYNCED:
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


class ShardReader:
    """A rank's file, open for reading, whose bytes are handed out only if they are those that were written.

    Raises: DamagedCheckpoint, also if the file is of another length than it was, or cannot be read.
    """

    def __init__(self, path: str, shard: ShardInfo) -> None:
        self._path, self._shard = path, shard
        try:
            self._file = open(open_regular(path), "rb", buffering=0)  # noqa: SIM115  # closed by `__exit__`
        except OSError as error:
            raise self._damage(reason(error)) from error
        size = os.fstat(self._file.fileno()).st_size
        if size != shard.bytes:
            self._file.close()
            raise self._damage(f"it has {size:,} bytes, and {shard.bytes:,} were written")

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _damage(self, what: str) -> DamagedCheckpoint:
        folder, name = os.path.split(self._path)
        return DamagedCheckpoint(f"{folder}: {name}: {what}")

    def read(
        self,
        name: str,
        at: int,
        nbytes: int,
        into: memoryview | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads and verifies a tensor's bytes, from byte `at` on. What is in `into` after an error means nothing.

        into: where the bytes go; None: nowhere
        """
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(nbytes, _CHUNK) if into is None else 0))
        for start in range(0, nbytes, _CHUNK):
            count = min(_CHUNK, nbytes - start)
            view = buffer[:count] if into is None else into[start : start + count]
            self._fill(at + start, view)
            digest.update(view)
            progress()
        if digest.hexdigest() != self._shard.sums[name]:
            what = "its header" if name == METADATA else f"{name}, bytes {at:,} to {at + nbytes:,},"
            raise self._damage(f"{what} is not what was written")

    def _fill(self, at: int, view: memoryview) -> None:
        while view:
            try:
                got = os.preadv(self._file.fileno(), [view], at)
            except OSError as error:
                raise self._damage(reason(error)) from error
            if got == 0:
                raise self._damage("it became shorter while it was read")
            at, view = at + got, view[got:]
