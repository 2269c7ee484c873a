"""Conversions of 16-bit floats give the bits of NumPy and ml_dtypes, with and without the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import native
from collectives.native import BFLOAT16, FLOAT16, FLOAT32, astype, copy, load

HALVES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
#: At which float32 rounding, overflow, subnormal numbers and nan begin in either format.
EDGES = (0, 0x32FFFFFF, 0x33000000, 0x33800000, 0x38800000, 0x477FE000, 0x477FF000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)


def same(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


@HALVES
def test_all_bit_patterns_are_widened_and_rounded_as_numpy_does(dtype: Any) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):  # some CPUs call the widening of a signalling nan invalid
        wide = astype(x, FLOAT32)
        same(wide, x.astype(FLOAT32))
    # Each number, halfway to the next, and one float32 below and above: for all that is no number, another payload.
    bits = wide.view(np.uint32)[:, None] + np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], np.uint32)
    around = bits.reshape(-1).view(FLOAT32)
    with np.errstate(all="ignore"):
        same(astype(around, dtype), around.astype(dtype))


@HALVES
def test_any_float32_is_rounded_as_numpy_does(dtype: Any) -> None:
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    near = (np.array(EDGES, np.uint32)[:, None] + np.arange(-40, 40).astype(np.uint32)).reshape(-1)
    x = np.concatenate([drawn, near, near | np.uint32(1 << 31)]).view(FLOAT32)
    with np.errstate(all="ignore"):
        same(astype(x, dtype), x.astype(dtype))


@HALVES
@pytest.mark.parametrize("length", [0, 1, 1000])
def test_layouts(dtype: Any, length: int) -> None:
    x = np.linspace(-3, 3, 2 * length, dtype=FLOAT32).astype(dtype)
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(dtype)  # and not writable
    turned = x.reshape(2, length).T
    for each in (x, x[::2], unaligned, turned, x[::-1], x.astype(dtype.newbyteorder()), np.arange(length)):
        want = each.astype(FLOAT32)
        same(astype(each, FLOAT32), want)
        assert astype(each, FLOAT32).strides == want.strides
        out = np.zeros(each.shape[::-1], FLOAT32).T
        copy(out, each)
        assert_array_equal(out, want)
    assert astype(turned, FLOAT32, "C").flags.c_contiguous
    same(astype(np.arange(length), dtype), np.arange(length).astype(dtype))  # left to NumPy
    with pytest.raises(ValueError, match="read-only"):
        copy(np.broadcast_to(np.zeros(1, FLOAT32), (2 * length + 1,)), np.zeros(2 * length + 1, dtype))


def test_a_library_that_is_not_there_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "they were not built: install a C compiler (gcc), then this package again"
    assert load(tmp_path, "conversions") == (None, why)
    monkeypatch.setattr(native, "cpu_flags", lambda: set())
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    (tmp_path / "conversions-x86-64-v3.so").touch()
    assert load(tmp_path, "conversions")[1].startswith("this CPU runs none of conversions-x86-64-v3.so")
    monkeypatch.setattr(native, "cpu_flags", lambda: native.LEVELS["x86-64-v3"])
    assert "cannot be loaded" in load(tmp_path, "conversions")[1]
