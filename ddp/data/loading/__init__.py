"""The loader: batches in the order of a sampler, from this process or from workers, through memory that they share."""

from ddp.data.loading._information import get_worker_info
from ddp.data.loading._loader import DataLoader

__all__ = ["DataLoader", "get_worker_info"]
