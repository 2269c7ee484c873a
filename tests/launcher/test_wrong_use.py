"""Wrong use: one clear sentence on stderr, exit code 2, and nothing has been started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main

FILES = {
    "job.py": "",
    "file": "",
    "run.sh": "#!/bin/sh -e\necho hello\n",
    "program": "\x7fELF",
    "hosts": "a:2\nb\n",
    "hosts.toml": '[launch]\nscript = "job.py"\nhosts = "a:2"\nhostfile = "hosts"\n',
}


RESIZE = "without a script or other options: ddp-launch --resize N --job PID\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no script to run: ddp-launch [-n N] SCRIPT ARGS... (ddp-launch --help shows more)"),
        ("no_such.py", "there is no script no_such.py"),
        (".", ". is a directory without a __main__.py, which Python would run"),
        ("python job.py", "leave python out: ddp-launch starts scripts, and modules (-m), in its own Python"),
        ("run.sh", "run.sh is a script for /bin/sh -e, and no Python: ddp-launch --no-python run.sh"),
        ("program", "program is a compiled program, and no Python: ddp-launch --no-python program"),
        ("--no-python -m job", "a module is Python: give -m job or --no-python, not both"),
        # options
        ("--grase 3 job.py", "unknown option --grase (did you mean --grace?)"),
        ("--set n=2 job.py", "unknown option --set\n"),
        ("-max-restarts 3 job.py", "unknown option -max-restarts (did you mean --max-restarts?)"),
        ("-n", "-n/-np expected one argument"),
        ("--help=3", "--help/-h ignored explicit argument '3'"),
        # numbers
        ("-n x job.py", "-n/-np should be a whole number of ranks, or gpu, not 'x'"),
        ("--nproc_per_node 2 job.py", "unknown option --nproc_per_node (did you mean -n N?)"),
        ("--nproc 2 job.py", "unknown option --nproc (did you mean -n N?)"),
        ("-n 0 job.py", "the number of ranks must be at least 1, not 0"),
        ("--grace -1 job.py", "the grace must be a number of seconds, zero or more, not -1"),
        ("--grace soon job.py", "--grace should be a number of seconds, not 'soon'"),
        ("--metrics-port x job.py", "--metrics-port should be a port, or HOST:PORT, not 'x'"),
        ("--start-limit 0 job.py", "the start limit must be a number of seconds above zero, not 0"),
        ("--hang-timeout of job.py", "--hang-timeout should be a number of seconds, or off, not 'of'"),
        # ranks
        ("-n 2 --ranks 0,9 job.py", "rank 9 cannot be shown: the job has 2 ranks, counted from 0"),
        ("-n 2 --debug-rank 2 job.py", "rank 2 cannot be debugged: the job has 2 ranks, counted from 0"),
        (
            "--debug-rank -1 job.py",
            "rank -1 cannot be debugged: the job has an unknown number of ranks, counted from 0",
        ),
        ("--hosts a:2 --min-ranks 3 job.py", "the smallest number of ranks (min_ranks) must be from 1 to 2, not 3"),
        ("-n 4 --min-ranks 2 job.py", "the smallest number of ranks (min_ranks) needs hosts to do without"),
        # hosts
        ("--hosts a:2,b -n 4 job.py", "4 ranks were asked for, and the hosts have 3 slots"),
        ("--hosts a:b job.py", "--hosts: 'a:b' is not understood"),
        ("--hostfile none job.py", "the hostfile none cannot be read: No such file or directory"),
        ("--hosts a:2 --hostfile hosts job.py", "give hosts or a hostfile, not both: hosts"),
        # choices
        ("--engine lam job.py", "the engine should be one of auto, local, mpich, openmpi, slurm, not 'lam'"),
        ("--backend gloo job.py", "the backend should be one of auto, single, mpi, nccl, not 'gloo'"),
        (
            "-n gpu --hosts a:8,b:8 job.py",
            "-n gpu counts the GPUs of this machine, not those of hosts: give every host ",
        ),
        ("--resize 2", RESIZE),
        ("--job 7", RESIZE),
        ("--resize 2 --job 7 job.py", RESIZE),
        ("--resize 2 --job 7 -n 2", RESIZE),
        ("--metrics-port 70000 job.py", "metrics"),  # which cannot be served there, or without a library
        # files and folders
        ("--trace= job.py", "the trace folder needs a name"),
        ("--config none.toml", "the job file none.toml cannot be read: No such file or directory"),
        ("--config hosts.toml", "give hosts or a hostfile, not both: hosts"),
    ],
)
def test_wrong_use(line: str, says: str, folder: Path, capsys: Any) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ddp-launch: ")
    assert says in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [["\x1b[2J\nddp-launch: well"], ["--log-dir=file/\x1b[2J\nddp-launch: well", "job.py"], ["--\x1b[2J\nx"]],
)
def test_what_was_asked_for_is_shown_as_text(line: list[str], folder: Path, capsys: Any) -> None:
    assert main(line) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "\\x1b[2J\\n" in said.err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--log-dir=file", "the log folder file cannot be used: "),
        ("--events=.", "the events file . cannot be written to: Is a directory"),
        ("--trace=file/below", "the trace folder "),
    ],
)
def test_where_nothing_can_be_written(option: str, says: str, folder: Path, capsys: Any) -> None:
    assert main([option, "job.py"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"ddp-launch: {says}")
    assert said.err.count("\n") == 1


def test_a_number_of_ranks_behind_the_script_is_the_scripts(folder: Path, run_job: Any) -> None:
    said = "ddp-launch: -n 2 behind job.py is an argument of it; for 2 ranks: ddp-launch -n 2 job.py\n"
    (folder / "job.py").write_text("import sys; print(sys.argv[1:])")
    done = run_job([sys.executable, "-m", "launcher", "job.py", "-n", "2"], cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['-n', '2']\n", said)
    done = run_job([sys.executable, "-m", "launcher", "-n", "1", "job.py", "-n", "2"], cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['-n', '2']\n", "")
