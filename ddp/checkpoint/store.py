"""A folder of checkpoints. All ranks write a checkpoint together, and it exists only once all of it is on the disk.

A save has three stages. After each, all ranks know whether it has succeeded on every rank:

    1  rank 0 makes a folder with a temporary name
    2  every rank writes its file there, syncs it to the disk, and describes its contents
    3  rank 0 writes the manifest, syncs it, and renames the folder: now the checkpoint exists

A job that is killed before the rename leaves a folder with a temporary name. The next save removes it, if the folder
of checkpoints could be locked.

At a URL nothing can be renamed. There the folder has its final name from the start, and is a checkpoint once its
manifest exists. If a killed job leaves a folder without a manifest, the next save of that step removes it. Without
such a save, the folder is removed once it is older than the `keep` newest checkpoints."""

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
from ddp.checkpoint import checkpoint_reader, remote_files
from ddp.checkpoint.checkpoint_files import Array, PieceRange
from ddp.checkpoint.checkpoint_reader import Saved
from ddp.checkpoint.folder_lock import FolderLock, wait_for_content, wait_until
from ddp.checkpoint.rank_group import RankGroup, describing_os_errors, reason
from ddp.checkpoint.remote_files import is_url
from ddp.errors import ArgumentError, CheckpointError
from ddp.serialization.safetensors import CODES, METADATA

_log = logging.getLogger("ddp.checkpoint")


def check_tensors(tensors: Mapping[str, Any], pieces: Mapping[str, PieceRange]) -> None:
    """Checks that a checkpoint can hold these names, arrays and pieces. Raises: CheckpointError if it cannot."""
    for name, array in tensors.items():
        if not isinstance(name, str) or name == METADATA or name.encode(errors="ignore").decode() != name:
            raise CheckpointError(f"{name!r:.80} is no name for a tensor")
        if not isinstance(array, np.ndarray) or array.dtype not in CODES:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise CheckpointError(f"{name} should be a NumPy array of {', '.join(map(str, CODES))}, is of {kind}")
    for name, (start, stop, shape) in pieces.items():
        array = tensors.get(name)
        if array is None or not 0 <= start <= stop <= math.prod(shape) or array.shape != (stop - start,):
            given = "no array" if array is None else f"an array of shape {array.shape}"
            raise CheckpointError(f"{name}: {given} is not elements {start} to {stop} of {tuple(shape)}")


def copy_json(name: str, value: Any) -> Any:
    """A copy of a JSON value, NaN and infinities included. Raises: CheckpointError, with `name`, for other values."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: {error}") from None


class Store:
    """One rank's access to a folder of checkpoints. Collective, as is every method but `close`.

    folder: is made if it does not exist; all ranks must see the same one. Or a URL of fsspec, "s3://bucket/run", which
        cannot be locked: only one job may save there
    comm: the ranks' communicator. Calls go over a duplicate of it; one thread of each rank at a time may make them
    keep: number of checkpoints that remain after a save, at least 1; None: all. A checkpoint with a damaged manifest,
        or with a file that is missing or has another length, does not count

    Raises: CheckpointError on every rank if ranks see different folders, another job uses the folder, or it cannot be
    written to; ArgumentError for an invalid `keep` or an empty name.
    """

    def __init__(self, folder: str | os.PathLike[str], comm: Communicator, keep: int | None = 3) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ArgumentError(f"keep should be at least 1, or None to keep all, is {keep!r}")
        if not os.fspath(folder):
            raise ArgumentError("the folder's name is empty: '.' is this one")
        text = os.fspath(folder)
        self.folder = checkpoint_reader.as_path(text if is_url(text) else os.path.abspath(text))
        self.keep = keep
        self.ranks = RankGroup(comm)
        self._folder = os.fspath(self.folder)
        self._lock = FolderLock(self._folder)
        failed = f"{self.folder} cannot hold checkpoints"
        try:
            locked = self.ranks.run_on_all_ranks(failed, lambda: "" if self.ranks.rank else self._lock.take())[0]
            self.ranks.run_on_all_ranks(failed, lambda: wait_for_content(self._folder, locked))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlocks the folder, so that another job can use it. May be called repeatedly.

        Every later call of another method raises CheckpointError.
        """
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
        """Writes a checkpoint. Returns its folder, once it exists for all ranks.

        step: the same on all ranks; tensors: the NumPy arrays that this rank writes, by name; only pieces may
            have a name that another rank uses
        state, own_state: JSON values. The state of rank 0 is saved, and the own_state of every rank
        pieces: by name, (start, stop, shape) of each array that is a one-dimensional piece: elements start to stop, in
            C order, of a tensor of this shape. Other ranks write the tensor's other pieces under the same name
        ready: called first; if it returns False on any rank, nothing is written and all ranks return None

        The arrays must not be changed before it returns. At the end, rank 0 removes the oldest checkpoints beyond
        `keep`.

        Raises: CheckpointError on every rank if an argument is invalid on one, ranks disagree about the step or a
        tensor, or a file cannot be written; then the checkpoints are as before. PeerLeft or a related error if a rank
        has ended.
        """
        failed = f"the checkpoint of step {step} was not saved, those before are as they were"
        rank = self.ranks.rank
        run = self.ranks.run_on_all_ranks
        pieces = pieces or {}
        unfinished = path = ""

        def prepare() -> tuple[bool, int, str, Any, Any]:
            nonlocal unfinished, path
            if not ready():
                return False, step, "", None, None
            if type(step) is not int or not 0 <= step < checkpoint_reader.MOST_STEPS:
                raise CheckpointError(f"a step should be an int of at least 0, is {step!r}")
            check_tensors(tensors, pieces)
            state_copy = copy_json("state", None if rank else state)
            own_copy = copy_json("own_state", own_state)
            if rank == 0:
                unfinished, path = self._make_folder(step)
            return True, step, unfinished, state_copy, own_copy

        def write_shard() -> tuple[files.ShardInfo, dict[str, files.TensorEntry]]:
            wait_until(lambda: is_url(folders[0]) or os.path.isdir(folders[0]))
            file = os.path.join(folders[0], checkpoint_reader.shard_name(rank))
            with describing_os_errors("writing", file):
                written = files.write_shard(file, rank, tensors, pieces, self.ranks.progress)
                files.sync_folder(folders[0])
            return written

        def commit() -> str:
            nonlocal unfinished
            if rank == 0:
                shards, tables = zip(*written, strict=True)
                tensor_entries = files.assemble_tensors(tables)
                self._commit(unfinished, path, files.Manifest(step, shards, tensor_entries, states[0], own_states))
                unfinished = ""
            return path

        try:
            all_ready, steps, folders, states, own_states = zip(*run(failed, prepare), strict=True)
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
        return checkpoint_reader.as_path(path)

    def newest_step(self) -> int:
        """The step of the newest checkpoint, damaged or not; -1 if there is none.

        Raises: CheckpointError on every rank if the folder cannot be read.
        """

        def read_step() -> int:
            with describing_os_errors("reading", self._folder):
                names = checkpoint_reader.newest_first(checkpoint_reader.committed_names(self._folder))
            return next((order[1] for order in map(checkpoint_reader.folder_order, names) if order is not None), -1)

        return self.ranks.run_on_all_ranks(f"{self.folder} cannot be loaded", read_step)[0]

    def newest(self) -> Saved | None:
        """The newest checkpoint whose bytes are all as they were written; None if there is no checkpoint.

        Rank 0 warns of newer ones that are damaged. Ranks share the reading.

        Raises: CheckpointError on every rank if there are checkpoints and all are damaged, so that a job does not start
        over unnoticed; also if the folder cannot be read, or a file cannot be read now but may be undamaged.
        """
        return checkpoint_reader.find(self.ranks, self._folder, required=False)

    def find(self, path: str | os.PathLike[str]) -> Saved:
        """The checkpoint at a path, or the newest undamaged one in another run's folder. Every byte of it is verified.

        Raises: CheckpointError on every rank if there is no undamaged one, or it cannot be read.
        """
        checkpoint = checkpoint_reader.find(self.ranks, path)
        assert checkpoint is not None
        return checkpoint

    # -- called on rank 0 only

    def _make_folder(self, step: int) -> tuple[str, str]:
        """Makes a folder with a temporary name; at a URL, with the final name.

        Returns: its path, and the path after the commit
        """
        with describing_os_errors("reading", self._folder):
            names = checkpoint_reader.committed_names(self._folder)
        if self._lock.exclusive:
            # Saves or removals that were killed left these.
            for temporary in filter(checkpoint_reader.is_temporary, names):
                path = os.path.join(self._folder, temporary)
                try:
                    if _is_folder(path):
                        files.remove_folder(path)
                except OSError as error:
                    _log.warning("%s, which a save has left, cannot be removed: %s", path, error.strerror)
        name = checkpoint_reader.next_name(step, names)
        path = os.path.join(self._folder, name)
        if is_url(path):
            with describing_os_errors("making the folder", path):
                files.remove_folder(path)  # a save that was killed may have left files there
                remote_files.make_folder(path)
            return path, path
        unfinished = os.path.join(self._folder, checkpoint_reader.temporary_name(name))
        with describing_os_errors("making the folder", unfinished):
            os.mkdir(unfinished)
        return unfinished, path

    def _commit(self, unfinished: str, path: str, manifest: files.Manifest) -> None:
        """Writes the manifest, syncs it to the disk and, except at a URL, renames the folder."""
        file = os.path.join(unfinished, files.MANIFEST_FILE)
        data = memoryview(files.encode_manifest(manifest))
        most = files.MOST_MANIFEST_BYTES
        if len(data) > most:
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
            _remove(path)  # a power failure could still undo the rename, so the save counts as failed
            raise

    def _remove_surplus(self, keep: int) -> None:
        """Removes the checkpoints that are older than the `keep` newest complete ones, oldest first.

        If one cannot be removed, the rest stay, perhaps under temporary names, and a warning is logged.
        """
        try:
            kept = 0
            surplus: list[str] = []
            for name in checkpoint_reader.newest_first(files.list_folder(self._folder)):
                path = os.path.join(self._folder, name)
                if not _is_folder(path):
                    continue  # a symbolic link: its target is not ours to remove
                if kept == keep:
                    surplus.insert(0, path)
                else:
                    with suppress(files.DamagedCheckpoint):
                        checkpoint_reader.open_checkpoint(path)
                        kept += 1
            if not is_url(self._folder):
                for index, path in enumerate(surplus):
                    folder, name = os.path.split(path)
                    surplus[index] = os.path.join(folder, checkpoint_reader.temporary_name(name))
                    os.rename(path, surplus[index])
            if surplus:
                files.sync_folder(self._folder)
            for path in surplus:
                files.remove_folder(path)
        except OSError as error:
            _log.warning("%s: an old checkpoint cannot be removed: %s", self._folder, reason(error))


def _is_folder(path: str) -> bool:
    return is_url(path) or (os.path.isdir(path) and not os.path.islink(path))


def _remove(path: str) -> None:
    """Removes the folder of a failed save. Ignores errors: the next save tries again."""
    if path:
        with suppress(OSError):  # the error of the save says more
            files.remove_folder(path)
