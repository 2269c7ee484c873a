"""Datasets and functions in a module, where workers find them as users' do."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import ddp
from ddp.data import Dataset, IterableDataset, get_worker_info


class Pair(NamedTuple):
    x: Any
    word: Any


class Squares(Dataset[Any]):
    """Sample i is (i, i²) in an array, and i. reads: indices that this process has asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return np.array([index, index**2], np.float32), index


class Mixed(Dataset[Any]):
    """All that a sample can be made of."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return {
            "array": np.full((2, 3), index, np.int16),
            "pair": Pair(ddp.full((2,), float(index), dtype=ddp.bfloat16), f"word {index}"),
            "number": index / 2,
            "list": [index, True],
        }


class Drawn(Dataset[Any]):
    """Random numbers of every kind that a worker can draw."""

    def __init__(self, everywhere: bool) -> None:
        self.everywhere = everywhere

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        own = ddp.rand(2).numpy()
        return (own, np.random.rand(), random.random()) if self.everywhere else own


class Failing(Dataset[Any]):
    """Sample 5 cannot be had. how: "raise", "kill", "exit", "hang" or "slow"."""

    def __init__(self, how: str, kind: Any = ValueError) -> None:
        self.how, self.kind = how, kind

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            if self.how == "raise":
                raise self.kind("sample five is rotten")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(7)
            if self.how == "hang":
                time.sleep(100)
            time.sleep(0.3)
        return np.array(index)


class Stream(IterableDataset[Any]):
    """`length` numbers, of which a worker gives every n-th from its own on."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            yield np.array([number]), ddp.rand(1).numpy()


class Counted(IterableDataset[Any]):
    """A stream that knows where it is. seeks: how often it was told where to go on."""

    def __init__(self, length: int) -> None:
        self.length, self.at, self.seeks = length, 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield np.array([self.at - 1, self.seeks, os.getpid()])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
        self.seeks += 1


class Whoami(Dataset[Any]):
    """Who reads a sample: (index, pid, worker, number of workers, marks set by `mark`)."""

    marks = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is None or type(info.dataset) is Whoami
        here = (-1, 0) if info is None else (info.id, info.num_workers)
        return np.array([index, os.getpid(), *here, Whoami.marks])


class Around(Dataset[Any]):
    """What the process that reads it has around it: argv, path, folder, and a variable of the environment."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return sys.argv, sys.path, os.getcwd(), os.environ.get("DDP_TEST_AROUND"), os.environ["OMP_NUM_THREADS"]


def mark(worker: int) -> None:
    Whoami.marks = 10 + worker


def refuse(worker: int) -> None:
    raise ValueError(f"worker {worker} will not begin")


def plain(samples: list[Any]) -> Any:
    """A collate_fn that gives what it got."""
    return samples


def long_text(samples: list[Any]) -> Any:
    return ["words " * 2000, len(samples)]
