"""`Checkpointer`: saves what training changes, restores it, and goes on with the loop where it was.

What is due in the loop is decided by what all ranks know alike: the number of the step, and the requests that they
exchanged in the last synchronized backward. So they decide the same, and no call is made for it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

import collectives
from collectives import ReduceOp, world
from ddp._device import CPU, to_device
from ddp.checkpoint import state_memory
from ddp.checkpoint.optimizer_state import versions_changed_by_step
from ddp.checkpoint.restore import Restorer
from ddp.checkpoint.saved import Saved
from ddp.checkpoint.signals import StopSignals
from ddp.checkpoint.snapshot import BackgroundSave, Snapshot
from ddp.checkpoint.state import TrainedObjects, capture
from ddp.checkpoint.store import Store
from ddp.errors import ArgumentError, CheckpointError, DtypeError, ParallelError
from ddp.nn import Module
from ddp.optim import Optimizer
from ddp.parallel.control import HOLD, SAVE, SAVED, STOP, PendingRequests

_log = logging.getLogger("ddp.checkpoint")
B = TypeVar("B")
C = TypeVar("C", bound="Checkpointer")


class Checkpointer:
    """Saves everything that training changes, and goes on from there, exactly.

    folder: of this run; checkpoints are folders in it; a path, or a URL of fsspec: "s3://bucket/run"
    model: a Module, or DataParallel; optimizer, scheduler: one, or a list; scaler: a GradScaler
    user: what else is to be kept: a dict of JSON values, tensors and arrays, or an object with state_dict and
        load_state_dict; a dict may hold such objects. It is each rank's own; its tensors come back on the CPU
    keep: how many checkpoints are kept, None: all
    every: steps from one save to the next, every_seconds: seconds; both may be given, None: neither
    async_save: a save goes on during training, which waits only where it would change what has not been copied
    memory_every: under `ddp-launch --max-restarts` on one machine the loop of `resume` holds its state in memory, from
        which a restart goes on; steps from one copy to the next; "auto": as often as takes 1 % of the time; None: never
    comm: the ranks; None: `collectives.init()`
    resume: False: begin anew, in a folder without checkpoints

        ckpt = ddp.checkpoint.Checkpointer("runs/digits", model=model, optimizer=optimizer, every=100)
        for batch in ckpt.resume(loader, epochs=20):
            ...  # forward, backward, optimizer.step

    Collective, as are save, load, wait and close: all ranks make the same calls. Nothing is pickled.

    Raises: ArgumentError or DtypeError for arguments that are none; CheckpointError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        user: Any = None,
        keep: int | None = 3,
        every: int | None = None,
        every_seconds: float | None = None,
        async_save: bool = False,
        memory_every: int | str | None = "auto",
        comm: collectives.Communicator | None = None,
        resume: bool = True,
    ) -> None:
        self._training = check_objects(model, optimizer, scheduler, scaler, user)
        if every is not None and (type(every) is not int or every < 1):
            raise ArgumentError(f"Checkpointer: every is a number of steps of at least 1, or None, got {every!r}")
        if every_seconds is not None and (not isinstance(every_seconds, int | float) or not every_seconds > 0):
            raise ArgumentError(f"Checkpointer: every_seconds is above 0, or None, got {every_seconds!r}")
        if memory_every not in ("auto", None) and (type(memory_every) is not int or memory_every < 1):
            raise ArgumentError(
                f"Checkpointer: memory_every is a number of steps of at least 1, 'auto' or None, got {memory_every!r}"
            )
        comm = collectives.init() if comm is None else comm
        self.step = 0
        self._every, self._every_seconds = every, every_seconds
        self._async, self._resume_wanted = bool(async_save), bool(resume)
        self._store = Store(folder, comm, keep)
        self._comm = comm.duplicate()
        self._memory_every = memory_every
        self._memory: state_memory.StateMemory | None = None
        self._in_memory: Saved | None = None  # what an earlier start of the job has left there, until `load`
        self._room_known = False  # all ranks have had memory for the state once
        self._hold_due = False
        self._requests = PendingRequests()
        for each in self._training.parallel:
            each.share_requests(self._requests)
        self._saving: BackgroundSave | None = None
        self._copy_buffers: dict[str, Any] = {}
        self._saved_at: int | None = None  # the step of the last checkpoint, saved or loaded
        self._loaded = False
        self._loader_state: Any = None  # until a loader comes
        self._restored: Restorer | None = None  # until the loop begins
        self._in_step = False  # the loop's body has a batch, whose step is not counted yet
        self._left_early = False  # a loop has begun, and did not come to its end
        self._stepped = False  # an optimizer has made a step for this batch
        self._due = False  # a save, on all ranks; it may have to wait for the end of an accumulation
        self._saved_time = 0.0  # when the last save of the loop began
        self._closed = False
        self._hooks = [
            handle
            for each in self._training.optimizers
            for handle in (
                each.register_step_pre_hook(self._before_step),
                each.register_step_post_hook(self._after_step),
            )
        ]
        if memory_every is not None and state_memory.offered():
            self._use_memory(self._open_memory, together=True)

    @property
    def folder(self) -> Path | str:
        """Where checkpoints are kept; of a URL a str."""
        return self._store.folder

    def resume(self, loader: Iterable[B], epochs: int | None = None) -> Iterator[B]:
        """The batches of so many passes over `loader`, without those that a checkpoint says have been had.

        loader: with `state_dict()`, `load_state_dict()` and `epoch`, the number of passes completed, as
            `ddp.data.DataLoader` has; epochs: passes in all, those before included; None: without end

        The newest whole checkpoint is loaded first, unless `load` was called. When the loop's body has run for a batch,
        that is a step: `step` grows by one, a save is made if it is due, and if a rank was asked to stop (SIGTERM,
        SIGUSR1, Ctrl-C) all save after the same step and leave with exit code 75. At the end a last save is made. A
        loop that is left by `break` or an error is not saved; its last batch counts as a step, and another loop goes on
        behind it.

        In the middle of an accumulation (there are gradients that no step has been made with) a save waits for its end.

        Raises: DtypeError for a loader without these; CheckpointError from a save, on all ranks; SystemExit to stop.
        """
        missing = [each for each in ("state_dict", "load_state_dict", "epoch", "__iter__") if not hasattr(loader, each)]
        if missing:
            raise DtypeError(
                f"resume: a loader that can go on has state_dict(), load_state_dict() and epoch, the passes it has "
                f"completed, as ddp.data.DataLoader has; {type(loader).__name__} lacks {', '.join(missing)}"
            )
        if epochs is not None and (type(epochs) is not int or epochs < 0):
            raise ArgumentError(f"resume: epochs is a number of passes, or None for no end, got {epochs!r}")
        return self._batches(loader, epochs)

    @property
    def stop_requested(self) -> bool:
        """Whether ranks have agreed to stop, for loops of one's own: then save, and `stop()`.

        With DataParallel it is known, to all ranks alike, after each synchronized backward. In a world of several ranks
        without it they ask each other now: then this is collective.
        """
        self._exchange_requests()
        return self._requests.received[STOP] > 0

    def request_stop(self) -> None:
        """Does what a signal does: asks all ranks, from this one, to save and stop after the next step."""
        self._requests.mine[STOP] = True

    def signals(self) -> StopSignals:
        """A context in which signals ask for a stop, for loops of one's own; `resume` has it by itself."""
        return StopSignals(self._requests)

    def stop(self) -> NoReturn:
        """Saves, unless this step is saved, and leaves with exit code 75: start the same command to go on."""
        self.wait()
        step = self._reached
        if self._saved_at != step:
            self._write()
        self.close()
        world.report(stopped=step)
        if self._comm.rank == 0 and not world.supervised():
            print(
                f"stopped as asked at step {step}, state saved in {self.folder}: start the same command to go on",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(world.STOPPED)

    def save(self) -> None:
        """Saves the state as it is now, as that of `step`. With async_save it returns before that is on disk.

        In the body of `resume`, where the loader counts the batch as had, it is that of the next step: call it when the
        optimizer has made that.

        Raises: CheckpointError on all ranks, also for what became of an earlier save in the background;
        ArgumentError, naming it, for state that a checkpoint cannot hold.
        """
        self._raise_if_closed()
        self._end_saving()
        self._write(self._async)

    def wait(self) -> None:
        """Returns when what was saved is on disk. Raises: CheckpointError, on all ranks, if it is not."""
        if not self._end_saving():
            self._write()

    def load(self, path: str | os.PathLike[str] | None = None, strict: bool = True) -> bool:
        """Puts everything where it was saved; False, and nothing has changed, if there is no checkpoint.

        path: None: the newest whole one of this folder; or one checkpoint, or a folder of another run's
        strict: False: what does not fit stays as it is, and a warning names it; the model's parameters go by name

        Raises: StateDictError, naming what differs, if it is of another model or optimizer, or lacks the state of an
        object of `user`; CheckpointError for one that is damaged, if it was asked for by path. On all ranks, and
        nothing has changed then.
        """
        self._raise_if_closed()
        self._end_saving()
        self._left_early = False
        held, self._in_memory = self._in_memory, None
        if path is not None:
            saved: Saved | None = self._store.find(path)
        elif held is not None and held.step >= self._store.newest_step():
            saved = held
        else:
            saved = self._store.newest()
        if saved is None:
            self._loaded = True
            return False
        restoring = Restorer(saved, self._training, self._comm.rank, self._comm.size, strict)
        for part in (restoring.check, restoring.load_model, restoring.load_rest):
            self._store.ranks.run(f"{saved.path} cannot be loaded", part, reraise=True)
        self._loaded = True
        self.step = saved.step
        self._saved_at = saved.step if path is None and saved is not held else None
        self._restored, self._loader_state = restoring, restoring.loader_state()
        if self._comm.rank == 0:
            for note in restoring.notes:
                _log.warning("%s: %s", saved.path, note)
        collectives.mark_step(self.step)
        return True

    def close(self) -> None:
        """Waits for a save under way, and lets go of the folder. The model and the optimizers are used as before."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._leave()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit):
            self.close()
            return
        saving, self._saving = self._saving, None
        with contextlib.suppress(Exception):  # what is raised already says more
            if saving is not None:
                saving.result()
        self._leave()

    def _leave(self) -> None:
        self._closed = True
        for handle in self._hooks:
            handle.remove()
        for each in self._training.parallel:
            each.share_requests(PendingRequests())
        self._copy_buffers.clear()
        self._drop_memory()
        self._store.close()
        self._comm.close()

    # -- a save

    @property
    def _reached(self) -> int:
        """The step that the state is of. In the loop's body the loader counts the batch of this step already."""
        return self.step + (self._in_step and not self._in_micro_batches())

    def _in_micro_batches(self) -> bool:
        """Whether this rank has micro-batches of the same step left."""
        return any(model.micro_batches is not None and model.micro_batches.pending for model in self._training.parallel)

    def _write(self, background: bool = False) -> None:
        """Saves: now, in this thread, from where everything lies, or a copy of it in the background."""
        sources, shared, own = capture(self._training, self._store.ranks)
        pieces = {each.name: each.piece for each in sources if each.piece is not None}
        if not background:
            arrays = {each.name: np.asarray(to_device(each.array, CPU), order="C") for each in sources}
            self._store.write(self._reached, arrays, shared, own, pieces)
        else:
            later = versions_changed_by_step(self._training.optimizers)
            snapshot = Snapshot(sources, later, self._copy_buffers)
            # Nothing in it holds the sources: after a new plan of buckets, their memory may go.
            write = functools.partial(self._store.write, self._reached, snapshot.arrays, shared, own, pieces)
            self._requests.received[SAVED] = 0
            self._saving = BackgroundSave(snapshot, write, self._save_over)
        self._saved_at = self._reached

    def _save_over(self) -> None:
        self._requests.mine[SAVED] = True

    def _end_saving(self) -> bool:
        """Waits for the save under way, if there is one. False if it has to be made anew."""
        saving, self._saving = self._saving, None
        if saving is None:
            return True
        try:
            path = saving.result()
        except BaseException:
            self._saved_at = None
            raise
        finally:
            self._requests.mine[SAVED] = False
        if path is None:
            self._saved_at = None
            if self._comm.rank == 0:
                _log.warning(
                    "parameters were changed by something else than optimizer.step while they were copied: they are "
                    "saved anew, as of step %d, and training waits for it",
                    self._reached,
                )
        return path is not None

    def _before_step(self, *_: Any) -> None:
        if self._saving is not None:
            self._saving.snapshot.wait()

    def _after_step(self, *_: Any) -> None:
        self._stepped = True

    # -- the state in memory

    def _open_memory(self) -> None:
        memory = state_memory.take(os.fspath(self.folder), self._comm.rank, self._comm.size)
        self._memory, self._in_memory = memory, memory.newest()

    def _drop_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = self._in_memory = None
        self._requests.mine[HOLD] = False

    def _hold(self) -> None:
        """Copies the state into memory."""
        assert self._memory is not None
        began = time.monotonic()
        self._memory.write(self.step, *capture(self._training, self._store.ranks, alone=True))
        self._memory.took(began)

    def _use_memory(self, work: Callable[[], None], together: bool) -> None:
        """Does something with the memory. Where that fails, it is said once and the state is not held any more.

        together: on all ranks, which all go without if one fails; collective then
        """
        failed, rank = "a restart goes on from disk, not from memory", self._comm.rank
        try:
            if together:
                self._store.ranks.run(failed, work)
            else:
                work()
        except (OSError, ArgumentError, CheckpointError) as error:
            self._drop_memory()
            if not together:
                _log.warning("%s: rank %d: %s", failed, rank, error)
            elif rank == 0:
                _log.warning("%s", error)

    # -- the loop of `resume`

    def _batches(self, loader: Any, epochs: int | None) -> Iterator[Any]:
        self._raise_if_closed()
        training = self._training
        with self.signals():
            self._begin_loop(loader)
            self._stop_if_requested()
            while epochs is None or loader.epoch < epochs:
                before = loader.epoch
                iterator = iter(loader)
                training.began = before
                if self._restored is not None and self._restored.step == self.step and self._restored.within:
                    # A loader may draw a seed when a pass begins, and did so when this one began: before the save.
                    self._restored.restore_random()
                self._restored = None
                for batch in iterator:
                    self._stepped, self._in_step = False, True
                    try:
                        yield batch
                    finally:  # also where the loop is left: the loader has handed this batch out
                        self._in_step = False
                        ended = not self._in_micro_batches()
                        self.step += ended
                    if ended:
                        collectives.mark_step(self.step)
                        self._step_done()
                training.began = None
                if loader.epoch <= before:
                    raise ArgumentError(
                        f"resume: {type(loader).__name__}.epoch is {loader.epoch} after a pass, as before it: it "
                        "should be the number of passes completed"
                    )
            self._left_early = False
            self._stop_if_requested()
            if self._saved_at != self.step:
                self.save()
            self.wait()

    def _begin_loop(self, loader: Any) -> None:
        training = self._training
        if training.loader is not None and training.loader is not loader:
            raise ArgumentError(
                "resume: a checkpoint holds the position of one loader, and this is another one than before: use a "
                "folder, and a Checkpointer, for each"
            )
        training.loader = loader
        if not self._loaded:
            if self._resume_wanted:
                self.load()
            elif self._store.newest() is not None:
                raise CheckpointError(
                    f"{self.folder} holds checkpoints of an earlier run, and resume=False: take another folder, or go "
                    "on with that run"
                )
            self._loaded = True
        elif self._left_early:
            self._loader_state = loader.state_dict()  # goes on behind the batch at which the loop was left
        self._left_early = True
        if self._loader_state is not None:
            loader.load_state_dict(self._loader_state)
            self._loader_state = None
        if self._restored is not None:
            training.began = loader.epoch if self._restored.within else None
        self._due, self._saved_time = False, time.monotonic()

    def _stop_if_requested(self) -> None:
        """Stops for a signal outside of the steps: before the first of them, or after the last."""
        self._sum_requests()
        if self._requests.received[STOP]:
            self.stop()

    def _step_done(self) -> None:
        requests = self._requests
        if any(model.joining for model in self._training.parallel):
            raise ParallelError("resume inside join: ranks save together, after the same steps; use tail='exact'")
        if self._every_seconds is not None and self._comm.rank == 0:  # whose clock counts
            requests.mine[SAVE] |= time.monotonic() - self._saved_time >= self._every_seconds
        if self._memory is not None:
            requests.mine[HOLD] = time.monotonic() >= self._memory.due
        self._exchange_requests()
        if self._saving is not None and requests.received[SAVED] == self._comm.size and not self._end_saving():
            self._due = True
        self._due |= requests.received[SAVE] > 0 or (self._every is not None and self.step % self._every == 0)
        if isinstance(self._memory_every, int):
            self._hold_due |= self.step % self._memory_every == 0
        else:
            self._hold_due |= requests.received[HOLD] == self._comm.size
        if self._accumulating():
            return  # what was received is still known after the next step
        if requests.received[STOP]:
            self.stop()
        if self._due and self._saving is None:
            if self._saved_at != self.step:
                self.save()
            self._due, self._saved_time = False, time.monotonic()
            requests.mine[SAVE], requests.received[SAVE] = False, 0
        # Where ranks have to agree, they cannot while a save in the background does.
        if self._hold_due and self._memory is not None and (self._room_known or self._saving is None):
            self._use_memory(self._hold, together=not self._room_known)
            self._room_known, self._hold_due = True, False
            requests.mine[HOLD], requests.received[HOLD] = False, 0

    def _accumulating(self) -> bool:
        """Whether there are gradients that belong to a step which is still to be made: they are in no checkpoint."""
        if any(model.accumulating for model in self._training.parallel):
            return True
        leaves = (
            p.accumulate_grad for each in self._training.optimizers for g in each.param_groups for p in g["params"]
        )
        buffers = (leaf.grad_buffer for leaf in leaves if leaf is not None)
        return not self._stepped and any(buffer.full and not buffer.zeroed for buffer in buffers)

    def _exchange_requests(self) -> None:
        """Where no DataParallel carries the ranks' requests, they exchange them here. Collective then."""
        if self._comm.size == 1 or not self._training.parallel:
            self._sum_requests()

    def _sum_requests(self) -> None:
        counts = np.array(self._requests.mine, np.int64)
        if self._comm.size > 1:
            counts = self._comm.all_reduce(counts, ReduceOp.SUM)
        self._requests.receive(counts.tolist())

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer was closed: make another one")


def check_objects(model: Any, optimizer: Any, scheduler: Any, scaler: Any, user: Any) -> TrainedObjects:
    """What training changes. Raises: DtypeError."""
    if model is not None and not isinstance(model, Module):
        raise DtypeError(f"Checkpointer: model is a Module or a DataParallel, not {type(model).__name__}")
    optimizers, schedulers = _listed(optimizer), _listed(scheduler)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise DtypeError(f"Checkpointer: optimizer is an Optimizer, or a list of them, not {type(each).__name__}")
    stateful = [*(("scheduler", each) for each in schedulers), ("scaler", scaler)]
    for what, each in [*stateful, ("user", None if isinstance(user, dict) else user)]:
        if each is not None and not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise DtypeError(f"Checkpointer: {what} has state_dict and load_state_dict, {type(each).__name__} has not")
    return TrainedObjects(model=model, optimizers=optimizers, schedulers=schedulers, scaler=scaler, user=user)


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
