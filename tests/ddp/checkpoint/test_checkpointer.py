"""Saving and loading at any place: what comes back, and what is refused, with names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
import ddp
from collectives.communicator import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer, Store, load_model, open_checkpoint
from ddp.errors import ArgumentError, CheckpointError, DtypeError, StateDictError
from ddp.optim import SGD, Adam, AdamW, RMSprop, lr_scheduler
from ddp.parallel import ZeroOptimizer
from tests.ddp.checkpoint.training import Loader, assert_same, everything, net


def same(mine: ddp.Tensor, theirs: ddp.Tensor) -> None:
    assert_array_equal(mine.detach().numpy(), theirs.detach().numpy())


def step(model: Any, *optimizers: Any) -> None:
    model(ddp.tensor(np.random.default_rng(0).standard_normal((5, 6)), dtype=ddp.float32)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: Path, **parts: Any) -> None:
    with Checkpointer(folder, **parts) as ckpt:
        ckpt.save()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("empty", ddp.zeros(0, 2))
        self.register_buffer("passing", ddp.ones(2), persistent=False)
        self.half = nn.Parameter(ddp.ones(3, dtype=ddp.bfloat16))
        self.scale = nn.Parameter(ddp.tensor(2.0))

    def get_extra_state(self) -> Any:
        return {"message": ("a", "b"), "table": np.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_every_kind_of_parameter_comes_back_and_tied_ones_are_one(folder: Path) -> None:
    model = Tied()
    expected = {name: value.numpy().copy() for name, value in model.state_dict().items() if name != "_extra_state"}
    saved(folder, model=model)
    assert sum(name.endswith("weight") for name in open_checkpoint(folder / "step-0000000000").names) == 1
    other = Tied()
    with ddp.no_grad():
        for p in other.parameters():
            p.zero_()
    with Checkpointer(folder, model=other) as ckpt:
        assert ckpt.load()
    assert other.head.weight is other.embed.weight
    assert other.extra["message"] == ("a", "b")
    for name, value in expected.items():
        got = other.state_dict()[name].numpy()
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())


class Partly(nn.Module):
    """A model of which one part is wrapped."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        part = nn.Sequential(nn.Linear(6, 3))
        self.body: nn.Module = ddp.DataParallel(part) if wrapped else part

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.body(x)


def bare(wrapped: bool) -> Any:
    part = nn.Sequential(nn.Linear(6, 3))
    return ddp.DataParallel(part) if wrapped else part


@pytest.mark.parametrize("source_wrapped", [False, True])
@pytest.mark.parametrize(("make", "prefix"), [(bare, "model"), (Partly, "model.body")], ids=["whole", "inside"])
def test_names_on_disk_are_those_of_the_bare_model_and_load_wrapped_and_bare(
    make: Any, prefix: str, source_wrapped: bool, folder: Path
) -> None:
    """So checkpoints do not depend on the wrapper, nor on the version: they never had its `module.`"""
    source = make(source_wrapped)
    optimizer = Adam(source.parameters())
    step(source, optimizer)
    saved(folder, model=source, optimizer=optimizer)
    names = open_checkpoint(folder / "step-0000000000").names
    assert {f"{prefix}.0.weight", f"{prefix}.0.bias"} <= set(names)
    assert not any("module" in name for name in names)
    for target in (make(True), make(False)):
        with Checkpointer(folder, model=target, optimizer=Adam(target.parameters())) as ckpt:
            assert ckpt.load()
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            same(mine, theirs)
        assert load_model(folder, target) == ([], [])


class Best:
    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def test_what_the_user_keeps(folder: Path) -> None:
    best = Best()
    kept = {"best": best, "curve": [1.0, float("nan")], "ids": np.arange(3), "ema": ddp.ones(2), "at": (1,)}
    user = dict(kept)
    with Checkpointer(folder, user=user) as ckpt:
        best.value = 0.5
        ckpt.save()
        best.value = 0.1
        user.update(curve=[], ids=None, new=1)
        assert ckpt.load()
    assert user["best"] is best
    assert best.value == 0.5
    assert repr(user) == repr(kept)
    with Checkpointer(folder / "other", user=best) as ckpt:
        ckpt.save()
        best.value = 0.0
        ckpt.load()
    assert best.value == 0.5


@pytest.mark.parametrize(("given", "curve"), [(None, 0), ({"curve": 1}, 1)], ids=["nothing", "others"])
def test_an_object_without_a_state_is_named_and_stays(
    given: Any, curve: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(folder, user=given)
    ema = nn.Linear(2, 2)
    user = {"curve": 0, "ema": ema}
    with Checkpointer(folder, user=user) as ckpt:
        with pytest.raises(StateDictError, match=r"step-0000000000: .* no state of user\.ema$"):
            ckpt.load()
        assert user["curve"] == 0
        assert ckpt.load(strict=False)
    assert user == {"curve": curve, "ema": ema}
    assert "no state of user.ema; the object stays as it is" in caplog.text


def test_a_user_without_a_state_is_named(folder: Path) -> None:
    saved(folder)
    with Checkpointer(folder, user=Best()) as ckpt, pytest.raises(StateDictError, match=r"no state of user$"):
        ckpt.load()


def test_several_optimizers_and_groups(folder: Path) -> None:
    def make() -> tuple[Any, list[Any]]:
        model = net(norm=True)
        first = model[0].parameters()
        second = model[1].parameters()
        third = model[3].parameters()
        groups = [{"params": list(first), "lr": 0.5}, {"params": list(second), "weight_decay": 0.1}]
        return model, [AdamW(groups, lr=ddp.tensor(0.1)), RMSprop(third, momentum=0.1)]

    model, optimizers = make()
    step(model, *optimizers)
    saved(folder, model=model, optimizer=optimizers)
    expected = everything(model, optimizers)
    step(model, *optimizers)
    after = everything(model, optimizers)
    model, optimizers = make()
    with Checkpointer(folder, model=model, optimizer=optimizers) as ckpt:
        assert ckpt.load()
    assert_same(everything(model, optimizers), expected)
    step(model, *optimizers)
    assert_same(everything(model, optimizers), after)


@pytest.mark.parametrize("saved_sharded", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_in_another_order_are_matched_by_the_model_s_names(
    saved_sharded: bool, sharded: bool, folder: Path
) -> None:
    def run(comm: Communicator, sharded: bool, order: int) -> dict[str, Any]:
        """Saves with parameters in their order, or loads with them in the other; the state by their names."""
        model = ddp.DataParallel(net(), comm)
        named = {id(p): name for name, p in model.module.named_parameters()}
        first, last = ([*model.module[number].parameters()][::order] for number in (0, 2))
        groups = [{"params": first, "lr": 0.5}, {"params": last}][::order]
        optimizer: Any = ZeroOptimizer(model, SGD, groups, momentum=0.9) if sharded else SGD(groups, momentum=0.9)
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm) as ckpt:
            if order == 1:
                step(model, optimizer)
                ckpt.save()
            else:
                assert ckpt.load()
        state = optimizer.state_dict()["state"]
        numbers = itertools.count()
        return {
            named[id(p)]: (group["lr"], state[next(numbers)]["momentum_buffer"].tolist())
            for group in optimizer.param_groups
            for p in group["params"]
        }

    expected = collectives.run_threads(lambda comm: run(comm, saved_sharded, 1), size=2)
    assert collectives.run_threads(lambda comm: run(comm, sharded, -1), size=2) == expected


# -- what does not fit


def zeroed(**options: Any) -> Any:
    """A network of which one parameter is not as at the beginning of others."""
    model: Any = net(**options)
    with ddp.no_grad():
        model[0].weight.zero_()
    return model


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda m: {"model": m, "optimizer": Adam(m.parameters())}, "has the state of SGD, the optimizer is Adam"),
        (
            lambda m: {
                "model": m,
                "optimizer": SGD([*m[0].parameters(), m[2].weight, ddp.ones(3, requires_grad=True)]),
            },
            r"parameter 3 is no parameter of the model \(3,\), in the checkpoint 2\.bias \(3,\)",
        ),
        (
            lambda m: {"model": m, "optimizer": SGD([{"params": m[0].parameters()}, {"params": m[2].parameters()}])},
            r"groups of \[2, 2\] parameters, the checkpoint of \[4\]",
        ),
        (lambda m: {"optimizer": SGD(m.parameters())}, "has the state of 1 model, 0 given"),
        (
            lambda m: {"model": m, "optimizer": (o := SGD(m.parameters())), "scheduler": lr_scheduler.StepLR(o, 2)},
            "has the state of 0 schedulers, 1 given",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(parts: Any, message: str, folder: Path) -> None:
    model = net()
    saved(folder, model=model, optimizer=SGD(model.parameters(), lr=0.5))
    other = zeroed()
    given = parts(other)
    optimizers = [given["optimizer"]] if "optimizer" in given else []
    before = everything(other, optimizers)
    with Checkpointer(folder, **given) as ckpt:
        with pytest.raises(StateDictError, match=message):
            ckpt.load()
        assert ckpt.step == 0
    assert_same(everything(other, optimizers), before)


def test_a_model_that_does_not_fit_on_one_rank_changes_none(folder: Path) -> None:
    saved(folder, model=net())

    def rank(comm: Communicator) -> None:
        other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3 + comm.rank))
        before = everything(other, [])
        with Checkpointer(folder, model=other, comm=comm) as ckpt:
            with pytest.raises((CheckpointError, StateDictError), match=r"2\.weight is \(3, 8\) in .*, \(4, 8\) in"):
                ckpt.load()
            assert_same(everything(other, []), before)

    collectives.run_threads(rank, size=2)


def test_not_strict_takes_what_fits(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    saved(folder, model=model, optimizer=SGD(model.parameters(), lr=0.5))
    other = zeroed(norm=True)
    optimizer = Adam(other.parameters(), lr=0.25)
    with Checkpointer(folder, model=other, optimizer=optimizer) as ckpt:
        assert ckpt.load(strict=False)
    same(other[0].weight, model[0].weight)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert "the checkpoint has the state of SGD, the optimizer is Adam; the optimizer stays as it is" in caplog.text


def test_the_model_alone(folder: Path) -> None:
    model = net()
    saved(folder, model=model, optimizer=SGD(model.parameters()))
    other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 5))
    result = load_model(folder, other, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["3.weight", "3.bias"], [])
    same(other[0].weight, model[0].weight)
    with pytest.raises(StateDictError, match=r"missing: 3\.weight, 3\.bias"):
        load_model(folder / "step-0000000000", other)
    saved(folder / "bare", model=model)
    with Checkpointer(folder / "other", model=other) as ckpt:
        before = everything(other, [])
        with pytest.raises(StateDictError, match=r"step-0000000000: .*missing: 3\.weight, 3\.bias"):
            ckpt.load(folder / "bare")
        assert_same(everything(other, []), before)
    with pytest.raises(StateDictError, match=r"0\.weight.*\(8, 6\).*\(4, 6\)|0\.weight.*\(4, 6\).*\(8, 6\)"):
        load_model(folder, nn.Sequential(nn.Linear(6, 4)), strict=False)
    (folder / "nothing").mkdir()
    saved(folder / "empty", user={})
    for name, message in (
        ("nowhere", r"reading .*nowhere: No such file"),
        ("nothing", "nothing: there is no checkpoint in it, nor is it one"),
        ("empty", "was given no model"),
    ):
        with pytest.raises((CheckpointError, StateDictError), match=message):
            load_model(folder / name, other)


@pytest.mark.parametrize("asked", ["step-0000000005", ""])
def test_one_that_is_damaged_changes_nothing(asked: str, folder: Path) -> None:
    """Its model could be read, and what is damaged comes last."""
    with Checkpointer(folder / "first", model=net(), user={"table": np.zeros(1 << 23, np.float32)}) as ckpt:
        ckpt.step = 5
        ckpt.save()
    shard = folder / "first" / "step-0000000005" / "rank-0000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    message = "step-0000000005: rank-0000.safetensors: rank-0000.random.random.1, bytes"

    def run(comm: Communicator) -> None:
        model = zeroed()
        before = everything(model, [])
        with Checkpointer(folder / "second", model=model, user={"table": 0}, comm=comm) as ckpt:
            with pytest.raises(CheckpointError, match=message):
                ckpt.load(folder / "first" / asked)
            assert_same(everything(model, []), before)
            assert ckpt.step == 0

    collectives.run_threads(run, size=2)


def test_what_no_checkpointer_has_written_is_named(folder: Path) -> None:
    store = Store(folder, collectives.init("single"))
    store.write(1, {}, {"model": None}, None)
    store.close()
    message = "step-0000000001 was not written by a Checkpointer"
    with Checkpointer(folder) as ckpt, pytest.raises(CheckpointError, match=message):
        ckpt.load()
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, net())


# -- misuse


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 3}, DtypeError, "model is a Module or a DataParallel, not int"),
        ({"optimizer": [3]}, DtypeError, "optimizer is an Optimizer, or a list of them, not int"),
        ({"scheduler": 3}, DtypeError, "scheduler has state_dict and load_state_dict, int has not"),
        ({"user": 3}, DtypeError, "user has state_dict"),
        ({"every": 0}, ArgumentError, "every is a number of steps"),
        ({"memory_every": True}, ArgumentError, "memory_every is a number of steps of at least 1, .auto. or None"),
        ({"memory_every": 0}, ArgumentError, "memory_every is a number of steps of at least 1"),
        ({"memory_every": "often"}, ArgumentError, "memory_every is a number of steps of at least 1"),
        ({"every_seconds": -1}, ArgumentError, "every_seconds is above 0"),
        ({"keep": 0}, ArgumentError, "keep should be at least 1"),
    ],
)
def test_arguments(options: Any, error: type[Exception], message: str, folder: Path) -> None:
    with pytest.raises(error, match=message):
        Checkpointer(folder, **options)


def test_loops_that_cannot_go_on_are_refused(folder: Path) -> None:
    class Still(Loader):
        epoch = property(lambda self: 0, lambda self, value: None)  # type: ignore[assignment]

    with Checkpointer(folder) as ckpt:
        with pytest.raises(DtypeError, match="list lacks state_dict, load_state_dict, epoch"):
            ckpt.resume([1, 2])
        with pytest.raises(ArgumentError, match="epochs is a number of passes"):
            ckpt.resume(Loader(ckpt._comm), epochs=-1)
        with pytest.raises(ArgumentError, match=r"Still\.epoch is 0 after a pass, as before"):
            list(ckpt.resume(Still(ckpt._comm), epochs=2))
        with pytest.raises(ArgumentError, match="the position of one loader"):
            next(ckpt.resume(Loader(ckpt._comm)))
        ckpt.save()
    message = "holds checkpoints of an earlier run, and resume=False"
    with Checkpointer(folder, resume=False) as ckpt, pytest.raises(CheckpointError, match=message):
        next(ckpt.resume(Loader(ckpt._comm), epochs=1))


def test_state_that_cannot_be_held_is_named(folder: Path) -> None:
    message = r"user\.best is of type object"
    with Checkpointer(folder, user={"best": object()}) as ckpt, pytest.raises(ArgumentError, match=message):
        ckpt.save()
    endless = {}
    endless["self"] = endless
    with Checkpointer(folder, user=endless) as ckpt, pytest.raises(ArgumentError, match="contains itself"):
        ckpt.save()
    ckpt.close()
    for call in (ckpt.save, ckpt.load, ckpt.stop, lambda: ckpt.stop_requested):
        with pytest.raises(CheckpointError, match="was closed"):
            call()


def test_what_one_rank_cannot_save_or_load_none_does(folder: Path) -> None:
    def main(comm: Communicator) -> list[str]:
        best = Best()
        user = {"best": object() if comm.rank else best}
        said = []
        with Checkpointer(folder, model=net(), user=user, comm=comm) as ckpt:

            def attempt(call: Any) -> None:
                try:
                    call()
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")

            attempt(ckpt.save)
            user["best"] = best
            attempt(ckpt.save)
            if comm.rank:
                best.load_state_dict = lambda state: 1 // 0  # type: ignore[method-assign,assignment]
            attempt(ckpt.load)
        return said

    first, second = collectives.run_threads(main, size=2)
    assert [each.partition(":")[0] for each in second] == ["ArgumentError", "ZeroDivisionError"]
    saving, loading = first
    assert saving.startswith("CheckpointError: the state cannot be saved: rank 1: ArgumentError: user.best")
    assert "cannot be loaded: rank 1: ZeroDivisionError" in loading
    assert open_checkpoint(folder / "step-0000000000").size == 2  # the second attempt
