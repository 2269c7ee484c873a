"""`launcher.run`: results in rank order, a rank's exception raised here, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launcher

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.fixture(autouse=True)
def folder(monkeypatch: Any, tmp_path: Path) -> Iterator[Path]:
    """Where calls have their folders; none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.glob("ddp-run-*")) == []


def work(a: int, b: int = 1) -> tuple[int, str, int, Any]:
    import collectives

    comm = collectives.init()
    print("ä to stdout")
    print("ä to stderr", file=sys.stderr)
    sys.stdout.write("unfinished é")
    total = comm.all_reduce(np.full(3_000_000, comm.rank + 1.0))
    return comm.rank * a + b, os.environ["WORLD_SIZE"], os.getpid(), total


def test_results_come_in_rank_order_and_what_ranks_print_comes_out_here(capsys: Any) -> None:
    print("before")
    results = launcher.run(work, (10,), 2, kwargs={"b": 5})
    print("after")
    values, sizes, pids, sums = zip(*results, strict=True)
    assert (values, sizes, len({os.getpid(), *pids})) == ((5, 15), ("2", "2"), 3)
    np.testing.assert_array_equal(sums, np.full((2, 3_000_000), 3.0))
    seen = capsys.readouterr()
    first, *lines, last = seen.out.splitlines()
    assert (first, last) == ("before", "after")
    assert sorted(lines) == ["0: unfinished é", "0: ä to stdout", "1: unfinished é", "1: ä to stdout"]
    assert sorted(seen.err.splitlines()) == ["0: ä to stderr", "1: ä to stderr"]


def fail(error: Exception) -> None:
    if rank() == 1:
        raise error
    time.sleep(30)


def test_a_ranks_exception_is_raised_with_its_traceback_and_not_printed(capfd: Any) -> None:
    with pytest.raises(KeyError, match="no such key") as caught:
        launcher.run(fail, (KeyError("no such key"),))
    cause = caught.value.__cause__
    assert isinstance(cause, launcher.RankError)
    assert re.match(
        r"(?s)rank 1 of 2:\n\nTraceback \(most recent call last\):\n.*test_function.py.* in fail", str(cause)
    )
    assert "function_worker.py" not in str(cause)
    assert tuple(capfd.readouterr()) == ("", "")
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised on rank 1 of 2; its own traceback is above"]


class Dictlike(Exception):
    def __getattr__(self, name: str) -> Any:
        return {}[name]


class Particular(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_an(kind: Any, args: Any) -> None:
    raise kind(*args)


@pytest.mark.parametrize(
    ("kind", "args", "shown"),
    [
        # It cannot be shown: only from Python 3.13 on `traceback` can do that.
        pytest.param(
            Dictlike,
            ("what",),
            r"(Dictlike\('what'\)|.*Dictlike: what)",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="has no notes, but pytest asks for them"),
        ),
        # It cannot be pickled.
        (Particular, (1, 2), ".*Particular: 1 and 2"),
    ],
)
def test_an_exception_that_does_not_come_as_it_was(kind: Any, args: Any, shown: str) -> None:
    with pytest.raises(launcher.RankError, match=f"^rank 0 raised {shown}") as caught:
        launcher.run(raise_an, (kind, args), 1)
    assert "in raise_an" in str(caught.value.__cause__)


def be_killed() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_a_rank_that_dies_or_exits() -> None:
    with pytest.raises(launcher.RankError, match=r"rank 1 .*was killed by SIGKILL"):
        launcher.run(be_killed)
    with pytest.raises(launcher.RankError, match="rank 0 ended without a result"):
        launcher.run(sys.exit, (0,), 1)


def test_a_time_limit() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0.5 s"):
        launcher.run(time.sleep, (30,), 1, timeout=0.5)
    assert time.monotonic() - start < 10


def test_a_module_needs_no_cloudpickle(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError\n")
    (tmp_path / "mine.py").write_text("def f(x):\n    return [x]\n")
    code = "import launcher, mine; print(launcher.run(mine.f, (1,), 1))"
    run_job([sys.executable, "-c", code], timeout=20, cwd=tmp_path, out="[[1]]\n", err="")
    code = "import launcher\nlauncher.run(lambda: 1)"
    done = run_job([sys.executable, "-c", code], timeout=20, cwd=tmp_path)
    assert done.last.endswith("(and at its top level)")


def test_wrong_use() -> None:
    wrong = {"nproc": [0, 1.5, "2", None], "timeout": [0.0, float("nan"), "3"]}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(launcher.UsageError, match=f"not {value!r}"):
                launcher.run(max, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(launcher.UsageError, match="cannot be taken to the ranks"):
        launcher.run(max, (threading.Lock(),))


SCRIPT = """
import os, sys, time
import launcher
def work(seconds):
    print("ready", flush=True)
    time.sleep(seconds)
    return os.environ["RANK"]
if __name__ == "__main__":
    try:
        print(launcher.run(work, (float(sys.argv[1]),)))
    except KeyboardInterrupt:
        print("interrupted", os.listdir(os.environ["TMPDIR"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_caller_that_is_interrupted_or_killed_leaves_nothing(start_job: Any, tmp_path: Path, number: int) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    job = start_job([sys.executable, tmp_path / "script.py", "30"], env={"TMPDIR": str(tmp_path / "tmp")})
    for _ in range(2):
        assert "ready" in job.process.stdout.readline()
    job.process.send_signal(number)
    if number == signal.SIGINT:
        assert "Traceback" not in job.wait(15, code=0, out="interrupted []\n").stderr
    else:
        job.process.wait(5)
        job.assert_gone(5)
    assert os.listdir(tmp_path / "tmp") == []


def test_as_in_a_notebook(run_job: Any) -> None:
    """sys.stdout is an object without a file descriptor; function, closure and result are of `__main__`."""
    pytest.importorskip("cloudpickle")
    cell = """
        import io, os, sys, threading
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        sys.stdin = None
        source = "def f(x):\\n    print('from', os.environ['RANK'])\\n    return x * factor\\n"
        factor = 3
        class Box:
            def __init__(self, value): self.value = value
        exec(compile(source, "<cell 1>", "exec"))
        import launcher
        results = []
        thread = threading.Thread(target=lambda: results.append(launcher.run(lambda x: Box(f(x)), (2,))))
        thread.start(); thread.join()
        printed = sys.stdout.getvalue()
        assert [(type(box), box.value) for box in results[0]] == [(Box, 6)] * 2, results
        assert sorted(printed.splitlines()) == ["0: from 0", "1: from 1"], printed
    """
    run_job([sys.executable, "-c", textwrap.dedent(cell)], timeout=20, code=0, out="", err="")
