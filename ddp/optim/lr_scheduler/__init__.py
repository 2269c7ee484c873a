"""Learning-rate schedules, under PyTorch's names: made around an optimizer, stepped after it."""

from ddp.optim.lr_scheduler._composed import ChainedScheduler, SequentialLR
from ddp.optim.lr_scheduler._cosine import CosineAnnealingLR, CosineAnnealingWarmRestarts
from ddp.optim.lr_scheduler._cycle import CyclicLR, OneCycleLR
from ddp.optim.lr_scheduler._factor import (
    ConstantLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
from ddp.optim.lr_scheduler._lambda import LambdaLR, MultiplicativeLR
from ddp.optim.lr_scheduler._plateau import ReduceLROnPlateau
from ddp.optim.lr_scheduler._scheduler import LRScheduler

__all__ = [
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
]
