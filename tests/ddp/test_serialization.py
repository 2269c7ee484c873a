"""save and load: bit for bit, also through PyTorch."""

from __future__ import annotations

import io
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp._tensor import dtypes
from ddp.errors import ArgumentError, SerializationError
from ddp.nn import functional as F

ALL_DTYPES = sorted(dtypes.SUPPORTED, key=str)
SHAPES: list[tuple[int, ...]] = [(2, 3), (), (0,), (4, 0, 2), (7,)]


def values(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Random bits, so that NaNs and the like are among them; 0 and 1 for bool."""
    count = int(np.prod(shape))
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == dtypes.bool_ else 256, count * dtype.itemsize)
    return ddp.tensor(bits.astype(np.uint8).view(dtype).reshape(shape))


def every_kind() -> dict[str, Any]:
    return {f"{dtype}.{'x'.join(map(str, shape))}": values(dtype, shape) for dtype in ALL_DTYPES for shape in SHAPES}


def bits(x: Any) -> bytes:
    return x.detach().array.tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected) or isinstance(expected, dict)
    if isinstance(expected, ddp.Tensor):
        assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
        assert bits(actual) == bits(expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert [type(key) for key in actual] == [type(key) for key in expected]
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for each, value in zip(actual, expected, strict=True):
            assert_same(each, value)
    else:
        assert actual == expected or actual != actual


def saved(obj: Any) -> io.BytesIO:
    file = io.BytesIO()
    ddp.save(obj, file)
    file.seek(0)
    return file


def through(obj: Any) -> Any:
    return ddp.load(saved(obj))


def header(path: Any) -> dict[str, Any]:
    data = Path(path).read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    expected = every_kind()
    ddp.save(expected, tmp_path / "x.safetensors")
    actual = ddp.load(str(tmp_path / "x.safetensors"))
    assert_same(actual, expected)
    for tensor in actual.values():
        assert tensor.array.flags.writeable
        assert tensor.array.flags.owndata or tensor.array.base.flags.owndata
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_pytorch_reads_what_is_written_here(tmp_path: Path, torch: Any) -> None:
    library = pytest.importorskip("safetensors.torch", reason="the library of the format")
    expected = every_kind()
    ddp.save(expected, tmp_path / "ours.safetensors")
    read = library.load_file(tmp_path / "ours.safetensors")
    assert sorted(read) == sorted(expected)
    for name, tensor in read.items():
        assert str(tensor.dtype).removeprefix("torch.") == str(expected[name].dtype).removeprefix("ddp.")
        assert tuple(tensor.shape) == expected[name].shape
        assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == bits(expected[name])
    library.save_file(read, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    back = ddp.load(tmp_path / "theirs.safetensors")
    assert_same({name: back[name] for name in expected}, expected)


def test_what_is_not_contiguous() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    for array in (x.T, x[:, ::2], x[::-1], np.broadcast_to(x[0, 0], (5, 4))):
        loaded = through(ddp._tensor.base.wrap(array, ddp.device("cpu")))
        assert_array_equal(loaded.array, array)
        assert loaded.is_contiguous()


def test_a_checkpoint(tmp_path: Path) -> None:
    net = nn.Linear(3, 4)
    optimizer = ddp.optim.AdamW(net.parameters(), lr=0.1, amsgrad=True)
    scheduler = ddp.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2])
    net(ddp.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    checkpoint = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
    }
    path = tmp_path / "x.safetensors"
    ddp.save(checkpoint, path)
    loaded = ddp.load(path, weights_only=True, mmap=True)
    assert_same(loaded, checkpoint)
    assert set(header(path)) >= {"model.weight", "optimizer.state.0.exp_avg"}
    resumed = ddp.optim.lr_scheduler.MultiStepLR(optimizer, [])
    optimizer.load_state_dict(loaded["optimizer"])
    resumed.load_state_dict(loaded["scheduler"])
    assert_same(resumed.state_dict(), checkpoint["scheduler"])


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    x = values(dtypes.float32, (100, 10))
    ddp.save({"a": x, "b": x.detach(), "c": x.clone()}, path)
    assert header(path)["__metadata__"] == {"tied": '{"b": "a"}'}
    assert 8000 < os.path.getsize(path) < 8500
    loaded = ddp.load(path)
    assert_same(loaded, {"a": x, "c": x, "b": x})
    loaded["a"].fill_(5)
    assert loaded["b"][0, 0].item() == 5
    assert loaded["c"][0, 0].item() != 5
    assert loaded["a"].version is loaded["b"].version


def test_map_location() -> None:
    cpu = ddp.device("cpu")
    for where in (None, "cpu", cpu):
        assert ddp.load(saved(ddp.ones(2)), map_location=where).device is cpu
    with pytest.raises(ArgumentError, match="map_location is a device or its name, not function"):
        ddp.load(saved(1), map_location=lambda storage, where: storage)


def test_kinds_of_files(tmp_path: Path) -> None:
    x = {"x": values(dtypes.float32, (1000,))}
    with open(tmp_path / "raw", "w+b", buffering=0) as raw:
        raw.write(b"before")
        ddp.save(x, raw)
        raw.seek(6)
        assert_same(ddp.load(raw), x)
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(writing, "wb") as sink:
        ddp.save(x, sink)
        sink.close()
        assert_same(ddp.load(source), x)
    for wrong in (io.StringIO(), 3, b"path"):
        for call in (ddp.load, lambda file: ddp.save(x, file)):
            with pytest.raises(ArgumentError, match="expected a path or an open binary file"):
                call(wrong)


PLAIN = [
    None,
    True,
    10**40,
    "ä\n\0",
    -0.0,
    math.inf,
    math.nan,
    5e-324,
    float.fromhex("0x1.fffffffffffffp+1023"),
    b"\xff\0",
    (1, (2.5, None), [3]),
    {"a": {1: "x", None: 2, False: 3, 2.5: ()}, "": []},
    {"tensor": "a name", "dict": [["x", 1]]},
    Counter({3: 2}),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_keep_their_types_and_bits(value: Any) -> None:
    loaded = through(value)
    assert (repr(loaded), type(loaded)) == (repr(value), type(value))


ARRAYS = [
    *(np.arange(6).reshape(2, 3).astype(dtype) for dtype in ("float32", "int64", "bool", "uint16", "float16")),
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.zeros((0, 4), np.float16),
    np.array([1.5, np.nan], ml_dtypes.bfloat16),
    np.array([1, 2**64 - 1], np.uint64),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_come_back_as_arrays(array: Any) -> None:
    expected = [array, array.T, *array.reshape(-1)[:1]]
    swapped = array.astype(array.dtype.newbyteorder("S"))
    *loaded, native, tensor = through([*expected, swapped, ddp.ones(3)])
    for mine, theirs in zip([*loaded, native], [*expected, array], strict=True):
        assert (type(mine), mine.dtype, mine.shape) == (type(theirs), theirs.dtype, theirs.shape)
        assert mine.tobytes() == theirs.tobytes()
    assert loaded[0].flags.writeable
    assert isinstance(tensor, ddp.Tensor)
    assert through(array).tobytes() == array.tobytes()


class Unsaveable:
    pass


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({"a": [1, Unsaveable()]}, r"obj\.a\.1 is of type Unsaveable"),
        ({"a": {(1, 2): 3}}, r"obj\.a has a key of type tuple"),
        ({"a": np.array([object()])}, "a is an array of dtype object, which a file cannot hold"),
        ({"a": np.ma.array([1.0])}, r"obj\.a is of type MaskedArray"),
        ({"a": {1, 2}}, "is of type set"),
        ({"a": np.zeros(2, complex)}, r"obj\.a is an array of dtype complex128, which a file cannot hold"),
        ([lambda: 0], r"obj\.0 is of type function"),
    ],
)
def test_what_cannot_be_saved(obj: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        ddp.save(obj, tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_file_stays_where_a_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    ddp.save(1, path)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ddp.save(2, path)
    assert ddp.load(path) == 1
    assert os.listdir(tmp_path) == [path.name]


class Net(nn.Module):
    """A bit of everything that models hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.rnn = nn.LSTM(4, 4, 2)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad = False
        self.register_buffer("scale", ddp.full((1,), 2.0), persistent=False)
        self.act = F.relu
        self.shape = (1, None)
        self.options = {"names": ["a", 2]}

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        y, _ = self.rnn(self.embedding(x) * self.scale)
        return self.head(self.norm(self.layers[0](self.act(y))[:, 0]))


def test_a_whole_model_as_scripts_save_it() -> None:
    net = Net().eval()
    x = ddp.tensor([[0, 1], [4, 2]])
    with ddp.serialization.safe_globals([Net]):
        result, epoch = through((net, 3))
    assert epoch == 3
    assert_array_equal(result(x).numpy(force=True), net(x).numpy(force=True))
    assert result.head.weight is result.embedding.weight
    for name, p in net.named_parameters():
        assert result.get_parameter(name).requires_grad == p.requires_grad, name
    assert list(result.state_dict()) == list(net.state_dict())
    assert not result.training
    assert (result.act, result.shape, result.options) == (net.act, net.shape, net.options)
    result(x).sum().backward()


def test_a_class_is_not_made_unless_it_is_listed() -> None:
    def refused() -> None:
        with pytest.raises(SerializationError, match=r"Net', which is none of ddp.nn's; .*safe_globals\(\[Net\]\)"):
            through(Net())

    refused()
    with ddp.serialization.safe_globals([Net]):
        pass
    refused()
    with ddp.serialization.safe_globals([]):  # which forgets it again
        ddp.serialization.add_safe_globals([Net])
        assert type(through(Net())) is Net
    refused()


def test_a_module_under_two_names_stays_one() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    net.add_module("again", net[0])
    result, other = through((net, {"first": net[0]}))
    assert result.again is result[0] is other["first"]
    assert result[1] is not result[0]
    assert len(list(result.modules())) == 3


@pytest.mark.parametrize("listed", ["str", 3, ["Net"], nn.Linear(2, 2)])
def test_what_is_no_class_cannot_be_listed(listed: Any) -> None:
    with pytest.raises(ArgumentError, match="safe_globals: expected classes and functions themselves, got"):
        ddp.serialization.add_safe_globals([listed])


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"module": ["os:system", {"dict": []}]}, "'os:system', which is none of ddp.nn's"),
        ({"module": ["ddp.nn:Linear", {"dict": []}]}, "a Linear, whose training is None, expected a bool"),
        ({"module": ["ddp.nn:Linear", 3]}, "the attributes of a Linear are 3"),
        ({"function": "builtins:exec"}, "'builtins:exec', which is none of ddp.nn's"),
        ({"function": "ddp.nn.dropout:apply"}, "none of ddp.nn's"),
        ({"parameters": [{"dict": [["weight", 3]]}, {}]}, "a parameter is 3, expected a tensor"),
        ({"same_module": 0}, "structure holds"),
        ({"function": 5}, "structure holds {'function': 5}, which is none"),
        ({"module": [None, {"dict": []}]}, r"structure holds {'module': \[None, "),
        ({"parameters": [{"dict": [["weight", None]]}, ["weight"]]}, "structure holds {'parameters': "),
    ],
)
def test_what_no_module_is_made_of(structure: Any, message: str, tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"structure": json.dumps(structure)}}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SerializationError, match=message):
        ddp.load(tmp_path / "file")


def with_hook(net: Any) -> None:
    net.register_forward_hook(lambda *_: None)


def with_lambdas(net: Any) -> None:
    net.first = lambda x: x
    net.second = lambda x: 2 * x  # both would come back as one


def with_itself(net: Any) -> None:
    net.parts = {"whole": net}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_hook, r"obj\._hooks_\.forward\.0\.0 is of type function"),
        (with_lambdas, r"obj\.first is .*<lambda>, which a file cannot name"),
        (with_itself, "a part of it holds the whole"),
    ],
)
def test_modules_that_cannot_be_saved(change: Any, message: str) -> None:
    net = nn.Linear(2, 2)
    change(net)
    with pytest.raises(ArgumentError, match=message):
        ddp.save(net, io.BytesIO())
