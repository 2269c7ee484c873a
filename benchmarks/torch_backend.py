"""PyTorch's own calls and training steps on the backend "ddp" and on gloo, in turns in one job of two ranks.

    python -m benchmarks.torch_backend [--rounds 10] [--only all_reduce-1K,barrier] [--rate 1gbit] [--json FILE]

Calls are torch.distributed's own, on float32 tensors; steps are DistributedDataParallel's and fully_shard's (FSDP2), of
the models of `benchmarks.train_step` in PyTorch. "limit" is the same step on PyTorch's backend "fake", which moves
nothing. Goals are for two ranks with a core each.

With --rate the ranks are on two hosts (see `benchmarks.two_hosts`, also for what that needs), and a step of
DistributedDataParallel is measured, with buckets of several sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks import harness, two_hosts
from benchmarks.harness import Goal, Rounds, at_least, at_most, median_ratio

LIMIT = 3600.0  # s
KIB = 1 << 10
MIB = 1 << 20
# Rows with the repeats of a round; a goal in us of ours, or how many times faster than gloo.
CALLS: dict[str, tuple[int, float, Callable[..., Goal]]] = {
    "all_reduce-1K": (200, 25, at_most),
    "async-1K": (200, 40, at_most),
    "future-1K": (200, 60, at_most),
    "all_reduce-1M": (20, 6, at_least),
    "all_reduce-16M": (4, 4.5, at_least),
    "all_reduce-100M": (1, 4, at_least),
    "reduce_scatter-1M": (20, 6, at_least),
    "all_gather-1M": (20, 5, at_least),
    "send_recv-1K": (200, 60, at_most),
    "barrier": (200, 20, at_most),
}
# A step takes at most so much of gloo's.
STEPS = {"ddp-mlp": 0.95, "ddp-gpt": 0.97, "fsdp-mlp": 0.7, "fsdp-gpt": 0.75}
# The row on two hosts, and of gloo's best what ours at its best takes at most.
ON_TWO_HOSTS = ("ddp-mlp", 0.95)
BUCKETS = (1, 5, 25)  # MiB


def call(row: str, group: Any, rank: int) -> Callable[[], object]:
    """One call of that row."""
    import torch
    import torch.distributed as dist

    name, _, size = row.partition("-")
    if name == "barrier":
        return lambda: dist.barrier(group=group)
    count = int(size[:-1]) * (KIB if size[-1] == "K" else MIB) // 4
    x = torch.ones(count)
    whole = torch.ones(2 * count)

    sources = itertools.cycle((0, 1))

    def exchange() -> None:
        move = dist.send if next(sources) == rank else dist.recv
        move(x, 1 - rank, group=group)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group),
        "async": lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True).wait(),
        "future": lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True).get_future().wait(),
        "reduce_scatter": lambda: dist.reduce_scatter_single(x, whole, dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, x, group=group),
        "send_recv": exchange,
    }
    return calls[name]


def step(row: str, group: Any, bucket: int = 25) -> Callable[[], object]:
    """One training step of that row. bucket: DistributedDataParallel's, in MiB"""
    import torch
    import torch.distributed as dist
    from torch.distributed import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    wrapper, _, model = row.partition("-")
    torch.manual_seed(0)
    if model == "mlp":
        layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(6)]
        net: Any = torch.nn.Sequential(*layers)
        x = torch.randn(64, 1024)
    else:
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        net = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        layers = list(net.layers)
        x = torch.randn(8, 128, 128)

    def complete(result: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(result)
        return future

    if wrapper == "ddp":
        net = DistributedDataParallel(net, process_group=group, bucket_cap_mb=bucket)
        if dist.get_backend(group) == "fake":  # whose own futures hold nothing
            net.register_comm_hook(None, lambda _, bucket: complete(bucket.buffer()))
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (*layers, net):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return run


def microseconds(run: Callable[[], object], repeats: int) -> float:
    return 1e6 * harness.seconds(run, repeats)


def goals(results: dict[str, Rounds]) -> Iterator[Goal]:
    """The goals of the rows that were measured."""
    for row, us in results.items():
        if "gloo" not in us:
            medians = harness.medians(us)
            ours = min((name for name in us if name.startswith("ddp")), key=medians.__getitem__)
            gloo = min((name for name in us if name.startswith("gloo")), key=medians.__getitem__)
            yield at_most(f"{row}: {ours} / {gloo}", ON_TWO_HOSTS[1], median_ratio(us[ours], us[gloo]))
            continue
        if row in STEPS:
            yield at_most(
                f"{row}: ours / gloo",
                STEPS[row],
                median_ratio(us["ddp"], us["gloo"]),
                median_ratio(us["limit"], us["gloo"]),
            )
            continue
        _, limit, compare = CALLS[row]
        if compare is at_most:
            yield at_most(f"{row}: us", limit, harness.medians(us)["ddp"])
        else:
            yield at_least(f"{row}: gloo / ours", limit, median_ratio(us["gloo"], us["ddp"]))


def measure(rows: list[str], rounds: int, several_hosts: bool) -> dict[str, Rounds]:
    """Microseconds of each row, on rank 0."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # which registers the backend

    import collectives.torch  # noqa: F401

    dist.init_process_group("ddp")
    ours = dist.group.WORLD
    gloo, fake = (dist.new_group(backend=backend) for backend in ("gloo", "fake"))
    results = {}
    for row in rows:
        repeats = CALLS[row][0] if row in CALLS else 2
        if several_hosts:
            runs = {
                f"{name}, {bucket} MiB": step(row, group, bucket)
                for bucket in BUCKETS
                for name, group in (("ddp", ours), ("gloo", gloo))
            }
        elif row in CALLS:
            runs = {name: call(row, group, dist.get_rank()) for name, group in (("ddp", ours), ("gloo", gloo))}
        else:
            runs = {name: step(row, group) for name, group in (("ddp", ours), ("gloo", gloo), ("limit", fake))}
        turns = {name: partial(microseconds, run, repeats) for name, run in runs.items()}
        results[row] = harness.take_turns(turns, rounds)
        if dist.get_rank() == 0:
            harness.show(f"{row} (us)", results[row], digits=1)
    dist.destroy_process_group()
    return results


def main() -> None:
    parser = harness.parser(__doc__, rounds=10, only=(*CALLS, *STEPS))
    parser.add_argument("--rate", help="rate of a cable between two hosts, as tc writes it (default: one host)")
    arguments = parser.parse_args()
    if arguments.rate is not None and {*arguments.only} != {*CALLS, *STEPS}:
        parser.error("between two hosts only DistributedDataParallel is measured: leave out --only")
    from collectives.world import world_from_env

    world = world_from_env()
    if world is None:
        with contextlib.ExitStack() as stack:
            start = [sys.executable, "-m", "launcher", "-n", "2"]
            if arguments.rate is not None:
                start = two_hosts.start(stack.enter_context(two_hosts.hosts(arguments.rate)))
            command = [*start, "-m", "benchmarks.torch_backend", *sys.argv[1:]]
            status = subprocess.run(command, cwd=harness.ROOT, timeout=LIMIT).returncode
        sys.exit(status)
    several_hosts = arguments.rate is not None
    rows = [ON_TWO_HOSTS[0]] if several_hosts else arguments.only
    results = measure(rows, arguments.rounds, several_hosts)
    if world.rank == 0:
        network = {"hosts": "two network namespaces", "rate": arguments.rate} if several_hosts else {}
        harness.write(arguments.json, "torch_backend", goals=list(goals(results)), **network, us=results)


if __name__ == "__main__":
    main()
