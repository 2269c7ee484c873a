"""Datasets of NumPy's own files, mapped: what is larger than memory can be read, and every process shares one copy."""

from __future__ import annotations

import os
from typing import Any

from ddp.data.formats._files import Array, DataFile, Path
from ddp.data.formats._npy import declared
from ddp.data.formats._reopening import FileDataset
from ddp.data.formats._samples import element
from ddp.errors import ArgumentError, DataFileError


class NpyDataset(FileDataset):
    """Sample i is a tuple of element i of each file, as with `TensorDataset`.

    paths: .npy files, (N, ...) each, of one N; they are mapped, and the arrays of a sample are read-only views of them
    An element of a structured dtype comes as a dict by field. An array in Fortran order has its samples' elements far
    apart, and is slow to read.

    Raises: DataFileError for a file that is anything else, also for Python objects, since no pickle is ever loaded;
    ArgumentError without a path, or for one given twice.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = tuple(os.path.abspath(path) for path in paths)
        if not paths or len(set(self.paths)) < len(paths):
            raise ArgumentError(
                f"NpyDataset: expected one path or more, each once, got {', '.join(self.paths) or 'none'}"
            )
        self._begin()

    def __repr__(self) -> str:
        return f"NpyDataset({', '.join(map(repr, self.paths))})"

    def _open(self) -> tuple[tuple[Array, ...], int]:
        columns = []
        for path in self.paths:
            file = DataFile(path)
            columns.append(file.array(*declared(file)))
        shapes = {path: column.shape for path, column in zip(self.paths, columns, strict=True)}
        if not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            raise DataFileError(f"{self!r}: expected arrays of one length in dimension 0, found shapes {shapes}")
        return tuple(columns), len(columns[0])

    def _sample(self, opened: tuple[Array, ...], place: int) -> tuple[Any, ...]:
        return tuple([element(column, place) for column in opened])
