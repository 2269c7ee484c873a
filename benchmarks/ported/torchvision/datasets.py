"""Data sets: scikit-learn's digits in the shape of MNIST, and noise in the shape of photographs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

SIZES = {True: 384, False: 128}  # of training and test data


class MNIST(torch.utils.data.Dataset):
    """Digits of 28x28, grey: those of scikit-learn, enlarged. data: (N, 28, 28) uint8; targets: (N,) int64."""

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        digits = load_digits()
        part = slice(SIZES[True]) if train else slice(SIZES[True], SIZES[True] + SIZES[False])
        images = np.kron(digits.images[part] * (255 / 16), np.ones((3, 3))).astype(np.uint8)
        self.data = torch.from_numpy(np.pad(images, ((0, 0), (2, 2), (2, 2))))
        self.targets = torch.from_numpy(digits.target[part].astype(np.int64))
        self.transform = transform
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = Image.fromarray(self.data[index].numpy())
        target = int(self.targets[index])
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)


class FakeData(torch.utils.data.Dataset):
    """Noise: `size` pictures of (C, H, W) with one of `num_classes` labels."""

    def __init__(
        self,
        size: int = 96,
        image_size: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.size = size
        self.image_size = image_size
        self.num_classes = num_classes
        self.transform = transform

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        rng = np.random.default_rng(index)
        channels, height, width = self.image_size
        image = Image.fromarray(rng.integers(256, size=(height, width, channels), dtype=np.uint8))
        return image if self.transform is None else self.transform(image), int(rng.integers(self.num_classes))
