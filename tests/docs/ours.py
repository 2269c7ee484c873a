"""What snippets of ours find: a small net, a model of it, an optimizer, and samples of each rank's own."""

from __future__ import annotations

from typing import Any

import numpy as np

import collectives
import ddp
from ddp import nn
from ddp.nn import functional as F
from tests.docs.snippets import Builder, samples, weights


def start_alike(layer: Any) -> None:
    """In the place of `Linear.reset_parameters`."""
    with ddp.no_grad():
        layer.weight.copy_(ddp.from_numpy(weights(tuple(layer.weight.shape))))
        layer.bias.copy_(ddp.from_numpy(weights(tuple(layer.bias.shape))))


def builders(comm: collectives.Communicator) -> dict[str, Builder]:
    """The names that a snippet may use."""
    x, t = samples(comm.rank)

    def net(get: Any) -> Any:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def batches(get: Any) -> Any:  # one more on each further rank
        parts = [samples(10 * (step + 1) + comm.rank) for step in range(2 + comm.rank)]
        return [(ddp.from_numpy(x), ddp.from_numpy(t)) for x, t in parts]

    return {
        "np": lambda get: np,
        "ddp": lambda get: ddp,
        "collectives": lambda get: collectives,
        "nn": lambda get: nn,
        "F": lambda get: F,
        "comm": lambda get: comm,
        "net": net,
        "model": lambda get: ddp.DataParallel(get("net")),
        "optimizer": lambda get: ddp.optim.SGD(get("model").parameters(), lr=0.1, momentum=0.9),
        "x": lambda get: ddp.from_numpy(x),
        "t": lambda get: ddp.from_numpy(t),
        "batches": batches,
        "dataset": lambda get: list(zip(x, t, strict=True)),
    }
