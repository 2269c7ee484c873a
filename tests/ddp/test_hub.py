"""PyTorch's hub is refused with the way out."""

from __future__ import annotations

import pytest

import ddp
from ddp.errors import ArgumentError


def test_it_says_what_to_do_instead() -> None:
    with pytest.raises(ArgumentError, match=r"'resnet18'.*model\.load_state_dict\(ddp\.load\(path\)\)"):
        ddp.hub.load("pytorch/vision", "resnet18", pretrained=True)
    with pytest.raises(ArgumentError, match=r"example/weights\.pt.*download"):
        ddp.hub.load_state_dict_from_url("https://example/weights.pt", progress=False)
