"""`--log-dir`: what each rank printed, in a file a rank, and what the launcher itself printed.

A disk that is full or has gone costs lines in these files, reported once, and never the job.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.console.console import Console, LineSplitter
from launcher.console.terminal import one_line
from launcher.diagnosis.failures import Failure, RankFailed
from launcher.diagnosis.observer import Observer
from launcher.errors import UsageError
from launcher.protocol import Message, to_bytes

#: The link to the last run's folder.
LATEST = "latest"


class Logs(Observer):
    """The log files of one run, in a folder of its own below `log_dir`: `2026-11-21_18-20-05_4711`, time and pid.

    `rank-0.log` and so on hold stdout and stderr in the order of arrival, in whole lines; of what was repainted only
    the last state. `launcher.log` is the launcher's.
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
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._failed = False
        console.witness = self._note
        self._note(one_line(shlex.join(command)))

    def attempt_started(self, number: int, n: int) -> None:
        self._finish()
        if number > 0:
            self.folder = self._run / f"attempt-{number}"
            try:
                self.folder.mkdir()
            except OSError as error:
                self._fail(error)

    def rank_started(self, rank: int, hello: Message) -> None:
        self._write(self._path(rank), b"")  # a rank that prints nothing has a file, too

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if text := self._splitters.setdefault((rank, stream), LineSplitter()).feed(data)[0]:
            self._write(self._path(rank), text)

    def failed(self, failure: Failure) -> None:
        # A traceback arrives in a message of its own, not in what the rank printed.
        if isinstance(failure, RankFailed) and failure.raised is not None:
            self._write(self._path(failure.rank), to_bytes(failure.raised.traceback))

    def rank_ended(self, rank: int, status: int) -> None:
        for key in [key for key in self._splitters if key[0] == rank]:
            if text := self._splitters.pop(key).close():
                self._write(self._path(rank), text)

    def job_ended(self, code: int, text: str) -> None:
        self._finish()
        self._note(one_line(f"exit code {code}: {text}" if text else f"exit code {code}"))

    def close(self) -> None:
        self._finish()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _finish(self) -> None:
        """No rank writes any more."""
        for rank in {rank for rank, _ in self._splitters}:
            self.rank_ended(rank, 0)

    def _note(self, text: str) -> None:
        """The launcher's own lines, with the time."""
        self._write(self._run / "launcher.log", to_bytes(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n"))

    def _write(self, path: Path, data: bytes) -> None:
        try:
            with open(path, "ab", buffering=0) as file:  # opened each time: a thousand ranks have as many files
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            reason = f"cannot be written ({error.strerror}): lines are missing there"
            self._console.say(f"the log files in {self.folder} {reason}")


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
