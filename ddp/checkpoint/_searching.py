"""The checkpoint that a path means: one of its own, or the newest whole one in a folder of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ddp.checkpoint import _folders
from ddp.checkpoint._agreement import Agreement
from ddp.checkpoint._manifest import FILE, Damaged
from ddp.checkpoint._saved import Saved, open_checkpoint, open_folder
from ddp.checkpoint._trouble import Failed, may_be_whole
from ddp.errors import CheckpointError

_log = logging.getLogger("ddp.checkpoint")


def find(path: str | os.PathLike[str]) -> Saved:
    """Without other ranks. Raises: CheckpointError if there is none that is whole, with the reasons.

    One that was asked for by its own path is verified when it is read.
    """
    path = os.fspath(path)
    try:
        paths = _meant(path)
    except Failed as error:
        raise CheckpointError(str(error)) from None
    if paths == [path]:
        return open_checkpoint(path)
    reasons = []
    for each in paths:
        try:
            saved = open_checkpoint(each)
            saved.verify()
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            _log.warning("a checkpoint is passed over: %s", reason)
        return saved
    raise _none_whole(path, reasons)


def find_together(ranks: Agreement, path: str | os.PathLike[str]) -> Saved:
    """The one that rank 0 finds there, every byte of it verified: ranks share the reading.

    Raises: CheckpointError on every rank if there is none that is whole.
    """
    path = os.fspath(path)
    failed = f"{path} cannot be loaded"
    paths = ranks.reach(failed, lambda: _meant(path) if ranks.rank == 0 else [])[0]
    if paths == [path]:
        saved, reason = examine(ranks, failed, path)
        if saved is None:
            raise CheckpointError(f"{path}: {reason}")
        return saved
    saved, reasons = newest_whole(ranks, failed, paths)
    if saved is None:
        raise _none_whole(path, [f"{each}: {reason}" for each, reason in zip(paths, reasons, strict=True)])
    return saved


def newest_whole(ranks: Agreement, failed: str, paths: Sequence[str]) -> tuple[Saved | None, list[str]]:
    """The first of these that is whole, and why those before are not, which a warning of rank 0 says as well.

    failed: how an error begins. Raises: CheckpointError as `examine` does.
    """
    reasons: list[str] = []
    for path in paths:
        saved, reason = examine(ranks, failed, path)
        if saved is not None:
            return saved, reasons
        reasons.append(reason)
        if ranks.rank == 0:
            _log.warning("%s is passed over: %s", path, reason)
    return None, reasons


def examine(ranks: Agreement, failed: str, path: str) -> tuple[Saved | None, str]:
    """A checkpoint, or None on every rank, and why. Ranks share the reading, which may take as long as the disk does.

    Raises: CheckpointError on every rank if a file cannot be read, which does not say that it is damaged.
    """
    saved: Saved | None = None

    def look() -> str:
        nonlocal saved
        try:
            saved = open_folder(path)
            saved.check(ranks.rank, ranks.size, ranks.progress)
        except Damaged as error:
            if may_be_whole(error.__context__):
                raise Failed(f"{os.path.basename(path)}: {error}") from None
            return str(error)
        return ""

    wrong = [reason for reason in ranks.reach(failed, look) if reason]
    return (None, wrong[0]) if wrong else (saved, "")


def _meant(path: str) -> list[str]:
    """The checkpoints in a folder, the newest first; or that path alone if it is one. Raises: Failed if neither."""
    try:
        there = os.listdir(path)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from None
    names = _folders.newest_first(there)
    if not names and {FILE, _folders.shard_name(0)}.isdisjoint(there):
        raise Failed(f"{path}: there is no checkpoint in it, nor is it one")
    return [os.path.join(path, name) for name in names] or [path]


def _none_whole(path: str, reasons: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{path}: no checkpoint is whole: {'; '.join(reasons)}")
