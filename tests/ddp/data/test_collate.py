"""From samples to a batch: the same structures as PyTorch's, errors that name sample and leaf, memory that is given."""

from __future__ import annotations

import collections
import types
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import ddp
from ddp.data import default_collate, default_convert
from ddp.errors import ArgumentError, DeviceError, DtypeError, ShapeError


class Point(NamedTuple):
    x: Any
    y: Any


def plain(value: Any) -> Any:
    """Tensors of either library as (dtype, shape, numbers), with the types of all that is around them."""
    if hasattr(value, "requires_grad"):
        return str(value.dtype).rpartition(".")[2], tuple(value.shape), value.tolist()
    if isinstance(value, collections.abc.Mapping):
        return type(value), {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [plain(each) for each in value]
    return value


def rows(*shape: int, dtype: Any = np.float32) -> list[np.ndarray[Any, Any]]:
    whole = np.arange(3 * int(np.prod(shape))).reshape(3, *shape).astype(dtype)
    return [row if shape else np.array(row) for row in whole]


BATCHES: dict[str, list[Any]] = {
    "arrays": rows(2, 4),
    "empty arrays": rows(0, 3),
    "0-d arrays": rows(),
    "strided arrays": [row.T for row in rows(2, 4)],
    "NumPy numbers": [np.float32(1), np.float32(2)],
    "float": [1.5, 2.0],
    "bool": [True, False],
    "str": ["a", "b"],
    "bytes": [b"a", b"b"],
    "pairs": [(row, i) for i, row in enumerate(rows(2))],
    "nothing in them": [(), ()],
    "dict": [{"x": row, "y": {"z": i, "name": str(i)}} for i, row in enumerate(rows(2))],
    "defaultdict": [collections.defaultdict(list, a=1), collections.defaultdict(list, a=2)],
    "read-only mapping": [types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 2})],
    "named tuple": [Point(row, i) for i, row in enumerate(rows(2))],
    "range": [range(3), range(3)],
}


def test_structures_are_pytorchs() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    for name, batch in BATCHES.items():
        assert plain(default_collate(batch)) == plain(torch_data.default_collate(batch)), name
        for sample in batch:
            assert plain(default_convert(sample)) == plain(torch_data.default_convert(sample)), name


@pytest.mark.parametrize(
    ("samples", "dtype", "expected"),
    [
        ([ddp.ones(2), ddp.zeros(2)], ddp.float32, [[1, 1], [0, 0]]),
        ([ddp.ones(2, dtype=ddp.bfloat16)] * 2, ddp.bfloat16, [[1, 1]] * 2),
        ([np.ones(2, np.float32), np.ones(2)], ddp.float64, [[1, 1]] * 2),
        ([np.ones(2, np.int64), np.ones(2, np.float32)], ddp.float32, [[1, 1]] * 2),
        ([np.ones(2, ml_dtypes.bfloat16), np.full(2, 3, np.int64)], ddp.bfloat16, [[1, 1], [3, 3]]),
    ],
    ids=["tensors", "halves", "float64 of float32", "float32 of int64", "bfloat16 of int64"],
)
def test_dtypes_are_promoted_as_tensors_are(samples: Any, dtype: Any, expected: Any) -> None:
    batch = default_collate(samples)
    assert (batch.dtype, batch.tolist()) == (dtype, expected)


def test_gradients_reach_the_samples() -> None:
    sample = ddp.ones(2, requires_grad=True)
    default_collate([sample, ddp.zeros(2)]).sum().backward()
    assert sample.grad.tolist() == [1, 1]


def test_arrays_are_copied_and_converted_ones_are_shared() -> None:
    array = np.zeros(2)
    batch = default_collate([array])
    converted = default_convert({"a": [array]})
    array[0] = 1
    assert batch.tolist() == [[0, 0]]
    assert converted["a"][0].tolist() == [1, 0]


def test_a_batch_is_written_to_the_memory_that_is_given() -> None:
    given = []

    def out(shape: tuple[int, ...], dtype: Any) -> Any:
        given.append(np.empty(shape, dtype))
        return given[-1]

    samples = [
        {"x": row, "n": i, "t": ddp.full((2,), float(i), requires_grad=True)} for i, row in enumerate(rows(2, 3))
    ]
    batch = default_collate(samples, out=out)
    assert plain(batch) == plain(default_collate(samples))
    for leaf, memory in zip(batch.values(), given, strict=True):
        assert not leaf.requires_grad
        assert np.shares_memory(leaf.numpy(), memory)


@pytest.mark.parametrize(
    ("batch", "error", "told"),
    [
        ([], ArgumentError, "at least one sample"),
        ([np.ones(3), np.ones(3), np.ones(4)], ShapeError, r"batch\[2\] has shape \(4,\), and batch\[0\] has \(3,\)"),
        (
            [{"a": [1, np.zeros((2, 2))]}, {"a": [1, np.zeros((2, 3))]}],
            ShapeError,
            r"batch\[1\]\['a'\]\[1\] has shape \(2, 3\), and batch\[0\]\['a'\]\[1\] has \(2, 2\).*collate_fn",
        ),
        ([ddp.ones(3), np.ones(3)], DtypeError, r"batch\[1\] is a ndarray, and batch\[0\] a Tensor"),
        ([(1, 2), (1,)], ShapeError, r"batch\[1\] has length 1, and batch\[0\] has 2"),
        ([{"a": 1}, {"b": 1}], ArgumentError, r"batch\[1\] has keys .'b'., and batch\[0\] has .'a'."),
        ([None], DtypeError, r"batch\[0\] is of <class 'NoneType'>; expected tensors.*collate_fn"),
        ([2**70], DtypeError, "of dtype object"),
        ([np.array("text")], DtypeError, r"batch\[0\] or others are of dtype <U4, which no tensor has"),
    ],
)
def test_what_is_no_batch_is_named(batch: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        default_collate(batch)


@pytest.mark.gpu
@pytest.mark.skipif(not ddp.cuda.is_available(), reason="there is no GPU")
def test_tensors_of_a_gpu() -> None:
    samples = [ddp.ones(2, device="cuda"), ddp.zeros(2, device="cuda")]
    batch = default_collate(samples)
    assert batch.device.type == "cuda"
    assert batch.tolist() == [[1, 1], [0, 0]]
    with pytest.raises(DeviceError, match="on a GPU"):
        default_collate(samples, out=np.empty)
