"""The models that several benchmarks train, written once for `ddp` and `torch` alike: `t` is either of them."""

from __future__ import annotations

from typing import Any


def gpt(t: Any, *, vocabulary: int, layers: int, width: int, heads: int, length: int, tanh: bool = False) -> Any:
    """GPT-2's architecture: (N, T) tokens to (N, T, vocabulary) logits, the head tied to the embedding.

    tanh: GELU by tanh, in one call where the library has a feed-forward network; else the exact GELU
    """
    nn, functional = t.nn, t.nn.functional

    class Block(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            n, s, _ = x.shape
            q, k, v = self.qkv(self.before(x)).reshape(n, s, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(seen.transpose(1, 2).reshape(n, s, width))
            return x + self.feed_forward(self.between(x))

        def feed_forward(self, x: Any) -> Any:
            up, down = self.up, self.down
            if not tanh:
                return down(functional.gelu(up(x)))
            if hasattr(functional, "feed_forward"):  # what a user of ours writes; PyTorch fuses when it compiles
                return functional.feed_forward(x, up.weight, up.bias, down.weight, down.bias, "gelu", "tanh")
            return down(functional.gelu(up(x), approximate="tanh"))

    class Model(nn.Module):  # type: ignore[misc]  # either library's
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
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
