"""What the fork server is asked for.

A request is a packet of one byte, with descriptors: of memory that holds its pickle, and of what goes along with it.
"""

from __future__ import annotations

from typing import NamedTuple

from ddp.data.loading._script import Script
from ddp.data.loading._surroundings import Surroundings

#: The module whose `main(parent)` is the server, and the descriptor of its line to the training process.
SERVER = "ddp.data.loading._cradle"
CONTROL = 3


class Prepare(NamedTuple):
    """What will be needed is imported. script: None if it is not needed; modules: as far as they can be.

    around: what the server has around it from now on, and workers that are forked of it
    """

    script: Script | None
    modules: list[str]
    around: Surroundings


class Start(NamedTuple):
    """A crew of workers is forked: one for each end of a line that comes along."""

    crew: int
    prepare: Prepare


class End(NamedTuple):
    """A crew is not wanted any more."""

    crew: int


class Ask(NamedTuple):
    """What has become of a crew's worker? Answered by (pid, wait status), None for the status of a living one."""

    crew: int
    worker: int
