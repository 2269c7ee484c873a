"""A job that fails: who did it is named, once and last, and the exit code is theirs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import has_mpich

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

HANG = "time.sleep(60)"


@pytest.mark.parametrize(
    ("act", "says", "code"),
    [
        pytest.param("sys.exit('words')", "exited with code 1", 1, marks=pytest.mark.long),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (signal 9); often the kernel, out of memory", 137),
        pytest.param("os.kill(os.getpid(), 15)", "was killed by SIGTERM (signal 15)", 143, marks=pytest.mark.long),
    ],
)
def test_how_a_rank_ended(ddp_launch: Any, act: str, says: str, code: int) -> None:
    done = ddp_launch(
        f"""
        print("start", flush=True)
        if rank == 1:
            {act}
        {HANG}
        """
    )
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ddp-launch: rank 1 (pid ")
    # The figures of memory follow, where the kernel may have done it.
    assert says in last if "SIGKILL" in says else last.endswith(says)
    assert done.stderr.replace("1: words\n", "").count("\n") == 1
    assert "1: start" in done.stdout


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
        """
    )
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["0: at exit 0", "1: at exit 1", "1: before"]
    also, *lines = done.stderr.splitlines()
    assert "failed too: rank 0 (pid " in also
    assert "raised ZeroDivisionError" in also
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in <module>")
    assert "job.py" in lines[1]
    assert lines[2].strip() == "fail()"
    assert lines[-2] == "ValueError: no é"
    assert lines[-1].startswith("ddp-launch: rank 1 (pid ")
    assert lines[-1].endswith("raised ValueError: no é")
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
    )
    assert done.returncode == 1
    assert r"raised ValueError: bad \ud800 char" in done.stderr
    assert "ddp-launch: restart 1 of 1" in done.stderr
    assert done.stderr.splitlines()[-2:-1] == [r"ValueError: byte \udcff \udfff é"]
    assert done.stderr.splitlines()[-1].endswith(r"raised ValueError: byte \udcff \udfff é")
    logs = tmp_path / "logs" / "latest"
    assert r"ValueError: bad \ud800 char" in (logs / "rank-1.log").read_text()
    assert r"ValueError: byte \udcff \udfff é" in (logs / "attempt-1" / "rank-1.log").read_text()
    assert r"raised ValueError: bad \ud800 char" in (logs / "launcher.log").read_text()
    assert r"bad \ud800 char" in (tmp_path / "events").read_text()


def test_of_a_message_beyond_all_bounds_beginning_and_end_are_kept(ddp_launch: Any) -> None:
    done = ddp_launch("raise ValueError('begin ' + 50_000_000 * 'x' + ' end')", n=1)
    assert done.returncode == 1
    assert len(done.stderr) < 100_000
    assert "Traceback (most recent call last):\n" in done.stderr
    assert 'job.py", line 4, in <module>' in done.stderr
    assert re.search(r"\nValueError: begin x+\n\[\.\.\. \d+ characters left out \.\.\.\]\nx+ end\n", done.stderr)
    assert re.match(
        r"ddp-launch: rank 0 \(pid \d+\) raised ValueError: begin x+ \[\.\.\.\]$", done.stderr.splitlines()[-1]
    )


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
    )
    assert (done.returncode, done.stdout) == (0, "child ended with 1\n")
    assert "ValueError: in a child" in done.stderr


@pytest.mark.skipif(not has_mpich(), reason="takes MPICH")
def test_ranks_that_never_start_are_named(run_job: Any, script: Any, tmp_path: Any) -> None:
    engine = tmp_path / "bin" / "mpiexec"
    engine.parent.mkdir()
    (engine.parent / "hydra_pmi_proxy").touch()
    engine.write_text("#!/bin/sh\necho words of the engine\nexec sleep 60\n")
    engine.chmod(0o755)
    code = f"""
import re
import sys
real, sys.executable = sys.executable, {str(engine.parent / "python")!r}
import launcher
sys.exit(launcher.launch(launcher.Job(script={script("")!r}, n=2, engine='mpich', start_limit=float(sys.argv[1]))))
"""
    done = run_job([sys.executable, "-c", code, "0.3"], timeout=20)
    assert done.returncode == 1
    words, sentence = done.stderr.splitlines()
    assert words == "words of the engine"
    assert sentence == "ddp-launch: ranks 0-1 did not start within 0.3 s"

    engine.write_text("#!/bin/sh\necho no such host >&2\nexit 7\n")
    done = run_job([sys.executable, "-c", code, "15"], timeout=20)
    assert done.returncode == 7
    words, sentence = done.stderr.splitlines()
    assert words == "no such host"
    assert sentence.endswith("exited with code 7 before ranks 0-1 had started")

    # An engine whose ranks do not learn who they are: two worlds of one.
    engine.write_text(f'#!/bin/sh\nshift 4\n{sys.executable} "$@" & {sys.executable} "$@"; wait\n')
    done = run_job([sys.executable, "-c", code, "15"], timeout=20)
    assert done.returncode == 1
    sentence = done.stderr.splitlines()[-1]
    assert sentence == "ddp-launch: mpiexec was to start 2 ranks, but rank 0 was told of a world of 1"


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
    )
    assert (done.returncode, done.stdout) == (3, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "ddp-launch: the last 20 lines of rank 1:"
    assert lines[1:-1] == [f"line {number}" for number in range(10, 30)]
    assert lines[-1].endswith("exited with code 3")
