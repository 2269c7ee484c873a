"""Implementations as processes: all compile at once; each warms up and is timed alone on the device."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from benchmarks.worker_pool import WorkerError, WorkerPool

ROUND = 0.25  # s that one turn takes, about
PATIENCE = 60.0  # s that a turn may take
WARMING = 60.0  # s that imports, warm-up and the first losses may take, of each implementation


class Implementation:
    """One process of `benchmarks.gpu.worker`. found: its first losses and peak memory, once `ready`"""

    def __init__(self, task: str, name: str, device: str) -> None:
        self.task, self.name = task, name
        self.found: dict[str, Any] = {}
        command = [sys.executable, "-m", "benchmarks.gpu.worker"]
        commands = lambda path: [[*command, path, task, name, device]]  # noqa: E731
        self._pool = WorkerPool(commands, name=f"{task} {name}", patience=0.1)  # it may be in the middle of a step

    def start_compiling(self) -> None:
        """Requests it, without waiting."""
        self._pool.send("compile")

    def compiled(self, deadline: float) -> None:
        """Waits until it has compiled. Raises: WorkerError"""
        self._pool.receive(max(deadline - time.monotonic(), 0.01))

    def ready(self, deadline: float) -> None:
        """Has it warm up, and waits until steps can be requested. Raises: WorkerError"""
        self._pool.send("warm_up")
        (self.found,) = self._pool.receive(max(deadline - time.monotonic(), 0.01))

    def steps(self, count: int) -> float:
        """The seconds of one step, over `count`. Raises: WorkerError"""
        self._pool.send("steps", count=count)
        return float(self._pool.receive(PATIENCE)[0])

    def close(self) -> None:
        """Ends the process."""
        self._pool.close()


def compile_all(implementations: list[Implementation], deadline: float) -> dict[str, str]:
    """Has all compile at the same time, and ends them. Returns: why some could not; they will try once more."""
    failed = {}
    for each in implementations:
        each.start_compiling()
    for each in implementations:
        try:
            each.compiled(deadline)
        except WorkerError as error:
            failed[f"{each.task} {each.name}"] = str(error)
        finally:
            each.close()
    return failed


def take_turns(
    implementations: list[Implementation], rounds: int, deadline: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times of all implementations, in fewer rounds where time runs out.

    Returns: of each implementation the seconds of a step, one number a round; and of those that failed, why
    """
    repeats: dict[str, int] = {}
    times: dict[str, list[float]] = {each.name: [] for each in implementations}
    failed: dict[str, str] = {}
    for number in range(rounds):
        if number >= 3 and time.monotonic() > deadline:
            break
        for each in [each for each in implementations if each.name not in failed]:
            try:
                if each.name not in repeats:
                    repeats[each.name] = max(1, int(ROUND / max(each.steps(3), 1e-6)))
                times[each.name].append(each.steps(repeats[each.name]))
            except WorkerError as error:
                failed[each.name] = str(error)
                del times[each.name]
    return times, failed


def median_ms(times: list[float]) -> float:
    """In milliseconds."""
    return 1000 * statistics.median(times)
