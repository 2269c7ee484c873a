"""A saved model without anything else, for evaluation and fine-tuning: one process reads it, whoever wrote it."""

from __future__ import annotations

import os

from ddp.checkpoint._restoring import Arrays, check_model, load_into
from ddp.checkpoint._searching import find
from ddp.errors import DtypeError, StateDictError
from ddp.nn import Module
from ddp.nn.state_dict import IncompatibleKeys


def load_model(path: str | os.PathLike[str], model: Module, strict: bool = True) -> IncompatibleKeys:
    """Copies parameters and buffers from a checkpoint into `model`, and nothing else. No other rank is asked.

    path: a checkpoint, or a folder of them, of which the newest whole one counts; of any number of ranks
    strict: False: names that only one side has stay as they are, and are returned
    Returns: missing_keys, in the model alone, and unexpected_keys, in the checkpoint alone

    Raises: StateDictError naming what differs, sizes also where not strict; CheckpointError if no checkpoint is whole.
    """
    if not isinstance(model, Module):
        raise DtypeError(f"load_model: model is a Module or a DataParallel, not {type(model).__name__}")
    saved = find(path)
    told = saved.state["model"]
    if told is None:
        raise StateDictError(f"{saved.path}: Checkpointer was given no model, so there is none in it")
    try:
        check_model(model, told, saved, strict)
    except StateDictError as error:
        raise StateDictError(f"{saved.path}: {error}") from None
    return load_into(model, told, Arrays(saved, 0), strict)
