"""Placement of a rank on its host: local rank, GPU, cores, threads.

One rule for all engines: they bind nothing, and each agent gives its rank its GPU and cores before anything is imported
that would look. GPUs are counted from /proc and /dev, because loading CUDA takes a second. An agent imports this before
it forks the rank, so it must stay small.
"""

from __future__ import annotations

import os

from launcher.errors import StartError
from launcher.linux import read_text

TYPE_CHECKING = False  # not of `typing`, for the agent's sake
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from collectives.world import World

#: In an agent's environment: the rules by which it deals, as `rules` writes them.
PLACEMENT = "DDP_LAUNCH_PLACEMENT"
THREADS = "OMP_NUM_THREADS"


def rules(bind: bool, share: bool, nodes: Sequence[int] | None) -> str:
    """The rules by which agents place their ranks.

    bind: ranks are bound to cores; share: ranks may share GPUs
    nodes: how many ranks each host has, which are filled in order; None if only the engine knows

    >>> rules(bind=True, share=False, nodes=(4, 2))
    'bind nodes=4,2'
    """
    words = [word for word, holds in (("bind", bind), ("share", share)) if holds]
    if nodes is not None:
        words.append("nodes=" + ",".join(map(str, nodes)))
    return " ".join(words)


class Placement:
    """A rank's place on its host, and what it is given there.

    local_rank, local_size: among the ranks of its host; node: the host's number, None if unknown
    gpus: the GPU that it is given, as `CUDA_VISIBLE_DEVICES` names it; [] where there are none
    cores: to which it is bound, or None; threads: its share of the host's cores in numbers

    Raises: StartError if ranks would have to share a GPU and may not.
    """

    def __init__(self, rules: str, environ: Mapping[str, str], world: World) -> None:
        words = rules.split()
        self.local_rank, self.local_size, self.node = locate(world, environ, _nodes(words))
        self.gpus = assign_gpu(visible_gpus(environ), self.local_rank, self.local_size, "share" in words)
        allowed = os.sched_getaffinity(0)
        self.threads = max(1, len(allowed) // self.local_size)
        self.cores = None
        if "bind" in words:
            self.cores = split_cores(by_topology(allowed), self.local_rank, self.local_size)

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


def locate(world: World, environ: Mapping[str, str], nodes: Sequence[int] | None) -> tuple[int, int, int | None]:
    """A rank's local rank, its host's number of ranks, and its host's number.

    >>> locate(World("mpich", rank=5, size=6), {}, (4, 2))
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
            local_size = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]
    if local_rank is None or local_size is None:
        return world.rank, world.size, node
    return local_rank, local_size, node


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node.

    >>> tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    found = []
    for part in text.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        found += [int(tasks)] * int(times or 1)
    return found


def assign_gpu(gpus: Sequence[str], local_rank: int, local_size: int, share: bool) -> list[str]:
    """The rank's GPU: one each, or in turn where they may be shared.

    Raises: StartError if there are too few.
    """
    if gpus and local_size > len(gpus) and not share:
        number = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
        raise StartError(
            f"{local_size} ranks on {os.uname().nodename} would share {number}: start one a GPU (-n gpu), or share them"
            f" (--share-gpu), or hide them ({VISIBLE}=)"
        )
    return [gpus[local_rank % len(gpus)]] if gpus else []


def split_cores(cores: Sequence[int], index: int, parts: int) -> list[int]:
    """The rank's contiguous share, as equal as can be; one core in turn where there are more ranks than cores.

    >>> [split_cores([0, 1, 2, 3, 4], index, 2) for index in (0, 1)]
    [[0, 1, 2], [3, 4]]
    """
    if parts > len(cores):
        return [cores[index % len(cores)]]
    size, more = divmod(len(cores), parts)
    first = index * size + min(index, more)
    return list(cores[first : first + size + (index < more)])


def by_topology(cores: set[int]) -> list[int]:
    """Cores in the order of packages and, within, with the threads of one physical core side by side."""
    return sorted(cores, key=lambda core: (_topology(core, "physical_package_id"), _topology(core, "core_id"), core))


def _topology(core: int, name: str) -> int:
    return int(read_text(f"/sys/devices/system/cpu/cpu{core}/topology/{name}") or 0)


def _nodes(words: Sequence[str]) -> list[int] | None:
    for word in words:
        if word.startswith("nodes="):
            return [int(ranks) for ranks in word.removeprefix("nodes=").split(",")]
    return None


VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = "/proc/driver/nvidia/gpus"


def parse_visible_devices(asked: str | None, driver: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """The GPUs that CUDA would show, as `CUDA_VISIBLE_DEVICES` names them.

    asked: that variable, None if it is not set; driver: what its driver lists; nodes: what /dev holds

    >>> parse_visible_devices(None, ["0000:17:00.0", "0000:65:00.0"], ["null", "nvidia0", "nvidia1", "nvidiactl"])
    ['0', '1']
    >>> parse_visible_devices("2,GPU-8a5e", [], ["nvidia0", "nvidia1", "nvidia2"])
    ['2', 'GPU-8a5e']
    """
    there = sum(1 for name in nodes if name.startswith("nvidia") and name[6:].isdigit())
    if driver:
        # A container sees all GPUs that the driver has, and the nodes of those that it was given: perhaps of none.
        there = min(there, len(driver))
    if asked is None:
        return [str(number) for number in range(there)]
    names = []
    for name in asked.split(","):
        # CUDA stops at the first that is none: "-1", "", "NoDevFiles", a number too large.
        name = name.strip()
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < there):
            break
        names.append(name)
    return names if there else []


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process with this environment would see on this machine."""
    return parse_visible_devices(environ.get(VISIBLE), _names(DRIVER), _names("/dev"))


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks `-n gpu` means. Raises: UsageError if there is no GPU."""
    if found := visible_gpus(environ):
        return len(found)
    from launcher.errors import UsageError  # here, for the agent's sake

    if VISIBLE in environ:
        raise UsageError(f"-n gpu: {VISIBLE}={environ[VISIBLE]} leaves no GPU to be seen")
    raise UsageError("-n gpu: this machine has no GPU (no /dev/nvidia0)")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
