"""The figures of a running job: computed from the ranks' heartbeats, shown by `ddp-top`, served by `--metrics-port`.

ddp-launch writes them to a memory file that it keeps open, and ddp-top reads that as /proc/PID/fd/N. So nothing is left
behind, readers disturb nothing, and the figures can be read while ddp-launch is stopped. Every update is a new file, so
that no reader sees half of one.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import deque
from contextlib import suppress
from glob import glob
from typing import Any

from launcher.diagnosis.observer import Observer
from launcher.job import Job
from launcher.protocol import Message

# Name of the memory file.
_NAME = "ddp-status"
# Interval of updates (s).
_INTERVAL = 1.0
# Rates are computed over this many of the last heartbeats whose step had changed. Heartbeats come once a second, so
# this is the last 10 s, or the last 10 steps if a step takes longer than a second.
_STEPS = 10
# The counters of a heartbeat whose rates `ddp-top` shows.
_TOTALS = ("step", "samples", "reduced_bytes", "exposed", "waited")
# The slowest rank is one for which the others wait during at least this fraction of the time.
_MIN_WAITED = 0.01
# The slowest rank causes at least this fraction of all waiting. Two equal ranks cause half each: neither is slowest.
_MIN_FRACTION = 0.75


class Status(Observer):
    """Collects the figures of one job; other threads may read them.

    ranks: in rank order, the figures of each rank that has started. They are the first message of its agent, its last
        heartbeat, `restarts` of the job so far, the rates `step/s`, `samples/s` and so on, and `slowest` (1 if the
        others wait for it, else 0). Of a rank that has ended there are only `rank`, `where` and `slowest`
    """

    def __init__(self, job: Job) -> None:
        self.ranks: list[dict[str, Any]] = []
        self._target = shlex.join(job.target)
        self._fd = os.memfd_create(_NAME)
        self._next_update = 0.0

    def attempt_started(self, number: int, n: int) -> None:
        self._restarts = number
        self._figures: dict[int, Any] = {}
        self._steps: dict[int, Any] = {}  # By rank: (time, heartbeat) of the last heartbeats whose step had changed.

    def rank_started(self, rank: int, hello: Message) -> None:
        self._figures[rank] = {**hello, "restarts": self._restarts}
        self._steps[rank] = deque(maxlen=_STEPS + 1)

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        self._figures[rank] |= beat
        steps = self._steps[rank]
        if beat["step"] is None:
            return
        if not steps or steps[-1][1]["step"] != beat["step"]:
            steps.append((now, beat))
        first_time, first = steps[0]
        if seconds := now - first_time:
            self._figures[rank] |= {f"{name}/s": max(0, beat[name] - first[name]) / seconds for name in _TOTALS}

    def rank_ended(self, rank: int, status: int) -> None:
        self._figures[rank] = {"rank": rank, "where": f"ended with {status}"}

    def tick(self, now: float) -> float:
        if now >= self._next_update:
            self._next_update = now + _INTERVAL
            self.ranks = [figures for _, figures in sorted(self._figures.items())]
            total = sum(figures.get("waited/s", 0) for figures in self.ranks)
            for figures in self.ranks:
                figures["slowest"] = int(figures.get("waited/s", 0) >= max(_MIN_WAITED, _MIN_FRACTION * total))
            status = {"pid": os.getpid(), "target": self._target, "ranks": self.ranks}
            with suppress(OSError):  # Without a free file descriptor or memory, the last figures stay.
                fd = os.memfd_create(_NAME)
                os.write(fd, json.dumps(status).encode())
                os.dup2(fd, self._fd, inheritable=False)
                os.close(fd)
        return self._next_update

    def close(self) -> None:
        os.close(self._fd)


def running_jobs(pid: object = "[0-9]*") -> list[dict[str, Any]]:
    """`pid`, `target` and `ranks` of every running ddp-launch that this user may inspect.

    pid: return only the ddp-launch with this pid
    """
    jobs = {}
    for path in glob(f"/proc/{pid}/fd/*"):
        with suppress(OSError, ValueError):  # The file has been closed, or nothing has been written yet.
            if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                with open(path) as file:
                    status = json.load(file)
                # Otherwise this is the old file that a child process of ddp-launch has inherited.
                if path.startswith(f"/proc/{status['pid']}/"):
                    jobs[status["pid"]] = status
    return [*jobs.values()]
