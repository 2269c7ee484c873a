"""Optimizers, under PyTorch's names."""

from ddp import _aliases
from ddp.optim import lr_scheduler
from ddp.optim.adadelta import Adadelta
from ddp.optim.adagrad import Adagrad
from ddp.optim.adam import Adam, AdamW, NAdam, RAdam, SparseAdam
from ddp.optim.lion import Lion
from ddp.optim.optimizer import Optimizer
from ddp.optim.rmsprop import RMSprop
from ddp.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "SparseAdam",
    "lr_scheduler",
]

__getattr__ = _aliases.attribute(__name__)
