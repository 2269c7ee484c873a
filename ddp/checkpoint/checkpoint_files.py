"""The files of a checkpoint: the manifest, which says what it consists of, and the shards, one of each rank.

The manifest is JSON, and has checksums by which each byte of the checkpoint is known:

    {"sha256":"...", "format":"ddp.checkpoint", "version":4, "step":120,
     "files":[[bytes, bytes of the header, "its sha256"], ...],
     "tensors":{"model.0.weight":["F32", [10,64], [[rank, start, stop, at, "sha256"], ...]], ...},
     "state":..., "own_state":[...]}

The first checksum is of all bytes that follow it, so that the text is known to be whole before any of it is parsed.
A tensor's pieces are stretches (start, stop) of its elements in C order, and cover all of them; `at` is the byte of the
rank's file at which one begins.

A shard is a safetensors file. It is written in large pieces, from where the data is. SHA-256 is computed meanwhile, by
another thread: it lets go of the GIL, takes less time than writing does, and refuses whatever else could have come of a
tensor's bytes. An fsync that has failed is not repeated: the system may have dropped what was to be written, and the
next would succeed over a hole.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ddp._files import open_regular
from ddp.checkpoint import remote_files
from ddp.checkpoint.agreement import reason
from ddp.checkpoint.remote_files import is_url
from ddp.errors import CheckpointError
from ddp.serialization.safetensors import CODES, STORED, are_sizes, lay_out

Array = np.ndarray[Any, Any]

MANIFEST_FILE = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 30  # of a manifest: it is read into memory before anything of it is known
_FORMAT = {"format": "ddp.checkpoint", "version": 4}
_BEGIN = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
_SYNCED = 1 << 24  # bytes after which the system is asked to begin with the disk
_CHUNK = 1 << 21  # bytes of a system call: they are still in the cache when their checksum is computed
_AHEAD = 16  # chunks that may be written before their checksums are computed
_COPIES_AHEAD = 3  # the same where a chunk is a copy: this bounds the memory of a save
_SMALL = 1 << 20  # arrays are gathered up to so many bytes, so that a thousand of them are not a thousand calls


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cannot be read, or is not what was written."""


class ShardInfo(NamedTuple):
    """A rank's file: its length and that of its header in bytes, and the header's SHA-256 in hexadecimal digits."""

    bytes: int
    header: int
    sha256: str


class TensorPiece(NamedTuple):
    """Elements start to stop of a tensor that is thought of as flat. rank: whose file has them, from byte `at` on"""

    rank: int
    start: int
    stop: int
    at: int
    sha256: str


class TensorEntry(NamedTuple):
    """A tensor, or what one rank has of it. dtype: its code in safetensors"""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def covered(self, name: str) -> TensorEntry:
        """This entry with its pieces in order. Raises: CheckpointError if they overlap or leave something out."""
        end, size, pieces = 0, math.prod(self.shape), tuple(sorted(self.pieces, key=lambda piece: piece[1:3]))
        for piece in pieces:
            if piece.start != end:
                how = "several ranks" if piece.start < end else "no rank"
                raise CheckpointError(f"{name}: element {min(end, piece.start)} is written by {how}")
            end = piece.stop
        if end != size or not pieces:
            raise CheckpointError(f"{name}: of its {size} elements only {end} are written by a rank")
        return self._replace(pieces=pieces)


class Manifest(NamedTuple):
    """A checkpoint. files, own_state: of each rank"""

    step: int
    files: Sequence[ShardInfo]
    tensors: Mapping[str, TensorEntry]
    state: Any
    own_state: Sequence[Any]


def assemble_tensors(ranks: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint. ranks: what each has written, by name

    Raises: CheckpointError if ranks disagree about a tensor, or their pieces overlap or leave something out.
    """
    found: dict[str, TensorEntry] = {}
    for mine in ranks:
        for name, entry in mine.items():
            first = found.setdefault(name, entry)
            if first[:2] != entry[:2]:
                ours, theirs = (f"{each.dtype} {each.shape} on rank {each.pieces[0].rank}" for each in (first, entry))
                raise CheckpointError(f"{name} is {ours} and {theirs}")
            if first is not entry:
                found[name] = first._replace(pieces=first.pieces + entry.pieces)
    return {name: found[name].covered(name) for name in sorted(found)}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of its file."""
    rest = json.dumps({**_FORMAT, **manifest._asdict()}, separators=(",", ":"))[1:].encode() + b"\n"
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",' + rest


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in a file. Raises: CheckpointError for anything that `encode_manifest` did not write."""
    begin = _BEGIN.match(data)
    if begin is None:
        raise CheckpointError("it does not begin as a manifest does" if data else "it is empty")
    if hashlib.sha256(memoryview(data)[begin.end() :]).hexdigest().encode() != begin[1]:
        raise CheckpointError("its checksum is another: it was changed, or cut off")
    try:
        fields = json.loads(data)
        found = {name: fields.pop(name) for name in _FORMAT}
        if found != _FORMAT:
            raise CheckpointError(f"it is of {found}, and {_FORMAT} is known here"[:200])
        # A valid checksum does not mean that this package wrote it.
        del fields["sha256"]
        manifest = Manifest(**fields)
        step, files = manifest.step, [ShardInfo(*each) for each in manifest.files]
        _require(type(step) is int and 0 <= step < 1 << 63, "step")
        _require(0 < len(files) == len(manifest.own_state) and isinstance(manifest.own_state, list), "files")
        _require(all(are_sizes([*each[:2]]) and each.header <= each.bytes for each in files), "files")
        entries = {name: _entry(name, each, files) for name, each in manifest.tensors.items()}
        return manifest._replace(files=files, tensors=entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it is no manifest of a checkpoint: {error!r:.200}") from None


def _require(holds: bool, name: str) -> None:
    if not holds:
        raise ValueError(f"its {name} cannot be")


def _entry(name: str, value: Any, files: Sequence[ShardInfo]) -> TensorEntry:
    dtype, shape, pieces = value
    _require(dtype in STORED and are_sizes(shape), name)
    entry = TensorEntry(dtype, tuple(shape), tuple(TensorPiece(*each) for each in pieces))
    for rank, start, stop, at, _ in entry.pieces:
        _require(are_sizes([rank, start, stop, at]) and rank < len(files) and start <= stop, name)
        _require(at + (stop - start) * STORED[dtype].itemsize <= files[rank].bytes, name)
    return entry.covered(name)


# -- shards


def write_shard(
    path: str, rank: int, arrays: Mapping[str, Array], pieces: Mapping[str, Any], progress: Callable[[], None]
) -> tuple[ShardInfo, dict[str, TensorEntry]]:
    """Writes a new safetensors file, to the disk, and says what is in it.

    pieces: (start, stop, shape) of the tensor that an array is a piece of, if it is one
    progress: called now and then

    Raises: OSError; a part of the file may exist then.
    """
    layout = lay_out(arrays, {})
    digests = {name: hashlib.sha256() for name in arrays}
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "checksums") as helper:  # starts its thread when it is given work

        def chunks() -> Iterator[memoryview]:
            yield memoryview(layout.begin)
            for name in layout.starts:
                array, update = arrays[name], digests[name].update
                # In C order; an array that has its elements in another order is copied chunk by chunk.
                in_order = array.flags.c_contiguous
                flat = array.reshape(-1) if in_order else array.flat
                ahead = _AHEAD if in_order else _COPIES_AHEAD
                count = _CHUNK // array.itemsize
                for at in range(0, array.size, count):
                    chunk = flat[at : at + count].view(np.uint8).data
                    pending.append(helper.submit(update, chunk))
                    while len(pending) > ahead:
                        pending.popleft().result()
                    yield chunk
                    progress()

        nbytes = write_file(path, chunks())
    entries = {}
    for name, array in arrays.items():
        start, stop, shape = pieces.get(name, (0, array.size, array.shape))
        piece = TensorPiece(rank, start, stop, layout.starts[name], digests[name].hexdigest())
        entries[name] = TensorEntry(CODES[array.dtype], tuple(shape), (piece,))
    return ShardInfo(nbytes, len(layout.begin), hashlib.sha256(layout.begin).hexdigest()), entries


def list_folder(path: str) -> list[str]:
    """The names in a folder, at a path or URL as in all functions here. Raises: OSError, as all do."""
    return remote_files.list_names(path) if is_url(path) else os.listdir(path)


def exists(path: str) -> bool:
    """Whether there is something of that name."""
    return remote_files.exists(path) if is_url(path) else os.path.exists(path)


def open_file(path: str, flags: int = os.O_RDONLY) -> io.FileIO:
    """An unbuffered file for reading; of a URL, what fsspec opens, which has the same methods. flags: as `os.open`'s"""
    return remote_files.open_file(path) if is_url(path) else io.FileIO(open_regular(path, flags))


def write_file(path: str, chunks: Iterable[memoryview]) -> int:
    """Writes a new file, to the disk; its length. Raises: FileExistsError if there is something of that name."""
    if is_url(path):
        return remote_files.write_file(path, chunks)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    written = started = 0
    with os.fdopen(fd, "wb", _SMALL) as file:  # a network file system may report when it is closed that it was full
        for chunk in chunks:
            written += file.write(chunk)
            if written - started >= _SYNCED:
                # The disk begins during what comes next, so that less is left for the fsync; then the data leaves the
                # page cache, as it is not read again.
                with contextlib.suppress(OSError):  # not every file system takes such advice
                    os.posix_fadvise(fd, started, written - started, os.POSIX_FADV_DONTNEED)
                started = written
        file.flush()
        os.fsync(fd)
    return written


def sync_folder(path: str) -> None:
    """Returns once the names in a folder are on the disk. Storage at a URL has kept them when they were written."""
    if is_url(path):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def remove_folder(path: str) -> None:
    """Removes a folder of files, or as much of it as exists; in order: a manifest goes before what it describes."""
    if is_url(path):
        remote_files.remove_folder(path, MANIFEST_FILE)
        return
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
        self._path = path
        try:
            self._file = open_file(path)
            size = self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._damage(reason(error)) from error
        self.close = self._file.close
        if size != shard.bytes:
            self.close()
            raise self._damage(f"it has {size:,} bytes, and {shard.bytes:,} were written")

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _damage(self, what: str) -> DamagedCheckpoint:
        folder, name = os.path.split(self._path)
        return DamagedCheckpoint(f"{folder}: {name}: {what}")

    def verified(
        self,
        what: str,
        at: int,
        nbytes: int,
        sha256: str,
        into: memoryview | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Reads and verifies bytes, from byte `at` on. What is in `into` after an error means nothing.

        what: what errors call them; into: where they go; None: nowhere; progress: called with how many have been read
        """
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(nbytes, _CHUNK) if into is None else 0))
        try:
            self._file.seek(at)
            for start in range(0, nbytes, _CHUNK):
                count = min(_CHUNK, nbytes - start)
                rest = view = buffer[:count] if into is None else into[start : start + count]
                while rest:
                    got = self._file.readinto(rest)
                    if not got:
                        raise self._damage("it became shorter while it was read")
                    rest = rest[got:]
                digest.update(view)
                progress(count)
        except OSError as error:
            raise self._damage(reason(error)) from error
        if digest.hexdigest() != sha256:
            raise self._damage(f"{what}, bytes {at:,} to {at + nbytes:,}, is not what was written")
