"""The figures of a running job: made of the ranks' heartbeats, shown by `ddp-top` and served by `--metrics-port`.

ddp-top finds them as a file that ddp-launch has open and that has no name but /proc/PID/fd/N: nothing can be left
behind, a reader can disturb nothing, and they can be read while ddp-launch is stopped. Each time they are a new file,
so that no reader meets half of them.
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

_NAME = "ddp-status"
_EVERY = 1.0  # s
# Rates are taken over the last heartbeats, one a second, in which the step had changed: 10 s, or 10 slower steps.
_STEPS = 10
_SUMS = ("step", "samples", "reduced_bytes", "exposed", "waited")
# A rank that others wait for less of the time was not waited for; one of two is last in half of all steps by chance.
_NOTICED, _MOST_OF_IT = 0.01, 0.75


class Status(Observer):
    """Collects the figures of one job; other threads may read them.

    ranks: of each rank that has started, in order, the first message of its agent and its last heartbeat; `restarts` of
    the job so far; `step/s`, `samples/s` and so on; `slowest`: 1 if the others wait for it, else 0
    """

    def __init__(self, job: Job) -> None:
        self.ranks: list[dict[str, Any]] = []
        self._target = shlex.join(job.target)
        self._fd = os.memfd_create(_NAME)
        self._next = 0.0

    def attempt_started(self, number: int, n: int) -> None:
        self._restarts = number
        self._figures: dict[int, Any] = {}
        self._steps: dict[int, Any] = {}  # (time, heartbeat) of those in which the step had changed

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
        since, first = steps[0]
        if seconds := now - since:
            self._figures[rank] |= {f"{name}/s": max(0, beat[name] - first[name]) / seconds for name in _SUMS}

    def rank_ended(self, rank: int, status: int) -> None:
        self._figures[rank] = {"rank": rank, "where": f"ended with {status}"}

    def tick(self, now: float) -> float:
        if now >= self._next:
            self._next = now + _EVERY
            self.ranks = [figures for _, figures in sorted(self._figures.items())]
            total = sum(figures.get("waited/s", 0) for figures in self.ranks)
            for figures in self.ranks:
                figures["slowest"] = int(figures.get("waited/s", 0) >= max(_NOTICED, _MOST_OF_IT * total))
            status = {"pid": os.getpid(), "target": self._target, "ranks": self.ranks}
            with suppress(OSError):  # no file descriptor or memory is left: what was last known stays
                fd = os.memfd_create(_NAME)
                os.write(fd, json.dumps(status).encode())
                os.dup2(fd, self._fd, inheritable=False)
                os.close(fd)
        return self._next

    def close(self) -> None:
        os.close(self._fd)


def running_jobs(pid: object = "[0-9]*") -> list[dict[str, Any]]:
    """`pid` and `target` of each ddp-launch that may be read, and its `ranks`. pid: of one"""
    found = {}
    for path in glob(f"/proc/{pid}/fd/*"):
        with suppress(OSError, ValueError):  # closed meanwhile, or nothing is there yet
            if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                with open(path) as file:
                    status = json.load(file)
                # A child that ddp-launch forked still has the file of that time open: its status is old.
                if path.startswith(f"/proc/{status['pid']}/"):
                    found[status["pid"]] = status
    return [*found.values()]
