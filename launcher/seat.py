"""What a rank gets of its host: its place among the ranks there, its GPU, its share of the cores.

One rule for all engines: they bind nothing, and each keeper gives its rank what is due to it before anything is
imported that would look. A keeper loads this before it forks: it must stay small.
"""

from __future__ import annotations

import os

from launcher.devices import VISIBLE, look
from launcher.refusal import Refusal

TYPE_CHECKING = False  # not of `typing`, whose import would cost every keeper a tenth of its memory
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from collectives.world import World

#: In a keeper's environment: the rules by which it deals, as `rules` writes them.
SEAT = "DDP_LAUNCH_SEAT"
THREADS = "OMP_NUM_THREADS"
#: What NCCL reads: how much it says of itself, and the file that it writes that to.
NCCL, NCCL_FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"


def rules(bind: bool, share: bool, nodes: Sequence[int] | None, files: bool = False) -> str:
    """What keepers are told.

    bind: ranks are bound to cores; share: ranks may share GPUs
    nodes: how many ranks each host has, which are filled in order; None if only the engine knows
    files: the launcher keeps log files

    >>> rules(bind=True, share=False, nodes=(4, 2))
    'bind nodes=4,2'
    """
    told = {"bind": bind, "share": share, "files": files, "nodes=" + ",".join(map(str, nodes or ())): nodes is not None}
    return " ".join(word for word, said in told.items() if said)


class Seat:
    """A rank's place on its host, and what it is given there.

    local_rank, local_size: among the ranks of its host; node: the host's number, None if nobody knows
    gpus: the GPU that it is given, as `CUDA_VISIBLE_DEVICES` names it; [] where there are none
    cores: to which it is bound, or None; debug: what its libraries say of themselves goes to a log file
    threads: its share of the host's cores in numbers

    Raises: Refusal if ranks would have to share a GPU and may not.
    """

    def __init__(self, told: str, environ: Mapping[str, str], world: World) -> None:
        words = told.split()
        self.local_rank, self.local_size, self.node = place(world, environ, _nodes(words))
        self.gpus = deal(look(environ), self.local_rank, self.local_size, "share" in words)
        allowed = os.sched_getaffinity(0)
        self.threads = max(1, len(allowed) // self.local_size)
        self.cores = self._cores(allowed, "bind" in words, look(environ) if self.gpus else [])
        # Where the user has not said otherwise, NCCL writes among what the rank prints.
        self.debug = "files" in words and NCCL in environ and NCCL_FILE not in environ

    def _cores(self, allowed: set[int], bound: bool, gpus: Sequence[str]) -> list[int] | None:
        part, parts = self.local_rank, self.local_size
        if gpus:
            from launcher.nearness import cores_of, share  # here: most keepers stand beside no GPU

            near = [cores_of(gpus[rank % len(gpus)]) for rank in range(self.local_size)]
            found, at, of = share(near, allowed, self.local_rank, bound)
            if found:
                allowed, part, parts = found, at, of
                bound = True
        return cut(in_order(allowed), part, parts) if bound else None

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that the rank finds; the user's number of threads stays."""
        found = {"LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(self.local_size)}
        if self.node is not None:
            found |= {"NODE_RANK": str(self.node), "GROUP_RANK": str(self.node)}
        if self.gpus:
            found[VISIBLE] = ",".join(self.gpus)
        if THREADS not in environ:
            found[THREADS] = str(self.threads)
        return found


def place(world: World, environ: Mapping[str, str], nodes: Sequence[int] | None) -> tuple[int, int, int | None]:
    """A rank's local rank, its host's number of ranks, and its host's number, by whoever knows.

    >>> place(World("mpich", rank=5, size=6), {}, (4, 2))
    (1, 2, 1)
    """
    first = 0
    for number, ranks in enumerate(nodes or ()):
        if world.rank < first + ranks:
            return world.rank - first, ranks, number
        first += ranks
    node = None
    local_rank, local_size = world.local_rank, world.local_size
    # A batch script's own numbers are handed down to what it starts without srun.
    if environ.get("SLURM_PROCID") == str(world.rank) and environ.get("SLURM_STEP_NUM_TASKS") == str(world.size):
        node = int(environ["SLURM_NODEID"])
        if local_rank is None:
            local_rank = int(environ["SLURM_LOCALID"])
        if local_size is None:
            local_size = per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]
    if local_rank is None or local_size is None:
        return world.rank, world.size, node
    return local_rank, local_size, node


def per_node(text: str) -> list[int]:
    """The number of tasks on each node.

    >>> per_node("4(x2),1")
    [4, 4, 1]
    """
    found = []
    for part in text.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        found += [int(tasks)] * int(times or 1)
    return found


def deal(gpus: Sequence[str], local_rank: int, local_size: int, share: bool) -> list[str]:
    """The rank's GPU: one each, or in turn where they may be shared.

    Raises: Refusal if there are too few.
    """
    if gpus and local_size > len(gpus) and not share:
        number = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
        raise Refusal(
            f"{local_size} ranks on {os.uname().nodename} would share {number}: start one a GPU (-n gpu), or share them"
            f" (--share-gpu), or hide them ({VISIBLE}=)"
        )
    return [gpus[local_rank % len(gpus)]] if gpus else []


def cut(cores: Sequence[int], index: int, parts: int) -> list[int]:
    """The rank's contiguous share, as equal as can be; one core in turn where there are more ranks than cores.

    >>> [cut([0, 1, 2, 3, 4], index, 2) for index in (0, 1)]
    [[0, 1, 2], [3, 4]]
    """
    if parts > len(cores):
        return [cores[index % len(cores)]]
    size, more = divmod(len(cores), parts)
    first = index * size + min(index, more)
    return list(cores[first : first + size + (index < more)])


def in_order(cores: set[int]) -> list[int]:
    """Cores in the order of packages and, within, with the threads of one physical core side by side."""
    return sorted(cores, key=lambda core: (_topology(core, "physical_package_id"), _topology(core, "core_id"), core))


def _topology(core: int, name: str) -> int:
    try:
        with open(f"/sys/devices/system/cpu/cpu{core}/topology/{name}") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _nodes(words: Sequence[str]) -> list[int] | None:
    for word in words:
        if word.startswith("nodes="):
            return [int(ranks) for ranks in word.removeprefix("nodes=").split(",")]
    return None
