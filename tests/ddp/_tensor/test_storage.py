"""`data`, copies and pickles: what shares memory, and what of a tensor goes along."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import DtypeError, GraphError, ShapeError, VersionError


class Watcher:
    def begin(self, leaves: Any) -> None: ...

    def ready(self, leaf: Any) -> None: ...

    def end(self) -> None: ...

    def abandon(self, error: BaseException) -> None: ...


class TestData:
    def test_shares_memory_but_not_the_version(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        assert not x.data.requires_grad
        assert type(ddp.nn.Parameter(ddp.ones(1)).data) is ddp.Tensor
        y = (x * x).sum()
        x.data.mul_(2)  # backward does not notice
        assert x.tolist() == [2.0, 2.0]
        y.backward()
        assert x.grad.tolist() == [4.0, 4.0]
        z = (x * x).sum()
        with ddp.no_grad():
            x.mul_(2)  # this it does
        with pytest.raises(VersionError):
            z.backward()

    def test_assigned_memory_is_shared(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        y = ddp.zeros(2)
        end = x.leaf
        x.data = y
        assert np.shares_memory(x.detach().numpy(), y.numpy())
        y.fill_(3)
        assert x.tolist() == [3.0, 3.0]
        assert x.requires_grad
        assert x.leaf is end
        (x * x).sum().backward()
        assert x.grad.tolist() == [6.0, 6.0]

    def test_a_leaf_may_change(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        x.data = ddp.ones(3, dtype=ddp.float64)
        assert (x.shape, x.dtype) == ((3,), ddp.float64)
        x.sum().backward()
        assert x.grad.tolist() == [1.0] * 3
        x.data = ddp.ones(3)
        assert x.grad.dtype == ddp.float32  # it goes along
        z = ddp.ones(2)
        z.data = ddp.zeros(4, dtype=ddp.int64)
        assert z.tolist() == [0] * 4

    def test_refusals(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        x.sum().backward()
        with pytest.raises(ShapeError, match=r"\(2,\) on cpu .* has a grad, and cannot become float32 \(3,\)"):
            x.data = ddp.ones(3)
        with pytest.raises(DtypeError, match="int64"):
            x.data = ddp.ones(2, dtype=ddp.int64)
        with pytest.raises(ShapeError, match="result of an op"):
            (x * 2).data = ddp.ones(3)
        with pytest.raises(DtypeError, match="ndarray"):
            x.data = np.ones(2)
        x.leaf.ready_hook = Watcher()
        with pytest.raises(GraphError, match="wrapped"):
            x.data = ddp.ones(2, dtype=ddp.float64)


DUPLICATES = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]


class TestCopies:
    @pytest.mark.parametrize("duplicate", DUPLICATES)
    def test_leaves(self, duplicate: Any) -> None:
        for x in (
            ddp.ones(2),
            ddp.ones(2, requires_grad=True),
            ddp.ones(2, 3).T,
            ddp.tensor([1.5], dtype=ddp.bfloat16),
            ddp.nn.Parameter(ddp.ones(2)),
            ddp.nn.Parameter(ddp.ones(2), requires_grad=False),
        ):
            y = duplicate(x)
            assert type(y) is type(x)
            assert y.requires_grad == x.requires_grad
            assert y.dtype == x.dtype
            assert y.tolist() == x.tolist()
            assert not np.shares_memory(y.array, x.array)
            assert y.version is not x.version

    @pytest.mark.parametrize("duplicate", [copy.copy, *DUPLICATES])
    def test_results_of_ops(self, duplicate: Any) -> None:
        with pytest.raises(GraphError, match="detach"):
            duplicate(ddp.ones(2, requires_grad=True) * 2)

    def test_a_shallow_copy_shares(self) -> None:
        for x in (ddp.ones(2), ddp.nn.Parameter(ddp.ones(2))):
            y = copy.copy(x)
            assert type(y) is type(x)
            assert y is not x
            assert y.requires_grad == x.requires_grad
            assert np.shares_memory(y.array, x.array)
            assert y.version is x.version
            y.sum().backward() if y.requires_grad else None
            assert x.grad is None

    def test_deep_copies_take_the_gradient_along(self, torch: Any) -> None:
        for t in (ddp, torch):
            x = t.ones(2, requires_grad=True)
            (x * 3).sum().backward()
            y, z = copy.deepcopy([x, x])
            assert y is z
            assert y.grad.tolist() == [3.0, 3.0]
            y.grad.zero_()
            assert x.grad.tolist() == [3.0, 3.0]
            assert pickle.loads(pickle.dumps(x)).grad is None

    def test_attributes_that_users_set_live_as_long_as_in_pytorch(self, torch: Any) -> None:
        results = []
        for t in (ddp, torch):
            layer = t.nn.Linear(2, 2)
            x = t.ones(2)
            weight = layer.weight
            x.tag = {"a": [1]}
            weight.no_decay = True
            weight._optim = {"lr": 0.1}
            layer.double().load_state_dict(t.nn.Linear(2, 2).state_dict())
            twin = copy.deepcopy(layer)
            copies = [f(y) for f in (copy.copy, *DUPLICATES) for y in (x, weight)]
            copies += [x.clone(), x.detach(), x.data, t.nn.Parameter(x), twin.weight, layer.state_dict()["weight"]]
            results.append([vars(y) for y in (x, layer.weight, layer.bias, *copies)])
            assert copies[2].tag == x.tag
            assert copies[2].tag["a"] is not x.tag["a"]
            with pytest.raises(AttributeError):
                x.shape = 3
            del weight.no_decay
            assert not hasattr(weight, "no_decay")
        assert results[0] == results[1]
