"""A small state that ranks save and read again, and a disk whose every call can be made to fail."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.communicator import Communicator
from ddp.checkpoint import checkpoint_files
from ddp.checkpoint import store as store_module
from ddp.checkpoint.checkpoint_reader import Saved
from ddp.checkpoint.state import split_evenly
from ddp.checkpoint.store import Store

Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(seed: int = 0) -> Arrays:
    """Of every kind of shape and several dtypes; not the same for two seeds."""
    rng = np.random.default_rng(seed)
    return {
        "model.weight": rng.standard_normal((7, 5)).astype(np.float32),
        "model.half": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
        "model.mask": rng.random((3, 4)) < 0.5,
        "optimizer.step": np.array(seed, np.int64),
        "optimizer.none": np.empty((0, 3)),
        "optimizer.large": rng.standard_normal(40_000),
        "rng": rng.integers(0, 2**32, 624, np.uint32),
    }


def write(store: Store, comm: Communicator, step: int, **options: Any) -> Path | None:
    """Saves `arrays(step)`, every rank its part of them."""
    whole = arrays(step)
    mine = split_evenly({name: (each.size, each.itemsize) for name, each in whole.items()}, comm.size)[comm.rank]
    return store.write(
        step,
        {name: whole[name].reshape(-1)[start:stop] for name, (start, stop) in mine.items()},
        {"seed": step, "best": float("inf")},
        {"rank": comm.rank},
        {name: (*span, whole[name].shape) for name, span in mine.items()},
        **options,
    )


def check(saved: Saved | None, step: int) -> None:
    """Fails unless that is what `write` has saved."""
    assert saved is not None
    assert (saved.step, saved.state) == (step, {"seed": step, "best": float("inf")})
    assert saved.own_state == [{"rank": rank} for rank in range(saved.size)]
    same(saved.read_all(), arrays(step))


def same(actual: Arrays, expected: Arrays) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].shape == array.shape, name
        assert actual[name].tobytes() == array.tobytes(), name


def leftovers(folder: Path) -> list[str]:
    """What is in a folder of checkpoints and is neither one nor the lock."""
    return sorted(each.name for each in folder.iterdir() if not each.name.startswith("step-") and each.name != ".lock")


CHANGES = ("open", "mkdir", "write", "fsync", "close", "rename", "unlink", "rmdir")


class Disk:
    """Stands for `os` in the modules that write, but for fsync, of which nothing can be seen.

    before, after: called with a call's number, from 1, and its name; what `before` raises is raised instead of the call
    """

    def __init__(self, before: Callable[[int, str], None] | None = None, after: Callable[[int], None] | None = None):
        self.calls: list[str] = []
        self._before = before
        self._after = after
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name == "fdopen":
            return lambda fd, mode, size: io.BufferedWriter(_File(self, fd), size)
        if name not in CHANGES and name != "listdir":
            return real

        def call(*args: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                number = len(self.calls)
                if self._before is not None:
                    try:
                        self._before(number, name)
                    except OSError:
                        if name == "close":
                            os.close(*args)
                        raise
                result = None if name == "fsync" else real(*args)
                if self._after is not None:
                    self._after(number)
            return result

        return call


class _File(io.RawIOBase):
    """A file whose calls a `Disk` makes."""

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self._fd = fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._disk.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._disk.close(self._fd)


def put_disk(monkeypatch: pytest.MonkeyPatch, **hooks: Any) -> Disk:
    """Puts a `Disk` in the place of the real one."""
    fake = Disk(**hooks)
    use_disk(monkeypatch, fake)
    return fake


def use_disk(monkeypatch: pytest.MonkeyPatch, fake: Disk) -> None:
    for module in (checkpoint_files, store_module):
        monkeypatch.setattr(module, "os", fake)
