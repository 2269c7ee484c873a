"""What is done wrong is answered, in words that say what, on which rank and at which step; what can go on does."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import collectives
import ddp
from collectives import CollectiveTimeout, Communicator, CommunicatorClosed
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, GraphError, GraphFreedError, ParallelError
from ddp.parallel import DataParallel


def make_net(seed: int = 0) -> nn.Module:
    ddp.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def rows(rank: int, n: int = 2) -> ddp.Tensor:
    return ddp.from_numpy(np.random.default_rng(rank).normal(size=(n, 3)))


def loss_of(model: nn.Module, rank: int, n: int = 2) -> ddp.Tensor:
    return model(rows(rank, n)).square().sum()


def gradients(net: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy().copy() for name, p in net.named_parameters() if p.grad is not None}


def on_ranks(fn: Callable[[Communicator], Any], size: int = 2, timeout: float = 20) -> list[Any]:
    return collectives.run_threads(fn, size, timeout=timeout)


def expected_mean(size: int = 2) -> dict[str, np.ndarray]:
    net = make_net()
    for rank in range(size):
        loss_of(net, rank).backward()
    return {name: g / size for name, g in gradients(net).items()}


def assert_trains(model: DataParallel, comm: Communicator) -> None:
    """What went wrong is over: a step gives the mean."""
    model.zero_grad()
    loss_of(model, comm.rank).backward()
    for name, g in expected_mean(comm.size).items():
        assert_allclose(gradients(model.module)[name], g, atol=1e-13)


def impatient(comm: Communicator, seconds: float = 0.3) -> Communicator:
    comm.timeout = seconds
    return comm


def test_backward_on_some_ranks_only_names_the_late_ones_the_message_and_the_step() -> None:
    said: dict[int, str] = {}
    again: dict[int, str] = {}

    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), impatient(comm.duplicate()))
        loss_of(model, comm.rank).backward()
        if comm.rank != 1:
            with pytest.raises(CollectiveTimeout) as caught:
                loss_of(model, comm.rank).backward()
            said[comm.rank] = str(caught.value)
            with pytest.raises(ParallelError, match="earlier backward failed half-way") as later:
                loss_of(model, comm.rank).backward()
            again[comm.rank] = str(later.value)
        comm.barrier()

    on_ranks(rank, 3)
    for rank_ in (0, 2):
        assert "backward 1" in said[rank_]
        assert "the control message" in said[rank_]
        assert "Rank 1 has not arrived" in said[rank_]
        assert "start again from a checkpoint" in again[rank_]


def test_a_rank_that_stops_in_the_midst_of_backward_is_named_with_the_bucket() -> None:
    said: dict[int, str] = {}

    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), impatient(comm.duplicate()), bucket_cap_mb=1e-5)
        loss_of(model, comm.rank).backward()
        if comm.rank == 1:

            def fails(g: ddp.Tensor) -> None:
                raise ZeroDivisionError("in a hook")

            model.module[0].weight.register_hook(fails)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, comm.rank).backward()
            with pytest.raises(ParallelError, match="ZeroDivisionError: in a hook"):
                loss_of(model, comm.rank).backward()
        else:
            with pytest.raises(CollectiveTimeout) as caught:
                loss_of(model, comm.rank).backward()
            said[0] = str(caught.value)
        comm.barrier()

    on_ranks(rank)
    assert "backward 1" in said[0]
    assert "of 4 (0.weight)" in said[0] or "of 4 (0.bias)" in said[0]
    assert "Rank 1 has not arrived" in said[0]


def test_one_rank_goes_on_after_a_backward_that_failed_as_it_would_without_the_wrapper() -> None:
    model = DataParallel(make_net())

    def fails(g: ddp.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.module[0].weight.register_hook(fails)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model.backward(loss_of(model, 0), weight=3)
    handle.remove()
    model.zero_grad()
    model.backward(loss_of(model, 0), weight=2)
    net = make_net()
    loss_of(net, 0).backward()
    for name, g in gradients(net).items():
        assert_allclose(gradients(model.module)[name], g / 2, atol=1e-13)


SCRIPT = """
import sys
import collectives, ddp
from ddp import nn

comm = collectives.init(timeout=2.0)
model = ddp.DataParallel(nn.Linear(3, 2), comm)
for step in range(3):
    loss = model(ddp.ones(1, 3)).sum()
    if step < 2 or comm.rank == 0:
        loss.backward()
if comm.rank == 1:
    comm.barrier()
"""


@pytest.mark.mpi
def test_backward_on_one_process_only_ends_with_an_error_that_names_the_other(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_job([*mpiexec, "-n", "2", sys.executable, str(tmp_path / "script.py")], timeout=40)
    assert done.returncode != 0
    assert "backward 2: the control message, before any bucket: " in done.stderr
    assert "rank 1" in done.stderr


def test_forward_fails_on_one_rank_and_the_others_hear_who_is_missing() -> None:
    said: dict[int, str] = {}

    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), impatient(comm.duplicate()))
        if comm.rank == 1:
            with pytest.raises(ddp.errors.ShapeError):
                model(ddp.ones(2, 5, dtype=ddp.float64))
        else:
            with pytest.raises(CollectiveTimeout) as caught:
                loss_of(model, 0).backward()
            said[0] = str(caught.value)
        comm.barrier()

    on_ranks(rank)
    assert "backward 0" in said[0]
    assert "Rank 1 has not arrived" in said[0]


class Parts(nn.Module):
    """A module of every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3))
        self.some = nn.ModuleList([nn.Linear(3, 3)])
        self.named = nn.ModuleDict({"one": nn.Linear(3, 3)})
        self.scales = nn.ParameterList([nn.Parameter(ddp.ones(3))])
        self.shifts = nn.ParameterDict({"one": nn.Parameter(ddp.ones(3))})

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.body(x)


ADDITIONS: dict[str, Callable[[Parts], Any]] = {
    "extra.weight and 1 more": lambda net: setattr(net, "extra", nn.Linear(3, 3)),
    "body.0.weight": lambda net: setattr(net.body[0], "weight", nn.Parameter(ddp.ones(3, 3))),
    "body.1.weight": lambda net: net.body.append(nn.Linear(3, 3)),
    "some.1.weight": lambda net: net.some.append(nn.Linear(3, 3)),
    "some.0.weight": lambda net: net.some.insert(0, nn.Linear(3, 3)),
    "some.2.bias": lambda net: net.some.extend([nn.ReLU(), nn.Linear(3, 3)]),
    "named.two.weight": lambda net: net.named.update({"two": nn.Linear(3, 3)}),
    "scales.1": lambda net: net.scales.append(nn.Parameter(ddp.ones(3))),
    "shifts.two": lambda net: net.shifts.update({"two": nn.Parameter(ddp.ones(3))}),
    "body.0.more": lambda net: net.body[0].register_parameter("more", nn.Parameter(ddp.ones(3))),
    "late": lambda net: net.register_parameter("late", nn.Parameter(ddp.ones(3))),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_parameters_that_come_after_wrapping_are_named(name: str) -> None:
    model = DataParallel(Parts())
    model(ddp.ones(1, 3))
    ADDITIONS[name](model.module)
    with pytest.raises(ParallelError, match="came into the module after it was wrapped") as caught:
        model(ddp.ones(1, 3))
    assert name.split(".bias")[0] in str(caught.value)
    assert "close()" in str(caught.value)
    model.close()
    DataParallel(model.module)(ddp.ones(1, 3)).sum().backward()


def test_a_part_that_is_taken_out_or_put_elsewhere_is_no_addition() -> None:
    model = DataParallel(Parts())
    del model.module.some
    model.module.again = model.module.body[0]
    model.module.elsewhere = nn.Sequential(model.module.body, nn.ReLU())
    nn.Linear(3, 3)  # somebody else's
    model(ddp.ones(1, 3)).sum().backward()
    assert model.module.body[0].weight.grad is not None


def test_a_second_backward_without_retain_graph_raises_and_the_model_goes_on() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        loss = loss_of(model, comm.rank)
        loss.backward()
        with pytest.raises(GraphFreedError, match="retain_graph=True"):
            loss.backward()
        assert_trains(model, comm)
        loss = loss_of(model, comm.rank)
        model.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        for name, g in expected_mean().items():
            assert_allclose(gradients(model.module)[name], 2 * g, atol=1e-13)

    on_ranks(rank)


def test_a_failed_second_backward_takes_no_weight_along() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        with model.no_sync():
            loss = loss_of(model, comm.rank)
            model.backward(loss, weight=2)
            with pytest.raises(GraphFreedError):
                model.backward(loss, weight=2)
            with pytest.raises(ParallelError, match="with and without a weight"):
                loss_of(model, comm.rank).backward()
        model.backward(loss_of(model, comm.rank), weight=2)
        for name, g in expected_mean().items():
            assert_allclose(gradients(model.module)[name], 4 * g / 8, atol=1e-13)

    on_ranks(rank)


def test_an_empty_batch_with_a_weight_takes_part_also_after_plain_backwards() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        loss_of(model, comm.rank).backward()
        for _ in range(2):
            model.zero_grad()
            if comm.rank == 0:
                model.backward(loss_of(model, 0), weight=2)
            else:
                model.backward(ddp.zeros(()), weight=0)
        net = make_net()
        loss_of(net, 0).backward()
        for name, g in gradients(net).items():
            assert_allclose(gradients(model.module)[name], g / 2, atol=1e-13)

    on_ranks(rank)


def test_zeros_that_zero_grad_left_are_neither_a_mean_nor_weigh_anything() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        loss_of(model, comm.rank).backward()
        model.zero_grad(set_to_none=False)
        with model.no_sync():
            model.backward(loss_of(model, comm.rank), weight=7)
        model.zero_grad(set_to_none=False)
        model.backward(loss_of(model, comm.rank), weight=1)
        for name, g in expected_mean().items():
            assert_allclose(gradients(model.module)[name], g, atol=1e-13)

    on_ranks(rank)


def test_a_backward_inside_a_backward_of_the_same_model_is_refused() -> None:
    model = DataParallel(make_net())

    def again(g: ddp.Tensor) -> None:
        loss_of(model, 0).backward()

    handle = model.module[0].weight.register_hook(again)
    with pytest.raises(ParallelError, match="started while another one runs"):
        loss_of(model, 0).backward()
    handle.remove()


@pytest.mark.parametrize("make", [nn.ReLU, lambda: nn.Linear(2, 2).requires_grad_(False), nn.Sequential])
def test_a_model_without_trained_parameters_is_refused(make: Callable[[], nn.Module]) -> None:
    net = make()
    with pytest.raises(ParallelError, match="no parameter of this module requires grad: there is nothing to reduce"):
        DataParallel(net)
    for p in net.parameters():
        p.requires_grad_(True)
    if list(net.parameters()):
        DataParallel(net).close()  # the refusal left nothing behind


@pytest.mark.parametrize("where", ["bucket", "unplaced"])
def test_check_finite_names_rank_and_parameter_and_the_model_goes_on(where: str) -> None:
    said: list[str] = []

    def rank(comm: Communicator) -> None:
        net = make_net()
        if where == "unplaced":
            net[2].weight.requires_grad_(False)
        model = DataParallel(net, comm, check_finite=True)
        net[2].weight.requires_grad_(True)
        handle = net[2].weight.register_hook(lambda g: g * float("nan") if comm.rank == 1 else None)
        for _ in range(2):
            model.zero_grad()
            with pytest.raises(ParallelError, match="infinity or NaN") as caught:
                loss_of(model, comm.rank).backward()
            said.append(str(caught.value))
        handle.remove()
        assert_trains(model, comm)

    on_ranks(rank)
    expected = "step 0: infinity or NaN in the gradient of 2.weight on rank 1, before it was reduced"
    assert said == [expected] * 4


def test_what_a_failed_backward_found_is_not_told_of_the_next() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm, check_finite=True)
        handle = model.module[2].weight.register_hook(lambda g: g * float("nan"))
        loss = loss_of(model, comm.rank)
        with pytest.raises(ParallelError, match="1 of 2 ranks gave a weight"):
            model.backward(loss, weight=1) if comm.rank == 0 else loss.backward()
        handle.remove()
        assert_trains(model, comm)

    on_ranks(rank)


def test_without_the_check_nan_is_a_value_on_every_rank() -> None:
    def rank(comm: Communicator) -> Any:
        model = DataParallel(make_net(), comm)
        model.module[0].bias.register_hook(lambda g: g * float("nan") if comm.rank == 1 else None)
        loss_of(model, comm.rank).backward()
        return gradients(model.module)

    for found in on_ranks(rank):
        assert np.isnan(found["0.bias"]).all()
        assert np.isfinite(found["0.weight"]).all()


def test_infinities_of_both_signs_are_summed_without_a_warning_from_another_thread() -> None:
    def rank(comm: Communicator) -> Any:
        model = DataParallel(make_net(), comm)
        model.module[0].bias.register_hook(lambda g: g * 0 + (float("inf") if comm.rank == 1 else -float("inf")))
        loss_of(model, comm.rank).backward()
        return gradients(model.module)

    for found in on_ranks(rank):
        assert np.isnan(found["0.bias"]).all()


@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.half, lambda net: net.to(ddp.bfloat16)])
def test_converting_after_wrapping_changes_nothing_and_says_what_to_do(convert: Callable[[nn.Module], Any]) -> None:
    model = DataParallel(make_net())
    for target in (model, model.module):
        with pytest.raises(GraphError, match="convert before wrapping"):
            convert(target)
    assert {p.dtype for p in model.parameters()} == {ddp.float64}
    loss_of(model, 0).backward()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bucket_cap_mb": 0}, ArgumentError, 'buckets hold more than 0 MiB, or "auto" for the cap; got 0 and 1.0'),
    ({"bucket_cap_mb": "25"}, ArgumentError, "got '25' and 1.0"),
    ({"bucket_cap_mb": None}, ArgumentError, "got None and 1.0"),
    ({"bucket_cap_mb": True}, ArgumentError, "got True"),
    ({"bucket_cap_mb": float("nan")}, ArgumentError, "got nan"),
    ({"bucket_cap_mb": float("inf")}, ArgumentError, "got inf"),
    ({"first_bucket_mb": -1.0}, ArgumentError, "got 'auto' and -1.0"),
    ({"first_bucket_mb": "auto"}, ArgumentError, "got 'auto' and 'auto'"),
    ({"broadcast_buffers": "max"}, ArgumentError, "broadcast_buffers is True, False or \"mean\", got 'max'"),
    ({"broadcast_buffers": None}, ArgumentError, "got None"),
    ({"check_every": -1}, ArgumentError, "check_every is a whole number of at least 0, got -1"),
    ({"check_every": 1.5}, ArgumentError, "got 1.5"),
    ({"check_every": True}, ArgumentError, "got True"),
    ({"plan": {"buckets": []}}, ParallelError, "expected what `model.plan` or `model.plan.state"),
    ({"plan": 3}, ParallelError, "expected what `model.plan` or `model.plan.state"),
    ({"comm": [0]}, DtypeError, "comm is the ranks' communicator, or None for collectives.init(), got [0]"),
    ({"comm_hook": 3}, ArgumentError, "comm_hook should be a function"),
    ({"bucket_size": 3}, TypeError, "unexpected keyword argument 'bucket_size'"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG)
def test_wrong_arguments_are_named_and_leave_the_module_as_it_was(
    wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    net = make_net()
    with pytest.raises(kind) as caught:
        DataParallel(net, **wrong)
    assert message in str(caught.value)
    DataParallel(net)


def test_what_is_wrapped_is_a_module() -> None:
    for wrong in (lambda x: x, nn.Linear, None, [nn.Linear(2, 2)]):
        with pytest.raises(DtypeError, match="expected a Module to wrap"):
            DataParallel(wrong)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"bucket_cap_mb": 2.0}, "bucket_cap_mb is 'auto' on rank 0, but 2.0 on rank 1"),
        ({"check_every": 7}, "check_every is 100 on rank 0, but 7 on rank 1"),
        ({"check_finite": True}, "check_finite is False on rank 0, but True on rank 1"),
        ({"broadcast_buffers": False}, "broadcast_buffers is True on rank 0, but False on rank 1"),
        ({"comm_hook": print}, "comm_hook is False on rank 0, but True on rank 1"),
    ],
)
def test_settings_that_differ_between_ranks_are_told_to_all(differs: dict[str, Any], message: str) -> None:
    def rank(comm: Communicator) -> str:
        net = make_net()
        with pytest.raises(ParallelError) as caught:
            DataParallel(net, comm, **(differs if comm.rank == 1 else {}))
        DataParallel(net, comm)
        return str(caught.value)

    for said in on_ranks(rank, 3):
        assert message in said


def test_arguments_of_pytorch_that_change_nothing_give_one_warning_at_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataParallel(make_net(), device_ids=[0], output_device=0, find_unused_parameters=True, static_graph=True)
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__
    for name in ("device_ids", "output_device", "find_unused_parameters", "static_graph"):
        assert name in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataParallel(make_net(), device_ids=None, find_unused_parameters=False, static_graph=False)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_is_a_number_of_samples(weight: float) -> None:
    model = DataParallel(make_net())
    with pytest.raises(ParallelError, match="weight should be a number of samples"):
        model.backward(loss_of(model, 0), weight=weight)


def test_backward_of_some_inputs_only_is_refused_and_autograd_grad_stays_on_this_rank() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        with pytest.raises(GraphError, match="under DataParallel"):
            loss_of(model, comm.rank).backward(inputs=[model.module[0].weight])
        (own,) = ddp.autograd.grad(loss_of(model, comm.rank), [model.module[0].weight])
        assert gradients(model.module) == {}
        net = make_net()
        loss_of(net, comm.rank).backward()
        assert_allclose(own.numpy(), gradients(net)["0.weight"], atol=1e-13)
        assert_trains(model, comm)

    on_ranks(rank)


def fail_after(act: Callable[[], Any]) -> None:
    act()
    raise ZeroDivisionError


def test_exceptions_inside_no_sync_and_join_restore_what_was() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        with pytest.raises(ZeroDivisionError), model.no_sync():
            fail_after(loss_of(model, comm.rank).backward)
        assert_trains(model, comm)
        with pytest.raises(ZeroDivisionError), model.join():
            fail_after(loss_of(model, comm.rank).backward)
        assert_trains(model, comm)
        with pytest.raises(ParallelError, match="join inside join"), model.join(), model.join():
            pass
        assert_trains(model, comm)

    on_ranks(rank)


def test_two_models_of_one_backward_may_be_reached_in_another_order_on_each_rank() -> None:
    def rank(comm: Communicator) -> Any:
        first, second = DataParallel(make_net(1), comm), DataParallel(make_net(2), comm)
        for _ in range(6):
            first.zero_grad()
            second.zero_grad()
            one, other = loss_of(first, comm.rank), loss_of(second, comm.rank)
            (one + other if comm.rank == 0 else other + one).backward()
        return gradients(first.module), gradients(second.module)

    mine, theirs = on_ranks(rank, timeout=5)
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert_array_equal(a[name], b[name])


def test_a_copy_of_the_wrapped_module_is_bare() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        loss_of(model, comm.rank).backward()
        twin = copy.deepcopy(model.module)
        if comm.rank == 0:
            loss_of(twin, 0).backward()  # nobody waits
        twin.float()
        assert_trains(model, comm)

    on_ranks(rank)


def test_a_closed_model_is_done_and_its_module_bare() -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)
        loss_of(model, comm.rank).backward()
        before = gradients(model.module)
        kept = {name: p.grad for name, p in model.module.named_parameters()}
        model.close()
        model.close()
        for name, g in before.items():
            assert_array_equal(gradients(model.module)[name], g)
        if comm.rank == 0:
            model.module.zero_grad()
            loss_of(model.module, 0).backward()
        for name, g in before.items():
            assert_array_equal(kept[name].numpy(), g)  # the memory of the buckets is nobody's now
        model.zero_grad()
        with pytest.raises(CommunicatorClosed):
            model.backward(ddp.zeros(()), weight=0)
        model.module.float()

    on_ranks(rank)
