"""Placement of a rank on its host: local rank, GPU, cores, threads.

Placement works alike with all engines: an engine binds no rank, and each agent assigns GPU and cores to its rank before
the rank imports a library that would look at them. GPUs are counted from /proc and /dev, because loading CUDA takes a
second. An agent imports this module before it forks the rank, so this module must stay small.
"""

from __future__ import annotations

import os

from launcher.errors import StartError, UsageError, plural
from launcher.linux import list_folder, read_text

TYPE_CHECKING = False  # Not from `typing`, whose import would cost every agent 0.3 to 0.5 MB.
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from collectives.world import World

#: Variable of an agent's environment: how it places its rank, as `rules` writes it.
PLACEMENT = "DDP_LAUNCH_PLACEMENT"
#: Variable of a rank's environment: the number of threads of a parallel computation.
THREADS = "OMP_NUM_THREADS"


def rules(bind: bool, share_gpu: bool, nodes: Sequence[int] | None) -> str:
    """How agents place their ranks, as a text for their environment.

    bind: ranks are bound to cores; share_gpu: several ranks may have the same GPU
    nodes: the number of ranks on each host, if hosts are filled in order; None if only the engine knows

    >>> rules(bind=True, share_gpu=False, nodes=(4, 2))
    'bind nodes=4,2'
    """
    words = []
    if bind:
        words.append("bind")
    if share_gpu:
        words.append("share")
    if nodes is not None:
        words.append("nodes=" + ",".join(map(str, nodes)))
    return " ".join(words)


class Placement:
    """A rank's numbers, GPU and cores on its host.

    local_rank: its number among the ranks of the host; local_size: number of these ranks
    node: the host's number; None if unknown
    gpus: the GPU that it uses, as `CUDA_VISIBLE_DEVICES` names it; [] if the host has none
    cores: those that it is bound to; None: it is not bound
    threads: number of threads that it may run: the cores that this process may use, divided by the host's ranks; at
        least 1

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
        """Variables for the rank's environment. Leaves out OMP_NUM_THREADS if `environ` has it."""
        variables = {"LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(self.local_size)}
        if self.node is not None:
            variables["NODE_RANK"] = variables["GROUP_RANK"] = str(self.node)
        if self.gpus:
            variables[VISIBLE] = ",".join(self.gpus)
        if THREADS not in environ:
            variables[THREADS] = str(self.threads)
        return variables


def locate(world: World, environ: Mapping[str, str], nodes: Sequence[int] | None) -> tuple[int, int, int | None]:
    """A rank's local rank, its host's number of ranks, and its host's number (None if unknown). nodes: as in `rules`

    If neither `nodes` nor the environment tells where ranks run, all count as ranks of one host.

    >>> locate(World("mpich", rank=5, size=6), {}, (4, 2))
    (1, 2, 1)
    """
    first = 0
    for number, ranks in enumerate(nodes or ()):
        if world.rank < first + ranks:
            return world.rank - first, ranks, number
        first += ranks
    node = None
    local_rank = world.local_rank
    local_size = world.local_size
    # Slurm's variables count only if they name this rank and size: they may have been inherited from the batch script.
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
    """Parses Slurm's number of tasks on each node.

    >>> tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    tasks = []
    for part in text.split(","):
        number, _, repeats = part.rstrip(")").partition("(x")
        tasks += [int(number)] * int(repeats or 1)
    return tasks


def assign_gpu(gpus: Sequence[str], local_rank: int, local_size: int, share_gpu: bool) -> list[str]:
    """The rank's GPU: the one whose index is its local rank, round-robin if ranks may share; [] if there are no GPUs.

    Raises: StartError if there are GPUs, but fewer than ranks on the host, and ranks may not share.
    """
    if gpus and local_size > len(gpus) and not share_gpu:
        raise StartError(
            f"{local_size} ranks on {os.uname().nodename} would share {plural(len(gpus), 'GPU')}: start one a GPU "
            f"(-n gpu), or share them (--share-gpu), or hide them ({VISIBLE}=)"
        )
    return [gpus[local_rank % len(gpus)]] if gpus else []


def split_cores(cores: Sequence[int], index: int, parts: int) -> list[int]:
    """The cores of part `index`. The parts are contiguous, of nearly equal size; or single cores if cores are too few.

    >>> [split_cores([0, 1, 2, 3, 4], index, 2) for index in (0, 1)]
    [[0, 1, 2], [3, 4]]
    """
    if parts > len(cores):
        return [cores[index % len(cores)]]
    size, remainder = divmod(len(cores), parts)
    first = index * size + min(index, remainder)
    return list(cores[first : first + size + (index < remainder)])


def by_topology(cores: set[int]) -> list[int]:
    """Sorts cores by package, then by physical core, so that the hardware threads of a physical core are neighbours."""
    return sorted(cores, key=lambda core: (_topology(core, "physical_package_id"), _topology(core, "core_id"), core))


def _topology(core: int, name: str) -> int:
    return int(read_text(f"/sys/devices/system/cpu/cpu{core}/topology/{name}") or 0)


def _nodes(words: Sequence[str]) -> list[int] | None:
    for word in words:
        if word.startswith("nodes="):
            return [int(ranks) for ranks in word.removeprefix("nodes=").split(",")]
    return None


#: Variable that limits the GPUs which CUDA shows to a process.
VISIBLE = "CUDA_VISIBLE_DEVICES"
# The driver's folder, with one entry for each GPU.
_DRIVER = "/proc/driver/nvidia/gpus"


def parse_visible_devices(variable: str | None, driver: Sequence[str], devices: Sequence[str]) -> list[str]:
    """The GPUs that CUDA would show, as `CUDA_VISIBLE_DEVICES` names them.

    variable: its value, None if it is not set; driver: the GPUs that the driver lists; devices: the names in /dev

    >>> parse_visible_devices(None, ["0000:17:00.0", "0000:65:00.0"], ["null", "nvidia0", "nvidia1", "nvidiactl"])
    ['0', '1']
    >>> parse_visible_devices("2,GPU-8a5e", [], ["nvidia0", "nvidia1", "nvidia2"])
    ['2', 'GPU-8a5e']
    """
    number = sum(1 for name in devices if name.startswith("nvidia") and name[6:].isdigit())
    if driver:
        # In a container the driver lists all GPUs of the machine, but /dev holds only those of the container.
        number = min(number, len(driver))
    if variable is None:
        return [str(index) for index in range(number)]
    names = []
    for name in variable.split(","):
        # CUDA stops at the first invalid name: "-1", "", "NoDevFiles", a number too large.
        name = name.strip()
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < number):
            break
        names.append(name)
    return names if number else []


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process with this environment would see on this machine."""
    return parse_visible_devices(environ.get(VISIBLE), list_folder(_DRIVER), list_folder("/dev"))


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that `-n gpu` starts. Raises: UsageError if there is no GPU."""
    if gpus := visible_gpus(environ):
        return len(gpus)
    if VISIBLE in environ:
        raise UsageError(f"-n gpu: {VISIBLE}={environ[VISIBLE]} leaves no GPU to be seen")
    raise UsageError("-n gpu: this machine has no GPU (no /dev/nvidia0)")
