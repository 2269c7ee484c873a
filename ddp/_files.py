"""Opens files at paths that users give.

`atomic_write` writes a new file in the folder of the old one, and then lets it take the old one's place. A device such
as /dev/null, a pipe or a terminal must not be replaced, and is written to directly. `open_regular` opens nothing but
regular files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import IO

Path = str | os.PathLike[str]

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file, and returns the descriptor. Refuses pipes, which may block, and devices, which may not end.

    flags: those of `os.open`; with O_NOFOLLOW, a symbolic link is refused as well
    Raises: OSError; if the file is not a regular one, the error has neither an errno nor the path.
    """
    try:
        mode = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    else:
        if not stat.S_ISREG(mode):
            raise OSError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, expected a regular file")
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def open_stream(path: Path) -> int | None:
    """A descriptor for writing to the device, pipe or terminal at `path`; None for a regular file or a missing one.

    Raises: OSError, naming `path`, for a folder, a pipe that no process reads, or a path that cannot be written to.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory, expected the path of a file", os.fspath(path))
    try:
        # Without O_NONBLOCK, opening a named pipe waits until another process reads it.
        number = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(mode):
            raise OSError(errno.ENXIO, "No process reads this pipe", os.fspath(path)) from None
        raise
    os.set_blocking(number, True)
    return number


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Opens a binary file that replaces the file at `path` when the `with` block ends without an error.

    Behind a symbolic link, the file is replaced and the link stays. The new file gets the permissions of the old one. A
    device, pipe or terminal is written to directly.

    Raises: OSError that names `path`, from `open_stream`, or if no new file can be made in the folder; OSError if
    writing fails.
    """
    stream = open_stream(path)
    if stream is not None:
        with open(stream, "wb") as file:
            yield file
        return
    if not os.fspath(path):  # its real path would be the current folder
        raise FileNotFoundError(errno.ENOENT, "Expected the path of a file", "")
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")
    try:
        new = open(temporary, "xb")  # noqa: SIM115  # closed below
    except OSError as error:
        reason = f"{error.strerror} for a new file in {folder}, in which this one is written first"
        raise OSError(error.errno, reason, os.fspath(path)) from None
    try:
        with new as file:
            with contextlib.suppress(OSError):  # there is no file yet, or the file system has no permissions
                os.fchmod(file.fileno(), os.stat(target).st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error says more
            os.unlink(temporary)
        raise
    # The new name is on disk only after the folder was synced.
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
