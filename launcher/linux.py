"""What the launcher needs of Linux: /proc, process trees, parent-death signals, file limits, shared-memory files.

No other module of the launcher reads /proc/PID/stat. This module also removes the files that a killed MPI leaves in
/dev/shm. Their names do not tell which job they belong to. So a file is removed only if the kernel grants a write
lease on it, which means that no process uses the file.
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

#: Signals that end a job.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals whose meaning the user's program defines.
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
#: Signals that are forwarded to the ranks: by the launcher, the engine, agent supervisors and agents.
FORWARDED_SIGNALS = (*ENDING_SIGNALS, *USER_SIGNALS)

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

# Loaded before any fork: a child should do as little as possible between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True)


# Not `typing.NamedTuple`: importing `typing` would cost every agent 0.3 to 0.5 MB.
class Stat(namedtuple("Stat", ("name", "state", "parent", "cpu", "waited", "rss"))):
    """What /proc/PID/stat says of a process.

    name: of its command
    state: a letter such as R, S, D, T or Z; "" if there is no such process, or the system hides it (hidepid)
    parent: pid
    cpu: CPU time (s); waited: CPU time of its children that have ended and were waited for (s)
    rss: resident memory (bytes)
    """

    __slots__ = ()
    name: str
    state: str
    parent: int
    cpu: float
    waited: float
    rss: int


def parse_stat(data: bytes, ticks: int = _TICKS, page: int = _PAGE) -> Stat:
    """Parses the content of /proc/PID/stat. ticks: clock ticks per second; page: bytes of a memory page

    >>> parse_stat(b"7 (a) b) t 1 7 7 0 -1 4194304 9 0 0 0 150 50 20 0 20 0 3 0 99 4096 25", 100, 4096)
    Stat(name='a) b', state='T', parent=1, cpu=2.0, waited=0.2, rss=102400)
    """
    head, _, rest = data.rpartition(b")")
    fields = rest.split()
    if not fields:
        return Stat("", "", 0, 0.0, 0.0, 0)
    user, system, user_waited, system_waited = map(int, fields[11:15])
    # upper(): "t" is a process that a debugger has stopped, which makes no difference here.
    return Stat(
        name=head.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode().upper(),
        parent=int(fields[1]),
        cpu=(user + system) / ticks,
        waited=(user_waited + system_waited) / ticks,
        rss=int(fields[21]) * page,
    )


def stat_of(pid: int) -> Stat:
    """What /proc says of process `pid` at this moment."""
    return parse_stat(read(f"/proc/{pid}/stat"))


def read(path: str) -> bytes:
    """Reads a file in /proc or /sys; b"" if it does not exist, may not be read, or its process has just ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def read_text(path: str) -> str:
    """Reads a file as `read` does, and returns text."""
    return read(path).decode(errors="replace")


def list_folder(path: str) -> list[str]:
    """The names in a folder; [] if it does not exist, or may not be read."""
    try:
        return os.listdir(path)
    except OSError:
        return []


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
    """Forks. start: the function that forks. Raises: StartError if a limit on processes or memory forbids it."""
    try:
        return start()
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        raise StartError(
            f"{os.uname().nodename} lets this user start no more processes ({error.strerror}; see ulimit -u)"
        ) from None


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process signal `number` when its parent ends. If the parent has ended, sends it now.

    parent: the parent's pid
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def become_subreaper() -> None:
    """Makes this process the new parent of its orphaned descendants, in place of init, so that it can kill them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_pipe(numbers: Iterable[int]) -> int:
    """A file descriptor on which each of these signals arrives as a byte. They have no other effect."""
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    return read_end


def format_bytes(n: int) -> str:
    """A number of bytes with the largest fitting unit.

    >>> [format_bytes(n) for n in (16, 3 << 10, 5 << 20, 3 << 29)]
    ['16 B', '3 KiB', '5 MiB', '1.5 GiB']
    """
    if n >= 1 << 30:
        return f"{n / (1 << 30):.1f} GiB"
    return next((f"{n >> shift} {unit}" for shift, unit in ((20, "MiB"), (10, "KiB")) if n >> shift), f"{n} B")


def fill_standard_streams() -> None:
    """Opens /dev/null in place of each standard stream that is closed. Otherwise the next pipe would get its number."""
    fd = 0
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number.
    os.close(fd)


def children_of(parents: dict[int, int], root: int) -> list[int]:
    """All descendants of process `root`. parents: the parent of every process

    >>> children_of({2: 1, 3: 2, 4: 1, 5: 9}, 1)
    [2, 4, 3]
    """
    pids = [root]
    for pid in pids:  # The list grows while it is walked.
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids[1:]


def parents() -> dict[int, int]:
    """The parent of every process that exists now."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := stat_of(int(name)).parent):
            table[int(name)] = parent
    return table


def is_above(pid: int) -> bool:
    """True if process `pid` is an ancestor of this process."""
    ancestor = os.getppid()
    while ancestor not in (0, pid):
        ancestor = stat_of(ancestor).parent
    return ancestor == pid


def sweep(
    limit: float,
    spare: frozenset[int] = frozenset(),
    started_at: float | None = None,
) -> dict[int, int]:
    """Kills and reaps all descendants of this process, which must be a subreaper, except those in `spare`.

    limit: seconds after which it gives up (a process in uninterruptible sleep does not die)
    spare: pids of descendants that are not killed, nor are their own descendants. This process's children are reaped
    once they have ended, even if they are in `spare`
    started_at: `time.time()` when the job began: the segment files that `remove_stale_segments` finds are removed at
    the end; None: no files are removed
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
            send_signal(pid, signal.SIGKILL)
        # Killed processes die within microseconds, and this process then becomes the parent of their children.
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    if started_at is not None:
        remove_stale_segments(started_at)
    return statuses


# Seconds after which `sweeping` gives up killing what is left.
_SWEEP_LIMIT = 1.0


@contextlib.contextmanager
def sweeping() -> Iterator[None]:
    """Inside `with`, this process adopts the orphans of a job. At the end it kills what is left, and ignores Ctrl-C.

    It also removes the segment files that the job has left. Spares the descendants that the process had at the
    beginning: the program that it ran before exec may have started some.
    """
    started_at = time.time()
    # A parent that ignores SIGCHLD passes that on, and then this process could not wait for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spare = frozenset() if childless() else frozenset(children_of(parents(), os.getpid()))
    become_subreaper()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The job is over, and this process ends in a moment.
        sweep(_SWEEP_LIMIT, spare, started_at)


def send_signal(pid: int, number: int) -> bool:
    """Sends a signal. Returns: False if there is no such process, or this user may not signal it"""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def childless() -> bool:
    """True if this process has no child, dead or alive. Far cheaper than listing them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def reap_all() -> dict[int, int]:
    """Reaps every child that has ended, without waiting for any. Returns: the wait status of each, by pid."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = status


#: The folder in which MPIs keep the memory that ranks of a machine share.
SHM = "/dev/shm"
# Prefixes of the names of segment files. Their MPI keeps each file open from its creation to its removal.
_SEGMENTS = (
    "mpich_shm_",
    "mpich_vci_",
    "sm_segment.",  # Open MPI 5
    "vader_segment.",  # Open MPI before 5
    "ucx_shm_posix_",
    "open_mpi.",  # Open MPI's locks
)
# A new file's ctime may be some milliseconds earlier than `time.time()`. This difference is allowed (s).
_LAG = 0.1


def remove_stale_segments(since: float, folder: str = SHM, *, dry_run: bool = False) -> tuple[int, int]:
    """Removes this user's segment files that were created or changed (ctime) after `since` and that no process uses.

    since: `time.time()` when the job began; dry_run: only counts them
    Returns: their number, and their bytes.
    """
    names = [name for name in list_folder(folder) if name.startswith(_SEGMENTS)]
    sizes = [_remove_if_unused(os.path.join(folder, name), since, dry_run) for name in names]
    removed = [nbytes for nbytes in sizes if nbytes is not None]
    return len(removed), sum(removed)


#: Bytes of /dev/shm that MPICH takes for each rank of a machine: 5.27 MiB were measured, and this is a little more.
SHM_PER_RANK = 5_560_000


def missing_shm(ranks: int) -> tuple[str, str] | None:
    """Why `ranks` ranks of MPICH would lack shared memory on this machine, and what helps; None if there is enough.

    MPICH reports no error: it dies by SIGSEGV or SIGBUS.
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
    """Removes a file of this user that no process uses, if it was created or changed (ctime) after `since`.

    dry_run: keeps the file. Returns: the bytes that this frees, or would free; None if the file is not one to remove
    """
    try:
        stat = os.lstat(path)
        if stat.st_uid != os.geteuid() or stat.st_ctime < since - _LAG:
            return None
        # O_NONBLOCK: if the launcher of another job has a lease on the file, fail at once instead of waiting.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # It is gone, or another launcher has the lease.
    try:
        # If another process opens the file during the lease, the kernel sends a signal. The default, SIGIO, would kill
        # this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if not dry_run:
            os.unlink(path)  # A process that opens it now is made to wait until the lease ends.
        return stat.st_blocks * 512
    except OSError:
        return None  # It is in use, or this file system grants no leases.
    finally:
        os.close(fd)


# Number of files that a job needs in addition to the connections of its agents and the state memory: unauthenticated
# peers, pipes, a log file.
_OTHER_FILES = 32


@contextlib.contextmanager
def many_files(ranks: int) -> Iterator[int]:
    """Inside `with`, this process and its children may open as many files as the hard limit allows.

    Yields: the previous soft limit. Raises: UsageError if a job of `ranks` ranks needs more files.
    """
    soft_before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # The kernel refuses limits above fs.nr_open. Then nothing changes.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != resource.RLIM_INFINITY and ranks + _OTHER_FILES + len(os.listdir("/proc/self/fd")) > soft:
            raise UsageError(f"{ranks} ranks need more open files than this process may have: {soft} (ulimit -n)")
        yield soft_before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_before, hard))
