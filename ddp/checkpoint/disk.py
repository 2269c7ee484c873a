"""Every call by which a checkpoint changes the disk: what is written is on it before the next step relies on that.

Python repeats what a signal interrupts. Nothing else is repeated here, an fsync least of all: after one has failed the
system may have dropped what was to be written, and the next would succeed over a hole.
"""

from __future__ import annotations

import contextlib
import os


def make_folder(path: str) -> None:
    os.mkdir(path)


def create(path: str) -> int:
    """The descriptor of a new file. Raises: FileExistsError if there is something of that name."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def start_writing(fd: int, start: int, length: int) -> None:
    """Has the disk begin with bytes that were written, beside what comes next: fewer are left to wait for at the end.

    What is on the disk then leaves the page cache, as it is not read again.
    """
    with contextlib.suppress(OSError):  # a wish, which not every file system knows
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


def finish(fd: int) -> None:
    """Returns once all that was written is on the disk, and the file is closed."""
    try:
        os.fsync(fd)
    except BaseException:
        close(fd)
        raise
    os.close(fd)  # a network file system may report here that it had no room


def write_file(path: str, data: memoryview) -> None:
    """Writes a new file, to the disk."""
    fd = create(path)
    try:
        write(fd, data)
    except BaseException:
        close(fd)
        raise
    finish(fd)


def close(fd: int) -> None:
    """Gives up a file that has failed already."""
    with contextlib.suppress(OSError):  # the error that came first says more
        os.close(fd)


def sync_folder(path: str) -> None:
    """Returns once the names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        close(fd)


def rename(old: str, new: str) -> None:
    os.rename(old, new)


def names(path: str) -> list[str]:
    return os.listdir(path)


def remove_file(path: str) -> None:
    os.unlink(path)


def remove(path: str) -> None:
    """Removes a folder of files, or as much of it as there is; in order: a manifest goes before what it speaks of."""
    with contextlib.suppress(FileNotFoundError):  # another process removes it too
        for name in sorted(os.listdir(path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)
