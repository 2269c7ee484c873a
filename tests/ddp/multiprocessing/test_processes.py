"""Tensors between processes that end in every way: nothing leaks, and what was opened stays."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ddp
import ddp.multiprocessing as mp
from ddp import nn
from tests.ddp.multiprocessing import children
from tests.ddp.multiprocessing.counting import descriptors, mappings

ROOT = Path(__file__).parent.parent.parent.parent


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_both_sides_see_one_memory(method: str) -> None:
    before = descriptors(), mappings()
    context = mp.get_context(method)
    requests, results = context.Queue(), context.Queue()
    model = tied()
    x = ddp.zeros(2)
    given = {"plain": ddp.zeros(3), "label": children.labelled("mine")}
    process = context.Process(target=children.exchange, args=(requests, results, model, given))
    process.start()
    requests.put(x)
    facts, same, weight, new = results.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0
    assert facts == {
        "mappings": 3,  # of the model, of the small arguments, and of x
        "tied": True,
        "requires_grad": True,
        "shared": True,
        "grad shared": False,
        "label": "mine",
        "kinds": ["Tensor", "Parameter", "Labelled"],
        "start method": "spawn",
    }
    assert x.tolist() == same.tolist() == [1, 1]
    assert given["plain"].tolist() == [7, 7, 7]
    assert model[0].weight.tolist() == weight.tolist() == [[3, 3], [3, 3]]
    assert model[0].weight.grad is None
    assert new.tolist() == [5, 5, 5], "what the child made outlives it"
    assert results.get(timeout=10)[99_999].item() == 6, "even when nobody had received it before it ended"
    for each in (requests, results):
        each.close()
        each.join_thread()
    del same, weight, new, given, model, x, each, requests, results, process, facts
    assert (descriptors(), mappings()) == before


def test_a_peer_killed_at_any_moment_leaves_nothing(count: Any) -> None:
    before = descriptors(), mappings()
    context = mp.get_context("forkserver")
    for turn in range(count(3, 60)):
        ours, theirs = context.Pipe()
        process = context.Process(target=children.echo, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        ours.send(ddp.ones(10))
        assert ours.recv()[1].item() == 10
        killer = threading.Timer(turn % 10 * 1e-3, os.kill, (process.pid, signal.SIGKILL))
        killer.start()  # a thread, since both sides may wait for the other to read
        sent = received = 0
        try:
            while True:
                ours.send(ddp.full((20_000,), float(sent)))
                sent += 1
                if ours.poll():
                    echoed, total = ours.recv()
                    assert echoed[0].item() == received
                    assert total.item() == received * 20_000
                    received += 1
        except (OSError, EOFError):  # closed, or in the middle of a message
            pass
        killer.join()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        ours.close()
        process.close()
        echoed = total = None
        assert (descriptors(), mappings()) == before


def test_spawn_gives_all_processes_one_tensor() -> None:
    x = ddp.zeros(3)
    assert mp.start_processes(children.fill, (x,), nprocs=2, start_method="forkserver") is None
    assert x.tolist() == [10, 11, 0]
    with pytest.raises(ddp.errors.ArgumentError, match="nprocs should be at least 1, is 0"):
        mp.spawn(children.fill, nprocs=0)


def test_an_exception_is_raised_here_and_ends_the_others() -> None:
    x = ddp.zeros(2, dtype=ddp.int64).share_memory_()
    began = time.monotonic()
    started = mp.start_processes(children.fail_beside_a_sleeper, (x,), 2, join=False, start_method="forkserver")
    with pytest.raises(mp.ProcessRaisedException, match=r"Process 1 terminated(?s:.)*fail_beside_a_sleeper") as caught:
        started.join()
    assert (caught.value.error_index, caught.value.pid) == (1, x[1].item())
    assert started.pids() == x.tolist()
    assert [process.is_alive() for process in started.processes] == [False, False]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("way", "kind", "message", "code"),
    [
        ("raise", mp.ProcessRaisedException, "the end", None),
        ("dictlike", mp.ProcessRaisedException, r"in end\n(?s:.*)Dictlike.*dictlike", None),
        ("kill", mp.ProcessExitedException, "signal SIGKILL", -9),
        ("exit", mp.ProcessExitedException, "exit code 3", 3),
    ],
)
def test_other_endings(way: str, kind: Any, message: str, code: int | None) -> None:
    with pytest.raises(kind, match=message) as caught:
        mp.start_processes(children.end, (way,), start_method="forkserver")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    if code is not None:
        assert caught.value.exit_code == code
        assert caught.value.signal_name == (None if code > 0 else "SIGKILL")


def test_waiting_has_a_limit_and_ctrl_c_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    started = mp.start_processes(children.wait_for_ever, nprocs=1, join=False, start_method="forkserver")
    assert started.join(timeout=0.01) is False

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddp.multiprocessing.processes.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        started.join()
    assert not started.processes[0].is_alive()


def test_processes_end_with_a_parent_that_is_killed(start_job: Any) -> None:
    code = (
        "import ddp.multiprocessing as mp\n"
        "from tests.ddp.multiprocessing.children import wait_for_ever\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(wait_for_ever, nprocs=1)\n"
    )
    job = start_job([sys.executable, "-c", code], cwd=ROOT)
    assert job.process.stdout.readline() == "started\n"
    job.process.kill()
    job.wait(timeout=30, leave=20)


def test_a_pool_takes_and_gives_tensors() -> None:
    before = descriptors()
    with mp.get_context("forkserver").Pool(1) as pool:
        given = [ddp.full((3,), float(i)) for i in range(3)]
        assert [each.tolist() for each in pool.map(ddp.neg, given)] == [[-i] * 3 for i in range(3)]
        pool.apply(ddp.Tensor.fill_, (given[0], 8.0))
        assert given[0].tolist() == [8, 8, 8]
    del given
    assert descriptors() <= before  # those of other tests' threads may have gone
