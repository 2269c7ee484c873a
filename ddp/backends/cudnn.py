"""`ddp.backends.cudnn`: settings of cuDNN for convolution and attention, under PyTorch's names.

ddp.backends.cudnn.enabled = False         # ops use formulas of array functions instead of cuDNN
ddp.backends.cudnn.benchmark = True        # plans are timed when a shape is first used, and the fastest is kept
ddp.backends.cudnn.deterministic = True    # only plans that give the same bits every time
ddp.backends.cudnn.allow_tf32 = False      # factors of float32 convolutions are not rounded to TF32
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from ddp._cuda import cudnn_graph

__all__ = ["is_available", "version"]

if TYPE_CHECKING:
    allow_tf32: bool
    benchmark: bool
    deterministic: bool
    enabled: bool


def version() -> int | None:
    """The version of cuDNN, 92800 for 9.28.0; None if it is missing. Imports its Python frontend."""
    module = cudnn_graph.module()
    return None if module is None else int(module.backend_version())


def is_available() -> bool:
    """Whether cuDNN and its Python frontend are installed. Imports the frontend."""
    return cudnn_graph.module() is not None


class _Switches(ModuleType):
    """The class of this module. Its four switches are those of `cudnn_graph.settings`, which ops read."""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *cudnn_graph.Settings.__slots__})


def _switch(name: str) -> property:
    # Properties, so that pytest's monkeypatch and unittest.mock can patch a switch, and restore it.
    return property(
        lambda module: getattr(cudnn_graph.settings, name),
        lambda module, value: setattr(cudnn_graph.settings, name, bool(value)),
        lambda module: delattr(cudnn_graph.settings, name),
    )


for _name in cudnn_graph.Settings.__slots__:
    setattr(_Switches, _name, _switch(_name))
sys.modules[__name__].__class__ = _Switches
