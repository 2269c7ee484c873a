"""Checkpoints that exist for all ranks or for none, and training loops that continue from them.

    ckpt = ddp.checkpoint.Checkpointer("runs/digits", model=model, optimizer=optimizer, every=100)
    for batch in ckpt.resume(loader, epochs=20):
        ...

Kill the job at any moment and start the same command again: it continues, with the same numbers.
"""

from ddp.checkpoint.checkpoint_reader import Saved, open_checkpoint
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.checkpoint.restore import load_model
from ddp.checkpoint.store import Store

__all__ = ["Checkpointer", "Saved", "Store", "load_model", "open_checkpoint"]
