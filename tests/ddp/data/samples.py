"""Datasets and functions in a module, where workers find them as users' do.

All that tests give to workers is here: their server is started anew for each module that it has not yet imported.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from email.message import Message
from typing import Any, NamedTuple
from urllib.error import HTTPError

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


class Numbered(Drawn):
    """Sample i is i, and a number that is drawn for it."""

    def __init__(self) -> None:
        super().__init__(everywhere=False)

    def __getitem__(self, index: int) -> Any:
        return np.array([index, ddp.rand(1).item()])


class Augmented(Dataset[Any]):
    """Sample i is (i, six numbers, a class); noise: how much random numbers change the numbers."""

    def __init__(self, length: int, noise: float = 0.0) -> None:
        self.length = length
        self.noise = noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        x = np.random.default_rng(index).standard_normal(6)
        noise = ddp.randn(6, dtype=ddp.float64).numpy()
        return index, x + self.noise * noise, int(np.abs(x).argmax() % 3)


class Failing(Dataset[Any]):
    """Sample 5 cannot be had while `fails`. how: "raise", "kill", "exit", "hang" or "slow"."""

    fails = True

    def __init__(self, how: str, kind: Any = ValueError) -> None:
        self.how = how
        self.kind = kind

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 5 and self.fails:
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


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError


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
        self.length = length
        self.at = 0
        self.seeks = 0

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


class Epoch(Dataset[Any]):
    """Two samples: the epoch that was set, and the pid of who reads them."""

    epoch = 0
    handle = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return np.array([self.epoch, os.getpid()])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class EpochStream(IterableDataset[Any]):
    """The same as a stream."""

    epoch = 0
    handle = None
    set_epoch = Epoch.set_epoch

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            yield np.array([self.epoch, os.getpid()])


class Objects(Squares):
    """No sample can be part of a batch."""

    def __getitem__(self, index: int) -> Any:
        return object()


class LongIndices(Squares):
    """Its errors are long."""

    def __getitems__(self, indices: list[int]) -> Any:
        raise ValueError(f"none of {indices}")


class Dictlike(Exception):
    """Answers for attributes that it has not with an error of another kind."""

    def __init__(self, info: dict[str, Any]) -> None:
        super().__init__("dictlike")
        self.info = info

    def __getattr__(self, name: str) -> Any:
        return self.info[name]


class Client(Exception):
    """Has a constructor and methods of its own, all of which need what it was made of."""

    def __new__(cls, code: int, operation: str) -> Client:
        return super().__new__(cls, operation)

    def __init__(self, code: int, operation: str) -> None:
        super().__init__(f"{operation} failed with {code}")
        self.response = {"code": code}
        self.lock = threading.Lock()  # which cannot be pickled

    def __repr__(self) -> str:
        return f"Client({self.lock})"

    @property
    def code(self) -> Any:
        return self.response["code"]


def http_error() -> Exception:
    return HTTPError("http://x/a.jpg", 404, "gone", Message(), None)


def client_error() -> Exception:
    return Client(7, "read")


def dictlike_error() -> Exception:
    return Dictlike({})


def syntax_error() -> Exception:
    return SyntaxError("invalid", ("a.json", 3, 1, "{", 3, 2))


def decode_error() -> Exception:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


class Raising(Dataset[Any]):
    """The one sample raises `make()`."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise self.make()


class RaisingStream(IterableDataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        raise self.make()


def raise_http_error(argument: Any) -> Any:
    """A collate_fn or worker_init_fn."""
    raise http_error()


def mark(worker: int) -> None:
    Whoami.marks = 10 + worker


def refuse(worker: int) -> None:
    raise ValueError(f"worker {worker} will not begin")


def broken(samples: Any) -> Any:
    """A collate_fn that fails."""
    return 1 / 0


def plain(samples: Any) -> Any:
    """A collate_fn that gives what it got."""
    return samples


def long_text(samples: Any) -> Any:
    return ["words " * 2000, len(samples)]
