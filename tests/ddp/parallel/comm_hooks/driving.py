"""Drives communication hooks as the reducer does, on ranks that are threads, with gradients from a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from ddp._layout import FlatBuckets, lay_out
from ddp.parallel.buckets import Buckets
from ddp.parallel.comm_hooks.hook_exchange import HookExchange
from tests.ddp.parallel.ranks import Arrays, on_ranks
from tests.ddp.parallel.recorder import Recorder

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


def bytes_of(size: int) -> Callable[[str, Array], tuple[str, float]]:
    """Of a call: its name, and the bytes that a rank of `size` would send over wires, in the best known way."""

    def note(name: str, x: Array) -> tuple[str, float]:
        if name == "all_reduce":
            return name, 2 * (size - 1) / size * x.size * max(x.itemsize, 4)  # 16-bit numbers are added in float32
        return name, (size - 1) * x.nbytes / (size if name == "all_to_all" else 1)

    return note


def buckets_of(gradients: Gradients, plan: Sequence[Sequence[str]]) -> Buckets:
    """Empty buckets for these gradients."""
    names = tuple(gradients)
    members = tuple(tuple(names.index(name) for name in bucket) for bucket in plan)
    layout = lay_out(members, [g.shape for g in gradients.values()], [g.dtype for g in gradients.values()])
    return Buckets(memory=FlatBuckets(layout, np.zeros), names=names, members=members)


def step(
    exchange: HookExchange, buckets: Buckets, gradients: Gradients, scale: float, unused: Collection[str] = ()
) -> Arrays:
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
) -> Any:
    """Several backwards.

    steps: for each, every rank's gradients; scales: of each; unused: parameters that no rank used, by step
    Returns: of each step what became of the gradients, which must be the same bits on all ranks; every rank's hook;
    rank 0's calls and their bytes
    """

    def rank(comm: Communicator) -> Any:
        first = steps[0][comm.rank]
        buckets = buckets_of(first, plan or [list(reversed(first))])
        hook = make_hook()
        calls: list[tuple[str, float]] = []
        seen: Any = Recorder(comm, calls, bytes_of(comm.size))
        exchange = HookExchange(hook, seen, list(first))
        calls.clear()
        exchange.set_buckets(buckets)
        became = [
            step(exchange, buckets, everyones[comm.rank], scale, (unused or {}).get(number, ()))
            for number, (everyones, scale) in enumerate(zip(steps, scales, strict=True))
        ]
        exchange.release()
        return became, hook, calls

    ranks = on_ranks(rank, len(steps[0]))
    for became, _, _ in ranks[1:]:
        for mine, theirs in zip(ranks[0][0], became, strict=True):
            assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)
    return ranks[0][0], [hook for _, hook, _ in ranks], ranks[0][2]


def left_out(hooks: Sequence[Any], name: str) -> Array:
    """What all ranks together still remember."""
    return sum(hook.state_dict()["errors"][name].numpy() for hook in hooks)


def mean(everyones: Sequence[Gradients], scale: float) -> Arrays:
    """The exact mean, in float64."""
    return {name: scale * sum(g[name].astype(np.float64) for g in everyones) for name in everyones[0]}


def random_steps(
    count: int, ranks: int, shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float64, seed: int = 0
) -> list[list[Arrays]]:
    """Gradients of `count` steps on each rank."""
    rng = np.random.default_rng(seed)
    return [
        [{name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()} for _ in range(ranks)]
        for _ in range(count)
    ]
