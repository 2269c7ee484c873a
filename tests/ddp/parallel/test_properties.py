"""Whatever the model, the split, the accumulation and the buckets: n ranks give what one process gives on all samples.

Models, batches and schedules are drawn at random, from a fixed seed. The oracle is the bare model in this process: each
pass runs on the rows of all ranks together, and the sum of its gradients is divided by the sum of the weights, or by
the number of ranks where no weight is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddp
from collectives import Communicator
from ddp import nn
from ddp.nn import functional as F
from ddp.parallel import DataParallel, SyncBatchNorm
from tests.ddp.parallel.ranks import Arrays, assert_same, gradients, on_ranks

D = 3  # features
LINEAR = "linear"
AGAIN = "again"
TIED = "tied"
PAIR = "pair"
NORM = "norm"
SCALE = "scale"


@dataclass(frozen=True, kw_only=True)
class Step:
    """rows: of each pass, how many samples each rank has; frozen: which parameters, by their number

    weighted: model.backward(weight=...); skips: a rank without samples makes no forward
    """

    rows: tuple[tuple[int, ...], ...]
    frozen: frozenset[int]
    weighted: bool
    skips: bool
    clearing: str


@dataclass(frozen=True, kw_only=True)
class Case:
    blocks: tuple[str, ...]
    lonely: int | None  # the rank that alone uses one parameter
    cap: float | str
    first: float
    size: int
    steps: tuple[Step, ...]
    seed: int


def tied(first: nn.Linear) -> nn.Linear:
    layer = nn.Linear(D, D)
    layer.weight = first.weight
    return layer


class Net(nn.Module):
    """Blocks in a row, one parameter that one rank alone uses, and one that nobody does."""

    def __init__(self, blocks: Sequence[str], norm: Callable[[], nn.Module], seed: int) -> None:
        super().__init__()
        ddp.manual_seed(seed)
        self.kinds = blocks
        self.never = nn.Linear(D, 2)
        first = nn.Linear(D, D)
        makers: dict[str, Callable[[], nn.Module]] = {
            LINEAR: lambda: nn.Linear(D, D, bias=False),
            AGAIN: lambda: first,
            TIED: lambda: tied(first),
            PAIR: lambda: nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]),
            NORM: norm,
            SCALE: lambda: nn.ParameterList([nn.Parameter(ddp.ones(())), nn.Parameter(ddp.zeros(0, D))]),
        }
        self.blocks = nn.ModuleList([makers[kind]() for kind in blocks])
        self.lonely = nn.Linear(D, 1)
        self.double()

    def forward(self, x: ddp.Tensor, turned: bool) -> ddp.Tensor:
        """turned: the two halves of a pair run in the other order, and so do their gradients come."""
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            if kind == PAIR:
                made = {at: block[at](x) for at in ((1, 0) if turned else (0, 1))}
                x = x + F.tanh(made[0]) * made[1]
            elif kind == SCALE:
                x = x * block[0] + block[1].sum()
            else:
                x = F.tanh(block(x)) if kind != NORM else block(x)
        return x

    def loss(self, x: ddp.Tensor, turned: bool) -> ddp.Tensor:
        return ((self.forward(x, turned) - 0.5) ** 2).sum()


@st.composite
def cases(draw: Any) -> Case:
    size = draw(st.integers(1, 4))
    blocks = tuple(draw(st.lists(st.sampled_from([LINEAR, AGAIN, TIED, PAIR, NORM, SCALE]), min_size=1, max_size=5)))
    if all(kind == NORM for kind in blocks):
        blocks = (LINEAR, *blocks)
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        passes = []
        for _ in range(draw(st.integers(1, 3))):
            rows = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
            if NORM in blocks and sum(rows) < 2:  # one sample has no variance
                rows[draw(st.integers(0, size - 1))] += 2
            passes.append(tuple(rows))
        if not any(map(sum, passes)):
            passes[-1] = (*passes[-1][:-1], 1)
        weighted = draw(st.booleans())
        steps.append(
            Step(
                rows=tuple(passes),
                frozen=frozenset(draw(st.sets(st.integers(0, 11), max_size=3))),
                weighted=weighted,
                skips=weighted and NORM not in blocks and draw(st.booleans()),
                clearing=draw(st.sampled_from(["module", "none", "zeros"])),
            )
        )
    return Case(
        blocks=blocks,
        lonely=draw(st.one_of(st.none(), st.integers(0, size - 1))),
        cap=draw(st.sampled_from([1e-6, 1e-4, 1.0, "auto"])),
        first=draw(st.sampled_from([1e-6, 1.0])),
        size=size,
        steps=tuple(steps),
        seed=draw(st.integers(0, 3)),
    )


def samples(case: Case, step: int, number: int) -> list[np.ndarray]:
    """The rows of each rank in one pass of one step."""
    rows = case.steps[step].rows[number]
    x = np.random.default_rng([case.seed, step, number]).normal(size=(sum(rows), D))
    return np.split(x, np.cumsum(rows)[:-1])


def freeze(net: Net, step: Step) -> None:
    params = list(net.parameters())
    for number, p in enumerate(params):
        p.requires_grad_(number not in step.frozen)
    if not any(p.requires_grad for p in net.blocks.parameters()):
        next(iter(net.blocks.parameters())).requires_grad_(True)


def clear(net: Net, how: str) -> None:
    if how == "none":
        for p in net.parameters():
            p.grad = None
    else:
        net.zero_grad(set_to_none=how == "module")


def learn(net: Net) -> Arrays:
    """The gradients; then moves the parameters along them, so that a later step builds on this one."""
    by_name = gradients(net)
    with ddp.no_grad():
        for p in net.parameters():
            if p.grad is not None and p.requires_grad:
                p -= 0.05 * p.grad / (1 + p.grad.abs().sum())
    return by_name


def on_one_process(case: Case) -> list[Arrays]:
    net = Net(case.blocks, lambda: nn.BatchNorm1d(D), case.seed)
    results = []
    for number, step in enumerate(case.steps):
        clear(net, step.clearing)
        freeze(net, step)
        for position in range(len(step.rows)):
            parts = samples(case, number, position)
            runs = [not step.skips or len(part) > 0 for part in parts]
            if any(runs):
                loss = net.loss(ddp.from_numpy(np.concatenate(parts)), turned=False)
                if case.lonely is not None and runs[case.lonely]:
                    loss = loss + net.lonely(ddp.from_numpy(parts[case.lonely])).sum()
                loss.backward()
        total = sum(map(sum, step.rows)) if step.weighted else case.size
        for p in net.parameters():
            if p.grad is not None:
                p.grad /= total
        results.append(learn(net))
    return results


def on_a_rank(case: Case, comm: Communicator) -> list[Arrays]:
    net = Net(case.blocks, lambda: SyncBatchNorm(D, comm=comm), case.seed)
    net.lonely.requires_grad_(case.seed % 2 == 0)  # what is frozen at first has no bucket
    model = DataParallel(net, comm, bucket_cap_mb=case.cap, first_bucket_mb=case.first, check_every=1)
    results = []
    for number, step in enumerate(case.steps):
        clear(net, step.clearing)
        freeze(net, step)
        for position, rows in enumerate(step.rows):
            x = samples(case, number, position)[comm.rank]
            with contextlib.nullcontext() if position == len(step.rows) - 1 else model.no_sync():
                if step.skips and len(x) == 0:
                    loss = ddp.zeros((), dtype=ddp.float64)
                else:
                    out = model(ddp.from_numpy(x), turned=comm.rank % 2 == 1)
                    loss = ((out - 0.5) ** 2).sum()
                    if comm.rank == case.lonely:
                        loss = loss + net.lonely(ddp.from_numpy(x)).sum()
                if step.weighted:
                    model.backward(loss, weight=rows[comm.rank])
                else:
                    loss.backward()
        results.append(learn(net))
    return results


@pytest.mark.timeout(900)  # the full count; the sample takes seconds
def test_n_ranks_give_what_one_process_gives_on_the_whole_batch(count: Callable[[int, int], int]) -> None:
    @settings(max_examples=count(40, 2000), derandomize=True, deadline=None, database=None)
    @given(cases())
    def holds(case: Case) -> None:
        expected = on_one_process(case)
        everyones = on_ranks(lambda comm: on_a_rank(case, comm), case.size)
        assert_same(everyones, [expected] * case.size, 1e-10)
        assert_same(everyones, everyones[:1] * case.size, 0)  # and bit for bit on all ranks

    holds()
