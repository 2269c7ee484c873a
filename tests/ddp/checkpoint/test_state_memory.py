"""State in memory: what is whole is found again, the newest of it, and nothing else; a loop goes on from there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives import world
from collectives.communicator import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer, open_checkpoint, state_memory
from ddp.checkpoint.rank_group import RankGroup
from ddp.checkpoint.state import ArraySource, Captured
from ddp.checkpoint.state_memory import Slot, Stamp, StateMemory, choose_state
from ddp.errors import ArgumentError
from ddp.optim import AdamW
from tests.collectives.backends.shm.ranks import run_sharing
from tests.ddp.checkpoint.training import Interrupted, assert_same, everything, net

Slots = list[int]
JOB = "0123456789abcdef" * 2  # a token
OTHER = "f" * 32  # a token


@pytest.fixture
def memory() -> Iterator[Slots]:
    """Of six ranks."""
    fds = [os.memfd_create(f"ddp-state-{JOB}") for _ in range(12)]
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def slots(memory: Slots) -> Slots:
    """Of two ranks."""
    return memory[:4]


def opened(
    slots: Slots, rank: int = 0, start: int = 0, owner: str = "run", size: int = 2, held: int | None = None
) -> StateMemory:
    """Held: the newest start whose ranks all wrote their state; None: the one before this."""
    return StateMemory(variable(slots), rank, start, start - 1 if held is None else held, owner, member(rank, size))


def member(rank: int, size: int = 2, node_size: int = 0) -> Any:
    """A communicator's numbers: all ranks are on one node, or each node has so many."""
    node, local_rank = divmod(rank, node_size or size)
    return SimpleNamespace(rank=rank, size=size, local_rank=local_rank, local_size=node_size or size, node=node)


def variable(slots: Slots, token: str = JOB) -> str:
    return " ".join([token, *(f"{os.getpid()}/fd/{fd}" for fd in slots)])


def write(slots: Slots, *steps: int, start: int = 0, ranks: Any = (0, 1), owner: str = "run") -> None:
    """Each rank writes its half of `x`, an array of its own, and JSON."""
    for rank in ranks:
        held = opened(slots, rank, start, owner)
        held.newest(RankGroup())
        span = 3 * rank, 3 * rank + 3
        for step in steps:
            equal = ArraySource(name="x", array=np.arange(*span, dtype=float) + step, piece=(*span, (6,)))
            per_rank = [
                ArraySource(name=f"rank-{rank}.y", array=np.full((2, 2), step + rank, np.int32).T),
                ArraySource(name=f"rank-{rank}.none", array=np.empty((0, 3), np.float16)),
            ]
            held.write(step, Captured([equal], [], per_rank, {"lr": 0.5}, {"pieces": [], "at": [rank, step]}))
        held.close()


def one(array: Any, state: Any = None) -> Captured:
    return Captured([ArraySource(name="x", array=array)], [], [], state, {"pieces": []})


def read(slots: Slots, **options: Any) -> Any:
    held = opened(slots, **{"start": 9, **options})
    found = held.newest(RankGroup())
    held.close()
    return found


def newest(slots: Slots, **options: Any) -> int | None:
    found = read(slots, **options)
    return None if found is None else found.step


def test_what_all_ranks_wrote_is_read_by_each_of_the_next_start(slots: Slots) -> None:
    write(slots, 4, 5)
    found = read(slots, rank=1, start=1)
    assert (found.step, found.size, found.state) == (5, 2, {"lr": 0.5})
    assert [own["at"] for own in found.own_state] == [[0, 5], [1, 5]]
    np.testing.assert_array_equal(found.read("x"), np.arange(6.0) + 5)
    np.testing.assert_array_equal(found.read("rank-1.y"), np.full((2, 2), 6, np.int32))
    assert found.read("rank-0.none").shape == (0, 3)


@pytest.mark.parametrize(
    ("ranks", "owner", "held", "said"),
    [
        ((0,), "run", None, 1),
        ((0, 1), "another", None, 0),
        ((), "run", -1, 0),
        ((), "run", 0, 1),
    ],
    ids=["not of all ranks", "of another folder", "of no start", "held and gone"],
)
def test_a_state_that_is_lost_is_said(
    ranks: Any, owner: str, held: int | None, said: int, slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    write(slots, 5, ranks=ranks, owner=owner)
    assert newest(slots, held=held) is None
    assert caplog.messages == ["no complete state is left in memory: training goes on from disk"] * said


def test_the_newest_state_that_all_ranks_of_a_start_wrote_is_read(slots: Slots) -> None:
    assert newest(slots) is None
    write(slots, 5, 6, 7)
    write(slots, 8, start=1, ranks=(0,))
    assert newest(slots) == 7
    write(slots, 8, start=1, ranks=(1,))
    assert newest(slots) == 8
    write(slots, 4, start=2)  # which went on from an earlier step
    assert newest(slots) == 4
    # One host's ranks: those of others died in their first copy.
    assert newest(slots, held=1) == 8
    assert newest(slots, held=-1) is None


def half_written(slots: Slots) -> None:
    os.pwrite(slots[3], bytes(8), 0)


def another_format(slots: Slots) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_memory, "_FORMAT", b"ddp-st00")
        opened(slots[:2] + slots[2:][::-1], rank=1).write(5, one(np.ones(3)))


def another_step(slots: Slots) -> None:
    opened(slots[:2] + slots[2:][::-1], rank=1).write(7, one(np.ones(3)))


def cut_off(slots: Slots) -> None:
    os.ftruncate(slots[3], 30)


@pytest.mark.parametrize("damage", [half_written, another_format, another_step, cut_off])
def test_what_is_not_whole_on_all_ranks_is_passed_over(damage: Any, slots: Slots) -> None:
    write(slots, 4, 5)
    damage(slots)
    assert newest(slots) == 4


def test_state_of_another_checkpointer_is_passed_over(slots: Slots) -> None:
    write(slots, 4, owner="other")
    assert newest(slots) is None
    assert newest(slots, owner="other") == 4


def test_state_of_another_job_is_refused(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    write(slots, 4)
    with pytest.raises(OSError, match="none of the job's memory"):
        StateMemory(variable(slots, OTHER), 0, 1, 0, "run", member(0))
    # Even under the name of this one: the header says whose it is.
    with monkeypatch.context() as patch:
        patch.setattr(StateMemory, "_open", lambda self, path: state_memory.Slot(os.open(path, os.O_RDWR), self._token))
        assert StateMemory(variable(slots, OTHER), 0, 1, 0, "run", member(0)).newest(RankGroup()) is None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="another user"):
        opened(slots)


def test_an_index_without_slots_is_refused(slots: Slots) -> None:
    with pytest.raises(OSError, match="2 pairs of slots, none for rank 2"):
        opened(slots, rank=2)


def test_what_is_no_json_is_refused_and_the_rest_stays(slots: Slots) -> None:
    write(slots, 4)
    held = opened(slots)
    with pytest.raises(ArgumentError, match="cannot be held in memory"):
        held.write(5, one(np.ones(3), {"x": object()}))
    assert newest(slots) == 4


def test_a_rank_that_dies_in_the_middle_of_a_copy_leaves_the_one_before_alone(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    write(slots, 4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(state_memory, "to_device", dies)
        with pytest.raises(KeyboardInterrupt):
            write(slots, 6, start=1, ranks=(1,))
    assert newest(slots) == 5
    half_written(slots)
    assert newest(slots) is None  # what is half 6 is not taken for 4


def test_copies_take_a_hundredth_of_the_time(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened(slots)
    monkeypatch.setattr(time, "monotonic", lambda: 52.0)
    held.took(50.0)
    assert held.due == pytest.approx(52 + 99 * 2)


def test_a_slot_grows_with_the_state(slots: Slots) -> None:
    write(slots, 4)
    held = opened(slots, size=1)
    held.write(5, one(np.ones(100_000), {"long": "x" * 100_000}))
    found = read(slots, start=1)
    assert found.step == 5
    np.testing.assert_array_equal(found.read("x"), np.ones(100_000))


@pytest.mark.parametrize(("limit", "left"), [("max\n", []), ("1000\n", [1000 - 400 + 150])])
def test_memory_that_control_groups_leave(limit: str, left: list[int], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, text in (("max", limit), ("current", "400\n"), ("stat", "anon 50\ninactive_file 150\n")):
        (tmp_path / "a" / f"memory.{name}").write_text(text)
    (tmp_path / "groups").write_text("1:name=systemd:/\n0::/a\n")
    assert list(state_memory.control_group_memory(str(tmp_path / "groups"), str(tmp_path))) == left


# -- several nodes


def stamp(rank: int, step: int = 5, node_size: int = 1, start: int = 0, size: int = 2, sharded: int = 0) -> Stamp:
    return Stamp(b"run", rank, size, start, step, rank // node_size, node_size, sharded, 5000, 6000, 7)


def shard(rank: int, *copied: int, step: int = 5) -> Stamp:
    return stamp(rank, step, sharded=1, size=3)._replace(copied=copied)


@pytest.mark.parametrize(
    ("found", "step", "copies", "moves"),
    [
        # Each rank has its own slots: arrays stay where they are, only texts are sent.
        ([[stamp(0)], [stamp(1)]], 5, [0, 1], [(0, 0, 6000), (1, 1, 6000)]),
        # As many ranks on the same hosts, in another order.
        ([[stamp(1)], [stamp(0)]], 5, [1, 0], [(0, 1, 5000), (1, 0, 5000)]),
        # A host without a state gets all of it.
        ([[stamp(0)], [stamp(1)], []], 5, [0, 0, 0], [(0, 0, 5000), (1, 1, 5000), (0, 0, 4096)]),
        ([[], [stamp(0), stamp(1)]], 5, [0, 0], [(0, 1, 5000), (1, 1, 5000), (0, 1, 4096)]),
        # A rank is lost: its node's copy is not needed, nor is there a part that it alone had.
        ([[stamp(1)]], 5, [1], []),
        ([[stamp(1, sharded=1)]], None, [], []),
        # There is a copy of that part.
        ([[stamp(1, sharded=1)._replace(copied=(0,))]], 5, [1], []),
        ([[shard(0, 2)], [shard(2, 1)]], 5, [0, 2], [(0, 0, 5000), (2, 1, 5000)]),
        ([[shard(0, 2)], [shard(1, 0)]], 5, [0, 1], [(0, 0, 5000), (1, 1, 5000)]),
        ([[shard(0, 2)]], None, [], []),
        ([[stamp(1, node_size=2)]], None, [], []),
        # A rank that is there has not written the last step.
        ([[stamp(0), stamp(0, 4)], [stamp(1, 4), stamp(1, 3)]], 4, [0, 1], [(0, 0, 6000), (1, 1, 6000)]),
        # One that was lost need not have written it.
        ([[stamp(0), stamp(0, 4)]], 5, [0], []),
        ([[], []], None, [], []),
    ],
)
def test_the_newest_state_that_is_whole_is_chosen(found: Any, step: int | None, copies: Any, moves: Any) -> None:
    choice = choose_state(found)
    if step is None:
        assert choice is None
        return
    assert {each.step for each in choice.stamps} == {step}
    assert [copy[0].rank for copy in choice.copies] == copies
    assert [(each.rank, root, begin) for each, root, begin, _ in choice.moves] == moves


def test_ranks_that_may_need_other_pieces_get_all_arrays() -> None:
    stamps = [stamp(0), stamp(1)]
    choice = choose_state([[each] for each in stamps], same_pieces=False)
    assert [(slot.rank, begin) for slot, _, begin, _ in choice.moves] == [(0, 5000), (1, 5000)]
    assert [[*own] for own in choice.own] == [stamps] * 2


@pytest.mark.parametrize(
    ("seen", "at"),
    [
        ([[0], [1]], [0, 1]),
        ([[0, 1], []], [0, 1]),
        ([[], [1]], [1, 1]),  # rank 0 was lost
    ],
)
def test_each_host_gets_what_it_has_not(seen: list[list[int]], at: list[int], slots: Slots, memory: Slots) -> None:
    """seen: for each rank of the next start, the ranks whose slots are on its host; at: whose state each gets"""
    x = np.arange(6.0)
    for rank in (0, 1):
        own = ArraySource(name=f"rank-000{rank}.y", array=np.full(3, rank))
        held = StateMemory(variable(slots), rank, 0, -1, "run", member(rank, node_size=1))
        held.write(5, Captured([ArraySource(name="x", array=x)], [], [own], {"lr": 0.5}, {"pieces": [], "at": rank}))
        held.close()

    def load(comm: Communicator) -> None:
        there = [fd for rank in seen[comm.rank] for fd in slots[2 * rank :][:2]]
        held = StateMemory(variable(memory[4:8] + there), comm.rank, 1, 0, "run", comm)
        found = held.newest(RankGroup(comm))
        held.close()
        assert (found.step, found.size, found.state) == (5, 2, {"lr": 0.5})
        assert [own["at"] for own in found.own_state] == at
        np.testing.assert_array_equal(found.read("x"), x)
        # Where the ranks are where they were, each has its own array only.
        ranks = [comm.rank] if seen == [[0], [1]] else [0, 1]
        assert found.names.keys() == {"x", *(f"rank-000{rank}.y" for rank in ranks)}
        for rank in ranks:
            np.testing.assert_array_equal(found.read(f"rank-000{rank}.y"), np.full(3, at[rank]))

    collectives.run_threads(load, 2)


def stamp_without_a_piece(slots: Slots, *copied: int) -> Stamp | None:
    held = opened(slots)
    held.write(5, one(np.ones(3))._replace(own_state={"pieces": [], "copied": copied}))
    held.close()
    slot = Slot(os.dup(slots[0]), JOB)
    written = slot.stamp()
    slot.close()
    return written


@pytest.mark.parametrize(
    ("nodes", "holders"),
    [
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 1, 1, 1], [1, 0, 0, 0, 0]),
        ([0, 1, 0, 2], [1, 2, 3, 0]),
    ],
)
def test_copies_of_pieces_lie_on_another_node(nodes: list[int], holders: list[int]) -> None:
    assert state_memory.holders_of_copies(nodes) == holders


def test_of_hosts_with_any_number_of_ranks_any_one_may_be_lost() -> None:
    for nodes in itertools.chain(*(itertools.product(range(3), repeat=size) for size in range(2, 7))):
        if len(set(nodes)) == 1:
            continue
        holders = state_memory.holders_of_copies(nodes)
        assert all(nodes[holder] != node for holder, node in zip(holders, nodes, strict=True))
        by_node = {node: [] for node in nodes}
        for rank, node in enumerate(nodes):
            copied = tuple(other for other, holder in enumerate(holders) if holder == rank)
            held = stamp(rank, size=len(nodes), sharded=1)
            by_node[node].append(held._replace(node=node, node_size=nodes.count(node), copied=copied))
        for lost in by_node:
            assert choose_state([held for node, held in by_node.items() if node != lost]) is not None


def test_a_stamp_says_what_was_copied_and_that_the_optimizer_is_sharded(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_memory.json, "loads", None)  # the rest of the text is not read
    written = stamp_without_a_piece(slots, 1, 70_000)
    assert (written.sharded, written.copied) == (1, (1, 70_000))


def run(
    comm: Communicator,
    folder: Path,
    until: int,
    make: Any,
    *,
    batch: int = 4,
    micro_batches: int | None = None,
    cap: Any = "auto",
    bare: bool = False,
    **options: Any,
) -> tuple[int | None, dict[str, Any]]:
    """The step that the loop began with, and the model at its end.

    until: the step that is not reached any more; cap: of buckets, in MiB
    bare: the Checkpointer gets the module without its DataParallel
    """
    ddp.manual_seed(3)
    rows = ddp.data.TensorDataset(ddp.randn(48, 6), ddp.randint(3, (48,)))
    sampler = ddp.data.DistributedSampler(rows, seed=2, micro_batches=micro_batches, comm=comm)
    loader = ddp.data.DataLoader(rows, batch, sampler=sampler)
    model = ddp.DataParallel(net(dropout=0.5, norm=True), comm, micro_batches=micro_batches, bucket_cap_mb=cap)
    optimizer = make(model)
    saved = model.module if bare else model
    began = None
    with suppress(Interrupted), Checkpointer(folder, model=saved, optimizer=optimizer, comm=comm, **options) as ckpt:
        for x, t in ckpt.resume(loader, epochs=3):
            began = ckpt.step if began is None else began
            if ckpt.step == until:
                comm.barrier()
                raise Interrupted
            ddp.nn.functional.cross_entropy(model(x), t).backward()
            if not model.accumulating:
                optimizer.step()
                optimizer.zero_grad()
    return began, everything(model, [])


def sharded(model: Any) -> Any:
    return ddp.parallel.ZeroOptimizer(model, AdamW, lr=0.01)


def train_shards(
    nodes: list[int], variables: list[str], start: int, folder: Path, until: int = -1, **options: Any
) -> list[tuple[int | None, dict[str, Any]]]:
    """Trains with ZeroOptimizer on ranks of several hosts. variables: of each rank"""

    def take(owner: str, comm: Communicator) -> StateMemory:
        return StateMemory(variables[comm.rank], comm.rank, start, start - 1, owner, comm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_memory, "offered", lambda: bool(variables))
        patch.setattr(state_memory, "take", take)
        return run_sharing(lambda comm: run(comm, folder, until, sharded, memory_every=1, **options), nodes)


# lost: -1: all ranks are started again where they were.
@pytest.mark.parametrize(
    ("nodes", "lost"),
    [
        ([0, 1], 1),
        ([0, 1], -1),
        ([0, 0, 1], 0),
        ([0, 1, 2], 1),
        *(pytest.param(*row, marks=pytest.mark.long) for row in (([0, 1], 0), ([0, 0, 1], 1), ([0, 0, 1], -1))),
    ],
)
def test_shards_outlive_their_host(nodes: list[int], lost: int, memory: Slots, tmp_path: Path) -> None:
    [(_, whole)] = train_shards([0], [], 0, tmp_path / "whole", micro_batches=4)
    size = len(nodes)
    train_shards(nodes, [variable(memory[: 2 * size])] * size, 0, tmp_path / "run", 6, micro_batches=4)
    left = [rank for rank, node in enumerate(nodes) if node != lost]
    fresh = memory[2 * size :][: 2 * len(left)]
    hosts = [
        variable(fresh + [fd for other in left if nodes[other] == nodes[rank] for fd in memory[2 * other :][:2]])
        for rank in left
    ]
    for step, state in train_shards([nodes[rank] for rank in left], hosts, 1, tmp_path / "run", micro_batches=4):
        assert step == 6
        assert_same({**state, "random": None}, {**whole, "random": None})


def test_shards_are_restored_where_the_plan_of_the_buckets_is_not(memory: Slots, tmp_path: Path) -> None:
    nodes = [0, 1, 2]  # of two, each would have a copy of the other's pieces
    train_shards(nodes, [variable(memory[:6])] * 3, 0, tmp_path, 6, bare=True)
    hosts = [variable(memory[6:] + memory[2 * rank :][:2]) for rank in nodes]
    assert [step for step, _ in train_shards(nodes, hosts, 1, tmp_path, bare=True, cap=1e-4)] == [6, 6, 6]


def test_copies_of_pieces_end_on_all_ranks_if_one_cannot_write(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_memory.Slot, "write", fails_after(5))
    train_shards([0, 1], [variable(slots)] * 2, 0, tmp_path)
    assert [message.count(state_memory.FAILED) for message in caplog.messages] == [1]


def test_copies_of_pieces_are_not_sent_where_there_is_no_room_for_them(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_memory, "available_memory", lambda: 1000)
    monkeypatch.setattr(Communicator, "recv", fails_after(0))
    train_shards([0, 1], [variable(slots)] * 2, 0, tmp_path)
    [warning] = caplog.messages
    assert re.fullmatch(
        f"{state_memory.FAILED}: rank 0: OSError: .* bytes are needed on this machine, "
        "and half of the 1,000 that are left is the most; rank 1 too",
        warning,
    )
    assert [os.fstat(fd).st_size for fd in slots] == [0] * 4


# -- the loop


@pytest.fixture
def rank(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process the only rank of a job's start of that number."""
    monkeypatch.setenv(world.AGENT, str(os.getppid()))
    monkeypatch.setenv(world.STATE_MEMORY, variable(slots))

    def begin(start: int) -> None:
        monkeypatch.setenv(world.ATTEMPT, str(start))
        monkeypatch.setenv(world.STATE_HELD, str(start - 1))

    return begin


def whole(model: Any) -> Any:
    return AdamW(model.parameters(), lr=0.01)


def train(folder: Path, until: int = 12, **options: Any) -> tuple[int | None, dict[str, Any]]:
    """`run` on one rank, which saves steps 5 and 10 of 12 on disk, too."""
    return run(collectives.init(), folder, until, whole, batch=12, every=5, keep=None, **options)


@pytest.mark.parametrize(
    ("every", "until", "began"),
    [
        (1, 8, 8),
        (3, 8, 6),
        (7, 8, 7),
        (4, 7, 5),  # held before the checkpoint on disk
        (20, 8, 5),  # never held
        (None, 8, 5),
    ],
)
def test_a_loop_goes_on_from_what_is_newest(
    every: int | None, until: int, began: int, rank: Any, tmp_path: Path
) -> None:
    rank(0)
    _, uninterrupted = train(tmp_path / "whole")
    train(tmp_path / "run", until, memory_every=every)
    rank(1)
    found, resumed = train(tmp_path / "run", memory_every=every)
    assert found == began
    assert_same(resumed, uninterrupted)
    assert open_checkpoint(tmp_path / "run/step-0000000012").step == 12


def test_a_loop_of_ones_own_goes_on_from_what_it_saved(rank: Any, tmp_path: Path) -> None:
    def loop(until: int, folder: str = "run") -> tuple[int, list[Any]]:
        ddp.manual_seed(1)
        model = ddp.DataParallel(nn.Linear(2, 2))
        optimizer = whole(model)
        with Checkpointer(tmp_path / folder, model=model, optimizer=optimizer, memory_every=1) as ckpt:
            ckpt.load()
            began = ckpt.step
            while ckpt.step < until:
                optimizer.zero_grad()
                model(ddp.rand(3, 2)).square().sum().backward()
                optimizer.step()
                ckpt.step += 1
                assert not ckpt.stop_requested
                if ckpt.step % 3 == 0:
                    ckpt.save()
        return began, model.module.weight.tolist()

    rank(0)
    loop(5)
    rank(1)
    began, weight = loop(9)
    assert began == 3
    assert weight == loop(9, "whole")[1]


def test_by_itself_the_first_step_is_held_at_once_and_the_next_when_it_costs_little(
    rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(0)
    monkeypatch.setattr(StateMemory, "took", lambda self, began: setattr(self, "due", float("inf")))
    train(tmp_path, 4)
    rank(1)
    assert train(tmp_path)[0] == 1


def test_memory_of_the_same_start_is_not_loaded(rank: Any, tmp_path: Path) -> None:
    """A program that loads again wants the checkpoint."""
    rank(1)
    train(tmp_path, 8, memory_every=1)
    assert train(tmp_path)[0] == 5


def at_start(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(world.STATE_MEMORY, variable([10**6, 10**6]))


def at_the_first_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_memory, "available_memory", lambda: 1000)


def at_the_first_step_in_a_control_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_memory, "control_group_memory", lambda: iter([10**9, 1000]))


def later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_memory.Slot, "write", fails_after(3))


@pytest.mark.parametrize("fail", [at_start, at_the_first_step, at_the_first_step_in_a_control_group, later])
def test_without_memory_the_job_is_told_once_and_goes_on_with_the_disk(
    fail: Callable[[pytest.MonkeyPatch], None],
    rank: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank(0)
    with pytest.MonkeyPatch.context() as patch:
        fail(patch)
        train(tmp_path, 8, memory_every=1)
    assert [message.partition(": ")[0] for message in caplog.messages] == [state_memory.FAILED]
    rank(1)
    assert train(tmp_path)[0] == 5


def fails_after(count: int) -> Callable[..., None]:
    whole = state_memory.Slot.write
    left = iter(range(count))

    def write(*args: Any) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOMEM, "no memory")
        whole(*args)

    return write


PROGRAM = """
import hashlib, json, os, signal, sys
import collectives, ddp
from ddp import nn
from ddp.nn import functional as F

folder, kind = sys.argv[1:]
comm = collectives.init(timeout=30)
start = int(os.environ["DDP_ATTEMPT"])

def train(name, die=-1):
    ddp.manual_seed(3)
    data = ddp.data.TensorDataset(ddp.arange(48), ddp.randn(48, 6), ddp.randint(3, (48,)))
    loader = ddp.data.DataLoader(data, 4, sampler=ddp.data.DistributedSampler(data, seed=2))
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    model = ddp.DataParallel(net)
    if kind == "zero":
        adam = ddp.parallel.ZeroOptimizer(model, ddp.optim.AdamW, lr=0.01)
    else:
        adam = ddp.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = ddp.optim.lr_scheduler.StepLR(adam, 5)
    notes = open(f"{folder}/{name}-{comm.rank}", "a", buffering=1)
    ckpt = ddp.checkpoint.Checkpointer(
        f"{folder}/{name}-run", model=model, optimizer=adam, scheduler=scheduler, memory_every=None if die < 0 else 1
    )
    for ids, x, t in ckpt.resume(loader, epochs=3):
        comm.barrier()  # all have held the step before
        if (start, ckpt.step, comm.rank) == (0, die, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        adam.zero_grad()
        F.cross_entropy(model(x), t).backward()
        adam.step()
        scheduler.step()
        print(json.dumps([start, ckpt.step, ids.tolist(), float(ddp.rand(1))]), file=notes)
    ckpt.close()
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(json.dumps([start, hashlib.sha256(state).hexdigest()]), file=notes)

if start == 0:
    train("whole")
train("killed", die=8)
"""


@pytest.mark.mpi
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [pytest.param("adam", marks=pytest.mark.long), "zero"])
def test_a_rank_is_killed_and_nothing_is_lost(kind: str, run_job: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "launcher", "-n", "2", "--max-restarts", "1", script, tmp_path, kind]
    run_job(command, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, code=0)
    assert os.listdir(tmp_path / "tmp") == []
    for rank in (0, 1):
        whole, killed = (
            [json.loads(line) for line in (tmp_path / f"{name}-{rank}").read_text().splitlines()]
            for name in ("whole", "killed")
        )
        assert [note[1:] for note in killed] == [note[1:] for note in whole]
        assert [note[0] for note in killed] == [0] * 8 + [1] * 11  # the last is of the end
