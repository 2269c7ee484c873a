"""`--dry-run`: what would be started, as a shell takes it, and nothing is started."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.engines.mpiexec import MPICH, mpi_family

HERE = __file__


@pytest.mark.parametrize(
    ("command", "before", "then", "text"),
    [
        (["a", "b c"], {}, {}, "env \\\n    a 'b c'\n"),
        (["a"], {"X": "1", "Y": "2"}, {"X": "1", "Y": "3", "Z": ""}, "env \\\n    Y=3 \\\n    Z='' \\\n    a\n"),
        (["a"], {"PMI_RANK": "1", "X": "1"}, {"X": "1"}, "env \\\n    -u PMI_RANK \\\n    a\n"),
        (["a"], {}, {"Z": "$(rm -r /)"}, "env \\\n    Z='$(rm -r /)' \\\n    a\n"),
    ],
)
def test_a_command_as_a_shell_takes_it(
    command: list[str], before: dict[str, str], then: dict[str, str], text: str
) -> None:
    assert cli.written(command, before, then) == text


def shown(line: str, capsys: Any) -> list[str]:
    """The words of what is printed."""
    assert cli.main(["--dry-run", *shlex.split(line)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return shlex.split(said.out.replace("\\\n", ""))


def test_a_world_of_one(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PMI_RANK", "0")  # of a job that we are in
    words = shown(f"{HERE} a 'b c'", capsys)
    assert words[0] == "env"
    assert words[-5] == sys.executable
    assert words[-4].endswith("agent/main.py")
    assert words[-3:] == [HERE, "a", "b c"]
    assert words[words.index("PMI_RANK") - 1] == "-u"


def test_what_the_options_add(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = shown(f"--backend single --trace t {HERE}", capsys)
    assert {"DDP_BACKEND=single", f"DDP_TRACE={tmp_path}/t", "DDP_ATTEMPT=0", "DDP_LAUNCH_SECRET=HIDDEN"} <= {*words}
    assert {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=PORT"} <= {*words}
    assert os.listdir(tmp_path) == []  # nor is anything made


@pytest.mark.mpi
def test_the_example_in_the_documentation_is_what_is_printed(capsys: Any, monkeypatch: Any, mpiexec: list[str]) -> None:
    if mpi_family(mpiexec[0]) != MPICH:
        pytest.skip("the example is MPICH's")
    for name in [name for name in os.environ if name.startswith(("HYDRA_", "HWLOC_", "MASTER_", "SLURM_"))]:
        monkeypatch.delenv(name)
    page = (Path(HERE).parents[2] / "docs" / "launcher.md").read_text()
    example = page.partition("$ ddp-launch --dry-run -n 2 train.py\n")[2].partition("```")[0]
    written = shlex.split(example.replace("\\\n", ""))
    said = shown(f"-n 2 {HERE}", capsys)
    assert [word for word in said if "=" in word] == [word for word in written if "=" in word]
    assert len(said) == len(written)


def test_no_engine_is_no_command(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["--dry-run", "--engine", "slurm", "-n", "2", HERE]) == 2
    assert capsys.readouterr() == ("", "ddp-launch: --engine slurm: there is no srun on PATH\n")
