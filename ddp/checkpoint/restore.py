"""From a checkpoint back into what training changes: everything is checked first, and only then put in.

At the world size that wrote it every rank gets back its own. At another one, rank r goes on from what rank r % size had
of its own, but for random numbers of ranks that were not there and what communication hooks have left out.
`load_model` takes the model alone: one process reads it, whichever wrote it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ddp._tensor.base import TensorBase
from ddp.checkpoint.agreement import Agreement
from ddp.checkpoint.checkpoint_files import MANIFEST_FILE, exists
from ddp.checkpoint.optimizer_state import SavedOptimizer
from ddp.checkpoint.saved import Saved, find, open_checkpoint
from ddp.checkpoint.state import (
    TrainedObjects,
    derive_random,
    missing_user_state,
    rank_array_name,
    restore_random,
    restore_user,
    unwrapped_state_dict,
)
from ddp.errors import CheckpointError, DtypeError, ParallelError, SerializationError, StateDictError
from ddp.nn import Module
from ddp.nn.state_dict import IncompatibleKeys
from ddp.parallel.comm_hooks.error_feedback import reshard_hook_state
from ddp.serialization.structure import JSON, Decoder, names_in

#: Of the state that `capture` makes, the same on all ranks.
PARTS = {"model", "parallel", "optimizers", "schedulers", "scaler"}


def read_value(saved: Saved, rank: int, encoded: JSON) -> Any:
    """What the rank of that number, in the saved world, has encoded; its arrays are read together.

    Raises: CheckpointError, which names the checkpoint, for what a Checkpointer does not write.
    """
    names = {name: rank_array_name(rank, name) for name in names_in(encoded)}
    names = {name: own if own in saved.names else name for name, own in names.items()}
    try:
        arrays = saved.read_names(set(names.values()))
        return Decoder(lambda name: arrays[names[name]]).decode(encoded)
    except (KeyError, SerializationError) as error:
        raise CheckpointError(f"{saved.path}: {error}") from None


class Restorer:
    """One checkpoint on its way into one rank. rank, size: of the world that loads it"""

    def __init__(self, saved: Saved, training: TrainedObjects, rank: int, size: int, strict: bool) -> None:
        self._saved, self._training, self._strict = saved, training, strict
        self._rank, self._size = rank, size
        self._same_size = size == saved.size
        self._origin = rank % saved.size  # the saved rank whose own state this one takes over
        self._fits: set[str] = set()
        self.step = saved.step
        self.notes: list[str] = []  # what is not as it was saved, in words

    def check(self) -> None:
        """Raises: StateDictError, with names, if the checkpoint is of something else; nothing has changed yet."""
        state, owns, training = self._saved.state, self._saved.own_state, self._training
        if not isinstance(state, dict) or state.keys() != PARTS:
            raise CheckpointError(f"{self._saved.path} was not written by a Checkpointer: open it with open_checkpoint")
        self._optimizers = [
            SavedOptimizer(described, [own["pieces"][at] for own in owns], self._value)
            for at, described in enumerate(state["optimizers"])
        ]
        self._try("model", self._check_model)
        self._try("optimizer", self._check_optimizers)
        self._try("scheduler", self._check_schedulers)
        # A scaler that is disabled has no state.
        scalers = bool(self._value(state["scaler"])), training.scaler and bool(training.scaler.state_dict())
        self._try("scaler", lambda: _check_count("scaler", *(int(bool(each)) for each in scalers)))
        self._try("object", self._check_user)

    def _try(self, part: str, action: Callable[[], object]) -> None:
        self._fits.add(part)
        try:
            action()
        except StateDictError as error:
            if self._strict:
                raise StateDictError(f"{self._saved.path}: {error}") from None
            self._fits.remove(part)
            self.notes.append(f"{error}; the {part} stays as it is")

    def _check_model(self) -> None:
        saved, model = self._saved.state["model"], self._training.model
        _check_count("model", int(saved is not None), int(model is not None))
        theirs, mine = dict(saved or ()), {} if model is None else unwrapped_state_dict(model)
        missing, unexpected = ([path for path in a if path not in b] for a, b in ((mine, theirs), (theirs, mine)))
        texts = IncompatibleKeys(missing, unexpected).describe() if self._strict else []
        for path, value in theirs.items():
            if isinstance(mine.get(path), TensorBase) and isinstance(value, dict) and "tensor" in value:
                names, name, shape = self._saved.names, value["tensor"], tuple(mine[path].shape)
                found = names.get(rank_array_name(self._origin, name)) or names.get(name)
                if found is not None and found[1] != shape:
                    texts.append(f"size mismatch: {path} is {found[1]} in the checkpoint, {shape} in the model")
        if texts:
            raise StateDictError(f"this is another model: {'; '.join(texts)}")

    def _check_optimizers(self) -> None:
        _check_count("optimizer", len(self._optimizers), len(self._training.optimizers))
        for saved, optimizer in zip(self._optimizers, self._training.optimizers, strict=True):
            saved.check(optimizer, self._training.names)

    def _check_schedulers(self) -> None:
        saved, schedulers = self._saved.state["schedulers"], self._training.schedulers
        _check_count("scheduler", len(saved), len(schedulers))
        for (theirs, _), mine in zip(saved, schedulers, strict=True):
            if theirs != type(mine).__name__:
                raise StateDictError(f"the checkpoint has a {theirs}, the scheduler is a {type(mine).__name__}")

    def _check_user(self) -> None:
        if names := missing_user_state(self._training.user, self._saved.own_state[self._origin]["user"]):
            raise StateDictError(f"the checkpoint has no state of {', '.join(names)}")

    def load_model(self) -> None:
        """Puts the model in. Raises: StateDictError if the checkpoint is of another model; nothing has changed then."""
        model = self._training.model
        if model is not None and "model" in self._fits:
            self._try("model", lambda: load_into(model, self._saved, self._origin, self._strict))

    def load_rest(self) -> None:
        """Puts all else in; random numbers last. Collective in its first part, which fails on no rank alone."""
        training, state = self._training, self._saved.state
        if "model" in self._fits:
            self._load_plans()
            self._load_hooks()
        if "optimizer" in self._fits:
            for saved, optimizer in zip(self._optimizers, training.optimizers, strict=True):
                saved.load(optimizer)
        if "scheduler" in self._fits:
            for (_, saved_state), scheduler in zip(state["schedulers"], training.schedulers, strict=True):
                scheduler.load_state_dict(self._value(saved_state))
        if training.scaler is not None and "scaler" in self._fits:
            training.scaler.load_state_dict(self._value(state["scaler"]))
        user = self._own(self._origin, "user")
        if user is not None:  # else nothing was given when it was saved
            restore_user(training.user, user)
        if not self._same_size:
            self.notes.append(_of_another_size(self._saved.size, self._size))
        present = self._rank < self._saved.size
        self._random = [self._own(rank, "random") for rank in ([self._rank] if present else range(self._saved.size))]
        self.restore_random()

    def restore_random(self) -> None:
        """Puts random numbers where they were, once more."""
        if self._rank < self._saved.size:
            restore_random(self._random[0])
        else:
            derive_random(self._random, self._rank, self.step)
        for model in self._training.parallel:
            if model.micro_batches is not None:
                model.micro_batches.seed_draws()

    def loader_state(self) -> Any:
        """What the loader said, None if there was none."""
        # Where ranks are not what they were, one counts.
        return self._own(self._origin if self._same_size else 0, "loader")

    @property
    def within(self) -> bool:
        """Whether the loader was in the middle of a pass."""
        return bool(self._saved.own_state[self._origin]["within"])

    def _value(self, encoded: JSON) -> Any:
        return read_value(self._saved, self._origin, encoded)

    def _own(self, rank: int, part: str) -> Any:
        return read_value(self._saved, rank, self._saved.own_state[rank][part])

    def _load_plans(self) -> None:
        plans, parallel = self._saved.state["parallel"], self._training.parallel
        for number, model in enumerate(parallel):
            if not self._same_size and model.micro_batches is None:
                if model.buffer_sync is not None:
                    model.buffers_at = -1  # ranks may have others' now
            elif len(plans) == len(parallel):
                try:
                    model.load_plan_state(plans[number])
                except ParallelError:
                    if self._strict:  # else a model of other parameters may have been given, which makes plans anew
                        raise

    def _load_hooks(self) -> None:
        owns = self._saved.own_state
        for number, model in enumerate(self._training.parallel):
            hook: Any = model.comm_hook
            saved = owns[self._origin]["hooks"][number : number + 1]
            if hook is None or saved in ([], [None]):
                continue
            [[kind, state]] = saved
            if kind != type(hook).__name__:
                self.notes.append(f"the state of hook {kind} is left out, the model has {type(hook).__name__}")
            elif self._same_size:
                hook.load_state_dict(self._value(state))
            else:
                states = [read_value(self._saved, rank, own["hooks"][number][1]) for rank, own in enumerate(owns)]
                resharded = isinstance(states[0], dict) and "errors" in states[0]
                state = reshard_hook_state(states, self._rank, self._size) if resharded else states[self._origin]
                hook.load_state_dict(state)


def load_into(model: Module, checkpoint: Saved, rank: int, strict: bool) -> IncompatibleKeys:
    """Copies the model's state, as that saved rank had it, into `model`. Raises: StateDictError, naming what differs;
    nothing has changed then."""
    saved = checkpoint.state["model"]
    values = read_value(checkpoint, rank, [value for _, value in saved])
    return model.load_state_dict({path: value for (path, _), value in zip(saved, values, strict=True)}, strict=strict)


def _check_count(what: str, saved: int, given: int) -> None:
    if saved != given:
        plural = "" if saved == 1 else "s"
        raise StateDictError(f"the checkpoint has the state of {saved} {what}{plural}, {given} given to Checkpointer")


def _of_another_size(saved: int, size: int) -> str:
    first, last = sorted((saved, size))
    ranks = f"rank {first}" if last == first + 1 else f"ranks {first} to {last - 1}"
    what = f"random numbers of {ranks} begin anew" if size > saved else f"what {ranks} had alone is left out"
    return f"saved by {saved} rank{'s' if saved > 1 else ''} and loaded by {size}: {what}"


def load_model(path: str | os.PathLike[str], model: Module, strict: bool = True) -> IncompatibleKeys:
    """Copies parameters and buffers from a checkpoint into `model`, and nothing else. No other rank is asked.

    path: a checkpoint, or a folder of them, of which the newest whole one counts; of any number of ranks
    strict: False: names that only one side has stay as they are, and are returned
    Returns: missing_keys, in the model alone, and unexpected_keys, in the checkpoint alone

    Raises: StateDictError naming what differs, sizes also where not strict; CheckpointError if no checkpoint is whole.
    """
    if not isinstance(model, Module):
        raise DtypeError(f"load_model: model is a Module or a DataParallel, not {type(model).__name__}")
    # One that is named itself is verified where it is read.
    named = exists(os.path.join(path, MANIFEST_FILE))
    saved: Any = open_checkpoint(path) if named else find(Agreement(), path)
    if saved.state["model"] is None:
        raise StateDictError(f"{saved.path}: Checkpointer was given no model, so there is none in it")
    return load_into(model, saved, 0, strict)
