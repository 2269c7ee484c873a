"""Where a process stands: asleep, computing, in a library, in our own code; and what the sampler must not do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from collectives.flight.reader import FlightReader, Position
from tests.conftest import python_path

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize("body", ["time.sleep(60)", "sum(range(100))", "queue.Queue().get()"])
def test_a_process_that_sleeps_computes_or_waits_in_a_library(recorded: Any, body: str) -> None:
    pid = recorded(
        f"""
        import queue
        def work():
            while True:
                {body}
        start_sampler(recorder, period=0.05)
        ready()
        work()
        """
    ).process.pid
    position = _await_position(pid, "work")
    assert os.path.basename(position.file) == "recorded.py"
    assert Path(position.file).read_text().splitlines()[position.line - 1].strip() in ("while True:", body)
    if "queue" in body:
        assert (os.path.basename(position.within[0]), position.within[2]) == ("threading.py", "wait")
    else:
        assert position.within is None
    later = _await_position(pid, "work", after=position.time)
    assert later.time - position.time > 0.04e9
    assert later.time <= time.monotonic_ns()


# Called on the main thread, it finds its own `_stack` innermost, one of ours.
INNERMOST = ("recorder.py", "_stack")
SHOW = """
import os
from collectives.flight.recorder import main_thread_position
def show():
    print([place and (os.path.basename(place[0]), place[2]) for place in main_thread_position()])
def call(function):
    function()
"""


@pytest.mark.parametrize(
    ("main", "user"),
    [
        ("import mine\nmine.show()", ("mine.py", "show")),
        ("import lib\ndef step():\n    lib.show()\nstep()", ("main.py", "step")),
        ("import runpy\nrunpy.run_path('LIBRARIES/lib_main.py')", ("main.py", "<module>")),
    ],
)
def test_which_frame_is_the_users(tmp_path: Path, main: str, user: tuple[str, str]) -> None:
    libraries = tmp_path / "site-packages"
    libraries.mkdir()
    (libraries / "lib_main.py").write_text("import lib\nlib.show()")
    (tmp_path / "mine.py").write_text(SHOW)
    (libraries / "lib.py").write_text(SHOW)
    (tmp_path / "main.py").write_text(main.replace("LIBRARIES", str(libraries)))
    assert _run(tmp_path / "main.py") == str([user, INNERMOST])


def _run(script: Path) -> str:
    path = python_path(ROOT, script.parent, script.parent / "site-packages")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_it_delays_no_exit(run_job: Any) -> None:
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
