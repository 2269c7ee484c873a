"""Shapes, joins and frames."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ddp.cases.table import Case, draw, spaced


def shapes() -> Iterator[Case]:
    x = (draw(2, 3, 4),)
    yield Case("reshape", "inferred", lambda t, x: x.reshape(4, -1), x)
    yield Case("reshape", "copy", lambda t, x: t.transpose(x, 0, 2).reshape(6, 4), x)
    yield Case("reshape", "flatten", lambda t, x: t.flatten(x, 1), x)
    yield Case("reshape", "squeeze", lambda t, x: t.squeeze(x[:, :1]), x)
    yield Case("reshape", "squeeze dim", lambda t, x: t.squeeze(x[:1, :1], 1), x)
    yield Case("reshape", "unsqueeze", lambda t, x: t.unsqueeze(x, -2), x)
    yield Case("reshape", "0-d", lambda t, x: x.reshape(1, 1), (draw(),))
    yield Case("reshape", "flatten 0-d", lambda t, x: x.flatten(), (draw(),))
    yield Case("reshape", "empty", lambda t, x: x.reshape(3, 0), (draw(0, 3),))
    yield Case("reshape", "non-contiguous", lambda t, x: x.reshape(-1), (spaced(2, 3, 4),))
    yield Case("permute", "three", lambda t, x: t.permute(x, (2, 0, 1)), x)
    yield Case("permute", "negative", lambda t, x: x.permute(-1, 0, 1), x)
    yield Case("permute", "transpose", lambda t, x: x.transpose(-1, 0), x)
    yield Case("permute", "T", lambda t, x: x.T, (draw(2, 3),))
    yield Case("permute", "t", lambda t, x: x.t(), (draw(3),))
    yield Case("permute", "empty", lambda t, x: x.T, (draw(0, 3),))
    yield Case("permute", "0-d", lambda t, x: x.permute(()), (draw(),))
    yield Case("permute", "non-contiguous", lambda t, x: x.permute(1, 0, 2), (spaced(2, 3, 4),))
    yield Case("expand", "ones", lambda t, x: x.expand(2, 3, 4), (draw(3, 1),))
    yield Case("expand", "kept", lambda t, x: x.expand(2, -1, 4), (draw(3, 1),))
    yield Case("expand", "0-d", lambda t, x: x.expand(2, 2), (draw(),))
    yield Case("expand", "empty", lambda t, x: x.expand(0, 3), (draw(1, 3),))
    yield Case("expand", "non-contiguous", lambda t, x: x.expand(2, 3, 2), (spaced(3, 2),))
    two = (draw(2, 3), draw(2, 3, seed=1))
    yield Case("cat", "rows", lambda t, x, y: t.cat([x, y]), two)
    yield Case("cat", "lengths", lambda t, x, y: t.cat((x, y, x), dim=-1), (draw(2, 3), draw(2, 1)))
    yield Case("cat", "empty", lambda t, x, y: t.cat((x, y)), (draw(0, 3), draw(2, 3)))
    yield Case("cat", "non-contiguous", lambda t, x, y: t.cat((x, y), 1), (spaced(2, 3), spaced(2, 3)))
    yield Case("stack", "first", lambda t, x, y: t.stack([x, y]), two)
    yield Case("stack", "last", lambda t, x, y: t.stack([x, y, x], dim=-1), two)
    yield Case("stack", "0-d", lambda t, x, y: t.stack([x, y]), (draw(), draw(seed=1)))
    yield Case("stack", "empty", lambda t, x: t.stack([x, x], 1), (draw(0, 3),))
    yield Case("stack", "non-contiguous", lambda t, x: t.stack([x, x], 1), (spaced(2, 3),))
    yield Case("pad", "last", lambda t, x: t.nn.functional.pad(x, (1, 2)), (draw(2, 3),))
    yield Case("pad", "both", lambda t, x: t.nn.functional.pad(x, (1, 0, 2, 3), value=1.5), (draw(2, 3),))
    yield Case("pad", "empty", lambda t, x: t.nn.functional.pad(x, (1, 1)), (draw(2, 0),))
    yield Case("pad", "non-contiguous", lambda t, x: t.nn.functional.pad(x, (0, 1, 1, 0)), (spaced(2, 3),))


CASES = list(shapes())
