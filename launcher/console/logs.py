"""`--log-dir`: one file with the output of each rank, and one with that of the launcher.

If the disk is full or missing, lines are missing in these files. This is reported once, and does not end the job.
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

#: Name of the link to the folder of the last run.
LATEST = "latest"


class Logs(Observer):
    """Writes the log files of one run to a new folder in `log_dir`, like `2026-11-21_18-20-05_4711` (time and pid).

    `rank-0.log` and so on hold stdout and stderr in the order of arrival, in whole lines, and the traceback of an
    uncaught exception. Of a line that was repainted they hold only the last state. `launcher.log` holds the launcher's
    own lines, of all attempts. The ranks' files of the first restart are in the subfolder `attempt-1`, and so on.

    command: the launcher's `sys.argv`
    folder: the folder of this attempt's files
    Raises: UsageError if the folder cannot be created, or `latest` in `log_dir` cannot be replaced.
    """

    def __init__(self, log_dir: str, console: Console, command: Sequence[str]) -> None:
        self._console = console
        try:
            self._run_folder = _create_run_folder(Path(log_dir))
            _replace_link(Path(log_dir) / LATEST, self._run_folder.name)
        except OSError as error:
            path = error.filename2 or error.filename
            raise UsageError(f"the log folder {log_dir} cannot be used: {error.strerror}: {path}") from None
        self.folder = self._run_folder
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._failed = False
        console.reporter = self._write_launcher_line
        self._write_launcher_line(one_line(shlex.join(command)))

    def attempt_started(self, number: int, n: int) -> None:
        self.close()
        if number > 0:
            self.folder = self._run_folder / f"attempt-{number}"
            try:
                self.folder.mkdir()
            except OSError as error:
                self._fail(error)

    def rank_started(self, rank: int, hello: Message) -> None:
        self._write(self._path(rank), b"")  # Creates the file even if the rank prints nothing.

    def output(self, rank: int, stream: str, data: bytes) -> None:
        lines, _ = self._splitters.setdefault((rank, stream), LineSplitter()).feed(data)
        if lines:
            self._write(self._path(rank), lines)

    def failed(self, failure: Failure) -> None:
        # A traceback is reported in a separate message, and is not part of the rank's output.
        if isinstance(failure, RankFailed) and failure.raised is not None:
            self._write(self._path(failure.rank), to_bytes(failure.raised.traceback))

    def rank_ended(self, rank: int, status: int) -> None:
        for key in [key for key in self._splitters if key[0] == rank]:
            if text := self._splitters.pop(key).close():
                self._write(self._path(rank), text)

    def job_ended(self, code: int, text: str) -> None:
        self.close()
        self._write_launcher_line(one_line(f"exit code {code}: {text}" if text else f"exit code {code}"))

    def close(self) -> None:
        for rank in {rank for rank, _ in self._splitters}:
            self.rank_ended(rank, 0)

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _write_launcher_line(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n"
        self._write(self._run_folder / "launcher.log", to_bytes(line))

    def _write(self, path: Path, data: bytes) -> None:
        try:
            # Not kept open: a thousand ranks would need a thousand open files.
            with open(path, "ab", buffering=0) as file:
                remaining = memoryview(data)
                while remaining:
                    remaining = remaining[file.write(remaining) :]
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            reason = f"cannot be written ({error.strerror}): lines are missing there"
            self._console.say(f"the log files in {self.folder} {reason}")


def _create_run_folder(log_dir: Path) -> Path:
    """Creates a new folder for this run. Raises: OSError if it cannot be created."""
    log_dir.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    # A process may start several runs in a second, and processes in containers may have the same pid.
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = log_dir / (name + suffix)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(errno.EEXIST, "there is a run of that name", str(log_dir / name))


def _replace_link(link: Path, target: str) -> None:
    """Makes `link` point to `target` in one step: a reader finds the old run or the new one.

    Raises: OSError if `link` is a file or a folder, or cannot be replaced.
    """
    if link.exists() and not link.is_symlink():
        raise FileExistsError(errno.EEXIST, "it is no link to a run, but a file or a folder", str(link))
    new = link.with_name(f".{LATEST}-{target}")
    new.symlink_to(target)
    os.replace(new, link)
