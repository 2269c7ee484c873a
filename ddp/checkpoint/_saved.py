"""A checkpoint on disk, as it is read: nothing of it is believed before its checksum has been seen to agree."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np

from ddp._files import open_regular
from ddp.checkpoint import _folders, _manifest
from ddp.checkpoint._manifest import Damaged, Entry, Manifest
from ddp.checkpoint._shards import Array, VerifiedFile
from ddp.checkpoint._trouble import reason
from ddp.errors import CheckpointError, SerializationError
from ddp.serialization._format import STORED
from ddp.serialization._reading import Reader, Span


class Saved:
    """A checkpoint, of whatever world size it was written at.

    step, size: as it was written; path: its folder; state: what rank 0 said; own_state: what each rank said of itself
    names: dtype and shape of each tensor
    """

    def __init__(self, path: str, manifest: Manifest) -> None:
        self.path = Path(path)
        self.step = manifest.step
        self.size = manifest.size
        self.state = manifest.state
        self.own_state = list(manifest.own_state)
        self.names: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            name: (STORED[entry.dtype], entry.shape) for name, entry in manifest.tensors.items()
        }
        self._manifest = manifest

    def __repr__(self) -> str:
        return f"<Saved {self.path}: step {self.step}, {len(self.names)} tensors of {self.size} ranks>"

    def read(self, name: str) -> Array:
        """A tensor, put together of its pieces, in new memory. Raises: KeyError if there is none of that name;
        CheckpointError, with the file and the reason, if it is not what was written."""
        return self._read([name])[name]

    def read_all(self, prefix: str = "") -> dict[str, Array]:
        """The tensors whose names begin with `prefix`, by their whole names. Raises: CheckpointError as `read` does."""
        return self._read([name for name in self.names if name.startswith(prefix)])

    def _read(self, names: Iterable[str]) -> dict[str, Array]:
        entries = {name: self._manifest.tensors[name] for name in names}
        try:
            with ExitStack() as stack:
                files: dict[str, tuple[VerifiedFile, dict[str, Span]]] = {}
                for entry in entries.values():
                    for piece in entry.pieces:
                        if piece.file not in files:
                            file = stack.enter_context(self._open(piece.file))
                            files[piece.file] = file, Reader(cast(Any, file), piece.file, STORED).spans()
                return {name: _put_together(name, entry, files) for name, entry in entries.items()}
        except (Damaged, SerializationError) as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _open(self, name: str) -> VerifiedFile:
        return VerifiedFile(os.path.join(self.path, name), self._manifest.files[name], self._manifest.block)

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Reads everything, or one of so many equal parts of it. Raises: CheckpointError if it is not as written."""
        try:
            self.check(part, parts)
        except Damaged as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def check(self, part: int, parts: int, progress: Callable[[], None] = lambda: None) -> None:
        """What `verify` does. Raises: Damaged, without the folder's name."""
        blocks = [(name, i) for name, shard in self._manifest.files.items() for i in range(len(shard.sums))]
        mine = blocks[len(blocks) * part // parts : len(blocks) * (part + 1) // parts]
        for name in self._manifest.files:
            with self._open(name) as file:  # all of them are there, and of the right length
                for index in (i for each, i in mine if each == name):
                    file.verify(index)
                    progress()


def _put_together(name: str, entry: Entry, files: Mapping[str, tuple[VerifiedFile, dict[str, Span]]]) -> Array:
    dtype = STORED[entry.dtype]
    for piece in entry.pieces:
        span = files[piece.file][1].get(name)
        if span is None or span.dtype != dtype or math.prod(span.shape) != piece.stop - piece.start:
            raise Damaged(f"{piece.file}: it does not hold elements {piece.start} to {piece.stop} of {name}")
    try:
        flat = np.empty(entry.pieces[-1].stop, dtype)
        whole = flat.reshape(entry.shape)
    except (ValueError, OverflowError) as error:
        raise Damaged(f"{name}: shape {entry.shape}: {error}") from None
    for piece in entry.pieces:
        file, spans = files[piece.file]
        file.seek(spans[name].start)
        file.readinto(flat[piece.start : piece.stop].view(np.uint8).data)
    return whole


def open_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """The checkpoint in a folder. What it holds is verified when it is read, and by `verify`.

    Raises: CheckpointError if there is none, or it is torn: its manifest is missing or damaged, or a file is missing
    or of another length than it was.
    """
    try:
        return open_folder(os.fspath(path))
    except Damaged as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from None


def open_folder(path: str) -> Saved:
    """What `open_checkpoint` does. Raises: Damaged, without the folder's name."""
    try:
        with open(open_regular(os.path.join(path, _manifest.FILE)), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read() if size <= _manifest.MOST_BYTES else b""
    except OSError as error:
        raise Damaged(f"{_manifest.FILE}: {reason(error)}") from None
    if size > _manifest.MOST_BYTES:
        raise Damaged(f"{_manifest.FILE}: it has {size:,} bytes, and {_manifest.MOST_BYTES:,} are the most")
    try:
        manifest = _manifest.decode(data)
    except Damaged as error:
        raise Damaged(f"{_manifest.FILE}: {error}") from None
    named = _folders.order(os.path.basename(os.path.normpath(path)))
    if named is not None and named[1] != manifest.step:
        raise Damaged(f"{_manifest.FILE}: it is of step {manifest.step}, another folder's")
    saved = Saved(path, manifest)
    for name in manifest.files:
        saved._open(name).close()
    return saved
