"""`Checkpointer`: saves and restores the state of training, and continues the loop at the same batch.

Whether a save is due depends only on what all ranks know: the number of the step, and the requests that they have
exchanged. So all ranks decide the same. DataParallel exchanges the requests in each synchronized backward. Without a
DataParallel, a small all-reduce after each step does."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

import collectives
from collectives import CollectiveTimeout, ReduceOp, world
from collectives.time_limit import resize_requested
from ddp._device import CPU, to_device
from ddp._engine import RemovableHandle
from ddp._engine.grad_buffer import FULL
from ddp.checkpoint import state_memory
from ddp.checkpoint.checkpoint_reader import Saved
from ddp.checkpoint.optimizer_state import versions_changed_by_step
from ddp.checkpoint.restore import Restorer
from ddp.checkpoint.signals import StopSignals
from ddp.checkpoint.snapshot import BackgroundSave, Snapshot
from ddp.checkpoint.state import Captured, TrainedObjects, capture
from ddp.checkpoint.store import Store
from ddp.errors import ArgumentError, CheckpointError, DtypeError, ParallelError
from ddp.nn import Module
from ddp.optim import Optimizer
from ddp.parallel import ZeroOptimizer
from ddp.parallel.control import HOLD, RESIZE, SAVE, SAVED, STOP, PendingRequests

_log = logging.getLogger("ddp.checkpoint")
B = TypeVar("B")
C = TypeVar("C", bound="Checkpointer")


class Checkpointer:
    """Saves and restores everything that training changes, so that training continues with the same numbers.

    folder: of this run, a path or a URL of fsspec ("s3://bucket/run"); every checkpoint is a folder in it
    model: a Module, or DataParallel; optimizer, scheduler: one, or a list; scaler: a GradScaler
    user: further state: a dict of JSON values, tensors and arrays, or an object with state_dict and load_state_dict;
        values of the dict may be such objects. It may differ between ranks. Its tensors are restored on the CPU
    keep: how many checkpoints are kept; None: all
    every: the loop of `resume` saves after so many steps; every_seconds: after so many seconds; both may be given
    async_save: `save` and the loop of `resume` save in the background. The next optimizer step waits until parameters
        and optimizer state have been copied
    memory_every: under `ddp-launch --max-restarts`, the loop of `resume` copies the state to memory after so many
        steps, and a restart continues from there; "auto": as often as 1 % of the time allows; None: never
    comm: the ranks' communicator; None: `collectives.init()`
    resume: False: start over, in a folder without checkpoints

        ckpt = ddp.checkpoint.Checkpointer("runs/digits", model=model, optimizer=optimizer, every=100)
        for batch in ckpt.resume(loader, epochs=20):
            ...  # forward, backward, optimizer.step

    Collective, as are resume, save, load, wait, stop and close: all ranks make the same calls. No file contains
    pickles.

    Raises: ArgumentError or DtypeError for invalid arguments; CheckpointError if the folder cannot be used.
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
        _check_steps(every, "every is a number of steps of at least 1, or None", None)
        if every_seconds is not None and (not isinstance(every_seconds, int | float) or not every_seconds > 0):
            raise ArgumentError(f"Checkpointer: every_seconds is above 0, or None, got {every_seconds!r}")
        _check_steps(memory_every, "memory_every is a number of steps of at least 1, 'auto' or None", None, "auto")
        comm = collectives.init() if comm is None else comm
        self.step = 0
        self._every = every
        self._every_seconds = every_seconds
        self._async = async_save
        self._load_first = resume
        self._store = Store(folder, comm, keep)
        self._comm = comm.duplicate()
        self._memory_every = memory_every
        # Whether each rank also writes copies of the optimizer pieces that ranks on other nodes hold.
        self._copying = comm.local_size < comm.size and any(
            isinstance(trained, ZeroOptimizer) for trained in self._training.optimizers
        )
        self._memory: state_memory.StateMemory | None = None
        self._in_memory: Saved | None = None  # the state of an earlier start of the job, until `load`
        self._room_known = False  # the state has been written to memory on all ranks before
        self._hold_due = False  # the state is to be written to memory
        self._requests = PendingRequests()
        for model in self._training.parallel:
            model.share_requests(self._requests)
        self._saving: BackgroundSave | None = None
        self._copy_buffers: dict[str, Any] = {}
        self._saved_at: int | None = None  # the step of this folder's last checkpoint, saved or loaded
        self._loaded = False
        self._loader_state: Any = None  # to be loaded into the loader of `resume`
        self._restored: Restorer | None = None  # the Restorer of the last `load`, until the loop begins
        self._in_step = False  # the loop's body is running, and its step is not counted yet
        self._left_early = False  # a loop was left before its end
        self._stepped = False  # an optimizer has made a step for this batch
        # A save is due on all ranks. It is made once no gradients are being accumulated, and no other save runs.
        self._due = False
        self._saved_time = 0.0  # when the loop began or last saved (monotonic, s)
        self._closed = False
        self._resizable = False  # this rank has reported that the job can be resized during its loop
        self._hooks: list[RemovableHandle] = []
        for trained in self._training.optimizers:
            self._hooks.append(trained.register_step_pre_hook(self._before_step))
            self._hooks.append(trained.register_step_post_hook(self._after_step))
        if memory_every is not None and state_memory.offered():
            self._use_memory(self._open_memory, together=True)

    @property
    def folder(self) -> Path | str:
        """The folder of the checkpoints, a str if it is a URL."""
        return self._store.folder

    def resume(self, loader: Iterable[B], epochs: int | None = None) -> Iterator[B]:
        """Iterates over the batches of `epochs` passes over `loader`, without those before the checkpoint.

        loader: has `state_dict()`, `load_state_dict()` and `epoch`, the number of completed passes, as
            `ddp.data.DataLoader`; epochs: passes in total, with those before the checkpoint; None: no limit

        First the state is loaded as by `load()`, unless `load` was called or an earlier loop has done so. With the
        argument resume=False of the Checkpointer, nothing is loaded. Each run of the loop's body is a step, or with
        `micro_batches` one of this rank's micro-batches of a step. After each step, `step` is incremented, and the
        state is saved if a save is due. If a rank was asked to stop (SIGTERM, SIGUSR1, Ctrl-C), all ranks save after
        the same step and leave with exit code 75. They also leave after a step if `ddp-launch --resize` asks for
        another number of ranks, and the new ranks continue. After the last pass the state is saved, unless the last
        step was saved already. A loop that is left by `break` or an error is not saved. Its last batch counts as a
        step, and another loop continues after it.

        Saves and stops wait while there are gradients that no optimizer step has used yet (gradient accumulation).

        Raises: DtypeError if the loader lacks such a method or `epoch`; ArgumentError for invalid `epochs`, another
        loader than that of an earlier loop, a sampler with micro_batches if no model has them, or a loader whose
        `epoch` is the same after a pass; the errors of `load` and `save`; CheckpointError if resume=False and the
        folder has a checkpoint; ParallelError inside `join`; SystemExit to stop.
        """
        methods = ("state_dict", "load_state_dict", "epoch", "__iter__")
        missing = [name for name in methods if not hasattr(loader, name)]
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
        """Whether to call `stop()`: a rank was asked to stop, or the job is to be resized. For loops without `resume`.

        With DataParallel, the ranks exchange requests in each synchronized backward. Otherwise this call is collective.

        Raises: CheckpointError after `close`.
        """
        self._raise_if_closed()
        self._report_resizable()
        self._exchange_requests()
        return self._requests.received[STOP] > 0 or self._leaving

    def request_stop(self) -> None:
        """Asks all ranks to save and stop after the same step, as a signal to this rank does."""
        self._requests.requested[STOP] = True

    def signals(self) -> StopSignals:
        """A context in which signals ask for a stop. Only for loops without `resume`: `resume` does this itself."""
        return StopSignals(self._requests)

    def stop(self) -> NoReturn:
        """Saves, unless this step is saved already, and exits with code 75. The same command continues the training.

        If `ddp-launch --resize` asked for the stop, the state is written to memory instead. It still goes to the folder
        if ddp-launch holds no memory, or the write to memory fails. Then ddp-launch starts the ranks that continue.

        Raises: SystemExit; the errors of `save`.
        """
        self._raise_if_closed()
        leaving = self._leaving
        step = self._reached
        if leaving:
            world.report(resizing=step)
        self.wait()
        if self._saved_at != step and not (leaving and self._held_by_all()):
            self._write()
        self.close()
        if leaving:
            sys.exit(world.STOPPED)
        world.report(stopped=step)
        if self._comm.rank == 0 and not world.supervised():
            print(
                f"stopped as asked at step {step}, state saved in {self.folder}: start the same command to go on",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(world.STOPPED)

    def save(self) -> None:
        """Saves the current state. With async_save it returns before the state is on disk.

        Inside the loop over `resume`, the loader has counted the current batch already, so the state is saved as that
        of step `step + 1` (of `step`, while micro-batches of the step remain). So call it after the optimizer's step.

        Raises: CheckpointError on all ranks if it fails, if an earlier save in the background has failed, or after
        `close`. A rank whose state has a value that a checkpoint cannot hold raises ArgumentError instead, which names
        the place of the value.
        """
        self._raise_if_closed()
        self._end_saving()
        self._write(self._async)

    def wait(self) -> None:
        """Waits until a save in the background is on disk. Raises: CheckpointError on all ranks if it has failed."""
        if not self._end_saving():
            self._write()

    def load(self, path: str | os.PathLike[str] | None = None, strict: bool = True) -> bool:
        """Loads a checkpoint into all objects. Without `path`, returns False if this folder has no checkpoint.

        path: a checkpoint, or the folder of another run; None: the newest undamaged checkpoint of this folder. The
            first `load` after a restart takes the state in memory instead, if it is not older than the checkpoint
        strict: False: objects that do not fit keep their state, with a warning. If one of several optimizers does not
            fit, all keep their state; the same holds for schedulers. Names that only the model or only the checkpoint
            has are skipped

        Raises: StateDictError, naming the differences, for another model, optimizer, scheduler or scaler, or if the
        state of an object in `user` is missing (a rank without differences raises CheckpointError); CheckpointError if
        there is no undamaged checkpoint at `path`, all checkpoints of this folder are damaged, a file cannot be read,
        the checkpoint was not written by a Checkpointer, or after `close`. All ranks raise, and nothing changes. If
        only the plan of a DataParallel or its number of micro_batches does not fit, ParallelError is raised after the
        model was loaded.
        """
        self._raise_if_closed()
        self._end_saving()
        self._left_early = False
        in_memory = self._in_memory
        self._in_memory = None
        if path is not None:
            saved: Saved | None = self._store.find(path)
        elif in_memory is not None and in_memory.step >= self._store.newest_step():
            saved = in_memory
        else:
            saved = self._store.newest()
        if saved is None:
            self._loaded = True
            return False
        restorer = Restorer(saved, self._training, self._comm.rank, self._comm.size, strict)
        for part in (restorer.check, restorer.load_model, restorer.load_rest):
            self._store.ranks.run_on_all_ranks(f"{saved.path} cannot be loaded", part, reraise=True)
        self._loaded = True
        self.step = saved.step
        self._saved_at = saved.step if path is None and saved is not in_memory else None
        self._restored = restorer
        self._loader_state = restorer.loader_state()
        if self._comm.rank == 0:
            for note in restorer.notes:
                _log.warning("%s: %s", saved.path, note)
        collectives.mark_step(self.step)
        return True

    def close(self) -> None:
        """Waits for a save in the background and unlocks the folder. The model and the optimizers stay usable.

        Raises: CheckpointError on all ranks if that save has failed; the folder is unlocked all the same.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, SystemExit):
            self.close()
            return
        saving = self._saving
        self._saving = None
        with contextlib.suppress(Exception):  # the error of the block says more
            if saving is not None:
                saving.result()
        self._release()

    def _release(self) -> None:
        self._closed = True
        for handle in self._hooks:
            handle.remove()
        for model in self._training.parallel:
            model.share_requests(PendingRequests())
        self._copy_buffers.clear()
        self._drop_memory()
        self._store.close()
        self._comm.close()

    # -- a save

    @property
    def _reached(self) -> int:
        """The step with which the current state is saved.

        Inside the loop over `resume`, it is `step + 1`, because the loader has counted the batch already. While
        micro-batches of the step remain, it is `step`.
        """
        return self.step + (self._in_step and not self._in_micro_batches())

    def _in_micro_batches(self) -> bool:
        """Whether this rank has further micro-batches of the same step."""
        return any(model.micro_batches is not None and model.micro_batches.pending for model in self._training.parallel)

    def _write(self, background: bool = False) -> None:
        """Saves the state. background: a thread saves a copy of the state, and this method does not wait for it"""
        captured = capture(self._training, self._store.ranks)
        sources = captured.sources
        state = captured.state
        own_state = captured.own_state
        pieces = {source.name: source.piece for source in sources if source.piece is not None}
        if not background:
            arrays = {source.name: np.asarray(to_device(source.array, CPU), order="C") for source in sources}
            self._store.write(self._reached, arrays, state, own_state, pieces)
        else:
            later = versions_changed_by_step(self._training.optimizers)
            snapshot = Snapshot(sources, later, self._copy_buffers)
            # `write` refers to the copies only: a new plan of buckets can free the memory of the sources.
            write = functools.partial(self._store.write, self._reached, snapshot.arrays, state, own_state, pieces)
            self._requests.received[SAVED] = 0
            self._saving = BackgroundSave(snapshot, write, self._report_saved)
        self._saved_at = self._reached

    def _report_saved(self) -> None:
        self._requests.requested[SAVED] = True

    def _end_saving(self) -> bool:
        """Waits for the save in the background, if there is one. Returns False if it must be repeated."""
        saving = self._saving
        self._saving = None
        if saving is None:
            return True
        reached = self._saved_at
        self._saved_at = None
        try:
            path = saving.result()
        finally:
            self._requests.requested[SAVED] = False
        if path is not None:
            self._saved_at = reached
        elif self._comm.rank == 0:
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
        """Opens the launcher's memory, and finds the state of an earlier start of the job. Collective."""

        def take() -> None:
            self._memory = state_memory.take(os.fspath(self.folder), self._comm)

        self._store.ranks.run_on_all_ranks(state_memory.FAILED, take)
        assert self._memory is not None
        # The pieces of a sharded optimizer depend on the plan of the buckets. The state contains that plan only if the
        # Checkpointer's model contains the DataParallel. Otherwise a rank may need other pieces than it had.
        self._in_memory = self._memory.newest(self._store.ranks, same_pieces=bool(self._training.parallel))

    def _drop_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = self._in_memory = None
        self._requests.requested[HOLD] = False

    def _hold(self, captured: Captured | None = None) -> None:
        """Copies the state to memory. captured: what this rank writes; None: the state as it is now"""
        if self._memory is None:  # an earlier copy has failed on this rank alone
            raise CheckpointError("this rank does not copy its state to memory any more")
        node = (self._comm.local_rank, self._comm.local_size)
        self._memory.write(self._reached, captured or capture(self._training, self._store.ranks, node))

    def _hold_together(self) -> None:
        """Copies the state to memory on all ranks, and reports this to the launcher. Collective."""
        ranks = self._store.ranks
        captured = None
        if self._copying and self._memory is not None:  # same on all ranks: with copies, a write fails on all or none
            captured = state_memory.capture_with_copies(self._training, ranks, self._memory)
        ranks.run_on_all_ranks(state_memory.FAILED, lambda: self._hold(captured))
        world.report(held=self._reached)

    def _held_by_all(self) -> bool:
        """Copies the state to memory. Collective.

        Returns False, on all ranks, if there is no memory or one rank fails.
        """
        if self._memory_every is not None and state_memory.offered():
            self._use_memory(self._hold_together, together=True)
        return self._memory is not None

    def _use_memory(self, fn: Callable[[], None], together: bool) -> None:
        """Calls `fn`. If it raises an OSError, ArgumentError or CheckpointError, logs a warning.

        After such an error this rank does not use the memory again. Other errors are raised, and so is a
        CollectiveTimeout, which is an OSError.

        together: `fn` is collective. It raises these errors on all ranks or on none, and only rank 0 logs them
        """
        try:
            fn()
        except CollectiveTimeout:  # it is also an OSError; the other ranks still use the memory
            raise
        except (OSError, ArgumentError, CheckpointError) as error:
            self._drop_memory()
            if not together:
                _log.warning("%s: rank %d: %s", state_memory.FAILED, self._comm.rank, error)
            elif self._comm.rank == 0:
                _log.warning("%s", error)

    # -- the loop of `resume`

    def _batches(self, loader: Any, epochs: int | None) -> Iterator[Any]:
        self._raise_if_closed()
        training = self._training
        with self.signals():
            self._begin_loop(loader)
            self._stop_if_requested()
            self._report_resizable()
            while epochs is None or loader.epoch < epochs:
                epoch = loader.epoch
                iterator = iter(loader)
                training.began = epoch
                if self._restored is not None and self._restored.step == self.step and self._restored.within:
                    # `iter` may have drawn a seed. The saved run drew it at the start of this pass, before its random
                    # numbers were saved. So they are restored again.
                    self._restored.restore_random()
                self._restored = None
                for batch in iterator:
                    self._stepped = False
                    self._in_step = True
                    try:
                        yield batch
                    finally:  # also if the loop is left: the loader has counted this batch
                        self._in_step = False
                        ended = not self._in_micro_batches()
                        self.step += ended
                    if ended:
                        collectives.mark_step(self.step)
                        self._step_done()
                training.began = None
                if loader.epoch <= epoch:
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
        given = getattr(getattr(loader, "sampler", None), "micro_batches", None)
        if given is not None and all(model.micro_batches is None for model in training.parallel):
            raise ArgumentError(
                f"resume: the sampler has micro_batches={given}, and no model of this Checkpointer has: its "
                "model should be the DataParallel, not the module inside"
            )
        training.loader = loader
        if not self._loaded:
            if self._load_first:
                self.load()
            elif self._store.newest() is not None:
                raise CheckpointError(
                    f"{self.folder} holds checkpoints of an earlier run, and resume=False: take another folder, or go "
                    "on with that run"
                )
            self._loaded = True
        elif self._left_early:
            self._loader_state = loader.state_dict()  # continues after the batch at which the loop was left
        self._left_early = True
        if self._loader_state is not None:
            loader.load_state_dict(self._loader_state)
            self._loader_state = None
        if self._restored is not None:
            training.began = loader.epoch if self._restored.within else None
        self._due = False
        self._saved_time = time.monotonic()

    @property
    def _leaving(self) -> bool:
        """Whether all ranks leave so that the job continues on another number of ranks; False if they stop."""
        return self._requests.received[RESIZE] > 0 and not self._requests.received[STOP]

    def _report_resizable(self) -> None:
        """Tells the launcher, once, that the job can be resized during this loop, and to how many ranks at most."""
        if not self._resizable:
            self._resizable = True
            counts = [model.micro_batches.count for model in self._training.parallel if model.micro_batches is not None]
            world.report(resizable=min(counts, default=0))

    def _stop_if_requested(self) -> None:
        """Stops if a stop was requested before the first step or after the last."""
        self._sum_requests()
        if self._requests.received[STOP]:
            self.stop()

    def _step_done(self) -> None:
        requests = self._requests
        if any(model.joining for model in self._training.parallel):
            raise ParallelError("resume inside join: ranks save together, after the same steps; use tail='exact'")
        if self._every_seconds is not None and self._comm.rank == 0:  # its clock decides for all ranks
            requests.requested[SAVE] |= time.monotonic() - self._saved_time >= self._every_seconds
        if self._memory is not None:
            requests.requested[HOLD] = time.monotonic() >= self._memory.due
        self._exchange_requests()
        if self._saving is not None and requests.received[SAVED] == self._comm.size and not self._end_saving():
            self._due = True
        self._due |= requests.received[SAVE] > 0 or (self._every is not None and self.step % self._every == 0)
        if isinstance(self._memory_every, int):
            self._hold_due |= self.step % self._memory_every == 0
        else:
            self._hold_due |= requests.received[HOLD] == self._comm.size
        if self._accumulating():
            return  # the requests are kept, and served when the accumulation has ended
        if requests.received[STOP] or self._leaving:
            self.stop()
        if self._due and self._saving is None:
            if self._saved_at != self.step:
                self.save()
            self._due = False
            self._saved_time = time.monotonic()
            requests.clear(SAVE)
        # The first write to memory is collective; with copies, all are. None runs during a background save.
        together = self._copying or not self._room_known
        if self._hold_due and self._memory is not None and not (together and self._saving):
            began = time.monotonic()
            self._use_memory(self._hold_together if together else self._hold, together)
            if self._memory is not None:
                self._memory.took(began)
            self._room_known = True
            self._hold_due = False
            requests.clear(HOLD)

    def _accumulating(self) -> bool:
        """Whether there are gradients that no optimizer step has used. They are not part of a checkpoint."""
        if any(model.accumulating for model in self._training.parallel):
            return True
        groups = (group for optimizer in self._training.optimizers for group in optimizer.param_groups)
        leaves = (p.accumulate_grad for group in groups for p in group["params"])
        buffers = (leaf.grad_buffer for leaf in leaves if leaf is not None)
        return not self._stepped and any(buffer.state is FULL for buffer in buffers)

    def _exchange_requests(self) -> None:
        """Exchanges the ranks' requests if no DataParallel does it. In that case, the call is collective."""
        self._requests.requested[RESIZE] = resize_requested()
        if self._comm.size == 1 or not self._training.parallel:
            self._sum_requests()

    def _sum_requests(self) -> None:
        counts = np.array(self._requests.requested, np.int64)
        if self._comm.size > 1:
            counts = self._comm.all_reduce(counts, ReduceOp.SUM)
        self._requests.receive(counts.tolist())

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer was closed: make another one")


def check_objects(model: Any, optimizer: Any, scheduler: Any, scaler: Any, user: Any) -> TrainedObjects:
    """Checks and collects the objects of a Checkpointer. Raises: DtypeError for objects of other types."""
    if model is not None and not isinstance(model, Module):
        raise DtypeError(f"Checkpointer: model is a Module or a DataParallel, not {type(model).__name__}")
    optimizers = _as_list(optimizer)
    schedulers = _as_list(scheduler)
    for item in optimizers:
        if not isinstance(item, Optimizer):
            raise DtypeError(f"Checkpointer: optimizer is an Optimizer, or a list of them, not {type(item).__name__}")
    for item in schedulers:
        _check_stateful("scheduler", item)
    _check_stateful("scaler", scaler)
    if not isinstance(user, dict):
        _check_stateful("user", user)
    return TrainedObjects(model=model, optimizers=optimizers, schedulers=schedulers, scaler=scaler, user=user)


def _check_stateful(name: str, value: Any) -> None:
    if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise DtypeError(f"Checkpointer: {name} has state_dict and load_state_dict, {type(value).__name__} has not")


def _check_steps(value: Any, requirement: str, *others: object) -> None:
    if value not in others and (type(value) is not int or value < 1):
        raise ArgumentError(f"Checkpointer: {requirement}, got {value!r}")


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
