"""What a checkpoint holds: the state of all that training changes, as JSON and arrays, and which rank writes which.

Three kinds of arrays, by which ranks have them:

    shared   the same on all ranks, as parameters under DataParallel are: each rank writes an equal stretch of them
    pieces   of a sharded optimizer: the rank that has one writes it
    own      a rank's own: random numbers, what a communication hook has left out

Some may be either: buffers that are not broadcast, the user's state, all of a model that no DataParallel keeps the
same. Ranks compare checksums of these, and what differs is each rank's own."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ddp import _device
from ddp._device import CPU, device, to_device
from ddp._engine import Version
from ddp._tensor.base import TensorBase
from ddp.checkpoint.agreement import Agreement
from ddp.checkpoint.optimizer_state import encode_optimizer
from ddp.checkpoint.store import PieceRange
from ddp.errors import ArgumentError
from ddp.nn import Module
from ddp.optim import Optimizer
from ddp.parallel import DataParallel
from ddp.serialization.structure import JSON, Array, encode, free_name, memory_key

RandomState = dict[str, Any]  # for `encode`


def random_state() -> RandomState:
    """Where the generators of this thread are."""
    seed, streams = _device.random_state()
    version, words, gauss = random.getstate()
    return {
        "seed": seed,
        "streams": {
            str(where): {
                "seed": own,
                "at": snapshot if isinstance(snapshot, bytes | None) else to_device(snapshot, CPU),
            }
            for where, (own, snapshot) in streams.items()
        },
        "numpy": np.random.get_state(legacy=False),
        "random": [version, np.array(words, np.uint32), gauss],
    }


def restore_random(saved: RandomState) -> None:
    """Puts the generators of this thread where `random_state` found them."""
    streams = {}
    for name, stream in saved["streams"].items():
        where = device(name)
        streams[where] = (stream["seed"], stream["at"])
        _device.thread_generator(where)  # made if it is not there: the device draws from it later
    _device.set_random_state((saved["seed"], streams))
    numbers = saved["numpy"]
    if numbers["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"]:
        np.random.set_state(numbers)
    version, words, gauss = saved["random"]
    random.setstate((version, tuple(words.tolist()), gauss))


def derive_random(saved: Sequence[RandomState], rank: int, step: int) -> None:
    """Seeds this thread's generators for a rank that was not there when the others' were saved."""
    digest = hashlib.sha256()
    for each in saved:
        digest.update(repr(sorted((name, s["seed"], s["at"]) for name, s in each["streams"].items())).encode())
    digest.update(repr((saved[0]["seed"], rank, step)).encode())
    seed = int.from_bytes(digest.digest()[:7], "little")
    _device.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def user_state(user: Any) -> Any:
    """The user's state: of objects with a state_dict what that says, among a dict's values too."""
    if hasattr(user, "state_dict"):
        return user.state_dict()
    if isinstance(user, dict):
        return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in user.items()}
    return user


def missing_user_state(user: Any, saved: JSON) -> list[str]:
    """The objects without a saved state: `["user.ema"]`. saved: what `user_state` returned, encoded; None: nothing"""
    if hasattr(user, "load_state_dict"):
        return ["user"] if saved is None else []
    known = [key for key, _ in saved.get("dict", ())] if isinstance(saved, dict) else []
    return [f"user.{name}" for name in _stateful(user) if name not in known]


def restore_user(user: Any, state: Any) -> None:
    """Puts back what `user_state` returned: objects take it in, all else in a dict is replaced.

    What is not in the state goes, but for objects that take one.
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


def split_evenly(sizes: Mapping[str, tuple[int, int]], ranks: int) -> list[dict[str, tuple[int, int]]]:
    """Which elements of which tensors each rank writes.

    sizes: (number of elements, bytes of one) by name
    Returns: for each rank (start, stop) by name; every element is in one of them, and a tensor without any in one too

    `split_evenly({"a": (100_000, 4), "b": (100_000, 4)}, 2) == [{"a": (0, 100_000)}, {"b": (0, 100_000)}]`
    """
    total = sum(count * each for count, each in sizes.values())
    cuts = [total * rank // ranks for rank in range(ranks + 1)]
    parts: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks)]
    begin = 0
    for name, (count, each) in sizes.items():
        if count == 0:
            parts[0][name] = 0, 0
            continue
        at = [max(0, min(count, -(-(cut - begin) // each))) for cut in cuts]  # the element with which a rank begins
        for rank, (start, stop) in enumerate(pairwise(at)):
            if start < stop:
                parts[rank][name] = start, stop
        begin += count * each
    return parts


@dataclass(kw_only=True)
class TrainedObjects:
    """What training changes.

    model: a Module, a DataParallel, or a Module that has such; parallel: these, in the model's order
    user: a dict, or an object with a state_dict; loader: what `resume` is given
    began: the loader's epoch when a pass began that has not come to its end; None: there is none
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
        self.parallel = [each for each in modules if isinstance(each, DataParallel)]

    @property
    def within(self) -> bool:
        """Whether the loader is in the middle of a pass: a loop that was left may have had all of it."""
        return self.began is not None and self.began == self.loader.epoch

    @property
    def names(self) -> dict[int, str]:
        """The names of the model's parameters, by id."""
        if self.model is None:
            return {}
        state = unwrapped_state_dict(self.model, keep_vars=True)
        return {id(p): name for name, p in state.items() if isinstance(p, TensorBase)}


def unwrapped_state_dict(model: Module, keep_vars: bool = False) -> dict[str, Any]:
    """The model's state dict under the names that it has without DataParallel, which are those in checkpoints."""
    state = model.state_dict(keep_vars=keep_vars)
    for path, part in reversed([*model.named_modules(remove_duplicate=False)]):  # inner ones first
        if isinstance(part, DataParallel):
            prefix = f"{path}." if path else ""
            wrapped = f"{prefix}module."
            state = {
                prefix + name.removeprefix(wrapped) if name.startswith(wrapped) else name: value
                for name, value in state.items()
            }
    return state


@dataclass(kw_only=True)
class ArraySource:
    """An array to be written, where it lies now.

    version: of the tensor that it is part of, None if it is no tensor's
    piece: what it is a piece of, whose others other ranks write; None: it is whole
    """

    name: str
    array: Array
    version: Version | None = None
    piece: PieceRange | None = None


@dataclass
class _ArrayTable:
    """Arrays of one kind, as `encode` meets them. taken: names of all kinds"""

    taken: set[str]
    sources: list[ArraySource] = field(default_factory=list)

    def __call__(self, name: str, array: Array, tensor: TensorBase | None) -> str:
        free = free_name(name, self.taken)
        self.taken.add(free)
        self.sources.append(ArraySource(name=free, array=array, version=None if tensor is None else tensor.version))
        return free


def rank_array_name(rank: int, name: str) -> str:
    """The name of a rank's own array."""
    return f"rank-{rank:04d}.{name}"


def capture(training: TrainedObjects, ranks: Agreement, alone: bool = False) -> tuple[list[ArraySource], JSON, JSON]:
    """The state as it is now: what this rank is to write of the arrays, where they lie, and as JSON what is the same on
    all ranks, and what this rank says of itself. Nothing is copied. Collective if there are several ranks.

    alone: other ranks are not asked, and what may be the same on all of them is each rank's own

    Raises: ArgumentError, naming the place, for what a checkpoint cannot hold, and CheckpointError on the other ranks.
    """
    taken: set[str] = set()
    shared, pieces, own, unknown = (_ArrayTable(taken) for _ in range(4))
    encoded: list[JSON] = []

    def encode_all() -> dict[str, str]:
        try:
            encoded.extend(_encoded(training, ranks.rank, shared, pieces, own, unknown))
        except RecursionError:
            raise ArgumentError("the state contains itself, or is nested too deep for a checkpoint") from None
        compared = () if alone or ranks.size == 1 else unknown.sources
        return {source.name: _checksum(source.array) for source in compared}

    checksums = [encode_all()] if alone else ranks.run("the state cannot be saved", encode_all, reraise=True)
    for source in unknown.sources:  # what is the same on all ranks is shared, the rest each rank's own
        same = not alone and len({theirs.get(source.name) for theirs in checksums}) == 1
        (shared if same else own).sources.append(source)
    for source in own.sources:
        source.name = rank_array_name(ranks.rank, source.name)
    shared.sources.sort(key=lambda source: source.name)  # in one order on all ranks
    sizes = {each.name: (each.array.size, each.array.itemsize) for each in shared.sources}
    turn = split_evenly(sizes, ranks.size)[ranks.rank]
    sources = [_stretch(each, *turn[each.name]) for each in shared.sources if each.name in turn]
    return sources + pieces.sources + own.sources, *encoded


def _encoded(
    training: TrainedObjects,
    rank: int,
    shared: _ArrayTable,
    pieces: _ArrayTable,
    own: _ArrayTable,
    unknown: _ArrayTable,
) -> tuple[JSON, JSON]:
    parallel = training.parallel
    alike = shared if parallel else unknown  # as far as DataParallel sees to it
    names = training.names
    optimizers = [
        encode_optimizer(optimizer, names, f"optimizer.{number}", alike, pieces, rank)
        for number, optimizer in enumerate(training.optimizers)
    ]
    common = {
        "model": None if training.model is None else _model(training.model, parallel, alike, unknown),
        "parallel": [each.plan_state() for each in parallel],
        "optimizers": [described for described, _ in optimizers],
        "schedulers": [
            [type(each).__name__, encode(each.state_dict(), f"scheduler.{number}", alike)]
            for number, each in enumerate(training.schedulers)
        ],
        "scaler": None if training.scaler is None else encode(training.scaler.state_dict(), "scaler", alike),
    }
    mine = {
        "pieces": [mine for _, mine in optimizers],
        "hooks": [_hook(each, f"hook.{number}", own) for number, each in enumerate(parallel)],
        "random": encode(random_state(), "random", own),
        "user": encode(user_state(training.user), "user", unknown),
        "loader": None if training.loader is None else encode(training.loader.state_dict(), "loader", unknown),
        "within": training.within,
    }
    return common, mine


def _stretch(source: ArraySource, start: int, stop: int) -> ArraySource:
    """Elements start to stop of an array."""
    array = source.array
    if (start, stop) == (0, array.size):
        return source
    piece = (start, stop, tuple(array.shape))
    return ArraySource(name=source.name, array=array.reshape(-1)[start:stop], version=source.version, piece=piece)


def _model(model: Module, parallel: Sequence[DataParallel], alike: _ArrayTable, unknown: _ArrayTable) -> JSON:
    parameters = {id(p.version) for p in model.parameters()}
    syncs = [each.buffer_sync for each in parallel if each.buffer_sync is not None]
    # Buffers that are to become others at the next forward: it is these that count.
    pending = {id(tensor.version): part for each in syncs for tensor, part in each.coming()}
    known: dict[Any, str] = {}  # tied ones are written once
    paths = []
    for path, value in unwrapped_state_dict(model).items():
        if not isinstance(value, TensorBase):
            paths.append([path, encode(value, f"model.{path}", unknown)])
            continue
        memory = memory_key(value.array)
        if memory not in known:
            keep = alike if id(value.version) in parameters else unknown
            known[memory] = keep(f"model.{path}", pending.get(id(value.version), value.array), value)
        paths.append([path, {"tensor": known[memory]}])
    return paths


def _hook(model: DataParallel, where: str, own: _ArrayTable) -> JSON:
    hook = model.comm_hook
    if hook is None or not hasattr(hook, "state_dict"):
        return None
    return [type(hook).__name__, encode(hook.state_dict(), where, own)]


def _checksum(array: Array) -> str:
    host = np.asarray(to_device(array, CPU), order="C")
    digest = hashlib.blake2b(repr((str(host.dtype), host.shape)).encode(), digest_size=16)
    digest.update(host.reshape(-1).view(np.uint8).data if host.size else b"")
    return digest.hexdigest()
