"""Devices by PyTorch's names: which one is current, where an op runs, and what refuses to meet."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DeviceError
from tests.ddp.cuda import emulation
from tests.ddp.on_devices import results
from tests.ddp.test_ops import CASES


def test_questions(gpu: Any) -> None:
    assert ddp.cuda.is_available()
    assert ddp.cuda.is_initialized()
    assert ddp.cuda.device_count() == 2
    assert ddp.cuda.current_device() == 0
    assert ddp.cuda.get_device_name() == ddp.cuda.get_device_name("cuda:1") == "Stand-in GPU"
    assert ddp.cuda.get_device_capability(1) == (9, 0)
    assert ddp.cuda.get_device_properties(0).total_memory == gpu.cupy.capacity
    assert ddp.cuda.can_device_access_peer(0, "cuda:1")
    ddp.cuda.init()


def test_the_current_device(gpu: Any) -> None:
    ddp.cuda.set_device(1)
    assert ddp.cuda.current_device() == 1
    assert ddp.ones(2, device="cuda").device == ddp.device("cuda:1")
    assert ddp.ones(2).cuda().device == ddp.device("cuda:1")
    ddp.cuda.set_device(-1)  # as in PyTorch: nothing
    assert ddp.cuda.current_device() == 1
    ddp.cuda.set_device("cuda:0")
    assert ddp.cuda.current_device() == 0


def test_scopes_restore_what_was_there(gpu: Any) -> None:
    x = ddp.ones(2, device="cuda:1")
    for scope in (ddp.cuda.device(1), ddp.cuda.device("cuda:1"), ddp.cuda.device(x.device), ddp.cuda.device_of(x)):
        with contextlib.suppress(ZeroDivisionError), scope:
            assert ddp.cuda.current_device() == 1
            raise ZeroDivisionError
        assert ddp.cuda.current_device() == 0
    with ddp.cuda.device(None), ddp.cuda.device_of(ddp.ones(2)):
        assert ddp.cuda.current_device() == 0


def test_the_default_device(gpu: Any) -> None:
    assert ddp.get_default_device() == ddp.device("cpu")
    ddp.set_default_device("cuda:1")
    try:
        assert ddp.get_default_device() == ddp.rand(2).device == ddp.as_tensor([1.0]).device == ddp.device("cuda:1")
        with ddp.device("cuda:0"):
            assert ddp.zeros(1).get_device() == 0
        assert ddp.from_numpy(np.ones(1)).is_cpu
        assert ddp.Tensor(2).is_cpu
        assert ddp.Tensor([1.0]).is_cpu
        assert isinstance(ddp.LongTensor(2), ddp.LongTensor)
        assert isinstance(ddp.FloatTensor([1.0]), ddp.FloatTensor)
        assert isinstance(ddp.cuda.LongTensor([1]), ddp.cuda.LongTensor)
    finally:
        ddp.set_default_device(None)
    assert ddp.zeros(1).is_cpu


def test_typed_tensors_are_on_their_device(gpu: Any) -> None:
    for device, given in (("cuda:1", 2), (None, ddp.ones(2, dtype=ddp.int64, device="cuda:1"))):
        assert ddp.cuda.LongTensor(given, device=device).device == ddp.device("cuda:1")
        with pytest.raises(DeviceError, match="LongTensor: expected a tensor on cpu, got one on cuda:1"):
            ddp.LongTensor(given, device=device)


@pytest.mark.parametrize("where", [2, "cuda:7", 5])
def test_a_device_that_is_not_there(gpu: Any, where: Any) -> None:
    uses: tuple[Any, ...] = (
        ddp.cuda.set_device,
        ddp.ones(1).to,
        ddp.ones(1, device="cuda").to,
        ddp.nn.Linear(2, 2).cuda,
    )
    for use in uses:
        with pytest.raises(DeviceError, match="there are 2 CUDA devices, cuda:0 to cuda:1"):
            use(where)


MIXED = [
    ("mul", lambda a, b: a * b),
    ("cat", lambda a, b: ddp.cat([a, b])),
    ("where", lambda a, b: ddp.where(a > 0, a, b)),
    ("linear", lambda a, b: ddp.nn.functional.linear(a, b)),
    ("add_", lambda a, b: a.detach().clone().add_(b.detach())),
    ("backward", lambda a, b: (a * 2).backward(b)),
]


@pytest.mark.parametrize("pair", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")], ids="-".join)
@pytest.mark.parametrize(("name", "call"), MIXED, ids=[name for name, _ in MIXED])
def test_tensors_of_two_devices_do_not_meet(gpu: Any, name: str, call: Any, pair: tuple[str, str]) -> None:
    a, b = (ddp.ones(2, 2, device=where, requires_grad=True) for where in pair)
    with pytest.raises(DeviceError) as raised:
        call(a, b.detach() if name == "backward" else b)
    assert all(where in str(raised.value) for where in pair)


# Computes on the GPU without an op.
WITHOUT_AN_OP = {
    "nanmean": lambda x: x.nanmean(),
    "tensor": ddp.tensor,
    "tensor of another dtype": lambda x: ddp.tensor(x, dtype=ddp.int64),
    "asarray": lambda x: ddp.asarray(x, copy=True),
    "from_dlpack": lambda x: ddp.from_dlpack(x, copy=True),
    "backward": lambda x: x.clone().requires_grad_().backward(x.double()),
}


@pytest.mark.parametrize("call", WITHOUT_AN_OP.values(), ids=WITHOUT_AN_OP)
def test_a_call_computes_on_the_device_of_its_tensor(gpu: Any, call: Any) -> None:
    y = call(ddp.ones(2, 2, device="cuda:1"))
    assert y is None or y.device == ddp.device("cuda:1")


@pytest.mark.timeout(400)  # where no kernel is compiled yet
def test_every_op_computes_on_the_device_of_its_tensors(gpu: Any) -> None:
    emulation.prepare_kernels("float32", "int64", "bool")
    for case in CASES:
        print(case.op, case.label)
        results(case, ddp.float32, "cuda:1")


NUMBERS = [lambda x, s: s - x, lambda x, s: s / x, lambda x, s: ddp.where(x > 1, x, s), ddp.maximum]


@pytest.mark.parametrize("call", NUMBERS)
def test_a_number_on_the_cpu_is_a_number(gpu: Any, call: Any) -> None:
    def results(device: str) -> list[Any]:
        x = ddp.tensor([[1.0, 2.0]], device=device, requires_grad=True)
        s = ddp.tensor(1.5, requires_grad=True)
        y = call(x, s)
        assert y.device == x.device
        y.sum().backward()
        assert x.grad is not None
        assert s.grad is not None
        assert s.grad.is_cpu
        return [y.tolist(), x.grad.tolist(), s.grad.tolist()]

    assert results("cuda:0") == results("cuda:1") == results("cpu")


def test_a_forked_child_is_told_that_cuda_is_none_of_its(gpu: Any) -> None:
    x = ddp.ones(2, device="cuda")
    pid = os.fork()
    if pid == 0:
        told = 0
        for call in (lambda: x + 1, lambda: ddp.ones(2, device="cuda:1")):
            try:
                call()
            except DeviceError as error:
                told += "was forked from one that had met CUDA" in str(error)
        os._exit(told + 4 * ddp.cuda.is_available())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert (x + 1).tolist() == [2.0, 2.0]


def test_where_random_numbers_are(gpu: Any) -> None:
    before = ddp.cuda.get_rng_state_all()
    assert [(each.device.type, each.dtype) for each in before] == [("cpu", ddp.uint8)] * 2
    drawn = [ddp.rand(3, device=device).tolist() for device in ("cuda:0", "cuda:1")]
    ddp.cuda.set_rng_state_all(before)
    assert [ddp.rand(3, device=device).tolist() for device in ("cuda:0", "cuda:1")] == drawn
    ddp.cuda.manual_seed(3)
    assert ddp.cuda.initial_seed() == 3
    with pytest.raises(ArgumentError, match=r"expected a state of .* bytes, got 3"):
        ddp.Generator("cuda").set_state(ddp.zeros(3, dtype=ddp.uint8))
