"""A save, up to the moment from which on there is a checkpoint: the calls of one rank, stage by stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ddp.checkpoint import _disk, _folders, _manifest
from ddp.checkpoint._holding import wait_for
from ddp.checkpoint._manifest import Manifest, Shard
from ddp.checkpoint._shards import Array, write_shard
from ddp.checkpoint._trouble import Failed, doing, twice


class Target(NamedTuple):
    """Where a checkpoint goes. name: its folder when it is whole; temporary: and before"""

    folder: str
    name: str
    temporary: str

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.name)

    @property
    def unfinished(self) -> str:
        return os.path.join(self.folder, self.temporary)


def choose(folder: str, step: int) -> Target:
    """Where a checkpoint of that step goes. Raises: Failed."""
    with doing("reading", folder):
        name = _folders.next_name(step, _disk.names(folder))
    return Target(folder, name, _folders.temporary(name, os.urandom(4).hex()))


def begin(target: Target) -> None:
    """Makes the folder. Rank 0 alone. Raises: Failed."""
    with doing("making the folder", target.unfinished):
        _disk.make_folder(target.unfinished)


def write_own(
    target: Target, rank: int, tensors: Mapping[str, Array], progress: Callable[[], None], gently: bool
) -> Shard:
    """Writes this rank's file, to the disk. Raises: Failed."""
    if rank != 0:
        wait_for(target.unfinished)
    path = os.path.join(target.unfinished, _folders.shard_name(rank))

    def write() -> Shard:
        with suppress(FileNotFoundError):
            _disk.remove_file(path)  # of the first attempt
        shard = write_shard(path, tensors, progress, gently)
        _disk.sync_folder(target.unfinished)
        return shard

    with doing("writing", path):
        return twice(write)


def commit(target: Target, manifest: Manifest) -> None:
    """Writes the manifest, to the disk, and gives the folder its name. Rank 0 alone. Raises: Failed."""
    path = os.path.join(target.unfinished, _manifest.FILE)
    data = memoryview(_manifest.encode(manifest))
    if len(data) > _manifest.MOST_BYTES:
        raise Failed(
            f"{path} would have {len(data):,} bytes, and {_manifest.MOST_BYTES:,} are the most: keep less state"
        )

    def write() -> None:
        with suppress(FileNotFoundError):  # no earlier try got that far
            _disk.remove_file(path)
        _disk.write_file(path, data)
        _disk.sync_folder(target.unfinished)

    with doing("writing", path):
        twice(write)
    with doing("giving its name to", target.path):
        _disk.rename(target.unfinished, target.path)
    try:
        with doing("writing", target.folder):
            _disk.sync_folder(target.folder)
    except Failed:
        _take_back(target)
        raise


def _take_back(target: Target) -> None:
    """Removes a checkpoint that might be gone after a power failure: it shall never have been there."""
    try:
        _disk.rename(target.path, target.unfinished)
    except OSError:
        with suppress(OSError):  # the error of the save says more
            _disk.remove(target.path)


def give_up(target: Target) -> None:
    """Removes what there is of it, if it can be removed."""
    with suppress(OSError):  # it stays, and the next save clears it away
        _disk.remove(target.unfinished)
