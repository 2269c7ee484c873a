"""Reverse mode: leaves and nodes make the graph, `backward` runs over it, grad mode says whether it is recorded."""

from ddp._engine.anomaly import detect_anomaly as detect_anomaly
from ddp._engine.anomaly import set_detect_anomaly as set_detect_anomaly
from ddp._engine.leaves import GradBuffer as GradBuffer
from ddp._engine.leaves import GradReadyHook as GradReadyHook
from ddp._engine.leaves import Leaf as Leaf
from ddp._engine.leaves import RemovableHandle as RemovableHandle
from ddp._engine.modes import enable_grad as enable_grad
from ddp._engine.modes import inference_mode as inference_mode
from ddp._engine.modes import is_grad_enabled as is_grad_enabled
from ddp._engine.modes import is_inference_mode_enabled as is_inference_mode_enabled
from ddp._engine.modes import no_grad as no_grad
from ddp._engine.modes import set_grad_enabled as set_grad_enabled
from ddp._engine.nodes import CollectiveNode as CollectiveNode
from ddp._engine.nodes import Edge as Edge
from ddp._engine.nodes import MultiOutputNode as MultiOutputNode
from ddp._engine.nodes import Node as Node
from ddp._engine.nodes import ReusableNode as ReusableNode
from ddp._engine.nodes import Version as Version
from ddp._engine.nodes import output_nodes as output_nodes
from ddp._engine.running import backward as backward
