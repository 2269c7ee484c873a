"""Reverse mode: leaves and nodes make the graph, `backward` runs over it, grad mode says whether it is recorded."""

from ddp._engine.leaves import Leaf, Slot, Watcher
from ddp._engine.modes import enable_grad, is_grad_enabled, no_grad, set_grad_enabled
from ddp._engine.nodes import Edge, Node, Version
from ddp._engine.running import backward

__all__ = [
    "Edge",
    "Leaf",
    "Node",
    "Slot",
    "Version",
    "Watcher",
    "backward",
    "enable_grad",
    "is_grad_enabled",
    "no_grad",
    "set_grad_enabled",
]
