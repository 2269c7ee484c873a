"""Which cores are near a GPU, and which of them a rank keeps to: as tables, on files like those of the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import placement
from launcher.placement import cores_near, parse_cpu_list, share_near_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of four cores, two GPUs at each; the driver lists them in no order."""
    driver, bus = tmp_path / "driver", tmp_path / "bus"
    for place, uuid, cores in (
        ("0000:C8:00.0", "GPU-dddd", "4-7"),
        ("0000:17:00.0", "GPU-aaaa", "0-3"),
        ("0000:65:00.0", "GPU-bbbb", "0-3"),
        ("0000:A1:00.0", "GPU-cccc", "4-7"),
    ):
        (driver / place).mkdir(parents=True)
        (driver / place / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}-1234\n")
        (bus / place.lower()).mkdir(parents=True)
        (bus / place.lower() / "local_cpulist").write_text(cores + "\n")
    defaults = str(driver), str(bus)
    monkeypatch.setattr(placement.cores_near, "__defaults__", defaults)
    return tmp_path


@pytest.mark.parametrize(
    ("gpu", "cores"),
    [
        ("0", {0, 1, 2, 3}),
        ("1", {0, 1, 2, 3}),
        ("2", {4, 5, 6, 7}),
        ("3", {4, 5, 6, 7}),
        ("GPU-cccc", {4, 5, 6, 7}),
        ("GPU-aaaa-1234", {0, 1, 2, 3}),
        ("4", set()),
        ("GPU-eeee", set()),
        ("MIG-8a5e", set()),
    ],
)
def test_a_gpu_by_any_of_its_names(machine: Path, gpu: str, cores: set[int]) -> None:
    assert cores_near(gpu) == cores


def test_where_nobody_tells() -> None:
    assert cores_near("0", driver="/nowhere") == set()


def test_a_bus_that_says_nothing(machine: Path) -> None:
    (machine / "bus" / "0000:17:00.0" / "local_cpulist").write_text("\n")
    assert cores_near("0") == set()


def test_lists() -> None:
    assert parse_cpu_list("0-1,4,6-7\n") == [0, 1, 4, 6, 7]
    assert parse_cpu_list("\n") == []


A, B = {0, 1, 2, 3}, {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("near", "bound", "expected"),
    [
        ([A, A, B, B], False, [(A, 0, 1), (A, 0, 1), (B, 0, 1), (B, 0, 1)]),
        ([A, A, B, B], True, [(A, 0, 2), (A, 1, 2), (B, 0, 2), (B, 1, 2)]),
        ([A, A], False, [(set(), 0, 1)] * 2),  # the other socket would be idle
        ([A, A], True, [(A, 0, 2), (A, 1, 2)]),
        ([A | B, A | B], False, [(set(), 0, 1)] * 2),  # one socket: there is nothing to keep to
        ([A, set()], True, [(set(), 0, 1)] * 2),
        ([{9}, B], True, [(set(), 0, 1)] * 2),  # cores that this job may not use
    ],
)
def test_what_each_rank_keeps_to(near: list[set[int]], bound: bool, expected: list[tuple[set[int], int, int]]) -> None:
    assert [share_near_cores(near, A | B, rank, bound) for rank in range(len(near))] == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("", [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]),
        ("bind", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_a_seat_is_near_its_gpu(
    machine: Path, monkeypatch: pytest.MonkeyPatch, told: str, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: ["0", "1", "2", "3"])
    monkeypatch.setattr(placement, "by_topology", sorted)
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda pid: set(range(8)))
    placements = [placement.Placement(told, {}, placed_world(rank)) for rank in range(4)]
    assert [each.cores for each in placements] == expected
    assert {each.threads for each in placements} == {2}


def placed_world(rank: int) -> object:
    from collectives.world import World

    return World("mpich", rank, 4, rank, 4)
