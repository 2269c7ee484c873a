"""GPUs and cores of a host, and who gets which of them: tables; what a rank then finds is looked at in one."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

from collectives.world import World
from launcher import placement
from launcher.errors import UsageError
from tests.conftest import ROOT

NODES = ["null", "nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvme0"]
DRIVER = ["0000:17:00.0", "0000:65:00.0", "0000:b3:00.0"]


@pytest.mark.parametrize(
    ("asked", "driver", "nodes", "found"),
    [
        (None, DRIVER, NODES, ["0", "1", "2"]),
        (None, DRIVER, ["null"], []),  # a container that was given none sees the driver all the same
        (None, DRIVER, ["nvidia2", "nvidiactl"], ["0"]),  # one that was given the third calls it the first
        ("NoDevFiles", DRIVER, NODES, []),
        (" 1 , 2 ", DRIVER, NODES, ["1", "2"]),
        ("1,-1,2", DRIVER, NODES, ["1"]),  # as CUDA reads it
        ("GPU-8a5e,MIG-77", [], NODES, ["GPU-8a5e", "MIG-77"]),
    ],
)
def test_visible_gpus(asked: str | None, driver: list[str], nodes: list[str], found: list[str]) -> None:
    assert placement.parse_visible_devices(asked, driver, nodes) == found


def test_n_gpu(monkeypatch: Any) -> None:
    there = {"/proc/driver/nvidia/gpus": DRIVER, "/dev": NODES}
    monkeypatch.setattr(placement, "list_folder", lambda folder: there[folder])
    assert placement.count_gpus({}) == 3
    assert placement.count_gpus({"CUDA_VISIBLE_DEVICES": "2"}) == 1
    with pytest.raises(UsageError, match=r"^-n gpu: CUDA_VISIBLE_DEVICES= leaves no GPU to be seen$"):
        placement.count_gpus({"CUDA_VISIBLE_DEVICES": ""})
    there["/dev"] = []
    with pytest.raises(UsageError, match=r"^-n gpu: this machine has no GPU \(no /dev/nvidia0\)$"):
        placement.count_gpus({})


def test_threads_of_a_core_lie_side_by_side(monkeypatch: Any) -> None:
    where = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)}
    monkeypatch.setattr(placement, "_topology", lambda core, name: where[core][name == "core_id"])
    assert placement.by_topology(set(where)) == [0, 4, 1, 5, 2, 6, 3, 7]


_STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("world", "environ", "nodes", "expected"),
    [
        (World("mpich", 5, 6, 1, 2), {}, (4, 2), (1, 2, 1)),
        (World("mpich", 5, 6, 1, 2), {}, None, (1, 2, None)),
        (World("mpich", 5, 6), {}, None, (5, 6, None)),
        (World("mpich", 5, 6), {**_STEP, "SLURM_STEP_TASKS_PER_NODE": "4,2"}, None, (1, 2, 1)),
        (World("slurm", 5, 6, 1), {**_STEP, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, None, (1, 3, 1)),
        # What a batch script says of itself is not about this rank.
        (World("mpich", 0, 6, 0, 3), {**_STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, (0, 3, None)),
    ],
)
def test_place(
    world: World, environ: dict[str, str], nodes: tuple[int, ...] | None, expected: tuple[int, int, int | None]
) -> None:
    assert placement.locate(world, environ, nodes) == expected


def test_rules_reach_the_agent(monkeypatch: Any) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: ["4", "6"])
    told = placement.rules(bind=True, share_gpu=True, nodes=(1, 3))
    found = placement.Placement(told, {}, World("mpich", 3, 4))
    allowed = placement.by_topology(os.sched_getaffinity(0))
    assert (found.local_rank, found.local_size, found.node) == (2, 3, 1)
    assert found.gpus == ["4"]
    assert found.cores == placement.split_cores(allowed, 2, 3)
    assert found.environment({}) == {
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "CUDA_VISIBLE_DEVICES": "4",
        "OMP_NUM_THREADS": str(max(1, len(allowed) // 3)),
    }
    assert "OMP_NUM_THREADS" not in found.environment({"OMP_NUM_THREADS": "7"})
    rules = placement.rules(bind=False, share_gpu=True, nodes=None)
    unbound = placement.Placement(rules, {}, World("mpich", 0, 2, 0, 2))
    assert (unbound.cores, unbound.node) == (None, None)


@pytest.fixture
def one_gpu(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine on which agents find one GPU."""
    patch = "import launcher.placement\nlauncher.placement.list_folder = lambda folder: ['nvidia0']\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


@pytest.mark.mpi
def test_ranks_that_may_not_share_a_gpu_do_not_start(ddp_launch: Any, one_gpu: Any) -> None:
    sentence = r"ddp-launch: 2 ranks on \S+ would share 1 GPU: start one a GPU \(-n gpu\), or share them .*\n"
    assert re.fullmatch(sentence, ddp_launch("print('started')", env=one_gpu, code=2, out="").stderr)


SAYS = """
print([sorted(os.sched_getaffinity(0)), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["NODE_RANK"],
       [name for name in os.environ if name.startswith("DDP_LAUNCH")]])
"""


@pytest.mark.mpi
@pytest.mark.parametrize("share", [("--share-gpu", "--bind"), ("--backend", "mpi")])
def test_ranks_share_a_gpu_and_the_cores(ddp_launch: Any, one_gpu: Any, share: tuple[str, ...]) -> None:
    allowed = os.sched_getaffinity(0)
    found = [ast.literal_eval(line[3:]) for line in ddp_launch(SAYS, options=share, env=one_gpu).lines]
    first, second = ({*cores} for cores, *_ in found)
    assert first | second == allowed
    assert (not first & second) == ("--bind" in share and len(allowed) > 1)
    assert [rest for _, *rest in found] == [["0", "0", []]] * 2
