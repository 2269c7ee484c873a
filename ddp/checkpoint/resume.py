"""The loop of `Checkpointer.resume`: batches from where the last run was, saves that are due, stops on signals.

What is due is decided by what all ranks know alike: the number of the step, and what they told each other in the last
synchronized backward. So they decide the same, and no call is made for it.

Slurm sends SIGTERM, or by `--signal` SIGUSR1, before it takes the machine away; a user presses Ctrl-C. Handlers are
there only while the loop runs. A handler that was there before is called as well; one that was told to ignore a signal,
as `nohup` and a shell's background do, goes on ignoring it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import collectives
from ddp.errors import ArgumentError, CheckpointError, DtypeError, ParallelError
from ddp.parallel.control import SAVE, SAVED, STOP, PendingRequests

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_TWICE = 0.5  # s; one Ctrl-C may come twice: from the terminal, and from the engine that passes it on


class StopSignals:
    """A context in which a signal becomes this rank's wish to stop. In a thread that is not the main one, nothing.

    The second Ctrl-C does what it did before, which by default is to raise KeyboardInterrupt.
    """

    def __init__(self, requests: PendingRequests) -> None:
        self._requests = requests
        self._before: dict[int, Any] = {}
        self._listening = False
        self._interrupted: float | None = None  # when the first Ctrl-C came

    def __enter__(self) -> StopSignals:
        self._listening = True
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: a handler of C code, which cannot be put back
                    self._before[number] = before
                    signal.signal(number, self._heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listening = False
        for number, before in self._before.items():
            if signal.getsignal(number) == self._heard:  # else another one was installed since
                signal.signal(number, before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if not self._listening:  # it was put back by a later context, which was left after this one
            _again(number, frame, before)
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is not None and now - self._interrupted > _TWICE:
                _again(number, frame, before)
                return
            self._interrupted = now if self._interrupted is None else self._interrupted
        self._requests.mine[STOP] = True
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _again(number: int, frame: FrameType | None, before: Callable[..., Any] | Any) -> None:
    """Handles the signal as it was handled before."""
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, before)
        signal.raise_signal(number)


if TYPE_CHECKING:
    from ddp.checkpoint.checkpointer import Checkpointer


def check_loader(loader: Any, epochs: Any) -> None:
    """Raises: DtypeError, ArgumentError for what `resume` cannot take."""
    missing = [name for name in ("state_dict", "load_state_dict", "epoch", "__iter__") if not hasattr(loader, name)]
    if missing:
        raise DtypeError(
            f"resume: a loader that can go on has state_dict(), load_state_dict() and epoch, the passes it has "
            f"completed, as ddp.data.DataLoader has; {type(loader).__name__} lacks {', '.join(missing)}"
        )
    if epochs is not None and (type(epochs) is not int or epochs < 0):
        raise ArgumentError(f"resume: epochs is a number of passes, or None for no end, got {epochs!r}")


def resume_batches(ckpt: Checkpointer, loader: Any, epochs: int | None) -> Iterator[Any]:
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
                ckpt._restored.restore_random()
            ckpt._restored = None
            for batch in iterator:
                ckpt._stepped, ckpt._in_step = False, True
                try:
                    yield batch
                finally:  # also where the loop is left: the loader has handed this batch out
                    ckpt._in_step = False
                    ckpt.step += 1
                collectives.mark_step(ckpt.step)
                _after_step(ckpt, clock)
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
            self._ckpt._requests.mine[SAVE] = True

    def start(self) -> None:
        """A save was made."""
        self._since = time.monotonic()
        self.due = False
        self._ckpt._requests.mine[SAVE], self._ckpt._requests.received[SAVE] = False, 0


def _begin(ckpt: Checkpointer, loader: Any) -> None:
    if ckpt._training.loader is not None and ckpt._training.loader is not loader:
        raise ArgumentError(
            "resume: a checkpoint holds the position of one loader, and this is another one than before: use a folder, "
            "and a Checkpointer, for each"
        )
    ckpt._training.loader = loader
    if not ckpt._loaded:
        if ckpt._resume_wanted:
            ckpt.load()
        elif ckpt._store.newest() is not None:
            raise CheckpointError(
                f"{ckpt.folder} holds checkpoints of an earlier run, and resume=False: take another folder, or go on "
                "with that run"
            )
        ckpt._loaded = True
    elif ckpt._left_early:
        ckpt._loader_state = loader.state_dict()  # goes on behind the batch at which the loop was left
    ckpt._left_early = True
    if ckpt._loader_state is not None:
        loader.load_state_dict(ckpt._loader_state)
        ckpt._loader_state = None
    if ckpt._restored is not None:
        ckpt._training.began = loader.epoch if ckpt._restored.within else None


def _stop_if_asked(ckpt: Checkpointer) -> None:
    """A signal that came outside of the steps: before the first of them, or after the last."""
    ckpt._sum_requests()
    if ckpt._requests.received[STOP]:
        ckpt.stop()


def _after_step(ckpt: Checkpointer, clock: _Clock) -> None:
    """A step is done."""
    for model in ckpt._training.parallel:
        if model.joining:
            raise ParallelError("resume inside join: ranks save together, after the same steps; use tail='exact'")
    clock.look()
    ckpt._exchange_requests()
    requests = ckpt._requests
    if ckpt._saving is not None and requests.received[SAVED] == ckpt._comm.size and not ckpt._end_saving():
        clock.due = True
    clock.due |= requests.received[SAVE] > 0 or (ckpt._every is not None and ckpt.step % ckpt._every == 0)
    if _accumulating(ckpt):
        return  # what was heard is still known after the next step
    if requests.received[STOP]:
        ckpt.stop()
    if clock.due and ckpt._saving is None:
        if ckpt._saved_at != ckpt.step:
            ckpt.save()
        clock.start()


def _accumulating(ckpt: Checkpointer) -> bool:
    """Whether there are gradients that belong to a step which is still to be made: they are in no checkpoint."""
    if any(model.accumulating for model in ckpt._training.parallel):
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
    ckpt._left_early = False
    _stop_if_asked(ckpt)
    if ckpt._saved_at != ckpt.step:
        ckpt.save()
    ckpt.wait()
