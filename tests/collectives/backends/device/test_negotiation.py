"""NCCL or host memory: the decision as a table, and what every rank hears of it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import BackendError, NcclConfig, NcclError, run_threads
from collectives.backends.device import negotiation
from collectives.backends.device.negotiation import Capability, decide
from collectives.engine.queue import run_to_completion
from tests.collectives.backends.device.conftest import MakeRig
from tests.collectives.backends.device.fake_nccl import FakeLibrary


def caps(*fields: dict[str, Any]) -> list[Capability]:
    return [Capability(**{"gpu": f"gpu {i}", "nccl": (2, 28, 3), **each}) for i, each in enumerate(fields)]


@pytest.mark.parametrize(
    ("cast", "use_nccl", "reason"),
    [
        (caps({}, {}), True, "NCCL 2.28.3 on every rank"),
        (caps({}, {"reason": "no driver"}), False, "rank 1: no driver"),
        (caps({"reason": "a"}, {"reason": "b"}), False, "rank 0: a; rank 1: b"),
        (caps({}, {"nccl": (2, 19, 0)}), False, "the ranks have different NCCLs (rank 0: 2.28.3, rank 1: 2.19.0)"),
        (caps({}, {"config": "max_ctas=8"}), False, "different NcclConfigs: rank 0 has (), rank 1 (max_ctas=8)"),
        (caps({"gpu": "A"}, {"gpu": "A"}), False, "ranks 0 and 1 share GPU A"),
        (caps({"gpu": "A"}, {"gpu": "A", "node": 1}), True, "NCCL"),
        (caps(*[{"gpu": "A", "allows_shared_gpu": True}] * 2), False, "share GPU"),
        (caps(*[{"gpu": "A", "allows_shared_gpu": True, "nccl": (2, 30, 4)}] * 2), True, "2.30.4"),
        (caps(*[{"gpu": "A", "nccl": (2, 30, 4)}] * 2), False, "NCCL_MULTI_RANK_GPU_ENABLE=1 allows it"),
    ],
)
def test_the_decision(cast: list[Capability], use_nccl: bool, reason: str) -> None:
    chosen, why = decide(cast)
    assert chosen == use_nccl
    assert reason in why


def test_a_capability_travels_whatever_its_length() -> None:
    mine = Capability(reason='é"\n' * 2000, config="é" * 2000, node=3, gpu="x", nccl=(2, 30, 4), allows_shared_gpu=True)

    def rank(comm: Any) -> None:
        for each in run_to_completion("", negotiation._exchange(comm.transport, mine), comm.transport, 20):
            assert each.reason
            assert mine.reason.startswith(each.reason)
            assert (each.node, each.gpu, each.nccl, each.allows_shared_gpu) == (3, "x", (2, 30, 4), True)

    run_threads(rank, 2)


def reduce_once(comm: Any, cupy: Any) -> str:
    x = cupy.asarray(np.full(3, comm.rank + 1.0))
    assert comm.all_reduce(x).get().tolist() == [sum(range(comm.size + 1))] * 3
    return comm._device_communicator._device_transport.name


def test_nccl_serves_if_all_ranks_have_it_and_it_is_logged_once(rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    def twice(comm: Any, cupy: Any) -> str:
        reduce_once(comm, cupy)
        return reduce_once(comm.duplicate(), cupy)

    with caplog.at_level(logging.INFO, "collectives"):
        assert rig(3, FakeLibrary()).run(twice) == ["NCCL"] * 3
    assert caplog.messages == ["arrays on GPUs go over NCCL: NCCL 2.32.3 on every rank"]


@pytest.mark.parametrize(("max_ctas", "name"), [(None, "NCCL"), (8, "host memory")])
def test_a_config_that_sets_nothing_is_none(rig: MakeRig, max_ctas: int | None, name: str) -> None:
    def rank(comm: Any, cupy: Any) -> str:
        comm.registry.nccl = NcclConfig(max_ctas=max_ctas) if comm.rank else None
        return reduce_once(comm, cupy)

    assert rig(2, FakeLibrary()).run(rank) == [name] * 2


def test_without_nccl_on_one_rank_all_go_over_host_memory(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = rig(2, FakeLibrary())
    lacking = Capability(reason="libnccl is missing", gpu="B")
    cast = negotiation.capability
    monkeypatch.setattr(
        negotiation, "capability", lambda device, *rest: (None, lacking) if device.index else cast(device, *rest)
    )
    with caplog.at_level(logging.INFO, "collectives"):
        assert ranks.run(reduce_once) == ["host memory"] * 2
    assert caplog.messages == ["arrays on GPUs go over host memory: rank 1: libnccl is missing"]


def test_nccl_by_name_raises_on_every_rank_and_names_the_reason(rig: MakeRig) -> None:
    def rank(comm: Any, cupy: Any) -> None:
        comm.registry.requested = "nccl"
        words = f'rank {comm.rank}: backend "nccl" was asked for, but cannot be used: .*rank 0: there is no NCCL here'
        with pytest.raises(BackendError, match=words):
            comm.connect_nccl()

    rig(2, None).run(rank)


def test_nccl_by_name_meets_at_once_and_a_world_of_one_uses_it_too(rig: MakeRig) -> None:
    def rank(comm: Any, cupy: Any) -> str:
        comm.registry.requested = "nccl"
        comm.connect_nccl()
        assert comm._device_communicator._device_transport is not None
        assert comm.duplicate().backend == "nccl"
        return reduce_once(comm, cupy)

    for size in (1, 2):
        assert rig(size, FakeLibrary()).run(rank) == ["NCCL"] * size


def test_init_by_name_without_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.backends.device.cuda.why_absent", lambda: "CuPy is not installed")
    monkeypatch.setattr(collectives.init.__globals__["__name__"] + "._world", None)
    with pytest.raises(BackendError, match="rank 0: CuPy is not installed"):
        collectives.init("nccl")


def test_ranks_that_cannot_meet_in_nccl_fall_back_together(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = rig(2, FakeLibrary())
    connect = negotiation.NcclCommunicator.connect

    def refused(nccl: Any, unique_id: bytes, rank: int, *rest: Any, **more: Any) -> Any:
        if rank == 1:
            raise NcclError("no route to host")
        return connect(nccl, unique_id, rank, *rest, **more)

    monkeypatch.setattr(negotiation.NcclCommunicator, "connect", refused)
    assert ranks.run(reduce_once) == ["host memory"] * 2
    assert [end.closed for end in ranks.ends] == [True]
