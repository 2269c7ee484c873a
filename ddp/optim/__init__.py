"""Optimizers, under PyTorch's names."""

from ddp import _aliases
from ddp.optim import lr_scheduler
from ddp.optim._adadelta import Adadelta
from ddp.optim._adagrad import Adagrad
from ddp.optim._adam import Adam
from ddp.optim._adamw import AdamW
from ddp.optim._lion import Lion
from ddp.optim._optimizer import Optimizer
from ddp.optim._rmsprop import RMSprop
from ddp.optim._sgd import SGD

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Lion", "Optimizer", "RMSprop", "lr_scheduler"]

__getattr__ = _aliases.attribute(__name__)
