"""Where a process stands: asleep, computing, in a library, in our own code; and what the sampler must not do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from collectives.flight.reader import FlightReader
from collectives.flight.report import Position, read

ROOT = Path(__file__).parents[3]


def _await_position(pid: int, function: str, after: int = 0) -> Position:
    """The first sample in `function` that was taken later than `after` (monotonic ns)."""
    deadline = time.monotonic() + 20
    with FlightReader.of(pid) as reader:
        while True:
            position = read(reader).position
            if position is not None and position.function == function and position.time > after:
                return position
            assert time.monotonic() < deadline, position
            time.sleep(0.01)


@pytest.mark.parametrize("body", ["time.sleep(60)", "sum(range(100))"])
def test_a_process_that_sleeps_and_one_that_computes(recorded: Any, body: str) -> None:
    pid = recorded(
        f"""
        def work():
            while True:
                {body}
        Sampler(recorder, period=0.05).start()
        ready()
        work()
        """
    ).process.pid
    position = _await_position(pid, "work")
    assert os.path.basename(position.file) == "recorded.py"
    assert position.within is None
    assert Path(position.file).read_text().splitlines()[position.line - 1].strip() in ("while True:", body)
    copy_error = _await_position(pid, "work", after=position.time)
    assert copy_error.time - position.time > 0.04e9
    assert copy_error.time <= time.monotonic_ns()


def test_the_users_frame_is_told_and_that_of_a_library_beside_it(recorded: Any) -> None:
    job = recorded(
        """
        import queue
        def load():
            queue.Queue().get()
        Sampler(recorder, period=0.05).start()
        ready()
        load()
        """
    )
    position = _await_position(job.process.pid, "load")
    assert os.path.basename(position.file) == "recorded.py"
    assert position.within is not None
    file, line, function = position.within
    assert (os.path.basename(file), function) == ("threading.py", "wait")
    assert line > 0


# Called on the main thread, it finds its own `_stack` innermost, one of ours.
INNERMOST = ("sampler.py", "_stack")
SHOW = """
import os
from collectives.flight.sampler import main_thread_position
def show():
    print([place and (os.path.basename(place[0]), place[2]) for place in main_thread_position()])
def call(function):
    function()
"""


@pytest.mark.parametrize(
    ("main", "user"),
    [
        ("import mine\nmine.show()", ("mine.py", "show")),
        ("import mine, lib\nlib.call(mine.show)", ("mine.py", "show")),
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
    path = os.pathsep.join(map(str, (ROOT, script.parent, script.parent / "site-packages")))
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
        "from collectives.flight.sampler import Sampler\n"
        "Sampler(Recorder(), period=60).start()\n"
        "print(time.monotonic())\n"
    )
    done = run_job([sys.executable, "-c", code], timeout=30)
    assert time.monotonic() - float(done.stdout) < 10, "the period is 60 s"
    assert (done.returncode, done.stderr) == (0, "")


def test_no_forked_child_samples(recorded: Any) -> None:
    job = recorded(
        """
        import warnings
        warnings.simplefilter("ignore")  # of a process with threads that forks
        sampler = Sampler(recorder, period=0.01)
        sampler.start()
        def parent():
            time.sleep(0.1)
            return os.waitpid(child, 0)[1]
        def in_child():
            count = threading.active_count()
            time.sleep(0.3)
            return count
        ready()
        child = os.fork()
        if child == 0:
            os._exit(in_child())
        status = parent()
        print(os.waitstatus_to_exitcode(status), flush=True)
        """
    )
    position = _await_position(job.process.pid, "parent")
    assert position.function == "parent"
    result = job.wait(20)
    assert (result.stdout, result.stderr) == ("1\n", ""), "threads in the child"
