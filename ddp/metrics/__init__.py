"""What rank 0 writes while a model trains: JSON lines, files for TensorBoard, runs at Weights & Biases and MLflow.

All ranks call them alike, and one of them writes: the rank must be passed, since a file written by all ranks is
noticed late. SummaryWriter, whose arguments are PyTorch's, reads it where what started the ranks has left it, in the
environment. Values are looked at on rank 0 alone, so that no other rank waits for its device.
"""

from ddp.metrics.json_lines import JsonLines
from ddp.metrics.tensorboard import SummaryWriter, TensorBoard
from ddp.metrics.trackers import MLflow, WandB

__all__ = ["JsonLines", "MLflow", "SummaryWriter", "TensorBoard", "WandB"]
