"""Into and out of other libraries: what shares memory, what copies, and which dtype it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp._tensor.dtypes import SUPPORTED
from ddp.errors import ArgumentError, GraphError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

NUMPY = sorted(SUPPORTED - {ddp.bfloat16}, key=str)


class TestData:
    @pytest.mark.parametrize(
        ("data", "dtype"),
        [
            (1.5, ddp.float32),
            ([1.0, 2.0], ddp.float32),
            ([1, 2.5], ddp.float32),
            (3, ddp.int64),
            ([1, 2], ddp.int64),
            (range(3), ddp.int64),
            (True, ddp.bool),
            ([], ddp.float32),
            (np.zeros(2), ddp.float64),
            (np.float64(1), ddp.float64),
            ([np.float32(1), 2.0], ddp.float32),
            ([np.int32(1)], ddp.int32),
            (np.zeros(2, np.int32), ddp.int32),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Creating a tensor from a list:UserWarning")
    def test_dtype(self, data: Any, dtype: Any) -> None:
        x = ddp.tensor(data)
        expected = torch.tensor(data)
        assert f"torch.{x.dtype.name}" == str(expected.dtype)
        assert x.dtype == ddp.as_tensor(data).dtype == ddp.asarray(data).dtype == dtype
        assert x.shape == tuple(expected.shape)
        assert x.tolist() == expected.tolist()

    def test_dtype_of_lists_of_tensors(self) -> None:
        for t in (ddp, torch):
            a, b, c = (t.tensor(1.0, dtype=dtype) for dtype in (t.float64, t.float16, t.bfloat16))
            results = [
                str(t.tensor(data).dtype).removeprefix("torch.") for data in ([a], [1, b], [c, 1.0], [c], [[b], [c]])
            ]
            assert results == ["float64", "float16", "float32", "bfloat16", "float32"]
        assert ddp.tensor([ddp.ones(2), ddp.zeros(2)]).tolist() == [[1.0, 1.0], [0.0, 0.0]]
        assert ddp.tensor([ddp.ones(1, requires_grad=True) * 2]).tolist() == [[2.0]]

    @pytest.mark.parametrize("dtype", sorted(SUPPORTED, key=str), ids=str)
    def test_given_dtype(self, dtype: Any) -> None:
        for data in (3, 2.5, [1, 2], [1.5, 0.0], np.array([1.5, 300.0]), [True]):
            if isinstance(data, np.ndarray) and dtype in (ddp.int8, ddp.uint8):
                continue  # what does not fit wraps around, or not, as the processor does it
            expected = torch.tensor(data, dtype=getattr(torch, dtype.name))
            for x in (ddp.tensor(data, dtype=dtype), ddp.as_tensor(data, dtype), ddp.asarray(data, dtype=dtype)):
                assert x.dtype == dtype
                assert x.tolist() == expected.tolist()

    def test_requires_grad(self) -> None:
        assert ddp.tensor([1.0], requires_grad=True).requires_grad
        x = ddp.ones(2, requires_grad=True)
        assert not ddp.tensor(x).requires_grad
        assert ddp.as_tensor(x) is x
        assert not ddp.asarray(x).requires_grad
        assert ddp.scalar_tensor(3).dtype == ddp.float32
        assert ddp.scalar_tensor(3, dtype=ddp.int64).item() == 3

    def test_refusals(self) -> None:
        for data in ([300], 300, [float("nan")], float("nan"), [1.0, 1e9]):
            with pytest.raises(ArgumentError, match="does not fit uint8"):
                ddp.tensor(data, dtype=ddp.uint8)


class TestNumPy:
    @pytest.mark.parametrize("dtype", NUMPY, ids=str)
    def test_both_sides_see_writes(self, dtype: Any) -> None:
        a = np.zeros((4, 6), dtype)
        for array in (a, a.T, a[::2, 1::2], a[::-1, ::-1], a[1, 1, ...], a[:0]):
            self.check_writes(array)

    def check_writes(self, array: Any) -> None:
        for x in (ddp.from_numpy(array), ddp.as_tensor(array), ddp.asarray(array), ddp.asarray(array, copy=False)):
            back = x.numpy()
            seen = np.asarray(x)
            assert back.shape == seen.shape == array.shape
            array[...] = 1
            assert back.tolist() == seen.tolist() == x.tolist() == array.tolist()
            x.zero_()
            assert back.tolist() == seen.tolist() == array.tolist()
            assert not array.any()
            assert x.stride() == tuple(step // array.itemsize for step in array.strides)
            assert np.shares_memory(back, array) == np.shares_memory(seen, array) == bool(array.size)

    def test_copies(self) -> None:
        array = np.zeros(3, np.float32)
        x = ddp.from_numpy(array)
        for y in (
            ddp.tensor(array),
            ddp.tensor(x),
            ddp.asarray(array, copy=True),
            ddp.asarray(x, copy=True),
            x.clone(),
        ):
            assert not np.shares_memory(y.numpy(), array)
        assert not np.shares_memory(ddp.as_tensor(array, ddp.float64).numpy(), array)

    def test_array_protocol(self) -> None:
        x = ddp.ones(2)
        assert np.asarray(x, np.float64).dtype == np.float64
        assert not np.shares_memory(np.array(x), x.numpy())
        assert not np.shares_memory(x.__array__(copy=True), x.numpy())
        assert x.__array__() is not None
        assert np.shares_memory(x.__array__(copy=False), x.numpy())
        assert np.asarray(ddp.ones(2).bfloat16()).dtype == ddp.bfloat16
        assert np.stack([x, x]).shape == (2, 2)

    def test_interfaces(self) -> None:
        x = ddp.ones(2)
        assert x.__array_interface__["data"][0] == x.data_ptr()
        assert not hasattr(x, "__cuda_array_interface__")
        for y in (ddp.ones(2, requires_grad=True), x.bfloat16()):
            assert not hasattr(y, "__array_interface__")
        x._device = ddp.device("cuda:1")  # as if: no GPU is needed to be refused
        assert not hasattr(x, "__array_interface__")

    def test_refusals(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        for get in (lambda: x.numpy(), lambda: np.asarray(x), lambda: (x * 2).numpy()):
            with pytest.raises(GraphError, match="detach"):
                get()
        assert (x * 2).numpy(force=True).tolist() == [2.0, 2.0]

    def test_buffers(self) -> None:
        memory = bytearray(np.arange(4, dtype=np.int16).tobytes())
        x = ddp.frombuffer(memory, dtype=ddp.int16)
        assert x.tolist() == [0, 1, 2, 3]
        x[0] = 9
        assert memory[0] == 9
        assert ddp.frombuffer(memory, dtype=ddp.int16, count=2, offset=2).tolist() == [1, 2]
        with pytest.raises(ArgumentError, match="multiple"):
            ddp.frombuffer(memory, dtype=ddp.int16, offset=1)


class TestDLPack:
    @pytest.mark.parametrize("dtype", NUMPY, ids=str)
    def test_with_pytorch(self, dtype: Any) -> None:
        theirs = torch.zeros(2, 3, dtype=getattr(torch, dtype.name))
        ours = ddp.from_dlpack(theirs[:, 1:])
        theirs[0] = 1
        assert ours.tolist() == theirs[:, 1:].tolist()
        ours.fill_(1)
        assert theirs[:, 1:].all()
        x = ddp.zeros(3, 2, dtype=dtype)
        back = torch.from_dlpack(x[1:])
        assert back.data_ptr() == x[1:].data_ptr()
        back[:] = 1
        assert x[1:].tolist() == back.tolist()
        assert ddp.as_tensor(theirs).data_ptr() == theirs.data_ptr()

    @pytest.mark.parametrize("versions", [{}, {"max_version": (1, 0)}], ids=["old", "versioned"])
    def test_bfloat16(self, versions: Any) -> None:
        """NumPy knows no bfloat16 here; the bits go as integers, and the capsule says what they are."""
        theirs = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
        ours = ddp.from_dlpack(theirs.t()[1:])
        assert ours.dtype == ddp.bfloat16
        assert ours.tolist() == [[1.0, 4.0], [2.0, 5.0]]
        theirs[:] = 1.5
        ours[0, 0] = -2
        assert theirs.tolist() == [[1.5, -2.0, 1.5], [1.5, 1.5, 1.5]]
        x = ddp.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=ddp.bfloat16).T
        back = torch.utils.dlpack.from_dlpack(x.__dlpack__(**versions))
        assert back.dtype == torch.bfloat16
        assert back.tolist() == [[1.0, 3.0], [2.0, 4.0]]
        back[0, 0] = 0.5
        del back
        assert x[0, 0].item() == 0.5
        again = ddp.from_dlpack(x)
        assert again.data_ptr() == x.data_ptr()
        assert ddp.from_dlpack(x.numpy()).dtype == ddp.bfloat16
        for shared in (ddp.as_tensor(theirs), ddp.asarray(theirs)):
            assert (shared.dtype, shared.data_ptr()) == (ddp.bfloat16, theirs.data_ptr())
        assert ddp.tensor(theirs, dtype=ddp.float32).tolist() == theirs.tolist()
        assert ddp.from_dlpack(ddp.zeros(0, 3, dtype=ddp.bfloat16)).shape == (0, 3)


class TestMemory:
    def test_addresses_and_steps(self) -> None:
        for view in (
            lambda x: x,
            lambda x: x[1],
            lambda x: x[1:, ::2],
            lambda x: x.t(),
            lambda x: x[1, 2],
            lambda x: x[2:],
        ):
            x, y = view(ddp.zeros(2, 3)), view(torch.zeros(2, 3))
            assert x.stride() == y.stride() or not x.numel()
            assert x.storage_offset() == y.storage_offset() or not x.numel()
            assert x.element_size() == y.element_size() == 4
            assert x.nbytes == y.nbytes
            assert x.is_contiguous() == y.is_contiguous()
            assert x.contiguous().is_contiguous()
        x = ddp.zeros(2, 3)
        assert x.stride(1) == 1
        assert x[1].data_ptr() == x.data_ptr() + 12
        assert ddp.zeros(0).data_ptr() == 0
        assert x.contiguous() is x


def test_copy_of_a_tensor_of_pytorch() -> None:
    x = ddp.zeros(2, 3)
    x.copy_(torch.arange(3.0, dtype=torch.bfloat16))
    x.add_(torch.ones(2, 1))
    assert x.tolist() == [[1.0, 2.0, 3.0]] * 2
