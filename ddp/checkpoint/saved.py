"""A checkpoint on disk, as it is found and read: nothing of it is believed before its checksum has been seen to agree.

A folder is called `step-0000000120`, and `.step-0000000120.TOKEN.tmp` until it is whole, or once it is being removed.
A program that goes on from an earlier step than the newest (that one was damaged, or the user chose so) comes by the
same steps again: then it begins another generation, `step-0000000110.2`, all of which is newer than the one before. So
nothing is ever replaced, and what was written last is newest."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collectives.progress_bar import progress_bar
from ddp.checkpoint import checkpoint_files as files
from ddp.checkpoint.agreement import Agreement, describing_os_errors, is_transient, reason
from ddp.checkpoint.checkpoint_files import MANIFEST_FILE, Array, DamagedCheckpoint, ShardReader
from ddp.checkpoint.remote_files import is_url
from ddp.errors import CheckpointError
from ddp.serialization.safetensors import STORED

MOST_STEPS = 10**18
_LARGE = 1 << 28  # bytes that are read under a progress bar
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


def as_path(text: str) -> Path | str:
    """A Path, but of a URL the text: a Path would take `//` for `/`."""
    return text if is_url(text) else Path(text)


def names_in(folder: str) -> list[str]:
    """The names in a folder. At a URL, without those of checkpoints whose manifest has not been written."""
    names = files.list_folder(folder)
    if not is_url(folder):
        return names
    return [each for each in names if not folder_order(each) or files.exists(os.path.join(folder, each, MANIFEST_FILE))]


def shard_name(rank: int) -> str:
    """The file of a rank. `shard_name(3) == "rank-0003.safetensors"`"""
    return f"rank-{rank:04d}.safetensors"


class Saved:
    """A checkpoint, of whatever world size it was written at.

    step, size: as it was written; path: its folder, of a URL a str; state: that of rank 0; own_state: that of each rank
    names: dtype and shape of each tensor
    """

    def __init__(self, path: str, manifest: files.Manifest) -> None:
        self.path = as_path(path)
        self.step = manifest.step
        self.size = len(manifest.files)
        self.state = manifest.state
        self.own_state = list(manifest.own_state)
        self.names: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            name: (STORED[entry.dtype], entry.shape) for name, entry in manifest.tensors.items()
        }
        self._manifest = manifest

    def __repr__(self) -> str:
        return f"<Saved {self.path}: step {self.step}, tensors: {len(self.names)}, ranks: {self.size}>"

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
        size = sum(entry.pieces[-1].stop * STORED[entry.dtype].itemsize for entry in entries.values())
        with ExitStack() as stack:
            shards = {
                rank: stack.enter_context(self._open(rank))
                for rank in {piece.rank for entry in entries.values() for piece in entry.pieces}
            }
            for rank, shard in shards.items():
                _, header, sha256 = self._manifest.files[rank]
                shard.verified("its header", 0, header, sha256)
            read = stack.enter_context(self._bar("reading", size))
            return {name: self._read_pieces(name, entry, shards, read) for name, entry in entries.items()}

    @contextmanager
    def _bar(self, what: str, size: int, alive: Callable[[], None] = lambda: None) -> Iterator[Callable[[int], None]]:
        """Rank 0 shows a bar while many bytes are read, if that takes long. Yields: what is called with each number."""
        about = f"{what} {os.path.basename(self.path)}"
        bar_of = partial(progress_bar, desc=about, delay=1.0, unit="B", unit_scale=True, leave=False)
        with bar_of(total=size) if size >= _LARGE else nullcontext() as bar:

            def read(count: int) -> None:
                alive()
                if bar is not None:
                    bar.update(count)

            yield read

    def _read_pieces(
        self, name: str, entry: files.TensorEntry, shards: Mapping[int, ShardReader], progress: Callable[[int], None]
    ) -> Array:
        try:
            flat = np.empty(entry.pieces[-1].stop, STORED[entry.dtype])
            whole = flat.reshape(entry.shape)
        except (ValueError, OverflowError) as error:
            raise DamagedCheckpoint(f"{self.path}: {name}: shape {entry.shape}: {error}") from None
        for rank, start, stop, at, sha256 in entry.pieces:
            view = flat[start:stop].view(np.uint8).data
            shards[rank].verified(name, at, len(view), sha256, view, progress)
        return whole

    def _open(self, rank: int) -> ShardReader:
        return ShardReader(os.path.join(self.path, shard_name(rank)), self._manifest.files[rank])

    def verify(self, part: int = 0, parts: int = 1, progress: Callable[[], None] = lambda: None) -> None:
        """Reads everything, or one of so many equal parts of it. Raises: CheckpointError if it is not as written."""
        spans = [[(0, "its header", header, sha256)] for _, header, sha256 in self._manifest.files]
        for name, entry in self._manifest.tensors.items():
            size = STORED[entry.dtype].itemsize
            for rank, start, stop, at, sha256 in entry.pieces:
                spans[rank].append((at, name, (stop - start) * size, sha256))
        total, before = sum(span[2] for mine in spans for span in mine) or 1, 0
        with self._bar("verifying", total // parts, progress) as read:
            for rank, mine in enumerate(spans):
                with self._open(rank) as shard:  # all of them exist, and have the right length
                    for at, name, nbytes, sha256 in sorted(mine):  # in the order of the file
                        if min(parts - 1, before * parts // total) == part:
                            shard.verified(name, at, nbytes, sha256, progress=read)
                        before += nbytes


def open_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """The checkpoint in a folder. What it holds is verified when it is read, and by `verify`.

    Raises: CheckpointError if there is none, or it is torn: its manifest is missing or damaged, or a file is missing
    or of another length than it was.
    """
    path = os.fspath(path)
    try:
        with files.open_file(os.path.join(path, MANIFEST_FILE)) as file:
            size, most = file.seek(0, os.SEEK_END), files.MOST_MANIFEST_BYTES
            if size > most:
                raise CheckpointError(f"it has {size:,} bytes, and {most:,} are the most")
            file.seek(0)
            manifest = files.decode_manifest(file.read())
        named = folder_order(os.path.basename(os.path.normpath(path)))
        if named is not None and named[1] != manifest.step:
            raise CheckpointError(f"it is of step {manifest.step}, another folder's")
    except (OSError, CheckpointError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise DamagedCheckpoint(f"{path}: {MANIFEST_FILE}: {text}") from error
    saved = Saved(path, manifest)
    for rank in range(saved.size):
        saved._open(rank).close()
    return saved


def _may_be_whole(path: str, error: BaseException | None) -> bool:
    """Whether a file that could not be read may still be as it was written."""
    if is_url(path) and isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)  # all else may be the network
    return is_transient(error)


def find(ranks: Agreement, path: str | os.PathLike[str], required: bool = True) -> Saved | None:
    """The checkpoint at that path, or the newest whole one in a folder of them; every byte of it is as written.

    Others are named in a warning of rank 0, with the reason, and passed over. Ranks share the reading, which may take
    as long as the disk does. required: whether it is an error that there is none, whole or not; else: None

    Raises: CheckpointError on every rank if there are checkpoints and none is whole, with the reasons; or a file cannot
    be read, which does not say that it is damaged.
    """
    path = os.fspath(path)
    failed = f"{path} cannot be loaded"

    def candidates() -> list[str]:
        if ranks.rank:
            return []
        with describing_os_errors("reading", path):
            present = names_in(path)
        names = newest_first(present)
        if required and not names:
            if {MANIFEST_FILE, shard_name(0)}.isdisjoint(present):
                raise CheckpointError(f"{path}: there is no checkpoint in it, nor is it one")
            return [path]
        return [os.path.join(path, name) for name in names]

    reasons: list[str] = []
    for each in ranks.run(failed, candidates)[0]:
        found: list[Saved] = []

        def check(each: str = each, found: list[Saved] = found) -> str:
            try:
                found.append(open_checkpoint(each))
                found[0].verify(ranks.rank, ranks.size, ranks.progress)
            except DamagedCheckpoint as error:
                if _may_be_whole(each, error.__cause__):
                    raise
                return str(error)
            return ""

        damage = next(filter(None, ranks.run(failed, check)), None)
        if damage is None:
            return found[0]
        reasons.append(damage)
        if ranks.rank == 0:
            _log.warning("%s is passed over: %s", each, damage.removeprefix(f"{each}: "))
    if not reasons:
        return None
    raise CheckpointError(
        f"no checkpoint in {path} is whole ({'; '.join(reasons)}): to begin anew, move them away or give another folder"
    )
