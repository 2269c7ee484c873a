"""`--events`: appends the events of a job to a file that programs can read: one JSON object per line.

Every event has `time` (ISO 8601, UTC), `monotonic` (seconds of this machine's clock, for differences), `event` and
`attempt`. docs/launcher.md lists the other keys of each event.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Sequence

from launcher.console.console import Console
from launcher.diagnosis.failures import AgentLost, Failure, HeartbeatLost, Hung, RankFailed, Stop
from launcher.diagnosis.observer import Observer
from launcher.errors import UsageError
from launcher.job import Job
from launcher.linux import working_folder
from launcher.protocol import Message


def kind_of(failure: type[Failure]) -> str:
    """The name of a failure's type in events: `rank failed` for RankFailed."""
    return re.sub(r"\B(?=[A-Z])", " ", failure.__name__).lower()


class Events(Observer):
    """Appends the events of one job to its file.

    command: the launcher's `sys.argv`
    Raises: UsageError if the file cannot be written to.
    """

    def __init__(self, job: Job, console: Console, command: Sequence[str]) -> None:
        assert job.events is not None
        self._path = job.events
        self._console = console
        # O_NONBLOCK: a named pipe must not block the launcher. The pipe needs a reader now, which must keep up.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(self._path, flags, 0o644)
        except OSError as error:
            reason = "the pipe has no reader" if error.errno == errno.ENXIO else error.strerror
            raise UsageError(f"the events file {self._path} cannot be written to: {reason}") from None
        self._broken = False
        self._attempt = 0
        self._started_at = time.monotonic()
        self._emit(
            "job_started",
            command=list(command),
            target=list(job.target),
            n=job.size,
            engine=job.engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            cwd=working_folder(),
        )

    def attempt_started(self, number: int, n: int) -> None:
        self._attempt = number
        if number > 0:
            self._emit("restart", n=n)
        self._emit("attempt_started", n=n)

    def rank_started(self, rank: int, hello: Message) -> None:
        fields = {key: hello[key] for key in ("host", "pid", "local_rank", "gpus") if key in hello}
        self._emit("rank_up", rank=rank, **fields)

    def rank_ended(self, rank: int, status: int) -> None:
        self._emit(
            "rank_ended",
            rank=rank,
            code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
        )

    def failed(self, failure: Failure) -> None:
        if isinstance(failure, Hung):
            self._emit("hang", ranks=list(failure.ranks), message=str(failure))
            return
        fields: Message = {"kind": kind_of(type(failure)), "code": failure.code, "message": str(failure)}
        if isinstance(failure, RankFailed | AgentLost):
            fields["rank"] = failure.rank
        if isinstance(failure, HeartbeatLost):
            fields["ranks"] = list(failure.ranks)
            fields["hosts"] = list(failure.hosts)
        if isinstance(failure, RankFailed) and failure.raised is not None:
            fields["exception"] = failure.raised.type
            fields["traceback"] = failure.raised.traceback
        self._emit("failure", **fields)

    def stopped(self, stop: Stop) -> None:
        self._emit("stopped", step=stop.step, late=list(stop.late))

    def debugging(self, ranks: frozenset[int]) -> None:
        self._emit("debugging", ranks=sorted(ranks))

    def resumed(self, seconds: float) -> None:
        self._emit("continued", stopped_for=round(seconds, 3))

    def job_ended(self, code: int, text: str) -> None:
        self._emit("job_ended", code=code, message=text, seconds=round(time.monotonic() - self._started_at, 3))

    def close(self) -> None:
        os.close(self._fd)

    def _emit(self, event: str, **fields: object) -> None:
        if self._broken:
            return
        now = time.time()
        head = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}Z",
            "monotonic": round(time.monotonic(), 6),
            "event": event,
            "attempt": self._attempt,
        }
        line = json.dumps(head | fields, separators=(",", ":")).encode() + b"\n"
        try:
            # A single write, so that the lines of several jobs that share the file do not mix.
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._broken = True
            self._console.say(f"the events file {self._path} cannot be written ({error.strerror}): it ends here")
