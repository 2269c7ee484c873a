"""The files of a checkpoint: the manifest, which lists its contents, and one shard for each rank.

The manifest is JSON. Its checksums cover every byte of the checkpoint:

    {"sha256":"...", "format":"ddp.checkpoint", "version":4, "step":120,
     "files":[[bytes, bytes of the header, "its sha256"], ...],
     "tensors":{"model.0.weight":["F32", [10,64], [[rank, start, stop, offset, "sha256"], ...]], ...},
     "state":..., "own_state":[...]}

The first checksum covers all bytes that follow it, so a damaged text is found before any of it is parsed. A tensor's
pieces are ranges (start, stop) of its elements in C order, which together cover all of them; `offset` is the position
of a piece in the rank's file, in bytes.

A shard is a safetensors file. It is written in large chunks; data in C order is not copied. Another thread computes
SHA-256 meanwhile (hashlib releases the GIL). An fsync that has failed is not repeated: the system may have dropped the
data, and the second fsync would succeed although the data is missing.
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
from ddp.checkpoint.rank_group import reason
from ddp.checkpoint.remote_files import is_url
from ddp.errors import CheckpointError
from ddp.serialization.safetensors import CODES, STORED, are_sizes, lay_out, read_into

Array = np.ndarray[Any, Any]
#: (start, stop, shape): elements start to stop of a tensor of that shape, in C order.
PieceRange = tuple[int, int, tuple[int, ...]]

MANIFEST_FILE = "manifest.json"
# Maximum length of a manifest (bytes). It is read into memory before its checksum is compared.
MOST_MANIFEST_BYTES = 1 << 30
_FORMAT = {"format": "ddp.checkpoint", "version": 4}
_BEGIN = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
# Number of bytes after which the system is asked to begin writing to the disk.
_SYNCED = 1 << 24
# Bytes that one system call reads or writes: few enough to be in the CPU's cache when their checksum is computed.
_CHUNK = 1 << 21
# How many chunks may be written before their checksums are computed, if chunks are views of arrays in C order.
_AHEAD = 16
# How many chunks may be written before their checksums are computed, if chunks are copies (arrays not in C order):
# few, because copies take memory.
_COPIES_AHEAD = 3
# Bytes of the buffer in which small arrays are gathered, so that several are written by one system call.
_SMALL = 1 << 20


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cannot be read, or differs from what was written."""


class ShardInfo(NamedTuple):
    """A rank's file. bytes: its length; header: the length of its header in bytes; sha256: of the header, in hex"""

    bytes: int
    header: int
    sha256: str


class TensorPiece(NamedTuple):
    """Elements `start` to `stop` of a flattened tensor, stored from byte `offset` on in the file of `rank`."""

    rank: int
    start: int
    stop: int
    offset: int
    sha256: str


class TensorEntry(NamedTuple):
    """A tensor, or the part of it that one rank writes. dtype: its code in safetensors"""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    @classmethod
    def decode(cls, value: Any) -> TensorEntry:
        """Makes an entry from the nested lists by which JSON represents it."""
        dtype, shape, pieces = value
        return cls(dtype, tuple(shape), tuple(TensorPiece(*piece) for piece in pieces))

    def covered(self, name: str) -> TensorEntry:
        """Returns the entry with its pieces sorted. Raises: CheckpointError if they overlap or leave elements out."""
        end = 0
        size = math.prod(self.shape)
        pieces = tuple(sorted(self.pieces, key=lambda piece: piece[1:3]))
        for piece in pieces:
            if piece.start != end:
                how = "several ranks" if piece.start < end else "no rank"
                raise CheckpointError(f"{name}: element {min(end, piece.start)} is written by {how}")
            end = piece.stop
        if end != size or not pieces:
            raise CheckpointError(f"{name}: of its {size} elements only {end} are written by a rank")
        return self._replace(pieces=pieces)


class Manifest(NamedTuple):
    """The contents of a manifest. files, own_state: one item for each rank"""

    step: int
    files: Sequence[ShardInfo]
    tensors: Mapping[str, TensorEntry]
    state: Any
    own_state: Sequence[Any]


def new_entry(array: Array, piece: PieceRange | None, rank: int, offset: int, sha256: str = "") -> TensorEntry:
    """The entry of an array that a rank writes at `offset` of its file. piece: None: the array is a whole tensor"""
    start, stop, shape = piece or (0, array.size, array.shape)
    return TensorEntry(CODES[array.dtype], tuple(shape), (TensorPiece(rank, start, stop, offset, sha256),))


def assemble_tensors(tables: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merges the entries of all ranks into one for each tensor. tables: for each rank, its entries by name

    Raises: CheckpointError if ranks disagree about a tensor, or their pieces overlap or leave elements out.
    """
    tensors: dict[str, TensorEntry] = {}
    for table in tables:
        for name, entry in table.items():
            first = tensors.setdefault(name, entry)
            if first[:2] != entry[:2]:
                described = [f"{x.dtype} {x.shape} on rank {x.pieces[0].rank}" for x in (first, entry)]
                raise CheckpointError(f"{name} is {' and '.join(described)}")
            if first is not entry:
                tensors[name] = first._replace(pieces=first.pieces + entry.pieces)
    return {name: tensors[name].covered(name) for name in sorted(tensors)}


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest as the bytes of its file."""
    rest = json.dumps({**_FORMAT, **manifest._asdict()}, separators=(",", ":"))[1:].encode() + b"\n"
    return b'{"sha256":"%b",' % hashlib.sha256(rest).hexdigest().encode() + rest


def decode_manifest(data: bytes) -> Manifest:
    """Decodes a manifest from the bytes of its file. Raises: CheckpointError if they are not a valid manifest."""
    begin = _BEGIN.match(data)
    if begin is None:
        raise CheckpointError("it does not begin as a manifest does" if data else "it is empty")
    if hashlib.sha256(memoryview(data)[begin.end() :]).hexdigest().encode() != begin[1]:
        raise CheckpointError("its checksum is another: it was changed, or cut off")
    try:
        fields = json.loads(data)
        file_format = {name: fields.pop(name) for name in _FORMAT}
        if file_format != _FORMAT:
            raise CheckpointError(f"it is of {file_format}, and {_FORMAT} is known here"[:200])
        # Other programs can write valid checksums, too, so numbers and ranges are checked.
        del fields["sha256"]
        manifest = Manifest(**fields)
        step = manifest.step
        files = [ShardInfo(*info) for info in manifest.files]
        _require(type(step) is int and 0 <= step < 1 << 63, "step")
        _require(0 < len(files) == len(manifest.own_state) and isinstance(manifest.own_state, list), "files")
        _require(all(are_sizes([*info[:2]]) and info.header <= info.bytes for info in files), "files")
        entries = {name: _checked_entry(name, value, files) for name, value in manifest.tensors.items()}
        return manifest._replace(files=files, tensors=entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it is no manifest of a checkpoint: {error!r:.200}") from None


def _require(holds: bool, name: str) -> None:
    if not holds:
        raise ValueError(f"its {name} cannot be")


def _checked_entry(name: str, value: Any, files: Sequence[ShardInfo]) -> TensorEntry:
    entry = TensorEntry.decode(value)
    _require(entry.dtype in STORED and are_sizes(value[1]), name)
    itemsize = STORED[entry.dtype].itemsize
    for rank, start, stop, offset, _ in entry.pieces:
        _require(are_sizes([rank, start, stop, offset]) and rank < len(files) and start <= stop, name)
        _require(offset + (stop - start) * itemsize <= files[rank].bytes, name)
    return entry.covered(name)


# -- shards


def write_shard(
    path: str, rank: int, arrays: Mapping[str, Array], pieces: Mapping[str, PieceRange], progress: Callable[[], None]
) -> tuple[ShardInfo, dict[str, TensorEntry]]:
    """Writes a new safetensors file and syncs it to the disk. Returns its description, and an entry for each array.

    pieces: see `Store.write`; progress: called after every chunk of an array

    Raises: OSError; the file may have been written in part.
    """
    layout = lay_out(arrays, {})
    digests = {name: hashlib.sha256() for name in arrays}
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "checksums") as worker:  # starts its thread with the first job

        def chunks() -> Iterator[memoryview]:
            yield memoryview(layout.begin)
            for name in layout.starts:
                array = arrays[name]
                update = digests[name].update
                # Files are in C order. An array in another order is copied, chunk by chunk.
                in_order = array.flags.c_contiguous
                flat = array.reshape(-1) if in_order else array.flat
                ahead = _AHEAD if in_order else _COPIES_AHEAD
                count = _CHUNK // array.itemsize
                for start in range(0, array.size, count):
                    chunk = flat[start : start + count].view(np.uint8).data
                    pending.append(worker.submit(update, chunk))
                    while len(pending) > ahead:
                        pending.popleft().result()
                    yield chunk
                    progress()

        nbytes = write_file(path, chunks())
    entries = {
        name: new_entry(array, pieces.get(name), rank, layout.starts[name], digests[name].hexdigest())
        for name, array in arrays.items()
    }
    return ShardInfo(nbytes, len(layout.begin), hashlib.sha256(layout.begin).hexdigest()), entries


def list_folder(path: str) -> list[str]:
    """The names in a folder. All functions of this module that take a path take a URL, too.

    Raises: OSError; at a URL, what the functions of `remote_files` raise.
    """
    return remote_files.list_names(path) if is_url(path) else os.listdir(path)


def exists(path: str) -> bool:
    """Whether there is a file or folder at this path."""
    return remote_files.exists(path) if is_url(path) else os.path.exists(path)


def open_file(path: str, flags: int = os.O_RDONLY) -> io.FileIO:
    """Opens an unbuffered file for reading; at a URL, the file object of fsspec. flags: those of `os.open`"""
    return remote_files.open_file(path) if is_url(path) else io.FileIO(open_regular(path, flags))


def write_file(path: str, chunks: Iterable[memoryview]) -> int:
    """Writes a new file and syncs it to the disk. Returns its length. A file that exists at a URL is replaced.

    Raises: FileExistsError if the path exists and is no URL; other errors of class OSError.
    """
    if is_url(path):
        return remote_files.write_file(path, chunks)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    written = 0
    started = 0
    # `with` closes the file before this function returns: a network file system may report only then that it is full.
    with os.fdopen(fd, "wb", _SMALL) as file:
        for chunk in chunks:
            written += file.write(chunk)
            if written - started >= _SYNCED:
                # On Linux this advice starts writing the data to the disk, so that the fsync takes less time. Pages
                # that are on the disk may leave the page cache, since they are not read again.
                with contextlib.suppress(OSError):  # not every file system supports this advice
                    os.posix_fadvise(fd, started, written - started, os.POSIX_FADV_DONTNEED)
                started = written
        file.flush()
        os.fsync(fd)
    return written


def sync_folder(path: str) -> None:
    """Syncs the names in a folder to the disk. At a URL there is nothing to do: names are stored with their files."""
    if is_url(path):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def remove_folder(path: str) -> None:
    """Removes a folder of files, if it exists. The files go in order of names: the manifest before the shards."""
    if is_url(path):
        remote_files.remove_folder(path, MANIFEST_FILE)
        return
    with contextlib.suppress(FileNotFoundError):  # another process is removing it, too
        for name in sorted(os.listdir(path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)


class ShardReader:
    """A rank's file, open for reading. Every read is compared with its checksum.

    Raises: DamagedCheckpoint if bytes are not as they were written, or the file has another length or cannot be read.
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

    def _damage(self, problem: str) -> DamagedCheckpoint:
        folder, name = os.path.split(self._path)
        return DamagedCheckpoint(f"{folder}: {name}: {problem}")

    def verified(
        self,
        name: str,
        offset: int,
        nbytes: int,
        sha256: str,
        out: memoryview | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Reads bytes from `offset` on and compares their checksum. After an error, the content of `out` is undefined.

        name: of these bytes in error messages; out: the memory to read into; None: the bytes are only compared
        progress: called after each read, with the number of bytes
        """
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(nbytes, _CHUNK) if out is None else 0))
        try:
            self._file.seek(offset)
            for start in range(0, nbytes, _CHUNK):
                count = min(_CHUNK, nbytes - start)
                view = buffer[:count] if out is None else out[start : start + count]
                if not read_into(self._file, view):
                    raise self._damage("it became shorter while it was read")
                digest.update(view)
                progress(count)
        except OSError as error:
            raise self._damage(reason(error)) from error
        if digest.hexdigest() != sha256:
            raise self._damage(f"{name}, bytes {offset:,} to {offset + nbytes:,}, is not what was written")
