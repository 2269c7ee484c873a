"""The number of ranks changes no bit: one tree of sums, and everything else by step and micro-batch."""

from __future__ import annotations

import functools
import hashlib
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import collectives
import ddp
from collectives import Communicator
from ddp import _device, nn
from ddp.autograd import checkpoint
from ddp.checkpoint import Checkpointer
from ddp.data import DataLoader, Dataset, DistributedSampler
from ddp.errors import ArgumentError, DdpError
from ddp.nn import functional as F
from ddp.parallel import DataParallel, SyncBatchNorm, ZeroOptimizer, comm_hooks, data_parallel
from ddp.parallel.micro_batches import Subtree, TreeExchange, blocks, micro_batches_of, tree_sum
from tests.collectives.backends.shm.ranks import run_sharing
from tests.collectives.backends.shm.test_contract_on_nodes import on_nodes
from tests.collectives.test_contract import by_messages
from tests.ddp.parallel.ranks import assert_same, gradients, on_ranks

CLASSES = 10


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "0"), (3, "((0+1)+2)"), (6, "(((0+1)+(2+3))+(4+5))"), (7, "(((0+1)+(2+3))+((4+5)+6))")],
)
def test_the_tree(count: int, expected: str) -> None:
    for size in range(1, count + 1):
        shares = [micro_batches_of(count, rank, size) for rank in range(size)]
        assert [number for share in shares for number in share] == list(range(count))
        parts = []
        for share in shares:
            for start, length in blocks(share):
                leaves = [Subtree(number, 1, str(number)) for number in range(start, start + length)]
                parts.append(Subtree(start, length, tree_sum(leaves, lambda a, b: f"({a}+{b})")))
        assert tree_sum(parts, lambda a, b: f"({a}+{b})") == expected


def test_as_many_sums_are_kept_as_the_tree_is_deep() -> None:
    for count in range(1, 49):
        for size in range(1, count + 1):
            for each in (micro_batches_of(count, rank, size) for rank in range(size)):
                kept = max(len(blocks(range(each.start, stop))) for stop in range(each.start, each.stop))
                assert kept <= math.ceil(math.log2(count)), (count, each)
    with pytest.raises(ArgumentError, match="micro_batches=2 on 3 ranks"):
        micro_batches_of(2, 0, 3)


class Recomputed(nn.Module):
    """Backward runs a part with dropout and batch norm once more."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.head(checkpoint(self.part, x))


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, CLASSES))


class CNN(nn.Sequential):
    def __init__(self) -> None:
        layers = [
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4, momentum=None),
        ]
        super().__init__(*layers, nn.Flatten(), nn.Linear(4 * 8 * 8, CLASSES))


class Augmented(Dataset[Any]):
    """Images with noise that is drawn when they are read."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng(index)
        image = ddp.from_numpy(rng.normal(size=(1, 12, 12)).astype(np.float32))
        return image + 0.1 * ddp.randn(1, 12, 12), int(rng.integers(CLASSES))


def digest(*nets: nn.Module) -> str:
    tensors = [x.detach().numpy() for net in nets for x in net.state_dict().values()]
    return hashlib.sha256(b"".join(x.tobytes() for x in tensors)).hexdigest()


def train(
    comm: Communicator,
    make: Callable[[], nn.Module] = MLP,
    count: int = 8,
    amp: bool = False,
    weighted: bool = False,
    workers: int = 0,
    make_optimizer: Callable[[Any], Any] = lambda model: ddp.optim.AdamW(model.parameters(), lr=1e-2),
    epochs: int = 2,
    **options: Any,
) -> tuple[str, list[float]]:
    """Epochs of 44 samples, whose last step has fewer. Returns a hash of the model, and losses by step."""
    ddp.manual_seed(comm.rank)  # what other ranks draw must not matter
    net = make()
    dataset = Augmented()
    model = DataParallel(net, comm, micro_batches=count, **options)
    sampler = DistributedSampler(dataset, comm=comm, micro_batches=count, tail="exact" if weighted else "pad")
    loader = DataLoader(dataset, batch_size=3, sampler=sampler, num_workers=workers)
    optimizer = make_optimizer(model)
    scaler = ddp.amp.GradScaler("cpu", init_scale=2.0**127, enabled=amp)
    losses: list[float] = []
    mine: list[float] = []
    for _ in range(epochs):
        for x, t in loader:
            x = x + 0.1 * ddp.randn(x.shape)
            ddp.rand(comm.rank)  # as for a picture that rank 1 makes
            with ddp.autocast("cpu", dtype=ddp.bfloat16, enabled=amp):
                y = model(x).float()
            if weighted:
                loss = F.cross_entropy(y, t, reduction="sum") / 3
                model.backward(loss, weight=len(t) / 3)
            else:
                loss = F.cross_entropy(y, t)
                scaler.scale(32 * loss).backward()  # the first of which overflow under autocast
            mine.append(loss.item())
            if model.accumulating:
                continue
            losses.append(float(comm.all_gather(np.array(mine)).mean()))  # over all ranks' micro-batches
            mine.clear()
            scaler.unscale_(optimizer)
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            net.eval()
            model(ddp.randn(2, 1, 12, 12))  # an evaluation draws, and changes nothing
            ddp.rand(comm.rank)
            net.train()
    assert scaler.get_scale() < 2.0**127 or not amp
    return digest(net), losses


def sharded(model: DataParallel) -> ZeroOptimizer:
    return ZeroOptimizer(model, ddp.optim.AdamW, lr=1e-2)


CASES: dict[str, dict[str, Any]] = {
    "MLP": {},
    "MLP of small buckets": {"bucket_cap_mb": 1e-3},
    "MLP of 6": {"count": 6},
    "ZeRO": {"make_optimizer": sharded},
    "CNN": {"make": CNN, "count": 5},
    "weights": {"count": 4, "weighted": True},
    "recomputed": {"make": Recomputed},
    "autocast": {"count": 4, "amp": True},
    "autocast and ZeRO": {"amp": True, "make_optimizer": sharded},
}
#: Options that change no bit.
LAYOUT = ("bucket_cap_mb", "make_optimizer")
#: How many threads, or each rank's node: one with shared memory, and two levels.
PLACES: list[Any] = [2, 3, [0, 0, 0], [0, 1, 0, 1]]
MORE_PLACES: list[Any] = [4, 5, 8, [0, 0], [0] * 4, [0] * 5, [0] * 8, [0, 0, 1], [0, 0, 1, 1, 1], [0] * 4 + [1] * 4]


@functools.cache
def alone(name: str, epochs: int = 2) -> tuple[str, list[float]]:
    """What one rank gives."""
    options = {option: value for option, value in CASES[name].items() if option not in LAYOUT}
    [whole] = on_ranks(partial(train, epochs=epochs, **options), 1)
    return whole


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        "MLP of small buckets",
        "ZeRO",
        "CNN",
        "weights",
        "autocast",
        *[
            pytest.param(name, marks=pytest.mark.long)
            for name in ("MLP", "MLP of 6", "recomputed", "autocast and ZeRO")
        ],
    ],
)
def test_bits_are_the_same_wherever_ranks_are(name: str, count: Callable[[int, int], int]) -> None:
    case = CASES[name]
    epochs = count(2, 10)
    rank = partial(train, epochs=epochs, **case)
    for place in PLACES + MORE_PLACES[: count(0, len(MORE_PLACES))]:
        size = place if isinstance(place, int) else len(place)
        if size <= case.get("count", 8):
            by_rank = on_ranks(rank, size) if size == place else run_sharing(rank, place)
            assert by_rank == [alone(name, epochs)] * size, place


def test_a_rank_keeps_no_more_sums_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = TreeExchange.keep
    kept = []

    def counted(self: TreeExchange, number: int) -> None:
        keep(self, number)
        kept.append(len(self._sums[0]) + len(self._free[0]))

    monkeypatch.setattr(TreeExchange, "keep", counted)
    model = DataParallel(nn.Linear(2, 1), collectives.init(), micro_batches=8)
    for _ in range(3):
        step(model, 8)
        model.zero_grad()
    assert max(kept) == 3


def test_each_micro_batch_has_draws_of_its_own_that_go_on_after_a_resume(tmp_path: Path) -> None:
    """In a loop without a DataLoader, before and behind the forward."""

    def rank(comm: Communicator, folder: str, end: int) -> Any:
        ddp.manual_seed(comm.rank)
        model = DataParallel(nn.Linear(1, 1), comm, micro_batches=4)
        draws = []
        with Checkpointer(tmp_path / folder, model=model, comm=comm) as checkpointer:
            checkpointer.load()
            while checkpointer.step < end:
                for _ in micro_batches_of(4, comm.rank, comm.size):
                    draws.append(float(ddp.rand(1)))
                    y = model(ddp.ones(1, 1))
                    draws.append(float(ddp.rand(1)))
                    y.sum().backward()
                model.zero_grad()
                checkpointer.step += 1
            checkpointer.save()
        return draws

    [whole] = on_ranks(partial(rank, folder="whole", end=3), 1)
    assert len({*whole}) == 24
    on_ranks(partial(rank, folder="parts", end=1), 1)
    first, second = on_ranks(partial(rank, folder="parts", end=3), 2)
    assert sorted(first + second) == sorted(whole[8:])


def test_worker_processes_draw_what_this_one_would() -> None:
    assert on_ranks(partial(train, workers=1), 2) == [alone("MLP")] * 2


def test_a_gradient_that_was_left_on_a_frozen_parameter_stays() -> None:
    model = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), collectives.init(), micro_batches=2)
    first, second = model.module
    step(model)
    left = first.weight.grad.clone()
    first.requires_grad_(False)
    second.zero_grad()
    step(model)
    assert first.weight.grad.equal(left)


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_is_that_of_the_whole_batch(size: int) -> None:
    x = ddp.from_numpy(np.random.default_rng(0).normal(size=(8, 5)))
    t = ddp.from_numpy(np.random.default_rng(1).integers(0, 3, 8))

    def make_net() -> nn.Module:
        ddp.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def rank(comm: Communicator) -> Any:
        model = DataParallel(make_net(), comm, micro_batches=4)
        for number in micro_batches_of(4, comm.rank, size):
            first, second = (
                F.cross_entropy(model(x[row : row + 1]), t[row : row + 1]) / 2 for row in (2 * number, 2 * number + 1)
            )
            with model.no_sync():  # a micro-batch in two parts
                first.backward()
            second.backward()
        return gradients(model.module)

    whole = make_net()
    F.cross_entropy(whole(x), t).backward()
    for got in on_ranks(rank, size):
        assert_same(got, gradients(whole), 1e-14)


def test_statistics_are_those_of_the_micro_batches_in_their_order() -> None:
    x = ddp.from_numpy(np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32))

    def make_net() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None))

    def rank(comm: Communicator) -> Any:
        net = make_net()
        model = DataParallel(net, comm, micro_batches=5)
        for number in micro_batches_of(5, comm.rank, comm.size):
            model(x[number]).square().sum().backward()
        return net.state_dict()

    whole = make_net()
    for part in x:
        whole(part)
    for got in on_ranks(rank, 3):
        assert_same(got, whole.state_dict(), 1e-6)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("seen", ddp.zeros(1))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        self.seen += 1
        return self.linear(x)


def thaw(model: Any) -> None:
    model.module[0].weight.requires_grad_(True)
    model(ddp.ones(2, 2)).sum().backward()


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].weight.requires_grad_(False)
    return net


def step(model: Any, times: int = 2) -> None:
    for _ in range(times):
        model(ddp.ones(2, 2)).sum().backward()


def mixed(model: Any) -> None:
    model(ddp.ones(2, 2)).sum().backward()
    model.backward(model(ddp.ones(2, 2)).sum(), weight=2)


def captured(model: Any) -> None:
    loss = model(ddp.ones(2, 2)).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device.capturing, "now", Mock(spec=["guard_value", "undo"]))
        loss.backward()


def joined(model: Any) -> None:
    with model.join():
        pass


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[Any], Any], str]] = {
    "hook": (frozen, {"comm_hook": comm_hooks.TopK(0.1)}, step, "leave out comm_hook"),
    "SyncBatchNorm": (lambda: nn.Sequential(SyncBatchNorm(2)), {}, step, "0 is a SyncBatchNorm"),
    "16 bits": (lambda: nn.Linear(2, 1, dtype=ddp.bfloat16), {}, step, "weight is bfloat16.*under autocast"),
    "ranks": (frozen, {"micro_batches": 1}, step, "micro_batches=1 on 2 ranks"),
    "a number": (frozen, {"micro_batches": 2.5}, step, "micro_batches is a whole number"),
    "buffer": (Counting, {}, step, "forward has changed the buffer seen"),
    "instance norm": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 2)), nn.InstanceNorm1d(1, affine=True, track_running_stats=True)),
        {},
        step,
        "running statistics of BatchNorm",
    ),
    "frozen": (frozen, {}, thaw, "0.weight has no place in the tree"),
    "a second step": (frozen, {"micro_batches": 4}, lambda model: step(model, 3), r"call zero_grad\(\) after each"),
    "weights": (frozen, {"micro_batches": 4}, mixed, "with and without a weight"),
    "CUDA graph": (frozen, {}, captured, "run without a graph"),
    "join": (frozen, {}, joined, 'join: .*tail="exact"'),
    "state": (
        frozen,
        {},
        lambda model: model.load_plan_state({**model.plan_state(), "micro_batches": {"count": 3}}),
        "state is of micro_batches=3, this model has 2",
    ),
    "half a state": (
        frozen,
        {},
        lambda model: model.load_plan_state({**model.plan_state(), "micro_batches": {}}),
        "expected what `model.plan_state\\(\\)` gave",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exact_is_refused(case: Any) -> None:
    make, options, use, message = case

    def rank(comm: Communicator) -> None:
        with pytest.raises(DdpError, match=message):
            use(DataParallel(make(), comm, **{"micro_batches": 2, **options}))

    on_ranks(rank)


@pytest.mark.parametrize("wrong", [{"backwards": "x"}, {"micro_batches": {"count": 2, "seed": 5, "step": 1}}])
def test_a_state_that_is_refused_changes_nothing(wrong: dict[str, Any]) -> None:
    model = DataParallel(nn.Linear(2, 1), collectives.init(), micro_batches=2)
    before = model.plan_state()
    with pytest.raises(DdpError, match="expected what"):
        model.load_plan_state({**before, "micro_batches": {**before["micro_batches"], "seed": 5}, **wrong})
    assert model.plan_state() == before


def test_a_micro_batch_that_failed_is_made_again() -> None:
    def fail_behind(layer: Any, inputs: Any, out: ddp.Tensor) -> None:
        out.register_hook(lambda g: 1 / 0)

    def gradient(fails_at: int | None) -> Any:
        ddp.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        model = DataParallel(net, collectives.init(), micro_batches=3)
        x = ddp.arange(16.0).reshape(2, 8)
        for number in range(3):
            if fails_at is not None and number == 1:
                hook = net[fails_at].register_forward_hook(fail_behind)
                with pytest.raises(ZeroDivisionError):
                    model.backward(model(x).sum(), weight=2)
                hook.remove()
            model.backward(model(x * number).sum(), weight=number + 1)
        results = [net[2].weight.grad.clone(), *net.buffers()]
        with pytest.raises(DdpError, match=r"call zero_grad"):
            model.backward(model(x).sum(), weight=1)
        assert net[2].weight.grad.equal(results[0])
        return results

    expected = gradient(None)
    for layer in (2, 0):  # before any parameter has its gradient, and when the last layer has
        assert_same(gradient(layer), expected, 0)


def go_on(comm: Communicator, folder: Path, end: int | None) -> str:
    """Trains from the newest checkpoint to the step `end`, or to the end."""
    ddp.manual_seed(3)
    net = CNN()
    net.append(nn.Dropout(0.2))
    model = DataParallel(net, comm, micro_batches=5)
    optimizer = ddp.optim.AdamW(net.parameters(), lr=1e-2)
    dataset = Augmented()
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, comm=comm, micro_batches=5))
    with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm, every=1) as checkpointer:
        for x, t in checkpointer.resume(loader, epochs=2):
            F.cross_entropy(model(x + ddp.randn(x.shape)), t).backward()
            if model.accumulating:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer.step == end:
                break
    assert end is not None or checkpointer.step == 10
    return digest(net)


def test_a_run_goes_on_at_other_numbers_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, ends: list[tuple[int, int | None]]) -> str:
        for size, end in ends:
            [result, *_] = on_ranks(partial(go_on, folder=folder, end=end), size)
        return str(result)

    whole = run(tmp_path / "whole", [(1, None)])
    assert run(tmp_path / "parts", [(3, 1), (2, 3), (1, 5), (4, 7), (2, None)]) == whole


def test_a_loop_is_left_between_steps() -> None:
    dataset = Augmented()
    comm = collectives.init()
    model = DataParallel(MLP(), comm, micro_batches=2)
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, comm=comm, micro_batches=2))
    for x, t in loader:
        F.cross_entropy(model(x), t).backward()
        break
    with pytest.raises(DdpError, match="before micro-batch 1 of its step"):
        next(iter(loader))


def test_a_machine_that_computes_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DataParallel(nn.Linear(2, 1), collectives.init(), micro_batches=2)
    state = model.plan_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_plan_state(state)
    state["micro_batches"]["machine"] = {"BLAS threads": 64, "kernels": "kernels-armv8.so"}
    with pytest.warns(
        UserWarning, match=r"saved with BLAS threads 64, here .*; kernels kernels-armv8.so, here .*OPENBLAS"
    ):
        model.load_plan_state(state)


def test_ranks_that_compute_otherwise_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = iter([1, 2])
    monkeypatch.setattr(data_parallel, "machine", lambda: {"BLAS threads": next(threads)})

    def rank(comm: Communicator) -> None:
        with pytest.raises(DdpError, match="BLAS threads"):
            DataParallel(nn.Linear(2, 1), comm, micro_batches=2)

    on_ranks(rank)


#: Whatever a model computes, its gradients go over a transport in these ways.
OF_PROCESSES = ("CNN", "ZeRO")


@pytest.mark.mpi
@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.long)])
def test_ranks_that_are_processes(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], size: int
) -> None:
    expected = [alone(name)[0] for name in OF_PROCESSES]
    done = run_job([*mpiexec, "-n", str(size), sys.executable, __file__], timeout=110)
    assert done.stdout.split() == expected * 3, done.stderr


if __name__ == "__main__":
    messages = by_messages(limit=2**31 - 1)
    here = collectives.init()
    two_levels = on_nodes(tuple(int(rank >= 2) for rank in range(here.size)))
    for ranks in (here, messages, two_levels):
        for case in OF_PROCESSES:
            found, _ = train(ranks, **CASES[case])
            if ranks.rank == 0:
                print(found)
