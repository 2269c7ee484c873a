"""From a checkpoint back into what training changes: everything is checked first, and only then put in.

At the world size that wrote it every rank gets back its own. At another one, rank r goes on from what rank r % size had
of its own, but for random numbers of ranks that were not there and what communication hooks have left out.
`load_model` takes the model alone: one process reads it, whichever wrote it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddp._device import CPU, place
from ddp._tensor.base import TensorBase
from ddp.checkpoint.agreement import Agreement
from ddp.checkpoint.manifest import MANIFEST_FILE
from ddp.checkpoint.optimizer_state import SavedOptimizer
from ddp.checkpoint.saved import Saved, find, open_checkpoint
from ddp.checkpoint.state import (
    TrainedObjects,
    derive_random,
    missing_user_state,
    rank_array_name,
    restore_random,
    restore_user,
)
from ddp.errors import CheckpointError, DdpError, DtypeError, ParallelError, SerializationError, StateDictError
from ddp.nn import Module
from ddp.nn.state_dict import IncompatibleKeys
from ddp.parallel.comm_hooks.error_feedback import reshard_hook_state
from ddp.serialization.structure import JSON, Array, Decoder, names_in


class SavedArrays(Decoder):
    """The arrays of a checkpoint as one saved rank had them, read when they are wanted. rank: in the saved world"""

    def __init__(self, saved: Saved, rank: int) -> None:
        super().__init__(self._fetch)
        self._saved = saved
        self._rank = rank
        self._read: dict[str, Array] = {}

    def value(self, encoded: JSON) -> Any:
        """What was encoded. Nothing of it is kept."""
        self.want(names_in(encoded))
        try:
            return self.decode(encoded)
        finally:
            self.forget()

    def decode(self, saved: JSON) -> Any:
        """See Decoder. Raises: CheckpointError, which names the checkpoint, for what a Checkpointer does not write."""
        try:
            return super().decode(saved)
        except SerializationError as error:
            raise CheckpointError(f"{self._saved.path}: {error}") from None

    def want(self, names: Iterable[str]) -> None:
        """Reads these at once, which is faster than one by one."""
        self._read.update(self._saved.read_names({self.resolved(name) for name in names}))

    def forget(self) -> None:
        """Lets go of what was read."""
        self._read.clear()

    def resolved(self, name: str) -> str:
        """The name in the checkpoint: that of the rank's own array, if it had one."""
        own = rank_array_name(self._rank, name)
        return own if own in self._saved.names else name

    def _fetch(self, name: str) -> Array:
        if self.resolved(name) not in self._read:
            self.want([name])
        return self._read[self.resolved(name)]


class Restorer:
    """One checkpoint on its way into one rank. rank, size: of the world that loads it"""

    def __init__(self, saved: Saved, training: TrainedObjects, rank: int, size: int, strict: bool) -> None:
        self._saved, self._training, self._strict = saved, training, strict
        self._rank, self._size = rank, size
        self._origin = rank if size == saved.size else rank % saved.size
        self._arrays = SavedArrays(saved, self._origin)
        self._own: Mapping[str, Any] = saved.own_state[self._origin]
        self._random: Callable[[], None]
        self.step = saved.step
        self.notes: list[str] = []  # what is not as it was saved, in words

    def check(self) -> None:
        """Raises: StateDictError, with names, if the checkpoint is of something else; nothing has changed yet."""
        try:
            self._check()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DdpError):
                raise
            raise CheckpointError(
                f"{self._saved.path}: a Checkpointer does not write such a state: {type(error).__name__}: {error}"
            ) from error

    def _check(self) -> None:
        training, state, names = self._training, self._saved.state, self._training.names
        self._optimizers = [
            SavedOptimizer(described, [own["pieces"][at] for own in self._saved.own_state], self._arrays)
            for at, described in enumerate(state["optimizers"])
        ]
        self._fits = {"model": True, "optimizer": True, "scheduler": True, "scaler": True}
        self._try("model", self._check_model)
        self._try("optimizer", lambda: self._check_optimizers(names))
        self._try("scheduler", lambda: _alike("scheduler", state["schedulers"], training.schedulers))
        self._try("scaler", self._check_scaler)
        self._try("object", self._check_user)

    def load_model(self) -> None:
        """Puts the model in."""
        if self._training.model is not None and self._fits["model"]:
            load_into(self._training.model, self._saved.state["model"], self._arrays, self._strict)

    def load_plans(self) -> None:
        """Has DataParallel go on with its plans. Collective: nothing in it fails on one rank alone."""
        plans, parallel = self._saved.state["parallel"], self._training.parallel
        if not self._fits["model"]:
            return
        for number, model in enumerate(parallel):
            if self._size != self._saved.size:
                if model.buffer_sync is not None:
                    model.buffers_at = -1  # ranks may have others' now
            elif len(plans) == len(parallel):
                try:
                    model.load_plan_state(plans[number])
                except ParallelError:
                    if self._strict:  # else a model of other parameters may have been given, which makes plans anew
                        raise

    def load_rest(self) -> None:
        """Puts all else in; random numbers last."""
        training, state = self._training, self._saved.state
        if self._fits["model"]:
            self._load_hooks()
        if self._fits["optimizer"]:
            for saved, optimizer in zip(self._optimizers, training.optimizers, strict=True):
                self._arrays.want(saved.needs(optimizer))
                saved.load(optimizer)
                self._arrays.forget()
        if self._fits["scheduler"]:
            for (_, saved_state), scheduler in zip(state["schedulers"], training.schedulers, strict=True):
                scheduler.load_state_dict(self._arrays.value(saved_state))
        if training.scaler is not None and self._fits["scaler"]:
            training.scaler.load_state_dict(self._arrays.value(state["scaler"]))
        if self._own["user"] is not None:  # else nothing was given when it was saved
            restore_user(training.user, self._arrays.value(self._own["user"]))
        if self._size != self._saved.size:
            self.notes.append(_of_another_size(self._saved.size, self._size))
        self._random = self._read_random()
        self.restore_random()

    def restore_random(self) -> None:
        """Puts random numbers where they were, once more."""
        self._random()

    def loader_state(self) -> Any:
        """What the loader said, None if there was none."""
        rank = self._origin if self._size == self._saved.size else 0  # where ranks are not what they were, one counts
        return SavedArrays(self._saved, rank).value(self._saved.own_state[rank]["loader"])

    @property
    def within(self) -> bool:
        """Whether the loader was in the middle of a pass."""
        return bool(self._own["within"])

    def _read_random(self) -> Callable[[], None]:
        if self._rank < self._saved.size:
            return functools.partial(restore_random, self._arrays.value(self._own["random"]))
        everyones = self._of_all_ranks(lambda own: own["random"])
        return functools.partial(derive_random, everyones, self._rank, self._saved.step)

    def _of_all_ranks(self, part: Callable[[Any], JSON]) -> list[Any]:
        owns = enumerate(self._saved.own_state)
        return [SavedArrays(self._saved, rank).value(part(own)) for rank, own in owns]

    def _try(self, part: str, check: Any) -> None:
        try:
            check()
        except DdpError as error:
            if self._strict:
                raise StateDictError(f"{self._saved.path}: {error}") from None
            self._fits[part] = False
            self.notes.append(f"{error}; the {part} stays as it is")

    def _check_model(self) -> None:
        saved, model = self._saved.state["model"], self._training.model
        if (saved is None) != (model is None):
            _missing("model", saved is not None)
        if model is not None:
            check_model(model, saved, self._saved, self._strict)

    def _check_optimizers(self, names: Mapping[int, str]) -> None:
        _alike("optimizer", [[each["kind"]] for each in self._saved.state["optimizers"]], self._training.optimizers, ())
        for saved, optimizer in zip(self._optimizers, self._training.optimizers, strict=True):
            saved.check(optimizer, names)

    def _check_scaler(self) -> None:
        scaler, saved = self._training.scaler, self._saved.state["scaler"]
        mine = scaler is not None and bool(scaler.state_dict())  # a disabled one has no state
        if mine != bool(saved is not None and self._arrays.value(saved)):
            _missing("scaler", not mine)

    def _check_user(self) -> None:
        saved = self._own["user"]
        given = () if saved is None else (saved,)  # None: nothing was given when it was saved
        if names := missing_user_state(self._training.user, *given):
            raise StateDictError(f"the checkpoint has no state of {', '.join(names)}")

    def _load_hooks(self) -> None:
        for number, model in enumerate(self._training.parallel):
            hook: Any = model.comm_hook
            saved_state = self._own["hooks"][number] if number < len(self._own["hooks"]) else None
            if saved_state is None or hook is None:
                continue
            if saved_state[0] == type(hook).__name__:
                hook.load_state_dict(self._hook_state(number))
            else:
                self.notes.append(
                    f"the state of hook {saved_state[0]} is left out, the model has {type(hook).__name__}"
                )

    def _hook_state(self, number: int) -> Any:
        if self._size == self._saved.size:
            return self._arrays.value(self._own["hooks"][number][1])
        everyones = self._of_all_ranks(lambda own: own["hooks"][number][1])
        if not isinstance(everyones[0], dict) or "errors" not in everyones[0]:
            return everyones[self._origin]
        return reshard_hook_state([_as_arrays(each) for each in everyones], self._rank, self._size)


def check_model(model: Module, saved: JSON, checkpoint: Saved, strict: bool) -> None:
    """Raises: StateDictError listing what is missing, unexpected and of another shape."""
    there = dict(saved)
    mine = model.state_dict()
    missing = [path for path in mine if path not in there]
    unexpected = [path for path in there if path not in mine]
    texts = []
    if strict and missing:
        texts.append(f"missing in the checkpoint: {', '.join(missing)}")
    if strict and unexpected:
        texts.append(f"not in the model: {', '.join(unexpected)}")
    for path, value in saved:
        here = mine.get(path)
        if isinstance(here, TensorBase) and isinstance(value, dict) and "tensor" in value:
            names = checkpoint.names
            name = SavedArrays(checkpoint, 0).resolved(value["tensor"])
            if name in names and names[name][1] != tuple(here.array.shape):
                texts.append(f"{path} is {names[name][1]} in the checkpoint and {tuple(here.array.shape)} in the model")
    if texts:
        raise StateDictError(f"this is another model: {'; '.join(texts)}")


def load_into(model: Module, saved: JSON, arrays: SavedArrays, strict: bool) -> IncompatibleKeys:
    """Copies the saved model's state into `model`."""
    paths, values = [path for path, _ in saved], arrays.value([value for _, value in saved])
    return model.load_state_dict(dict(zip(paths, values, strict=True)), strict=strict)


def _alike(what: str, saved: Sequence[Any], given: Sequence[Any], kinds: Sequence[str] | None = None) -> None:
    if len(saved) != len(given):
        raise StateDictError(f"the checkpoint has {len(saved)} {what}s, there are {len(given)}")
    for (theirs, *_), mine in zip(saved, given, strict=True):
        if kinds is None and theirs != type(mine).__name__:
            raise StateDictError(f"the checkpoint has the state of a {theirs}, the {what} is a {type(mine).__name__}")


def _missing(what: str, saved: bool) -> None:
    raise StateDictError(
        f"the checkpoint has the state of a {what}, and none was given to Checkpointer"
        if saved
        else f"Checkpointer was given a {what}, and the checkpoint has none"
    )


def _of_another_size(saved: int, size: int) -> str:
    first, last = sorted((saved, size))
    ranks = f"rank {first}" if last == first + 1 else f"ranks {first} to {last - 1}"
    what = f"random numbers of {ranks} begin anew" if size > saved else f"what {ranks} had alone is left out"
    return f"saved by {saved} rank{'s' if saved > 1 else ''} and loaded by {size}: {what}"


def _as_arrays(state: Any) -> Any:
    if isinstance(state, TensorBase):
        return place(state.array, CPU)
    if isinstance(state, dict):
        return {name: _as_arrays(value) for name, value in state.items()}
    return state


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
    saved = open_checkpoint(path) if os.path.exists(os.path.join(path, MANIFEST_FILE)) else find(Agreement(), path)
    saved_state = saved.state["model"]
    if saved_state is None:
        raise StateDictError(f"{saved.path}: Checkpointer was given no model, so there is none in it")
    try:
        check_model(model, saved_state, saved, strict)
    except StateDictError as error:
        raise StateDictError(f"{saved.path}: {error}") from None
    return load_into(model, saved_state, SavedArrays(saved, 0), strict)
