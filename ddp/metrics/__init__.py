"""Writers of metrics: JSON lines, files for TensorBoard, runs at Weights & Biases and MLflow.

All ranks call these writers alike, and only rank 0 writes. Writers require the rank as an argument: with a default, all
ranks might write the same file, and users would notice it late. SummaryWriter has PyTorch's arguments, so it reads the
rank from the environment, where the launcher has set it. Only rank 0 reads values, so that no other rank waits for its
device.
"""

from ddp.metrics.json_lines import JsonLines
from ddp.metrics.tensorboard import SummaryWriter, TensorBoard
from ddp.metrics.trackers import MLflow, WandB

__all__ = ["JsonLines", "MLflow", "SummaryWriter", "TensorBoard", "WandB"]
