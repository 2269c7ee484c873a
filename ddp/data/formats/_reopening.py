"""Datasets over files are pickled by path: a worker process maps the file anew, and no sample goes through a pipe."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from ddp.data.datasets import Dataset
from ddp.errors import DataFileError, RangeError


class FileDataset(Dataset[Any]):
    """A dataset whose state is where its files are. A subclass has `_open` and `_sample`, and calls `_begin`.

    A file must not be shortened while it is mapped: the system kills a process that reads behind its end (SIGBUS).
    """

    _length: int

    def _open(self) -> tuple[Any, int]:
        """What `_sample` reads from, and how many samples there are. Raises: DataFileError"""
        raise NotImplementedError

    def _sample(self, opened: Any, place: int) -> Any:
        """Sample `place`, which is one of 0 to the length - 1, from what `_open` gave."""
        raise NotImplementedError

    def _begin(self) -> None:
        self._opened, self._length = self._open()

    @functools.cached_property
    def _opened(self) -> Any:
        opened, length = self._open()  # in another process, perhaps much later
        if length != self._length:
            raise DataFileError(f"{self!r} had {self._length} samples when it was made, and now has {length}")
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._sample(self._opened, self._place(index))

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        if type(self).__getitem__ is not FileDataset.__getitem__:
            return [self[index] for index in indices]  # a subclass says what a sample is
        opened, sample, place = self._opened, self._sample, self._place
        return [sample(opened, place(index)) for index in indices]

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise RangeError(f"{type(self).__name__}: index {place} of {self._length} samples")
        return place % self._length
