"""Where checkpoints are kept: written by all ranks side by side, and there for all of them or for none.

A save goes through three stages, after each of which all ranks know how each of them did:

    1  rank 0 makes a folder with a temporary name; every rank says what it is going to write
    2  every rank writes its file there, to the disk
    3  rank 0 writes the manifest, to the disk, and renames the folder: from here on there is a checkpoint

A job that is killed before the third is done leaves a folder that is not taken for a checkpoint, and that the next save
removes."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from collectives.communicator import Communicator
from ddp.checkpoint import disk, shard_file
from ddp.checkpoint import manifest as manifests
from ddp.checkpoint.agreement import LocalFailure, RankAgreement, describing_os_errors, retry_once
from ddp.checkpoint.folder_lock import FolderHold, wait_for_folder, wait_for_token
from ddp.checkpoint.manifest import (
    MANIFEST_FILE,
    DamagedCheckpoint,
    Manifest,
    ShardInfo,
    TensorEntry,
    TensorPart,
    assemble_tensors,
    encode_manifest,
)
from ddp.checkpoint.saved import (
    MOST_STEPS,
    Saved,
    find_on_all_ranks,
    is_temporary,
    newest_first,
    newest_intact,
    next_name,
    open_folder,
    shard_name,
    surplus_names,
    temporary_name,
)
from ddp.checkpoint.shard_file import Array, write_shard
from ddp.errors import ArgumentError, CheckpointError
from ddp.serialization.safetensors import CODES, METADATA

#: (start, stop, shape): elements start to stop of a tensor of that shape, in C order
PieceRange = tuple[int, int, tuple[int, ...]]


class RankPlan(NamedTuple):
    """state: JSON of rank 0's, empty elsewhere; own_state: JSON"""

    step: int
    parts: dict[str, TensorPart]
    state: str
    own_state: str


def plan_rank(
    step: int, tensors: Mapping[str, Array], state: Any, own_state: Any, pieces: Mapping[str, PieceRange], rank: int
) -> RankPlan:
    """What this rank is to write. Raises: LocalFailure if it cannot be written."""
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        raise LocalFailure(f"a step should be an int of at least 0, is {step!r}")
    if unknown := pieces.keys() - tensors.keys():
        raise LocalFailure(
            f"there are pieces of {', '.join(map(repr, sorted(unknown)))}, which are not among the tensors"
        )
    parts = {name: _part(name, array, pieces.get(name)) for name, array in tensors.items()}
    return RankPlan(step, parts, "" if rank else to_json("state", state), to_json("own_state", own_state))


def _part(name: str, array: Any, piece: PieceRange | None) -> TensorPart:
    if not isinstance(name, str) or name == METADATA or not _is_unicode(name):
        raise LocalFailure(f"{name!r:.80} is no name for a tensor")
    if not isinstance(array, np.ndarray) or array.dtype not in CODES:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise LocalFailure(f"{name} should be a NumPy array of {', '.join(map(str, CODES))}, is of {kind}")
    if piece is None:
        return TensorPart(CODES[array.dtype], array.shape, 0, array.size)
    start, stop, shape = piece
    if not 0 <= start <= stop <= math.prod(shape) or array.shape != (stop - start,):
        raise LocalFailure(
            f"{name}: an array of shape {array.shape} is not elements {start} to {stop} of {tuple(shape)}"
        )
    return TensorPart(CODES[array.dtype], tuple(shape), start, stop)


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json(where: str, value: Any) -> str:
    """A JSON value as text, NaN and infinities as Python's `json` writes them. Raises: LocalFailure for others."""
    try:
        _check_json(where, value)
        return json.dumps(value)
    except RecursionError:
        raise LocalFailure(f"{where} contains itself, or is nested too deep") from None


def _check_json(where: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise LocalFailure(f"{where} has a key of type {type(key).__name__}: those of JSON are str")
            _check_json(f"{where}[{key!r}]", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_json(f"{where}[{index}]", each)
    elif value is not None and type(value) not in (str, bool, int, float):
        raise LocalFailure(f"{where} is of type {type(value).__name__}: expected JSON values")


class SaveTarget(NamedTuple):
    """Where a checkpoint goes. name: its folder when it is whole; temporary: and before"""

    folder: str
    name: str
    temporary_name: str

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.name)

    @property
    def unfinished(self) -> str:
        return os.path.join(self.folder, self.temporary_name)


def choose_target(folder: str, step: int) -> SaveTarget:
    """Where a checkpoint of that step goes. Raises: LocalFailure."""
    with describing_os_errors("reading", folder):
        name = next_name(step, disk.names(folder))
    return SaveTarget(folder, name, temporary_name(name, os.urandom(4).hex()))


def make_target(target: SaveTarget) -> None:
    """Makes the folder. Rank 0 alone. Raises: LocalFailure."""
    with describing_os_errors("making the folder", target.unfinished):
        disk.make_folder(target.unfinished)


def write_rank_file(
    target: SaveTarget, rank: int, tensors: Mapping[str, Array], progress: Callable[[], None], in_background: bool
) -> ShardInfo:
    """Writes this rank's file, to the disk. Raises: LocalFailure."""
    if rank != 0:
        wait_for_folder(target.unfinished)
    path = os.path.join(target.unfinished, shard_name(rank))

    def write() -> ShardInfo:
        with suppress(FileNotFoundError):
            disk.remove_file(path)  # of the first attempt
        shard = write_shard(path, tensors, progress, in_background)
        disk.sync_folder(target.unfinished)
        return shard

    with describing_os_errors("writing", path):
        return retry_once(write)


def commit_target(target: SaveTarget, manifest: Manifest) -> None:
    """Writes the manifest, to the disk, and gives the folder its name. Rank 0 alone. Raises: LocalFailure."""
    path = os.path.join(target.unfinished, MANIFEST_FILE)
    data = memoryview(encode_manifest(manifest))
    if len(data) > (most := manifests.MOST_MANIFEST_BYTES):
        raise LocalFailure(f"{path} would have {len(data):,} bytes, and {most:,} are the most: keep less state")

    def write() -> None:
        with suppress(FileNotFoundError):  # no earlier try got that far
            disk.remove_file(path)
        disk.write_file(path, data)
        disk.sync_folder(target.unfinished)

    with describing_os_errors("writing", path):
        retry_once(write)
    with describing_os_errors("giving its name to", target.path):
        disk.rename(target.unfinished, target.path)
    try:
        with describing_os_errors("writing", target.folder):
            disk.sync_folder(target.folder)
    except LocalFailure:
        _take_back(target)
        raise


def _take_back(target: SaveTarget) -> None:
    """Removes a checkpoint that might be gone after a power failure: it shall never have been there."""
    try:
        disk.rename(target.path, target.unfinished)
    except OSError:
        with suppress(OSError):  # the error of the save says more
            disk.remove(target.path)


def remove_target(target: SaveTarget) -> None:
    """Removes what there is of it, if it can be removed."""
    with suppress(OSError):  # it stays, and the next save clears it away
        disk.remove(target.unfinished)


_log = logging.getLogger("ddp.checkpoint")


def remove_unfinished_saves(folder: str) -> None:
    """Removes what saves and removals that were killed have left."""
    for name in filter(is_temporary, disk.names(folder)):
        path = os.path.join(folder, name)
        try:
            if _is_folder(path):
                disk.remove(path)
        except OSError as error:
            _log.warning("%s, which a save has left, cannot be removed: %s", path, error.strerror)


def remove_surplus(folder: str, keep: int) -> None:
    """Removes the checkpoints that are older than the `keep` newest whole ones. The newest is taken to be whole.

    What cannot be removed is named in a warning: that there are too many of them is no reason to stop.
    """
    try:
        # A link may lead anywhere: what is there is not ours to remove.
        names = [name for name in newest_first(disk.names(folder)) if _is_folder(os.path.join(folder, name))]
        removed = []
        for name in surplus_names(names, _whole(folder, names, keep), keep):
            removed.append(os.path.join(folder, temporary_name(name, os.urandom(4).hex())))
            disk.rename(os.path.join(folder, name), removed[-1])
        if removed:
            disk.sync_folder(folder)
        for path in removed:
            disk.remove(path)
    except OSError as error:
        _log.warning("%s: an old checkpoint cannot be removed: %s", folder, error.strerror)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _whole(folder: str, names: list[str], keep: int) -> set[str]:
    """Those of the newest that look whole, as many as are kept."""
    found: set[str] = set()
    for name in names:
        if len(found) == keep:
            break
        with suppress(DamagedCheckpoint):  # damaged ones do not count
            open_folder(os.path.join(folder, name))
            found.add(name)
    return found


class Store:
    """The checkpoints in a folder, as one of the ranks that write them sees it.

    folder: made if there is none; all ranks must see the same one
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
        self.folder = Path(os.path.abspath(folder))
        self.keep = keep
        self._folder = str(self.folder)
        self._first = comm.rank == 0
        self._ranks = RankAgreement(comm)
        self._holding = FolderHold(self._folder)
        failed = f"{self.folder} cannot hold checkpoints"
        try:
            token = self._ranks.run(failed, lambda: self._holding.take() if self._first else "")[0]
            self._ranks.run(failed, lambda: wait_for_token(self._folder, token))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another job use the folder. May be called repeatedly."""
        self._holding.close()
        self._ranks.close()

    def write(
        self,
        step: int,
        tensors: Mapping[str, Array],
        state: Any,
        own_state: Any,
        pieces: Mapping[str, PieceRange] | None = None,
        in_background: bool = False,
    ) -> Path:
        """Writes a checkpoint, and returns its folder when it exists for all ranks.

        step: the same on all ranks; tensors: what this rank writes, NumPy arrays by names that no other rank uses
        state, own_state: JSON values; of the first, rank 0's is kept, of the second everybody's
        pieces: (start, stop, shape) of those of `tensors` that are one-dimensional pieces: elements start to stop, in C
            order, of a tensor of that shape, whose other pieces other ranks write under the same name
        in_background: in one thread, which takes longer and leaves the cores to others

        The arrays must not be changed meanwhile. Afterwards the oldest checkpoints beyond `keep` are removed.

        Raises: CheckpointError on every rank, and then what was there before is untouched and nothing else is there;
        PeerLeft and its kin if a rank is gone.
        """
        failed = _not_saved(step)
        target: SaveTarget | None = None

        def prepare() -> tuple[RankPlan, SaveTarget | None]:
            nonlocal target
            mine = plan_rank(step, tensors, state, own_state, pieces or {}, self._ranks.rank)
            if self._first:
                self._holding.take()
                if self._holding.alone():
                    with describing_os_errors("reading", self._folder):
                        remove_unfinished_saves(self._folder)
                target = choose_target(self._folder, step)
                make_target(target)
            return mine, target

        try:
            prepared = self._ranks.run(failed, prepare)
            plans, where = [each for each, _ in prepared], prepared[0][1]
            assert where is not None
            files = [shard_name(rank) for rank in range(len(plans))]
            entries = _agreed(failed, plans, files)
            rank, progress = self._ranks.rank, self._ranks.progress
            shards = self._ranks.run(failed, lambda: write_rank_file(where, rank, tensors, progress, in_background))

            def commit() -> None:
                if self._first:
                    own = [json.loads(each.own_state) for each in plans]
                    by_name = dict(zip(files, shards, strict=True))
                    shared = json.loads(plans[0].state)
                    commit_target(where, Manifest(step, len(files), shard_file.BLOCK, by_name, entries, shared, own))

            self._ranks.run(failed, commit)
        except BaseException:
            if target is not None:
                remove_target(target)
            raise
        if self._first and self.keep is not None:
            remove_surplus(self._folder, self.keep)
        return Path(where.path)

    def refuse(self, step: int, why: str) -> NoReturn:
        """What a rank calls in the place of `write` if it cannot, so that no rank saves. Raises: CheckpointError."""

        def fail() -> NoReturn:
            raise LocalFailure(why)

        self._ranks.run(_not_saved(step), fail)
        raise AssertionError("a rank has failed")

    def newest(self) -> Saved | None:
        """The newest checkpoint of which every byte is as it was written, None if there is none.

        Others are named in a warning of rank 0, with the reason, and passed over. Ranks share the reading.

        Raises: CheckpointError on every rank if the folder, or a file in it, cannot be read, which does not say that it
        is damaged; or if there are checkpoints and none is whole: a job does not begin anew unless it is told to.
        """
        failed = f"the newest checkpoint in {self.folder} cannot be found"

        def list_() -> list[str]:
            with describing_os_errors("reading", self._folder):
                return newest_first(disk.names(self._folder)) if self._first else []

        names = self._ranks.run(failed, list_)[0]
        found, reasons = newest_intact(self._ranks, failed, [os.path.join(self._folder, name) for name in names])
        if found is None and reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole ({names[-1]}: {reasons[-1]}): to begin anew, move them away "
                "or give another folder"
            )
        return found

    def find(self, path: str | os.PathLike[str]) -> Saved:
        """The checkpoint at a path, or the newest whole one in a folder of another run's; every byte is as written.

        Raises: CheckpointError on every rank if there is none that is whole, or it cannot be read.
        """
        return find_on_all_ranks(self._ranks, path)


def _not_saved(step: object) -> str:
    return f"the checkpoint of step {step} was not saved, those before are as they were"


def _agreed(failed: str, plans: list[RankPlan], files: list[str]) -> dict[str, TensorEntry]:
    """The tensors that ranks are about to write. Raises: CheckpointError if they do not fit each other."""
    steps = [each.step for each in plans]
    if len(set(steps)) > 1:
        raise CheckpointError(f"{failed}: ranks are at different steps: {steps}")
    try:
        return assemble_tensors([each.parts for each in plans], files)
    except ArgumentError as error:
        raise CheckpointError(f"{failed}: {error}") from None
