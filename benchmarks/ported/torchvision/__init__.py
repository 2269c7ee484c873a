"""The names of torchvision that the scripts use, by whatever library `torch` is. Data are made, not downloaded."""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
