"""A job that goes well: what the script sees, and what the user sees."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]
LAUNCH = [sys.executable, "-m", "launcher"]


def test_the_contract_with_a_rank(ddp_launch: Any) -> None:
    done = ddp_launch(
        """
        import json
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS".split()
        secrets = [name for name in os.environ if name.startswith("DDP_LAUNCH")]
        parent = int(os.environ["DDP_AGENT"]) == os.getppid()
        print(json.dumps([*(os.environ[name] for name in names), parent, secrets, sys.argv[1:]]))
        """,
        *["a b", "", ":", "::", "-n", "é", "x\ny"],
    )
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line[:3]: json.loads(line[3:]) for line in done.stdout.splitlines()}
    args = ["a b", "", ":", "::", "-n", "é", "x\ny"]
    assert rows == {f"{rank}: ": [str(rank), "2", str(rank), "2", threads, True, [], args] for rank in range(2)}


def test_a_world_of_one_needs_no_mpi(run_job: Any, script: Any, tmp_path: Path) -> None:
    path = script("print(rank, size, flush=True); sys.stderr.write('to stderr')")
    # A Python in a folder without mpiexec, and an empty PATH.
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code = f"import sys; sys.executable = {str(python)!r}; from launcher.cli import main; sys.exit(main())"
    done = run_job([sys.executable, "-c", code, path], env={"PATH": ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "to stderr\n")
    done = run_job([sys.executable, "-c", code, "-n", "2", path], env={"PATH": ""})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install mpich" in done.stderr


def test_main_is_a_module_of_its_own(ddp_launch: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    done = ddp_launch(
        """
        import atexit, linecache, multiprocessing, pickle, threading
        class Here: pass
        if __name__ == "__main__":
            import neighbour
            atexit.register(lambda: print("at exit", pickle.loads(pickle.dumps(Here())).__class__.__module__))
            print(os.path.basename(__file__), __spec__, neighbour.value, sys.path[0] == os.path.dirname(__file__))
            print(linecache.getline(__file__, 2).strip())
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(len, ["abc"]))
        """,
        n=1,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "job.py None 7 True",
        "import os, signal, subprocess, sys, time",
        "[3]",
        "at exit __main__",
    ]


def test_modules_and_packages(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    text = "import sys; print(__name__, __package__, __spec__.name, sys.argv[1:], sys.modules['__main__'].__file__)"
    (tmp_path / "package" / "__main__.py").write_text(text)
    # A folder of the user's must not take the place of ours.
    (tmp_path / "socket.py").write_text("raise SystemExit('wrong socket')")
    (tmp_path / "launcher" / "agent").mkdir(parents=True)
    for name in ("__init__.py", "agent/main.py"):
        (tmp_path / "launcher" / name).write_text("raise SystemExit('wrong launcher')")
    command = [str(Path(sys.executable).parent / "ddp-launch")]
    done = run_job([*command, "-m", "package", "--x"], cwd=tmp_path)
    main = tmp_path / "package" / "__main__.py"
    assert done.stdout == f"__main__ package package.__main__ ['--x'] {main}\n", done.stderr


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("no_such.module", 2, "'no_such')"),
        ("hollow", 2, "No module named hollow.__main__; 'hollow' is a package and cannot be directly executed"),
        # What the user's own code imports is another matter.
        ("needy.module", 1, "raised ModuleNotFoundError: No module named 'lacking'"),
    ],
)
def test_a_module_that_cannot_be_run_is_wrong_use(
    run_job: Any, tmp_path: Path, name: str, code: int, says: str
) -> None:
    for package, text in (("hollow", ""), ("needy", "import lacking")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    done = run_job([*LAUNCH, "-n", "2", "--max-restarts", str(2 * (code == 2)), "-m", name], cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].endswith(says)
    if code == 2:
        assert done.stderr.count("\n") == 1  # one sentence, however many ranks say it


MAIN = """
import os, sys, __main__
file, spec = getattr(__main__, "__file__", None), __main__.__spec__ and __main__.__spec__.name
print([sys.argv, sys.path[0], file, spec, __main__.__package__, os.path.basename(sys.argv[0]) == "-" or helper.value])
"""


@pytest.mark.parametrize(
    "kind",
    [
        "./app.pyz",
        "-",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("folder", "main.py", "main.pyc", "app.zip")),
    ],
)
def test_whatever_python_runs(run_job: Any, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    program = MAIN if kind == "-" else "import helper" + MAIN
    folder.mkdir()
    for path in (tmp_path / "helper.py", folder / "helper.py"):
        path.write_text("value = 7\n")
    for path in (tmp_path / "main.py", folder / "__main__.py"):
        path.write_text(program)
    py_compile.compile(str(tmp_path / "main.py"), cfile=str(tmp_path / "main.pyc"), dfile="main.py")
    for name, shebang in (("app.zip", None), ("app.pyz", "/usr/bin/env python3")):
        zipapp.create_archive(folder, tmp_path / name, interpreter=shebang)
    with (tmp_path / "main.py").open() as stdin:
        plain = run_job([sys.executable, kind, "a"], cwd=tmp_path, stdin=stdin)
    assert plain.returncode == 0, plain.stderr
    with (tmp_path / "main.py").open() as stdin:
        done = run_job([*LAUNCH, "-n", "2", kind, "a"], cwd=tmp_path, stdin=stdin)
    assert done.returncode == 0, done.stderr
    expected = plain.stdout.replace("'<stdin>'", "None")  # some Pythons call that a file
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {expected.rstrip()}" for rank in range(2)]


def test_a_program_from_stdin_is_there_again_after_a_restart(run_job: Any, tmp_path: Path) -> None:
    body = "import os, sys\nif os.environ['DDP_ATTEMPT'] == '0': sys.exit(3)\nprint(len(sys.stdin.read()))\n"
    body += "#" * 300_000  # more than a pipe holds
    (tmp_path / "body").write_text(body)
    with (tmp_path / "body").open() as stdin:
        done = run_job([*LAUNCH, "-n", "2", "--max-restarts", "1", "-"], stdin=stdin)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["0: 0", "1: 0"]), done.stderr


def test_any_program_with_no_python(run_job: Any, tmp_path: Path) -> None:
    python = tmp_path / "rank.py"
    python.write_text(
        "import numpy as np\nimport collectives\n"
        "comm = collectives.init()\nprint(comm.all_reduce(np.ones(1)), collectives.world.supervised())\n"
    )
    # `yes` ends by SIGPIPE, as it does in a shell, unless that is ignored. A rank that becomes Python has an agent.
    how = f"if [ $RANK = 0 ]; then {sys.executable} {python}; else exec {sys.executable} {python}; fi"
    (tmp_path / "run.sh").write_text(f'#!/bin/bash\nset -o pipefail\nyes | head -1; echo $? "$@"\n{how}\n')
    (tmp_path / "run.sh").chmod(0o755)
    done = run_job([*LAUNCH, "-n", "2", "--no-python", "./run.sh", "-n", "a b"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = ["0: 141 -n a b", "0: [2.] False", "0: y", "1: 141 -n a b", "1: [2.] True", "1: y"]
    assert sorted(done.stdout.splitlines()) == said
    done = run_job([*LAUNCH, "-n", "2", "--no-python", "sh", "-c", "exit $RANK"])
    assert done.returncode == 1
    assert done.stderr.endswith("exited with code 1\n")


def test_a_program_that_cannot_be_run_is_wrong_use(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("\x7f")
    (tmp_path / "data").chmod(0o755)
    (tmp_path / "private").mkdir(mode=0o000)
    environ = {"PATH": f"{tmp_path}/private:{os.environ['PATH']}"}
    for program, reason in (
        ("nowhere", "there is no program nowhere that can be run"),
        (f"{tmp_path}/data", f"the program {tmp_path}/data cannot be run: Exec format error"),
    ):
        done = run_job([*LAUNCH, "-n", "2", "--no-python", program], env=environ)
        assert done.returncode == 2
        assert done.stderr == f"ddp-launch: {reason}\n"


def test_stdin_goes_to_rank_0(start_job: Any, script: Any) -> None:
    path = script("data = sys.stdin.read(); print(len(data), data.strip()[-3:], flush=True)")
    job = start_job([*LAUNCH, "-n", "2", path], stdin=subprocess.PIPE)
    out, err = job.process.communicate("x" * 300_000 + "end\n", timeout=20)
    assert sorted(out.splitlines()) == ["0: 300004 end", "1: 0 "], err
    job.assert_gone()


def test_a_reader_that_has_enough_ends_the_job(start_job: Any, script: Any) -> None:
    path = script("while True: print('line ' * 20)")
    job = start_job(["bash", "-c", f'"$0" -m launcher -n 2 {path} | head -1; echo ${{PIPESTATUS[0]}}', sys.executable])
    done = job.wait(20)
    assert done.stdout.splitlines()[-1] == "141"
    assert done.stderr == ""


FULL = "the output cannot be written: No space left on device"


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_full_disk_behind_stdout_is_told_and_ends_the_job(
    run_job: Any, script: Any, tmp_path: Path, goes_on: bool
) -> None:
    path = script(f"print('line', file=sys.stderr)\nprint('line')\nwhile {goes_on}: time.sleep(0.1)")
    command = f"exec {sys.executable} -m launcher -n 2 --max-restarts 2 --log-dir {tmp_path}/logs {path} >/dev/full"
    done = run_job(["sh", "-c", command])
    assert done.returncode == 1
    assert done.stderr.splitlines().count(f"ddp-launch: {FULL}") == 1
    assert set(done.stderr.splitlines()) <= {f"ddp-launch: {FULL}", "0: line", "1: line"}
    log = (tmp_path / "logs" / "latest" / "launcher.log").read_text().splitlines()
    assert [line[20:] for line in log[1:]] == [f"ddp-launch: {FULL}", f"exit code 1: {FULL}"]
