"""Workers find what their process has when they start, though their server is older; and of servers nothing is left."""

from __future__ import annotations

import colorsys
import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp.data import DataLoader, fork_server
from tests.ddp.data.samples import Around, Squares, plain
from tests.garbage import called_at_collections


def around() -> Any:
    """What a new worker has around it."""
    ((result,),) = DataLoader(Around(), num_workers=1, collate_fn=plain)
    return result


def test_what_has_changed_since_the_server_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    around()
    pid = fork_server.fork_server(()).pid
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    monkeypatch.setattr(sys, "path", [*sys.path, "/somewhere/else"])
    monkeypatch.setenv("DDP_TEST_AROUND", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # a worker has one all the same
    monkeypatch.chdir(tmp_path)
    assert around() == (["program", "--flag"], sys.path, str(tmp_path), "here", "1")
    monkeypatch.delenv("DDP_TEST_AROUND")
    assert around()[3] is None
    assert fork_server.fork_server(()).pid == pid


def test_modules_that_another_thread_imports_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fork_server.fork_server(())
    numbers = itertools.count()
    with called_at_collections(lambda: monkeypatch.setitem(sys.modules, f"ddp_test_{next(numbers)}", sys)):
        assert server.fits(set())


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Writes a module `ddp_test_edited`, whose dataset's one sample is a given text, and gives it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "ddp_test_edited"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what it says of a file's age is in seconds

    def written(value: str) -> Any:
        code = f"class Edited:\n    def __len__(self): return 1\n    def __getitem__(self, index): return {value!r}\n"
        (tmp_path / f"{name}.py").write_text(code)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    monkeypatch.setitem(sys.modules, name, None)  # so that it is gone afterwards
    del sys.modules[name]
    return written


def read(module: Any) -> Any:
    return next(iter(DataLoader(module.Edited(), num_workers=1)))


def test_a_module_that_was_loaded_again(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *map(str, range(20_000))])  # more than a variable can hold
    edited = module("old")
    assert read(edited) == ["old"]
    assert around()[0] == sys.argv
    before = iter(DataLoader(Squares(10**6), num_workers=1))
    next(before)
    server = fork_server.fork_server(())
    module("edited")
    assert read(edited) == ["old"]  # as in this process
    assert server.fits(set())
    importlib.reload(colorsys)  # as a module that the dataset's own uses
    assert not server.fits(set())
    importlib.reload(edited)
    assert read(edited) == ["edited"]
    assert next(before)[1].item() == 1  # its worker is as it was
    del sys.modules["ddp_test_edited"]
    assert read(module("anew")) == ["anew"]
