"""Layers as functions: shapes are checked here, once, before arrays reach an op. One family a file."""

from ddp._tensor.functions import log_softmax, relu, sigmoid, softmax, tanh
from ddp.nn.functional._conv import conv2d
from ddp.nn.functional._dropout import dropout
from ddp.nn.functional._linear import linear
from ddp.nn.functional._loss import cross_entropy
from ddp.nn.functional._pool import max_pool2d
from ddp.nn.functional._vision import pad

__all__ = [
    "conv2d",
    "cross_entropy",
    "dropout",
    "linear",
    "log_softmax",
    "max_pool2d",
    "pad",
    "relu",
    "sigmoid",
    "softmax",
    "tanh",
]
