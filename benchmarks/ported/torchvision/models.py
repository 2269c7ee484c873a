"""ResNet-18, with weights as torchvision initializes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks import models


def resnet18(*, weights: Any = None, num_classes: int = 1000) -> Any:
    model = models.resnet18(torch, classes=num_classes)
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
    return model
