"""Wrong use: one clear sentence on stderr, exit code 2, and nothing has been started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main, parse
from launcher.errors import UsageError

FILES = {
    "job.py": "",
    "file": "",
    "hosts": "a:2\nb\n",
    "bad_hosts": "a:2\n\nb slots=many\n",
    "no_hosts": "# none\n",
    "syntax.toml": "[launch]\nn = \n",
    "key.toml": '[launch]\nscirpt = "job.py"\n',
    "table.toml": "[lanch]\nn = 2\n",
    "flag.toml": "[launch]\nbind = 1\n",
    "kind.toml": "[launch]\nn = true\n",
    "list.toml": '[launch]\nranks = [0, "a"]\n',
    "words.toml": '[launch]\nargs = "--lr 1"\n',
    "notable.toml": "launch = 3\n",
    "nested.toml": "[args]\nmodel.width = 3\n",
    "both.toml": '[launch]\nmodule = "a"\nscript = "job.py"\n',
    "hosts.toml": '[launch]\nscript = "job.py"\nhosts = "a:2"\nhostfile = "hosts"\n',
    "latin.toml": b"[launch]\nscript = 'caf\xe9'\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no script to run: ddp-launch [-n N] SCRIPT ARGS... (ddp-launch --help shows more)"),
        ("no_such.py", "there is no script no_such.py"),
        (".", ". is a directory, not a Python script"),
        # options
        ("--grase 3 job.py", "unknown option --grase (did you mean --grace?)"),
        ("--set n=2 job.py", "unknown option --set\n"),
        ("-max-restarts 3 job.py", "unknown option -max-restarts (did you mean --max-restarts?)"),
        ("-n", "-n/-np expected one argument"),
        ("--help=3", "--help/-h ignored explicit argument '3'"),
        ("--bind=yes job.py", "--bind ignored explicit argument 'yes'"),
        # numbers
        ("-n x job.py", "-n/-np should be a whole number of ranks, or gpu, not 'x'"),
        ("--nproc_per_node 2 job.py", "unknown option --nproc_per_node (did you mean -n N?)"),
        ("--nnodes 2 job.py", "unknown option --nnodes (did you mean --hosts?)"),
        ("-n 0 job.py", "the number of ranks must be at least 1, not 0"),
        ("--grace -1 job.py", "the grace must be a number of seconds, zero or more, not -1"),
        ("--grace nan job.py", "the grace must be a number of seconds, zero or more, not nan"),
        ("--grace soon job.py", "--grace should be a number of seconds, not 'soon'"),
        ("--start-limit 0 job.py", "the start limit must be a number of seconds above zero, not 0"),
        ("--timeout -1 job.py", "the time limit must be a number of seconds above zero, not -1"),
        ("--hang-timeout -1 job.py", "the hang time limit must be a number of seconds above zero, not -1"),
        ("--hang-timeout of job.py", "--hang-timeout should be a number of seconds, or off, not 'of'"),
        ("--max-restarts many job.py", "--max-restarts should be a whole number, not 'many'"),
        # ranks
        ("-n 2 --ranks 0,9 job.py", "rank 9 cannot be shown: the job has 2 ranks, counted from 0"),
        ("-n 2 --ranks 0- job.py", "--ranks should be ranks, as in 0,3, not '0-'"),
        ("-n 2 --debug-rank 2 job.py", "rank 2 cannot be debugged: the job has 2 ranks, counted from 0"),
        ("--hosts a:2 --ranks 2 job.py", "rank 2 cannot be shown: the job has 2 ranks, counted from 0"),
        ("--hosts a:2 --min-ranks 3 job.py", "the smallest number of ranks must be from 1 to 2, not 3"),
        ("-n 4 --min-ranks 2 job.py", "the smallest number of ranks (min_ranks) needs hosts to do without"),
        ("--debug-rank 1 job.py", "rank 1 cannot be debugged: the job has 1 rank, counted from 0"),
        # hosts
        ("--hosts a:2,b -n 4 job.py", "4 ranks were asked for, and the hosts have 3 slots"),
        ("--hosts a:b job.py", "--hosts: 'a:b' is not understood"),
        ("--hostfile none job.py", "the hostfile none cannot be read: No such file or directory"),
        ("--hostfile bad_hosts job.py", "bad_hosts, line 3: 'b slots=many' is not understood"),
        ("--hostfile no_hosts job.py", "the hostfile no_hosts names no host"),
        ("--hosts a:2 --hostfile hosts job.py", "give hosts or a hostfile, not both: hosts"),
        # choices
        ("--engine lam job.py", "the engine should be one of auto, local, mpich, openmpi, slurm, not 'lam'"),
        ("--backend gloo job.py", "the backend should be one of auto, single, mpi, nccl, not 'gloo'"),
        (
            "-n gpu --hosts a:8,b:8 job.py",
            "-n gpu counts the GPUs of this machine, not those of hosts: give every host ",
        ),
        # files and folders
        ("--trace= job.py", "the trace folder needs a name"),
        ("--log-dir= job.py", "the log folder needs a name"),
        ("--events= job.py", "the events file needs a name"),
        # job files
        ("--config none.toml", "the job file none.toml cannot be read: No such file or directory"),
        ("--config syntax.toml", "syntax.toml is not valid TOML: "),
        ("--config latin.toml", "latin.toml is not valid TOML: "),
        ("--config key.toml", "key.toml: unknown key in [launch]: scirpt (did you mean script?)"),
        ("--config table.toml", "table.toml: unknown table lanch (did you mean launch?)"),
        ("--config notable.toml", "notable.toml: launch should be a table: [launch]"),
        ("--config flag.toml", "flag.toml: bind should be true or false, not 1"),
        ("--config kind.toml", "kind.toml: n should be a whole number of ranks, or gpu, not 'true'"),
        ("--config list.toml", "list.toml: ranks should be ranks, as in 0,3, not '0,a'"),
        ("--config words.toml", "words.toml: args should be a list of strings, not '--lr 1'"),
        (
            "--config nested.toml",
            "nested.toml: model in [args] should be a string, a number, a boolean or a list",
        ),
        ("--config both.toml", "give a script or a module, not both: job.py and -m a"),
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
    ("option", "says"),
    [
        ("--log-dir=file", "the log folder file cannot be used: "),
        ("--events=.", "the events file . cannot be written to: Is a directory"),
        ("--events=none/e", "the events file none/e cannot be written to: No such file or directory"),
        ("--trace=file/below", "the trace folder "),
    ],
)
def test_where_nothing_can_be_written(option: str, says: str, folder: Path, run_job: Any) -> None:
    done = run_job([sys.executable, "-m", "launcher", option, "job.py"], cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ddp-launch: {says}")
    assert done.stderr.count("\n") == 1


def test_a_script_that_may_not_be_read(folder: Path, monkeypatch: Any) -> None:
    # Root may everything: the system's answer is put in its place.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match=r"^the script job\.py cannot be read$"):
        parse(["job.py"])
