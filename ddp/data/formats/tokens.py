"""A flat file of tokens, as language models are trained on: nothing but numbers, cut into blocks when they are read."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ddp.data.formats._files import Array, DataFile, Path
from ddp.data.formats._reopening import FileDataset
from ddp.errors import ArgumentError, DtypeError


class TokenFile(FileDataset):
    """A file of tokens, mapped: sample i is (input, target), (block_size) int64 each, the target one token further on.

    path: the tokens, and nothing else
    dtype: of the tokens in the file: any integers, such as "uint16", or ">u2" for big-endian ones
    block_size: tokens of an input
    stride: tokens from the beginning of a block to that of the next; None: block_size, so that each token is a target
    once. What is left at the end of the file, less than a block, is no sample.

    Raises: DataFileError for a file that does not hold whole tokens, or none for a single block.
    """

    def __init__(self, path: Path, dtype: Any, block_size: int, stride: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "iu":
            raise DtypeError(f"TokenFile: expected a dtype of integers, got {self.dtype}")
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        if self.block_size < 1 or self.stride < 1:
            raise ArgumentError(
                f"TokenFile: expected a block_size and a stride of 1 or more, got {block_size} and {stride}"
            )
        self.path = os.path.abspath(path)
        self._begin()

    def __repr__(self) -> str:
        return f"TokenFile({self.path!r}, {str(self.dtype)!r}, {self.block_size}, {self.stride})"

    def _open(self) -> tuple[Array, int]:
        file = DataFile(self.path)
        size = len(file.data)
        count, left = divmod(size, self.dtype.itemsize)
        if left:
            file.fail(f"expected {self.dtype} of {self.dtype.itemsize} bytes, and {left} are left", size - left)
        if count <= self.block_size:
            what = f"expected {self.block_size + 1} tokens, a block and its target, and the file ends after {count}"
            file.fail(what, size)
        return file.array(self.dtype, (count,)), (count - 1 - self.block_size) // self.stride + 1

    def _sample(self, opened: Array, place: int) -> tuple[Array, Array]:
        begin = place * self.stride
        tokens = opened[begin : begin + self.block_size + 1].astype(np.int64)
        return tokens[:-1], tokens[1:]
