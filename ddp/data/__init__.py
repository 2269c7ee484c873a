"""Datasets, samplers and loaders, under PyTorch's names; the order of samples is the same at any world size."""

from ddp.data.batches import BatchSampler
from ddp.data.collating import default_collate, default_convert
from ddp.data.datasets import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from ddp.data.distributed import DistributedSampler
from ddp.data.first import rank0_first
from ddp.data.formats import CIFAR10, CIFAR100, MNIST, NpyDataset, TokenFile, read_cifar, read_idx
from ddp.data.loading import DataLoader, get_worker_info
from ddp.data.positions import Sampler
from ddp.data.samplers import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "DistributedSampler",
    "IterableDataset",
    "NpyDataset",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "StackDataset",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "TokenFile",
    "WeightedRandomSampler",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "random_split",
    "rank0_first",
    "read_cifar",
    "read_idx",
]
