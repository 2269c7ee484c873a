"""Drives communication hooks as the reducer does, on ranks that are threads, with gradients from a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

import collectives
from collectives import Communicator
from ddp._layout import FlatBuckets, lay_out
from ddp.parallel.buckets import Buckets
from ddp.parallel.comm_hooks.hook_exchange import HookExchange

Array = np.ndarray[Any, Any]
Gradients = Mapping[str, Array]


class Control:
    """A control message that is there, or comes when it is told to."""

    def __init__(self, scale: float, used: Sequence[bool], arrived: bool = True) -> None:
        self._scale = scale
        self._used = used
        self.arrived = arrived

    def done(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.arrived = True

    def scale(self) -> float:
        assert self.arrived
        return self._scale

    def used(self) -> Sequence[bool]:
        assert self.arrived
        return self._used


class Counting:
    """A communicator that counts the bytes that this rank would send over wires, in the best known way."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.calls: list[tuple[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Array, *args: Any, **kwargs: Any) -> Any:
        wire = max(x.itemsize, 4)  # 16-bit numbers are added in float32
        self.calls.append(("all_reduce", 2 * (self._comm.size - 1) / self._comm.size * x.size * wire))
        return self._comm.all_reduce(x, *args, **kwargs)

    def all_to_all(self, x: Array, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("all_to_all", (self._comm.size - 1) / self._comm.size * x.nbytes))
        return self._comm.all_to_all(x, *args, **kwargs)

    def all_gather(self, x: Array, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("all_gather", (self._comm.size - 1) * x.nbytes))
        return self._comm.all_gather(x, *args, **kwargs)


def buckets_of(gradients: Gradients, plan: Sequence[Sequence[str]]) -> Buckets:
    """Empty buckets for these gradients."""
    names = tuple(gradients)
    members = tuple(tuple(names.index(name) for name in bucket) for bucket in plan)
    layout = lay_out(members, [g.shape for g in gradients.values()], [g.dtype for g in gradients.values()])
    return Buckets(memory=FlatBuckets(layout, np.zeros), names=names, members=members)


def step(
    exchange: HookExchange, buckets: Buckets, gradients: Gradients, scale: float, unused: Collection[str] = ()
) -> dict[str, Array]:
    """One backward: these gradients become ready bucket by bucket. Returns what the hook made of them."""
    exchange.begin(Control(scale, [name not in unused for name in buckets.names]))
    for index, members in enumerate(buckets.members):
        for member in members:
            buckets.memory.views[member][...] = gradients[buckets.names[member]]
        exchange.launch(index)
        exchange.poll()
    exchange.finish()
    return {name: view.copy() for name, view in zip(buckets.names, buckets.memory.views, strict=True)}


def drive(
    make_hook: Callable[[], Any],
    steps: Sequence[Sequence[Gradients]],
    scales: Sequence[float],
    plan: Sequence[Sequence[str]] | None = None,
    unused: Mapping[int, Collection[str]] | None = None,
) -> tuple[list[dict[str, Array]], list[Any], list[tuple[str, float]]]:
    """Several backwards.

    steps: for each, every rank's gradients; scales: of each; unused: parameters that no rank used, by step
    Returns: of each step what became of the gradients, which must be the same bits on all ranks; every rank's hook;
    rank 0's calls and their bytes
    """

    def rank(comm: Communicator) -> tuple[list[dict[str, Array]], Any, Any]:
        first = steps[0][comm.rank]
        buckets = buckets_of(first, plan or [list(reversed(first))])
        hook = make_hook()
        counting = Counting(comm)
        exchange = HookExchange(hook, counting, list(first))
        counting.calls.clear()
        exchange.set_buckets(buckets)
        became = [
            step(exchange, buckets, everyones[comm.rank], scale, (unused or {}).get(number, ()))
            for number, (everyones, scale) in enumerate(zip(steps, scales, strict=True))
        ]
        exchange.release()
        return became, hook, counting.calls

    ranks = collectives.run_threads(rank, len(steps[0]))
    for became, _, _ in ranks[1:]:
        for mine, theirs in zip(ranks[0][0], became, strict=True):
            for name in mine:
                assert mine[name].tobytes() == theirs[name].tobytes(), name
    return ranks[0][0], [hook for _, hook, _ in ranks], ranks[0][2]


def mean(everyones: Sequence[Gradients], scale: float) -> dict[str, Array]:
    """The exact mean, in float64."""
    return {name: scale * sum(g[name].astype(np.float64) for g in everyones) for name in everyones[0]}


def random_steps(
    count: int, ranks: int, shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float64, seed: int = 0
) -> list[list[dict[str, Array]]]:
    """Gradients of `count` steps on each rank."""
    rng = np.random.default_rng(seed)
    return [
        [{name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()} for _ in range(ranks)]
        for _ in range(count)
    ]
