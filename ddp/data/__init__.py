"""Datasets, samplers and loaders, under PyTorch's names.

The ranks share the order of a `DistributedSampler`, which is the same at any world size.
"""

from ddp.data.collate import default_collate, default_convert
from ddp.data.data_files import CIFAR10, CIFAR100, MNIST, NpyDataset, TokenFile, read_cifar, read_idx
from ddp.data.dataloader import DataLoader
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
from ddp.data.distributed_sampler import DistributedSampler
from ddp.data.fetching import get_worker_info
from ddp.data.rank0 import rank0_first
from ddp.data.samplers import (
    BatchSampler,
    RandomSampler,
    Sampler,
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
