"""The names of PyTorch's hub, which fetches programs and pickles. Here a call raises, and says how to get weights."""

from __future__ import annotations

from typing import Any, NoReturn

from ddp.errors import ArgumentError

__all__ = ["load", "load_state_dict_from_url"]


def load(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: ArgumentError, with an alternative: programs and pickles of PyTorch's hub are neither fetched nor run."""
    raise ArgumentError(
        f"ddp.hub fetches nothing, got {args or kwargs}: make the model here, download its weights, store them by "
        "safetensors.torch.save_file(state_dict, path) where PyTorch is, and call model.load_state_dict(ddp.load(path))"
    )


load_state_dict_from_url = load
