"""share_memory_ moves what is there, and all that look at it follow."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp._block import Block
from ddp.errors import SharingError
from tests.ddp.multiprocessing.counting import all_descriptors, descriptors, mappings

TENSORS = {
    "matrix": lambda: ddp.arange(12.0).reshape(3, 4),
    "strided": lambda: ddp.arange(24).reshape(4, 6)[1::2, ::3],
    "backwards": lambda: ddp.from_numpy(np.arange(10.0)[::-2]),
    "empty": lambda: ddp.zeros(0, 3),
    "bfloat16": lambda: ddp.arange(6, dtype=ddp.bfloat16).reshape(2, 3),
    "expanded": lambda: ddp.arange(3.0).expand(2, 3),
    "result": lambda: ddp.ones(3) + 1,
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_stays_what_it_is(make: Any) -> None:
    x, same = make(), make()
    assert not x.is_shared()
    assert x.share_memory_() is x
    assert x.is_shared()
    assert (x.shape, x.dtype, x.stride()) == (same.shape, same.dtype, same.stride())
    assert ddp.equal(x, same)
    assert x.array.flags.writeable == same.array.flags.writeable
    array = x.array
    assert x.share_memory_().array is array, "once is enough"


def test_all_that_share_the_memory_follow() -> None:
    x = ddp.arange(12.0).reshape(3, 4)
    relatives = {"row": x[1], "detached": x.detach(), "data": x.data, "turned": x.t(), "part": x.t()[2:, 1:]}
    relatives["part"].share_memory_()
    assert x.is_shared()
    for name, each in relatives.items():
        assert each.is_shared(), name
        assert np.shares_memory(each.array, x.array), name
    relatives["row"].fill_(9)
    assert x.tolist() == [[0, 1, 2, 3], [9, 9, 9, 9], [8, 9, 10, 11]]
    assert relatives["turned"][:, 1].tolist() == [9] * 4
    assert relatives["row"].version is x.version, "autograd still knows that they are one"


def test_the_graph_holds_what_it_saved() -> None:
    w = ddp.tensor([2.0, 3.0], requires_grad=True)
    loss = (w * w).sum()
    w.share_memory_()
    loss.backward()
    assert w.is_leaf
    assert w.grad.tolist() == [4, 6]
    assert not w.grad.is_shared(), "gradients are private"
    before = w.grad
    w.share_memory_()
    assert w.grad is before


def test_a_module_moves_into_one_block() -> None:
    before = mappings()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kept = model.state_dict()
    assert model.share_memory() is model
    assert mappings() == before + 1
    assert model[2].weight is model[0].weight
    assert all(each.is_shared() for each in (*model.parameters(), *model.buffers()))
    assert all(ddp.equal(model.state_dict()[name], value) for name, value in state.items())
    kept["0.weight"].fill_(5)
    assert model[2].weight[0, 0].item() == 5
    del model, kept
    assert mappings() == before


def test_copies_and_plain_pickles_know_nothing_of_it() -> None:
    x = ddp.arange(1000.0).share_memory_().requires_grad_()
    held = descriptors()
    twin = copy.deepcopy(x)
    back = pickle.loads(pickle.dumps(x))
    for each in (twin, back):
        assert ddp.equal(each, x)
        assert each.requires_grad
        assert not each.is_shared()
    assert len(pickle.dumps(x)) > 4000
    assert descriptors() == held


def test_shared_memory_that_cannot_be_had_or_does_not_fit() -> None:
    before = all_descriptors()
    for nbytes in (1 << 61, 1 << 64, -1):
        with pytest.raises(SharingError, match=f"gives no shared memory of {nbytes} bytes"):
            Block.create(nbytes)
    for nbytes in (8, 1 << 64, -1):
        with pytest.raises(SharingError, match=f"shared memory of {nbytes} bytes cannot be mapped"):
            Block.adopt(os.open("/dev/null", os.O_RDONLY), "token", nbytes)
    assert not all_descriptors() - before
    block = Block.create(8)
    for dtype, shape, offset in (("int64", 2, 0), ("int8", 1, 8), ("int8", 1, -1), ("int32", 1, 2)):
        with pytest.raises(SharingError, match=r"fit|begin"):
            block.array(dtype, shape, offset)
    block.close()
    with pytest.raises(SharingError, match="is closed"):
        block.fileno()
