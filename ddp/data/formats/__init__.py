"""Readers of real files: IDX, CIFAR, NumPy's, and flat files of tokens."""

from ddp.data.formats.npy import NpyDataset
from ddp.data.formats.tokens import TokenFile
from ddp.data.formats.vision import CIFAR10, CIFAR100, MNIST, read_cifar, read_idx

__all__ = ["CIFAR10", "CIFAR100", "MNIST", "NpyDataset", "TokenFile", "read_cifar", "read_idx"]
