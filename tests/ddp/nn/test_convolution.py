"""Convolutions, frames, patches and sizes beside PyTorch's: values, gradients, names, texts, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn import functional
from ddp.ops import convolution
from tests.ddp.nn.against_torch import agree, agree_as_functions, check_layer, check_refusals, numbers, torch, twins

pytest.importorskip("torch", reason="PyTorch is the oracle here")

LAYERS: list[tuple[Any, ...]] = [
    ("Conv1d", (4, 6, 3), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False}, (2, 4, 9)),
    ("Conv1d", (3, 4, 3), {"padding": "same", "padding_mode": "circular"}, (3, 8)),
    ("Conv2d", (3, 4, 3), {"padding": (1, 2), "padding_mode": "reflect"}, (2, 3, 6, 5)),
    ("Conv2d", (3, 4, (3, 1)), {"padding": (1, 0), "padding_mode": "replicate", "stride": 2}, (2, 3, 6, 5)),
    ("Conv2d", (3, 4, 4), {"padding": "same", "padding_mode": "circular", "dilation": 1}, (2, 3, 6, 5)),
    ("Conv2d", (4, 6, (2, 3)), {"stride": (2, 1), "dilation": (1, 2), "groups": 2, "bias": False}, (2, 4, 6, 7)),
    ("Conv3d", (3, 4, 3), {"stride": (2, 1, 2), "padding": (1, 0, 2)}, (2, 3, 5, 4, 6)),
    ("Conv3d", (4, 6, (2, 3, 1)), {"dilation": (2, 1, 1), "groups": 2, "bias": False}, (4, 4, 5, 3)),
    ("Conv3d", (2, 3, (5, 3, 1)), {"padding": "same"}, (2, 2, 5, 4, 3)),
    ("Conv3d", (2, 3, 3), {"padding": 1, "padding_mode": "replicate"}, (2, 2, 3, 4, 5)),
    ("ConvTranspose1d", (3, 4, 3), {"stride": 2}, (2, 3, 5)),
    ("ConvTranspose2d", (16, 1, 4), {"stride": 2, "padding": 1, "bias": False}, (2, 16, 4, 4)),
    ("ConvTranspose2d", (4, 6, 1), {"dilation": (2, 1), "output_padding": (1, 0)}, (2, 4, 3, 4)),
    ("ConvTranspose2d", (4, 6, (2, 3)), {"stride": 3, "output_padding": (2, 1), "groups": 2}, (4, 3, 4)),
    ("Upsample", (), {"scale_factor": 2}, (2, 3, 4, 5)),
    ("Upsample", ((7, 3),), {"mode": "bilinear", "align_corners": True}, (2, 3, 4, 5)),
    ("Upsample", (), {"scale_factor": (1.5,), "mode": "linear"}, (2, 3, 5)),
    ("UpsamplingNearest2d", (), {"scale_factor": 3}, (2, 3, 4, 5)),
    ("UpsamplingBilinear2d", (), {"scale_factor": 2}, (2, 3, 4, 5)),
    ("Unfold", ((2, 3),), {"padding": 1}, (2, 3, 4, 5)),
    ("Fold", ((4, 5), (2, 3)), {"stride": (2, 1)}, (2, 12, 6)),
    ("ZeroPad2d", ((1, 2, 0, 3),), {}, (2, 3, 4, 5)),
    ("ConstantPad1d", ((1, 2), 0.5), {}, (2, 3, 4)),
    ("ConstantPad2d", (1, 3), {}, (3, 4, 5)),
    ("ReflectionPad1d", ((2, 1),), {}, (2, 3, 4)),
    ("ReflectionPad2d", (1,), {}, (2, 3, 4, 5)),
    ("ReplicationPad2d", ((1, 2, 0, 3),), {}, (2, 3, 4, 5)),
    ("CircularPad2d", ((1, 2, 0, 3),), {}, (2, 3, 4, 5)),
    ("PixelShuffle", (2,), {}, (2, 8, 3, 4)),
    ("PixelUnshuffle", (2,), {}, (3, 4, 6)),
]


@pytest.mark.parametrize(("name", "args", "options", "shape"), LAYERS)
def test_agrees_with_pytorch(name: str, args: Any, options: Any, shape: Any) -> None:
    check_layer(name, args, options, shape)


def test_transposes_take_the_output_size_when_called() -> None:
    ours, theirs = twins("ConvTranspose2d", 3, 4, 3, stride=2)
    x = numbers(2, 3, 4, 4)
    agree(ours, theirs, x, output_size=(2, 4, 10, 9))
    with pytest.raises(ShapeError, match=r"output_size \(9, 8\) for input \(2, 3, 4, 4\): expected \(9, 9\)"):
        ours(ddp.tensor(x), (9, 8))


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # PyTorch says that it makes a padded copy
def test_same_with_what_cannot_be_halved() -> None:
    agree_as_functions("conv2d", numbers(2, 3, 5, 6), numbers(4, 3, 2, 4), padding="same")
    agree_as_functions("conv3d", numbers(2, 3, 4, 5, 6), numbers(4, 3, 4, 2, 3), padding="same")


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("tile", [1, 700, 3000, 1 << 20])
def test_tiles_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, tile: int, channels: int) -> None:
    monkeypatch.setattr(convolution, "tile_bytes", lambda xp: tile)
    monkeypatch.setattr(convolution, "MIN_POSITIONS", 1)
    for groups, name in itertools.product((1, 2), ("Conv2d", "ConvTranspose2d")):
        shape = (channels * groups, 4) if name == "Conv2d" else (4, channels * groups)
        options = {"groups": groups, "stride": (2, 1), "padding": 1}
        check_layer(name, (*shape, 3), options, (5, shape[0], 7, 6))


WRONG: dict[type[Exception], Any] = {
    ShapeError: {
        "input has 3 channels, weight takes 2": lambda f, z: f.conv2d(z(2, 3, 4, 4), z(5, 2, 3, 3)),
        r"expected \(N, C, H, W\) and": lambda f, z: f.conv2d(z(2, 3, 4, 4), z(5, 3, 3)),
        r"kernel \(5, 3\) .* does not fit .*\(4, 4\)": lambda f, z: f.conv2d(z(2, 3, 4, 4), z(5, 3, 5, 3)),
        r"bias \(4,\), expected \(5,\)": lambda f, z: f.conv2d(z(2, 3, 4, 4), z(5, 3, 3, 3), z(4)),
        "3 channels, weight takes 2": lambda f, z: f.conv3d(z(2, 3, 4, 4, 4), z(5, 2, 3, 3, 3)),
        r"conv3d: kernel \(3, 3, 3\)": lambda f, z: f.conv3d(z(2, 3, 2, 4, 4), z(5, 3, 3, 3, 3)),
        "3 x 4 patches, not 5": lambda f, z: f.fold(z(2, 12, 5), (4, 5), 2),
        "does not divide 3 channels": lambda f, z: f.pixel_shuffle(z(2, 3, 4, 4), 2),
    },
    ArgumentError: {
        "too small": lambda f, z: f.conv2d(z(2, 3, 4, 4), z(5, 3, 3, 3), stride=0),
        "not less than stride": lambda f, z: f.conv_transpose2d(z(2, 3, 4, 4), z(3, 5, 3, 3), output_padding=1),
        "conv3d: too small": lambda f, z: f.conv3d(z(2, 3, 4, 4, 4), z(5, 3, 3, 3, 3), stride=(0, 1, 1)),
        r"conv3d: too small: .*padding=\(-1": lambda f, z: f.conv3d(
            z(2, 3, 4, 4, 4), z(5, 3, 3, 3, 3), padding=(-1, 0, 0)
        ),
        "needs stride 1": lambda f, z: f.conv3d(z(2, 3, 4, 4, 4), z(5, 3, 3, 3, 3), stride=2, padding="same"),
        "'valid' or 'same'": lambda f, z: f.conv3d(z(2, 3, 4, 4, 4), z(5, 3, 3, 3, 3), padding="all"),
        "give size or scale_factor": lambda f, z: f.interpolate(z(2, 3, 4, 4)),
        "the mode is one of nearest": lambda f, z: f.interpolate(z(2, 3, 4, 4), 2, mode="area"),
        "align_corners": lambda f, z: f.interpolate(z(2, 3, 4, 4), 2, align_corners=True),
        "expected pairs": lambda f, z: f.pad(z(2), (1, 1, 1)),
        "groups 2 does not divide 3 and 4": lambda f, z: nn.Conv2d(3, 4, 3, groups=2),
        "^Conv2d: .* needs stride 1": lambda f, z: nn.Conv2d(3, 4, 3, 2, padding="same"),
    },
    DtypeError: {
        "float32, .*float64": lambda f, z: f.conv2d(z(2, 3, 4, 4), z(5, 3, 3, 3).double()),
        "one number or 1, got 'valid'": lambda f, z: nn.ConvTranspose1d(3, 4, 3, padding="valid"),
        "one number or 2, got 'same'": lambda f, z: nn.ConvTranspose2d(3, 4, 3, 2, padding="same"),
        "expected one number or 1, got 'same'": lambda f, z: f.conv_transpose1d(z(2, 3, 4), z(3, 5, 3), padding="same"),
        "expected one number or 2, got 'valid'": lambda f, z: f.conv_transpose2d(
            z(2, 3, 4, 4), z(3, 5, 3, 3), padding="valid"
        ),
    },
}


def test_refusals() -> None:
    check_refusals(WRONG, functional, ddp.zeros)


@pytest.mark.parametrize(("name", "shape"), [("Conv1d", (2, 3, 7)), ("Conv2d", (2, 3, 7, 6))])
def test_users_call_and_replace_the_convolution_of_a_layer(name: str, shape: Any) -> None:
    def standardized(t: Any) -> Any:
        class Standardized(getattr(t.nn, name)):  # type: ignore[misc]
            def _conv_forward(self, input: Any, weight: Any, bias: Any) -> Any:
                return super()._conv_forward(input, weight - weight.mean(), bias)

        return Standardized

    ours, theirs = (standardized(t)(3, 4, 3, padding=1, padding_mode="reflect").double() for t in (ddp, torch))
    theirs.load_state_dict({key: torch.tensor(value.numpy()) for key, value in ours.state_dict().items()})
    agree(ours, theirs, numbers(*shape))
