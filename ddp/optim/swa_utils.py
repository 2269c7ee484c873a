"""Averages of a model's weights over training, plain or exponential, and a learning rate schedule for them.

`ddp.optim` does not import this module, because this module imports layers.

Sources: Izmailov et al. 2018, arXiv:1803.05407 (stochastic weight averaging); Polyak & Juditsky 1992 (averaging).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from ddp._engine import no_grad
from ddp._tensor.creation import zeros
from ddp.errors import ArgumentError
from ddp.nn.module import Module
from ddp.nn.normalization import BatchNorm
from ddp.optim.optimizer import Optimizer
from ddp.optim.schedule import LRScheduler, per_group

__all__ = ["SWALR", "AveragedModel", "get_ema_multi_avg_fn", "update_bn"]


def get_ema_multi_avg_fn(decay: float = 0.999) -> Any:
    """Makes a `multi_avg_fn` for AveragedModel that sets averages to decay * average + (1 - decay) * model, in place.

    Raises: ArgumentError unless decay is in [0, 1].
    """
    if not 0 <= decay <= 1:
        raise ArgumentError(f"decay is between 0 and 1, got {decay}")
    return partial(_update, lambda average, model, count: decay * average + (1 - decay) * model)


def _update(function: Any, averages: Any, models: Any, count: Any) -> None:
    for average, model in zip(averages, models, strict=True):
        average.copy_(function(average, model, count))


def _mean(average: Any, model: Any, count: Any) -> Any:
    return average + (model - average) / (count + 1)


class AveragedModel(Module):
    """A copy of a model. Its parameters are averages over the calls of `update_parameters`, by default means.

    model: the model; if it is a DataParallel, its module is copied. device: where the copy is; None: where the model
    is. avg_fn: (average, parameter, n_averaged) -> new average; or multi_avg_fn: (averages, parameters, n_averaged),
    which changes the averages in place. use_buffers: averages buffers, too; otherwise each update copies the model's
    buffers.

    The state dict has "n_averaged", and the copy's entries under "module.".
    """

    def __init__(
        self,
        model: Module,
        device: Any = None,
        avg_fn: Any = None,
        multi_avg_fn: Any = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).to(device=device)
        self.register_buffer("n_averaged", zeros((), dtype="int64", device=device))
        self.multi_avg_fn = multi_avg_fn or partial(_update, avg_fn or _mean)
        self.use_buffers = use_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the copy."""
        return self.module(*args, **kwargs)

    @no_grad()
    def update_parameters(self, model: Module) -> None:
        """Updates the averages with the model's present parameters. The first call copies the parameters."""
        copy_values = partial(_update, lambda average, model, count: model)
        averages: list[Any] = list(self.module.parameters())
        models: list[Any] = list(model.parameters())
        if self.use_buffers:
            averages += self.module.buffers()
            models += model.buffers()
        else:
            copy_values(self.module.buffers(), model.buffers(), 0)
        update = self.multi_avg_fn if self.n_averaged > 0 else copy_values
        update(averages, [new.to(old.device) for old, new in zip(averages, models, strict=True)], self.n_averaged)
        self.n_averaged += 1


@no_grad()
def update_bn(loader: Iterable[Any], model: Module, device: Any = None) -> None:
    """Resets the running statistics of batch norm, and computes them as means over all batches of `loader`.

    loader: gives inputs of the model, or tuples or lists whose first item is an input. device: of the inputs
    """
    momenta = {module: module.momentum for module in model.modules() if isinstance(module, BatchNorm)}
    training = model.training
    model.train()
    try:
        for module in momenta:
            module.reset_running_stats()
            module.momentum = None  # cumulative: the mean over all batches
        for batch in loader if momenta else ():
            inputs = batch[0] if isinstance(batch, list | tuple) else batch
            model(inputs if device is None else inputs.to(device))
    finally:
        for module, momentum in momenta.items():
            module.momentum = momentum
        model.train(training)


class SWALR(LRScheduler):
    """Moves the rate to swa_lr in `anneal_epochs` epochs, and keeps it there; anneal_strategy: "cos" or "linear".

    swa_lr: a rate, or one for each group.

    Raises: ArgumentError for another strategy, negative anneal_epochs, or a list that does not fit the groups.
    """

    _is_relative = True

    def __init__(
        self,
        optimizer: Optimizer,
        swa_lr: Any,
        anneal_epochs: int = 10,
        anneal_strategy: str = "cos",
        last_epoch: int = -1,
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(f"SWALR: expected anneal_strategy 'cos' or 'linear', got {anneal_strategy!r}")
        if anneal_epochs < 0:
            raise ArgumentError(f"SWALR: anneal_epochs is not negative, got {anneal_epochs}")
        for group, rate in zip(optimizer.param_groups, per_group("swa_lr", optimizer, swa_lr), strict=True):
            group["swa_lr"] = rate
        self._begin(optimizer, last_epoch, anneal_epochs=anneal_epochs, _anneal_strategy=anneal_strategy)

    def get_lr(self) -> list[float]:
        epoch = max(self._step_count - 1, self.anneal_epochs == 0)
        previous = self._remaining(epoch - 1)
        factor = self._remaining(epoch) / previous if previous else 0.0
        swa = [group["swa_lr"] for group in self.optimizer.param_groups]
        return [end + (rate - end) * factor for end, rate in zip(swa, self._rates(), strict=True)]

    def _remaining(self, epoch: int) -> float:
        """The fraction of the way to swa_lr that remains after an epoch."""
        done = min(max(epoch, 0) / max(self.anneal_epochs, 1), 1)
        return 1 - done if self._anneal_strategy == "linear" else (1 + math.cos(math.pi * done)) / 2
