"""A training step on the stand-in: the host waits for nothing, memory comes out of the pool, numbers are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from tests.gpu import on_both
from tests.gpu.installing import Gpu

F = ddp.nn.functional
nn = ddp.nn
STEPS = 5  # DataParallel reads events of its first four backwards: its plan is made from when gradients came


class Gpt(nn.Module):
    """Two layers of causal attention over a small vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.places = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Any) -> Any:
        n = x.shape[1]
        h = self.tokens(x) + self.places(ddp.arange(n, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=x.device)
        return self.head(self.norm(self.layers(h, mask=mask, is_causal=True))).transpose(1, 2)


def mlp() -> Any:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.0), nn.Linear(16, 4))


def cnn() -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 4),
    )


def tokens() -> Any:
    return ddp.randint(0, 11, (3, 5))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[int, ...], int]] = {
    "mlp": (mlp, lambda: ddp.randn(3, 6), (3,), 4),
    "cnn": (cnn, lambda: ddp.randn(3, 1, 8, 8), (3,), 4),
    "gpt": (Gpt, tokens, (3, 5), 11),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: ddp.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: ddp.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: ddp.optim.AdamW(p, 1e-2),
    "adagrad": lambda p: ddp.optim.Adagrad(p, 1e-2),
    "adadelta": lambda p: ddp.optim.Adadelta(p, 1.0),
    "rmsprop": lambda p: ddp.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "lion": lambda p: ddp.optim.Lion(p, 1e-3),
}


class Training:
    """A model with everything around it, on a device."""

    def __init__(self, model: str, optimizer: str, device: str, scaled: bool = False, parallel: bool = False) -> None:
        make, data, labels, classes = MODELS[model]
        ddp.manual_seed(1)
        self.model = make()
        self.x = data().to(device)
        self.target = ddp.randint(0, classes, labels).to(device)
        self.model.to(device)
        if parallel:
            self.model = ddp.DataParallel(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = ddp.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = ddp.amp.GradScaler(device, enabled=scaled)
        self.scaled = scaled
        self.device = device

    def step(self) -> Any:
        with ddp.autocast(self.device, dtype=ddp.float16, enabled=self.scaled):
            loss = F.cross_entropy(self.model(self.x), self.target)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()


def losses(training: Training) -> list[float]:
    return [training.step().item() for _ in range(STEPS)]


RUNS = [
    *[(model, "adamw", False, False) for model in MODELS],
    *[("mlp", optimizer, False, False) for optimizer in OPTIMIZERS if optimizer != "adamw"],
    *[(model, "adamw", True, False) for model in MODELS],
    *[(model, "sgd", False, True) for model in MODELS],
    ("gpt", "adamw", True, True),
]
IDS = [
    f"{model}-{optimizer}{'-scaled' * scaled}{'-parallel' * parallel}" for model, optimizer, scaled, parallel in RUNS
]
each_run = pytest.mark.parametrize(("model", "optimizer", "scaled", "parallel"), RUNS, ids=IDS)


@on_both
@each_run
def test_numbers_are_the_cpus_and_nothing_waits(
    model: str, optimizer: str, scaled: bool, parallel: bool, gpu: Any
) -> None:
    training = Training(model, optimizer, "cuda", scaled, parallel)
    there, here = losses(training), losses(Training(model, optimizer, "cpu", False))
    factor = 1 if isinstance(gpu, Gpu) else 10
    assert_allclose(there, here, 3e-2 if scaled else 1e-4 * factor, 1e-2 if scaled else 1e-6 * factor)
    for _ in range(2):
        loss = training.step()  # which is kept while the next step computes
    before = ddp.cuda.memory_stats()
    with gpu.no_waits():
        for _ in range(3):
            loss = training.step()
    after = ddp.cuda.memory_stats()
    assert np.isfinite(loss.item())
    assert [after[name] - before[name] for name in ("num_device_alloc", "num_device_free")] == [0, 0]
