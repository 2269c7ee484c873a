"""What MNIST and CIFAR have in common: labelled pictures, in files of known names in one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ddp.data.formats._files import Path
from ddp.data.formats._reopening import FileDataset
from ddp.errors import DataFileError

Transform = Callable[[Any], Any] | None


class PictureDataset(FileDataset):
    """Sample i is (picture, label): an array of uint8, a read-only view of the file, and an int.

    transform, target_transform: what makes the picture, or the label, what the sample shall have
    """

    def __init__(
        self,
        folder: Path,
        train: bool = True,
        transform: Transform = None,
        target_transform: Transform = None,
    ) -> None:
        self.folder = os.path.abspath(folder)
        self.train = train
        self.transform = transform
        self.target_transform = target_transform
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.folder!r}, train={self.train})"

    def _made(self, picture: Any, label: Any) -> tuple[Any, Any]:
        return (
            picture if self.transform is None else self.transform(picture),
            label if self.target_transform is None else self.target_transform(label),
        )

    def _found(self, name: str, below: str, endings: Sequence[str] = ("",)) -> str:
        """The path of a file in the folder, or in `below` in it, where archives and PyTorch's downloads put it."""
        for folder in (self.folder, os.path.join(self.folder, below)):
            for ending in endings:
                if os.path.exists(path := os.path.join(folder, name + ending)):
                    return path
        names = " or ".join(name + ending for ending in endings)
        raise DataFileError(f"{type(self).__name__}: there is no {names} in {self.folder}, nor in {below} there")
