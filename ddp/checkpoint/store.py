"""Where checkpoints are kept: written by all ranks side by side, and visible to all of them or to none.

A save goes through three stages, after each of which all ranks know how each of them did:

    1  rank 0 makes a folder with a temporary name
    2  every rank writes its file there, to the disk, and says what is in it
    3  rank 0 writes the manifest, to the disk, and renames the folder: from here on there is a checkpoint

A job that is killed before the third is done leaves a folder that is not taken for a checkpoint, and that the next save
removes.

At a URL nothing can be renamed. There the folder has its name from the start, and is a checkpoint once its manifest is
written. One that a killed job has left without is removed by the next save of that step, or when it is older than the
checkpoints that are kept."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from collectives.communicator import Communicator
from ddp.checkpoint import checkpoint_files as files
from ddp.checkpoint import remote_files, saved
from ddp.checkpoint.agreement import Agreement, describing_os_errors, reason
from ddp.checkpoint.checkpoint_files import Array
from ddp.checkpoint.folder_lock import FolderLock, wait_for_content, wait_until
from ddp.checkpoint.remote_files import is_url
from ddp.checkpoint.saved import Saved
from ddp.errors import ArgumentError, CheckpointError
from ddp.serialization.safetensors import CODES, METADATA

#: (start, stop, shape): elements start to stop of a tensor of that shape, in C order
PieceRange = tuple[int, int, tuple[int, ...]]

_log = logging.getLogger("ddp.checkpoint")


def check_tensors(tensors: Mapping[str, Any], pieces: Mapping[str, PieceRange]) -> None:
    """Raises: CheckpointError for what cannot be written."""
    for name, array in tensors.items():
        if not isinstance(name, str) or name == METADATA or name.encode(errors="ignore").decode() != name:
            raise CheckpointError(f"{name!r:.80} is no name for a tensor")
        if not isinstance(array, np.ndarray) or array.dtype not in CODES:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise CheckpointError(f"{name} should be a NumPy array of {', '.join(map(str, CODES))}, is of {kind}")
    for name, (start, stop, shape) in pieces.items():
        array = tensors.get(name)
        if array is None or not 0 <= start <= stop <= math.prod(shape) or array.shape != (stop - start,):
            has = "no array" if array is None else f"an array of shape {array.shape}"
            raise CheckpointError(f"{name}: {has} is not elements {start} to {stop} of {tuple(shape)}")


def plain(where: str, value: Any) -> Any:
    """A copy of a JSON value, with NaN and infinities. Raises: CheckpointError for what is not JSON."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from None


class Store:
    """The checkpoints in a folder, as one of the ranks that write them sees it.

    folder: made if there is none; all ranks must see the same one. Or a URL of fsspec, "s3://bucket/run", in which a
        checkpoint exists once its manifest does, and which nothing locks: let one job alone save there
    comm: a communicator; collective, as every method but `close` is. Calls are made on a duplicate of it, from any one
        thread of each rank
    keep: how many whole checkpoints are left when another has been written, at least 1; None: all

    Raises: CheckpointError on every rank if ranks see different folders, if another job uses it, or if it cannot be
    written; ArgumentError for a `keep` that is none, or an empty name.
    """

    def __init__(self, folder: str | os.PathLike[str], comm: Communicator, keep: int | None = 3) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ArgumentError(f"keep should be at least 1, or None to keep all, is {keep!r}")
        if not os.fspath(folder):
            raise ArgumentError("the folder's name is empty: '.' is this one")
        text = os.fspath(folder)
        self.folder = saved.as_path(text if is_url(text) else os.path.abspath(text))
        self.keep = keep
        self.ranks = Agreement(comm)
        self._folder = os.fspath(self.folder)
        self._lock = FolderLock(self._folder)
        failed = f"{self.folder} cannot hold checkpoints"
        try:
            locked = self.ranks.run(failed, lambda: "" if self.ranks.rank else self._lock.take())[0]
            self.ranks.run(failed, lambda: wait_for_content(self._folder, locked))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another job use the folder. May be called repeatedly."""
        self._lock.close()
        self.ranks.close()

    def write(
        self,
        step: int,
        tensors: Mapping[str, Array],
        state: Any,
        own_state: Any,
        pieces: Mapping[str, PieceRange] | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> Path | str | None:
        """Writes a checkpoint, and returns its folder when it exists for all ranks.

        step: the same on all ranks; tensors: what this rank writes, NumPy arrays by names that no other rank uses
        state, own_state: JSON values; of the first, rank 0's is kept, of the second everybody's
        pieces: (start, stop, shape) of those of `tensors` that are one-dimensional pieces: elements start to stop, in C
            order, of a tensor of that shape, whose other pieces other ranks write under the same name
        ready: called first; where it returns False on one rank nothing is written, and all return None

        The arrays must not be changed meanwhile. Afterwards the oldest checkpoints beyond `keep` are removed.

        Raises: CheckpointError on every rank, and then what was there before is untouched and nothing else is there;
        PeerLeft and its kin if a rank is gone.
        """
        failed = f"the checkpoint of step {step} was not saved, those before are as they were"
        rank, run, pieces = self.ranks.rank, self.ranks.run, pieces or {}
        unfinished = path = ""

        def prepare() -> tuple[bool, int, str, Any, Any]:
            nonlocal unfinished, path
            if not ready():
                return False, step, "", None, None
            if type(step) is not int or not 0 <= step < saved.MOST_STEPS:
                raise CheckpointError(f"a step should be an int of at least 0, is {step!r}")
            check_tensors(tensors, pieces)
            shared, own = plain("state", None if rank else state), plain("own_state", own_state)
            if rank == 0:
                unfinished, path = self._make_folder(step)
            return True, step, unfinished, shared, own

        def write_shard() -> tuple[files.ShardInfo, dict[str, files.TensorEntry]]:
            wait_until(lambda: is_url(folders[0]) or os.path.isdir(folders[0]))
            file = os.path.join(folders[0], saved.shard_name(rank))
            with describing_os_errors("writing", file):
                written = files.write_shard(file, rank, tensors, pieces, self.ranks.progress)
                files.sync_folder(folders[0])
            return written

        def commit() -> str:
            nonlocal unfinished
            if rank == 0:
                shards, entries = zip(*written, strict=True)
                whole = files.assemble_tensors(entries)
                self._commit(unfinished, path, files.Manifest(step, shards, whole, states[0], owns))
                unfinished = ""
            return path

        try:
            all_ready, steps, folders, states, owns = zip(*run(failed, prepare), strict=True)
            if not all(all_ready):
                _remove(unfinished)
                return None
            if len(set(steps)) > 1:
                raise CheckpointError(f"{failed}: ranks are at different steps: {[*steps]}")
            written = run(failed, write_shard)
            path = run(failed, commit)[0]
        except BaseException:
            _remove(unfinished)
            raise
        if rank == 0 and self.keep is not None:
            self._remove_surplus(self.keep)
        return saved.as_path(path)

    def newest_step(self) -> int:
        """The step of the newest checkpoint, whole or not, -1 if there is none. Raises: CheckpointError as `newest`."""

        def look() -> int:
            with describing_os_errors("reading", self._folder):
                names = saved.newest_first(saved.names_in(self._folder))
            return next((order[1] for order in map(saved.folder_order, names) if order is not None), -1)

        return self.ranks.run(f"{self.folder} cannot be loaded", look)[0]

    def newest(self) -> Saved | None:
        """The newest checkpoint of which every byte is as it was written, None if there is none.

        Others are named in a warning of rank 0, with the reason, and passed over. Ranks share the reading.

        Raises: CheckpointError on every rank if the folder, or a file in it, cannot be read, which does not say that it
        is damaged; or if there are checkpoints and none is whole: a job does not begin anew unless it is told to.
        """
        return saved.find(self.ranks, self._folder, required=False)

    def find(self, path: str | os.PathLike[str]) -> Saved:
        """The checkpoint at a path, or the newest whole one in a folder of another run's; every byte is as written.

        Raises: CheckpointError on every rank if there is none that is whole, or it cannot be read.
        """
        found = saved.find(self.ranks, path)
        assert found is not None
        return found

    # -- on disk; what only rank 0 does

    def _make_folder(self, step: int) -> tuple[str, str]:
        """A new folder with a temporary name, and the path that it is to have in the end; at a URL one path."""
        with describing_os_errors("reading", self._folder):
            names = saved.names_in(self._folder)
        if self._lock.exclusive:
            for each in filter(saved.is_temporary, names):  # what saves and removals that were killed have left
                left = os.path.join(self._folder, each)
                try:
                    if _is_folder(left):
                        files.remove_folder(left)
                except OSError as error:
                    _log.warning("%s, which a save has left, cannot be removed: %s", left, error.strerror)
        name = saved.next_name(step, names)
        if is_url(self._folder):
            path = os.path.join(self._folder, name)
            with describing_os_errors("making the folder", path):
                files.remove_folder(path)  # what a save that was killed has left
                remote_files.make_folder(path)
            return path, path
        unfinished = os.path.join(self._folder, saved.temporary_name(name))
        with describing_os_errors("making the folder", unfinished):
            os.mkdir(unfinished)
        return unfinished, os.path.join(self._folder, name)

    def _commit(self, unfinished: str, path: str, manifest: files.Manifest) -> None:
        """Writes the manifest, to the disk, and gives the folder its name, which it has already at a URL."""
        file = os.path.join(unfinished, files.MANIFEST_FILE)
        data = memoryview(files.encode_manifest(manifest))
        if len(data) > (most := files.MOST_MANIFEST_BYTES):
            raise CheckpointError(f"{file} would have {len(data):,} bytes, and {most:,} are the most: keep less state")
        with describing_os_errors("writing", file):
            files.write_file(file, [data])
            files.sync_folder(unfinished)
        if is_url(path):
            return
        with describing_os_errors("giving its name to", path):
            os.rename(unfinished, path)
        try:
            with describing_os_errors("writing", self._folder):
                files.sync_folder(self._folder)
        except CheckpointError:
            _remove(path)  # it might be gone after a power failure, so it shall never have been there
            raise

    def _remove_surplus(self, keep: int) -> None:
        """Removes the checkpoints that are older than the `keep` newest whole ones, oldest first.

        What cannot be removed is named in a warning: that there are too many of them is no reason to stop.
        """
        try:
            kept, removed = 0, list[tuple[str, str]]()
            for name in saved.newest_first(files.list_folder(self._folder)):
                path = os.path.join(self._folder, name)
                if not _is_folder(path):
                    continue  # a link may lead anywhere: what is there is not ours to remove
                if kept == keep:
                    temporary = name if is_url(path) else saved.temporary_name(name)
                    removed.insert(0, (path, os.path.join(self._folder, temporary)))
                else:
                    with suppress(files.DamagedCheckpoint):
                        saved.open_checkpoint(path)
                        kept += 1
            for path, temporary in removed:
                if path != temporary:
                    os.rename(path, temporary)
            if removed:
                files.sync_folder(self._folder)
            for _, temporary in removed:
                files.remove_folder(temporary)
        except OSError as error:
            _log.warning("%s: an old checkpoint cannot be removed: %s", self._folder, reason(error))


def _is_folder(path: str) -> bool:
    return is_url(path) or (os.path.isdir(path) and not os.path.islink(path))


def _remove(path: str) -> None:
    """Removes a folder of a save that failed, if it can be removed; else the next save does."""
    if path:
        with suppress(OSError):  # the error of the save says more
            files.remove_folder(path)
