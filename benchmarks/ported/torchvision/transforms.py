"""Transforms of PIL images and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


class ToTensor:
    """An image of 0 to 255 as (C, H, W) of 0 to 1."""

    def __call__(self, image: Any) -> Any:
        array = np.asarray(image)
        array = array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))
        return torch.from_numpy(array.copy()).to(torch.get_default_dtype()).div(255)


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, x: Any) -> Any:
        mean, std = (torch.tensor(numbers, dtype=x.dtype).view(-1, 1, 1) for numbers in (self.mean, self.std))
        return x.sub(mean).div(std)


class Lambda:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


class Resize:
    """A PIL image so that its shorter side has `size` pixels."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        scale = self.size / min(image.size)
        return image.resize([round(side * scale) for side in image.size])


class CenterCrop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        left, top = ((side - self.size) // 2 for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))
