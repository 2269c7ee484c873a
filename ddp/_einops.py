"""Tensors in einops: the backend that it finds among the subclasses of its own once its module and `ddp` are there."""

from __future__ import annotations

import sys
from typing import Any

from einops._backends import AbstractBackend, TorchBackend


class DdpBackend(TorchBackend, AbstractBackend):  # type: ignore[misc, unused-ignore]  # einops is typed where it is
    # Older ones look at direct subclasses alone.
    """PyTorch's backend, with this library in the place of `torch`."""

    framework_name = "ddp"

    def __init__(self) -> None:
        self.torch = sys.modules["ddp"]

    def layers(self) -> Any:
        raise NotImplementedError("einops has no layers for ddp")
