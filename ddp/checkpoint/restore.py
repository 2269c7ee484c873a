"""Restores a checkpoint. Model, optimizers, schedulers, scaler and `user` are checked before anything is changed.

If as many ranks load a checkpoint as saved it, every rank gets back its own state. Otherwise rank r gets the own state
of rank r % n, if n ranks saved it. There are three exceptions. The loader's state is that of rank 0. The random numbers
of additional ranks are seeded anew. If m ranks load, the residuals of a communication hook on saved rank r go to rank
r % m, where they are added up. `load_model` restores the model alone, in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from collectives.errors import name_ranks
from ddp._tensor.base import TensorBase
from ddp.checkpoint.checkpoint_files import MANIFEST_FILE, exists
from ddp.checkpoint.checkpoint_reader import Saved, find, open_checkpoint
from ddp.checkpoint.optimizer_state import SavedOptimizer
from ddp.checkpoint.rank_group import RankGroup
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

#: The keys of the state that is equal on all ranks, as `capture` returns it.
PARTS = {"model", "parallel", "optimizers", "schedulers", "scaler"}


def read_value(saved: Saved, rank: int, encoded: JSON) -> Any:
    """Decodes a value that `rank` of the checkpoint has encoded. Its arrays are read together.

    Raises: CheckpointError, which names the checkpoint, for a value that a Checkpointer does not write, or a damaged
    array.
    """
    names = {}
    for name in names_in(encoded):
        per_rank = rank_array_name(rank, name)
        names[name] = per_rank if per_rank in saved.names else name
    try:
        arrays = saved.read_names(set(names.values()))
        return Decoder(lambda name: arrays[names[name]]).decode(encoded)
    except (KeyError, SerializationError) as error:
        raise CheckpointError(f"{saved.path}: {error}") from None


class Restorer:
    """Loads one checkpoint into the objects of one rank. rank, size: this rank, and how many ranks load"""

    def __init__(self, saved: Saved, training: TrainedObjects, rank: int, size: int, strict: bool) -> None:
        self._saved = saved
        self._training = training
        self._strict = strict
        self._rank = rank
        self._size = size
        self._same_size = size == saved.size
        self._origin = rank % saved.size  # the saved rank whose own state this rank gets
        self._fits: set[str] = set()  # the parts that have passed their check
        self.step = saved.step
        self.notes: list[str] = []  # for a warning: what differs from the state that was saved

    def check(self) -> None:
        """Checks whether the checkpoint fits the objects. Changes nothing.

        Raises: StateDictError, with names, if it does not and `strict` is set; CheckpointError if no Checkpointer wrote
        it.
        """
        state = _checked_state(self._saved)
        self._optimizers = [
            SavedOptimizer(described, [own["pieces"][number] for own in self._saved.own_state], self._value)
            for number, described in enumerate(state["optimizers"])
        ]
        self._try("model", self._check_model)
        self._try("optimizer", self._check_optimizers)
        self._try("scheduler", self._check_schedulers)
        self._try("scaler", self._check_scaler)
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
        saved = self._saved.state["model"]
        model = self._training.model
        _check_count("model", saved is not None, model is not None)
        saved_state = dict(saved or ())
        own_state = {} if model is None else unwrapped_state_dict(model)
        problems: list[str] = []
        if self._strict:
            missing = [path for path in own_state if path not in saved_state]
            unexpected = [path for path in saved_state if path not in own_state]
            problems = IncompatibleKeys(missing, unexpected).describe()
        names = self._saved.names
        for path, value in saved_state.items():
            if isinstance(own_state.get(path), TensorBase) and isinstance(value, dict) and "tensor" in value:
                name = value["tensor"]
                shape = tuple(own_state[path].shape)
                saved_tensor = names.get(rank_array_name(self._origin, name)) or names.get(name)
                if saved_tensor is not None and saved_tensor[1] != shape:
                    problems.append(
                        f"size mismatch: {path} is {saved_tensor[1]} in the checkpoint, {shape} in the model"
                    )
        if problems:
            raise StateDictError(f"this is another model: {'; '.join(problems)}")

    def _check_optimizers(self) -> None:
        _check_count("optimizer", len(self._optimizers), len(self._training.optimizers))
        for saved, optimizer in zip(self._optimizers, self._training.optimizers, strict=True):
            saved.check(optimizer, self._training.names)

    def _check_schedulers(self) -> None:
        saved = self._saved.state["schedulers"]
        kinds = [type(scheduler).__name__ for scheduler in self._training.schedulers]
        _check_count("scheduler", len(saved), len(kinds))
        for (saved_kind, _), kind in zip(saved, kinds, strict=True):
            if saved_kind != kind:
                raise StateDictError(f"the checkpoint has a {saved_kind}, the scheduler is a {kind}")

    def _check_scaler(self) -> None:
        scaler = self._training.scaler
        # The state of a disabled scaler is empty.
        _check_count("scaler", bool(self._value(self._saved.state["scaler"])), bool(scaler and scaler.state_dict()))

    def _check_user(self) -> None:
        if names := missing_user_state(self._training.user, self._saved.own_state[self._origin]["user"]):
            raise StateDictError(f"the checkpoint has no state of {', '.join(names)}")

    def load_model(self) -> None:
        """Loads the model. Raises: StateDictError if it does not fit and `strict` is set: see `load_into`."""
        model = self._training.model
        if model is not None and "model" in self._fits:
            self._try("model", lambda: load_into(model, self._saved, self._origin, self._strict))

    def load_rest(self) -> None:
        """Loads everything else, random numbers last. The plans come first, as loading them is collective."""
        training = self._training
        state = self._saved.state
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
        user = self._own_value(self._origin, "user")
        if user is not None:  # None: there was no `user` when the checkpoint was saved
            restore_user(training.user, user)
        if not self._same_size:
            self.notes.append(_describe_size_change(self._saved.size, self._size))
        ranks = [self._rank] if self._rank < self._saved.size else range(self._saved.size)
        self._random = [self._own_value(rank, "random") for rank in ranks]
        self.restore_random()

    def restore_random(self) -> None:
        """Sets random generators to the saved state, or seeds those of an additional rank. May be called repeatedly."""
        if self._rank < self._saved.size:
            restore_random(self._random[0])
        else:
            derive_random(self._random, self._rank, self.step)
        for model in self._training.parallel:
            if model.micro_batches is not None:
                model.micro_batches.seed_draws()

    def loader_state(self) -> Any:
        """The state of the loader, None if there was none. On another number of ranks it is that of rank 0."""
        return self._own_value(self._origin if self._same_size else 0, "loader")

    @property
    def within(self) -> bool:
        """Whether the loader was in the middle of a pass when the state was saved."""
        return bool(self._saved.own_state[self._origin]["within"])

    def _value(self, encoded: JSON) -> Any:
        return read_value(self._saved, self._origin, encoded)

    def _own_value(self, rank: int, part: str) -> Any:
        return read_value(self._saved, rank, self._saved.own_state[rank][part])

    def _load_plans(self) -> None:
        plans = self._saved.state["parallel"]
        parallel = self._training.parallel
        for number, model in enumerate(parallel):
            if not self._same_size and model.micro_batches is None:
                if model.buffer_sync is not None:
                    model.buffers_at = -1  # the ranks' buffers may differ now
            elif len(plans) == len(parallel):
                try:
                    model.load_plan_state(plans[number])
                except ParallelError:
                    if self._strict:  # otherwise the model may have other parameters, and makes a new plan
                        raise

    def _load_hooks(self) -> None:
        own_states = self._saved.own_state
        for number, model in enumerate(self._training.parallel):
            hook: Any = model.comm_hook
            saved = own_states[self._origin]["hooks"][number : number + 1]
            if hook is None or saved in ([], [None]):
                continue
            [[kind, state]] = saved
            if kind != type(hook).__name__:
                self.notes.append(f"the state of hook {kind} is left out, the model has {type(hook).__name__}")
            elif self._same_size:
                hook.load_state_dict(self._value(state))
            else:
                states = [read_value(self._saved, rank, own["hooks"][number][1]) for rank, own in enumerate(own_states)]
                resharded = isinstance(states[0], dict) and "errors" in states[0]
                state = reshard_hook_state(states, self._rank, self._size) if resharded else states[self._origin]
                hook.load_state_dict(state)


def _checked_state(saved: Saved) -> dict[str, JSON]:
    """The state that is equal on all ranks. Raises: CheckpointError if no Checkpointer wrote it."""
    state = saved.state
    if not isinstance(state, dict) or state.keys() != PARTS:
        raise CheckpointError(f"{saved.path} was not written by a Checkpointer: open it with open_checkpoint")
    return state


def load_into(model: Module, checkpoint: Saved, rank: int, strict: bool) -> IncompatibleKeys:
    """Loads the model's state into `model`, as `rank` saved it.

    Raises: StateDictError, with all differences. Then nothing has changed, with the exceptions that
    `Module.load_state_dict` names.
    """
    saved = checkpoint.state["model"]
    values = read_value(checkpoint, rank, [value for _, value in saved])
    return model.load_state_dict({path: value for (path, _), value in zip(saved, values, strict=True)}, strict=strict)


def _check_count(part: str, saved: int, given: int) -> None:
    if saved != given:
        plural = "" if saved == 1 else "s"
        raise StateDictError(
            f"the checkpoint has the state of {saved:d} {part}{plural}, {given:d} given to Checkpointer"
        )


def _describe_size_change(saved: int, size: int) -> str:
    first, last = sorted((saved, size))
    ranks = name_ranks(range(first, last))
    change = f"random numbers of {ranks} begin anew" if size > saved else f"what {ranks} had alone is left out"
    return f"saved by {saved} rank{'s' if saved > 1 else ''} and loaded by {size}: {change}"


def load_model(path: str | os.PathLike[str], model: Module, strict: bool = True) -> IncompatibleKeys:
    """Copies only the model's state from a checkpoint into `model`. Not collective.

    path: a checkpoint of any number of ranks, or a folder of checkpoints, whose newest undamaged one is read
    strict: False: names that exist only on one side are skipped, and returned
    Returns: missing_keys, which only the model has, and unexpected_keys, which only the checkpoint has

    Raises: StateDictError, with all differences (if not strict, only those of sizes), or if the checkpoint has no
    model; CheckpointError if no checkpoint is undamaged, or no Checkpointer wrote it; DtypeError if
    `model` is not a Module.
    """
    if not isinstance(model, Module):
        raise DtypeError(f"load_model: model is a Module or a DataParallel, not {type(model).__name__}")
    # A single checkpoint is verified while it is read. In a folder, `find` first verifies whole checkpoints, from the
    # newest on, until it finds an undamaged one.
    single = exists(os.path.join(path, MANIFEST_FILE))
    saved: Any = open_checkpoint(path) if single else find(RankGroup(), path)
    if _checked_state(saved)["model"] is None:
        raise StateDictError(f"{saved.path}: Checkpointer was given no model, so there is none in it")
    return load_into(model, saved, 0, strict)
