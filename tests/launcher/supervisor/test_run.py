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

from tests.conftest import executable

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def test_the_contract_with_a_rank(ddp_launch: Any) -> None:
    args = ["a b", "", ":", "::", "-n", "é", "x\ny"]
    with subprocess.Popen(["sh", "-c", "yes | head -150000; echo end"], stdout=subprocess.PIPE) as typed:
        done = ddp_launch(
            """
            import json
            names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS".split()
            secrets = [name for name in os.environ if name.startswith("DDP_LAUNCH")]
            parent = int(os.environ["DDP_AGENT"]) == os.getppid()
            data = sys.stdin.read()
            received = len(data), data[-4:]
            print(json.dumps([*(os.environ[name] for name in names), parent, secrets, sys.argv[1:], received]))
            """,
            *args,
            err="",
            stdin=typed.stdout,
        )
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    rows = {line[:3]: json.loads(line[3:]) for line in done.lines}
    assert rows == {
        f"{rank}: ": [str(rank), "2", str(rank), "2", threads, True, [], args, received]
        for rank, received in enumerate(([300004, "end\n"], [0, ""]))
    }


def test_a_world_of_one_needs_no_mpi(run_job: Any, script: Any, tmp_path: Path) -> None:
    path = script("print(rank, size, flush=True); sys.stderr.write('to stderr')")
    # A Python in a folder without mpiexec, and an empty PATH.
    python = executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    code = f"import sys; sys.executable = {python!r}; from launcher.cli import main; sys.exit(main())"
    run_job([sys.executable, "-c", code, path], env={"PATH": ""}, code=0, out="0 1\n", err="to stderr\n")
    done = run_job([sys.executable, "-c", code, "-n", "2", path], env={"PATH": ""}, code=2)
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
    source = "import os, signal, subprocess, sys, time"
    assert done.stdout.splitlines() == ["job.py None 7 True", source, "[3]", "at exit __main__"]


def test_modules_and_packages(run_job: Any, tmp_path: Path) -> None:
    main = tmp_path / "package" / "__main__.py"
    # A folder of the user's must not take the place of ours.
    for path, text in (
        ("package/__init__.py", ""),
        (main, "import sys; print(__name__, __package__, __spec__.name, sys.argv[1:], sys.modules[__name__].__file__)"),
        ("socket.py", "raise SystemExit('wrong socket')"),
        ("launcher/__init__.py", "raise SystemExit('wrong launcher')"),
        ("launcher/agent/main.py", "raise SystemExit('wrong launcher')"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [str(Path(sys.executable).parent / "ddp-launch"), "-m", "package", "--x"]
    run_job(command, cwd=tmp_path, out=f"__main__ package package.__main__ ['--x'] {main}\n")


@pytest.mark.parametrize(
    ("name", "n", "code", "says"),
    [
        # one sentence, however many ranks say it
        ("no_such.module", 2, 2, "'no_such')"),
        pytest.param(
            "hollow",
            1,
            2,
            "No module named hollow.__main__; 'hollow' is a package and cannot be directly executed",
            marks=pytest.mark.long,
        ),
        # What the user's own code imports is another matter.
        ("needy.module", 1, 1, "raised ModuleNotFoundError: No module named 'lacking'"),
    ],
)
def test_a_module_that_cannot_be_run_is_wrong_use(
    launch: Any, tmp_path: Path, name: str, n: int, code: int, says: str
) -> None:
    for package, text in (("hollow", ""), ("needy", "import lacking")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    done = launch("-n", n, "--max-restarts", 2 * (code == 2), "-m", name, cwd=tmp_path, code=code)
    assert done.last.endswith(says)
    assert code == 1 or done.stderr.count("\n") == 1


MAIN = """
import os, sys, __main__
file, spec = getattr(__main__, "__file__", None), __main__.__spec__ and __main__.__spec__.name
print([sys.argv, sys.path[0], file, spec, __main__.__package__, os.path.basename(sys.argv[0]) == "-" or helper.value])
"""


@pytest.mark.parametrize(
    "kind",
    [
        "./app.pyz",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("-", "folder", "main.py", "main.pyc", "app.zip")),
    ],
)
def test_whatever_python_runs(run_job: Any, launch: Any, tmp_path: Path, kind: str) -> None:
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
        plain = run_job([sys.executable, kind, "a"], cwd=tmp_path, stdin=stdin, code=0)
    with (tmp_path / "main.py").open() as stdin:
        # some Pythons call that a file
        launch(kind, "a", cwd=tmp_path, stdin=stdin, out=plain.stdout.replace("'<stdin>'", "None"))


def test_a_program_from_stdin_is_there_again_after_a_restart(launch: Any, tmp_path: Path) -> None:
    body = "import os, sys\nif os.environ['DDP_ATTEMPT'] == '0': sys.exit(3)\nprint(len(sys.stdin.read()))\n"
    body += "#" * 300_000  # more than a pipe holds
    (tmp_path / "body").write_text(body)
    with (tmp_path / "body").open() as stdin:
        assert launch("-n", 2, "--max-restarts", 1, "-", stdin=stdin).lines == ["0: 0", "1: 0"]


def test_any_program_with_no_python(launch: Any, tmp_path: Path) -> None:
    python = tmp_path / "rank.py"
    python.write_text(
        "import numpy as np\nimport collectives\n"
        "comm = collectives.init()\nprint(comm.all_reduce(np.ones(1)), collectives.world.supervised())\n"
    )
    # `yes` ends by SIGPIPE, as it does in a shell, unless that is ignored. A rank that becomes Python has an agent.
    how = f"if [ $RANK = 0 ]; then {sys.executable} {python}; else exec {sys.executable} {python}; fi"
    executable(tmp_path / "run.sh", f'#!/bin/bash\nset -o pipefail\nyes | head -1; echo $? "$@"\n{how}\n')
    done = launch("-n", 2, "--no-python", "./run.sh", "-n", "a b", cwd=tmp_path, err="")
    assert done.lines == ["0: 141 -n a b", "0: [2.] False", "0: y", "1: 141 -n a b", "1: [2.] True", "1: y"]
    assert launch("--no-python", "sh", "-c", "exit 3", code=3).last.endswith("exited with code 3")


def test_a_program_that_cannot_be_run_is_wrong_use(launch: Any, tmp_path: Path) -> None:
    data = executable(tmp_path / "data", "\x7f")
    (tmp_path / "private").mkdir(mode=0o000)
    environ = {"PATH": f"{tmp_path}/private:{os.environ['PATH']}"}
    for program, reason in (
        ("nowhere", "there is no program nowhere that can be run"),
        (data, f"the program {data} cannot be run: Exec format error"),
    ):
        launch("--no-python", program, env=environ, code=2, err=f"ddp-launch: {reason}\n")


def test_a_reader_that_has_enough_ends_the_job(run_job: Any, script: Any) -> None:
    path = script("while True: print('line ' * 20)")
    command = f'"$0" -m launcher {path} | head -1; echo ${{PIPESTATUS[0]}}'
    assert run_job(["bash", "-c", command, sys.executable], err="").stdout.splitlines()[-1] == "141"


FULL = "the output cannot be written: No space left on device"


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_full_disk_behind_stdout_is_told_and_ends_the_job(
    run_job: Any, script: Any, tmp_path: Path, goes_on: bool
) -> None:
    path = script(f"print('line', file=sys.stderr)\nprint('line')\nwhile {goes_on}: time.sleep(0.1)")
    command = f"exec {sys.executable} -m launcher --max-restarts 2 --log-dir {tmp_path}/logs {path} >/dev/full"
    said = run_job(["sh", "-c", command], code=1).stderr.splitlines()
    assert said.count(f"ddp-launch: {FULL}") == 1
    assert set(said) <= {f"ddp-launch: {FULL}", "line"}
    log = (tmp_path / "logs" / "latest" / "launcher.log").read_text().splitlines()
    assert [line[20:] for line in log[1:]] == [f"ddp-launch: {FULL}", f"exit code 1: {FULL}"]
