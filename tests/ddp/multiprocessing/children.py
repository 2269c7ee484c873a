"""What processes under test run; a new interpreter finds it by import."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import ddp
import ddp.multiprocessing as mp
from ddp import nn
from tests.ddp.data.samples import Dictlike
from tests.ddp.multiprocessing.counting import mappings


class Labelled(ddp.Tensor):
    """A user's class of tensors, with an attribute."""

    label: str


def labelled(text: str) -> Labelled:
    x = Labelled([1.0, 2.0])
    x.label = text
    return x


def exchange(requests: Any, results: Any, model: nn.Module, given: dict[str, Any]) -> None:
    """Changes all it can reach, and says what it has got."""
    x = requests.get()
    x += 1
    given["plain"].fill_(7)
    with ddp.no_grad():
        model[0].weight.fill_(3)
    model(ddp.ones(1, 2)).sum().backward()
    facts = {
        "mappings": mappings(),
        "tied": model[0].weight is model[1].weight,
        "requires_grad": model[0].weight.requires_grad,
        "shared": all(each.is_shared() for each in (x, *model.parameters(), given["plain"])),
        "grad shared": model[0].weight.grad.is_shared(),
        "label": given["label"].label,
        "kinds": [type(each).__name__ for each in (x, model[0].weight, given["label"])],
        "start method": mp.get_start_method(),
    }
    results.put((facts, x, model[0].weight, ddp.full((3,), 5.0)))
    results.put(ddp.full((100_000,), 6.0))  # read only after this process has ended


def echo(channel: Any) -> None:
    """Sends back what it receives, and the sum of it, until the other end closes."""
    while True:
        try:
            x = channel.recv()
        except (EOFError, ConnectionResetError):
            return
        channel.send((x, x.sum()))


def fill(index: int, x: ddp.Tensor) -> None:
    x[index] = index + 10


def fail_beside_a_sleeper(index: int, x: ddp.Tensor) -> None:
    x[index] = os.getpid()
    if index == 0:
        time.sleep(600)
    while not x[0]:
        time.sleep(0.01)
    raise KeyError("no such thing")


def end(index: int, way: str) -> None:
    if way == "raise":
        raise ValueError("a" * 100_000 + "the end")
    if way == "dictlike":
        raise Dictlike({})
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)


def wait_for_ever(index: int) -> None:
    os.write(1, b"started\n")  # in one piece: print writes the end of the line by itself where Python does not buffer
    time.sleep(600)
