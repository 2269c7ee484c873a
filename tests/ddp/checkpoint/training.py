"""A small training, whole or interrupted, and everything that can be compared afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import collectives
import ddp
from collectives.communicator import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer
from ddp.data import DataLoader, DistributedSampler
from ddp.optim import SGD
from tests.ddp.data.samples import Augmented

ROWS = 24


class Loader:
    """Batches in an order of its own for each pass; a rank's part of each. What `resume` asks of a loader, no more.

    When a pass begins it draws a number, as PyTorch's loader does for the seed of its workers.
    batch: samples that all ranks take together
    """

    def __init__(self, comm: Communicator, rows: int = ROWS, batch: int = 8) -> None:
        self._comm = comm
        self._rows = rows
        self._batch = batch
        self.epoch = 0
        self._at = 0
        self._given: int | None = None

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        ddp.rand(1)
        self._at = self._given or 0
        self._given = None
        return self._batches()

    def _batches(self) -> Iterator[np.ndarray[Any, Any]]:
        order = np.random.default_rng([5, self.epoch]).permutation(self._rows)
        while self._at < self._rows:
            ids = order[self._at : self._at + self._batch]
            self._at += self._batch
            yield ids[self._comm.rank :: self._comm.size]
        self.epoch = self.epoch + 1
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]
        self._given = state["at"]


class Interrupted(Exception):
    """The process ends here."""


def data(dtype: Any = ddp.float32) -> tuple[ddp.Tensor, ddp.Tensor]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, 6))
    return ddp.tensor(x, dtype=dtype), ddp.tensor(np.abs(x).argmax(axis=1) % 3)


def net(dropout: float = 0.0, norm: bool = False, dtype: Any = ddp.float32) -> nn.Module:
    ddp.manual_seed(11)
    layers = [nn.Linear(6, 8)]
    if norm:
        layers.append(nn.BatchNorm1d(8))
    layers.append(nn.ReLU())
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(8, 3)).to(dtype)


def everything(model: Any, optimizers: Sequence[Any], *others: Any) -> dict[str, Any]:
    """All state, as NumPy arrays and plain values, to be compared bit for bit."""
    by_name = {f"model.{name}": t.numpy().copy() for name, t in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        told = optimizer.state_dict()
        for at, entry in told["state"].items():
            for name, value in entry.items():
                by_name[f"{number}.{at}.{name}"] = value.numpy().copy() if isinstance(value, ddp.Tensor) else value
        by_name[f"{number}.groups"] = repr(told["param_groups"])
    for number, other in enumerate(others):
        by_name[f"other.{number}"] = repr(other)
    by_name["random"] = ddp._device.random_state()
    return by_name


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert got[name].dtype == value.dtype, name
            assert got[name].tobytes() == value.tobytes(), name
        else:
            assert got[name] == value, name


Train = Callable[..., Any]


def interrupted(train: Train, ends: Sequence[int | None], size: int | Sequence[int]) -> list[list[Any]]:
    """Calls `train(comm, end)` with each end, on so many ranks; it raises Interrupted in the body of step `end`.

    Returns: for each end, what the ranks returned, or raised Interrupted with
    """
    sizes = [size] * len(ends) if isinstance(size, int) else size

    def run(comm: Communicator, end: int | None) -> Any:
        try:
            return train(comm, end)
        except Interrupted as error:
            comm.barrier()  # others may still be in their last backward
            return error.args[0]

    return [
        collectives.run_threads(lambda comm, end=end: run(comm, end), size=each)
        for end, each in zip(ends, sizes, strict=True)
    ]


SAMPLES = 22


def training_on_samples(
    folder: Path, make: Any = None, *, noise: float = 0.0, dropout: float = 0.0, **options: Any
) -> Train:
    """Trains for 3 passes of batches of 8, of which a rank has its part, and the last has 6; see `interrupted`.

    Returns, or is interrupted with, the loss of all ranks by step, the samples that this rank had, and `everything`.
    make: an optimizer of the model; options: of the loader
    """

    def train(comm: Communicator, end: int | None) -> Any:
        model = ddp.DataParallel(net(dropout, dtype=ddp.float64), comm)
        optimizer = make(model) if make else SGD(model.parameters(), lr=0.1, momentum=0.9)
        ddp.manual_seed(50 + comm.rank)
        samples = Augmented(SAMPLES, noise)
        sampler = DistributedSampler(samples, comm=comm, tail="exact")
        loader = DataLoader(samples, 8 // comm.size, sampler=sampler, **options)
        losses = {}
        seen = []
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm, every=1) as ckpt:
            for ids, x, y in ckpt.resume(loader, epochs=3):
                if ckpt.step == end:
                    raise Interrupted((losses, seen))
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                model.backward(loss, weight=len(ids))
                optimizer.step()
                losses[ckpt.step] = comm.all_reduce(np.array(loss.item())).item()
                seen += [(loader.epoch, int(each)) for each in ids]
        return losses, seen, everything(model, [optimizer])

    return train


def all_samples(parts: Sequence[Any]) -> bool:
    """Whether each sample was had once in each of 3 passes. parts: results of `interrupted`"""
    seen = Counter(each for part in parts for rank in part for each in rank[1])
    return seen == Counter((epoch, sample) for epoch in range(3) for sample in range(SAMPLES))
