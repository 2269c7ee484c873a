"""What a checkpoint holds: the state of everything that training changes, as JSON and arrays, and who writes which.

Three kinds of arrays, by who has them:

    shared   the same on all ranks, as parameters under DataParallel are: each rank writes an equal stretch of them
    pieces   of a sharded optimizer: whoever has one writes it
    own      a rank's own: random numbers, what a communication hook has left out

Of others nobody knows: buffers that are not broadcast, the user's state, all of a model that no DataParallel keeps the
same. Ranks compare checksums of these, and what differs is everybody's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collectives import Communicator
from ddp._device import CPU, place
from ddp._engine import Version
from ddp._tensor.base import TensorBase
from ddp.checkpoint import _optimizers, _rng
from ddp.checkpoint._agreement import together
from ddp.checkpoint._encoding import JSON, encode
from ddp.checkpoint._plan import PieceOf
from ddp.checkpoint._spreading import spread
from ddp.checkpoint._user import told
from ddp.errors import ArgumentError
from ddp.nn import Module
from ddp.optim import Optimizer
from ddp.parallel import DataParallel, ZeroOptimizer

Array = Any


@dataclass(kw_only=True)
class Training:
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
        return {id(p): name for name, p in self.model.state_dict(keep_vars=True).items() if isinstance(p, TensorBase)}


@dataclass(kw_only=True)
class Source:
    """An array to be written, where it lies now.

    version: of the tensor that it is part of, None if it is no tensor's
    piece: what it is a piece of, whose others other ranks write; None: it is whole
    """

    name: str
    array: Array
    version: Version | None = None
    piece: PieceOf | None = None


@dataclass(kw_only=True)
class State:
    """What one rank writes. shared, own: JSON, the same on all ranks and this one's"""

    sources: list[Source]
    shared: JSON
    own: JSON

    @property
    def pieces(self) -> dict[str, PieceOf]:
        """Which sources are pieces, and of what, by name."""
        return {each.name: each.piece for each in self.sources if each.piece is not None}


@dataclass
class _Kept:
    """Arrays of one kind, as `encode` meets them. taken: names of all kinds"""

    taken: set[str]
    sources: list[Source] = field(default_factory=list)

    def __call__(self, name: str, array: Array, tensor: TensorBase | None) -> str:
        number, free = 1, name
        while free in self.taken:
            number += 1
            free = f"{name}~{number}"
        self.taken.add(free)
        self.sources.append(Source(name=free, array=array, version=None if tensor is None else tensor.version))
        return free


def own_name(rank: int, name: str) -> str:
    """The name of a rank's own array."""
    return f"rank-{rank:04d}.{name}"


def capture(training: Training, comm: Communicator) -> State:
    """The state as it is now, its arrays where they lie: nothing is copied. Collective if there are several ranks.

    comm: nobody else calls on it meanwhile
    Raises: ArgumentError, naming the place, for what a checkpoint cannot hold, and CheckpointError on the other ranks.
    """
    taken: set[str] = set()
    shared, pieces, own, unknown = (_Kept(taken) for _ in range(4))
    if comm.size == 1:
        unknown = own = shared
    common: JSON = None
    mine: JSON = None

    def encode_it() -> dict[str, str]:
        nonlocal common, mine
        try:
            common, mine = _encoded(training, shared, pieces, own, unknown)
        except RecursionError:
            raise ArgumentError("the state contains itself, or is nested too deep for a checkpoint") from None
        return {} if unknown is shared else {source.name: _checksum(source.array) for source in unknown.sources}

    checksums = together(comm, "save", encode_it)
    if comm.size > 1:
        _settle(unknown.sources, shared.sources, own.sources, checksums, comm.rank)
    shared.sources.sort(key=lambda source: source.name)  # in one order on all ranks
    turn = spread({each.name: (each.array.size, each.array.itemsize) for each in shared.sources}, comm.size)[comm.rank]
    sources = [_stretch(each, *turn[each.name]) for each in shared.sources if each.name in turn]
    sources += pieces.sources
    if own is not shared:
        for source in own.sources:
            source.name = own_name(comm.rank, source.name)
        sources += own.sources
    return State(sources=sources, shared=common, own=mine)


def _encoded(training: Training, shared: _Kept, pieces: _Kept, own: _Kept, unknown: _Kept) -> tuple[JSON, JSON]:
    """What is the same on all ranks, and what this rank says of itself; arrays go where they are kept."""
    parallel = training.parallel
    alike = shared if parallel else unknown  # as far as DataParallel sees to it
    names = training.names
    optimizers, parts = [], []
    for number, optimizer in enumerate(training.optimizers):
        where, in_parts = f"optimizer.{number}", isinstance(optimizer, ZeroOptimizer)
        optimizers.append(_optimizers.describe(optimizer, names, where, alike))
        mine = _optimizers.pieces(optimizer, names, where, pieces if in_parts else alike)
        optimizers[-1]["pieces"] = [] if in_parts else mine
        parts.append(mine if in_parts else [])
    common = {
        "model": None if training.model is None else _model(training.model, parallel, alike, unknown),
        "parallel": [each.plan_state() for each in parallel],
        "optimizers": optimizers,
        "schedulers": [
            [type(each).__name__, encode(each.state_dict(), f"scheduler.{number}", alike)]
            for number, each in enumerate(training.schedulers)
        ],
        "scaler": None if training.scaler is None else encode(training.scaler.state_dict(), "scaler", alike),
    }
    mine = {
        "pieces": parts,
        "hooks": [_hook(each, f"hook.{number}", own) for number, each in enumerate(parallel)],
        "random": encode(_rng.state(), "random", own),
        "user": encode(told(training.user), "user", unknown),
        "loader": None if training.loader is None else encode(training.loader.state_dict(), "loader", unknown),
        "within": training.within,
    }
    return common, mine


def _stretch(source: Source, start: int, stop: int) -> Source:
    """Elements start to stop of an array."""
    array = source.array
    if (start, stop) == (0, array.size):
        return source
    piece = (start, stop, tuple(array.shape))
    return Source(name=source.name, array=array.reshape(-1)[start:stop], version=source.version, piece=piece)


def _model(model: Module, parallel: Sequence[DataParallel], alike: _Kept, unknown: _Kept) -> JSON:
    parameters = {id(p.version) for p in model.parameters()}
    coming = {id(tensor.version): part for each in parallel for tensor, part in _coming(each)}
    known: dict[Any, str] = {}  # tied ones are written once
    paths = []
    for path, value in model.state_dict().items():
        if not isinstance(value, TensorBase):
            paths.append([path, encode(value, f"model.{path}", unknown)])
            continue
        memory = (
            id(value.version),
            value.array.shape,
            _address(value.array),
            getattr(value.array, "strides", None),
        )
        if memory not in known:
            keep = alike if id(value.version) in parameters else unknown
            known[memory] = keep(f"model.{path}", coming.get(id(value.version), value.array), value)
        paths.append([path, {"tensor": known[memory]}])
    return paths


def _coming(model: DataParallel) -> Iterator[tuple[TensorBase, Array]]:
    """Buffers that are to become others at the next forward: it is these that count."""
    if model._buffer_sync is not None:
        yield from model._buffer_sync.coming()


def _hook(model: DataParallel, where: str, own: _Kept) -> JSON:
    hook = None if model._hooked is None else model._hooked.hook
    if hook is None or not hasattr(hook, "state_dict"):
        return None
    return [type(hook).__name__, encode(hook.state_dict(), where, own)]


def _address(array: Array) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _settle(
    unknown: Sequence[Source],
    shared: list[Source],
    own: list[Source],
    checksums: Sequence[Mapping[str, str]],
    rank: int,
) -> None:
    """Puts what is the same on all ranks among the shared, the rest among each rank's own. checksums: by rank"""
    for source in unknown:
        same = all(theirs.get(source.name) == checksums[rank][source.name] for theirs in checksums)
        (shared if same else own).append(source)


def _checksum(array: Array) -> str:
    host = np.asarray(place(array, CPU), order="C")
    told = hashlib.blake2b(repr((str(host.dtype), host.shape)).encode(), digest_size=16)
    told.update(host.reshape(-1).view(np.uint8).data if host.size else b"")
    return told.hexdigest()
