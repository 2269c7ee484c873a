"""Finds and reads checkpoints on disk. Every byte is compared with its checksum before it is used.

A checkpoint's folder is called `step-0000000120`. Until it is complete, and while it is removed, it is called
`.step-0000000120.TOKEN.tmp` (except at a URL, where nothing can be renamed). If the newest checkpoint is damaged, or
the user chooses so, a program continues from an older one, and reaches the same steps again. Then it begins another
generation, `step-0000000110.2`. All its checkpoints count as newer than those of earlier generations. So no checkpoint
is ever replaced, and the one that was written last is the newest."""

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
from ddp.checkpoint.checkpoint_files import MANIFEST_FILE, Array, DamagedCheckpoint, ShardReader
from ddp.checkpoint.rank_group import RankGroup, describing_os_errors, is_transient, reason
from ddp.checkpoint.remote_files import is_url
from ddp.errors import CheckpointError
from ddp.serialization.safetensors import STORED

MOST_STEPS = 10**18
# Reading at least this many bytes shows a progress bar, if it takes long enough: see `Saved._progress_bar`.
_LARGE = 1 << 28
_NAME = re.compile(r"step-(\d{10,18})(?:\.([1-9]\d{0,8}))?")
_TEMPORARY = re.compile(r"\.step-\d{10,18}(?:\.\d+)?\.[0-9a-f]{8}\.tmp")

_log = logging.getLogger("ddp.checkpoint")


def folder_order(name: str) -> tuple[int, int] | None:
    """The sort key of a checkpoint's folder: (generation, step). None if the name is not that of a checkpoint.

    `folder_order("step-0000000120") == (1, 120)`, `folder_order("step-0000000110.2") == (2, 110)`
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[2] or 1), int(match[1]))


def newest_first(names: Iterable[str]) -> list[str]:
    """The names of checkpoints among `names`, the newest first."""
    return sorted(filter(folder_order, names), key=lambda name: folder_order(name) or (), reverse=True)


def next_name(step: int, names: Iterable[str]) -> str:
    """The name for a new checkpoint of `step` in a folder that contains `names`. It counts as newer than all of them.

    `next_name(5, ["step-0000000004"]) == "step-0000000005"`, `next_name(4, ["step-0000000004"]) == "step-0000000004.2"`
    """
    generation, last = max(filter(None, map(folder_order, names)), default=(1, -1))
    generation += step <= last
    return f"step-{step:010d}" + (f".{generation}" if generation > 1 else "")


def temporary_name(name: str) -> str:
    """A new name for the folder of an incomplete checkpoint. name: its name once it is complete"""
    return f".{name}.{os.urandom(4).hex()}.tmp"


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` may have made this name."""
    return _TEMPORARY.fullmatch(name) is not None


def as_path(text: str) -> Path | str:
    """Converts a path to a Path. A URL stays a str, since a Path would replace `//` by `/`."""
    return text if is_url(text) else Path(text)


def committed_names(folder: str) -> list[str]:
    """The names in a folder. At a URL, checkpoints without a manifest are left out: they are incomplete."""
    names = files.list_folder(folder)
    if not is_url(folder):
        return names
    return [name for name in names if not folder_order(name) or files.exists(os.path.join(folder, name, MANIFEST_FILE))]


def shard_name(rank: int) -> str:
    """The name of a rank's file. `shard_name(3) == "rank-0003.safetensors"`"""
    return f"rank-{rank:04d}.safetensors"


class Saved:
    """A checkpoint that can be read, by any number of ranks.

    path: its folder, a str if it is a URL; step; size: the number of ranks that wrote it
    state: of rank 0; own_state: a list with one item for each rank; names: (dtype, shape) of each tensor by name
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
        """Reads a tensor, all of its pieces, into new memory.

        Raises: KeyError if there is no tensor of that name; CheckpointError, with the file and the reason, if it is not
        as it was written.
        """
        return self.read_names([name])[name]

    def read_all(self, prefix: str = "") -> dict[str, Array]:
        """Reads the tensors whose names begin with `prefix`. The keys are whole names. Raises: see `read`."""
        return self.read_names(name for name in self.names if name.startswith(prefix))

    def read_names(self, names: Iterable[str]) -> dict[str, Array]:
        """Reads the tensors of these names. Opens each rank's file only once. Raises: see `read`."""
        entries = {name: self._manifest.tensors[name] for name in names}
        size = sum(entry.pieces[-1].stop * STORED[entry.dtype].itemsize for entry in entries.values())
        with ExitStack() as stack:
            shards: dict[int, ShardReader] = {}
            for rank in {piece.rank for entry in entries.values() for piece in entry.pieces}:
                _, header, sha256 = self._manifest.files[rank]
                shards[rank] = stack.enter_context(self._open(rank))
                shards[rank].verified("its header", 0, header, sha256)
            progress = stack.enter_context(self._progress_bar("reading", size))
            return {name: self._read_pieces(name, entry, shards, progress) for name, entry in entries.items()}

    @contextmanager
    def _progress_bar(
        self, verb: str, size: int, progress: Callable[[], None] = lambda: None
    ) -> Iterator[Callable[[int], None]]:
        """Yields a function, which the caller calls after each read, with the number of bytes.

        The function calls `progress`. If `size` is large, it also moves a progress bar. Rank 0 shows the bar after a
        second on a terminal, and after 10 s in a log.
        """
        label = f"{verb} {os.path.basename(self.path)}"
        open_bar = partial(progress_bar, desc=label, delay=1.0, unit="B", unit_scale=True, leave=False)
        with open_bar(total=size) if size >= _LARGE else nullcontext() as bar:

            def update(count: int) -> None:
                progress()
                if bar is not None:
                    bar.update(count)

            yield update

    def _read_pieces(
        self, name: str, entry: files.TensorEntry, shards: Mapping[int, ShardReader], progress: Callable[[int], None]
    ) -> Array:
        try:
            flat = np.empty(entry.pieces[-1].stop, STORED[entry.dtype])
            tensor = flat.reshape(entry.shape)
        except (ValueError, OverflowError) as error:
            raise DamagedCheckpoint(f"{self.path}: {name}: shape {entry.shape}: {error}") from None
        for rank, start, stop, offset, sha256 in entry.pieces:
            view = flat[start:stop].view(np.uint8).data
            shards[rank].verified(name, offset, len(view), sha256, view, progress)
        return tensor

    def _open(self, rank: int) -> ShardReader:
        return ShardReader(os.path.join(self.path, shard_name(rank)), self._manifest.files[rank])

    def verify(self, part: int = 0, parts: int = 1, progress: Callable[[], None] = lambda: None) -> None:
        """Verifies all bytes, or part `part` (counted from 0) of `parts` parts. No piece of a tensor is divided.

        progress: called after each read

        Raises: CheckpointError if something is not as it was written.
        """
        # For each rank: (offset, name, length, checksum) of all that its file contains.
        spans = [[(0, "its header", header, sha256)] for _, header, sha256 in self._manifest.files]
        for name, entry in self._manifest.tensors.items():
            size = STORED[entry.dtype].itemsize
            for rank, start, stop, offset, sha256 in entry.pieces:
                spans[rank].append((offset, name, (stop - start) * size, sha256))
        total = sum(span[2] for file_spans in spans for span in file_spans) or 1
        before = 0
        with self._progress_bar("verifying", total // parts, progress) as update:
            for rank, file_spans in enumerate(spans):
                # Files without a span for this part are opened, too, which checks their length.
                with self._open(rank) as shard:
                    for offset, name, nbytes, sha256 in sorted(file_spans):
                        if min(parts - 1, before * parts // total) == part:
                            shard.verified(name, offset, nbytes, sha256, progress=update)
                        before += nbytes


def open_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """Opens the checkpoint in a folder. Its tensors are verified when they are read, or by `verify`.

    Raises: CheckpointError if there is no complete checkpoint: the manifest is missing, damaged or of another step than
    the folder's name says, or a file is missing, cannot be read or does not have the length that was written.
    """
    path = os.fspath(path)
    try:
        with files.open_file(os.path.join(path, MANIFEST_FILE)) as file:
            size = file.seek(0, os.SEEK_END)
            most = files.MOST_MANIFEST_BYTES
            if size > most:
                raise CheckpointError(f"it has {size:,} bytes, and {most:,} are the most")
            file.seek(0)
            manifest = files.decode_manifest(file.read())
        order = folder_order(os.path.basename(os.path.normpath(path)))
        if order is not None and order[1] != manifest.step:
            raise CheckpointError(f"it is of step {manifest.step}, another folder's")
    except (OSError, CheckpointError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise DamagedCheckpoint(f"{path}: {MANIFEST_FILE}: {text}") from error
    saved = Saved(path, manifest)
    for rank in range(saved.size):
        saved._open(rank).close()
    return saved


def _may_be_undamaged(path: str, error: BaseException | None) -> bool:
    """Whether a file may still be as it was written, although reading it raised `error`."""
    if is_url(path) and isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)  # any other error may be the network's
    return is_transient(error)


def find(ranks: RankGroup, path: str | os.PathLike[str], required: bool = True) -> Saved | None:
    """Opens the checkpoint at a path, or the newest undamaged one in a folder. Every byte of it is verified.

    Rank 0 warns of newer checkpoints that are damaged. Ranks share the reading.

    required: False: returns None if there is no checkpoint in the folder
    Raises: CheckpointError on every rank if there is no undamaged one, with the reasons; also if the folder cannot be
    read, or a file cannot be read now but may be undamaged.
    """
    path = os.fspath(path)
    failed = f"{path} cannot be loaded"

    def candidates() -> list[str]:
        if ranks.rank:
            return []
        with describing_os_errors("reading", path):
            names = committed_names(path)
        checkpoints = newest_first(names)
        if required and not checkpoints:
            if {MANIFEST_FILE, shard_name(0)}.isdisjoint(names):
                raise CheckpointError(f"{path}: there is no checkpoint in it, nor is it one")
            return [path]
        return [os.path.join(path, name) for name in checkpoints]

    saved: Saved | None = None

    def check() -> str:
        nonlocal saved
        try:
            saved = open_checkpoint(candidate)
            saved.verify(ranks.rank, ranks.size, ranks.progress)
        except DamagedCheckpoint as error:
            if _may_be_undamaged(candidate, error.__cause__):
                raise
            return str(error)
        return ""

    reasons: list[str] = []
    for candidate in ranks.run_on_all_ranks(failed, candidates)[0]:
        damage = next(filter(None, ranks.run_on_all_ranks(failed, check)), None)
        if damage is None:
            return saved
        reasons.append(damage)
        if ranks.rank == 0:
            _log.warning("%s is passed over: %s", candidate, damage.removeprefix(f"{candidate}: "))
    if not reasons:
        return None
    raise CheckpointError(
        f"no checkpoint in {path} is whole ({'; '.join(reasons)}): to begin anew, move them away or give another folder"
    )
