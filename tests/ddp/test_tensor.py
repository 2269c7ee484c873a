"""Tensor: creation, dtypes, operators, views, what it says of itself and how it refuses."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._tensor.dtypes import parse, promote
from ddp.errors import ArgumentError, DeviceError, DtypeError, GraphError, RangeError, ShapeError


class TestCreation:
    @pytest.mark.parametrize(
        ("data", "dtype"),
        [
            (1.5, ddp.float32),
            ([1.0, 2.0], ddp.float32),
            ([1, 2.5], ddp.float32),
            (3, ddp.int64),
            ([1, 2], ddp.int64),
            (True, ddp.bool),
            ([], ddp.float32),
            (np.zeros(2), ddp.float64),
            (np.float64(1), ddp.float64),
            (np.zeros(2, np.float16), ddp.float16),
            (np.zeros(2, np.int32), ddp.int32),
        ],
    )
    def test_dtype_of_data(self, data: Any, dtype: Any) -> None:
        assert ddp.tensor(data).dtype == dtype
        assert ddp.as_tensor(data).dtype == dtype

    def test_tensor_copies_the_others_share(self) -> None:
        array = np.zeros(2, np.float32)
        copied, shared, also = ddp.tensor(array), ddp.as_tensor(array), ddp.from_numpy(array)
        array[0] = 1
        assert (copied[0].item(), shared[0].item(), also[0].item()) == (0.0, 1.0, 1.0)
        also[1] = 5
        assert array[1] == 5
        assert also.numpy() is array
        assert ddp.as_tensor(shared) is shared
        assert not np.shares_memory(ddp.tensor(shared).numpy(), array)

    def test_sizes_in_both_forms(self) -> None:
        for make in (ddp.zeros, ddp.ones, ddp.empty, ddp.rand, ddp.randn):
            assert make(2, 3).shape == make((2, 3)).shape == make([2, 3]).shape == (2, 3)
            assert make(()).shape == make().shape == ()
            assert make(2).dtype == ddp.float32
            assert make(2, dtype=ddp.float64).dtype == ddp.float64
            assert make(2, requires_grad=True).requires_grad

    def test_filled(self) -> None:
        assert ddp.full((2,), 3).dtype == ddp.int64
        assert ddp.full((2,), 3.0).dtype == ddp.float32
        assert ddp.full((2,), True).dtype == ddp.bool
        assert ddp.full(2, 7.0).tolist() == [7.0, 7.0]
        assert ddp.eye(2, 3).tolist() == [[1, 0, 0], [0, 1, 0]]

    def test_arange(self) -> None:
        assert ddp.arange(3).tolist() == [0, 1, 2]
        assert ddp.arange(3).dtype == ddp.int64
        assert ddp.arange(1, 2, 0.25).tolist() == [1.0, 1.25, 1.5, 1.75]
        assert ddp.arange(1, 2, 0.25).dtype == ddp.float32
        with pytest.raises(ArgumentError, match="step"):
            ddp.arange(1, 2, 0)

    def test_random(self) -> None:
        ddp.manual_seed(0)
        assert 0 <= ddp.rand(100).amin().item() <= ddp.rand(100).amax().item() < 1
        assert sorted(ddp.randperm(5).tolist()) == [0, 1, 2, 3, 4]
        drawn = ddp.randint(2, 5, (100,))
        assert drawn.dtype == ddp.int64
        assert set(drawn.tolist()) == {2, 3, 4}
        assert ddp.randn(3, dtype=ddp.float16).dtype == ddp.float16
        with pytest.raises(ArgumentError, match="no integer"):
            ddp.randint(3, 3, (1,))
        with pytest.raises(DtypeError, match="int64"):
            ddp.rand(2, dtype=ddp.int64)

    def test_like(self) -> None:
        x = ddp.ones(2, 3, dtype=ddp.float64)
        for make in (ddp.zeros_like, ddp.ones_like, ddp.empty_like, ddp.rand_like, ddp.randn_like):
            assert make(x).shape == (2, 3)
            assert make(x).dtype == ddp.float64
            assert make(x, dtype=ddp.float32).dtype == ddp.float32
            assert "_like" in make.__name__
        assert ddp.full_like(x, 4).tolist() == [[4.0] * 3] * 2

    def test_refusals(self) -> None:
        with pytest.raises(ShapeError, match="ragged"):
            ddp.tensor([[1, 2], [3]])
        with pytest.raises(DtypeError, match="complex128"):
            ddp.tensor([1j])
        with pytest.raises(DtypeError, match="expected one of"):
            ddp.tensor(["text"])
        with pytest.raises(DtypeError, match="only floating"):
            ddp.tensor([1], requires_grad=True)
        with pytest.raises(DtypeError, match="NumPy array"):
            ddp.from_numpy([1.0])  # type: ignore[arg-type]
        with pytest.raises(DtypeError, match="float31"):
            ddp.zeros(2, dtype="float31")
        with pytest.raises(DtypeError, match="None"):
            parse(None)


ALL = [ddp.bool, ddp.uint8, ddp.int8, ddp.int16, ddp.int32, ddp.int64, ddp.float16, ddp.float32, ddp.float64]


class TestPromotion:
    def test_table_against_pytorch(self) -> None:
        torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
        for (a, b), i, j in itertools.product(itertools.product(ALL, ALL), (0, 1), (0, 1)):
            x = torch.zeros((1,) * i, dtype=getattr(torch, a.name))
            y = torch.zeros((1,) * j, dtype=getattr(torch, b.name))
            assert f"torch.{promote(a, i, b, j).name}" == str(torch.result_type(x, y)), (a, i, b, j)

    @pytest.mark.parametrize("number", [True, 2, 2.5])
    @pytest.mark.parametrize("dtype", ALL, ids=str)
    def test_numbers_against_pytorch(self, dtype: Any, number: float) -> None:
        torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
        ours, theirs = ddp.ones(2, dtype=dtype), torch.ones(2, dtype=getattr(torch, dtype.name))
        for name in ("__add__", "__radd__", "__mul__", "__truediv__", "__rtruediv__", "__lt__"):
            y, expected = getattr(ours, name)(number), getattr(theirs, name)(number)
            assert f"torch.{y.dtype.name}" == str(expected.dtype), name
            assert y.tolist() == pytest.approx(expected.tolist(), rel=1e-3), name

    def test_integers_divide_to_float32(self) -> None:
        y = ddp.tensor([1, 2]) / ddp.tensor([2, 4])
        assert y.dtype == ddp.float32
        assert y.tolist() == [0.5, 0.5]

    def test_functions_of_integers(self) -> None:
        assert ddp.tensor([1, 4]).sqrt().dtype == ddp.float32
        assert ddp.softmax(ddp.tensor([1, 1]), 0).tolist() == [0.5, 0.5]
        assert ddp.tensor([True, True]).sum().dtype == ddp.int64
        assert ddp.tensor([1, 2], dtype=ddp.int32).sum().dtype == ddp.int64
        with pytest.raises(DtypeError, match="mean: expected a floating"):
            ddp.tensor([1, 2]).mean()

    def test_numpy_operands(self) -> None:
        x = ddp.ones(2)
        assert (x * np.float64(2)).dtype == ddp.float32
        for y in (x + np.ones(2, np.float32), np.ones(2, np.float32) + x):
            assert isinstance(y, ddp.Tensor)
            assert y.tolist() == [2.0, 2.0]

    def test_numpy_matrices(self) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        x = ddp.ones(3, requires_grad=True)
        y = array @ x
        assert isinstance(y, ddp.Tensor)
        assert y.tolist() == [3.0, 12.0]
        array[:] = 0  # backward has a copy
        y.sum().backward()
        assert x.grad.tolist() == [3.0, 5.0, 7.0]
        assert (x @ np.ones((3, 2), np.float32)).requires_grad
        assert x.matmul(np.ones(3, np.float32)).item() == 3.0

    @pytest.mark.parametrize("dim", [None, (), []])
    def test_no_dimension_means_all(self, dim: Any) -> None:
        x = ddp.ones(2, 3)
        assert x.sum(dim).item() == x.sum(dim=dim, keepdim=True).item() == 6.0
        assert x.mean(dim).shape == x.amax(dim).shape == ()
        assert x.sum(dim, keepdim=True).shape == (1, 1)

    def test_gradients_come_back_in_their_own_dtype(self) -> None:
        a, b = ddp.ones(2, requires_grad=True), ddp.ones(2, dtype=ddp.float64, requires_grad=True)
        (a * b).sum().backward()
        assert a.grad.dtype == ddp.float32
        assert b.grad.dtype == ddp.float64


class TestValues:
    def test_metadata(self) -> None:
        x = ddp.zeros(2, 3)
        assert (x.shape, x.size(), x.size(1), x.ndim, x.dim(), x.numel(), len(x)) == ((2, 3), (2, 3), 3, 2, 2, 6, 2)
        assert x.device is ddp.device("cpu")
        assert x.is_leaf
        assert x.is_floating_point()
        assert x.is_contiguous()
        assert not x.T.is_contiguous()
        assert x.T.contiguous().is_contiguous()
        assert x.contiguous() is x

    def test_conversions(self) -> None:
        x = ddp.tensor([1.7, -2.2])
        assert x.int().dtype == ddp.int32
        assert x.long().tolist() == [1, -2]
        assert x.half().dtype == ddp.float16
        assert x.double().dtype == ddp.float64
        assert x.bool().tolist() == [True, True]
        assert x.float() is x
        assert x.to(ddp.float64).dtype == x.to("float64").dtype == x.to(dtype=float).dtype == ddp.float64
        assert x.to("cpu") is x
        assert x.to(ddp.zeros(1, dtype=ddp.float64)).dtype == ddp.float64
        assert (float(x[0]), int(x[1]), bool(x[0])) == (pytest.approx(1.7), -2, True)
        assert [10, 20, 30][ddp.tensor(1)] == 20
        assert f"{x[0]:.1f}" == "1.7"

    def test_item_and_truth_need_one_element(self) -> None:
        with pytest.raises(ShapeError, match=r"\(2,\) has 2 elements"):
            ddp.zeros(2).item()
        with pytest.raises(ArgumentError, match="all"):
            bool(ddp.zeros(2))

    def test_integers_are_outside_the_graph(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        for y in (x.long(), x.bool(), x.argmax(), x > 0):
            assert not y.requires_grad
        with pytest.raises(TypeError, match="integer"):
            [1, 2][ddp.tensor(1.0)]

    def test_numpy_of_a_tracked_tensor(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        with pytest.raises(GraphError, match="detach"):
            x.numpy()
        with pytest.raises(GraphError, match="detach"):
            np.asarray(x)
        assert x.detach().numpy() is x._array
        assert np.asarray(ddp.ones(2)).tolist() == [1.0, 1.0]

    def test_comparisons(self) -> None:
        x = ddp.tensor([1, 2, 3])
        assert (x == 2).tolist() == x.eq(2).tolist() == [False, True, False]
        assert (x != ddp.tensor([1, 0, 3])).tolist() == [False, True, False]
        assert ((x > 1) & (x <= 2)).tolist() == [False, True, False]
        assert (~(x >= 2) | (x < 0)).tolist() == [True, False, False]
        assert (x == 2).any()
        assert not (x == 2).all()
        assert (x == "text") is False
        assert len({x, x}) == 1

    def test_arguments_of_extremes(self) -> None:
        x = ddp.tensor([[1.0, 5.0, 5.0], [7.0, 0.0, 2.0]])
        assert x.argmax().item() == 3
        assert x.argmax(1).tolist() == [1, 0]
        assert x.argmin(0, keepdim=True).tolist() == [[0, 1, 1]]
        values, indices = x.max(1)
        assert (values.tolist(), indices.tolist()) == ([5.0, 7.0], [1, 0])
        assert x.min(0).values.tolist() == [1.0, 0.0, 2.0]
        assert x.max().item() == 7.0

    def test_iteration(self) -> None:
        assert [row.tolist() for row in ddp.tensor([[1, 2], [3, 4]])] == [[1, 2], [3, 4]]
        with pytest.raises(DtypeError, match="0-d"):
            iter(ddp.tensor(1))
        with pytest.raises(DtypeError, match="0-d"):
            len(ddp.tensor(1))


class TestViews:
    def test_share_memory_and_version(self) -> None:
        x = ddp.zeros(2, 3)
        for view in (x[0], x[0, 1], x.T, x.reshape(3, 2), x.unsqueeze(0), x.view(6), x.detach(), x.expand(2, 2, 3)):
            assert np.shares_memory(view._array, x._array)
            assert view._version is x._version
        for copied in (x.clone(), x[[0, 1]], x.T.reshape(6), x + 0):
            assert not np.shares_memory(copied._array, x._array)
            assert copied._version is not x._version

    def test_an_element_is_a_view(self) -> None:
        x = ddp.zeros(3)
        x[1].fill_(4)
        assert x.tolist() == [0.0, 4.0, 0.0]

    def test_view_refuses_to_copy(self) -> None:
        with pytest.raises(ShapeError, match="reshape"):
            ddp.zeros(2, 3).T.view(6)


class TestInPlace:
    def test_values(self) -> None:
        x = ddp.ones(3)
        assert x.add_(2).sub_(1).mul_(4).div_(2) is x
        assert x.tolist() == [4.0] * 3
        assert x.add_(ddp.ones(3), alpha=-2).tolist() == [2.0] * 3
        assert x.copy_(ddp.tensor([1, 2, 3])).tolist() == [1.0, 2.0, 3.0]
        assert x.zero_().tolist() == [0.0] * 3
        before = x
        x += 1
        x *= 6
        x -= ddp.tensor(2.0)
        x /= 2
        assert x is before
        assert x.tolist() == [2.0] * 3
        assert x.dtype == ddp.float32

    def test_every_write_counts(self) -> None:
        x = ddp.ones(2)
        x.add_(1)
        x[0] = 3
        x.fill_(1)
        x.normal_()
        x.uniform_()
        x.copy_(x * 2)
        assert x._version.count == 6

    def test_random_fills(self) -> None:
        ddp.manual_seed(1)
        x = ddp.empty(5000)
        assert x.normal_(3.0, 0.5).mean().item() == pytest.approx(3.0, abs=0.05)
        assert -2 <= x.uniform_(-2, -1).amin().item() <= x.amax().item() < -1

    def test_assignment(self) -> None:
        x = ddp.zeros(2, 3)
        x[0] = 1
        x[1, 1:] = ddp.tensor([5.0, 6.0])
        x[x == 1] = 2
        x[:, [0]] = [[7.0], [8.0]]
        assert x.tolist() == [[7.0, 2.0, 2.0], [8.0, 5.0, 6.0]]

    def test_refusals(self) -> None:
        x = ddp.zeros(2, 3)
        with pytest.raises(ShapeError, match=r"add_: shapes \(2, 3\) and \(2,\)"):
            x.add_(ddp.zeros(2))
        with pytest.raises(ShapeError, match=r"\(4, 2, 3\) does not broadcast to \(2, 3\)"):
            x.copy_(ddp.zeros(4, 2, 3))
        with pytest.raises(DtypeError, match="int64"):
            ddp.tensor([1]).add_(0.5)
        with pytest.raises(RangeError, match="index 5"):
            x[5] = 1
        with pytest.raises(ShapeError, match="broadcast"):
            x[0] = ddp.zeros(2)
        with pytest.raises(DtypeError, match="str"):
            x.mul_("text")


class TestMessages:
    @pytest.mark.parametrize(
        ("wrong", "kind", "message"),
        [
            (
                lambda: ddp.zeros(2, 3) @ ddp.zeros(4, 5),
                ShapeError,
                r"^matmul: \(2, 3\) @ \(4, 5\): inner dimensions 3 and 4 differ$",
            ),
            (lambda: ddp.zeros(2) @ ddp.zeros(()), ShapeError, "at least one dimension"),
            (lambda: ddp.zeros(2, 1, 2) @ ddp.zeros(3, 2, 1), ShapeError, "2 and 3 differ in dimension -1"),
            (lambda: ddp.zeros(2) @ ddp.zeros(2, dtype=ddp.float64), DtypeError, "float32 and float64"),
            (
                lambda: ddp.zeros(2, 3) + ddp.zeros(2),
                ShapeError,
                r"^add: shapes \(2, 3\) and \(2,\) do not broadcast: 3 a",
            ),
            (
                lambda: ddp.zeros(2, 3).reshape(4, -1),
                ShapeError,
                r"of 6 elements cannot become \(4, -1\)",
            ),
            (lambda: ddp.zeros(2, 3).reshape(7), ShapeError, "cannot become"),
            (lambda: ddp.zeros(2, 3).sum(2), RangeError, r"^sum: dimension 2 of shape \(2, 3\): expected -2 to 1$"),
            (lambda: ddp.zeros(2, 3).sum((0, -2)), ArgumentError, "twice"),
            (lambda: ddp.zeros(0).amax(), ArgumentError, "no element"),
            (lambda: ddp.zeros(0, 2).argmax(), ArgumentError, "no element"),
            (lambda: ddp.zeros(2, 3)[2], RangeError, r"shape \(2, 3\): index 2 is out of bounds"),
            (lambda: ddp.zeros(2, 3).expand(3, 3), ShapeError, "cannot be expanded"),
            (lambda: ddp.zeros(2, 3).permute(0, 0), ArgumentError, "once"),
            (lambda: ddp.zeros(2, 3).flatten(1, 0), ArgumentError, "start_dim 1"),
            (lambda: ddp.zeros(2, 3).unsqueeze(3), RangeError, "expected -3 to 2"),
            (lambda: ddp.zeros(1, 2, 3).t(), ShapeError, "at most 2"),
            (lambda: ddp.cat([]), ArgumentError, "at least one"),
            (lambda: ddp.cat([ddp.zeros(2, 3), ddp.zeros(2, 2)]), ShapeError, "differ elsewhere"),
            (lambda: ddp.stack([ddp.zeros(2), ddp.zeros(3)]), ShapeError, r"\(2,\) and \(3,\) differ"),
            (lambda: ddp.stack([ddp.zeros(2)], 2), RangeError, "expected -2 to 1"),
            (lambda: ddp.where(ddp.zeros(2), 1.0, 2.0), DtypeError, "bool"),
            (lambda: ddp.zeros(2).maximum("text"), DtypeError, "str"),
            (lambda: ddp.zeros(2).clamp(), ArgumentError, "min, max"),
            (lambda: ddp.zeros(2) + "text", TypeError, "unsupported operand"),
            (lambda: -ddp.tensor([True]), DtypeError, "^neg: "),
            (lambda: ddp.tensor([True]).neg(), DtypeError, "^neg: "),
            (lambda: ddp.tensor([True]) - ddp.tensor([True]), DtypeError, "^sub: "),
            (lambda: ddp.tensor([True]) - True, DtypeError, "^sub: "),
            (lambda: ddp.tensor([2]) ** -1, ArgumentError, "^pow: .* negative"),
            (lambda: ddp.tensor([2]) ** ddp.tensor([-1]), ArgumentError, "^pow: .* negative"),
            (lambda: ddp.tensor([1], dtype=ddp.uint8) + 300, ArgumentError, "^add: .* 300 out of bounds"),
            (lambda: ddp.tensor([1]) * 2**70, ArgumentError, "^mul: "),
            (lambda: ~ddp.zeros(2), DtypeError, "^invert: "),
            (lambda: ddp.zeros(2) & ddp.zeros(2), DtypeError, "^bitwise_and: "),
            (lambda: ddp.tensor([1], dtype=ddp.uint8).add_(300), ArgumentError, "^add_: .* 300 out of bounds"),
            (lambda: ddp.tensor([1], dtype=ddp.uint8).fill_(300), ArgumentError, "^fill_: .* 300 out of bounds"),
            (lambda: ddp.tensor([1], dtype=ddp.uint8).copy_(300), ArgumentError, "^copy_: .* 300 out of bounds"),
            (lambda: ddp.tensor([1], dtype=ddp.uint8).__setitem__(0, 300), ArgumentError, "300 out of bounds"),
            (lambda: np.zeros((2, 3), np.float32) @ ddp.zeros(2), ShapeError, r"^matmul: \(2, 3\) @ \(2,\)"),
            (lambda: ddp.zeros(2) @ "text", TypeError, "unsupported operand"),
            (lambda: ddp.zeros(2).matmul("text"), DtypeError, "^matmul: .* str"),
        ],
    )
    def test_wrong_use(self, wrong: Any, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            wrong()

    def test_other_devices_are_named(self) -> None:
        x, y = ddp.zeros(2), ddp.zeros(2)
        y._device = ddp.device("cuda:1")  # as if: no GPU is needed to be refused
        with pytest.raises(DeviceError, match="add: one tensor is on cpu, another on cuda:1"):
            x + y
        with pytest.raises(DeviceError, match="add_: one tensor is on cpu, another on cuda:1"):
            x.add_(y)
        with pytest.raises(DeviceError, match=r"cpu\(\)"):
            y.numpy()

    def test_gradients_must_fit(self) -> None:
        x = ddp.zeros(2, requires_grad=True)
        with pytest.raises(ShapeError, match=r"\(2,\) was given one of \(3,\)"):
            x.grad = ddp.zeros(3)
        with pytest.raises(DtypeError, match="float64"):
            x.grad = ddp.zeros(2, dtype=ddp.float64)
        with pytest.raises(DtypeError, match="ndarray"):
            x.grad = np.zeros(2, np.float32)  # type: ignore[assignment]


class TestGrad:
    def test_life_of_a_gradient(self) -> None:
        x, g = ddp.zeros(2, requires_grad=True), ddp.ones(2)
        assert x.grad is None
        x.grad = g
        assert x.grad is x.grad
        assert not np.shares_memory(x.grad._array, g._array)
        x.grad.mul_(3)
        assert x._leaf.slot.buffer.tolist() == [3.0, 3.0]
        x.grad = None
        assert x.grad is None

    def test_requires_grad_off_and_on_keeps_the_leaf(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        end = x._leaf
        x.requires_grad = False
        assert not (x * 2).requires_grad
        x.requires_grad_()
        assert x._leaf is end
        with pytest.raises(GraphError, match="detach"):
            (x * 2).requires_grad_(False)


class TestRepr:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: ddp.tensor([1.0, 2.5]), "tensor([1. , 2.5])"),
            (lambda: ddp.tensor([[1, 2], [3, 4]]), "tensor([[1, 2],\n        [3, 4]])"),
            (lambda: ddp.tensor(3.0, dtype=ddp.float64), "tensor(3., dtype=ddp.float64)"),
            (lambda: ddp.tensor([True]), "tensor([ True])"),
            (lambda: ddp.zeros(0, 3), "tensor([], size=(0, 3))"),
            (lambda: ddp.ones(1, requires_grad=True), "tensor([1.], requires_grad=True)"),
            (lambda: ddp.ones(1, requires_grad=True) * 2, "tensor([2.], grad_fn=<mul>)"),
            (lambda: ddp.nn.Parameter(ddp.ones(1)), "Parameter containing:\ntensor([1.], requires_grad=True)"),
        ],
    )
    def test_repr(self, make: Any, text: str) -> None:
        assert repr(make()) == text


class TestCopies:
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_leaves(self, duplicate: Any) -> None:
        for x in (ddp.ones(2), ddp.ones(2, requires_grad=True), ddp.nn.Parameter(ddp.ones(2))):
            y = duplicate(x)
            assert type(y) is type(x)
            assert y.requires_grad == x.requires_grad
            assert y.tolist() == x.tolist()
            assert not np.shares_memory(y._array, x._array)

    def test_results_of_ops(self) -> None:
        with pytest.raises(GraphError, match="detach"):
            copy.deepcopy(ddp.ones(2, requires_grad=True) * 2)
