"""What the launcher needs of Linux: /proc, process trees, parent-death signals, file limits, shared-memory files.

The only reader of /proc/PID/stat. Segment files that a killed MPI leaves in /dev/shm are removed here, too: their names
do not tell whose they are, but the kernel grants a write lease only on a file that no process has open or mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator

from launcher.errors import StartError, UsageError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CHUNK = 1 << 16

# Loaded before any fork: a child between fork and exec should do as little as it can.
_libc = ctypes.CDLL(None, use_errno=True)


# Not of `typing`, whose import would cost every agent a tenth of its memory.
class Stat(namedtuple("Stat", ("name", "state", "parent", "cpu", "waited", "rss"))):
    """What /proc/PID/stat says of a process.

    name: of its command; state: a letter, R, S, D, T or Z, "" if there is no such process, or it is hidden (hidepid)
    parent: pid; cpu: CPU time in s; waited: that of the children that it has waited for; rss: resident memory in bytes
    """

    __slots__ = ()
    name: str
    state: str
    parent: int
    cpu: float
    waited: float
    rss: int


def parse_stat(data: bytes, ticks: int = _TICKS, page: int = _PAGE) -> Stat:
    """What the kernel writes there.

    >>> parse_stat(b"7 (a) b) t 1 7 7 0 -1 4194304 9 0 0 0 150 50 20 0 20 0 3 0 99 4096 25", 100, 4096)
    Stat(name='a) b', state='T', parent=1, cpu=2.0, waited=0.2, rss=102400)
    """
    head, _, rest = data.rpartition(b")")
    fields = rest.split()
    if not fields:
        return Stat("", "", 0, 0.0, 0.0, 0)
    user, system, user_waited, system_waited = map(int, fields[11:15])
    # A process that a debugger has stopped is "t": no other than "T" to who wonders why it does not move.
    return Stat(
        name=head.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode().upper(),
        parent=int(fields[1]),
        cpu=(user + system) / ticks,
        waited=(user_waited + system_waited) / ticks,
        rss=int(fields[21]) * page,
    )


def stat_of(pid: int) -> Stat:
    """The same of a process that lives now."""
    return parse_stat(read(f"/proc/{pid}/stat"))


def read(path: str) -> bytes:
    """A file of the kernel's; b"" if it is not there, may not be read, or is of a process that has just ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while part := os.read(fd, _CHUNK):  # the kernel gives a page at a time
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(fd)
    except OSError:
        return b""


def read_text(path: str) -> str:
    """The same as text."""
    return read(path).decode(errors="replace")


def working_folder() -> str:
    """The current working folder, "" if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def fork(start: Callable[[], int] = os.fork) -> int:
    """As `os.fork`, or another function that starts a process. Raises: StartError if there may be no more."""
    try:
        return start()
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        why = f"{os.strerror(error.errno)}; see ulimit -u"
        raise StartError(f"{os.uname().nodename} lets this user start no more processes ({why})") from None


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """This process gets signal `number` when its parent, of pid `parent`, ends; at once if that has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def become_subreaper() -> None:
    """Orphans below this process come to it instead of to init, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_pipe(numbers: Iterable[int]) -> int:
    """A file descriptor on which each of these signals arrives as a byte; the process does nothing else at them."""
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    return read_end


def format_bytes(n: int) -> str:
    """Bytes in a unit that suits them.

    >>> [format_bytes(n) for n in (16, 3 << 10, 5 << 20, 3 << 29)]
    ['16 B', '3 KiB', '5 MiB', '1.5 GiB']
    """
    if n >= 1 << 30:
        return f"{n / (1 << 30):.1f} GiB"
    return next((f"{n >> shift} {unit}" for shift, unit in ((20, "MiB"), (10, "KiB")) if n >> shift), f"{n} B")


def fill_standard_streams() -> None:
    """Opens /dev/null where stdin, stdout or stderr is closed: the next pipe would take its place, and be written."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is fd


def children_of(parents: dict[int, int], root: int) -> list[int]:
    """All descendants of `root`, given every process's parent.

    >>> children_of({2: 1, 3: 2, 4: 1, 5: 9}, 1)
    [2, 4, 3]
    """
    found = [pid for pid, parent in parents.items() if parent == root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def parents() -> dict[int, int]:
    """The parent of every process that lives now."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := stat_of(int(name)).parent):
            table[int(name)] = parent
    return table


def is_above(pid: int) -> bool:
    """True if that process is this one's parent, or the parent's parent, and so on."""
    each = os.getppid()
    while each not in (0, pid):
        each = stat_of(each).parent
    return each == pid


def sweep(
    limit: float,
    spare: frozenset[int] = frozenset(),
    started_at: float | None = None,
) -> dict[int, int]:
    """Kills and reaps every descendant of this process, a subreaper, except the trees of its children in `spare`.

    limit: seconds after which it gives up (a process in uninterruptible sleep does not die)
    started_at: `time.time()` when the job began: removes the segment files that it has left, too; None: does not
    Returns: the wait status of each reaped child, by pid.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + limit
    pause = 0.0005
    while True:
        statuses.update(reap_all())
        if childless() or time.monotonic() > deadline:
            break
        table = parents()
        for pid in spare:
            table.pop(pid, None)
        pids = children_of(table, os.getpid())
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # It has ended, or runs as another user: then it cannot be killed from here.
        # Killed processes die within microseconds, and this process then becomes the parent of their children.
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    if started_at is not None:
        remove_stale_segments(started_at)
    return statuses


def childless() -> bool:
    """True if this process has no child, dead or alive; far cheaper than asking who they are."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def reap_all() -> dict[int, int]:
    """The wait status of every child that has ended, without waiting for any."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


#: Where MPIs keep what ranks of a machine share.
SHM = "/dev/shm"
# MPICH's, Open MPI's since 5 and before, UCX's, Open MPI's for locks. All hold such a file from its making to its end.
_SEGMENTS = ("mpich_shm_", "mpich_vci_", "sm_segment.", "vader_segment.", "ucx_shm_posix_", "open_mpi.")
# s; the clock of files lags behind by some milliseconds
_LAG = 0.1


def remove_stale_segments(since: float, folder: str = SHM, *, dry_run: bool = False) -> tuple[int, int]:
    """Removes this user's segment files that were made later than `since` and that no process uses.

    since: `time.time()` when the job began; dry_run: they are only counted
    Returns: how many, and the bytes that they take.
    """
    try:
        names = [name for name in os.listdir(folder) if name.startswith(_SEGMENTS)]
    except OSError:
        return 0, 0
    sizes = [_remove_if_unused(os.path.join(folder, name), since, dry_run) for name in names]
    found = [nbytes for nbytes in sizes if nbytes is not None]
    return len(found), sum(found)


#: Bytes of /dev/shm that MPICH takes for each rank of a machine, as measured (5.27 MiB), and a little more.
SHM_PER_RANK = 5_560_000


def missing_shm(ranks: int) -> tuple[str, str] | None:
    """Why MPICH, starting so many ranks on this machine, would not get the shared memory that it needs, and what helps.

    MPICH itself does not say it: it dies by SIGSEGV or SIGBUS.
    """
    needed = ranks * SHM_PER_RANK
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    need = f"MPICH needs {format_bytes(needed)} of shared memory for {ranks} ranks on this machine, and"
    if not os.access(SHM, os.W_OK):
        return f"{need} {SHM} is missing, read-only or not this user's", f"mount -t tmpfs -o mode=1777 tmpfs {SHM}"
    shm = os.statvfs(SHM)
    free = shm.f_bavail * shm.f_frsize
    if free < needed:
        larger = f"mount -o remount,size=1g {SHM}  # in a container: docker run --shm-size=1g"
        return f"{need} {SHM} has {format_bytes(free)} free, enough for {free // SHM_PER_RANK}", larger
    if 0 <= largest < needed:  # -1: unlimited
        return f"{need} no file may be larger than {format_bytes(largest)}", "ulimit -f unlimited"
    return None


def _remove_if_unused(path: str, since: float, dry_run: bool) -> int | None:
    """The bytes that a file takes, if it was unused and is removed."""
    try:
        found = os.lstat(path)
        if found.st_uid != os.geteuid() or found.st_ctime < since - _LAG:
            return None
        # O_NONBLOCK: the launcher of another job may have a lease on it in this moment.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # gone already, or in such hands
    try:
        # If another process opens the file meanwhile, the kernel sends a signal: SIGIO would end this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if not dry_run:
            os.unlink(path)  # under the lease: a process that opens it now waits for us
        return found.st_blocks * 512
    except OSError:
        return None  # in use; or this file system grants no leases, and the file stays
    finally:
        os.close(fd)


# What a job needs besides the connections of its agents: unauthenticated peers, pipes, log files.
_OTHERS = 32


@contextlib.contextmanager
def many_files(ranks: int) -> Iterator[int]:
    """While entered, this process and its children may open as many files as the hard limit says; the limit of before.

    Raises: UsageError if a job of so many ranks needs more.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # no limit at all is more than the kernel grants: the soft one stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != resource.RLIM_INFINITY and ranks + _OTHERS + len(os.listdir("/proc/self/fd")) > soft:
            raise UsageError(f"{ranks} ranks need more open files than this process may have: {soft} (ulimit -n)")
        yield before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
