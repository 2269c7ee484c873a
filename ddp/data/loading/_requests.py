"""What the fork server is asked for."""

from __future__ import annotations

from typing import NamedTuple

from ddp.data.loading._script import Script

#: The module whose `main(parent)` is the server, and the descriptor of its line to the training process.
SERVER = "ddp.data.loading._cradle"
CONTROL = 3


class Prepare(NamedTuple):
    """What will be needed is imported. script: None if it is not needed; modules: as far as they can be."""

    script: Script | None
    modules: list[str]


class Start(NamedTuple):
    """A crew of workers is forked: one for each end of a line that comes along."""

    crew: int
    prepare: Prepare
    argv: list[str]
    folder: str


class End(NamedTuple):
    """A crew is not wanted any more."""

    crew: int


class Ask(NamedTuple):
    """What has become of a crew's worker? Answered by (pid, wait status), None for the status of a living one."""

    crew: int
    worker: int
