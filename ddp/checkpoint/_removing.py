"""What is not needed any more goes first by name and then for good, so that nothing is ever seen half removed."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from ddp.checkpoint import _disk, _folders
from ddp.checkpoint._manifest import Damaged
from ddp.checkpoint._saved import open_folder

_log = logging.getLogger("ddp.checkpoint")


def sweep(folder: str) -> None:
    """Removes what saves and removals that were killed have left."""
    for name in filter(_folders.is_temporary, _disk.names(folder)):
        path = os.path.join(folder, name)
        try:
            if _is_folder(path):
                _disk.remove(path)
        except OSError as error:
            _log.warning("%s, which a save has left, cannot be removed: %s", path, error.strerror)


def retain(folder: str, keep: int) -> None:
    """Removes the checkpoints that are older than the `keep` newest whole ones. The newest is taken to be whole.

    What cannot be removed is named in a warning: that there are too many of them is no reason to stop.
    """
    try:
        # A link may lead anywhere: what is there is not ours to remove.
        names = [name for name in _folders.newest_first(_disk.names(folder)) if _is_folder(os.path.join(folder, name))]
        removed = []
        for name in _folders.surplus(names, _whole(folder, names, keep), keep):
            removed.append(os.path.join(folder, _folders.temporary(name, os.urandom(4).hex())))
            _disk.rename(os.path.join(folder, name), removed[-1])
        if removed:
            _disk.sync_folder(folder)
        for path in removed:
            _disk.remove(path)
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
        with suppress(Damaged):  # damaged ones do not count
            open_folder(os.path.join(folder, name))
            found.add(name)
    return found
