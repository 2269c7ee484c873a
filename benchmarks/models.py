"""The models that several benchmarks train, written once for `ddp` and `torch` alike: `t` is either of them."""

from __future__ import annotations

import itertools
from typing import Any


def digits_cnn(t: Any) -> Any:
    """(N, 1, 8, 8) images to (N, 10) logits, in float64."""
    nn = t.nn
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    return net.double()


def gpt(t: Any, *, vocabulary: int, layers: int, width: int, heads: int, length: int, tanh: bool = False) -> Any:
    """GPT-2's architecture: (N, T) tokens to (N, T, vocabulary) logits, the head tied to the embedding.

    tanh: GELU by tanh, in one call where the library has a feed-forward network; else the exact GELU
    """
    nn = t.nn
    functional = t.nn.functional

    class Block(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.LayerNorm(width)
            self.between = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width)
            self.project = nn.Linear(width, width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            n, s, _ = x.shape
            q, k, v = self.qkv(self.before(x)).reshape(n, s, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(seen.transpose(1, 2).reshape(n, s, width))
            return x + self.feed_forward(self.between(x))

        def feed_forward(self, x: Any) -> Any:
            up = self.up
            down = self.down
            if not tanh:
                return down(functional.gelu(up(x)))
            if hasattr(functional, "feed_forward"):  # what a user of ours writes; PyTorch fuses when it compiles
                return functional.feed_forward(x, up.weight, up.bias, down.weight, down.bias, "gelu", "tanh")
            return down(functional.gelu(up(x), approximate="tanh"))

    class Model(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x: Any) -> Any:
            x = self.tokens(x) + self.positions(t.arange(x.shape[1], device=x.device))
            return self.head(self.norm(self.blocks(x)))

    return Model()


def resnet18(t: Any, *, width: int = 64, classes: int = 1000, small_images: bool = False) -> Any:
    """ResNet-18: (N, 3, H, W) to (N, classes). Source: He et al. 2015, arXiv:1512.03385.

    small_images: of 32x32; the stem is one 3x3 convolution, without pooling
    """
    nn = t.nn

    class Block(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self, inputs: int, channels: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(channels)
            self.relu = nn.ReLU(inplace=not small_images)
            self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(channels)
            self.downsample = nn.Identity()
            if stride != 1 or inputs != channels:
                conv = nn.Conv2d(inputs, channels, 1, stride, bias=False)
                self.downsample = nn.Sequential(conv, nn.BatchNorm2d(channels))

        def forward(self, x: Any) -> Any:
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(y + self.downsample(x))

    class ResNet(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            stem = (3, 1, 1) if small_images else (7, 2, 3)
            self.conv1 = nn.Conv2d(3, width, *stem, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.relu = nn.ReLU(inplace=not small_images)
            self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
            inputs = width
            for stage in range(4):
                channels = width << stage
                blocks = Block(inputs, channels, 2 if stage else 1), Block(channels, channels, 1)
                self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
                inputs = channels
            self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
            self.fc = nn.Linear(inputs, classes)

        def forward(self, x: Any) -> Any:
            x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
            x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
            return self.fc(t.flatten(self.avgpool(x), 1))

    return ResNet()


# MobileNetV2's stages: how much wider a block is within, its channels, how many blocks, the stride of the first.
MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(t: Any, *, classes: int) -> Any:
    """MobileNetV2 for (N, 3, 32, 32), its first two strides 1. Source: Sandler et al. 2018, arXiv:1801.04381."""
    nn = t.nn

    def convolution(inputs: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> list[Any]:
        conv = nn.Conv2d(inputs, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        return [conv, nn.BatchNorm2d(channels)]

    class Block(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self, inputs: int, channels: int, stride: int, wider: int) -> None:
            super().__init__()
            within = inputs * wider
            widen = [*convolution(inputs, within, 1), nn.ReLU6()] if wider > 1 else []
            depthwise = [*convolution(within, within, 3, stride, within), nn.ReLU6()]
            self.layers = nn.Sequential(*widen, *depthwise, *convolution(within, channels, 1))
            self.is_residual = stride == 1 and inputs == channels

        def forward(self, x: Any) -> Any:
            return x + self.layers(x) if self.is_residual else self.layers(x)

    layers = [*convolution(3, 32, 3), nn.ReLU6()]
    inputs = 32
    for wider, channels, count, first in MOBILE_STAGES:
        for i in range(count):
            layers.append(Block(inputs, channels, 1 if i else first, wider))
            inputs = channels
    layers += [*convolution(inputs, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1280, classes))


def unet(t: Any, *, widths: tuple[int, ...]) -> Any:
    """A U-Net of residual blocks with GroupNorm and SiLU: (N, 3, H, W) to the same.

    Source: Ho, Jain and Abbeel 2020, arXiv:2006.11239, without attention and time.
    """
    nn = t.nn

    class Block(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self, inputs: int, channels: int) -> None:
            super().__init__()
            self.norm1 = nn.GroupNorm(8, inputs)
            self.conv1 = nn.Conv2d(inputs, channels, 3, padding=1)
            self.norm2 = nn.GroupNorm(8, channels)
            self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
            self.shortcut = nn.Identity() if inputs == channels else nn.Conv2d(inputs, channels, 1)
            self.silu = nn.SiLU()

        def forward(self, x: Any) -> Any:
            y = self.conv1(self.silu(self.norm1(x)))
            return self.shortcut(x) + self.conv2(self.silu(self.norm2(y)))

    class UNet(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, widths[0], 3, padding=1)
            pairs = list(itertools.pairwise(widths))
            self.down = nn.ModuleList([Block(a, a) for a, _ in pairs])
            self.smaller = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs])
            self.middle = Block(widths[-1], widths[-1])
            self.larger = nn.ModuleList(
                [nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(b, a, 3, padding=1)) for a, b in reversed(pairs)]
            )
            self.up = nn.ModuleList([Block(2 * a, a) for a, _ in reversed(pairs)])
            self.last = nn.Sequential(nn.GroupNorm(8, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1))

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            passed = []
            for block, smaller in zip(self.down, self.smaller, strict=True):
                x = block(x)
                passed.append(x)
                x = smaller(x)
            x = self.middle(x)
            for block, larger in zip(self.up, self.larger, strict=True):
                x = block(t.cat([larger(x), passed.pop()], 1))
            return self.last(x)

    return UNet()


def vit(t: Any, *, width: int, heads: int, layers: int, classes: int, patch: int = 4) -> Any:
    """A vision transformer for (N, 3, 32, 32), by the mean of its tokens. Source: Dosovitskiy et al. 2020."""
    nn = t.nn

    class ViT(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, width, patch, patch)
            self.positions = nn.Parameter(t.zeros(1, (32 // patch) ** 2, width))
            settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, **settings)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, classes)

        def forward(self, x: Any) -> Any:
            x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
            return self.head(self.norm(self.encoder(x)).mean(1))

    return ViT()


def lstm(t: Any, *, vocabulary: int, width: int, layers: int) -> Any:
    """A language model: (N, T) tokens to (N, T, vocabulary) logits."""
    nn = t.nn

    class LanguageModel(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.lstm = nn.LSTM(width, width, layers, batch_first=True)
            self.head = nn.Linear(width, vocabulary)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(self.tokens(x))[0])

    return LanguageModel()


def gru_tagger(t: Any, *, vocabulary: int, width: int, tags: int) -> Any:
    """A tagger that reads in both directions: (N, T) tokens to (N, T, tags) logits."""
    nn = t.nn

    class Tagger(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * width, tags)

        def forward(self, x: Any) -> Any:
            return self.head(self.gru(self.tokens(x))[0])

    return Tagger()


def encoder_decoder(t: Any, *, vocabulary: int, width: int, heads: int, layers: int) -> Any:
    """A transformer that translates: (N, S) and (N, T) tokens to (N, T, vocabulary) logits."""
    nn = t.nn

    class Translator(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.source = nn.Embedding(vocabulary, width)
            self.target = nn.Embedding(vocabulary, width)
            sizes = width, heads, layers, layers, 4 * width
            self.transformer = nn.Transformer(*sizes, dropout=0.0, batch_first=True)
            self.head = nn.Linear(width, vocabulary)

        def forward(self, source: Any, target: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            seen = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
            return self.head(seen)

    return Translator()


def dcgan(t: Any, *, noise: int, width: int) -> tuple[Any, Any]:
    """A generator, (N, noise, 1, 1) to (N, 3, 32, 32), and a discriminator, to (N,). Source: Radford et al. 2015."""
    nn = t.nn
    generator = nn.Sequential(
        nn.ConvTranspose2d(noise, 4 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
    )
    return generator, discriminator
