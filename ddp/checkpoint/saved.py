"""A checkpoint on disk, as it is found and read: nothing of it is believed before its checksum has been seen to agree.

A folder is called `step-0000000120`, and `.step-0000000120.TOKEN.tmp` until it is whole, or once it is being removed.
A program that goes on from an earlier step than the newest (that one was damaged, or the user chose so) comes by the
same steps again: then it begins another generation, `step-0000000110.2`, all of which is newer than the one before. So
nothing is ever replaced, and what was written last is newest."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ddp._files import open_regular
from ddp.checkpoint import checkpoint_files as files
from ddp.checkpoint.agreement import Agreement, is_transient, reason
from ddp.checkpoint.checkpoint_files import MANIFEST_FILE, Array, DamagedCheckpoint, ShardReader
from ddp.errors import CheckpointError
from ddp.serialization.safetensors import METADATA, STORED

MOST_STEPS = 10**18
_NAME = re.compile(r"step-(\d{10,18})(?:\.([1-9]\d{0,8}))?")
_TEMPORARY = re.compile(r"\.step-\d{10,18}(?:\.\d+)?\.[0-9a-f]{8}\.tmp")

_log = logging.getLogger("ddp.checkpoint")


def folder_order(name: str) -> tuple[int, int] | None:
    """(generation, step) of a folder with that name, by which they are sorted; None if it is no checkpoint's.

    `folder_order("step-0000000120") == (1, 120)`, `folder_order("step-0000000110.2") == (2, 110)`
    """
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[2] or 1), int(found[1]))


def newest_first(names: Iterable[str]) -> list[str]:
    """Those that are names of checkpoints."""
    known = {name: key for name in names if (key := folder_order(name)) is not None}
    return sorted(known, key=lambda name: known[name], reverse=True)


def next_name(step: int, names: Iterable[str]) -> str:
    """What a checkpoint of `step` is called so that it is the newest in a folder that holds `names`.

    `next_name(5, ["step-0000000004"]) == "step-0000000005"`, `next_name(4, ["step-0000000004"]) == "step-0000000004.2"`
    """
    generation, last = max(filter(None, map(folder_order, names)), default=(1, -1))
    generation += step <= last
    return f"step-{step:010d}" + (f".{generation}" if generation > 1 else "")


def temporary_name(name: str) -> str:
    """A new name for a folder that is not whole yet, or not any more."""
    return f".{name}.{os.urandom(4).hex()}.tmp"


def is_temporary(name: str) -> bool:
    """True for what `temporary_name` has named."""
    return _TEMPORARY.fullmatch(name) is not None


def surplus_names(names: Sequence[str], is_whole: Callable[[str], bool], keep: int) -> list[str]:
    """Which of the checkpoints, newest first, are to be removed, oldest first, so that `keep` whole ones are left.

    Those that are not whole do not count, and go with the whole ones that are older than they are.
    `surplus_names(["d", "c", "b", "a"], {"d", "b", "a"}.__contains__, 2) == ["a"]`
    """
    kept = 0
    for index, name in enumerate(names):
        if kept == keep:
            return list(reversed(names[index:]))
        kept += is_whole(name)
    return []


def shard_name(rank: int) -> str:
    """The file of a rank. `shard_name(3) == "rank-0003.safetensors"`"""
    return f"rank-{rank:04d}.safetensors"


class Saved:
    """A checkpoint, of whatever world size it was written at.

    step, size: as it was written; path: its folder; state: that of rank 0; own_state: that of each rank
    names: dtype and shape of each tensor
    """

    def __init__(self, path: str, manifest: files.Manifest) -> None:
        self.path = Path(path)
        self.step = manifest.step
        self.size = len(manifest.files)
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
        return self.read_names([name])[name]

    def read_all(self, prefix: str = "") -> dict[str, Array]:
        """The tensors whose names begin with `prefix`, by their whole names. Raises: CheckpointError as `read` does."""
        return self.read_names(name for name in self.names if name.startswith(prefix))

    def read_names(self, names: Iterable[str]) -> dict[str, Array]:
        """The tensors of these names, which takes less time than one by one. Raises: as `read` does."""
        entries = {name: self._manifest.tensors[name] for name in names}
        ranks = {piece.rank for entry in entries.values() for piece in entry.pieces}
        with ExitStack() as stack:
            shards = {rank: stack.enter_context(self._open(rank)) for rank in ranks}
            for rank, file in shards.items():
                file.read(METADATA, 0, self._manifest.files[rank].header)
            return {name: self._read_pieces(name, entry, shards) for name, entry in entries.items()}

    def _read_pieces(self, name: str, entry: files.TensorEntry, shards: Mapping[int, ShardReader]) -> Array:
        try:
            flat = np.empty(entry.pieces[-1].stop, STORED[entry.dtype])
            whole = flat.reshape(entry.shape)
        except (ValueError, OverflowError) as error:
            raise DamagedCheckpoint(f"{self.path}: {name}: shape {entry.shape}: {error}") from None
        for rank, start, stop, at in entry.pieces:
            view = flat[start:stop].view(np.uint8).data
            shards[rank].read(name, at, len(view), view)
        return whole

    def _open(self, rank: int) -> ShardReader:
        return ShardReader(os.path.join(self.path, shard_name(rank)), self._manifest.files[rank])

    def verify(self, part: int = 0, parts: int = 1, progress: Callable[[], None] = lambda: None) -> None:
        """Reads everything, or one of so many equal parts of it. Raises: CheckpointError if it is not as written."""
        spans = [(rank, METADATA, 0, shard.header) for rank, shard in enumerate(self._manifest.files)]
        for name, entry in self._manifest.tensors.items():
            size = STORED[entry.dtype].itemsize
            spans += [(rank, name, at, (stop - start) * size) for rank, start, stop, at in entry.pieces]
        total, before, mine = sum(nbytes for *_, nbytes in spans) or 1, 0, []
        for each in sorted(spans, key=lambda span: (span[0], span[2])):  # in the order of the files
            if min(parts - 1, before * parts // total) == part:
                mine.append(each)
            before += each[3]
        for rank in range(self.size):
            with self._open(rank) as file:  # all of them exist, and have the right length
                for _, name, at, nbytes in (each for each in mine if each[0] == rank):
                    file.read(name, at, nbytes, progress=progress)


def open_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """The checkpoint in a folder. What it holds is verified when it is read, and by `verify`.

    Raises: CheckpointError if there is none, or it is torn: its manifest is missing or damaged, or a file is missing
    or of another length than it was.
    """
    path = os.fspath(path)
    try:
        with open(open_regular(os.path.join(path, MANIFEST_FILE)), "rb") as file:
            size, most = os.fstat(file.fileno()).st_size, files.MOST_MANIFEST_BYTES
            if size > most:
                raise CheckpointError(f"it has {size:,} bytes, and {most:,} are the most")
            manifest = files.decode_manifest(file.read())
        named = folder_order(os.path.basename(os.path.normpath(path)))
        if named is not None and named[1] != manifest.step:
            raise CheckpointError(f"it is of step {manifest.step}, another folder's")
    except (OSError, CheckpointError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise DamagedCheckpoint(f"{path}: {MANIFEST_FILE}: {text}") from error
    saved = Saved(path, manifest)
    for rank in range(saved.size):
        with saved._open(rank):
            pass
    return saved


def find(ranks: Agreement, path: str | os.PathLike[str]) -> Saved:
    """The checkpoint at that path, or the newest whole one in a folder of them; every byte of it is as written.

    Raises: CheckpointError on every rank if there is none that is whole, with the reasons, or it cannot be read.
    """
    path = os.fspath(path)
    failed = f"{path} cannot be loaded"

    def candidates() -> list[str]:
        if ranks.rank:
            return []
        try:
            present = os.listdir(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {reason(error)}") from None
        names = newest_first(present)
        if not names and {MANIFEST_FILE, shard_name(0)}.isdisjoint(present):
            raise CheckpointError(f"{path}: there is no checkpoint in it, nor is it one")
        return [os.path.join(path, name) for name in names] or [path]

    saved, reasons = newest_intact(ranks, failed, ranks.run(failed, candidates)[0])
    if saved is None:
        raise CheckpointError(f"no checkpoint is whole: {'; '.join(reasons)}")
    return saved


def newest_intact(ranks: Agreement, failed: str, paths: Sequence[str]) -> tuple[Saved | None, list[str]]:
    """The first of these that is whole, and why those before are not, which a warning of rank 0 says as well.

    Ranks share the reading, which may take as long as the disk does. failed: how an error begins
    Raises: CheckpointError on every rank if a file cannot be read, which does not say that it is damaged.
    """
    reasons: list[str] = []
    for path in paths:
        found: list[Saved] = []

        def check(path: str = path, found: list[Saved] = found) -> str:
            try:
                found.append(open_checkpoint(path))
                found[0].verify(ranks.rank, ranks.size, ranks.progress)
            except DamagedCheckpoint as error:
                if is_transient(error.__cause__):
                    raise
                return str(error)
            return ""

        damage = next(filter(None, ranks.run(failed, check)), None)
        if damage is None:
            return found[0], reasons
        reasons.append(damage)
        if ranks.rank == 0:
            _log.warning("%s is passed over: %s", path, damage.removeprefix(f"{path}: "))
    return None, reasons
