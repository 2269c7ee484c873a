"""Checkpoints at URLs: the same three stages, and whichever call of the storage fails, what was there before stays."""

from __future__ import annotations

import errno
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives.communicator import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer, load_model, open_checkpoint
from ddp.checkpoint.store import Store
from ddp.data import DataLoader, TensorDataset
from ddp.errors import CheckpointError
from tests.ddp.checkpoint.stores import check, write

Memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
RUN = "memory://bucket/run"
CALLS = ("_open", "info", "ls", "makedirs", "rm_file")


def clear() -> None:
    Memory.store.clear()
    Memory.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def _clear() -> None:
    clear()


def files() -> list[str]:
    """What is in the bucket, but for the lock's file."""
    return sorted(path.removeprefix("/bucket/run/") for path in Memory.store if not path.endswith("/.lock"))


def saved_by_one(*steps: int) -> Store:
    store = Store(RUN, collectives.init(), keep=2)
    for step in steps:
        write(store, collectives.init(), step)
    return store


@pytest.mark.parametrize(("kind", "ranks"), [("memory", 1), ("file", 1), ("local", 3)])
def test_what_was_written_is_read(kind: str, ranks: int, tmp_path: Path) -> None:
    folder = RUN if kind == "memory" else f"{kind}://{tmp_path}/a/run"

    def main(comm: Communicator) -> None:
        store = Store(folder, comm, keep=2)
        assert store.newest() is None
        for step, name in ((3, "3"), (4, "4"), (5, "5"), (4, "4.2")):
            assert write(store, comm, step) == f"{folder}/step-000000000{name}"
        saved = store.newest()
        check(saved, 4)
        assert saved is not None
        assert (saved.size, saved.path) == (ranks, f"{folder}/step-0000000004.2")
        check(store.find(f"{folder}/step-0000000005"), 5)
        with pytest.raises(CheckpointError, match=r"no checkpoint in|No such file"):
            store.find(f"{folder}/step-0000000003")
        store.close()

    collectives.run_threads(main, size=ranks)


@pytest.mark.parametrize(("error", "for_good"), [(OSError(errno.EIO, ""), False), (RuntimeError("throttled"), True)])
def test_storage_that_fails_at_any_call(error: Exception, for_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = collectives.init()
    saved: list[bool] = []
    said: list[str] = []
    for number in itertools.count(1):
        clear()
        store = saved_by_one(0, 1)
        calls = itertools.count(1)

        def failing(real: Any, calls: Any = calls, number: int = number) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                at = next(calls)
                if at == number or (for_good and at > number):
                    raise error
                return real(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(Memory, name, failing(getattr(Memory, name)))
            try:
                saved.append(write(store, comm, 2) is not None)
            except CheckpointError as failure:
                saved.append(False)
                said.append(str(failure))
        check(store.newest(), 2 if saved[-1] else 1)
        if not saved[-1]:
            write(store, comm, 2)  # over what was left, which is no checkpoint
            check(store.newest(), 2)
        for step in (3, 4):
            write(store, comm, step)
        assert {each.partition("/")[0] for each in files()} == {"step-0000000003", "step-0000000004"}
        store.close()
        if next(calls) <= number:
            break  # no call was left to fail
    assert (saved[0], saved[-1], len(said)) == (False, True, saved.count(False))
    assert all("of step 2 was not saved, those before are as they were: rank 0: " in each for each in said)


def test_what_cannot_be_read_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved_by_one(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Memory, "_open", lambda *args, **options: (_ for _ in ()).throw(PermissionError("Access Denied")))
        with pytest.raises(CheckpointError, match=r"cannot be loaded: rank 0: .*manifest.json: Access Denied"):
            store.newest()
    Memory.store["/bucket/run/step-0000000002/rank-0000.safetensors"].seek(5000)
    Memory.store["/bucket/run/step-0000000002/rank-0000.safetensors"].write(b"changed")
    check(store.newest(), 1)
    store.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [(RUN, "URLs go through fsspec, which is missing: pip install"), ("no://run", "no://run.*: Protocol not known")],
)
def test_a_url_that_cannot_be_opened(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if url == RUN:
        monkeypatch.setitem(sys.modules, "fsspec.core", None)
    for attempt in (lambda: Store(url, collectives.init()), lambda: open_checkpoint(url)):
        with pytest.raises(CheckpointError, match=said):
            attempt()


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_goes_on_where_it_was(async_save: bool) -> None:
    def run(folder: str, steps: int) -> dict[str, np.ndarray[Any, Any]]:
        ddp.manual_seed(1)
        model = ddp.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
        optimizer = ddp.optim.Adam(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(ddp.rand(40, 4), ddp.rand(40, 1)), batch_size=4, shuffle=True)
        options: dict[str, Any] = {"model": model, "optimizer": optimizer, "every": 3, "async_save": async_save}
        with Checkpointer(folder, **options) as checkpointer:
            for x, y in checkpointer.resume(loader, epochs=2):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                if checkpointer.step + 1 == steps:
                    break
        again = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        load_model(folder, again)
        return {name: value.numpy() for name, value in again.state_dict().items()}

    whole = run("memory://whole", 0)
    run("memory://parts", 8)
    parts = run("memory://parts", 0)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
