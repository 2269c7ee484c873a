"""What the README and the docs show is run as a reader would paste it."""

from __future__ import annotations

import builtins
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import collectives.errors
import ddp.errors
from tests.conftest import ROOT, Run
from tests.docs.blocks import Block, programs
from tests.docs.snippets import names_from_before, names_made

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = [pytest.param(program, id=program[0].place) for file in FILES for program in programs(file)]
# Those that need a library of the extra `recipes`, which a word of their first block names.
LIBRARIES = ("datasets", "fsspec", "webdataset")
RECIPES = [program for program in PROGRAMS if set(program.values[0][0].words) & set(LIBRARIES)]
PLAIN = [program for program in PROGRAMS if program not in RECIPES]
# Pages that are about several ranks.
ON_TWO_RANKS = ("README.md", "data-parallel.md", "checkpoints.md")


# Each program has a process of its own, but they share the imports of what all of them import.
FORKED = """
import os, runpy, sys
import collectives, ddp
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, path
"""


# Those of pages about several ranks run on two, below; the README promises that its own run on one, too.
@pytest.mark.parametrize("page", sorted({program.values[0][0].page for program in PLAIN} - {*ON_TWO_RANKS[1:]}))
def test_programs_run(page: str, run_job: Run, tmp_path: Path) -> None:
    names = []
    for (program,) in (each.values for each in PLAIN):
        if program[0].page == page:
            names.append(f"line-{program[0].line}.py")
            code = "\n".join(block.code for block in program if "gpu" not in block.words)
            (tmp_path / names[-1]).write_text(code)
    (tmp_path / "train.py").write_text("")  # what a block about launching launches
    run_job([sys.executable, "-c", FORKED, *names], cwd=tmp_path, code=0)


@pytest.mark.mpi
@pytest.mark.parametrize("program", [program for program in PLAIN if program.values[0][0].page in ON_TWO_RANKS])
def test_a_program_runs_on_two_ranks(program: list[Block], run_job: Run, tmp_path: Path) -> None:
    code = "\n".join(block.code for block in program)
    (tmp_path / "program.py").write_text(code)
    for _ in range(2 if "Checkpointer" in code else 1):  # the second finds what the first has saved
        run_job([sys.executable, "-m", "launcher", "-n", "2", "program.py"], cwd=tmp_path, code=0)


@pytest.mark.mpi
@pytest.mark.long  # each process imports a library for seconds, and the libraries take long to install
@pytest.mark.timeout(220)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", RECIPES)
def test_a_recipe_runs(program: list[Block], ranks: int, run_job: Run, tmp_path: Path) -> None:
    library = program[0].words[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} of the extra recipes is not installed")
    (tmp_path / "program.py").write_text("\n".join(block.code for block in program))
    run_job([sys.executable, "-m", "launcher", "-n", str(ranks), "program.py"], timeout=200, cwd=tmp_path, code=0)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_makes_the_names_that_it_uses(program: list[Block]) -> None:
    defined = set(dir(builtins))
    for block in program:
        unknown = [name for name in names_from_before(block.code) if name not in defined]
        assert not unknown, f"{block.place} uses {unknown}, which nothing above it on the page has made"
        defined |= names_made(block.code)


@pytest.mark.parametrize("errors", [collectives.errors, ddp.errors])
def test_hints_name_what_works_from_where_the_user_stands(errors: Any, monkeypatch: Any) -> None:
    assert errors.how_to_install("mpich") == f"pip install -e '{ROOT}[mpich]'"
    with monkeypatch.context() as patch:
        patch.setattr(errors.os.path, "exists", lambda path: False)  # as in site-packages
        assert errors.how_to_install("mpich") == "pip install 'ddp-runtime[mpich]'"


def test_links_between_files_lead_somewhere() -> None:
    for file in FILES:
        for target in re.findall(r"\]\(([^)#]+)", file.read_text()):
            if "://" not in target:
                assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_the_messages_of_troubleshooting_exist() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    code = "".join(
        path.read_text() for name in ("collectives", "ddp", "launcher") for path in (ROOT / name).rglob("*.py")
    )
    code = re.sub(r'"\s+f?"', "", code)  # a message that goes on in the next line
    for message in re.findall(r"^\| `([^`]+)`", text, re.M):
        assert message in code, f"no error says {message!r}"


def test_the_page_of_examples_has_them_all() -> None:
    shown = re.findall(r"^\| \[([\w.]+)\]\(\.\./examples/\1\)", (ROOT / "docs/examples.md").read_text(), re.M)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_file())


def test_the_parts_of_the_readme_that_the_index_includes_are_there() -> None:
    readme = (ROOT / "README.md").read_text()
    marks = re.findall(r'^:(?:start-after|end-before): "(.*)"$', (ROOT / "docs/index.md").read_text(), re.M)
    assert [mark for mark in marks if mark not in readme] == []
    assert len(marks) == 6
