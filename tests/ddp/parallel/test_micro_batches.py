"""The number of ranks changes no bit: one tree of sums, and everything else by step and micro-batch."""

from __future__ import annotations

import hashlib
import math
import os
import signal
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
from numpy.testing import assert_allclose, assert_array_equal

import collectives
import ddp
from collectives import Communicator
from ddp import _device, nn
from ddp.autograd import checkpoint
from ddp.checkpoint import Checkpointer
from ddp.data import DataLoader, Dataset, DistributedSampler
from ddp.errors import ArgumentError, DdpError
from ddp.nn import functional as F
from ddp.parallel import DataParallel, SyncBatchNorm, ZeroOptimizer, comm_hooks, data_parallel, micro_batches
from ddp.parallel.control import ControlMessage
from ddp.parallel.micro_batches import Subtree, TreeExchange, blocks, micro_batches_of, tree_sum
from tests.collectives.backends.shm.ranks import run_sharing
from tests.collectives.backends.shm.test_contract_on_nodes import on_nodes
from tests.collectives.test_contract import by_messages
from tests.ddp.parallel.ranks import gradients, on_ranks

SIZES = (1, 2, 3, 4)
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


class GPT(nn.Module):
    """Each image is a sentence of 144 / 9 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        words = x.reshape(x.shape[0], 16, 9).sum(2).abs().clamp(0, 49).long()
        return self.head(self.layers(self.embedding(words))).mean(1)


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


def loss_of_step(comm: Communicator, losses: list[float]) -> float:
    """The mean over the micro-batches of all ranks, in their order."""
    return float(comm.all_gather(np.array(losses)).mean())


def train(
    comm: Communicator,
    make: Callable[[], nn.Module] = MLP,
    count: int = 6,
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
            losses.append(loss_of_step(comm, mine))
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


CASES: dict[str, dict[str, Any]] = {
    "MLP": {},
    "MLP of small buckets": {"bucket_cap_mb": 1e-3},
    "CNN": {"make": CNN, "count": 5},
    "weights": {"count": 4, "weighted": True},
    "recomputed": {"make": Recomputed},
    "GPT under autocast": {"make": GPT, "count": 4, "amp": True},
}


@pytest.mark.parametrize(
    "name",
    [
        *("MLP", "CNN", "weights", "GPT under autocast"),
        *[pytest.param(name, marks=pytest.mark.long) for name in ("MLP of small buckets", "recomputed")],
    ],
)
def test_bits_are_the_same_on_any_number_of_ranks(name: str) -> None:
    rank = partial(train, **CASES[name])
    by_rank = {repr(result) for size in SIZES for result in on_ranks(rank, size)}
    assert len(by_rank) == 1


def sharded(model: DataParallel) -> ZeroOptimizer:
    return ZeroOptimizer(model, ddp.optim.AdamW, lr=1e-2)


# Of 8 micro-batches, 2 steps an epoch.
JOBS: dict[str, dict[str, Any]] = {
    "MLP": {},
    "CNN": {"make": CNN},
    "GPT": {"make": GPT, "amp": True},
    "ZeRO": {"make_optimizer": sharded},
}
#: How many threads, or each rank's node: one with shared memory, and two levels.
PLACES: list[Any] = [5, [0, 0, 0], [0, 1, 0, 1]]
MORE_PLACES: list[Any] = [2, 3, 4, 8, [0, 0], [0] * 4, [0] * 5, [0] * 8, [0, 0, 1], [0, 0, 1, 1, 1], [0] * 4 + [1] * 4]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_bits_are_the_same_wherever_ranks_are(job: dict[str, Any], count: Callable[[int, int], int]) -> None:
    rank = partial(train, count=8, epochs=count(2, 25), **job)
    [whole] = on_ranks(rank, 1)
    for place in PLACES + MORE_PLACES[: count(0, len(MORE_PLACES))]:
        by_rank = on_ranks(rank, place) if isinstance(place, int) else run_sharing(rank, place)
        assert by_rank == [whole] * len(by_rank), place


@pytest.mark.parametrize("name", ["MLP", pytest.param("GPT under autocast", marks=pytest.mark.long)])
def test_optimizer_state_in_shards_gives_the_same_bits(name: str) -> None:
    rank = partial(train, **CASES[name])
    [whole] = on_ranks(rank, 1)
    for size in SIZES:
        assert on_ranks(partial(rank, make_optimizer=sharded), size) == [whole] * size


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


def test_draws_go_on_after_a_resume(tmp_path: Path) -> None:
    """In a loop without a DataLoader, before the forward."""

    def rank(comm: Communicator, folder: Path, end: int) -> list[float]:
        ddp.manual_seed(comm.rank)
        model = DataParallel(nn.Linear(1, 1), comm, micro_batches=4)
        draws = []
        with Checkpointer(folder, model=model, comm=comm) as checkpointer:
            checkpointer.load()
            while checkpointer.step < end:
                for _ in micro_batches_of(4, comm.rank, comm.size):
                    draws.append(float(ddp.rand(1)))
                    model(ddp.ones(1, 1)).sum().backward()
                model.zero_grad()
                checkpointer.step += 1
            checkpointer.save()
        return draws

    [whole] = on_ranks(partial(rank, folder=tmp_path / "whole", end=3), 1)
    on_ranks(partial(rank, folder=tmp_path / "parts", end=1), 1)
    first, second = on_ranks(partial(rank, folder=tmp_path / "parts", end=3), 2)
    assert sorted(first + second) == sorted(whole[4:])


def test_each_micro_batch_has_draws_of_its_own() -> None:
    def rank(comm: Communicator) -> list[float]:
        ddp.manual_seed(comm.rank)
        model = DataParallel(nn.Linear(1, 1), comm, micro_batches=4)
        draws = []
        for _ in range(3):
            for _ in micro_batches_of(4, comm.rank, comm.size):
                y = model(ddp.rand(1, 1))
                draws.append(float(ddp.rand(1)))
                y.sum().backward()
            model.zero_grad()
        return draws

    [whole] = on_ranks(rank, 1)
    assert len({*whole}) == 12
    first, second = on_ranks(rank, 2)
    assert sorted(first + second) == sorted(whole)


def test_worker_processes_draw_what_this_one_would() -> None:
    [whole] = on_ranks(train, 1)
    assert on_ranks(partial(train, workers=1), 2) == [whole] * 2


def test_a_gradient_that_was_left_on_a_frozen_parameter_stays() -> None:
    model = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), collectives.init(), micro_batches=2)
    first, second = model.module
    step(model)
    left = first.weight.grad.numpy().copy()
    first.requires_grad_(False)
    second.zero_grad()
    step(model)
    assert_array_equal(first.weight.grad.numpy(), left)


def test_the_layout_of_buckets_does_not_matter() -> None:
    [one], [two] = (on_ranks(partial(train, **CASES[name]), 1) for name in ("MLP", "MLP of small buckets"))
    assert one == two


@pytest.mark.parametrize(
    ("left_out", "options"),
    [
        ((micro_batches.MicroBatches, "seed_draws", lambda self, of_forward=False: None), {}),
        ((micro_batches, "tree_sum", lambda parts, add: add_in_order(parts, add)), {"count": 4}),
        ((DistributedSampler, "number_of", lambda self, batch: batch), {}),
        ((micro_batches.MicroBatches, "_update_statistics", lambda self: move_alone(self)), {"make": CNN}),
        ((ControlMessage, "scale", lambda self: 1 / self.array[0]), {"count": 4, "weighted": True}),
        ((sys.modules[__name__], "loss_of_step", lambda comm, mine: mean_of_means(comm, mine)), {}),
    ],
    ids=["draws", "order of sums", "augmentation", "running statistics", "weights", "losses"],
)
def test_each_part_is_needed(left_out: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*left_out)
    assert len({repr(on_ranks(partial(train, **options), size)[0]) for size in SIZES}) > 1


def add_in_order(parts: list[Subtree], add: Any) -> Any:
    total = parts[0].total
    for part in parts[1:]:
        total = add(total, part.total)
    return total


def mean_of_means(comm: Communicator, losses: list[float]) -> float:
    return float(comm.all_reduce(np.array(np.mean(losses)), "mean"))


def move_alone(progress: Any) -> None:
    """What each rank's own micro-batches would have done to its running statistics."""
    for mean_of, mean, _, _ in progress._records:
        mean_of.copy_(0.9 * mean_of + 0.1 * ddp.from_numpy(mean.reshape(-1)))


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_is_that_of_the_whole_batch(size: int) -> None:
    x = np.random.default_rng(0).normal(size=(8, 5))
    t = np.random.default_rng(1).integers(0, 3, 8)

    def net() -> nn.Module:
        ddp.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def rank(comm: Communicator) -> Any:
        model = DataParallel(net(), comm, micro_batches=4)
        for number in micro_batches_of(4, comm.rank, size):
            rows = slice(2 * number, 2 * number + 2)
            with model.no_sync():  # a micro-batch in two parts
                (F.cross_entropy(model(ddp.from_numpy(x[rows][:1])), ddp.from_numpy(t[rows][:1])) / 2).backward()
            assert model.accumulating
            (F.cross_entropy(model(ddp.from_numpy(x[rows][1:])), ddp.from_numpy(t[rows][1:])) / 2).backward()
        assert not model.accumulating
        return gradients(model.module)

    whole = net()
    F.cross_entropy(whole(ddp.from_numpy(x)), ddp.from_numpy(t)).backward()
    for got in on_ranks(rank, size):
        for name, expected in gradients(whole).items():
            assert_allclose(got[name], expected, rtol=0, atol=1e-14)


def test_backward_pass_statistics_are_those_of_the_micro_batches_in_their_order() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

    x = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)

    def rank(comm: Communicator) -> Any:
        net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None))
        model = DataParallel(net, comm, micro_batches=5)
        for number in micro_batches_of(5, comm.rank, comm.size):
            model(ddp.from_numpy(x[number])).square().sum().backward()
        return {name: value.numpy().copy() for name, value in net.state_dict().items()}

    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, momentum=None))
    for part in x:
        net(torch.from_numpy(part))
    for got in on_ranks(rank, 3):
        for name, expected in net.state_dict().items():
            assert_allclose(got[name], expected.numpy(), rtol=1e-6, atol=1e-7, err_msg=name)


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

    on_ranks(rank, 2)


def test_a_micro_batch_that_failed_is_made_again() -> None:
    def gradient(fails_at: int | None) -> Any:
        ddp.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        model = DataParallel(net, collectives.init(), micro_batches=3)
        for number in range(3):
            if fails_at is not None and number == 1:

                def fail_behind(layer: Any, inputs: Any, out: ddp.Tensor) -> None:
                    out.register_hook(lambda g: 1 / 0)

                hook = net[fails_at].register_forward_hook(fail_behind)
                with pytest.raises(ZeroDivisionError):
                    model.backward(model(ddp.arange(16.0).reshape(2, 8)).sum(), weight=2)
                hook.remove()
            x = ddp.arange(16.0).reshape(2, 8) * number
            model.backward(model(x).sum(), weight=number + 1)
        results = [net[2].weight.grad.numpy(), net[0].running_mean.numpy(), net[0].num_batches_tracked.numpy()]
        before = net[2].weight.grad.numpy().copy()
        with pytest.raises(DdpError, match=r"call zero_grad"):
            model.backward(model(ddp.ones(2, 8)).sum(), weight=1)
        assert_array_equal(net[2].weight.grad.numpy(), before)
        return results

    expected = gradient(None)
    for layer in (2, 0):  # before any parameter has its gradient, and when the last layer has
        for got, right in zip(gradient(layer), expected, strict=True):
            assert_array_equal(got, right)


def go_on(comm: Communicator, folder: Path, end: int | None, killed: bool = False) -> str:
    """Trains from the newest checkpoint to the step `end`, or to the end. killed: dies in the middle of a later step"""
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
                if killed and checkpointer.step >= 3:
                    os.kill(os.getpid(), signal.SIGKILL)
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


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2])
def test_killed_ranks_go_on_as_others_with_the_same_bits(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], tmp_path: Path, size: int
) -> None:
    done = run_job([*mpiexec, "-n", str(size), sys.executable, __file__, tmp_path / "killed"], timeout=60)
    assert done.returncode in (9, 137), done.stderr
    assert list((tmp_path / "killed").glob("step-*"))
    [result, *_] = on_ranks(partial(go_on, folder=tmp_path / "killed", end=None), 3)
    assert result == go_on(collectives.init(), tmp_path / "whole", None)


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

    on_ranks(rank, 2)


@pytest.mark.mpi
@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.long)])
def test_ranks_that_are_processes(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], size: int
) -> None:
    expected = [on_ranks(partial(train, count=8, **job), 1)[0][0] for job in JOBS.values()]
    done = run_job([*mpiexec, "-n", str(size), sys.executable, __file__], timeout=110)
    assert done.stdout.split() == expected * 3, done.stderr


if __name__ == "__main__":
    messages = by_messages(limit=2**31 - 1)
    here = collectives.init()
    if len(sys.argv) > 1:
        go_on(here, Path(sys.argv[1]), None, killed=True)
    two_levels = on_nodes(tuple(int(rank >= 2) for rank in range(here.size)))
    for ranks in (here, messages, two_levels):
        for job in JOBS.values():
            found, _ = train(ranks, count=8, **job)
            if ranks.rank == 0:
                print(found)
