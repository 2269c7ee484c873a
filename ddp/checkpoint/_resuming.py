"""The loop: batches from where the last run was, and between two of them whatever is due.

What is due is decided by what all ranks know alike: the number of the step, and what they heard of each other's wishes
in the last synchronized backward. So they decide the same, and no call is made for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import collectives
from ddp.errors import ArgumentError, CheckpointError, DtypeError, ParallelError
from ddp.parallel.wishes import SAVE, SAVED, STOP

if TYPE_CHECKING:
    from ddp.checkpoint._checkpointer import Checkpointer


def check(loader: Any, epochs: Any) -> None:
    """Raises: DtypeError, ArgumentError for what `resume` cannot take."""
    missing = [name for name in ("state_dict", "load_state_dict", "epoch", "__iter__") if not hasattr(loader, name)]
    if missing:
        raise DtypeError(
            f"resume: a loader that can go on has state_dict(), load_state_dict() and epoch, the passes it has "
            f"completed, as ddp.data.DataLoader has; {type(loader).__name__} lacks {', '.join(missing)}"
        )
    if epochs is not None and (type(epochs) is not int or epochs < 0):
        raise ArgumentError(f"resume: epochs is a number of passes, or None for no end, got {epochs!r}")


def batches(ckpt: Checkpointer, loader: Any, epochs: int | None) -> Iterator[Any]:
    """See `Checkpointer.resume`."""
    ckpt._raise_if_closed()
    with ckpt.signals():
        _begin(ckpt, loader)
        clock = _Clock(ckpt)
        _stop_if_asked(ckpt)
        while epochs is None or loader.epoch < epochs:
            before = loader.epoch
            iterator = iter(loader)
            ckpt._training.began = before
            if ckpt._restored is not None and ckpt._restored.step == ckpt.step and ckpt._restored.within:
                # A loader may draw a seed when a pass begins, and did so when this one began: before the save.
                ckpt._restored.put_random()
            ckpt._restored = None
            for batch in iterator:
                ckpt._stepped, ckpt._inside = False, True
                try:
                    yield batch
                finally:  # also where the loop is left: the loader has handed this batch out
                    ckpt._inside = False
                    ckpt.step += 1
                collectives.mark_step(ckpt.step)
                _between(ckpt, clock)
            ckpt._training.began = None
            if loader.epoch <= before:
                raise ArgumentError(
                    f"resume: {type(loader).__name__}.epoch is {loader.epoch} after a pass, as before it: it should be "
                    "the number of passes completed"
                )
        _end(ckpt)


class _Clock:
    """When a save is due. By `every_seconds` rank 0's clock counts."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self._ckpt = ckpt
        self._since = time.monotonic()
        self.due = False  # a save, on all ranks; it may have to wait

    def look(self) -> None:
        """Sets rank 0's wish to save, which goes with the next synchronized backward."""
        seconds = self._ckpt._every_seconds
        if seconds is not None and self._ckpt._comm.rank == 0 and time.monotonic() - self._since >= seconds:
            self._ckpt._wishes.mine[SAVE] = True

    def start(self) -> None:
        """A save was made."""
        self._since = time.monotonic()
        self.due = False
        self._ckpt._wishes.mine[SAVE], self._ckpt._wishes.heard[SAVE] = False, 0


def _begin(ckpt: Checkpointer, loader: Any) -> None:
    if ckpt._training.loader is not None and ckpt._training.loader is not loader:
        raise ArgumentError(
            "resume: a checkpoint holds the position of one loader, and this is another one than before: use a folder, "
            "and a Checkpointer, for each"
        )
    ckpt._training.loader = loader
    if not ckpt._loaded:
        if ckpt._wanted:
            ckpt.load()
        elif ckpt._store.newest() is not None:
            raise CheckpointError(
                f"{ckpt.folder} holds checkpoints of an earlier run, and resume=False: take another folder, or go on "
                "with that run"
            )
        ckpt._loaded = True
    elif ckpt._left:
        ckpt._loader_state = loader.state_dict()  # goes on behind the batch at which the loop was left
    ckpt._left = True
    if ckpt._loader_state is not None:
        loader.load_state_dict(ckpt._loader_state)
        ckpt._loader_state = None
    if ckpt._restored is not None:
        ckpt._training.began = loader.epoch if ckpt._restored.within else None


def _stop_if_asked(ckpt: Checkpointer) -> None:
    """A signal that came outside of the steps: before the first of them, or after the last."""
    ckpt._agree()
    if ckpt._wishes.heard[STOP]:
        ckpt.stop()


def _between(ckpt: Checkpointer, clock: _Clock) -> None:
    """A step is done."""
    for model in ckpt._training.parallel:
        if model._joining is not None:
            raise ParallelError("resume inside join: ranks save together, after the same steps; use tail='exact'")
    clock.look()
    ckpt._hear()
    wishes = ckpt._wishes
    if ckpt._saving is not None and wishes.heard[SAVED] == ckpt._comm.size and not ckpt._end_saving():
        clock.due = True
    clock.due |= wishes.heard[SAVE] > 0 or (ckpt._every is not None and ckpt.step % ckpt._every == 0)
    if _accumulating(ckpt):
        return  # what was heard is still known after the next step
    if wishes.heard[STOP]:
        ckpt.stop()
    if clock.due and ckpt._saving is None:
        if ckpt._saved_at != ckpt.step:
            ckpt.save()
        clock.start()


def _accumulating(ckpt: Checkpointer) -> bool:
    """Whether there are gradients that belong to a step which is still to be made: they are in no checkpoint."""
    if any(model._reducer.accumulating for model in ckpt._training.parallel):
        return True
    slots = (
        p.maybe_leaf.grad_buffer
        for each in ckpt._training.optimizers
        for group in each.param_groups
        for p in group["params"]
        if p.maybe_leaf is not None
    )
    return not ckpt._stepped and any(slot.full and not slot.zeroed for slot in slots)


def _end(ckpt: Checkpointer) -> None:
    """All passes are over."""
    ckpt._left = False
    _stop_if_asked(ckpt)
    if ckpt._saved_at != ckpt.step:
        ckpt.save()
    ckpt.wait()
