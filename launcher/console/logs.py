"""`--log-dir`: what each rank printed, in a file a rank, and what the launcher itself said.

A disk that is full or has gone costs lines in these files, reported once, and never the job.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.console.console import Console, Lines, LineSplitter
from launcher.diagnosis.failures import Failure, RankFailed
from launcher.diagnosis.observer import Observer
from launcher.errors import UsageError
from launcher.protocol import Message, to_bytes

#: The link to the last run's folder.
LATEST = "latest"
# Files that are held open at a time; ranks beyond open theirs again whenever they speak.
_OPEN = 256
# How often we look whether the files are still there (s).
_LOOK = 5.0


class Logs(Observer):
    """The log files of one run, in a folder of its own below `log_dir`: `2026-11-21_18-20-05_4711`, time and pid.

    `rank-0.log` and so on hold stdout and stderr in the order of arrival, in whole lines; of what was repainted only
    the last state. `rank-0.nccl.log` is what NCCL says where `NCCL_DEBUG` asks it to. `launcher.log` is the launcher's.
    A restart's files lie in `attempt-1` and so on below.

    folder: where this attempt's files are
    command: as it was typed
    Raises: UsageError if the folder cannot be made, or not be written to.
    """

    def __init__(self, log_dir: str, console: Console, command: Sequence[str]) -> None:
        self._console = console
        try:
            self._run = _make_run(Path(log_dir))
            _link(Path(log_dir) / LATEST, self._run.name)
        except OSError as error:
            where = error.filename2 or error.filename
            raise UsageError(f"the log folder {log_dir} cannot be used: {error.strerror}: {where}") from None
        self.folder = self._run
        self._ranks: dict[int, _RankLog] = {}
        self._open: dict[_File, None] = {}  # the one that was written to last comes last
        self._own = _File(self._run / "launcher.log")
        self._told = self._gone = False
        self._look = 0.0
        console.witness = self._hear
        self._hear(shlex.join(command))

    def attempt_started(self, number: int, n: int) -> None:
        self._finish()
        if number > 0:
            self.folder = self._run / f"attempt-{number}"
            try:
                self.folder.mkdir()
            except OSError as error:
                self._fail(error)

    def rank_started(self, rank: int, hello: Message) -> None:
        self._write(self._rank(rank).file, b"")  # a rank that never says anything has a file, too

    def output(self, rank: int, stream: str, data: bytes) -> None:
        log = self._rank(rank)
        for piece in log.streams[stream].feed(data):
            if isinstance(piece, Lines):
                self._write(log.file, piece.text)

    def library_log(self, rank: int, name: str, data: bytes) -> None:
        file = self._rank(rank).notes.setdefault(name, _File(self.folder / f"rank-{rank}.{name}.log"))
        self._write(file, data)

    def failed(self, failure: Failure) -> None:
        if (
            isinstance(failure, RankFailed) and failure.raised is not None
        ):  # it came another way than what the rank printed
            self._write(self._rank(failure.rank).file, to_bytes(failure.raised.traceback))

    def rank_ended(self, rank: int, status: int) -> None:
        if rank in self._ranks:
            self._end(self._ranks.pop(rank))

    def tick(self, now: float) -> float:
        if self._gone:
            return float("inf")
        if now >= self._look:
            self._look = now + _LOOK
            if any(file.removed() for file in self._open):
                self._gone = True
                self._tell(f"the log files in {self.folder} were removed: nothing more is written there")
        return self._look

    def job_ended(self, code: int, text: str) -> None:
        self._finish()
        self._hear(f"exit code {code}{f': {text}' if text else ''}")

    def close(self) -> None:
        self._finish()
        for file in self._open:
            file.close()
        self._open.clear()

    def _rank(self, rank: int) -> _RankLog:
        if rank not in self._ranks:
            self._ranks[rank] = _RankLog(self.folder / f"rank-{rank}.log")
        return self._ranks[rank]

    def _finish(self) -> None:
        """Nothing more comes from any rank."""
        for log in self._ranks.values():
            self._end(log)
        self._ranks.clear()

    def _end(self, log: _RankLog) -> None:
        for splitter in log.streams.values():
            for piece in splitter.close():
                self._write(log.file, piece.text)
        for file in (log.file, *log.notes.values()):
            self._open.pop(file, None)
            file.close()

    def _hear(self, text: str) -> None:
        """What the launcher says, with the time."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n"
        self._write(self._own, to_bytes(line))

    def _write(self, file: _File, data: bytes) -> None:
        if self._gone:
            return
        self._open.pop(file, None)
        self._open[file] = None
        if len(self._open) > _OPEN:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.close()
        try:
            file.write(data)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._tell(f"the log files in {self.folder} cannot be written ({error.strerror}): lines are missing there")

    def _tell(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._console.say(f"ddp-launch: {text}")


class _File:
    """Appends to a file, and says in it what could not be appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._missing = 0  # bytes
        self._torn = False  # a write stopped in the middle of a line

    def write(self, data: bytes) -> None:
        """Raises: OSError; the next write says what is missing."""
        note = b""
        if self._missing:
            note = b"\n" * self._torn + b"[ddp-launch: %d bytes are missing here]\n" % self._missing
        left = memoryview(note + data)
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            while left:
                left = left[os.write(self._fd, left) :]
            self._missing = 0
        except OSError:
            done = (note + data)[: len(note) + len(data) - len(left)]
            self._missing = len(left) if len(done) >= len(note) else self._missing + len(data)
            self._torn = not done.endswith(b"\n") if done else self._torn
            raise

    def removed(self) -> bool:
        """True if it was deleted."""
        try:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0
        except OSError:
            return False  # a network disk that is away for a moment

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _RankLog:
    """A rank's file, and the lines that are on their way into it."""

    def __init__(self, path: Path) -> None:
        self.file = _File(path)
        self.streams = {"out": LineSplitter(), "err": LineSplitter()}
        self.notes: dict[str, _File] = {}


def _make_run(log_dir: Path) -> Path:
    """A new folder for this run. Raises: OSError"""
    log_dir.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    for more in ("", *(f"-{number}" for number in range(2, 100))):  # several from one process, or pids of containers
        folder = log_dir / (name + more)
        try:
            folder.mkdir()
        except FileExistsError:  # the next name
            continue
        return folder
    raise FileExistsError(errno.EEXIST, "there is a run of that name", str(log_dir / name))


def _link(link: Path, target: str) -> None:
    """Makes `link` point to `target`, at once: a reader finds the old run or the new one. Raises: OSError"""
    if link.exists() and not link.is_symlink():
        raise FileExistsError(errno.EEXIST, "it is no link to a run, but a file or a folder", str(link))
    new = link.with_name(f".{LATEST}-{target}")
    new.symlink_to(target)
    os.replace(new, link)
