"""State in memory: what is whole is found again, the newest of it, and nothing else; a loop goes on from there."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import shutil
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
from ddp.checkpoint import Checkpointer, open_checkpoint, state_memory
from ddp.checkpoint.rank_group import RankGroup
from ddp.checkpoint.state import ArraySource, Captured
from ddp.checkpoint.state_memory import Slot, Stamp, StateMemory, choose_state
from ddp.errors import ArgumentError
from ddp.optim import AdamW
from tests.collectives.backends.shm.ranks import run_sharing
from tests.ddp.checkpoint.training import Interrupted, Loader, assert_same, data, everything, net

Slots = list[int]
JOB, OTHER = "0123456789abcdef" * 2, "f" * 32  # tokens


@pytest.fixture
def slots() -> Iterator[Slots]:
    fds = [os.memfd_create(f"ddp-state-{JOB}") for _ in range(4)]
    yield fds
    for fd in fds:
        os.close(fd)


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


def write(slots: Slots, *steps: int, start: int = 0, ranks: tuple[int, ...] = (0, 1), owner: str = "run") -> None:
    """Each rank writes its half of `x`, an array of its own, and JSON."""
    for rank in ranks:
        held = opened(slots, rank, start, owner)
        held.newest(RankGroup())
        for step in steps:
            x = np.arange(6.0)[3 * rank : 3 * rank + 3] + step
            own = np.full((2, 2), step + rank, np.int32).T
            equal = [ArraySource(name="x", array=x, piece=(3 * rank, 3 * rank + 3, (6,)))]
            per_rank = [
                ArraySource(name=f"rank-{rank}.y", array=own),
                ArraySource(name=f"rank-{rank}.none", array=np.empty((0, 3), np.float16)),
            ]
            held.write(step, Captured(equal, [], per_rank, {"lr": 0.5}, {"pieces": [], "at": [rank, step]}))
        held.close()


def one(array: Any, state: Any = None) -> Captured:
    return Captured([ArraySource(name="x", array=array)], [], [], state, {"pieces": []})


def newest(slots: Slots, **options: Any) -> int | None:
    held = opened(slots, **{"start": 9, **options})
    found = held.newest(RankGroup())
    held.close()
    return None if found is None else found.step


def test_what_all_ranks_wrote_is_read_by_each_of_the_next_start(slots: Slots) -> None:
    write(slots, 4, 5)
    held = opened(slots, rank=1, start=1)
    found = held.newest(RankGroup())
    held.close()
    assert found is not None
    assert (found.step, found.size, found.state) == (5, 2, {"lr": 0.5})
    assert [own["at"] for own in found.own_state] == [[0, 5], [1, 5]]
    np.testing.assert_array_equal(found.read("x"), np.arange(6.0) + 5)
    np.testing.assert_array_equal(found.read("rank-1.y"), np.full((2, 2), 6, np.int32))
    assert found.read("rank-0.none").shape == (0, 3)


@pytest.mark.parametrize(("owner", "said"), [("run", 1), ("another", 0)])
def test_a_state_that_is_lost_is_said_and_that_of_another_folder_is_no_loss(
    owner: str, said: int, slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    write(slots, 5, ranks=(0,) if owner == "run" else (0, 1), owner=owner)
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        assert newest(slots) is None
    assert [text.startswith("no complete state is left in memory") for text in caplog.messages] == [True] * said


def test_the_state_that_is_read_stays_whole_while_the_next_is_written(slots: Slots) -> None:
    write(slots, 5, 6, 7)
    write(slots, 8, start=1, ranks=(0,))
    assert newest(slots) == 7
    write(slots, 8, start=1, ranks=(1,))
    assert newest(slots) == 8


def test_a_later_start_that_went_on_from_an_earlier_step_is_newer(slots: Slots) -> None:
    write(slots, 90)
    write(slots, 51, start=1)
    assert newest(slots) == 51


def test_what_not_all_ranks_of_a_start_have_written_is_no_state(slots: Slots) -> None:
    write(slots, 90)
    write(slots, 91, start=1)  # one host's ranks: those of others died in their first copy
    assert newest(slots, start=2, held=0) == 90
    assert newest(slots, start=2, held=-1) is None


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
def test_what_is_not_whole_on_all_ranks_is_passed_over(damage: Callable[[Slots], None], slots: Slots) -> None:
    write(slots, 4, 5)
    damage(slots)
    assert newest(slots) == 4


def test_state_of_another_checkpointer_or_of_none_is_passed_over(slots: Slots) -> None:
    assert newest(slots) is None
    write(slots, 4, owner="other")
    assert newest(slots) is None
    assert newest(slots, owner="other") == 4


@pytest.mark.parametrize("held", [-1, 0])
def test_a_state_that_was_held_and_is_gone_is_said(held: int, slots: Slots, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        assert newest(slots, start=1, held=held) is None
    assert caplog.messages == ["no complete state is left in memory: training goes on from disk"] * (held + 1)


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
    found = opened(slots, start=1).newest(RankGroup())
    assert found is not None
    assert found.step == 5
    np.testing.assert_array_equal(found.read("x"), np.ones(100_000))


@pytest.mark.parametrize(
    ("limit", "left"),
    [("max\n", []), ("1000\n", [1000 - 400 + 150])],
)
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
def test_the_newest_state_that_is_whole_is_chosen(
    found: list[list[Stamp]], step: int | None, copies: list[int], moves: list[tuple[int, int, int]]
) -> None:
    choice = choose_state(found)
    if choice is None:
        assert step is None
        return
    assert {each.step for each in choice.stamps} == {step}
    assert [copy[0].rank for copy in choice.copies] == copies
    assert [(each.rank, root, begin) for each, root, begin, _ in choice.moves] == moves


def test_ranks_that_may_need_other_pieces_get_all_arrays() -> None:
    slots = [[stamp(0)], [stamp(1)]]
    choice = choose_state(slots, same_pieces=False)
    assert choice is not None
    assert [(slot.rank, begin) for slot, _, begin, _ in choice.moves] == [(0, 5000), (1, 5000)]
    assert [[*own] for own in choice.own] == [[stamp(0), stamp(1)]] * 2


@pytest.mark.parametrize(
    ("seen", "at"),
    [
        ([[0], [1]], [[0, 5], [1, 5]]),
        ([[0, 1], []], [[0, 5], [1, 5]]),
        ([[], [1]], [[1, 5], [1, 5]]),  # rank 0 was lost
    ],
)
def test_each_host_gets_what_it_has_not(seen: list[list[int]], at: list[list[int]], slots: Slots) -> None:
    """seen: for each rank of the next start, the ranks whose slots are on its host"""
    x = np.arange(6.0)
    fresh = [os.memfd_create(f"ddp-state-{JOB}") for _ in range(4)]
    for rank in (0, 1):
        own = ArraySource(name=f"rank-000{rank}.y", array=np.full(3, rank))
        held = StateMemory(variable(slots), rank, 0, -1, "run", member(rank, node_size=1))
        own_state = {"pieces": [], "at": [rank, 5]}
        held.write(5, Captured([ArraySource(name="x", array=x)], [], [own], {"lr": 0.5}, own_state))
        held.close()

    def load(comm: collectives.Communicator) -> None:
        there = [fd for rank in seen[comm.rank] for fd in slots[2 * rank : 2 * rank + 2]]
        held = StateMemory(variable(fresh + there), comm.rank, 1, 0, "run", comm)
        found = held.newest(RankGroup(comm))
        held.close()
        assert found is not None
        assert (found.step, found.size, found.state) == (5, 2, {"lr": 0.5})
        assert [own["at"] for own in found.own_state] == at
        np.testing.assert_array_equal(found.read("x"), x)
        own = {f"rank-000{rank}.y": origin for rank, (origin, _) in enumerate(at)}
        if seen == [[0], [1]]:  # the ranks are where they were: each has its own array
            own = {f"rank-000{comm.rank}.y": comm.rank}
        assert found.names.keys() == {"x", *own}
        for name, origin in own.items():
            np.testing.assert_array_equal(found.read(name), np.full(3, origin))

    collectives.run_threads(load, 2)
    for fd in fresh:
        os.close(fd)


def test_a_rank_without_a_piece_says_that_the_optimizer_is_sharded(slots: Slots) -> None:
    held = opened(slots)
    held.write(5, one(np.ones(3))._replace(own_state={"pieces": [], "copied": []}))
    held.close()
    written = [Slot(os.dup(fd), JOB) for fd in slots]
    assert [stamp.sharded for stamp in (slot.stamp() for slot in written) if stamp is not None] == [1]
    for slot in written:
        slot.close()


@pytest.mark.parametrize(
    ("nodes", "holders"),
    [
        ([0, 1], [1, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 0, 1], [1, 2, 3, 0]),
        ([0, 0, 0, 1], [3, 3, 3, 0]),
        ([0, 1, 1, 1, 1], [1, 0, 0, 0, 0]),
        ([0, 1, 0, 2], [1, 2, 3, 0]),
        ([0, 0, 0, 1, 2], [3, 4, 3, 0, 1]),
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
        stamps = [
            stamp(rank, size=len(nodes), sharded=1)._replace(
                node=node,
                node_size=nodes.count(node),
                copied=tuple(other for other, holder in enumerate(holders) if holder == rank),
            )
            for rank, node in enumerate(nodes)
        ]
        for lost in set(nodes):
            left = [held for held in stamps if held.node != lost]
            assert (
                choose_state([[held for held in left if held.node == node] for node in {*nodes} - {lost}]) is not None
            )


def test_the_ranks_of_copies_are_read_without_the_rest_of_the_text(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = opened(slots)
    held.write(5, one(np.ones(3))._replace(own_state={"pieces": [], "copied": [1, 70_000]}))
    held.close()
    monkeypatch.setattr(state_memory.json, "loads", None)
    slot = Slot(os.dup(slots[0]), JOB)
    written = slot.stamp()
    slot.close()
    assert written is not None
    assert written.copied == (1, 70_000)


def train_shards(
    nodes: list[int], variables: list[str], start: int, folder: Path, until: int, bare: bool = False, cap: Any = "auto"
) -> list[tuple[int | None, dict[str, Any]]]:
    """Trains with ZeroOptimizer on ranks of several hosts.

    variables: of each rank; until: as in `train`
    bare: without micro-batches, and the Checkpointer gets the module without its DataParallel; cap: of buckets, in MiB
    """

    def run(comm: collectives.Communicator) -> tuple[int | None, dict[str, Any]]:
        ddp.manual_seed(3)
        rows = ddp.data.TensorDataset(ddp.randn(48, 6), ddp.randint(3, (48,)))
        count = None if bare else 4
        sampler = ddp.data.DistributedSampler(rows, seed=2, micro_batches=count, comm=comm)
        model: Any = ddp.DataParallel(net(dropout=0.5, norm=True), comm, micro_batches=count, bucket_cap_mb=cap)
        optimizer = ddp.parallel.ZeroOptimizer(model, AdamW, lr=0.01)
        saved = model.module if bare else model
        ckpt = Checkpointer(folder, model=saved, optimizer=optimizer, memory_every=1, comm=comm)
        began = None
        with suppress(Interrupted), ckpt:
            for x, t in ckpt.resume(ddp.data.DataLoader(rows, 4, sampler=sampler), epochs=3):
                began = ckpt.step if began is None else began
                if ckpt.step == until:
                    comm.barrier()
                    raise Interrupted
                ddp.nn.functional.cross_entropy(model(x), t).backward()
                if not model.accumulating:
                    optimizer.step()
                    optimizer.zero_grad()
        return began, everything(model, [])

    def take(owner: str, comm: collectives.Communicator) -> StateMemory:
        return StateMemory(variables[comm.rank], comm.rank, start, start - 1, owner, comm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_memory, "offered", lambda: bool(variables))
        patch.setattr(state_memory, "take", take)
        return run_sharing(run, nodes)


# lost: -1: all ranks are started again where they were.
@pytest.mark.parametrize(
    ("nodes", "lost"),
    [([0, 1], 1), ([0, 1], 0), ([0, 1], -1), ([0, 0, 1], 0), ([0, 0, 1], 1), ([0, 0, 1], -1), ([0, 1, 2], 1)],
)
def test_shards_outlive_their_host(nodes: list[int], lost: int, tmp_path: Path) -> None:
    slots = [os.memfd_create(f"ddp-state-{JOB}") for _ in range(4 * len(nodes))]
    [(_, whole)] = train_shards([0], [], 0, tmp_path / "whole", -1)
    began = train_shards(nodes, [variable(slots)] * len(nodes), 0, tmp_path / "run", 6)
    assert [step for step, _ in began] == [0] * len(nodes)
    left = [(rank, node) for rank, node in enumerate(nodes) if node != lost]
    fresh = slots[2 * len(nodes) :][: 2 * len(left)]
    of_nodes = {node: [fd for rank, own in left if own == node for fd in slots[2 * rank :][:2]] for _, node in left}
    variables = [variable(fresh + of_nodes[node]) for _, node in left]
    for step, same in train_shards([node for _, node in left], variables, 1, tmp_path / "run", -1):
        assert step == 6
        assert_same({**same, "random": None}, {**whole, "random": None})
    for fd in slots:
        os.close(fd)


def test_shards_are_restored_where_the_plan_of_the_buckets_is_not(tmp_path: Path) -> None:
    slots = [os.memfd_create(f"ddp-state-{JOB}") for _ in range(12)]
    nodes = [0, 1, 2]  # of two, each would have a copy of the other's pieces
    train_shards(nodes, [variable(slots[:6])] * 3, 0, tmp_path / "run", 6, bare=True)
    hosts = [variable(slots[6:] + slots[2 * rank :][:2]) for rank in nodes]
    began = train_shards(nodes, hosts, 1, tmp_path / "run", -1, bare=True, cap=1e-4)
    assert [step for step, _ in began] == [6, 6, 6]
    for fd in slots:
        os.close(fd)


def test_copies_of_pieces_end_on_all_ranks_if_one_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slots = [os.memfd_create(f"ddp-state-{JOB}") for _ in range(4)]
    monkeypatch.setattr(state_memory.Slot, "write", fails_after(5))
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        assert [step for step, _ in train_shards([0, 1], [variable(slots)] * 2, 0, tmp_path, -1)] == [0, 0]
    assert [record.message.count(state_memory.FAILED) for record in caplog.records] == [1]
    for fd in slots:
        os.close(fd)


def test_copies_of_pieces_are_not_sent_where_there_is_no_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slots = [os.memfd_create(f"ddp-state-{JOB}") for _ in range(4)]
    monkeypatch.setattr(state_memory, "available_memory", lambda: 1000)
    monkeypatch.setattr(collectives.Communicator, "recv", fails_after(0))
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        train_shards([0, 1], [variable(slots)] * 2, 0, tmp_path, -1)
    [warning] = caplog.messages
    assert re.fullmatch(
        f"{state_memory.FAILED}: rank 0: OSError: .* bytes are needed on this machine, "
        "and half of the 1,000 that are left is the most; rank 1 too",
        warning,
    )
    assert [os.fstat(fd).st_size for fd in slots] == [0] * 4
    for fd in slots:
        os.close(fd)


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


def train(folder: Path, until: int = 12, **options: Any) -> tuple[int, dict[str, Any]]:
    """The step that the loop began with, and everything at its end. until: the step that is not reached any more"""
    comm = collectives.init()
    model: Any = ddp.DataParallel(net(dropout=0.5, norm=True), comm)
    optimizer = AdamW(model.parameters(), lr=0.01)
    x, y = data()
    began = None
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(world.AGENT, raising=False) if options.pop("outside", False) else None
        ckpt = Checkpointer(folder, model=model, optimizer=optimizer, **{"every": 5, "keep": None, **options})
    try:
        with ckpt:
            for ids in ckpt.resume(Loader(comm), epochs=4):
                began = ckpt.step if began is None else began
                if ckpt.step == until:
                    raise Interrupted
                optimizer.zero_grad()
                ddp.nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
                optimizer.step()
    except Interrupted:
        pass
    assert began is not None
    return began, everything(model, [optimizer])


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
    every: int | None, until: int, began: int, rank: Callable[[int], None], tmp_path: Path
) -> None:
    rank(0)
    _, whole = train(tmp_path / "whole")
    ddp.manual_seed(1)
    assert train(tmp_path / "run", until=until, memory_every=every)[0] == 0
    rank(1)
    found, same = train(tmp_path / "run", memory_every=every)
    assert found == began
    assert_same(same, whole)
    assert open_checkpoint(tmp_path / "run/step-0000000012").step == 12


def test_a_loop_of_ones_own_goes_on_from_what_it_saved(rank: Callable[[int], None], tmp_path: Path) -> None:
    x, y = data()

    def loop(until: int) -> tuple[int, dict[str, Any]]:
        ddp.manual_seed(1)
        model = ddp.DataParallel(net(dropout=0.5, norm=True))
        optimizer = AdamW(model.parameters(), lr=0.01)
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, memory_every=1) as ckpt:
            ckpt.load()
            began = ckpt.step
            while ckpt.step < until:
                optimizer.zero_grad()
                ddp.nn.functional.cross_entropy(model(x[ckpt.step :][:4]), y[ckpt.step :][:4]).backward()
                optimizer.step()
                ckpt.step += 1
                assert not ckpt.stop_requested
                if ckpt.step % 3 == 0:
                    ckpt.save()
        return began, everything(model, [optimizer])

    rank(0)
    loop(5)
    rank(1)
    began, same = loop(9)
    assert began == 3
    for path in tmp_path.glob("step-*"):
        shutil.rmtree(path)
    _, whole = loop(9)
    assert_same(same, whole)


def test_by_itself_the_first_step_is_held_at_once_and_the_next_when_it_costs_little(
    rank: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(0)
    monkeypatch.setattr(StateMemory, "took", lambda self, began: setattr(self, "due", float("inf")))
    train(tmp_path, until=4)
    rank(1)
    assert train(tmp_path)[0] == 1


def test_memory_of_the_same_start_is_not_loaded(rank: Callable[[int], None], tmp_path: Path) -> None:
    """A program that loads again wants the checkpoint."""
    rank(1)
    train(tmp_path, until=8, memory_every=1)
    model = ddp.DataParallel(net(dropout=0.5, norm=True))
    optimizer = AdamW(model.parameters(), lr=0.01)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.load()
        assert ckpt.step == 5


@pytest.mark.parametrize("moment", ["start", "first step", "first step in a control group", "later"])
def test_without_memory_the_job_is_told_once_and_goes_on_with_the_disk(
    moment: str,
    rank: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank(0)
    if moment == "start":
        monkeypatch.setenv(world.STATE_MEMORY, variable([10**6, 10**6]))
    elif moment == "first step":
        monkeypatch.setattr(state_memory, "available_memory", lambda: 1000)
    elif moment == "first step in a control group":
        monkeypatch.setattr(state_memory, "control_group_memory", lambda: iter([10**9, 1000]))
    else:
        monkeypatch.setattr(state_memory.Slot, "write", fails_after(3))
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        train(tmp_path, until=8, memory_every=1)
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "a restart goes on from disk, not from memory"
    ]
    rank(1)
    monkeypatch.undo()
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

folder, kind, die = sys.argv[1:]
comm = collectives.init(timeout=30)
start = int(os.environ["DDP_ATTEMPT"])
ddp.manual_seed(3)
data = ddp.data.TensorDataset(ddp.arange(48), ddp.randn(48, 6), ddp.randint(3, (48,)))
loader = ddp.data.DataLoader(data, 4, sampler=ddp.data.DistributedSampler(data, seed=2))
model = ddp.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)))
if kind == "zero":
    adam = ddp.parallel.ZeroOptimizer(model, ddp.optim.AdamW, lr=0.01)
else:
    adam = ddp.optim.AdamW(model.parameters(), lr=0.01)
scheduler = ddp.optim.lr_scheduler.StepLR(adam, 5)
notes = open(f"{folder}/notes-{comm.rank}", "a", buffering=1)
ckpt = ddp.checkpoint.Checkpointer(
    f"{folder}/run", model=model, optimizer=adam, scheduler=scheduler, memory_every=1
)
for ids, x, t in ckpt.resume(loader, epochs=3):
    comm.barrier()  # all have held the step before
    if (start, ckpt.step, comm.rank) == (0, int(die), 1):
        os.kill(os.getpid(), signal.SIGKILL)
    adam.zero_grad()
    F.cross_entropy(model(x), t).backward()
    adam.step()
    scheduler.step()
    print(json.dumps([start, ckpt.step, ids.tolist(), float(ddp.rand(1))]), file=notes)
ckpt.close()
state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
open(f"{folder}/sha256-{comm.rank}", "w").write(hashlib.sha256(state).hexdigest())
"""


@pytest.mark.mpi
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [pytest.param("adam", marks=pytest.mark.long), "zero"])
def test_a_rank_is_killed_and_nothing_is_lost(kind: str, run_job: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)

    def run(name: str, die: int) -> tuple[list[list[Any]], list[str]]:
        folder = tmp_path / name
        (folder / "tmp").mkdir(parents=True)
        command = [sys.executable, "-m", "launcher", "-n", "2", "--max-restarts", "1", script, folder, kind, str(die)]
        done = run_job([*map(str, command)], timeout=60, env={**os.environ, "TMPDIR": str(folder / "tmp")})
        assert done.returncode == 0, done.stderr
        assert os.listdir(folder / "tmp") == []
        notes = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("notes*"))]
        return notes, [path.read_text() for path in sorted(folder.glob("sha256*"))]

    whole, digests = run("whole", -1)
    notes, same = run("killed", 8)
    assert [[note[1:] for note in rank] for rank in notes] == [[note[1:] for note in rank] for rank in whole]
    assert [[note[0] for note in rank] for rank in notes] == [[0] * 8 + [1] * 10] * 2
    assert same == digests
