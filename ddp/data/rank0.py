"""Lets one rank run before the others, for downloads and preprocessing: one rank does the work that all need.

The others do not wait in one long collective. Instead, in a `MonitoredSection`, a thread of each rank makes short
collectives. So no collective times out, however long the work takes, and the launcher sees that the job is alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import collectives
from collectives.monitored_section import MonitoredSection
from ddp.errors import PeerError


@contextlib.contextmanager
def rank0_first(comm: collectives.Communicator | None = None, per_node: bool = False) -> Iterator[None]:
    """Rank 0 runs the body while the others wait, however long that takes; then the others run it.

    comm: the ranks; None: `collectives.init()`
    per_node: the first rank of every node goes first, and the others of its node wait for it. For work on disks that
    only the ranks of a node share

        with ddp.data.rank0_first():
            folder = download()  # later ranks find it there

    Every rank must call this, like a collective. The body must make no collectives: the ranks run it at different
    times. The later ranks run the body, too, so let it look first whether there is anything left to do.

    Raises: PeerError on the ranks that wait, if the body failed on the rank that they wait for; they do not run it.
    PeerLeft or a related error if a rank has ended.
    """
    comm = collectives.init() if comm is None else comm
    apart = comm.split(comm.node) if per_node else comm.duplicate()
    assert apart is not None  # `split` returns None only without a color
    beat = MonitoredSection(apart)
    try:
        if apart.rank == 0:
            try:
                with beat:
                    yield
            except BaseException as error:
                # The error of the body says more than an error of the broadcast, which fails if a rank has left.
                with contextlib.suppress(collectives.CollectivesError):
                    if beat.failed:
                        apart.broadcast_object(f"rank {comm.rank}: {type(error).__name__}: {error}")
                raise
        else:
            with beat:
                pass
            if beat.failed:
                why = apart.broadcast_object(None)
                raise PeerError(f"rank0_first: the body failed on the rank that goes first, {why}")
            yield
    finally:
        apart.close()
