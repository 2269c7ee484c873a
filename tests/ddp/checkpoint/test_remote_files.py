"""Checkpoints at URLs: the same three stages, and whichever call of the storage fails, what was there before stays."""

from __future__ import annotations

import errno
import itertools
import sys
from typing import Any

import pytest

import collectives
import ddp
from ddp.checkpoint import Checkpointer, load_model, open_checkpoint
from ddp.checkpoint.store import Store
from ddp.data import DataLoader, TensorDataset
from ddp.errors import CheckpointError
from tests.ddp.checkpoint.stores import check, write
from tests.ddp.checkpoint.training import assert_same, everything, net

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


@pytest.mark.parametrize(("error", "for_good"), [(OSError(errno.EIO, ""), False), (RuntimeError("throttled"), True)])
def test_storage_that_fails_at_any_call(error: Exception, for_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = collectives.init()
    saved = []
    said = []
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
    shard = Memory.store["/bucket/run/step-0000000002/rank-0000.safetensors"]
    shard.seek(5000)
    shard.write(b"changed")
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
    def run(folder: str, steps: int = 0) -> dict[str, Any]:
        ddp.manual_seed(1)
        model = ddp.DataParallel(net(dropout=0.5))
        optimizer = ddp.optim.Adam(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(ddp.rand(40, 6)), batch_size=4, shuffle=True)
        options = {"model": model, "optimizer": optimizer, "every": 3, "async_save": async_save}
        with Checkpointer(folder, **options) as checkpointer:
            for (x,) in checkpointer.resume(loader, epochs=2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if checkpointer.step + 1 == steps:
                    break
        again = net(dropout=0.5)
        load_model(folder, again)
        return everything(again, [])

    whole = run("memory://whole")
    run("memory://parts", 8)
    parts = run("memory://parts")
    assert_same({**parts, "random": None}, {**whole, "random": None})
