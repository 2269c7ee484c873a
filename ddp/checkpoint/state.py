"""Collects the state of training as JSON and arrays, and decides which rank writes which array.

There are three kinds of arrays:

    replicated   equal on all ranks, as parameters under DataParallel: each rank writes an equal part of them
    pieces       of a sharded optimizer: the rank that holds one writes it
    per_rank     different on each rank: random numbers, the residuals of a communication hook

Some arrays may be equal on all ranks or not: buffers, the states of the user and of the loader, and without
DataParallel all arrays but `pieces` and `per_rank`. Ranks compare checksums of these (to_compare). Arrays that differ
are saved per rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ddp import _device
from ddp._device import CPU, device, to_device
from ddp._engine import Version
from ddp._tensor.base import TensorBase
from ddp.checkpoint.checkpoint_files import PieceRange
from ddp.checkpoint.optimizer_state import encode_optimizer
from ddp.checkpoint.rank_group import RankGroup
from ddp.errors import ArgumentError
from ddp.nn import Module
from ddp.optim import Optimizer
from ddp.parallel import DataParallel
from ddp.serialization.structure import JSON, Array, encode, free_name, memory_key

# What `random_state` returns. `encode` can encode it.
RandomState = dict[str, Any]
# (start, stop): a range of elements.
Range = tuple[int, int]


def random_state() -> RandomState:
    """The state of this thread's generators of `ddp`, and of the global generators of NumPy and Python."""
    seed, generators = _device.random_state()
    streams = {}
    for generator_device, (own_seed, state) in generators.items():
        position = state if isinstance(state, bytes | None) else to_device(state, CPU)
        streams[str(generator_device)] = {"seed": own_seed, "at": position}
    version, words, gauss = random.getstate()
    return {
        "seed": seed,
        "streams": streams,
        "numpy": np.random.get_state(legacy=False),
        "random": [version, np.array(words, np.uint32), gauss],
    }


def restore_random(saved: RandomState) -> None:
    """Sets the random generators to a state that `random_state` returned.

    NumPy's generator keeps its state if its bit generator is not of the saved kind.
    """
    generators = {}
    for name, generator in saved["streams"].items():
        target = device(name)
        generators[target] = (generator["seed"], generator["at"])
        _device.thread_generator(target)  # makes the generator, if the device has none yet
    _device.set_random_state((saved["seed"], generators))
    numpy_state = saved["numpy"]
    if numpy_state["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"]:
        np.random.set_state(numpy_state)
    version, words, gauss = saved["random"]
    random.setstate((version, tuple(words.tolist()), gauss))


def derive_random(saved: Sequence[RandomState], rank: int, step: int) -> None:
    """Seeds the generators of `random_state` for a rank without a saved state. saved: the states of all saved ranks"""
    digest = hashlib.sha256()
    for state in saved:
        digest.update(repr(sorted((name, s["seed"], s["at"]) for name, s in state["streams"].items())).encode())
    digest.update(repr((saved[0]["seed"], rank, step)).encode())
    seed = int.from_bytes(digest.digest()[:7], "little")
    _device.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def user_state(user: Any) -> Any:
    """Returns `user`, or a copy of the dict, with every object that has a `state_dict()` replaced by its result."""
    if hasattr(user, "state_dict"):
        return user.state_dict()
    if isinstance(user, dict):
        return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in user.items()}
    return user


def missing_user_state(user: Any, saved: JSON) -> list[str]:
    """The user's objects without a saved state, e.g. `["user.ema"]`. saved: the encoded `user_state`, or None"""
    if hasattr(user, "load_state_dict"):
        return ["user"] if saved is None else []
    known = [key for key, _ in saved.get("dict", ())] if isinstance(saved, dict) else []
    return [f"user.{name}" for name in _stateful(user) if name not in known]


def restore_user(user: Any, state: Any) -> None:
    """Restores what `user_state` returned. Objects load their state dict; other values of a dict are replaced.

    Keys of the dict that are not in the state are deleted, unless their values have `load_state_dict`.
    """
    if hasattr(user, "load_state_dict"):
        user.load_state_dict(state)
    elif isinstance(user, dict) and isinstance(state, dict):
        stateful = _stateful(user)
        for name in [name for name in user if name not in state and name not in stateful]:
            del user[name]
        for name, value in state.items():
            if name in stateful:
                stateful[name].load_state_dict(value)
            else:
                user[name] = value


def _stateful(user: Any) -> dict[Any, Any]:
    return {name: value for name, value in (user or {}).items() if hasattr(value, "load_state_dict")}


def split_evenly(sizes: Mapping[str, tuple[int, int]], ranks: int) -> list[dict[str, Range]]:
    """Divides tensors among ranks, so that each rank writes about the same number of bytes.

    sizes: (number of elements, bytes per element) by name
    Returns: for each rank, (start, stop) of its elements, by name. An empty tensor belongs to rank 0

    `split_evenly({"a": (100_000, 4), "b": (100_000, 4)}, 2) == [{"a": (0, 100_000)}, {"b": (0, 100_000)}]`
    """
    total = sum(count * itemsize for count, itemsize in sizes.values())
    cuts = [total * rank // ranks for rank in range(ranks + 1)]
    parts: list[dict[str, Range]] = [{} for _ in range(ranks)]
    begin = 0
    for name, (count, itemsize) in sizes.items():
        if count == 0:
            parts[0][name] = 0, 0
        # Rank r writes elements bounds[r] to bounds[r + 1].
        bounds = [max(0, min(count, -(-(cut - begin) // itemsize))) for cut in cuts]
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                parts[rank][name] = start, stop
        begin += count * itemsize
    return parts


@dataclass(kw_only=True)
class TrainedObjects:
    """The objects that training changes.

    model: a Module, which may be a DataParallel or contain some; parallel: the DataParallel modules in it, in order
    user: a dict, or an object with a state_dict; loader: the argument of `resume`
    began: the loader's epoch at the start of the pass under way; None: no pass is under way
    """

    model: Module | None
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    scaler: Any
    user: Any
    loader: Any = None
    began: int | None = None
    parallel: list[DataParallel] = field(init=False)

    def __post_init__(self) -> None:
        modules = () if self.model is None else self.model.modules()
        self.parallel = [module for module in modules if isinstance(module, DataParallel)]

    @property
    def within(self) -> bool:
        """Whether the loader is in the middle of a pass. After the last batch of a pass, `began` may still be set."""
        return self.began is not None and self.began == self.loader.epoch

    @property
    def names(self) -> dict[int, str]:
        """The names of the model's parameters and persistent buffers, by id."""
        if self.model is None:
            return {}
        state = unwrapped_state_dict(self.model, keep_vars=True)
        return {id(p): name for name, p in state.items() if isinstance(p, TensorBase)}


def unwrapped_state_dict(model: Module, keep_vars: bool = False) -> dict[str, Any]:
    """The model's state dict with the names that it has without DataParallel wrappers. Checkpoints use these names."""
    state = model.state_dict(keep_vars=keep_vars)
    for path, module in reversed([*model.named_modules(remove_duplicate=False)]):  # inner modules first
        if isinstance(module, DataParallel):
            prefix = f"{path}." if path else ""
            wrapped = f"{prefix}module."
            state = {
                prefix + name.removeprefix(wrapped) if name.startswith(wrapped) else name: value
                for name, value in state.items()
            }
    return state


@dataclass(kw_only=True)
class ArraySource:
    """An array that this rank writes, not copied yet.

    version: of its tensor, None if it belongs to no tensor
    piece: its range in a tensor that several ranks write; None: it is a whole tensor
    """

    name: str
    array: Array
    version: Version | None = None
    piece: PieceRange | None = None


@dataclass
class _ArrayTable:
    """Collects the arrays of one kind from `encode`. taken: the names of arrays of all kinds"""

    taken: set[str]
    sources: list[ArraySource] = field(default_factory=list)

    def __call__(self, name: str, array: Array, tensor: TensorBase | None) -> str:
        free = free_name(name, self.taken)
        self.taken.add(free)
        self.sources.append(ArraySource(name=free, array=array, version=None if tensor is None else tensor.version))
        return free


def rank_array_name(rank: int, name: str) -> str:
    """The name under which a per-rank array is saved."""
    return f"rank-{rank:04d}.{name}"


class _StateEncoder:
    """Encodes the objects of one rank. Its tables collect the arrays: see the module's docstring."""

    def __init__(self, training: TrainedObjects) -> None:
        self.training = training
        taken: set[str] = set()
        self.replicated, self.pieces, self.per_rank, self.to_compare = (_ArrayTable(taken) for _ in range(4))
        # State that DataParallel keeps equal on all ranks need not be compared.
        self.synchronized = self.replicated if training.parallel else self.to_compare

    def encode(self, rank: int) -> tuple[JSON, JSON]:
        """Encodes the state. Returns what is equal on all ranks, and the state of this rank."""
        training = self.training
        names = training.names
        optimizers = [
            encode_optimizer(optimizer, names, f"optimizer.{number}", self.synchronized, self.pieces, rank)
            for number, optimizer in enumerate(training.optimizers)
        ]
        state = {
            "model": None if training.model is None else self._model(training.model),
            "parallel": [model.plan_state() for model in training.parallel],
            "optimizers": [described for described, _ in optimizers],
            "schedulers": [
                [type(scheduler).__name__, self._state_dict(scheduler, f"scheduler.{number}", self.synchronized)]
                for number, scheduler in enumerate(training.schedulers)
            ],
            "scaler": self._state_dict(training.scaler, "scaler", self.synchronized),
        }
        own_state = {
            "pieces": [pieces for _, pieces in optimizers],
            "hooks": [self._hook(model.comm_hook, f"hook.{number}") for number, model in enumerate(training.parallel)],
            "random": encode(random_state(), "random", self.per_rank),
            "user": encode(user_state(training.user), "user", self.to_compare),
            "loader": self._state_dict(training.loader, "loader", self.to_compare),
            "within": training.within,
        }
        return state, own_state

    def _state_dict(self, stateful: Any, name: str, table: _ArrayTable) -> JSON:
        return None if stateful is None else encode(stateful.state_dict(), name, table)

    def _hook(self, hook: Any, name: str) -> JSON:
        if not hasattr(hook, "state_dict"):
            return None
        return [type(hook).__name__, self._state_dict(hook, name, self.per_rank)]

    def _model(self, model: Module) -> JSON:
        parameters = {id(p.version) for p in model.parameters()}
        syncs = [wrapper.buffer_sync for wrapper in self.training.parallel if wrapper.buffer_sync is not None]
        # Buffers that the next forward will replace: their new values are saved.
        pending = {id(tensor.version): part for sync in syncs for tensor, part in sync.coming()}
        names: dict[Any, str] = {}  # by memory: tied tensors are written once
        entries = []
        for path, value in unwrapped_state_dict(model).items():
            if not isinstance(value, TensorBase):
                entries.append([path, encode(value, f"model.{path}", self.to_compare)])
                continue
            memory = memory_key(value.array)
            if memory not in names:
                keep = self.synchronized if id(value.version) in parameters else self.to_compare
                names[memory] = keep(f"model.{path}", pending.get(id(value.version), value.array), value)
            entries.append([path, {"tensor": names[memory]}])
        return entries


class Captured(NamedTuple):
    """The part of the state that a rank writes.

    equal: the rank's part of the arrays that are equal on all ranks; pieces: of sharded optimizers; per_rank: other
    arrays of this rank; state: the JSON that is equal on all ranks; own_state: the JSON of this rank
    """

    equal: list[ArraySource]
    pieces: list[ArraySource]
    per_rank: list[ArraySource]
    state: JSON
    own_state: JSON

    @property
    def sources(self) -> list[ArraySource]:
        """All arrays."""
        return self.equal + self.pieces + self.per_rank


def capture(training: TrainedObjects, ranks: RankGroup, node: tuple[int, int] | None = None) -> Captured:
    """Collects the state as it is now. Contiguous arrays are not copied. Collective, unless `node` is given.

    node: this rank's number on its node, and the number of ranks there. If it is given, the ranks of each node together
    write all that is equal on all ranks, and nothing is communicated: arrays that would be compared are saved per rank

    Raises: ArgumentError, naming the place, for a value that a checkpoint cannot hold, and CheckpointError on the other
    ranks.
    """
    encoder = _StateEncoder(training)
    alone = node is not None
    part, parts = node or (ranks.rank, ranks.size)
    states: list[JSON] = []

    def encode_all() -> dict[str, str]:
        try:
            states.extend(encoder.encode(part))
        except RecursionError:
            raise ArgumentError("the state contains itself, or is nested too deep for a checkpoint") from None
        compared = () if alone or ranks.size == 1 else encoder.to_compare.sources
        return {source.name: _checksum(source.array) for source in compared}

    tables = [encode_all()] if alone else ranks.run_on_all_ranks("the state cannot be saved", encode_all, reraise=True)
    replicated = encoder.replicated.sources
    per_rank = encoder.per_rank.sources
    for source in encoder.to_compare.sources:
        same = not alone and len({checksums.get(source.name) for checksums in tables}) == 1
        (replicated if same else per_rank).append(source)
    for source in per_rank:
        source.name = rank_array_name(ranks.rank, source.name)
    replicated.sort(key=lambda source: source.name)  # the same order on all ranks
    sizes = {source.name: (source.array.size, source.array.itemsize) for source in replicated}
    ranges = split_evenly(sizes, parts)[part]
    equal = [_cut(source, *ranges[source.name]) for source in replicated if source.name in ranges]
    return Captured(equal, encoder.pieces.sources, per_rank, *states)


def _cut(source: ArraySource, start: int, stop: int) -> ArraySource:
    """The source of elements start to stop of an array."""
    array = source.array
    if (start, stop) == (0, array.size):
        return source
    piece = (start, stop, tuple(array.shape))
    return ArraySource(name=source.name, array=array.reshape(-1)[start:stop], version=source.version, piece=piece)


def _checksum(array: Array) -> str:
    host = np.asarray(to_device(array, CPU), order="C")
    digest = hashlib.blake2b(repr((str(host.dtype), host.shape)).encode(), digest_size=16)
    digest.update(host.reshape(-1).view(np.uint8).data if host.size else b"")
    return digest.hexdigest()
