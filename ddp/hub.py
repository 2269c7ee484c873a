"""PyTorch's hub by name: what it fetches are programs and pickles, so each call says how to come by the weights."""

from __future__ import annotations

from typing import Any, NoReturn

from ddp.errors import ArgumentError

__all__ = ["load", "load_state_dict_from_url"]


def load(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: ArgumentError, with the way out: programs and pickles of PyTorch's hub are neither fetched nor run."""
    raise ArgumentError(
        f"ddp.hub fetches nothing, got {args or kwargs}: make the model here, download its weights, store them by "
        "safetensors.torch.save_file(state_dict, path) where PyTorch is, and call model.load_state_dict(ddp.load(path))"
    )


load_state_dict_from_url = load
