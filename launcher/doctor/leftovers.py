"""Files that killed MPI jobs have left in shared memory, where they take memory until the next boot."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

#: Where MPIs keep what ranks of a machine share.
FOLDER = "/dev/shm"
_PATTERNS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "Intel_MPI_*")
_YOUNG = 5.0  # s; whoever has just made a file may not have mapped it yet


class Leftover(NamedTuple):
    """A file that nobody uses."""

    path: str
    nbytes: int


def look(folder: str = FOLDER) -> list[Leftover]:
    """The files of this user that no process holds which can be seen from here."""
    mine = []
    for path in Path(folder).glob("*") if Path(folder).is_dir() else ():
        with contextlib.suppress(OSError):  # it went while we looked
            seen = path.stat()
            if seen.st_uid == os.geteuid() and any(fnmatch(path.name, each) for each in _PATTERNS):
                mine.append((str(path), seen.st_blocks * 512, time.time() - max(seen.st_ctime, seen.st_mtime)))
    # Looked for after the files, so that the file of a process that starts meanwhile is not among them.
    held = _held(folder) if mine else set()
    return unused(mine, held, os.path.exists)


def unused(
    files: Sequence[tuple[str, int, float]], held: Iterable[str], exists: Callable[[str], bool]
) -> list[Leftover]:
    """Which of the files (path, bytes, age in s) nobody holds.

    exists: False for a file that has gone by now, because its job has ended
    """
    taken = set(held)
    return [
        Leftover(path, nbytes) for path, nbytes, age in files if path not in taken and age > _YOUNG and exists(path)
    ]


def sweep(folder: str = FOLDER) -> int:
    """`ddp-doctor sweep`: removes them, and says how many; returns 1 if one could not be removed, else 0."""
    removed, trouble = [], ""
    for each in look(folder):
        try:
            os.unlink(each.path)
            removed.append(each)
        except FileNotFoundError:  # somebody else sweeps
            pass
        except OSError as failure:
            trouble = f"{each.path} cannot be removed: {failure.strerror}"
    nbytes = sum(each.nbytes for each in removed)
    print(f"{len(removed)} files of MPI jobs that were killed removed from {folder} ({nbytes / 1e6:.0f} MB)")
    if trouble:
        print(f"ddp-doctor: {trouble}", file=sys.stderr)
    return 1 if trouble else 0


def _held(folder: str) -> set[str]:
    """Files of the folder that processes have mapped or opened."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                _, slash, rest = line.partition(folder + "/")
                if slash:
                    found.add(folder + "/" + rest.removesuffix(" (deleted)"))
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(fd))
    return found
