"""Where a process stands: asleep, computing, in a library, in our own code; and what the sampler must not do."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from collectives.flight.reader import FlightReader, Position
from tests.conftest import ROOT, Run, python_path


def _await_position(pid: int, function: str, after: int = 0) -> Position:
    """The first sample in `function` that was taken later than `after` (monotonic ns)."""
    deadline = time.monotonic() + 20
    with FlightReader.of(pid) as reader:
        while True:
            position = reader.record().position
            if position is not None and position.function == function and position.time > after:
                return position
            assert time.monotonic() < deadline, position
            time.sleep(0.01)


SLEEPS = "time.sleep(0.3)"
COMPUTES = "while time.monotonic() < end: sum(range(100))"
WAITS = "Event().wait(0.3)"


def test_a_process_that_sleeps_computes_or_waits_in_a_library(recorded: Any) -> None:
    pid = recorded(
        f"""
        from threading import Event
        def sleeps():
            {SLEEPS}
        def computes():
            end = time.monotonic() + 0.3
            {COMPUTES}
        def waits():
            {WAITS}
        start_sampler(recorder, period=0.05)
        ready()
        while True:
            sleeps()
            computes()
            waits()
        """
    ).process.pid
    positions = {
        line: _await_position(pid, function)
        for function, line in (("sleeps", SLEEPS), ("computes", COMPUTES), ("waits", WAITS))
    }
    for line, position in positions.items():
        assert os.path.basename(position.file) == "recorded.py"
        assert Path(position.file).read_text().splitlines()[position.line - 1].strip() == line
        within = (os.path.basename(position.within[0]), position.within[2]) if position.within else None
        assert within == (("threading.py", "wait") if line == WAITS else None)
    later = _await_position(pid, "sleeps", after=positions[SLEEPS].time)
    assert later.time - positions[SLEEPS].time > 0.04e9
    assert later.time <= time.monotonic_ns()


# Called on the main thread, it finds its own `_stack` innermost, one of ours.
INNERMOST = ("recorder.py", "_stack")
SHOW = """
import os
from collectives.flight.recorder import main_thread_position
def show():
    print([place and (os.path.basename(place[0]), place[2]) for place in main_thread_position()])
"""


MAIN = """
import runpy, lib, mine
mine.show()
def step():
    lib.show()
step()
runpy.run_path("LIBRARIES/lib_main.py")
"""


def test_which_frame_is_the_users(run_job: Run, tmp_path: Path) -> None:
    libraries = tmp_path / "site-packages"
    libraries.mkdir()
    (libraries / "lib_main.py").write_text("import lib\nlib.show()")
    (tmp_path / "mine.py").write_text(SHOW)
    (libraries / "lib.py").write_text(SHOW)
    (tmp_path / "main.py").write_text(MAIN.replace("LIBRARIES", str(libraries)))
    done = run_job([sys.executable, str(tmp_path / "main.py")], env={"PYTHONPATH": python_path(ROOT, libraries)})
    assert done.stderr == ""
    users = [("mine.py", "show"), ("main.py", "step"), ("main.py", "<module>")]
    assert done.stdout.splitlines() == [str([user, INNERMOST]) for user in users]


def test_it_delays_no_exit(run_job: Run) -> None:
    code = (
        "import time\n"
        "from collectives.flight.recorder import Recorder\n"
        "from collectives.flight.recorder import start_sampler\n"
        "start_sampler(Recorder(), period=60)\n"
        "print(time.monotonic())\n"
    )
    done = run_job([sys.executable, "-c", code], timeout=30)
    assert time.monotonic() - float(done.stdout) < 10, "the period is 60 s"
    assert (done.returncode, done.stderr) == (0, "")


COLLECTS = """
import gc, threading, time
from collectives.flight.recorder import main_thread_position
class Garbage:
    def __init__(self): self.cycle = self
    def __del__(self): time.sleep(0)  # releases the GIL
def sample():
    while sampling:
        main_thread_position()
def dive(depth):
    if depth:
        return dive(depth - 1)
    for _ in range(3):
        Garbage()
    gc.enable()
    time.sleep(0.0002)  # the sampler runs now
    gc.disable()
gc.disable()
gc.set_threshold(20, 1000, 1000)
sampling = True
sampler = threading.Thread(target=sample)
sampler.start()
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    for depth in range(5, 65):
        dive(depth)
sampling = False
sampler.join()
print("alive")
"""


def test_garbage_that_releases_the_gil_is_not_collected_while_frames_are_read(run_job: Run, count: Any) -> None:
    """While frames are read, the GIL must be held: else the main thread returns from them, and CPython 3.11 crashes."""
    run_job([sys.executable, "-c", COLLECTS.replace("SECONDS", str(count(2, 10)))], code=0, out="alive\n")
