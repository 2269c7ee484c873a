"""Datasets of NumPy's own files, mapped: what is larger than memory can be read, and every process shares one copy.

A member of an .npz that was stored as it is (`numpy.savez`) lies in the archive as an .npy file would, and is mapped
there; a compressed one (`numpy.savez_compressed`) is unpacked into memory, by every process that reads from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ddp.data.formats._files import Array, DataFile, Path
from ddp.data.formats._npy import declared
from ddp.data.formats._reopening import FileDataset
from ddp.data.formats._samples import element
from ddp.data.formats._zip import members
from ddp.errors import ArgumentError, DataFileError


class _Columns(FileDataset):
    """Sample i is a tuple of element i of each array."""

    def _arrays(self) -> Mapping[str, Array]:
        """The arrays, by what errors call them. Raises: DataFileError"""
        raise NotImplementedError

    def _open(self) -> tuple[tuple[Array, ...], int]:
        arrays = self._arrays()
        shapes = {name: array.shape for name, array in arrays.items()}
        if not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            raise DataFileError(f"{self!r}: expected arrays of one length in dimension 0, found shapes {shapes}")
        columns = tuple(arrays.values())
        return columns, len(columns[0])

    def _sample(self, opened: tuple[Array, ...], place: int) -> tuple[Any, ...]:
        return tuple([element(column, place) for column in opened])


class NpyDataset(_Columns):
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

    def _arrays(self) -> dict[str, Array]:
        found = {}
        for path in self.paths:
            with DataFile(path) as file:
                found[path] = file.mapped(*declared(file))
        return found


class NpzDataset(_Columns):
    """Sample i is a tuple of element i of each array of an .npz file.

    names: of the arrays, in the order of the tuple, (N, ...) each, of one N; none: all, in the order of the file
    What was stored as it is (`numpy.savez`) is mapped, what is compressed is read into memory. Of a mapped array, the
    archive's checksum is not looked at. Samples are like those of an `NpyDataset`.

    Raises: DataFileError for a file that is anything else, or has no such array.
    """

    def __init__(self, path: Path, *names: str) -> None:
        self.path = os.path.abspath(path)
        self.names = names
        self._begin()

    def __repr__(self) -> str:
        return f"NpzDataset({', '.join(map(repr, (self.path, *self.names)))})"

    def _arrays(self) -> dict[str, Array]:
        with DataFile(self.path) as file:
            there = members(file)
        found = {}
        for name in self.names or there:
            if name not in there:
                raise DataFileError(f"{self.path}: there is no array {name!r} in it, but {', '.join(there)}")
            with DataFile(self.path) as file:
                member = there[name]
                file.enter(member.begin, member.size, member.checksum)
                dtype, shape, order = declared(file)
                found[name] = (file.rest if file.packed else file.mapped)(dtype, shape, order)
        return found
