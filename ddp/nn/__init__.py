"""Layers, under PyTorch's names."""

from ddp.nn import functional, init
from ddp.nn._activation import Dropout, Flatten, ReLU, Sigmoid, Tanh
from ddp.nn._container import Sequential
from ddp.nn._conv import Conv2d
from ddp.nn._linear import Linear
from ddp.nn._loss import CrossEntropyLoss
from ddp.nn._module import Module, Parameter
from ddp.nn._pool import MaxPool2d

__all__ = [
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Flatten",
    "Linear",
    "MaxPool2d",
    "Module",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Tanh",
    "functional",
    "init",
]
