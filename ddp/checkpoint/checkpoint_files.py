"""The files of a checkpoint: the manifest, which says what it consists of, and the shards, one of each rank.

The manifest is JSON, and has checksums by which each byte of the checkpoint is known:

    {"sha256":"...", "format":"ddp.checkpoint", "version":3, "step":120,
     "files":[{"bytes":1234,"header":136,"sums":{"__metadata__":"...","model.0.weight":"..."}}, ...],
     "tensors":{"model.0.weight":{"dtype":"F32","shape":[10,64],"pieces":[[0,0,640,136]]}, ...},
     "state":..., "own_state":[...]}

The first checksum is of all bytes that follow it, so that the text is known to be whole before any of it is parsed. A
file, one for each rank, has one for each tensor in it, and one, "__metadata__", for its header. A tensor's pieces are
stretches (rank, start, stop, at) of its elements in C order, and cover all of them; `at` is the byte of the rank's file
at which one begins.

A shard is a safetensors file. It is written in large pieces, from where the data is. SHA-256 is computed meanwhile, by
another thread unless training wants the cores: it lets go of the GIL, takes less time than writing does, and refuses
whatever else could have come of a tensor's bytes. An fsync that has failed is not repeated: the system may have dropped
what was to be written, and the next would succeed over a hole.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from ddp.checkpoint.agreement import reason
from ddp.errors import CheckpointError
from ddp.serialization.safetensors import METADATA, STORED, FileLayout, are_sizes

Array = np.ndarray[Any, Any]

MANIFEST_FILE = "manifest.json"
VERSION = 3
MOST_MANIFEST_BYTES = 1 << 30  # of a manifest: it is read into memory before anything of it is known
_BEGIN = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
_SYNCED = 1 << 24  # bytes after which the system is asked to begin with the disk
_CHUNK = 1 << 21  # bytes of a system call: they are still in the cache when their checksum is computed
_AHEAD = 16  # chunks that may be written before their checksums are computed
_SMALL = 1 << 20  # arrays are gathered up to so many bytes, so that a thousand of them are not a thousand calls


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cannot be read, or is not what was written."""


class ShardInfo(NamedTuple):
    """A file: its length and that of its header in bytes, and the SHA-256, in hexadecimal digits, of each tensor in it.

    The header's is among them under `METADATA`.
    """

    bytes: int
    header: int
    sums: Mapping[str, str]


class TensorPiece(NamedTuple):
    """Elements start to stop of a tensor that is thought of as flat. rank: whose file has them, from byte `at` on"""

    rank: int
    start: int
    stop: int
    at: int


class TensorEntry(NamedTuple):
    """A tensor, or what one rank has of it. dtype: its code in safetensors"""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def covered(self, name: str) -> TensorEntry:
        """This entry with its pieces in order. Raises: CheckpointError if they overlap or leave something out."""
        end, size, pieces = 0, math.prod(self.shape), self.pieces
        if len(pieces) > 1:
            pieces = tuple(sorted(pieces, key=lambda piece: piece[1:]))
        for piece in pieces:
            if piece.start != end:
                how = "is written by several ranks" if piece.start < end else "is written by no rank"
                has = f"rank {piece.rank} has {piece[1:3]}"
                raise CheckpointError(f"{name}: element {min(end, piece.start)} {how}; {has}")
            end = piece.stop
        if end != size or not pieces:
            raise CheckpointError(f"{name}: of its {size} elements only {end} are written by a rank")
        return TensorEntry(self.dtype, self.shape, pieces)


_ENTRY_FIELDS = frozenset(TensorEntry._fields)


class Manifest(NamedTuple):
    """A checkpoint. files, own_state: of each rank"""

    step: int
    files: Sequence[ShardInfo]
    tensors: Mapping[str, TensorEntry]
    state: Any
    own_state: Sequence[Any]


def assemble_tensors(ranks: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint. ranks: what each writes, by name

    Raises: CheckpointError if ranks disagree about a tensor, or their pieces overlap or leave something out.
    """
    found: dict[str, TensorEntry] = {}
    for mine in ranks:
        for name, entry in mine.items():
            first = found.setdefault(name, entry)
            if first is entry:
                continue
            if first[:2] != entry[:2]:
                ours, theirs = (f"{each.dtype} {each.shape} on rank {each.pieces[0].rank}" for each in (first, entry))
                raise CheckpointError(f"{name} is {ours} and {theirs}")
            found[name] = first._replace(pieces=first.pieces + entry.pieces)
    return {name: found[name].covered(name) for name in sorted(found)}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of its file."""
    fields = {
        "format": "ddp.checkpoint",
        "version": VERSION,
        "step": manifest.step,
        "files": [shard._asdict() for shard in manifest.files],
        "tensors": {name: entry._asdict() for name, entry in manifest.tensors.items()},
        "state": manifest.state,
        "own_state": manifest.own_state,
    }
    rest = json.dumps(fields, separators=(",", ":"))[1:].encode() + b"\n"
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
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != "ddp.checkpoint":
        raise CheckpointError("it is no manifest of a checkpoint")
    if fields.get("version") != VERSION:
        raise CheckpointError(f"it is of version {fields.get('version')!r:.40}, and version {VERSION} is known here")
    # A valid checksum does not mean that this package wrote it: every field is checked.
    found: list[Any] = [fields.get(each) for each in ("step", "files", "tensors", "own_state")]
    step, files, tensors, own = found
    _require(type(step) is int and 0 <= step < 1 << 63, "step", step)
    _require(isinstance(files, list) and isinstance(own, list) and 0 < len(files) == len(own), "files", files)
    _require(isinstance(tensors, dict), "tensors", tensors)
    shards = [_shard(rank, each) for rank, each in enumerate(files)]
    entries = {name: _entry(name, each, shards) for name, each in tensors.items()}
    return Manifest(step, shards, entries, fields.get("state"), own)


def _require(holds: bool, name: str, value: Any) -> None:
    if not holds:
        raise CheckpointError(f"its {name} cannot be {value!r:.80}")


def _shard(rank: int, value: Any) -> ShardInfo:
    what = f"file of rank {rank}"
    _require(isinstance(value, dict) and value.keys() == set(ShardInfo._fields), what, value)
    shard = ShardInfo(**value)
    _require(are_sizes([shard.bytes, shard.header]) and shard.header <= shard.bytes, what, value)
    _require(isinstance(shard.sums, dict) and METADATA in shard.sums, what, value)
    return shard


def _entry(name: str, value: Any, shards: Sequence[ShardInfo]) -> TensorEntry:
    if name == METADATA or not _is_entry(name, value, shards):
        raise CheckpointError(f"its tensor {name!r:.80} cannot be {value!r:.80}")
    pieces = tuple(TensorPiece(*each) for each in value["pieces"])
    return TensorEntry(value["dtype"], tuple(value["shape"]), pieces).covered(name)


def _is_entry(name: str, value: Any, shards: Sequence[ShardInfo]) -> bool:
    if not isinstance(value, dict) or value.keys() != _ENTRY_FIELDS:
        return False
    dtype, pieces = value["dtype"], value["pieces"]
    if not isinstance(dtype, str) or dtype not in STORED or not are_sizes(value["shape"]):
        return False
    if not isinstance(pieces, list) or not all(are_sizes(each) and len(each) == 4 for each in pieces):
        return False
    for rank, start, stop, at in pieces:
        if rank >= len(shards) or name not in shards[rank].sums or start > stop:
            return False
        if at + (stop - start) * STORED[dtype].itemsize > shards[rank].bytes:
            return False
    return len({each[0] for each in pieces}) == len(pieces)  # a file has one checksum for each tensor


# -- shards


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
