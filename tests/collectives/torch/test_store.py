"""How ranks of PyTorch start, and what happens when one of them fails: each a job of its own."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from collectives.errors import BackendError
from tests.conftest import Run, has_mpich

torch = pytest.importorskip("torch")
dist = torch.distributed
pytestmark = pytest.mark.mpi
RunScript = Callable[..., CompletedProcess[str]]

SUM = """
import os, sys, time
import torch, torch.distributed as dist
import collectives.torch
def run(**more):
    dist.init_process_group("ddp", **more)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2, 2]
    if dist.get_rank() == 0:
        time.sleep(0.1)  # its store is still there when rank 1 joins the next group
    dist.destroy_process_group()
"""
FROM_VARIABLES = f"""{SUM}
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
run()
run()  # again, after it was destroyed
assert (rank, local, os.environ["WORLD_SIZE"]) == (collectives.init().rank,) * 2 + ("2",)
print("done")
"""
SPAWNED = f"""{SUM}
def spawned(rank, path):
    run(init_method="file://" + path, rank=rank, world_size=2)
    print("done", flush=True)
if __name__ == "__main__":
    torch.multiprocessing.spawn(spawned, (sys.argv[1],), 2)
"""


def check(done: CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(["-m", "launcher", "-n", "2"], marks=pytest.mark.long),
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            marks=pytest.mark.skipif(not has_mpich(), reason="takes MPICH"),
        ),
    ],
    ids=["ddp-launch", "torchrun"],
)
def test_started_by(start: list[str], run_job: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FROM_VARIABLES)
    check(run_job([sys.executable, *start, str(script)], timeout=100))


@pytest.mark.long  # as those below start
def test_started_by_mpiexec(run_script: RunScript) -> None:
    check(run_script(FROM_VARIABLES))


@pytest.mark.long  # PyTorch's own tests start like this, too
@pytest.mark.skipif(not has_mpich(), reason="takes MPICH")
def test_spawned_by_pytorch(run_job: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    check(run_job([sys.executable, str(script), str(tmp_path / "store")], timeout=100))


BESIDE = """
import torch, torch.distributed as dist
import collectives.torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg  # the backend "fake"
dist.init_process_group("cpu:ddp,cuda:gloo")
backends = [dist.group.WORLD._get_backend(torch.device(device)).name() for device in ("cpu", "cuda")]
assert backends == ["ddp", "gloo"], backends
x = torch.ones(3)
dist.all_reduce(x)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(x).sum().backward()
assert dist.all_reduce(x, async_op=True).get_future().wait()[0].tolist() == [4, 4, 4]

dist.Backend._ensure_backend_registered("nccl")
dist.Backend._plugins["NCCL"] = dist.Backend._plugins["FAKE"]  # which wants no GPU
gpus = dist.new_group(backend="cpu:ddp,cuda:nccl")
with FakeTensorMode():
    work = dist.all_reduce(torch.ones(3, device="cuda"), group=gpus, async_op=True)
assert "FakeWork" in str(work), "calls on tensors of a GPU go to NCCL's backend"
dist.all_reduce(x, group=gpus)

torch.accelerator.is_available = lambda: True  # split_group wants one, and the default group to be bound to it
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
dist.group.WORLD.bound_device_id = torch.device("cuda:0")
rank = dist.get_rank()
alone = dist.split_group(split_ranks=[[0], [1]])
dist.all_reduce(x, group=alone)
both = dist.split_group(split_ranks=[[0, 1]], backend="cpu:ddp,cuda:gloo")
dist.all_reduce(x, group=both)
assert (alone.size(), dist.get_process_group_ranks(both), x.tolist()) == (1, [0, 1], [16] * 3)
try:
    dist.split_group(split_ranks=[[0]])
except RuntimeError as error:
    assert rank == 1 and "rank 1: ranks should name each member once, the calling rank among them" in str(error), error
print("done")
"""


@pytest.mark.skipif(torch.__version__ < "2.14", reason="before torch 2.14 see below")
def test_beside_another_backend(run_script: RunScript) -> None:
    check(run_script(BESIDE))


FAKE_BESIDE = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
import collectives.torch
from torch.testing._internal.distributed import fake_pg  # the backend "fake", for any device
dist.init_process_group("cpu:ddp,meta:fake")
rank, world = dist.get_rank(), dist.group.WORLD
cpu, meta = torch.ones(4), torch.ones(4, device="meta")
made = []
def count(work):
    made.append("FakeWork" in str(work))
    work.wait()
for x in (cpu, meta):
    pair = lambda: [torch.empty_like(x), torch.empty_like(x)]
    more = {"async_op": True}
    count(dist.all_reduce(x, **more))
    count(dist.broadcast(x, 1, **more))
    count(dist.reduce(x, 0, **more))
    count(dist.all_gather(pair(), x, **more))
    count(dist.all_gather_into_tensor(torch.cat(pair()), x, **more))
    count(dist.reduce_scatter(x, pair(), **more))
    count(dist.reduce_scatter_tensor(x, torch.cat(pair()), **more))
    count(dist.gather(x, pair() if rank else None, 1, **more))
    count(dist.scatter(x, pair() if rank else None, 1, **more))
    count(dist.all_to_all_single(torch.empty_like(x), x, **more))
    batch = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, pair()[0], 1 - rank)]
    for work in dist.batch_isend_irecv(batch):
        count(work)
    with dist._coalescing_manager(world, x.device):
        dist.broadcast(x, 0)
    functional.wait_tensor(functional.all_reduce(x, "sum", world))
    dist._broadcast_coalesced(world, [x], 100, 0)  # C++ that makes the calls
assert made == [False] * 12 + [True] * 12, made
assert {type(operation.group) for operation in batch} == {dist.ProcessGroup}, "which PyTorch makes one call"
subgroup = dist.new_group([0, 1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, device="meta"), None, init_sync=False)
def hook(_, bucket):
    count(dist.all_reduce(bucket.buffer(), group=subgroup, async_op=True))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
model.register_comm_hook(None, hook)
model(torch.ones(2, 3, device="meta")).sum().backward()
assert made[24:] == [True] and model.module.weight.grad.is_meta
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1), process_group=subgroup)
model(torch.full((2, 3), 1.0 + rank)).sum().backward()
assert model.module.weight.grad.tolist() == [[3.0] * 3]
dist.destroy_process_group()
"""

NCCL_BESIDE = """
import torch, torch.distributed as dist
import collectives.torch
from datetime import timedelta
from torch.distributed import distributed_c10d
gpu = torch.device("cuda:0")
events = []

class Options:
    __slots__ = ("_timeout", "global_ranks_in_group", "group_name", "is_high_priority_stream")
    __slots__ += ("split_color", "split_from")

class NCCL(dist.ProcessGroupGloo):
    "Its constructor and what PyTorch's Python code asks of it, and no more."
    Options = Options
    supports_splitting = True

    def __init__(self, store, rank, size, options):
        assert type(options) is Options and not options.is_high_priority_stream
        super().__init__(store, rank, size, timeout=options._timeout)
        parent = getattr(options, "split_from", None)
        events.append((self, rank, size, options.global_ranks_in_group, options._timeout.seconds, parent))

    def eager_connect_single_device(self, device):
        events.append(device)

    def perform_nocolor_split(self, device):
        events.append("not in it")

    def _group_start(self):
        events.append("aborted")

    def _group_end(self):
        pass

torch.accelerator.current_accelerator = lambda: gpu
torch.accelerator.device_count = lambda: 1
distributed_c10d._NCCL_AVAILABLE = True
distributed_c10d.ProcessGroupNCCL = NCCL
for backend in ("cpu:ddp,cuda:nccl", "cuda:nccl,cpu:ddp"):
    dist.init_process_group(backend, timeout=timedelta(seconds=50), device_id=gpu)
    rank, world = dist.get_rank(), dist.group.WORLD
    nccl = world._get_backend(gpu)
    assert events == [(nccl, rank, 2, [], 50, None), gpu], events
    assert world.bound_device_id == gpu and [device.type for device in world._device_types] == ["cpu", "cuda"]
    one = dist.new_group([1], timeout=timedelta(seconds=20))
    if rank:
        assert events[2:] == [(one._get_backend(gpu), 0, 1, [1], 20, nccl), gpu], events
    else:
        assert events[2:] == ["not in it"]
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2] * 3
    world.set_timeout(timedelta(seconds=40))
    assert nccl.options._timeout.seconds == world._comm.timeout == 40
    try:
        dist.barrier()
    except RuntimeError as error:
        gpu_wanted = "aten::empty" in str(error) or "NVIDIA driver" in str(error)  # without and with CUDA
        assert gpu_wanted, "a barrier of the device that the group is bound to is NCCL's"
    else:
        raise AssertionError
    if backend.startswith("cpu"):
        dist.destroy_process_group()
    else:
        distributed_c10d._abort_process_group()
        assert events.pop() == "aborted"
    events.clear()
print("done")
"""

SPLIT_BESIDE = """
import torch, torch.distributed as dist
import collectives.torch
for number in range(2):  # PyTorch 2.13 alone crashes when it splits the second default group
    if number:
        dist.destroy_process_group()
    dist.init_process_group("cpu:ddp,cuda:gloo")
torch.accelerator.is_available = lambda: True  # split_group wants one, and the default group to be bound to it
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
world, x = dist.group.WORLD, torch.ones(3)
world.bound_device_id = torch.device("cuda:0")
options = world._get_backend(torch.device("cuda")).options  # which PyTorch 2.13 cannot copy
def split(ranks, **more):
    return dist.split_group(split_ranks=ranks, pg_options=options, **more)
dist.all_reduce(x, group=split([[0], [1]]))
newer = torch.__version__ >= "2.13"  # which can split a group for some of its devices
both = split([[1, 0]], group_desc="both", **{"backend": "cpu:ddp,cuda:gloo"} if newer else {})
dist.all_reduce(x, group=both)
assert (dist.get_process_group_ranks(both), both.rank(), x.tolist()) == ([0, 1], dist.get_rank(), [2] * 3)
assert both.group_desc == both._others.group_desc == "both" and both.group_name == both._others.group_name
one = split([[0]])
assert (one is None) == (dist.get_rank() == 1)
cpu = world.split_group([0, 1], device_types=[torch.device("cpu")])
cpu.allreduce([x]).wait()
assert cpu._device_types == [torch.device("cpu")] and x.tolist() == [4] * 3
if newer:
    gpu = world.split_group([0, 1], device_types=[torch.device("cuda")])
    assert gpu._device_types == [torch.device("cuda")]
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch 2.14 makes each backend by itself")
def test_another_backend_for_tensors_of_the_cpu_is_refused() -> None:
    import collectives.torch  # noqa: F401

    with pytest.raises(BackendError, match='use "cpu:ddp,cuda:nccl"'):
        dist.init_process_group("cpu:gloo,cuda:ddp", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="from torch 2.14 on see above")
def test_beside_another_backend_before_2_14(run_script: RunScript) -> None:
    check(run_script(FAKE_BESIDE + SPLIT_BESIDE + NCCL_BESIDE))


FAILING = """
import os, time
import torch, torch.distributed as dist
import collectives.torch
from datetime import timedelta
try:
    dist.init_process_group("ddp", store=dist.HashStore(), rank=0, world_size=3)
except RuntimeError as error:
    print("another world:", error, flush=True)
dist.init_process_group("ddp", timeout=timedelta(seconds=3))
rank = dist.get_rank()
dist.barrier()
faults = [
    lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX),
    lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32)),
    lambda: dist.all_reduce(torch.ones(4)),
    lambda: dist.broadcast(torch.ones(3), 0),
    lambda: time.sleep(30),
]
for fault in faults:
    start = time.monotonic()
    try:
        if rank:
            fault()
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print("rank", rank, "after", int(time.monotonic() - start), "s:", error, flush=True)
time.sleep(1)
os._exit(1)
"""
NAMED = [
    "another world: PyTorch was told that this is rank 0 of 3, but it was started as rank 1 of 2",
    "1     all_reduce #1  max   float32 (3,)  script.py:14",
    "0     all_reduce #1  sum   float32 (3,)  script.py:25",
    "1     all_reduce #2  sum   int32 (3,)    script.py:15",
    "1     all_reduce #3  sum   float32 (4,)  script.py:16",
    "broadcast #4   root 0  float32 (3,)  script.py:17",
    "Rank 1 has not arrived",
]


def test_faults_are_named(run_script: RunScript) -> None:
    done = run_script(FAILING)
    assert done.returncode != 0
    for sentence in NAMED:
        assert sentence in done.stdout, done.stdout + done.stderr
    assert re.findall(r"^rank (\d) after 3 s:", done.stdout, re.M) == ["0"], "of calls that differ both hear at once"


ON_GLOO = """
import os
import torch, torch.distributed as dist
import collectives.torch
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
def show(name, x, op=dist.ReduceOp.SUM):
    dist.all_reduce(x, op)
    os.write(1, f"{rank} {name} {x.flatten().tolist()}\\n".encode())  # in one piece
show("op", torch.arange(6.0) + rank, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
show("dtype", torch.ones(3, dtype=torch.int32 if rank else torch.float32))
show("strided", torch.ones(3, 8)[:, ::2])
print("done")
"""
RIGHT = ([1, 3, 5, 7, 9, 11], [1, 2, 3, 4, 5, 6], [2] * 3, [2] * 12)


@pytest.mark.long
def test_what_gloo_returns_for_them(run_script: RunScript) -> None:
    """The table of docs/from-gloo.md."""
    done = run_script(ON_GLOO)
    check(done)
    shown = [json.loads(numbers) for numbers in re.findall(r"^\d \w+ (.*)$", done.stdout, re.M)]
    assert len(shown) == 6
    assert not [numbers for numbers in shown if numbers in RIGHT]


KILLED = f"""{SUM}
dist.init_process_group("ddp")
if dist.get_rank():
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.long
def test_a_killed_rank_is_named_by_the_launcher(run_job: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    done = run_job([sys.executable, "-m", "launcher", "-n", "2", str(script)], timeout=60)
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "SIGKILL" in done.stderr


def test_what_a_version_of_pytorch_means() -> None:
    from collectives.torch import check_version

    with pytest.raises(BackendError, match=r'"ddp" needs PyTorch 2.12 or later, this one is 2.11.1'):
        check_version("2.11.1")
    check_version("2.12.0+cpu")
    check_version("2.14.1")
    with pytest.warns(UserWarning, match="tested with PyTorch before 2.15, this one is 2.15.0"):
        check_version("2.15.0")


def test_packages_whose_frames_are_skipped_are_installed() -> None:
    from collectives.engine.call import skip_frames
    from collectives.errors import ArgumentError

    with pytest.raises(ArgumentError, match="there is no 'no_such_package'"):
        skip_frames("no_such_package")


TRACED = """
import torch, torch.distributed as dist
import collectives.torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
def replicated(net):
    return DistributedDataParallel(net, bucket_cap_mb=0.3)
def sharded(net):
    return [fully_shard(layer) for layer in net] and fully_shard(net)
dist.init_process_group("ddp")
for wrap in (replicated, sharded):
    model = wrap(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)))
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(model(torch.ones(2, 300)), torch.ones(2, 300))
        loss.backward()
"""


@pytest.mark.long  # each rank loads what the two wrappers want, which takes 7 s
def test_a_trace_shows_the_calls_of_each_backward(run_job: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRACED)
    folder = tmp_path / "trace"
    done = run_job(
        [sys.executable, "-m", "launcher", "-n", "2", "--trace", str(folder), str(script)], timeout=100, code=0
    )
    assert "trace of 2 ranks, 8 steps" in done.stderr
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank, (step, calls) in itertools.product(
        range(2), ((3, {"all_reduce"}), (7, {"all_gather", "reduce_scatter"}))
    ):
        of_step = [event for event in events if event["pid"] == rank and event.get("args", {}).get("step") == step]
        compute = [event["name"] for event in of_step if event["tid"] == 1]
        assert compute == ["other: data, optimizer, logging", "forward", "loss", "backward", "wait for communication"]
        buckets = [event for event in of_step if event["ph"] == "X" and event["name"].startswith("bucket")]
        named = [event["args"]["parameters"][0] for event in buckets]
        assert {name.split()[0] for name in named} == calls
        assert all("(script.py:15)" in name for name in named), named
        assert len(buckets) >= 2
        assert all(event["dur"] > 0 < event["args"]["MiB"] for event in buckets)
