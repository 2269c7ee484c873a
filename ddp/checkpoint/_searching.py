"""The checkpoint that a path means: one of its own, or the newest whole one in a folder of them."""

from __future__ import annotations

import logging
import os

from collectives import Communicator
from ddp.checkpoint import _folders
from ddp.checkpoint._agreement import together
from ddp.checkpoint._manifest import FILE
from ddp.checkpoint._saved import Saved, open_checkpoint
from ddp.errors import CheckpointError

_log = logging.getLogger("ddp.checkpoint")


def find(path: str | os.PathLike[str]) -> Saved:
    """Without other ranks. Raises: CheckpointError if there is none that is whole, with the reasons."""
    path = os.fspath(path)
    try:
        there = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    names = _folders.newest_first(there)
    if not names and {FILE, _folders.shard_name(0)}.isdisjoint(there):
        raise CheckpointError(f"{path}: there is no checkpoint in it, nor is it one")
    if not names:
        return open_checkpoint(path)
    reasons = []
    for name in names:
        try:
            saved = open_checkpoint(os.path.join(path, name))
            saved.verify()
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            _log.warning("a checkpoint is passed over: %s", reason)
        return saved
    raise CheckpointError(f"{path}: no checkpoint is whole: {'; '.join(reasons)}")


def find_together(comm: Communicator, path: str | os.PathLike[str]) -> Saved:
    """The one that rank 0 finds there. Collective. Raises: CheckpointError on all ranks if there is none."""
    chosen = together(comm, "load", lambda: str(find(path).path) if comm.rank == 0 else "")[0]
    opened: list[Saved] = []
    together(comm, "load", lambda: opened.append(find(chosen)))
    return opened[0]
