"""A job that fails: who did it is named, once and last, and the exit code is theirs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import executable, has_mpich

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def test_the_first_traceback_is_shown_once_and_last_and_later_failures_are_one_line(ddp_launch: Any) -> None:
    done = ddp_launch(
        """
        import atexit
        atexit.register(lambda: print("at exit", rank))
        def fail():
            try:
                {}["x"]
            except KeyError:
                raise ValueError("no é") from None
        signal.signal(signal.SIGTERM, lambda *a: 1 / 0)
        if rank == 1:
            time.sleep(0.3)
            print("before")
            fail()
        time.sleep(60)
        """,
        code=1,
    )
    assert done.lines == ["0: at exit 0", "1: at exit 1", "1: before"]
    also, *traceback, last = done.stderr.splitlines()
    assert re.search(r"failed too: rank 0 \(pid .*raised ZeroDivisionError", also)
    assert re.match(r'  File "\S*job.py", line \d+, in <module>$', traceback[1])
    assert (traceback[2].strip(), traceback[-1]) == ("fail()", "ValueError: no é")
    assert re.fullmatch(r"ddp-launch: rank 1 \(pid \d+\) raised ValueError: no é", last)
    assert done.stderr.count("Traceback") == 1


def test_a_message_that_utf_8_cannot_hold_is_shown_as_python_shows_it(ddp_launch: Any, tmp_path: Path) -> None:
    options = ("--max-restarts", "1", "--log-dir", str(tmp_path / "logs"), "--events", str(tmp_path / "events"))
    done = ddp_launch(
        r"""
        if rank == 1:
            if os.environ["DDP_ATTEMPT"] == "0":
                raise ValueError("bad \ud800 char")
            raise ValueError(b"byte \xff".decode("utf-8", "surrogateescape") + " \udfff é")
        time.sleep(60)
        """,
        options=options,
        code=1,
    )
    assert r"raised ValueError: bad \ud800 char" in done.stderr
    assert "ddp-launch: restart 1 of 1" in done.stderr
    assert done.last.endswith(r"raised ValueError: byte \udcff \udfff é")
    logs = tmp_path / "logs" / "latest"
    assert r"ValueError: bad \ud800 char" in (logs / "rank-1.log").read_text()
    assert r"ValueError: byte \udcff \udfff é" in (logs / "attempt-1" / "rank-1.log").read_text()
    assert r"raised ValueError: bad \ud800 char" in (logs / "launcher.log").read_text()
    assert r"bad \ud800 char" in (tmp_path / "events").read_text()


def test_of_a_message_beyond_all_bounds_beginning_and_end_are_kept(ddp_launch: Any) -> None:
    done = ddp_launch("raise ValueError('begin ' + 50_000_000 * 'x' + ' end')", n=1, code=1)
    assert len(done.stderr) < 100_000
    assert 'job.py", line 4, in <module>' in done.stderr
    assert re.search(r"\nValueError: begin x+\n\[\.\.\. \d+ characters left out \.\.\.\]\nx+ end\n", done.stderr)
    assert re.fullmatch(r"ddp-launch: rank 0 \(pid \d+\) raised ValueError: begin x+ \[\.\.\.\]", done.last)


def test_what_a_rank_leaves_behind_ends_with_it_and_forked_children_are_no_ranks(ddp_launch: Any) -> None:
    done = ddp_launch(
        """
        code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork(); os.setsid(); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code])
        if (forked := os.fork()) == 0:
            raise ValueError("in a child")
        print("child ended with", os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
        time.sleep(0.3)
        """,
        n=1,
        out="child ended with 1\n",
    )
    assert "ValueError: in a child" in done.stderr


@pytest.mark.skipif(not has_mpich(), reason="takes MPICH")
@pytest.mark.parametrize(
    ("engine", "limit", "code", "says"),
    [
        (
            "echo words of the engine\nexec sleep 60",
            0.3,
            1,
            "words of the engine\nddp-launch: ranks 0-1 did not start within 0.3 s",
        ),
        (
            "echo no such host >&2\nexit 7",
            15,
            7,
            r"no such host\nddp-launch: .* exited with code 7 before ranks 0-1 had started",
        ),
        (
            # Its ranks do not learn who they are: two worlds of one.
            f'shift 4\n{sys.executable} "$@" & {sys.executable} "$@"; wait',
            15,
            1,
            r"(?s:.*)ddp-launch: mpiexec was to start 2 ranks, but rank 0 was told of a world of 1",
        ),
    ],
    ids=["starts none", "fails", "two worlds"],
)
def test_ranks_that_never_start_are_named(
    run_job: Any, script: Any, tmp_path: Any, engine: str, limit: float, code: int, says: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "hydra_pmi_proxy").touch()
    executable(folder / "mpiexec", f"#!/bin/sh\n{engine}\n")
    job = f"launcher.Job(script={script('')!r}, n=2, engine='mpich', start_limit={limit})"
    body = f"import sys\nsys.executable = {str(folder / 'python')!r}\n"
    body += f"import launcher\nsys.exit(launcher.launch({job}))"
    done = run_job([sys.executable, "-c", body], timeout=20, code=code)
    assert re.fullmatch(says, done.stderr.strip())


@pytest.mark.long
def test_the_last_lines_of_a_hidden_rank_come_with_its_failure(ddp_launch: Any) -> None:
    done = ddp_launch(
        """
        if rank == 1:
            for number in range(30):
                print("line", number)
            sys.exit(3)
        time.sleep(60)
        """,
        options=("--ranks", "0"),
        code=3,
        out="",
    )
    first, *lines, last = done.stderr.splitlines()
    assert first == "ddp-launch: the last 20 lines of rank 1:"
    assert lines == [f"line {number}" for number in range(10, 30)]
    assert last.endswith("exited with code 3")
