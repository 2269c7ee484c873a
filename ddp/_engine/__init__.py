"""Reverse mode: leaves and nodes make up the graph, `backward` runs over it, grad mode turns recording on and off."""

from ddp._engine.anomaly import detect_anomaly, set_detect_anomaly
from ddp._engine.backward_pass import backward, leaves_of
from ddp._engine.grad_buffer import GradBuffer, GradReadyHook, Leaf, RemovableHandle
from ddp._engine.graph import (
    CollectiveNode,
    Edge,
    MultiOutputNode,
    Node,
    ReusableNode,
    SelectOutput,
    Version,
    Versions,
    output_nodes,
)
from ddp._engine.modes import (
    enable_grad,
    inference_mode,
    is_grad_enabled,
    is_inference_mode_enabled,
    no_grad,
    set_grad_enabled,
)

__all__ = ["CollectiveNode", "Edge", "GradBuffer", "GradReadyHook", "Leaf", "MultiOutputNode", "Node", "Version"]
__all__ += ["RemovableHandle", "ReusableNode", "SelectOutput", "Versions", "backward", "detect_anomaly", "enable_grad"]
__all__ += ["inference_mode", "is_grad_enabled", "is_inference_mode_enabled", "leaves_of", "no_grad", "output_nodes"]
__all__ += ["set_detect_anomaly", "set_grad_enabled"]
