"""The border: what callers hand over, what is made of it, and what is refused."""

from __future__ import annotations

import array
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import ArgumentError, Communicator, DtypeError, run_threads
from collectives.arrays import (
    as_array,
    check_out,
    describe_lengths,
    dtype_name,
    dtype_of,
    exchanged_rows,
    is_device_array,
    joined_rows,
    split_rows,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMBERS = ["?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "bfloat16", ">i2", ">u8", ">f4", ">c16"]


@pytest.mark.parametrize("name", NUMBERS)
def test_arrays_of_numbers_are_taken_as_they_are(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.zeros((2, 3), dtype)[:, ::2]
    y = as_array(x)
    assert y.dtype == dtype
    assert np.shares_memory(x, y)
    assert dtype_of(dtype_name(dtype)) == dtype
    # The names that C has twice for 64 bits become one, which every backend knows.
    assert y is x or dtype.type in (np.longlong, np.ulonglong)
    assert y.dtype.type is np.dtype(dtype.str).type or dtype == BFLOAT16


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (np.array([object()]), "object"),
        (np.array(["a"]), "<U1"),
        (np.zeros(2, "M8[s]"), r"datetime64\[s\]"),
        (np.zeros(2, [("a", "f4")]), r"\[\('a', '<f4'\)\]"),
        (np.zeros(2, ml_dtypes.float8_e5m2), "float8_e5m2"),  # of NumPy's kind "f" all the same
    ],
)
def test_what_is_no_number_is_refused(x: Any, dtype: str) -> None:
    with pytest.raises(DtypeError, match=f"source should hold numbers, its dtype is {dtype}") as caught:
        as_array(x, "source")
    if dtype == "object":
        assert "view" not in str(caught.value)
    else:
        assert as_array(x.view(np.uint8)).size == x.nbytes  # as the message says


@pytest.mark.parametrize("x", [1, 2.5, True, 1j, [1.0], (1, 2), None, "x", {"a": 1}, range(3), object(), int])
def test_what_is_no_array_is_refused(x: Any) -> None:
    with pytest.raises(DtypeError, match=r"x should be an array, is .*np\.asarray"):
        as_array(x)


def test_buffers_are_arrays() -> None:
    for x in (bytearray(8), memoryview(bytearray(8)), array.array("f", [0, 0]), mmap.mmap(-1, 8)):
        y = as_array(x)
        assert y.dtype == (np.float32 if isinstance(x, array.array) else np.uint8)
        assert y.nbytes == 8
        y[1] = 1
        assert as_array(x)[1] == 1
    told = as_array(b"abc")
    assert told.tolist() == [97, 98, 99]
    assert not told.flags.writeable
    assert as_array(memoryview(np.zeros((2, 3), np.int16))[::2]).shape == (1, 3)
    with pytest.raises(DtypeError, match="should hold numbers"):
        as_array(memoryview(b"abc").cast("c"))


def test_subclasses_and_scalars() -> None:
    x = np.arange(4.0).view(np.recarray)
    assert type(as_array(x)) is np.ndarray
    assert np.shares_memory(as_array(x), x)
    for scalar in (np.float32(2), np.bool_(True), BFLOAT16.type(2), np.longlong(2)):
        y = as_array(scalar)
        assert y.shape == ()
        assert y.dtype == scalar.dtype
        assert not y.flags.writeable  # nobody would see it
    with pytest.raises(DtypeError, match=r"x is a masked array, and its mask would be lost: pass x\.filled"):
        as_array(np.ma.masked_equal([1, 2], 2))


class Method:
    """Has __array__ and nothing else."""

    def __init__(self, held: Any, copies: bool) -> None:
        self.held = held
        self.copies = copies

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.held.copy() if self.copies else self.held


def test_a_copy_is_not_written_to() -> None:
    held = np.arange(3.0)
    assert as_array(Method(held, copies=False)) is held
    y = as_array(Method(held, copies=True))
    assert_array_equal(y, held)
    with pytest.raises(ArgumentError, match="out is read-only, or could only be read by a copy"):
        check_out(Method(held, copies=True), (3,), held.dtype)
    assert check_out(Method(np.zeros((0,)), copies=True), (0,), held.dtype).size == 0  # where nothing is to be written
    assert held.flags.writeable


def test_what_is_read_only_by_its_array_method_stays_so() -> None:
    class Immutable:
        """As JAX's arrays are: DLPack without flags, and a read-only array."""

        def __init__(self) -> None:
            self.held = np.arange(3.0)

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            view = self.held.view()
            view.flags.writeable = False
            return view

        def __dlpack__(self, max_version: Any = None) -> Any:
            return self.held.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.held.__dlpack_device__()

    x = Immutable()
    assert np.shares_memory(as_array(x), x.held)
    with pytest.raises(ArgumentError, match="out is read-only"):
        check_out(x, (3,), x.held.dtype)


class Exporter:
    """A NumPy array that shows nothing of itself but DLPack. old: it knows no version, and so no flags."""

    def __init__(self, array: Any, old: bool) -> None:
        self.array = array
        self.old = old

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError(f"__dlpack__() got an unexpected keyword argument {next(iter(options))!r}")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_is_read_where_it_lies_and_written_where_that_is_allowed(old: bool) -> None:
    for name in ("bool", "i1", "u8", "f2", "f8", "c16"):
        whole = np.arange(24).astype(name).reshape(4, 6)
        for x in (whole, whole[::2, ::-3], whole.T, np.array(whole[1, 1]), whole[:0, 3]):
            y = as_array(Exporter(x, old))
            assert (y.dtype, y.shape, y.flags.writeable) == (x.dtype, x.shape, not old)
            assert_array_equal(y, x)
            assert not x.size or np.shares_memory(x, y)


def test_a_copy_that_dlpack_made_is_not_written_to() -> None:
    class Copies(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            return self.array.copy().__dlpack__(**options)

    held = np.arange(3.0)
    assert_array_equal(as_array(Copies(held, old=False)), held)
    with pytest.raises(ArgumentError, match="could only be read by a copy"):
        check_out(Copies(held, old=False), (3,), held.dtype)


class Located:
    """Tells where it is, and cannot be read."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


class Cuda:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3}


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (Located(2), True),  # CUDA
        (Located(10), True),  # ROCm
        (Cuda(), True),
        (Located(1), False),
        (Located(3), False),  # pinned
        (Located(8), False),  # Metal: no CuPy there
        (np.ones(1), False),
        ([1], False),
        (None, False),
        (np.ndarray, False),
    ],
)
def test_device_arrays_are_recognized(x: Any, expected: bool) -> None:
    assert is_device_array(x) is expected
    if expected:
        with pytest.raises(DtypeError, match=r"x is on a GPU .* moves host arrays: pass x\.get\(\)"):
            as_array(x)
    elif isinstance(x, Located) and x.kind == 8:
        with pytest.raises(DtypeError, match="x is on a device of DLPack's kind 8"):
            as_array(x)


def test_ddp_tensors() -> None:
    import ddp

    for dtype in ("float32", "bfloat16", "int64", "bool"):
        t = ddp.zeros(2, 3, dtype=dtype)
        assert as_array(t).dtype == np.dtype(dtype)
        as_array(t)[1, 2] = 1
        assert t[1, 2].item() == 1
        assert check_out(t.t(), (3, 2), np.dtype(dtype)).shape == (3, 2)
    x = ddp.ones(2, requires_grad=True)
    for each in (x, x * 2):
        with pytest.raises(ArgumentError, match=r"x requires grad \(Tensor\).*pass x\.detach\(\).*ddp\.parallel"):
            as_array(each)
        assert_array_equal(as_array(each.detach()), each.detach().numpy())


TORCH = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
TORCH += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("name", TORCH)
def test_torch_tensors_share_their_memory(name: str, torch: Any) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    t = torch.ones(2, 3).to(getattr(torch, name))
    for each in (t, t.t(), t[:, ::2], t[0, 0], t[:0]):
        x = check_out(each, tuple(each.shape), dtype)
        assert (x == 1).all()
        assert np.shares_memory(x, as_array(each)) or not x.size
    as_array(t[0, 1])[...] = 0
    assert t[0].tolist() == [1, 0, 1]
    assert not is_device_array(t)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_torch_tensors_in_and_out_of_collectives(name: str, torch: Any) -> None:
    def check(comm: Communicator) -> None:
        total = [[sum(range(comm.size + 1))] * 3] * 2
        x = torch.full((2, 3), comm.rank + 1).to(getattr(torch, name))
        y = comm.all_reduce(x)
        assert type(y) is np.ndarray
        assert y.tolist() == total
        out = torch.zeros(3, 2, dtype=x.dtype).t()  # not contiguous
        for _ in range(2):
            assert comm.all_reduce(x, out=out) is out
            assert out.tolist() == total
        whole = torch.zeros(2 * comm.size, 3, dtype=x.dtype)
        assert comm.all_gather(x, out=whole) is whole
        assert whole[:, 0].tolist() == [rank + 1 for rank in range(comm.size) for _ in range(2)]
        assert comm.all_reduce(x, out=x, async_op=True).wait() is x
        assert x.tolist() == total
        x.untyped_storage().resize_(0)  # as FSDP frees a parameter: NumPy's own way would forbid it for ever

    run_threads(check, size=2, timeout=20)


def test_torch_tensors_that_cannot_be_shared(torch: Any) -> None:
    for refused, words in (
        (torch.ones(2, requires_grad=True), r"x requires grad \(Tensor\)"),
        (torch.nn.Parameter(torch.ones(2)), r"x requires grad \(Parameter\)"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2).to(torch.float8_e4m3fn), "Float8"),
    ):
        with pytest.raises(ArgumentError, match=words):
            as_array(refused)


def test_what_is_split_adds_up() -> None:
    for total, size in ((7, 3), (0, 2), (2, 4), (8, 4), (5, 1)):
        assert split_rows(total, None, size) == [len(part) for part in np.array_split(np.arange(total), size)]
    assert split_rows(7, (0, np.int64(7), 0), 3) == [0, 7, 0]
    with pytest.raises(ArgumentError, match="add up to 6, x has 7 rows"):
        split_rows(7, [1, 2, 3], 3)
    for bad in ([1, 2], [1, -1, 0], 7, ["a", 1, 1], [1, 1.5, 1]):
        with pytest.raises(ArgumentError, match="lengths should be"):
            split_rows(1, bad, 3)  # type: ignore[arg-type]


def test_what_is_joined_is_known_or_exchanged() -> None:
    given = (None, "equal", [1, 4, 0])
    assert [joined_rows(4, lengths, 1, 3) for lengths in given] == [None, [4, 4, 4], [1, 4, 0]]  # type: ignore[arg-type]
    assert joined_rows(4, None, 0, 1) == [4]


TABLE = [[5, 6], [4, 0]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [(None, ([2, 2], None)), ([1, 3], ([1, 3], None)), ("equal", ([2, 2], [[2, 2]] * 2)), (TABLE, ([4, 0], TABLE))],
)
def test_what_is_exchanged(lengths: Any, expected: Any) -> None:
    assert exchanged_rows(4, lengths, 1, 2) == expected
    assert exchanged_rows(4, None, 0, 1) == ([4], [[4]])


@pytest.mark.parametrize(
    ("function", "lengths", "reason"),
    [
        (joined_rows, "even", "should be a list"),
        (joined_rows, [4, 3], "but x has 5 rows"),
        (exchanged_rows, "even", "a table"),
        (exchanged_rows, "equal", "a multiple of 2"),
        (exchanged_rows, [[1, 2]], "a table of 2 rows"),
        (exchanged_rows, [[1, 4], [3]], "a table of rows of one length"),
        (exchanged_rows, [1, 3], "add up to 4"),
    ],
)
def test_what_cannot_be(function: Any, lengths: Any, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        function(5, lengths, 0, 2)


def test_words_do_not_depend_on_the_kind_of_sequence() -> None:
    assert describe_lengths((np.int64(1), 2), [1, 2]) == describe_lengths([1, 2], [1, 2]) == " lengths [1, 2]"
    assert (describe_lengths("equal", [1, 1]), describe_lengths(None, None)) == (" lengths equal", "")
