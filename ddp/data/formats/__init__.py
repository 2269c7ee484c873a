"""Readers of real files: IDX, CIFAR, NumPy's, and flat files of tokens."""

from ddp.data.formats.cifar import CIFAR10, CIFAR100, read_cifar
from ddp.data.formats.idx import MNIST, read_idx
from ddp.data.formats.npy import NpyDataset, NpzDataset
from ddp.data.formats.tokens import TokenFile

__all__ = ["CIFAR10", "CIFAR100", "MNIST", "NpyDataset", "NpzDataset", "TokenFile", "read_cifar", "read_idx"]
