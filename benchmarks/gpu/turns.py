"""Implementations as processes: all compile at once; each warms up and is timed alone on the device."""

from __future__ import annotations

import contextlib
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
ROUND = 0.25  # s that one turn takes, about
PATIENCE = 60.0  # s that a turn may take
WARMING = 60.0  # s that imports, warm-up and the first losses may take, of each implementation


class Implementation:
    """One process of `benchmarks.gpu.worker`. phase: "compile" or "run"; said: its first line, once `ready`."""

    def __init__(self, task: str, name: str, device: str, phase: str = "run") -> None:
        self.task, self.name = task, name
        command = [sys.executable, "-m", "benchmarks.gpu.worker", task, name, device, phase]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: dict[str, Any] = {}
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._noise: list[str] = []
        self._ears = [threading.Thread(target=each, daemon=True) for each in (self._hear, self._overhear)]
        for each in self._ears:
            each.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _overhear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._noise = [*self._noise[-39:], line]

    def compiled(self, deadline: float) -> str | None:
        """Waits until it has compiled, in the phase "compile". Returns: what went wrong, or None."""
        trouble = self._answer(deadline)
        return None if self.process.poll() == 0 and not self.said else trouble

    def ready(self, deadline: float) -> str | None:
        """Has it warm up, and waits until it can be asked for steps. Returns: why it never will, or None."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and says why
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self._answer(deadline)

    def _answer(self, deadline: float) -> str | None:
        try:
            while True:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
                if line is None:
                    return f"ended with {self.process.wait()}: {''.join(self._noise)[-2000:]}"
                if line.startswith("{"):  # a library may print what it likes before
                    self.said = json.loads(line)
                    return self.said.get("traceback", self.said.get("error"))
        except queue.Empty:
            return "was not ready in time"

    def steps(self, count: int) -> float:
        """The seconds of one step, over `count`. Raises: RuntimeError if it does not answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=PATIENCE)
        except (OSError, queue.Empty):
            line = None
        if line is None:
            raise RuntimeError(f"{self.name} gave no answer: {''.join(self._noise)[-2000:]}")
        return float(line)

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for ear in self._ears:
            ear.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def compile_all(implementations: list[Implementation], deadline: float) -> dict[str, str]:
    """Waits until all have compiled, and ends them. Returns: of those that could not, why: they will try once more."""
    try:
        found = {f"{each.task} {each.name}": each.compiled(deadline) for each in implementations}
    finally:
        for each in implementations:
            each.close()
    return {name: trouble for name, trouble in found.items() if trouble is not None}


def take_turns(
    implementations: list[Implementation], rounds: int, deadline: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times of all implementations, in fewer rounds where time runs out.

    Returns: of each implementation the seconds of a step, one number a round; and of those that gave up meanwhile, why
    """
    repeats: dict[str, int] = {}
    times: dict[str, list[float]] = {each.name: [] for each in implementations}
    out: dict[str, str] = {}
    for number in range(rounds):
        if number >= 3 and time.monotonic() > deadline:
            break
        for each in implementations:
            if each.name in out:
                continue
            try:
                if each.name not in repeats:
                    repeats[each.name] = max(1, int(ROUND / max(each.steps(3), 1e-6)))
                times[each.name].append(each.steps(repeats[each.name]))
            except RuntimeError as error:
                out[each.name] = str(error)
                del times[each.name]
    return times, out


def median_ms(times: list[float]) -> float:
    """In milliseconds."""
    return 1000 * statistics.median(times)
