"""Files as their authors publish them, written here byte by byte."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: Array) -> bytes:
    code = CODES[array.dtype.str[1:]]
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def mnist(folder: Path, packed: bool = False, counts: tuple[int, int] = (7, 3)) -> dict[str, tuple[Array, Array]]:
    """The four files, packed or not: their pictures and labels, by what their names begin with."""
    found = {}
    rng = np.random.default_rng(0)
    for part, count in zip(("train", "t10k"), counts, strict=True):
        pictures = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = rng.integers(0, 10, count, np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", pictures), (f"{part}-labels-idx1-ubyte", labels)):
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
        found[part] = pictures, labels
    return found


def cifar(labels: Array, seed: int = 0) -> tuple[bytes, Array]:
    """The bytes of a file of CIFAR with these labels, (N, 1) or (N, 2), and its pictures."""
    pictures = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    return np.hstack([labels.astype(np.uint8), pictures.reshape(len(labels), -1)]).tobytes(), pictures
