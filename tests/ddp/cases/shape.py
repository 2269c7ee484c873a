"""Shapes, parts and frames."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.ddp.cases.table import Case, draw, function, spaced


def shapes() -> Iterator[Case]:
    x = (draw(2, 3, 4),)
    for label, fn in {
        "inferred": lambda t, x: x.reshape(4, -1),
        "copy": lambda t, x: t.transpose(x, 0, 2).reshape(6, 4),
        "view": lambda t, x: x.view(-1, 3),
        "flatten": lambda t, x: t.flatten(x, 1),
        "unflatten": lambda t, x: t.unflatten(x, 2, (2, -1)),
        "squeeze": lambda t, x: t.squeeze(x[:, :1]),
        "squeeze dim": lambda t, x: t.squeeze(x[:1, :1], 1),
        "unsqueeze": lambda t, x: t.unsqueeze(x, -2),
        "repeat_interleave": lambda t, x: x.repeat_interleave(2),
        "repeat_interleave dim": lambda t, x: t.repeat_interleave(x, 3, dim=-2),
    }.items():
        yield Case("reshape", label, fn, x)
    yield Case("reshape", "0-d", lambda t, x: x.reshape(1, 1), (draw(),))
    yield Case("reshape", "flatten 0-d", lambda t, x: x.flatten(), (draw(),))
    yield Case("reshape", "empty", lambda t, x: x.reshape(3, 0), (draw(0, 3),))
    for label, fn in {
        "three": lambda t, x: t.permute(x, (2, 0, 1)),
        "negative": lambda t, x: x.permute(-1, 0, 1),
        "transpose": lambda t, x: x.transpose(-1, 0),
        "swapaxes": lambda t, x: t.swapaxes(x, 0, 1),
        "movedim": lambda t, x: t.movedim(x, 0, -1),
        "moveaxis": lambda t, x: x.moveaxis((0, 1), (2, 0)),
    }.items():
        yield Case("permute", label, fn, x)
    yield Case("permute", "t", lambda t, x: x.t(), (draw(3),))
    yield Case("permute", "empty", lambda t, x: x.T, (draw(0, 3),))
    yield Case("permute", "0-d", lambda t, x: x.permute(()), (draw(),))
    for label, fn in {
        "ones": lambda t, x: x.expand(2, 3, 4),
        "kept": lambda t, x: x.expand(2, -1, 4),
        "broadcast_to": lambda t, x: t.broadcast_to(x, (2, 3, 2)),
        "broadcast_tensors": lambda t, x: t.broadcast_tensors(x, t.zeros(4, 1, 2))[0],
        "meshgrid xy": lambda t, x: t.stack(t.meshgrid(x[:, 0], x[1:, 0], x[0], indexing="xy")),
        "cartesian_prod": lambda t, x: t.cartesian_prod(x[:, 0], x[1:, 0]),
    }.items():
        yield Case("expand", label, fn, (draw(3, 1),))
    yield Case("expand", "0-d", lambda t, x: x.expand(2, 2), (draw(),))
    yield Case("expand", "empty", lambda t, x: x.expand(0, 3), (draw(1, 3),))


def parts() -> Iterator[Case]:
    x = (draw(5, 4),)
    for label, fn in {
        "size": lambda t, x: t.split(x, 2)[2],
        "all": lambda t, x: t.cat(x.split(3, dim=1)[::-1], 1),
        "sizes": lambda t, x: x.split([1, 4])[1] * x.split_with_sizes([4, 1])[0],
        "chunk dim": lambda t, x: x.chunk(3, dim=-1)[0],
        "tensor_split": lambda t, x: t.tensor_split(x, 3)[0],
    }.items():
        yield Case("split", label, fn, x)
    yield Case("split", "empty", lambda t, x: x.split(2)[0], (draw(0, 3),))
    yield Case("unbind", "last", lambda t, x: t.stack(x.unbind(-1)[1:]), x)
    yield Case("unbind", "iterated", lambda t, x: sum(row * i for i, row in enumerate(x)), x)
    yield Case("unbind", "empty", lambda t, x: x.unbind(1)[0], (draw(0, 3),))
    for offset in (-2, 0, 1, 3):
        yield Case("diagonal", f"{offset}", lambda t, x, n=offset: t.diagonal(x, n), x)
    yield Case("diagonal", "dims", lambda t, x: x.diagonal(-1, 2, 0), (draw(2, 3, 4),))
    yield Case("diagonal", "of a matrix", lambda t, x: t.diag(x, 1), x)
    yield Case("diagonal", "empty", lambda t, x: x.diagonal(), (draw(0, 3),))
    yield Case("unfold", "overlapping", lambda t, x: x.unfold(0, 3, 1), x)
    yield Case("unfold", "twice", lambda t, x: x.unfold(0, 2, 1).unfold(1, 3, 1), x)
    yield Case("unfold", "empty", lambda t, x: x.unfold(1, 2, 1), (draw(0, 3),))
    yield Case("as_strided", "windows", lambda t, x: t.as_strided(x, (3, 4), (4, 1), 5), x)
    yield Case("as_strided", "empty", lambda t, x: x.as_strided((0, 3), (3, 1)), (draw(0, 3),))
    yield Case(
        "as_strided",
        "non-contiguous, copied",
        lambda t, x: x.contiguous().as_strided((3, 2), (1, 3)),
        (spaced(2, 3, 4),),
    )
    yield Case("as_strided", "0-d", lambda t, x: x.as_strided((2,), (0,)), (draw(),))


def rearranged() -> Iterator[Case]:
    two = (draw(2, 3), draw(2, 3, seed=1))
    yield Case("cat", "rows", lambda t, x, y: t.cat([x, y]), two)
    yield Case("cat", "lengths", lambda t, x, y: t.concat((x, y, x), dim=-1), (draw(2, 3), draw(2, 1)))
    yield Case("cat", "empty", lambda t, x, y: t.cat((x, y)), (draw(0, 3), draw(2, 3)))
    yield Case("cat", "nothing", lambda t, x, y: t.cat((x, y), 1), (draw(0), draw(2, 3)))
    yield Case("cat", "hstack", lambda t, x, y: t.hstack((x, y)), two)
    yield Case("cat", "vstack", lambda t, x, y: t.vstack((x, y)), (draw(3), draw(2, 3)))
    yield Case("cat", "column_stack", lambda t, x, y: t.column_stack((x, y)), (draw(2), draw(2, 3)))
    yield Case("stack", "first", lambda t, x, y: t.stack([x, y]), two)
    yield Case("stack", "last", lambda t, x, y: t.stack([x, y, x], dim=-1), two)
    yield Case("stack", "0-d", lambda t, x, y: t.stack([x, y]), (draw(), draw(seed=1)))
    yield Case("stack", "empty", lambda t, x: t.stack([x, x], 1), (draw(0, 3),))
    for op, some in {
        "repeat": {"twice": lambda t, x: x.repeat(2, 1, 3), "tile": lambda t, x: t.tile(x, (2,))},
        "flip": {
            "two": lambda t, x: x.flip(0, -1),
            "none": lambda t, x: x.flip(()),
            "fliplr": lambda t, x: t.fliplr(x),
            "rot90": lambda t, x: t.rot90(x, 1) * 2,
            "rot90 thrice": lambda t, x: t.rot90(x, -1, (2, 1)),
        },
        "roll": {
            "one": lambda t, x: t.roll(x, 1, 1),
            "two": lambda t, x: x.roll((-1, 5), (0, -1)),
            "flat": lambda t, x: x.roll(4),
        },
        "tril": {"main": lambda t, x: t.tril(x), "above": lambda t, x: x.tril(1), "below": lambda t, x: x.tril(-2)},
        "triu": {"main": lambda t, x: t.triu(x), "above": lambda t, x: x.triu(2), "below": lambda t, x: x.triu(-1)},
        "diag_embed": {
            "main": lambda t, x: t.diag_embed(x),
            "above": lambda t, x: x.diag_embed(2),
            "dims": lambda t, x: t.diag_embed(x, -1, 0, 2),
            "of a vector": lambda t, x: t.diag(x[0, 0], -1),
        },
    }.items():
        for label, fn in some.items():
            yield Case(op, label, fn, (draw(2, 3, 4),))
        yield Case(op, "empty", some["one" if "one" in some else next(iter(some))], (draw(2, 0, 3),))


def frames() -> Iterator[Case]:
    pad = functools.partial(function, "pad")
    yield Case("pad", "last", pad((1, 2)), (draw(2, 3),))
    yield Case("pad", "both", pad((1, 0, 2, 3), value=1.5), (draw(2, 3),))
    yield Case("pad", "cropped", pad((-1, 2, 1, -2), value=2.0), (draw(4, 3),))
    yield Case("pad", "empty", pad((1, 1)), (draw(2, 0),))
    for mode in ("reflect", "replicate", "circular"):
        yield Case("continued", f"{mode} 1", pad((2, 1), mode), (draw(2, 3, 3),))
        yield Case("continued", f"{mode} 2", pad((1, 0, 2, 2), mode), (draw(2, 1, 3, 4),))
        yield Case("continued", f"{mode} 3", pad((1, 1, 0, 1, 1, 2), mode), (draw(1, 1, 3, 2, 3),))
        yield Case("continued", f"{mode} cropped", pad((-1, 2), mode), (draw(2, 4),))
    yield Case("continued", "replicate far", pad((5, 7), "replicate"), (draw(2, 3),))
    yield Case("continued", "empty", pad((1, 1), "reflect"), (draw(0, 3, 4),))


CASES = [*shapes(), *parts(), *rearranged(), *frames()]
